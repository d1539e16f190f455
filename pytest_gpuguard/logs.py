"""The logs that ``gpuguard explain`` and ``judge`` are given: files, folders, pipes, gzip, and files that grow.

Nothing is held in memory but one chunk; what cannot be read is an error with a reason, never half an answer.
"""

from __future__ import annotations

import codecs
import gzip
import os
import select
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
#: How a text begins that is not UTF-8, as PowerShell writes it; the longer one first.
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
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
        inside = _inside(name) if name != STDIN and os.path.isdir(name) else [name]
        for log in inside:
            if isinstance(log, LogError):
                yield log
            elif log not in seen:
                seen.add(log)
                yield log


def _inside(folder: str) -> list[str | LogError]:
    """The logs in a folder, sorted, then what could not be looked into; a pipe or a socket is no log."""
    logs: list[str] = []
    failed: list[OSError] = []
    for where, _, files in os.walk(folder, onerror=failed.append):
        for file in files:
            path = os.path.join(where, file)
            if file.lower().removesuffix(".gz").endswith(_ENDINGS) and _may_be_read(path):
                logs.append(path)
    errors = [LogError(f"{error.filename}: {error.strerror or error}") for error in failed]
    if not logs and not errors:
        errors = [LogError(f"{folder}: no logs in this folder ({', '.join(_ENDINGS)}, also with .gz)")]
    return [*sorted(logs, key=lambda path: path.split(os.sep)), *errors]


def _may_be_read(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True  # reading it will say why


def read(name: str, how: Reading) -> LogReading:
    """What a whole log says. Raises LogError."""
    classifier = how.classifier()
    intake = Intake(classifier)
    text = _Text(name)
    try:
        with _opened(name) as stream:
            while chunk := stream.read(CHUNK):
                intake.feed(text.feed(chunk))
    except EOFError:
        raise LogError(f"{name}: the gzip file is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise LogError(f"{name}: the gzip file is damaged: {error}") from None
    except OSError as error:
        raise LogError(f"{name}: {error.strerror or error}") from None
    if text.empty:
        raise LogError(f"{name}: the log is empty")
    intake.close()
    return classifier.reading()


class Follower:
    """A log that is read while it grows; iterate over it for what happened, ask it at any time for its reading.

    It ends when the engine has failed and the log is quiet, or standard input ends. A file that is replaced or cut
    starts afresh, unless the engine had failed. Iterating raises LogError.
    """

    def __init__(self, name: str, how: Reading) -> None:
        self._name = name
        self._how = how
        self._begin()

    def _begin(self) -> None:
        self._classifier = self._how.classifier()
        self._intake = Intake(self._classifier)
        self._failed = False
        self._text = _Text(self._name)

    def __iter__(self) -> Iterator[list[Event]]:
        quiet_since = time.monotonic()
        try:
            for chunk in _growing(self._name):
                if chunk is None:  # another file, or the same from its start
                    if self._failed:
                        return
                    self._begin()
                    continue
                if self._text.empty and chunk.startswith(_GZIP):
                    raise LogError(f"{self._name}: a gzip file does not grow line by line: explain it without --follow")
                chunk = self._text.feed(chunk)
                if chunk:
                    quiet_since = time.monotonic()
                    events = self._intake.feed(chunk)
                    self._failed = self._failed or any(event.kind == "fatal" for event in events)
                    if events:
                        yield events
                elif self._failed and time.monotonic() - quiet_since >= SETTLE_S:
                    return
        except OSError as error:
            raise LogError(f"{self._name}: {error.strerror or error}") from None
        if self._text.empty:
            raise LogError(f"{self._name}: the log is empty")

    def reading(self) -> LogReading:
        """What the log says so far."""
        return self._classifier.reading()

    def close(self) -> LogReading:
        """What it says if nothing more comes: as ``read`` of the same lines."""
        self._intake.close()
        return self._classifier.reading()


def _growing(name: str) -> Iterator[bytes | None]:
    """Chunks as they come, b"" when there is nothing new, None when the file begins anew."""
    if name == STDIN:
        yield from _piped()
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
                while rest := stream.read(CHUNK):
                    yield rest
                stream.close()
                stream = replaced
                yield None
            elif os.fstat(stream.fileno()).st_size < stream.tell():
                stream.seek(0)
                yield None
    finally:
        stream.close()


def _piped() -> Iterator[bytes]:
    descriptor = _stdin()
    while True:
        if not select.select([descriptor], [], [], POLL_S)[0]:
            yield b""
        elif chunk := os.read(descriptor, CHUNK):
            yield chunk
        else:
            return


def _replaced(name: str, stream: BinaryIO) -> BinaryIO | None:
    try:
        if os.path.samestat(os.stat(name), os.fstat(stream.fileno())):
            return None
        return open(name, "rb")
    except FileNotFoundError:
        return None  # between the rotation and the new file


def _stdin() -> int:
    if sys.stdin is None:
        raise LogError(f"{STDIN}: standard input is closed")
    return sys.stdin.fileno()


def _opened(name: str) -> BinaryIO:
    raw = open(_stdin() if name == STDIN else name, "rb", closefd=name != STDIN)  # noqa: SIM115
    return cast("BinaryIO", gzip.open(raw)) if raw.peek(2)[:2] == _GZIP else raw


class _Text:
    """Checks that the bytes of a log are text, and turns UTF-16 and UTF-32 into UTF-8 where a mark says so."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._decoder: codecs.IncrementalDecoder | None = None
        self._held = b""
        self._marked = False
        #: Nothing but a hole so far.
        self.empty = True

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes as UTF-8. Raises LogError where they are no text."""
        if not self._marked:
            chunk = self._held + chunk
            # The beginning of a mark waits for the rest; UTF-16 and UTF-32 differ only after two bytes.
            if chunk and any(mark.startswith(chunk) for mark, _ in _MARKS if len(chunk) < len(mark)):
                self._held = chunk
                return b""
            self._held, self._marked = b"", bool(chunk)
            encoding = next((known for mark, known in _MARKS if chunk.startswith(mark)), None)
            if encoding is not None:
                self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        if self._decoder is not None:
            chunk = self._decoder.decode(chunk).encode("utf-8", errors="replace")
        if self.empty:
            chunk = self._begun(chunk)
            self.empty = not chunk
        return chunk

    def _begun(self, chunk: bytes) -> bytes:
        """A log that was cut while it was written begins with a hole of NULs."""
        chunk = chunk.lstrip(b"\0")
        head = chunk[:_LOOK]
        foreign = len(head) - len(head.translate(None, _NOT_TEXT))
        if foreign > len(head) * _MOST:
            raise LogError(f"{self._name}: this is binary data, not a log")
        return chunk
