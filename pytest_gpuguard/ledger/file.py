"""A ledger in a SQLite file, read through the standard library alone. It must never change what the file holds.

SQLAlchemy takes longer to import than a claim's history takes to read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from . import reading, rows
from .answers import Answers
from .errors import LedgerError

__all__ = ["BUSY_S", "FileAnswers", "answers", "cause", "path_in"]

#: Seconds that one waits for others.
BUSY_S: Final = 60

#: What SQLite says → what it means, and what helps.
_MEANINGS: Final = (
    ("readonly", "may not be written: give this user the right to write the file and its folder, or name another"),
    ("unable to open", "cannot be opened: the folder must exist, and this user must be allowed to write in it"),
    ("disk is full", "cannot be written, because the disk is full: make room there"),
    ("disk i/o", "cannot be written (full disk, quota, limit on file sizes, or a broken disk): make room there"),
    ("not a database", "is a file, but no SQLite database: name another file, or move this one away"),
    ("malformed", "is damaged: restore it from a copy, or `sqlite3 FILE .recover` what is left of it"),
    ("locked", f"has been held by another process for {BUSY_S} s: see who holds it (`fuser FILE`), and try again"),
)


def answers(url: str, make: bool = True) -> Answers:
    """The ledger at ``url``, to be read; spelt as for ``store.open_ledger``, which is asked for all but a file as this
    version leaves it, and told whether it may ``make`` one. Raises LedgerError as that does.
    """
    path = path_in(url)
    found = _opened(Path(path)) if path is not None else None
    if found is not None:
        return found
    from .store import open_ledger

    return open_ledger(url, make)


def path_in(url: str) -> str | None:
    """The absolute path of a file's URL, or of a plain path; None for another URL. Raises LedgerError."""
    scheme, split, rest = url.partition("://")
    if split and scheme != "sqlite":
        return None
    path = rest.removeprefix("/") if split else url
    if not path or path == ":memory:" or "\0" in path:
        raise LedgerError("a ledger must be a file, so that it is still there tomorrow: give its path")
    return os.path.abspath(os.path.expanduser(path))


def cause(shown: str, said: str) -> str:
    """What SQLite says against the file ``shown``, as a person needs it."""
    for needle, meaning in _MEANINGS:
        if needle in said.lower():
            return f"the ledger {shown} {meaning} ({said})"
    return f"the ledger {shown} cannot be read or written ({said})"


def _opened(path: Path) -> FileAnswers | None:
    """None for what has to be made, moved forward, told about or opened in another way first."""
    if not os.path.isfile(path) or not all(os.access(one, os.R_OK | os.W_OK) for one in (path, path.parent)):
        return None  # SQLite keeps files beside one that it reads
    try:
        # Without waiting for one that is locked: who opens it in another way does.
        connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=0, isolation_level=None)
    except sqlite3.Error:
        return None
    found = FileAnswers(str(path), connection)
    try:
        with found._asking() as ask:
            as_left = reading.version(ask) == str(rows.VERSION) and ask("PRAGMA journal_mode")[0][0] == "wal"
    except LedgerError:
        as_left = False
    if as_left:
        connection.execute(f"PRAGMA busy_timeout={BUSY_S * 1000}")
        return found
    found.close()
    return None


class FileAnswers(Answers):
    """Over one connection, until it is closed."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        super().__init__()
        self._path = path
        self._connection = connection

    @property
    def url(self) -> str:
        """Its path."""
        return self._path

    def close(self) -> None:
        """It answers no more."""
        self._connection.close()

    @contextmanager
    def _asking(self) -> Iterator[reading.Ask]:
        try:
            self._connection.execute("BEGIN")
            try:
                yield self._ask
            finally:
                self._connection.rollback()
        except sqlite3.Error as error:
            raise LedgerError(cause(self._path, " ".join(str(error).split())[:500])) from None

    def _ask(self, statement: str, given: Mapping[str, Any] | None = None, /) -> Sequence[Sequence[Any]]:
        return self._connection.execute(statement, given or {}).fetchall()
