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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from .dirs import ENV, LockDirError, lock_dir
from .warden import read_proc

POLL_S: Final = 0.1
NOTIFY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took a lock, by the record that it left in the file. Unknown things are None."""

    lock: str
    pid: int | None = None
    start_time: int | None = None
    user: str | None = None
    host: str | None = None
    test: str | None = None
    since: float | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return f"{self.lock}: held by somebody who left no readable record"
        who = f"{self.lock}: held by {self.user or 'an unknown user'}, pid {self.pid}"
        if self.host and self.host != socket.gethostname():
            who += f" on {self.host}"
        elif not self._lives():
            who += " (gone; what it started still holds the lock)"
        if self.test:
            who += f", {self.test}"
        if self.since is not None:
            who += f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"
        return who

    def _lives(self) -> bool:
        now = read_proc(self.pid) if self.pid is not None else None
        return now is not None and not now.dead and self.start_time in (None, now.start)


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

    def attempt(self, name: str, **facts: Any) -> int | None:
        """The descriptor that now holds the lock ``name``, or None when another one does.

        ``facts`` are added to the record. Raises LockDirError.
        """
        import fcntl

        path = self.directory / f"{name}.lock"
        tries = 0
        while True:
            try:
                fd = _open(path)
            except OSError as error:
                raise LockDirError(
                    f"The lock file {path} cannot be opened: {error.strerror}. Only this plugin should make files "
                    f"there: remove it when nobody uses it, or set {ENV} to another folder."
                ) from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(fd, path):
                    self._sign(fd, name, facts)
                    return fd
                os.close(fd)  # the file was replaced meanwhile (a cleaner of old files): this lock excludes nobody
            except BlockingIOError:
                os.close(fd)
                tries += 1
                if tries == 3:
                    return None
                time.sleep(0.001)  # another one may only be looking who holds it, see holders()
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
            fd = os.open(self.directory / f"{name}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return {}
        try:
            found = json.loads(os.read(fd, 65536))
        except (OSError, ValueError):
            return {}
        finally:
            os.close(fd)
        return found if isinstance(found, dict) else {}

    def holders(self, names: Iterable[str]) -> tuple[Holder, ...]:
        """Who holds those of the names that are taken at this moment."""
        import fcntl

        found = []
        for name in names:
            try:
                fd = _open(self.directory / f"{name}.lock")
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                record = self.record(name)
                known = {key: record.get(key) for key in ("pid", "start_time", "user", "host", "test", "since")}
                found.append(Holder(name, **known))
            finally:
                os.close(fd)
        return tuple(found)

    def _sign(self, fd: int, name: str, facts: dict[str, Any]) -> None:
        me = read_proc(os.getpid())
        holder = Holder(
            name, os.getpid(), me.start if me else None, _user(), socket.gethostname(), self.test, time.time()
        )
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({**asdict(holder), **facts}).encode() + b"\n", 0)
        except OSError:
            pass  # another user's file, opened read-only: the lock holds all the same


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


def _open(path: Path) -> int:
    """Open a lock file so that every user can: read-only where another user's file cannot be written."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            return os.open(path, os.O_RDWR | flags)  # no O_CREAT: fs.protected_regular would refuse others' files
        except FileNotFoundError:
            pass
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
        except FileExistsError:
            continue
        os.fchmod(fd, 0o666)  # the umask has cut it
        return fd


def _same_file(fd: int, path: Path) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def _close(fds: dict[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return f"uid {os.getuid()}"
