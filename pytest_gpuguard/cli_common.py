"""What commands that read the ledger share: where it is, and how its errors end a command. It must never write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from .ledger.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])

#: Where a run of pytest leaves it.
DEFAULT = Path(".gpuguard") / "ledger.sqlite"


def ledger_option(command: Command) -> Command:
    """``--ledger URL``."""
    return click.option(
        "--ledger",
        "url",
        metavar="URL",
        help="The ledger: a SQLite file, sqlite:///FILE or postgresql://…  [default: .gpuguard/ledger.sqlite here or "
        "in the nearest folder above]",
    )(command)


def json_option(command: Command) -> Command:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="JSON, with the keys of docs/reports.md.")(command)


def output_option(command: Command) -> Command:
    """``-o FILE``."""
    return click.option(
        "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write there, not to standard output."
    )(command)


@contextmanager
def reading(url: str | None) -> Iterator[Store]:
    """The ledger, which must be there. What is wrong with it ends the command with status 2 and one line."""
    from .ledger.errors import LedgerError
    from .ledger.store import open_ledger

    try:
        with open_ledger(_existing(url)) as store:
            yield store
    except LedgerError as error:
        fail(str(error))


def fail(text: str) -> NoReturn:
    """End the command: bad input."""
    from .claims.account import printable

    click.echo(f"Error: {printable(text)}", err=True)
    raise SystemExit(2)


def _existing(url: str | None) -> str:
    if url is None:
        here = Path.cwd()
        found = next((one / DEFAULT for one in (here, *here.parents) if (one / DEFAULT).is_file()), None)
        if found is None:
            fail(f"there is no ledger here ({DEFAULT}): run pytest first, or name one with --ledger")
        return str(found)
    file = Path(url.removeprefix("sqlite:///"))
    if "://" not in url.removeprefix("sqlite:///") and not file.exists():
        fail(f"there is no ledger {file}: a run of pytest makes one, gpuguard ledger import too")
    return url


def told(text: str, output: Path | None) -> None:
    """To standard output, or whole and at once into a file."""
    if output is None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    scratch = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(output)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        fail(f"{output} cannot be written: {error.strerror}")
