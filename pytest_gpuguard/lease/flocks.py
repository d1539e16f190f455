"""Named locks of one host, as raw flocks on descriptors that a warden can inherit.

A reservation lives exactly as long as a descriptor of it is open in any process; nothing here ever calls LOCK_UN,
which would free the heirs' lock too. What a lock file *says* is for messages only and never decides who holds it.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from . import keeper
from .dirs import ENV, LockDirError, lock_dir
from .keeper import open_lock, same_file
from .pids import is_there
from .warden import read_proc

POLL_S: Final = 0.1
NOTIFY_S: Final = 30.0
_MOST_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took a lock, by the record that it left in the file. Unknown things are None.

    ``wants`` is how many GPUs somebody waits for who holds none of them yet; ``boot`` is the boot of the machine.
    """

    lock: str
    pid: int | None = None
    start_time: int | None = None
    user: str | None = None
    host: str | None = None
    test: str | None = None
    since: float | None = None
    boot: str | None = None
    wants: int | None = None

    @staticmethod
    def of(lock: str, record: Mapping[str, Any]) -> Holder:
        """The holder that a record tells of."""
        return Holder(lock, **told(record, _RECORDED))

    def __str__(self) -> str:
        if self.pid is None:
            return f"{self.lock}: held by somebody who left no readable record"
        does = "held by" if self.wants is None else f"{self.wants} GPU(s) wanted before us by"
        who = f"{self.lock}: {does} {self.user or 'an unknown user'}, pid {self.pid}"
        if self.host and self.host != socket.gethostname():
            who += f" on {self.host}"
        elif not self.lives:
            who += " (gone; what it started still holds the lock)"
        elif read_proc(self.pid) is None:
            who += " (not visible from here)"
        if self.test:
            who += f", {self.test}"
        if self.since is not None:
            who += f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"
        return who

    @property
    def lives(self) -> bool:
        """Whether that very process is there, as far as can be seen from here: /proc may hide it from us."""
        if self.pid is None:
            return False
        now = read_proc(self.pid)
        return is_there(self.pid) if now is None else not now.dead and self.start_time in (None, now.start)


def told(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What a record says under these names: None where it is of a wrong kind, because anybody may write there."""
    return {name: record.get(name) if _is_sound(name, record.get(name)) else None for name in names}


def _is_sound(name: str, value: object) -> bool:
    if name in ("user", "host", "test", "boot"):
        return isinstance(value, str)
    if name == "since":
        return isinstance(value, (int, float)) and 0 <= value < 1 << 33  # later, there is no calendar
    return isinstance(value, int) and 0 <= value < 1 << 63


_RECORDED: Final = tuple(one.name for one in fields(Holder) if one.name != "lock")
OnWait = Callable[[Sequence[Holder], float], None]


class LeaseTimeout(RuntimeError):
    """What was asked for did not become free in time: an error of the run, never a skip. ``holders`` have it."""

    def __init__(self, what: str, holders: Sequence[Holder], waited_s: float) -> None:
        self.what = what
        self.holders = tuple(holders)
        self.waited_s = waited_s
        held = "".join(f"\n  {holder}" for holder in self.holders) or "\n  nobody any more: it has just become free"
        super().__init__(
            f"{what} did not become free within {waited_s:.1f} s:{held}\n"
            "Wait longer (--gpuguard-wait), or ask the holder to finish; a lock ends by itself with its process tree."
        )


class LeaseDeadlock(LeaseTimeout):
    """Waiting would never end: who asks holds what it waits for, or those in the way wait for what it holds."""

    def __init__(self, what: str, holders: Sequence[Holder]) -> None:
        super().__init__(what, holders, 0.0)
        held = "".join(f"\n  {holder}" for holder in self.holders)
        self.args = (
            f"{what} can never become free while this test keeps the GPUs that it has: those that it lacks are its "
            f"own, or belong to tests that wait for them in turn:{held}\n"
            "Stop the first server before the second one is booted (call stop() on it), or ask for all GPUs at once.",
        )


Held = TypeVar("Held", bound="HeldLocks")


class HeldLocks:
    """Open descriptors that hold locks. ``release`` closes ours; a warden that inherited them still holds the locks."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds = list(fds)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors, to be handed to a server with ``pass_fds``; empty after release."""
        return tuple(self._fds)

    @property
    def released(self) -> bool:
        """Whether this process has let go."""
        return not self._fds

    def release(self) -> None:
        """Let go, as far as this process is concerned. May be called again."""
        while self._fds:
            os.close(self._fds.pop())

    def add(self, fd: int) -> None:
        """One more lock to be let go with the others."""
        self._fds.append(fd)

    def __enter__(self: Held) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if os is not None and not sys.is_finalizing():
            self.release()


class Locks:
    """The lock files of one folder (default: ``lock_dir()``), taken without ever waiting inside the kernel."""

    def __init__(self, test: str = "", directory: Path | None = None) -> None:
        self.directory = lock_dir() if directory is None else directory
        self.test = test

    def attempt(self, name: str, record: Mapping[str, Any] | None = None) -> int | None:
        """The descriptor that now holds the lock ``name``, or None when another one does.

        ``record`` is what the lock file is to say (default: who we are). Raises LockDirError.
        """
        taken = self.take(name, record)
        return None if taken is None else taken[0]

    def take(self, name: str, record: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]] | None:
        """Like ``attempt``, with what the lock file said before."""
        path = f"{self.directory}/{name}.lock"
        while True:
            try:
                fd = open_lock(path)
            except OSError as error:
                raise LockDirError(
                    f"The lock file {path} cannot be opened: {error.strerror}. Make room there if it is full. Only "
                    f"this plugin should make files there: remove it when nobody uses it, or set {ENV} to another "
                    f"folder."
                ) from None
            try:
                if not lock_soon(fd):
                    os.close(fd)
                    return None
                if same_file(fd, path):
                    before = read_record(fd)
                    write_record(fd, self.signature() if record is None else record)
                    return fd, before
                os.close(fd)  # the file was replaced meanwhile (a cleaner of old files): this lock excludes nobody
            except BaseException:
                os.close(fd)
                raise

    def attempt_all(self, names: Sequence[str], n: int) -> dict[str, int]:
        """``n`` of the names, the first free ones in the given order, or nothing at all: name → descriptor."""
        got: dict[str, int] = {}
        try:
            for left, name in zip(range(len(names), 0, -1), names, strict=True):
                if len(got) == n or len(got) + left < n:
                    break
                fd = self.attempt(name)
                if fd is not None:
                    got[name] = fd
        except BaseException:
            _close(got)
            raise
        if len(got) < n:
            _close(got)
            return {}
        return got

    def record(self, name: str) -> dict[str, Any]:
        """What the last one to take the lock wrote into it; empty when there is nothing to read."""
        try:
            fd = os.open(f"{self.directory}/{name}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return {}
        try:
            return read_record(fd)
        finally:
            os.close(fd)

    def holders(self, names: Iterable[str]) -> tuple[Holder, ...]:
        """Who holds those of the names that are taken at this moment."""
        return tuple(Holder.of(name, self.record(name)) for name in names if not self.is_free(name))

    def is_free(self, name: str) -> bool:
        """Whether nobody holds the lock at this moment; a lock that was never taken is free."""
        try:
            # Read-only, so that a look is not taken for a lock that was let go (see notice.py).
            fd = os.open(f"{self.directory}/{name}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return True  # who wants to take it is told what is wrong with the file
        try:
            return lock_now(fd, shared=True)
        finally:
            os.close(fd)

    def signature(self) -> dict[str, Any]:
        """The record that this process leaves in a lock that it takes."""
        return {**_self(os.getpid()), "test": self.test, "since": time.time()}


def wait_for(
    attempt: Callable[[], Held | None],
    what: str,
    holders: Callable[[], Sequence[Holder]],
    wait_s: float,
    on_wait: OnWait | None,
) -> Held:
    """Try until it works or ``wait_s`` is over; ``on_wait(holders, waited_s)`` at the first wait and every 30 s.

    Raises LeaseTimeout.
    """
    began = time.monotonic()
    next_notice = 0.0
    while True:
        held = attempt()
        if held is not None:
            return held
        waited = time.monotonic() - began
        if waited >= wait_s:
            raise LeaseTimeout(what, holders(), waited)
        if on_wait is not None and waited >= next_notice:
            on_wait(holders(), waited)
            next_notice = waited + NOTIFY_S
        time.sleep(min(POLL_S, max(0.001, wait_s - waited)))


def read_record(fd: int) -> dict[str, Any]:
    """What a lock file says; empty when that cannot be read."""
    try:
        found = json.loads(os.pread(fd, _MOST_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_record(fd: int, record: Mapping[str, Any]) -> None:
    """Replace what a lock file says. A file that cannot be written is no error: its lock holds all the same."""
    try:
        size = os.fstat(fd).st_size
        if size > _MOST_BYTES:  # anybody may have written there
            os.ftruncate(fd, 0)
            size = 0
        # Blanks and no truncation: cheaper by far on a disk, and a full one has room for what is there already.
        os.pwrite(fd, json.dumps(record).encode().ljust(size - 1) + b"\n", 0)
    except OSError:
        pass  # another user's file, opened read-only, or a full disk


@cache
def _self(pid: int) -> dict[str, Any]:
    me = read_proc(pid)
    start = me.start if me else None
    return {"pid": pid, "start_time": start, "user": _user(), "host": socket.gethostname(), "boot": boot_id()}


@cache
def boot_id() -> str | None:
    """Which boot of the machine this is: what was recorded in another one says nothing any more."""
    return keeper.boot_id() or None


def lock_now(fd: int, *, shared: bool = False) -> bool:
    """Whether the open file is now locked for us, alone or with others. Raises OSError where there are no locks."""
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_soon(fd: int) -> bool:
    """Like ``lock_now`` for us alone, tried thrice: another one may only be looking who holds it."""
    for pause in (0.001, 0.001, 0.0):
        if lock_now(fd):
            return True
        time.sleep(pause)
    return False


def _close(fds: dict[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return f"uid {os.getuid()}"
