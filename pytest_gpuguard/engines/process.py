"""One server as a process tree: started under a warden, watched, and ended without a trace.

It must never leave a process behind, whatever becomes of us, and never touch one that it did not start. Linux only,
but importable anywhere. (``lease.warden`` is used as a file to run and for its reading of /proc.)
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..facts.lease import require_linux
from ..lease import warden as _warden
from .proctree import Proc, kill_until_gone, listens, marked_or_seen, rss_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

MARKER: Final = "GPUGUARD_BOOT"
_START_S: Final = 60.0
_MARGIN_S: Final = 10.0
_REMEMBER_EVERY_S: Final = 2.0
_SLICE_S: Final = 0.2


class CommandNotStarted(RuntimeError):
    """The command could not even be started (not found, not executable…): nothing runs."""


class LogNotWritable(OSError):
    """The server's log file cannot be written, so the server was not started."""


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """How the main process ended: exit code, −N for signal N, None when nobody saw it. ``at`` is epoch seconds.

    No verdict may rest on it. ``lost``: the warden was killed, and took the main process along.
    """

    code: int | None
    at: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a server's end went. ``clean``: all of it left within the grace, nothing had to be SIGKILLed.

    ``survivors`` are pids that not even SIGKILL has ended so far (state D, another user's): they may hold GPU memory,
    and the locks that were passed on to the tree stay held until they are gone.
    """

    clean: bool
    seconds: float
    killed: int
    survivors: tuple[int, ...] = ()


class ServerProcess:
    """A running command with everything that came of it. Make one with ``start``; end it with ``stop``.

    When it is dropped, or this process ends in whatever way, the warden ends the tree within five seconds. ``poll``,
    ``pids`` and ``rss_bytes`` may be called from other threads.
    """

    def __init__(self, holder: subprocess.Popen[bytes], log_path: Path, marker: str, end: Sequence[str] = ()) -> None:
        self.log_path = log_path
        self.pid = 0
        self._holder_pipe = holder
        self._marker = marker
        self._end = tuple(end)
        self._buffer = b""
        self._exit: ExitInfo | None = None
        self._error: str | None = None
        self._leftovers: int | None = None
        self._stuck: tuple[int, ...] = ()
        self._eof = False
        self._report: StopReport | None = None
        self._seen: dict[int, Proc] = {}
        self._seen_at = 0.0
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _abandon, holder)

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        log_path: str | os.PathLike[str],
        pass_fds: Sequence[int] = (),
        end: Sequence[str] = (),
    ) -> Self:
        """Start ``argv`` in a session of its own, stdin empty, stdout and stderr appended to ``log_path``.

        ``env`` is the whole environment (None: ours); one variable, GPUGUARD_BOOT, is added to find lost children by.
        ``pass_fds`` (locks) are inherited by the warden *and* by the command, so that they stay held as long as either
        lives. ``end`` is a command that is run when nothing of the tree is left, however that came about. Raises
        CommandNotStarted, LogNotWritable, UnsupportedPlatform. Interrupted anywhere, nothing is left.
        """
        require_linux("booting a server")
        command = [os.fspath(word) for word in argv]
        if not command:
            raise ValueError("argv is empty: there is no command to start")
        marker = uuid.uuid4().hex
        order: dict[str, Any] = {"argv": command, "cwd": None if cwd is None else os.fspath(cwd), "end": list(end)}
        order["env"] = {**(os.environ if env is None else env), MARKER: marker}
        path = Path(log_path)
        log = _open_log(path)
        try:
            process = subprocess.Popen(
                [
                    sys.executable or "python3",
                    *("-I", "-S", _warden.__file__),
                    *("--holder", str(os.getpid()), "--log-fd", "2", "--order"),
                    *("--hold", ",".join(map(str, pass_fds))),
                ],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
        finally:
            os.close(log)
        try:
            server = cls(process, path, marker, end)
            server._give_order(order)
            return server
        except BaseException:
            _abandon(process)  # the warden reads EOF: it starts nothing, or ends what it has started
            raise

    @property
    def warden_pid(self) -> int:
        """The pid of the warden, the parent of the tree."""
        return self._holder_pipe.pid

    @property
    def alive(self) -> bool:
        """Whether the main process still runs, as far as is known now."""
        return self.poll() is None

    def poll(self) -> ExitInfo | None:
        """How the main process ended, or None while it runs. Never blocks."""
        with self._lock:
            self._listen(0.0)
            if self._exit is None and not self._eof and time.monotonic() - self._seen_at > _REMEMBER_EVERY_S:
                self._remember()
            return self._exit

    def wait(self, timeout: float) -> ExitInfo | None:
        """Like poll, after waiting for the end at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            info = self.poll()
            left = deadline - time.monotonic()
            if info is not None or left <= 0:
                return info
            self._listen(min(left, _REMEMBER_EVERY_S))

    def pids(self) -> set[int]:
        """All living processes of the tree, in whatever session, orphans too; the warden is not one of them."""
        with self._lock:
            return set(self._remember())

    def seen(self) -> frozenset[int]:
        """Every process of the tree that was seen so far, living or not, and the warden."""
        with self._lock:
            return frozenset({*self._seen, self.pid, self.warden_pid})

    def processes(self) -> dict[int, int]:
        """Every process of the tree that was seen so far, by pid: when it started (clock ticks since the boot)."""
        with self._lock:
            return {pid: proc.start for pid, proc in self._seen.items()}

    def rss_bytes(self) -> int:
        """Resident memory of the whole tree; pages that its processes share count once for each."""
        return sum(map(rss_bytes, self.pids()))

    def owns_port(self, port: int, host: str | None = None) -> bool:
        """Whether a process of the tree listens on this port, on ``host`` (or on all addresses; None: on any).

        Looks at the listeners of our own network namespace, the one in which our requests arrive. False for a process
        whose descriptors we may not see (another user's).
        """
        return listens(self.pids(), port, host)

    def stop(self, grace: float = 30.0) -> StopReport:
        """End the whole tree and return when it is gone: TERM to the main process, ``grace`` seconds, then KILL.

        Orphans of an ended main process get TERM and two seconds. Takes at most ``grace`` + 20 s, more with an ``end``.
        May be called again. An interrupt during the wait kills the tree at once and is passed on.
        """
        if self._report is not None:
            return self._report
        began = time.monotonic()
        survivors: tuple[int, ...] = ()
        rescued = 0
        try:
            self.pids()
            self._send(f"TERM {grace}")
            end_s = _warden.END_S if self._end else 0.0
            self._await_gone(grace + _warden.ORPHAN_GRACE_S + _MARGIN_S + end_s)
        except BaseException:
            self._send("KILL")
            raise
        if self._leftovers is None:  # the warden is dead, or stopped, or cannot end it
            rescued, survivors = kill_until_gone(self._remains, 5.0)
            state = _warden.read_proc(self.warden_pid)
            if state is not None and state.state in "Tt" and self._holder_pipe.poll() is None:
                self._holder_pipe.kill()
            self._run_end()
        self._finalizer()
        if not survivors:
            try:
                self._holder_pipe.wait(5.0)
            except subprocess.TimeoutExpired:
                pass
        killed = (self._leftovers or 0) + rescued
        clean = killed == 0 and self._leftovers is not None
        if self._exit is None:
            self._exit = ExitInfo(None, time.time(), lost=True)
        self._report = StopReport(clean, time.monotonic() - began, killed, survivors)
        return self._report

    def _run_end(self) -> None:
        """What the warden would have run at the end, had it lived."""
        if self._end:
            try:
                subprocess.run(self._end, stdin=subprocess.DEVNULL, timeout=_warden.END_S, check=False)
            except (OSError, subprocess.TimeoutExpired):
                pass  # it has said why on stderr, or cannot be run at all

    @property
    def ending(self) -> bool:
        """Whether the server has ended already, and its end will be told any moment."""
        return False

    def unheard(self) -> tuple[str, str] | None:
        """Outcome and words of why its silence says nothing of it; None where nobody stands between."""
        return None

    @property
    def fault(self) -> tuple[str, str] | None:
        """Outcome and words of what kept the server from running that is no doing of its own; None when nothing did."""
        return None

    def _give_order(self, order: dict[str, Any]) -> None:
        """Tell the warden what to run, and wait until it does; raises CommandNotStarted."""
        assert self._holder_pipe.stdout is not None
        os.set_blocking(self._holder_pipe.stdout.fileno(), False)
        self._send(json.dumps(order))
        deadline = time.monotonic() + _START_S
        while not (self.pid or self._error or self._eof) and time.monotonic() < deadline:
            self._listen(deadline - time.monotonic())
        if self.pid:
            return
        self._finalizer()
        if self._error is None:
            self._error = f"the warden did not start {order['argv'][0]!r}; see {self.log_path}"
        try:
            self._holder_pipe.wait(5.0)
        except subprocess.TimeoutExpired:
            self._holder_pipe.kill()
        raise CommandNotStarted(
            f"{self._error}. Check that the program is installed in the stack under test, that PATH in its environment "
            "leads there, and that the working directory exists."
        )

    def _send(self, line: str) -> None:
        pipe = self._holder_pipe.stdin
        if pipe is None or pipe.closed:
            return
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[pipe.write(data) or 0 :]
        except OSError:
            pass  # the warden is dead: _listen finds out

    def _listen(self, seconds: float) -> None:
        """Take in what the warden has said, waiting for it at most so long, and never long: callers wait in a loop.

        An interrupt that another thread raised is only seen between two waits.
        """
        pipe = self._holder_pipe.stdout
        if pipe is None or self._eof:
            return
        if pipe.closed:  # abandoned: the warden is at work, and its end is all that can still be seen
            self._eof = self._holder_pipe.poll() is not None
            time.sleep(min(_SLICE_S / 10, max(0.0, seconds)))
            return
        waiter = select.poll()  # select() knows no descriptor above 1023
        waiter.register(pipe, select.POLLIN)
        waiter.poll(max(0.0, min(seconds, _SLICE_S)) * 1000)
        with self._lock:
            if pipe.closed:
                return
            while True:
                data = pipe.read(65536)
                if not data:
                    break
                self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
            if data == b"":
                self._eof = True
                if self._exit is None:
                    self._exit = ExitInfo(None, time.time(), lost=True)

    def _hear(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self.pid = event["pid"]
        elif kind == "error":
            self._error = event["message"]
        elif kind == "exit":
            self._exit = ExitInfo(event["code"], event["t"])
        elif kind == "stuck":
            self._stuck = tuple(event["pids"])
        elif kind == "gone":
            self._leftovers = event["leftovers"]

    def _await_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._leftovers is None and not self._eof and not self._stuck:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._listen(left)

    def _remember(self) -> dict[int, Proc]:
        """The living tree; noted down, in case that the warden is killed and can no longer tell who belongs to it."""
        self._listen(0.0)
        self._seen_at = time.monotonic()
        if self._leftovers is not None:
            return {}
        if self._eof:
            return self._remains()
        found = {pid: proc for pid, proc in _warden.descendants(self.warden_pid).items() if not proc.dead}
        self._seen.update(found)
        return found

    def _remains(self) -> dict[int, Proc]:
        """What is left of the tree when the warden cannot tell: what we saw of it, and what carries our marker."""
        return marked_or_seen(f"{MARKER}={self._marker}", self._seen, {os.getpid(), self.warden_pid})


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Close our ends of the pipes: for the warden that is our death. Never raises, never waits."""
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:
            pass


def _open_log(path: Path) -> int:
    """A descriptor that appends to the log; its folder is made. Raises LogNotWritable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError as error:
        raise LogNotWritable(
            error.errno,
            f"The server's log cannot be written ({error.strerror}), so nothing was started. Make its folder writable, "
            "or choose another one",
            str(path),
        ) from None
