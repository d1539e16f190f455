"""One time of a run on the production unit's GPUs: the keeper that sees to its end is started, listened to, replaced.

It must never lose the unit's restoring because a keeper was killed, and never wait for one that works on without us.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import time
from typing import Any, Final

from . import keeper
from .flocks import HeldLocks

_SLICE_S: Final = 0.2
_MOST_KEEPERS: Final = 3


class ProductionError(RuntimeError):
    """The production unit could not be vacated, so nothing may be booted. The message has command, cause and cure."""


class Stay(HeldLocks):
    """One time of a run on the unit's GPUs: what holds them, and the keeper that sees to their end.

    ``fds`` are the end of a pipe that tells the keeper that something of the run lives, and the lock, which so outlives
    a keeper that is killed. The lock again and the pipe's other end are kept for a keeper that takes its place.
    ``failed`` is what the keeper said of a unit that could not be vacated; ``done``: all is over.
    """

    def __init__(self, order: dict[str, Any], door: HeldLocks, lock: HeldLocks) -> None:
        super().__init__()
        self.failed: dict[str, Any] | None = None
        self.done = False
        self._order = order
        self._door = door
        self._ours = lock
        (self._lock,) = lock.fds
        self._run, alive = os.pipe()
        self._ours.add(self._run)
        self.add(alive)
        self.add(os.dup(self._lock))
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._gone = True
        self._keepers = 0
        self._vacated = self._recorded = self._shared = self._over = False
        self._problem: str | None = None
        self._command: tuple[int, int | None] | None = None

    def start(self) -> None:
        """Start the keeper, or one that takes the place of a killed one. Raises ProductionError."""
        self._keepers += 1
        entering = self._keepers == 1
        mode = "enter" if entering else "hold"
        order = {**self._order, "mode": mode, "lock": self._lock, "run": self._run, "recorded": self._recorded}
        order |= {"door": self._door.fds[0] if entering else None, "after": None if entering else self._command}
        try:
            self._process = subprocess.Popen(
                [sys.executable or "python3", "-I", "-S", keeper.__file__],
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, keeper.ENV: json.dumps(order)},
                cwd="/",
                pass_fds=(self._lock, self._run, *self._door.fds),
                start_new_session=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._door.release()
            raise ProductionError(
                f"The keeper of the production unit cannot be started: {error}. It needs the Python that runs pytest "
                f"({sys.executable}), a free process and a few descriptors."
            ) from None
        self._process.returncode = 0  # we reap by ourselves: it may outlive us
        self._gone = False
        self._buffer = b""
        self._door.release()  # the keeper lets the next one in

    def wait_vacated(self, seconds: float) -> None:
        """Wait until the unit is vacated, or could not be: then ``failed`` tells. Raises ProductionError."""
        deadline = time.monotonic() + seconds
        command = shlex.join(self._order["vacate"])
        while not (self._vacated or self.failed):
            self._listen(_SLICE_S)
            if self._gone and not (self._vacated or self.failed):
                self.start()  # it restores as soon as the caller has let go
                raise ProductionError(
                    f"The keeper of the production unit was killed while it ran `{command}`. The unit is started "
                    f"again; see {self._order['log']}, and run the tests once more."
                )
            if time.monotonic() >= deadline:
                raise ProductionError(
                    f"The production unit was not vacated within {seconds:.0f} s, and `{command}` cannot be ended. The "
                    f"unit is started again as soon as that is over; see {self._order['log']}."
                )

    def mend(self) -> None:
        """Start another keeper if ours was killed, while the run goes on."""
        self._listen(0.0)
        if self._gone and self._keepers < _MOST_KEEPERS:
            try:
                self.start()
            except ProductionError:
                pass  # the unit is vacated all the same, and at the end of the run it is tried again

    def let_go(self) -> None:
        """We need the GPUs no longer; what we have started may still hold them."""
        self._door.release()
        self.release()
        if self._process is None:
            self._over = True  # there is no keeper, and nothing was vacated

    def finish(self, deadline: float) -> str | None:
        """Wait for the keeper's last word; what went wrong, or None. ``done`` when nothing is left to wait for."""
        by_hand = f"Run `{shlex.join(self._order['restore'])}` by hand. The log: {self._order['log']}"
        while not (self._over or self._shared):
            self._listen(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
            if self._over or self._shared:
                break
            if self._gone:
                try:
                    if self._keepers >= _MOST_KEEPERS:
                        raise ProductionError(f"its keeper was killed {self._keepers} times.")
                    self.start()
                except ProductionError as error:
                    self._close()
                    return f"THE PRODUCTION UNIT WAS NOT RESTORED: {error} {by_hand}"
            elif time.monotonic() >= deadline:
                return f"The production unit is not restored yet: {self._waits_for()}. See {self._order['log']}"
        self._close()
        if self._problem is None:
            return None
        return f"THE PRODUCTION UNIT WAS NOT RESTORED: {self._problem}\n{by_hand}"

    def _waits_for(self) -> str:
        holders = _who_has(self._run) - {os.getpid(), self._process.pid if self._process else 0}
        if holders:
            return f"processes of this run are still there (pid {', '.join(map(str, sorted(holders)))})"
        if self._command is not None and keeper.start_time(self._command[0]) == self._command[1]:
            return f"a command is still at work (pid {self._command[0]})"
        return "its keeper waits for another run that stops or starts it"

    def _close(self) -> None:
        self.done = True
        self._ours.release()
        if self._process is not None and self._process.stdout is not None:
            if not (self._shared or self._gone):
                self._reap()
            self._process.stdout.close()

    def _listen(self, seconds: float) -> None:
        """Take in what the keeper has said, waiting for it at most so long."""
        pipe = self._process.stdout if self._process is not None else None
        if pipe is None or self._gone:
            return
        waiter = select.poll()
        waiter.register(pipe, select.POLLIN)
        if not waiter.poll(seconds * 1000):
            return
        data = pipe.read(65536)
        if not data:
            self._gone = True
            self._reap()
            pipe.close()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def _hear(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "running":
            self._command = (event["pid"], event["start"])
        elif kind == "vacated":
            self._vacated, self._recorded = True, event["recorded"]
        elif kind == "failed":
            self.failed = event
        elif kind == "shared":
            self._shared = True
        elif kind == "over":
            self._over, self._problem = True, event["problem"]

    def _reap(self) -> None:
        if self._process is not None:
            try:
                os.waitpid(self._process.pid, 0)
            except ChildProcessError:
                pass


def _who_has(pipe: int) -> set[int]:
    """The processes that have this pipe open, as far as we may see."""
    name = f"pipe:[{os.fstat(pipe).st_ino}]"
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") == name for fd in os.listdir(f"/proc/{pid}/fd")):
                found.add(int(pid))
        except OSError:
            continue
    return found
