"""``gpuguard reference``: the log-probs of fixed texts by a running server, for ``works`` to compare other stacks with.

It must not replace a reference unasked: one made by a broken stack would call the sound ones broken.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("url")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the reference.",
)
@click.option("--model", metavar="NAME", help="The model to ask for, where the server has several (/v1 only).")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Texts instead of the built-in ones: JSON Lines of {"text": "…"}.',
)
@click.option("--api-key-env", metavar="NAME", help="The environment variable that holds the server's API key.")
@click.option("--timeout", type=click.FloatRange(1.0), default=300.0, show_default=True, help="Seconds for everything.")
@click.option("--force", is_flag=True, help="Replace a file that is already there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/measuring.md.")
def reference(
    url: str,
    output: Path,
    model: str | None,
    prompts: Path | None,
    api_key_env: str | None,
    timeout: float,
    force: bool,
    as_json: bool,
) -> None:
    """Write what the server at URL thinks of fixed texts, to compare other stacks with: works(level="full").

    Make it with a stack that you trust, of the same model. Exits 0 when it is written, 2 when it cannot be made.
    """
    from .claims.account import printable
    from .measure.ask import Asker
    from .measure.prompts import REFERENCE
    from .measure.reference import BadReference, make, write

    if not _is_url(url):
        raise click.UsageError(f"URL is of the form http://127.0.0.1:30000, not {url!r}")
    if output.exists() and not force:
        raise click.UsageError(f"{output} is already there; --force replaces it")
    if not output.parent.is_dir():
        raise click.UsageError(f"{output} cannot be written: there is no folder {output.parent}")
    if prompts is not None and output.exists() and output.samefile(prompts):
        raise click.UsageError(f"{output} holds the prompts; write the reference to another file")
    headers = {}
    if api_key_env is not None:
        key = os.environ.get(api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise click.UsageError(f"--api-key-env {api_key_env}: that environment variable holds no key")
        headers["Authorization"] = f"Bearer {key}"
    texts = _texts(prompts) if prompts is not None else REFERENCE
    try:
        with Asker(url.rstrip("/"), headers, model=model, deadline_s=timeout) as asker:
            made = make(asker, texts)
        write(made, output)
    except BadReference as error:
        raise click.UsageError(printable(str(error))) from None
    data: dict[str, Any] = {
        "file": str(output),
        "model": made.model,
        "engine": made.engine,
        "engine_version": made.engine_version,
        "made": made.made,
        "passages": len(made.passages),
        "tokens": made.tokens,
        "mean_logprob": round(made.mean_logprob, 4),
    }
    if as_json:
        click.echo(json.dumps(data))
        return
    stack = " ".join(filter(None, (made.engine, made.engine_version))) or "engine unknown"
    click.echo(printable(f"{output}: {made.tokens} tokens of {len(made.passages)} texts, {made.model}, {stack}"))
    click.echo(f"mean log-prob {made.mean_logprob:.3f} nats per token (about -2 for a trained model that is sound)")


def _is_url(text: str) -> bool:
    import httpx

    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def _texts(path: Path) -> tuple[str, ...]:
    """The texts of a JSON Lines file. Raises click.UsageError with file and line."""
    from .measure.prompts import is_sendable

    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path}: cannot be read: {error}") from None
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"{path}:{number}: is no JSON: {error}") from None
        text = said.get("text") if isinstance(said, dict) and said.keys() == {"text"} else None
        if not isinstance(text, str) or not text.strip():
            raise click.UsageError(f'{path}:{number}: a line is {{"text": "…"}}, with a text that is not empty')
        if not is_sendable(text):
            raise click.UsageError(f"{path}:{number}: the text has half of a surrogate pair, which cannot be sent")
        texts.append(text)
    if not texts:
        raise click.UsageError(f"{path}: there is no text in it")
    return tuple(texts)
