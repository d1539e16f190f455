"""``gpuguard fetch``: download the models of a ``models.toml``, and images, before any claim runs: no boot does.

It must never run inside a lease: servers get an offline hub, and with that set this command refuses too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from .facts.models import (
    ModelsFileError,
    hub_cache,
    is_hub_id,
    missing_weights,
    newest_snapshot,
    read_models,
)

#: What a boot with ``--load-format dummy`` does without.
WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
_INSTALL: Final = "pip install huggingface_hub"
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_CAUSES: Final = {
    "RepositoryNotFoundError": "the hub has no such model, or it is private and HF_TOKEN may not see it",
    "GatedRepoError": "its owner must grant access first: ask on its page, then set HF_TOKEN",
    "RevisionNotFoundError": "the hub has no such revision of it",
}
_MODELS: Final = ("models.toml", "suites/*/models.toml")


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: its name, the folder or hub id that it stands for, and what is there. ``size`` in bytes, or None.

    ``state`` is "there", "incomplete" (some of its files are) or "missing"; ``note`` says where, or what to do.
    """

    name: str
    target: str
    state: str
    note: str
    size: int | None = None

    @property
    def local(self) -> bool:
        """Whether it is a folder, which nobody can download."""
        return not is_hub_id(self.target)

    def line(self, width: int) -> str:
        """``kimi-k2.5  missing     moonshotai/Kimi-K2.5 (595.2 GB)``."""
        size = f" ({_size(self.size)})" if self.size is not None else ""
        return f"{self.name:<{width}}  {self.state:<10}  {self.target}{size}{': ' + self.note if self.note else ''}"


@click.command()
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option(
    "--models",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The models.toml that names stand in (default: models.toml here, else the one in suites/*/).",
)
@click.option("--list", "only_list", is_flag=True, help="Say what is there and what is missing; download nothing.")
@click.option(
    "--stack",
    "stacks",
    multiple=True,
    metavar="NAME=docker:IMAGE",
    help="Pull the image of this stack, or of podman:IMAGE; repeatable. No models then, unless NAMES are given.",
)
@click.option("--without-weights", is_flag=True, help="Config and tokenizer only: enough for --load-format dummy.")
def fetch(
    names: tuple[str, ...], file: Path | None, only_list: bool, without_weights: bool, stacks: tuple[str, ...]
) -> None:
    """Download models beforehand, into the hub's cache. What is there already is not downloaded again.

    NAMES are names of the models.toml, or hub ids (org/name); without any, all models of the file. Exits 0 when all of
    them are there, 1 when one is missing or could not be downloaded, 2 on a mistake in what was asked.
    """
    lacking = False
    if stacks:
        from .containers.pull import fetch_images

        lacking = not fetch_images(stacks, only_list)
    if stacks and not names and file is None:
        raise SystemExit(1 if lacking else 0)
    wanted = _wanted(names, file)
    cache = hub_cache(os.environ)
    entries = [look(name, target, cache, without_weights) for name, target in wanted.items()]
    width = max(map(len, wanted))
    if only_list:
        absent = [entry for entry in entries if entry.state != "there"]
        sizes = _sizes([entry.target for entry in absent if not entry.local], without_weights)
        for entry in entries:
            size = entry.size if entry.state == "there" else sizes.get(entry.target)
            click.echo(Entry(entry.name, entry.target, entry.state, entry.note, size).line(width))
        raise SystemExit(1 if absent or lacking else 0)
    hub = None
    failed = False
    for entry in entries:
        if entry.state == "there" or entry.local:
            failed |= entry.state != "there"
            click.echo(entry.line(width))
            continue
        hub = hub or _hub()
        failed |= not _download(hub, entry, width, cache, without_weights)
    if failed or lacking:
        raise SystemExit(1)


def _wanted(names: Sequence[str], file: Path | None) -> dict[str, str]:
    """Name → folder or hub id of what is asked for. Raises click.UsageError."""
    known: Mapping[str, str] = {}
    needed = file is not None or not names or not all(map(is_hub_id, names))
    found_file = file or _find_file(needed)
    if found_file is not None:
        try:
            known = read_models(found_file)
        except ModelsFileError as error:
            if needed:  # hub ids say by themselves what they are
                raise click.UsageError(str(error)) from None
    unknown = [name for name in names if name not in known and not is_hub_id(name)]
    if unknown:
        raise click.UsageError(f"{', '.join(unknown)}: not in the models.toml, which has {', '.join(sorted(known))}")
    found = {name: known.get(name, name) for name in names} or dict(known)
    if not found:
        raise click.UsageError("the models.toml names no model")
    return found


def _find_file(needed: bool) -> Path | None:
    for pattern in _MODELS:
        found = sorted(Path.cwd().glob(pattern))
        if len(found) == 1:
            return found[0]
        if found and needed:
            names = ", ".join(str(one.relative_to(Path.cwd())) for one in found)
            raise click.UsageError(f"several files name models ({names}): say which with --models FILE")
    if not needed:
        return None
    raise click.UsageError(
        f"no models.toml here ({' or '.join(_MODELS)}): say where with --models FILE, or give hub ids"
    )


def look(name: str, target: str, cache: Path, without_weights: bool = False) -> Entry:
    """What is on this machine of one model. Reads small files only."""
    if not is_hub_id(target):
        folder = Path(target)
        if not (folder / "config.json").is_file():
            note = "has no config.json" if folder.is_dir() else "no such folder; put it there, or write a hub id"
            return Entry(name, target, "missing", note)
    else:
        found = newest_snapshot(target, cache)
        if found is None:
            return Entry(name, target, "missing", "")
        folder = found
    absent, files = missing_weights(folder)
    if absent and not without_weights:
        return Entry(name, target, "incomplete", f"{absent} of {files} weight files are missing")
    if not (files or without_weights or any(one.is_file() for kind in WEIGHTS for one in folder.glob(kind))):
        return Entry(name, target, "incomplete", "no weights")
    return Entry(name, target, "there", "", _bytes(folder))


def _download(hub: Any, entry: Entry, width: int, cache: Path, without_weights: bool) -> bool:
    """One model into the cache; whether it is there now. What went wrong is said in one line."""
    click.echo(f"{entry.name:<{width}}  fetching    {entry.target}")
    try:
        hub.snapshot_download(
            entry.target, cache_dir=str(cache), ignore_patterns=list(WEIGHTS) if without_weights else None
        )
    except KeyboardInterrupt:
        raise
    except Exception as error:  # the hub's own errors derive from several bases, and one model must not stop the others
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        said = _CAUSES.get(type(error).__name__, first)
        click.echo(Entry(entry.name, entry.target, "failed", said).line(width), err=True)
        return False
    after = look(entry.name, entry.target, cache, without_weights)
    click.echo(after.line(width))
    return after.state == "there"


def _hub() -> Any:
    for name in _OFFLINE:
        if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            raise click.UsageError(
                f"{name} is set, as it is for every server of a claim: nothing is downloaded in a lease; "
                f"run this before the tests, without it"
            )
    try:
        import huggingface_hub
    except ImportError:
        raise click.UsageError(f"huggingface_hub is not installed here, and it does the download: {_INSTALL}") from None
    return huggingface_hub


def _sizes(targets: Sequence[str], without_weights: bool) -> dict[str, int]:
    """Bytes of models on the hub, of those that it tells; nothing without huggingface_hub or a network."""
    found: dict[str, int] = {}
    if not targets:
        return found
    try:
        hub = _hub()
    except click.UsageError:
        return found
    for target in targets:
        try:
            told = hub.HfApi().model_info(target, files_metadata=True, timeout=10.0)
        except Exception:  # as above: whatever keeps the hub from telling, the size is unknown
            continue
        files = [one for one in told.siblings or () if not (without_weights and _is_weight(one.rfilename))]
        if files and all(one.size is not None for one in files):
            found[target] = sum(one.size for one in files)
    return found


def _is_weight(name: str) -> bool:
    return Path(name).suffix in {Path(pattern).suffix for pattern in WEIGHTS}


def _bytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def _size(number: int) -> str:
    """Decimal units, as the hub shows them."""
    value = float(number)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
