"""The logs that ``gpuguard explain`` and ``judge`` are given: files, folders, pipes, gzip, and files that grow.

Nothing is held in memory but one chunk; what cannot be read is an error with a reason, never half an answer.
"""

from __future__ import annotations

import gzip
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from .claims.observation import LogReading
from .diagnose.boot import Event
from .diagnose.classify import CHUNK
from .diagnose.intake import Intake
from .diagnose.signature import SignatureFile
from .diagnose.stream import Classifier

STDIN: Final = "-"
#: What is taken from a folder.
_ENDINGS: Final = (".log", ".txt", ".out", ".err", ".stdout", ".stderr")
_GZIP: Final = b"\x1f\x8b"
_LOOK: Final = 8192
#: A file with a larger share of these is no text.
_NOT_TEXT: Final = bytes(range(9)) + b"\x0e\x0f" + bytes(range(16, 27)) + b"\x1c\x1d\x1e\x1f"
_MOST: Final = 0.03
#: How often a file that is followed is looked at, and how long it is quiet before a failure counts as told.
POLL_S: Final = 0.2
SETTLE_S: Final = 0.5


class LogError(Exception):
    """A log cannot be read; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How logs are read: the engine (None: found out), its release, and the user's signatures."""

    engine: str | None = None
    version: str | None = None
    signatures: tuple[SignatureFile, ...] = ()

    def classifier(self) -> Classifier:
        """A fresh classifier."""
        return Classifier(self.engine, self.version, extra=self.signatures)


def expand(names: Sequence[str]) -> Iterator[str | LogError]:
    """The logs that the names stand for, in order: a folder is all logs in it, itself and below. Errors are yielded."""
    seen: set[str] = set()
    for name in names:
        if name != STDIN and os.path.isdir(name):
            inside = [
                str(path)
                for path in sorted(Path(name).rglob("*"))
                if path.is_file() and path.name.lower().removesuffix(".gz").endswith(_ENDINGS)
            ]
            if not inside:
                endings = ", ".join(_ENDINGS)
                yield LogError(f"{name}: no logs in this folder ({endings}, also with .gz)")
        else:
            inside = [name]
        for log in inside:
            if log not in seen:
                seen.add(log)
                yield log


def read(name: str, how: Reading) -> LogReading:
    """What a whole log says. Raises LogError."""
    classifier = how.classifier()
    intake = Intake(classifier)
    empty = True
    try:
        with _opened(name) as stream:
            while chunk := stream.read(CHUNK):
                if empty:
                    _check_text(name, chunk[:_LOOK])
                empty = False
                intake.feed(chunk)
    except EOFError:
        raise LogError(f"{name}: the gzip file is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise LogError(f"{name}: the gzip file is damaged: {error}") from None
    except OSError as error:
        raise LogError(f"{name}: {error.strerror or error}") from None
    if empty:
        raise LogError(f"{name}: the log is empty")
    intake.close()
    return classifier.reading()


def follow(name: str, how: Reading) -> Iterator[tuple[LogReading, list[Event]]]:
    """What a log says while it grows: a reading and what happened, whenever something did.

    Ends when the engine has failed and the log is quiet, or standard input ends. A file that is replaced or cut starts
    afresh. Raises LogError.
    """
    classifier = how.classifier()
    intake = Intake(classifier)
    quiet_since = time.monotonic()
    try:
        for chunk in _growing(name):
            if chunk is None:  # another file, or the same from its start
                classifier = how.classifier()
                intake = Intake(classifier)
                continue
            events = intake.feed(chunk) if chunk else []
            if events:
                yield classifier.reading(), events
            if chunk:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since >= SETTLE_S and classifier.reading().fatal:
                return
        events = intake.close()
        yield classifier.reading(), events
    except OSError as error:
        raise LogError(f"{name}: {error.strerror or error}") from None


def _growing(name: str) -> Iterator[bytes | None]:
    """Chunks as they come, b"" when there is nothing new, None when the file begins anew."""
    if name == STDIN:
        descriptor = sys.stdin.fileno()
        while chunk := os.read(descriptor, CHUNK):
            yield chunk
        return
    stream: BinaryIO = open(name, "rb")  # noqa: SIM115 (it is replaced when the file is)
    try:
        while True:
            chunk = stream.read(CHUNK)
            yield chunk
            if chunk:
                continue
            time.sleep(POLL_S)
            replaced = _replaced(name, stream)
            if replaced is not None:
                yield stream.read(CHUNK)
                stream.close()
                stream = replaced
                yield None
            elif os.fstat(stream.fileno()).st_size < stream.tell():
                stream.seek(0)
                yield None
    finally:
        stream.close()


def _replaced(name: str, stream: BinaryIO) -> BinaryIO | None:
    try:
        if os.path.samestat(os.stat(name), os.fstat(stream.fileno())):
            return None
        return open(name, "rb")
    except FileNotFoundError:
        return None  # between the rotation and the new file


def _opened(name: str) -> BinaryIO:
    raw = open(sys.stdin.fileno() if name == STDIN else name, "rb", closefd=name != STDIN)  # noqa: SIM115
    return cast("BinaryIO", gzip.open(raw)) if raw.peek(2)[:2] == _GZIP else raw


def _check_text(name: str, head: bytes) -> None:
    foreign = len(head) - len(head.translate(None, _NOT_TEXT))
    if foreign > len(head) * _MOST:
        raise LogError(f"{name}: this is binary data, not a log")
