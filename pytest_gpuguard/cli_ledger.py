"""``gpuguard ledger``: runs out of one ledger and into another, and what claims are called now.

It must never change a verdict that is there.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from .cli_common import DEFAULT, fail, json_option, ledger_option, output_option, reading, say, writing


@click.group()
def ledger() -> None:
    """Move what was verified between machines."""


@ledger.command("export")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@ledger_option
@output_option
def export_(runs: tuple[str, ...], url: str | None, output: Path | None) -> None:
    """Write runs as JSON Lines: all of them, or those that are named (an id, its beginning, last, last~1)."""
    from .ledger.lines import export

    with reading(url) as store:
        for name in runs:
            store.run(name)  # an unknown one is told before anything is written
        with writing(output) as out:
            export(store, out, runs or None)


def _import(url: str | None, files: tuple[Path, ...], as_json: bool) -> None:
    from .claims.account import printable
    from .ledger.errors import LedgerError
    from .ledger.lines import import_lines
    from .ledger.store import open_ledger

    place = url or str(Path.cwd() / DEFAULT)
    broken = 0
    try:
        with open_ledger(place) as store:
            for file in files:
                try:
                    with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as lines:
                        found = import_lines(store, lines)
                except OSError as error:
                    fail(f"{file} cannot be read: {error.strerror}")
                broken += len(found.problems)
                if as_json:
                    problems = [{"line": line, "problem": text} for line, text in found.problems]
                    said = {"file": str(file), "runs": found.runs, "judgements": found.records, "problems": problems}
                    say(json.dumps(said))
                    continue
                say(printable(f"{file}: {found.runs} runs, {found.records} judgements"))
                for line, text in found.problems:
                    click.echo(f"{file}:{line}: {printable(text)}", err=True)
    except LedgerError as error:
        fail(str(error))
    if broken:
        raise SystemExit(1)


@ledger.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@ledger_option
@json_option
def import_(files: tuple[Path, ...], url: str | None, as_json: bool) -> None:
    """Take in what export or a run without its ledger wrote (- is standard input). Twice is once.

    Exits 1 when a line could not be taken; the others were.
    """
    _import(url, files, as_json)


@ledger.command()
@click.argument("others", nargs=-1, required=True, metavar="LEDGER...")
@ledger_option
def merge(others: tuple[str, ...], url: str | None) -> None:
    """Take in other ledgers (files or URLs), whole. Twice is once."""
    import tempfile

    from .claims.account import printable
    from .ledger.errors import LedgerError
    from .ledger.lines import export, import_lines
    from .ledger.store import open_ledger

    for other in others:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as text:  # a ledger may be larger than memory
            with reading(other) as store:
                export(store, text)
                name = store.url
            text.seek(0)
            try:
                with open_ledger(url or str(Path.cwd() / DEFAULT)) as store:
                    found = import_lines(store, text)
                    say(printable(f"{store.url}: {found.runs} runs, {found.records} judgements of {name}"))
            except LedgerError as error:
                fail(str(error))


@ledger.command()
@click.argument("old", required=False)
@click.argument("new", required=False)
@ledger_option
def alias(old: str | None, new: str | None, url: str | None) -> None:
    """Say that claim OLD is called NEW now, so that its history follows; without names, list them."""
    from .claims.account import printable

    with reading(url) as store:
        if old is None:
            for before, now in sorted(store.aliases().items()):
                say(printable(f"{before} -> {now}"))
            return
        if new is None:
            raise click.UsageError("NEW is missing: gpuguard ledger alias OLD NEW")
        if not store.history(old):
            fail(f"the ledger has no claim {old!r}: gpuguard history lists them")
        store.alias(old, new)
        say(printable(f"{old} is called {new} now"))
