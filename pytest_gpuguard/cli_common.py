"""What commands that read the ledger share: where it is, and how its errors end a command. It must never write."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from .ledger.answers import Answers
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


@contextmanager
def answering(url: str | None) -> Iterator[Answers]:
    """As ``reading``, without SQLAlchemy where that can be: for commands that write nothing."""
    from .ledger.errors import LedgerError
    from .ledger.file import answers

    try:
        with answers(_existing(url)) as ledger:
            yield ledger
    except LedgerError as error:
        fail(str(error))


def fail(text: str) -> NoReturn:
    """End the command: bad input."""
    from .claims.account import printable

    click.echo(f"Error: {printable(text)}", err=True)
    raise SystemExit(2)


def _existing(url: str | None) -> str:
    try:
        if url is None:
            here = Path.cwd()
            found = next((one / DEFAULT for one in (here, *here.parents) if (one / DEFAULT).is_file()), None)
            if found is None:
                fail(f"there is no ledger here ({DEFAULT}): run pytest first, or name one with --ledger")
            return str(found)
        file = Path(os.path.expanduser(url.removeprefix("sqlite:///")))
        if "://" not in url.removeprefix("sqlite:///") and not file.exists():
            fail(f"there is no ledger {file}: a run of pytest makes one, gpuguard ledger import too")
        return url
    except OSError as error:
        named = f"the ledger {url}" if url is not None else f"{DEFAULT} here and above"
        fail(f"{named} cannot be looked for ({error.strerror}): give this user the right to, or name another --ledger")


def say(text: str) -> None:
    """A line, or several, to standard output. One that cannot be written is bad input, and no answer of the command."""
    with _whole(None) as out:
        out.write(text if text.endswith("\n") else text + "\n")


def told(text: str, output: Path | None) -> None:
    """To standard output, or whole and at once into a file."""
    with writing(output) as out:
        out.write(text if text.endswith("\n") else text + "\n")


@contextmanager
def writing(output: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a file that appears whole and at once; what is written a piece at a time is never all in
    memory. What cannot be written ends the command with status 2 and one line.
    """
    # A device or a pipe cannot be replaced by a file: as root that would destroy /dev/null.
    with _whole(output) if output is None or (output.exists() and not output.is_file()) else _replaced(output) as out:
        yield out


@contextmanager
def _whole(output: Path | None) -> Iterator[IO[str]]:
    try:
        if output is not None:
            with output.open("w", encoding="utf-8", errors="backslashreplace") as out:
                yield out
            return
        if sys.stdout is None:
            fail("standard output is closed: give it, or write to a file with -o")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # nobody reads on: click ends the command in silence
    except OSError as error:
        if output is None:
            # What is still in the buffer would be tried again at the end of the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"{output or 'standard output'} cannot be written: {error.strerror}")


@contextmanager
def _replaced(output: Path) -> Iterator[IO[str]]:
    scratch = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
        scratch.replace(output)
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}")
    finally:
        scratch.unlink(missing_ok=True)
