"""The queue of those who wait for GPUs, kept in the lock folder: a file per waiter, and one book for all.

A waiter's file is locked for as long as the waiter lives, so a killed one leaves the queue by itself. Only the order
depends on the book, and never who holds a GPU: when its reader is stopped, others go on without it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ..claims.gpuset import GpuChoice
from .dirs import LockDirError
from .fifo import Request
from .flocks import Holder, Locks, lock_now, lock_soon
from .keeper import open_lock, same_file

_WAIT: Final = "gpu-wait-"
_TICKET: Final = re.compile(_WAIT + r"(\d{12})\.lock")
#: A look takes about a millisecond; who has the book for so long is stopped, and is waited for no more.
_PATIENCE_S: Final = 2.0
_PATIENCE_AGAIN_S: Final = 0.05
_BOOK_BYTES: Final = 4096
_BEAT: Final = "{:020.3f}\n"
_BEAT_BYTES: Final = 21
_MOST_BYTES: Final = 65536
_CALL_BYTES: Final = 128
_HEAD_BYTES: Final = _BEAT_BYTES + _CALL_BYTES
_NO_CALL: Final = "\n".rjust(_CALL_BYTES)
#: For so long GPUs are kept for who was called to take them; it obeys in the first half of that, and then asks anew.
_CALL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue. ``fd`` is −1 for somebody else's.

    ``called``: the GPUs that its waiter was told to take, by who saw that it is its turn; it does so at once.
    """

    request: Request
    record: Mapping[str, Any]
    path: str
    fd: int = -1
    called: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file in the folder."""
        return os.path.basename(self.path)

    @property
    def name(self) -> str:
        """The name of the lock that its waiter holds."""
        return self.file.removesuffix(".lock")

    @property
    def holder(self) -> Holder:
        """Who waits."""
        return Holder.of("gpu-queue", self.record)

    def beat(self, now: float) -> None:
        """Say that we still wait, and forget a call."""
        try:
            os.pwrite(self.fd, (_BEAT.format(now) + _NO_CALL).encode(), 0)
        except OSError:
            pass  # others may pass us when they think that we sleep

    def call(self, uuids: Sequence[str], now: float) -> None:
        """Tell somebody else that it is its turn to take these: it watches its file, which is closed by this."""
        places = ",".join(str(self.request.choice.uuids.index(uuid)) for uuid in uuids)
        text = f"{now:.3f} {places}\n"
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if len(text) <= _CALL_BYTES:
                    os.pwrite(fd, text.rjust(_CALL_BYTES).encode(), _BEAT_BYTES)
            finally:
                os.close(fd)
        except OSError:
            pass  # it has left the queue, or looks by itself before long

    def answer(self, now: float) -> tuple[str, ...]:
        """The GPUs that we are called to take; empty when we are not.

        The call stays until we leave the queue or beat: whoever looks meanwhile must not give us others.
        """
        try:
            text = os.pread(self.fd, _CALL_BYTES, _BEAT_BYTES).decode(errors="replace")
        except OSError:
            return ()
        return _called(text, self.request.choice, now, _CALL_S / 2)

    def tear(self) -> None:
        """Leave the queue."""
        try:
            os.unlink(self.path)
        except OSError:
            pass  # the folder was removed: an unlocked ticket counts for nobody
        os.close(self.fd)


class Book:
    """The book of one lock folder: open it with ``with``, and what was read stays true until it is closed again."""

    NAME: ClassVar = "gpu-book"
    FILE: ClassVar = f"{NAME}.lock"

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        self._folder = os.fspath(locks.directory)
        self._path = locks.directory / self.FILE
        self._fd = -1
        self._patience_s = _PATIENCE_S
        self._signals: Iterable[int] = ()
        self._next = 1
        self._known: dict[int, Ticket] = {}
        self.passed: dict[int, int] = {}

    def __enter__(self) -> Book:
        # Ctrl-Z waits until the book is closed.
        self._signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
        try:
            until = time.monotonic() + self._patience_s
            while True:
                if self._fd < 0:
                    self._open()
                if lock_now(self._fd):
                    self._patience_s = _PATIENCE_S
                elif time.monotonic() < until:
                    time.sleep(random.uniform(0.0001, 0.001))
                    continue
                else:
                    self._patience_s = _PATIENCE_AGAIN_S
                if same_file(self._fd, self._path):
                    self._read()
                    return self
                self.close()  # somebody has removed the folder or the file
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)
            raise

    def __exit__(self, *_: object) -> None:
        import fcntl

        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # never inherited, so nobody's lock but ours ends
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)

    def close(self) -> None:
        """Forget the book."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def tickets(self) -> tuple[Ticket, ...]:
        """Who waits, in the order of the queue. Files that dead waiters left are removed where we may."""
        found = []
        now = time.monotonic()
        for number in self.numbers():
            path = self.path_of(number)
            try:
                ticket = _read_ticket(number, path, self._known.get(number), now)
            except _Left:
                try:
                    os.unlink(path)
                except OSError:
                    pass  # another user's, in a sticky folder
                continue
            if ticket is not None:
                found.append(ticket)
        self._known = {one.request.number: one for one in found}
        return tuple(found)

    def numbers(self) -> list[int]:
        """The places in the queue, in order; some may have been left."""
        try:
            entries = os.listdir(self._folder)
        except OSError:
            return []  # the folder was removed: whoever looks next is told
        matches = [_TICKET.fullmatch(one) for one in entries if one.startswith(_WAIT)]
        return sorted(int(match[1]) for match in matches if match is not None)

    def path_of(self, number: int) -> str:
        """The file of a place in the queue."""
        return f"{self._folder}/{_WAIT}{number:012d}.lock"

    @classmethod
    def owns(cls, file: str) -> bool:
        """Whether a file of the folder is the book's: itself, or a place in the queue."""
        return file == cls.FILE or _TICKET.fullmatch(file) is not None

    def peek(self) -> tuple[Ticket, ...]:
        """Who waits, and ``passed``, for somebody who only looks: the book is not opened, and no file is removed."""
        said = self._locks.record(self.NAME).get("passed")
        counts = said.items() if isinstance(said, dict) else ()
        self.passed = {int(one): times for one, times in counts if one.isdecimal() and isinstance(times, int)}
        found = []
        for number in self.numbers():
            try:
                ticket = _read_ticket(number, self.path_of(number), None, time.monotonic())
            except _Left:
                continue
            found += [ticket] if ticket is not None else []
        return tuple(found)

    def queue_up(self, request: Request) -> Ticket:
        """A place at the end of the queue. Raises LockDirError."""
        choice = request.choice
        facts = {"wants": request.n, "choice": choice.to_dict(), "holds": list(request.holds), "asked": request.since}
        record = {**self._locks.signature(), **facts}
        number, fd, path = self._next - 1, -1, ""
        try:
            while fd < 0:
                number += 1  # taken: another user's dead waiter cannot be removed, or somebody goes on without the book
                path = self.path_of(number)
                try:
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                except FileExistsError:
                    pass
            os.fchmod(fd, 0o666)  # the umask has cut it
            if not lock_soon(fd):
                raise BlockingIOError("somebody else holds it")
            os.write(fd, (_BEAT.format(request.beat) + _NO_CALL + json.dumps(record) + "\n").encode())
        except OSError as error:
            if fd >= 0:
                os.unlink(path)
                os.close(fd)
            raise LockDirError(
                f"No place in the queue for GPUs: {path} cannot be written: {error.strerror}. Make room there."
            ) from None
        self._next = number + 1
        self._write(self.passed)
        return Ticket(replace(request, number=number), record, path, fd)

    def note_passed(self, numbers: Sequence[int]) -> None:
        """Count that these were overtaken, as often as they are named; who has left the queue is forgotten.

        The others keep their counts, whoever looks: nobody's own look may forget how often it was passed.
        """
        if numbers:
            times = {one: self.passed.get(one, 0) + numbers.count(one) for one in self.numbers()}
            self.passed = {one: count for one, count in times.items() if count}
            self._write(self.passed)

    def _open(self) -> None:
        try:
            self._fd = open_lock(self._path)
        except FileNotFoundError:
            raise LockDirError(
                f"The lock folder {self._locks.directory} was removed: who holds which GPU cannot be told any more. "
                f"Let everybody finish who has begun before, and run again."
            ) from None
        except OSError as error:
            raise LockDirError(f"The lock file {self._path} cannot be opened: {error.strerror}.") from None

    def _read(self) -> None:
        try:
            found = json.loads(os.pread(self._fd, 65536, 0).rstrip(b"\0 \n") or b"{}")
            self._next = max(self._next, int(found.get("next", 1)))
            self.passed = {int(number): int(times) for number, times in found.get("passed", {}).items()}
        except (ValueError, AttributeError, TypeError, OSError):
            self.passed = {}  # a writer was killed: the queue itself is in its files

    def _write(self, passed: Mapping[int, int]) -> None:
        text = json.dumps({"next": self._next, "passed": passed})
        try:
            os.pwrite(self._fd, text.ljust(_BOOK_BYTES).encode(), 0)  # its size stays, so that it needs no new room
        except OSError:
            pass  # then nobody is counted as passed, and numbers are found by looking


class _Left(Exception):
    """Nobody holds the lock on this place in the queue any more."""


def _read_ticket(number: int, path: str, known: Ticket | None, now: float) -> Ticket | None:
    """What a waiter wrote; of a ``known`` one only whether it is awake, and was called. Raises _Left."""
    try:
        # Read-only, so that a look is not taken for a poke.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if lock_now(fd, shared=True):
            raise _Left
        head = os.pread(fd, _HEAD_BYTES, 0).decode(errors="replace")
        if known is not None:
            called = _called(head[_BEAT_BYTES:], known.request.choice, now, _CALL_S)
            if called == known.called and not known.request.asleep(now):
                return known
            request = replace(known.request, beat=float(head[:_BEAT_BYTES]))
            return Ticket(request, known.record, path, called=called)
        record = json.loads(os.pread(fd, _MOST_BYTES, _HEAD_BYTES))
        choice = GpuChoice.from_dict(record["choice"])
        beat, holds = float(head[:_BEAT_BYTES]), tuple(map(str, record["holds"]))
        request = Request(number, int(record["wants"]), choice, beat, holds, float(record["asked"]))
        called = _called(head[_BEAT_BYTES:], choice, now, _CALL_S)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not ours, or its writer was killed
    finally:
        os.close(fd)
    return Ticket(request, record, path, called=called)


def _called(text: str, choice: GpuChoice, now: float, seconds: float) -> tuple[str, ...]:
    """The GPUs of a call that is not older than that."""
    if text == _NO_CALL:
        return ()
    try:
        moment, places = text.split()
        fresh = -0.001 <= now - float(moment) <= seconds  # it was rounded
        return tuple(choice.uuids[int(place)] for place in places.split(",")) if fresh else ()
    except (ValueError, IndexError):
        return ()  # half of it is written
