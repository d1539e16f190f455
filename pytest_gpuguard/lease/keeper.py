"""The keeper: stops the production unit for one run, and starts it again when nothing of that run is left.

It uses the standard library only, in one file, run as ``python -I -S keeper.py``; it is not ended by what ends its run.
It must never start the unit while somebody holds ``production.lock``, and never signal anything but the process group
of a command that it has started.

What to do is one JSON object in its environment variable ``GPUGUARD_KEEPER`` (see ``Order``), so that it is there whole
or not at all. Locks and the pipe whose end of file means "nothing of the run is left" are inherited descriptors. Lines
on stdout are JSON objects with the key ``event``:

- ``running``: ``pid``, ``start`` (clock ticks since boot); a command was started
- ``vacated``: ``recorded`` (whether the lock file says so)
- ``failed``: ``message``, ``restored``, ``problem`` (of the restoring; null with ``restored`` false: another run holds
  the unit vacated); the unit could not be vacated, and the run must not go on
- ``shared``: another run holds the unit vacated; whoever is the last restores it
- ``over``: ``problem`` (null when all is well); the last word

The record in the lock file, padded to one block that can be written over on a full disk: ``boot`` (another boot's
record is void), ``vacated`` (digests of the commands of units that are down). Anybody may write it: nothing in it is
ever run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import signal
import stat
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

ENV = "GPUGUARD_KEEPER"
LOCK = "production"
DOOR = "production-door"
POLL_S = 0.2
RETRY_S = 5.0
TERM_S = 5.0
RECORD_BYTES = 4096
MOST_UNITS = 32
TAIL_BYTES = 2000
TAIL_LINES = 8


class Order:
    """What the keeper is told. ``lock``, ``door``, ``run`` are descriptors; times in seconds.

    ``mode``: "enter" (vacate, unless another run that is still there has done so), "hold" (it is vacated, wait for the
    end of the run). ``alone``: nobody else holds the lock, ours is exclusive. ``recorded``: the lock file says that it
    is vacated. ``after``: pid and start time of a command of a keeper that was killed, to be waited for. ``who``: the
    run, for the log.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.mode: str = told["mode"]
        self.alone: bool = told["alone"]
        self.lock: int = told["lock"]
        self.door: int | None = told["door"]
        self.run: int = told["run"]
        self.folder: str = told["folder"]
        self.vacate: list[str] = told["vacate"]
        self.restore: list[str] = told["restore"]
        self.timeout_s: float = told["timeout_s"]
        self.log: str = told["log"]
        self.cwd: str = told["cwd"]
        self.who: str = told["who"]
        self.recorded: bool = told["recorded"]
        self.after: list[int] | None = told["after"]


class Keeper:
    """One run's hold on the production unit."""

    def __init__(self, order: Order, say: Callable[..., None]) -> None:
        self.order = order
        self.say = say
        self.lock = order.lock
        self.door = -1 if order.door is None else order.door
        self.recorded = order.recorded
        self.log = open_log(order.log)
        if self.log < 0:
            self.log = scratch()
        self.in_use = False
        self.boot = boot_id()
        # The unit is named by both commands: runs that are told other ones have another unit, or may have.
        self.unit = hashlib.sha256(json.dumps([order.vacate, order.restore]).encode()).hexdigest()[:20]

    def live(self) -> None:
        """From the vacating to the restoring."""
        if self.order.mode == "enter" and not self.enter():
            return
        self.close_door()
        while read_some(self.order.run):
            pass
        if self.order.after is not None:
            self.wait_for_process(*self.order.after)
        self.leave()

    # ------------------------------------------------------------------------------------------------------- vacate

    def enter(self) -> bool:
        """Have the unit vacated; False when it could not be, and there is nothing left to be done."""
        joined = not self.order.alone and self.unit in (self.units() or ())
        self.recorded = joined or self.record(True)  # before it is so: we may be killed in between
        problem = None if joined else self.command("vacate", self.order.vacate)
        if problem is None:
            while not flock(self.lock, shared=True):  # ours already; only a stranger to the door could be in the way
                time.sleep(POLL_S)
            self.say("vacated", recorded=self.recorded)
            return True
        if not flock(self.lock):  # another run needs the GPUs: the unit is started again after the last one
            self.say("failed", message=problem, restored=False, problem=None)
            return True
        after = self.restore()  # at once: it may be half stopped
        self.say("failed", message=problem, restored=after is None, problem=after)
        self.end(after)
        return False

    # ------------------------------------------------------------------------------------------------------ restore

    def leave(self) -> None:
        """Wait until nobody holds the unit vacated any more; then restore it, unless another keeper has done so."""
        missed = 0
        while not self.last():
            self.close_door()
            missed += 1
            if missed == 3 and self.in_use:  # once may be somebody who only looks
                self.say("shared")
            elif not self.in_use:
                missed = 0
            time.sleep(POLL_S)
        units = self.units()
        done = self.recorded and units is not None and self.unit not in units
        self.end(None if done else self.restore())

    def end(self, problem: str | None) -> None:
        """Let the next one in, and say the last word.

        The run may still have the lock open, for a keeper in our place: closing our descriptor would not free it.
        """
        flock(self.lock, free=True)
        self.close_door()
        self.say("over", problem=problem)

    def last(self) -> bool:
        """Whether nobody is left but us: then the lock and the door are ours."""
        self.in_use = False
        path = os.path.join(self.order.folder, LOCK + ".lock")
        if not self.try_door():
            return False
        if os.path.lexists(path) and not same_file(self.lock, path):
            # Somebody has removed the lock file, and others have locked a new one since: theirs counts.
            try:
                new = open_lock(path)
            except OSError:
                new = -1
            if new >= 0:
                os.close(self.lock)
                self.lock, self.recorded = new, False
        if flock(self.lock):
            return True
        self.in_use = True
        return False

    def restore(self) -> str | None:
        """Restore, twice if need be; what went wrong, or None. The lock must be ours alone."""
        problem = self.command("restore", self.order.restore)
        if problem is not None:
            time.sleep(RETRY_S)
            problem = self.command("restore", self.order.restore)
        if problem is None:
            self.record(False)
        return problem  # the record goes on saying "vacated": the next keeper tries again

    # ---------------------------------------------------------------------------------------------------- the locks

    def try_door(self) -> bool:
        """Get into the door, in which units are vacated and restored; False when somebody else is in it."""
        path = os.path.join(self.order.folder, DOOR + ".lock")
        try:
            fd = open_lock(path)
        except OSError:
            return True  # the folder is gone, or not for us any more: the lock alone must do
        if flock(fd) and same_file(fd, path):
            self.door = fd
            return True
        os.close(fd)
        return False

    def close_door(self) -> None:
        """Let the next one in."""
        if self.door >= 0:
            os.close(self.door)
            self.door = -1

    def units(self) -> list[str] | None:
        """The units that are vacated by the record; None when it does not tell, or tells of another boot."""
        try:
            found = json.loads(os.pread(self.lock, RECORD_BYTES, 0))
            units = [str(unit) for unit in found["vacated"]]
            return units if found["boot"] == self.boot else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def record(self, vacated: bool) -> bool:
        """Write down that our unit is vacated, or is not; False when that cannot be written."""
        units = [unit for unit in self.units() or () if unit != self.unit]
        if vacated:
            units = [*units[1 - MOST_UNITS :], self.unit]
        text = json.dumps({"boot": self.boot, "vacated": units, "by": self.order.who[:200], "at": stamp()})
        data = text.encode().ljust(RECORD_BYTES - 1) + b"\n"
        try:
            return os.pwrite(self.lock, data, 0) == RECORD_BYTES and (self.unit in (self.units() or ())) == vacated
        except OSError as error:
            self.note(f"the record cannot be written: {error.strerror}")
            return False

    # -------------------------------------------------------------------------------------------------- the commands

    def command(self, what: str, argv: Sequence[str]) -> str | None:
        """Run one hook within its time; None when it did what it should, else what is wrong, in words."""
        self.note(f"{what}: {shlex.join(argv)}")
        try:
            begin = os.fstat(self.log).st_size
        except OSError:
            begin = 0
        problem = self.run(argv)
        self.note(f"{what}: " + (problem or "done"))
        if problem is None:
            return None
        return f"`{shlex.join(argv)}` {problem}" + tail(self.log, begin)

    def run(self, argv: Sequence[str]) -> str | None:
        """Run it; only the command itself is waited for, not what it leaves behind."""
        log = self.log if self.log >= 0 else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.order.cwd if os.path.isdir(self.order.cwd) else "/",
                start_new_session=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"cannot be started: {getattr(error, 'strerror', None) or error}"
        self.say("running", pid=process.pid, start=start_time(process.pid))
        if not ended(process.pid, self.order.timeout_s):
            problem = f"did not end within {self.order.timeout_s:g} s"
            # Not reaped before the last signal was sent: until then the number of the group is no one else's.
            signal_group(process.pid, signal.SIGTERM)
            ended(process.pid, TERM_S)
            signal_group(process.pid, signal.SIGKILL)
            if ended(process.pid, TERM_S):
                process.wait()
                return problem + " and was ended"
            process.returncode = 0  # nobody waits for it any more
            return problem + f", and could not be ended: pid {process.pid} (another user's?) still runs"
        code = process.wait()
        if code == 0:
            return None
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"

    def wait_for_process(self, pid: int, start: int | None) -> None:
        """Wait, at most a hook's time, for the command of a keeper that was killed: two must not run side by side."""
        deadline = time.monotonic() + self.order.timeout_s
        while start is not None and start_time(pid) == start and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def note(self, text: str) -> None:
        """One line of the log, which need not be writable."""
        line = f"=== {stamp()} {text} (keeper {os.getpid()} of {self.order.who})\n"
        try:
            os.write(self.log, line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
                # A command that cannot write its lines might fail for that alone.
                self.log = scratch()


def stamp() -> str:
    """The time of day, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def boot_id() -> str:
    """Which boot of the machine this is; empty when nobody says."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """When the process was started, in clock ticks since boot; None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in b"ZXx" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def ended(pid: int, seconds: float) -> bool:
    """Whether our child ends within so many seconds; it is left to be reaped."""
    deadline = time.monotonic() + seconds
    pause = 0.005
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(POLL_S, pause * 1.5)
    return True


def signal_group(pgid: int, number: int) -> None:
    """Signal the group of a command of ours."""
    try:
        os.killpg(pgid, number)
    except OSError:
        pass  # gone, or another user's (sudo)


def flock(fd: int, shared: bool = False, free: bool = False) -> bool:
    """Take the lock, or turn the one that we have into this kind; False when others have it (then we have none)."""
    import fcntl

    kind = fcntl.LOCK_UN if free else fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open a lock file so that every user can: read-only where another user's file cannot be written.

    Raises OSError, also for what is no plain file of its own: it would be written to.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    while True:
        try:
            fd = os.open(path, os.O_RDWR | flags)  # no O_CREAT: fs.protected_regular would refuse others' files
        except PermissionError:
            fd = os.open(path, os.O_RDONLY | flags)
        except FileNotFoundError:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
            except FileExistsError:
                continue
            os.fchmod(fd, 0o666)  # the umask has cut it
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_nlink <= 1:
            return fd
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file, or has a second name, which anybody may have planted")


def same_file(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        named, mine = os.lstat(path), os.fstat(fd)
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def open_log(path: str) -> int:
    """The log, to be read too, for the last lines of a command; -1 when it cannot be written."""
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
    except OSError:
        return -1


def scratch() -> int:
    """A file in memory in place of the log, so that a failing command's lines can still be told; -1 without one."""
    try:
        return os.memfd_create("gpuguard-hooks")
    except (AttributeError, OSError):
        return -1


def tail(fd: int, begin: int) -> str:
    """The last lines that were printed since ``begin``, indented; our own notes are none of them."""
    try:
        end = os.fstat(fd).st_size
        text = os.pread(fd, TAIL_BYTES, max(begin, end - TAIL_BYTES)).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("=== ")]
    return "".join(f"\n  {line}" for line in lines[-TAIL_LINES:])


def read_some(fd: int) -> bool:
    """Wait for something in the pipe; False at its end. What it says does not matter."""
    try:
        return bool(os.read(fd, 65536))
    except OSError:
        return False


def say(event: str, **facts: Any) -> None:
    """Write one status line; a run that is dead no longer reads it, which is no error."""
    try:
        os.write(1, json.dumps(dict(facts, event=event)).encode() + b"\n")
    except OSError:
        pass


def settle(keep: set[int]) -> None:
    """Nothing that ends the run may end us, and no descriptor of the run stays open but those that are ours."""
    # Handlers and not SIG_IGN: exec resets a handler to the default, but hands an ignored signal on to the commands.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, signal.SIGTSTP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how a command ended
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed them
    for fd in keep:
        os.set_inheritable(fd, False)
    os.set_blocking(1, False)


def main() -> int:
    """The keeper's life; 0 always: what there is to say is said in words."""
    order = Order(json.loads(os.environ.pop(ENV)))
    settle({fd for fd in (order.lock, order.run, order.door) if fd is not None})
    keeper = Keeper(order, say)
    try:
        keeper.live()
    except Exception:  # no memory, no descriptor left, a bug: the unit must come back all the same
        said = traceback.format_exc()
        keeper.note(said.strip().replace("\n", " | "))
        keeper.close_door()
        say("failed", message="the keeper failed: " + said.strip().rpartition("\n")[2], restored=False, problem=None)
        while read_some(order.run):
            pass
        keeper.leave()
    return 0


if __name__ == "__main__":
    os._exit(main())
