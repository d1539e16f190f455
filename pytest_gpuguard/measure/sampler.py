"""Memory peaks and working conditions of GPUs, sampled by a child process while something else runs.

The caller never waits for the driver: a call that hangs is abandoned with the child, and the trace says so.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..claims.measurement import Conditions, Peak
from ..facts.faults import HostFault, nvml_fault
from ..facts.nvml import INIT_DEADLINE_S, start_child
from .trace import Clocks, Trace

INTERVAL_S: Final = 0.02
DEADLINE_S: Final = 5.0
START_S: Final = 10.0
_CHILD: Final = Path(__file__).with_name("sampler_child.py")
#: Children in the life of one sampler, and hangs after which a GPU is left out.
_LIVES: Final = 6
_HANGS: Final = 2
_PAUSE_S: Final = 0.5
#: How long an answer is waited for, and the end of the child.
_ANSWER_S: Final = 0.5
_STOP_S: Final = 1.0
#: A child that says nothing at all for so much longer than any call may take is stuck itself.
_SILENCE_S: Final = 3.0
#: A line that a pipe takes whole or not at all has at most 4096 bytes (PIPE_BUF).
_MAX_PIDS: Final = 300
_MAX_PHASE: Final = 200


class Sampler:
    """Samples GPUs or MIG devices by their UUIDs from ``start`` to ``stop``. Safe to share by threads.

    ``interval_s`` is the time between samples of memory in seconds; clocks are looked at twice a second, processes
    once. ``env`` is the child's environment (default: ours). ``ours`` gives the pids that may use the GPUs now; it is
    called on threads of this class too, and must be quick and not raise. ``deadline_s`` bounds each sweep.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        interval_s: float = INTERVAL_S,
        env: Mapping[str, str] | None = None,
        ours: Callable[[], Collection[int]] = tuple,
        deadline_s: float = DEADLINE_S,
        init_deadline_s: float = INIT_DEADLINE_S,
    ) -> None:
        if not 0.001 <= interval_s <= 10:
            raise ValueError(f"interval_s must be from 0.001 to 10 seconds, not {interval_s:g}")
        self._devices = tuple(devices)
        self._interval_s = interval_s
        self._env = env
        self._ours = ours
        self._deadline_s = deadline_s
        self._init_deadline_s = init_deadline_s
        self._trace = Trace(self._devices, interval_s)
        self._news = threading.Condition()  # guards the trace and all below
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._map: list[int] = []  # the child's number of a GPU → ours
        self._before = (0, 0)  # samples and gaps of earlier children
        self._hung: Counter[int] = Counter()
        self._dead: dict[int, str] = {}  # GPUs that are left out for good
        self._known_ours: set[int] = set()
        self._phase = "start"
        self._asked = self._answered = 0
        self._opened = self._late = self._stopping = False
        self._why: str | None = None  # nothing is sampled any more
        self._began_us = 0.0

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        process = self._process
        return process.pid if process is not None else None

    def start(self, wait_s: float = START_S) -> None:
        """Begin, and wait at most so many seconds for the first sample of each GPU, which is its baseline.

        Never raises for a fault of the host: ``conditions`` and ``peak`` then say what is missing.
        """
        if self._thread is not None:
            return
        self._began_us = (time.time() - 1) * 1e6
        self._thread = threading.Thread(target=self._run, name="gpuguard-sampler", daemon=True)
        self._thread.start()
        with self._news:
            self._news.wait_for(lambda: self._opened or self._why is not None, wait_s)
            self._late = not self._opened

    def mark(self, phase: str) -> None:
        """From now on samples belong to this log phase; going back to one that was marked before continues it."""
        with self._news:
            self._phase = phase[:_MAX_PHASE]
            self._send({"do": "mark", "phase": self._phase})

    def stop(self) -> None:
        """End the child, after its last report; waits for it at most 2 s. Safe to call twice."""
        thread = self._thread
        if thread is None:
            return
        with self._news:
            first, self._stopping = not self._stopping, True
            self._news.notify_all()
        if first:
            self._ask("stop")
        thread.join(_STOP_S)
        process = self._process
        if process is not None:
            with self._news:
                self._trace.gaps += 1  # what it had not reported yet is lost
            process.kill()
            thread.join(_STOP_S)

    def peak(self) -> Peak | None:
        """The most memory in use on any one GPU, above what it was at the start; None when nothing was sampled."""
        self._refresh()
        ours = self._all_ours()
        with self._news:
            return self._trace.peak(ours, self._began_us)

    def conditions(self, since: float, until: float) -> Conditions:
        """What the GPUs did between two moments of ``time.monotonic()``."""
        if any(at < until for at in self._trace.processes_at):
            self._refresh("look")
        ours = self._all_ours()
        with self._news:
            found = self._trace.conditions(since, until, ours)
        if self._why is not None:
            return Conditions(found.slowed, found.foreign, (self._why, *found.unknown))
        return found

    # --- the child ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Let children sample, one after the other when they die, until ``stop``."""
        for life in range(_LIVES):
            with self._news:
                if self._stopping:
                    return
                self._map = [gpu for gpu in range(len(self._devices)) if gpu not in self._dead]
                if not self._map:
                    break
            process = self._spawn()
            if process is None:
                return
            try:
                self._listen(process)
            finally:
                self._bury(process)
            with self._news:
                if self._why is not None or self._stopping:
                    return
                self._trace.gaps += 1
                self._before = (self._trace.samples, self._trace.gaps)
                self._news.wait_for(lambda: self._stopping, _PAUSE_S * 2**life)
        self._give_up("sampling was given up: NVML hung, or its process died, again and again")

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        settings = {
            "interval_s": self._interval_s,
            "phase": self._phase,
            "deadline_s": self._deadline_s,
            "init_deadline_s": self._init_deadline_s,
        }
        uuids = [self._devices[gpu] for gpu in self._map]
        try:
            process = start_child(_CHILD, json.dumps(settings), *uuids, env=self._env)
        except HostFault as fault:
            self._give_up(str(fault))
            return None
        except OSError as error:
            self._give_up(f"no process could be started to sample the GPUs: {error.strerror}")
            return None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a child that is stuck must not block us
        with self._news:
            self._process = process
            self._send({"do": "mark", "phase": self._phase})  # it may have changed since
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Hear the child until it is dead, or silent for too long."""
        assert process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        rest, heard, opened = b"", time.monotonic(), False
        while True:
            ready = poll.poll(500)
            now = time.monotonic()
            if not ready:
                if now - heard > _SILENCE_S + (self._deadline_s if opened else self._init_deadline_s):
                    return
                continue
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                opened |= "ready" in said
                self._hear(said)
                if "hung" in said:
                    return  # it may not even be able to die
            heard = now

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        with self._news:
            self._process = None
            self._news.notify_all()
        process.kill()
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass  # it is dead
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:  # stuck in the kernel: it goes as soon as the driver lets it
            threading.Thread(target=process.wait, name="gpuguard-sampler-reaper", daemon=True).start()

    def _give_up(self, why: str) -> None:
        with self._news:
            self._why = why
            self._news.notify_all()

    def _send(self, request: Mapping[str, Any]) -> None:
        """To the child, if there is one that listens. The lock is held."""
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            os.write(process.stdin.fileno(), (json.dumps(request) + "\n").encode())
        except (OSError, ValueError):
            pass  # dead, stuck or closed: the listening thread sees to it

    def _ask(self, do: str) -> int:
        pids = sorted(self._all_ours(), reverse=True)[:_MAX_PIDS] if self._trace.accounted else []
        with self._news:
            self._asked += 1
            self._send({"do": do, "id": self._asked, "pids": pids})
            return self._asked

    def _refresh(self, do: str = "report") -> None:
        """Hear what the child has not reported yet; a child that does not answer is not waited for."""
        if self._process is None or self._stopping:
            return
        number = self._ask(do)
        with self._news:
            self._news.wait_for(lambda: self._answered >= number or self._process is None, _ANSWER_S)

    def _all_ours(self) -> set[int]:
        """Our pids, those of processes that have ended too."""
        now = set(self._ours())
        with self._news:
            self._known_ours |= now
            return set(self._known_ours)

    # --- what it says -------------------------------------------------------------------------------------------------

    def _hear(self, said: Mapping[str, Any]) -> None:
        seen = {pid for *_, found in said.get("processes", ()) for pid, _ in found or ()}
        if seen - self._known_ours - {pid for _, pid in self._trace.here}:
            self._all_ours()  # a newcomer may be one of ours, and short-lived
        with self._news:
            trace = self._trace
            for number, why in said.get("faults", ()):
                if why is None:
                    trace.faults.pop(self._map[number], None)
                    trace.gaps += 1
                    self._before = (self._before[0], self._before[1] + 1)
                else:
                    trace.faults[self._map[number]] = f"it could not be sampled: {why}"
            if "ready" in said:
                self._hear_ready(said)
            elif "hung" in said:
                self._hear_hang(said)
            elif "failed" in said:
                self._why = f"nothing is sampled: {_failure(said)}"
            else:
                trace.ended = said["at"]
                trace.samples, trace.gaps = self._before[0] + said["samples"], self._before[1] + said["gaps"]
            for phase, row in said.get("peaks", ()):
                trace.hear_peaks(phase, zip(self._map, row, strict=True))
            for number, at, *look in said.get("clocks", ()):
                trace.hear_clocks(self._map[number], Clocks(at, *look))
            for number, at, used, found in said.get("processes", ()):
                trace.hear_processes(self._map[number], at, used, found, self._known_ours)
            for number, pid, peak, start in said.get("accounts", ()):
                trace.accounts[self._map[number], pid] = (peak, start)
            self._answered = max(self._answered, said.get("answer", 0))
            self._news.notify_all()

    def _hear_ready(self, said: Mapping[str, Any]) -> None:
        trace = self._trace
        if trace.began is None:
            trace.began = said["at"]
        for number, used in enumerate(said["ready"]):
            gpu = self._map[number]
            if said["accounting"][number]:
                trace.accounted.add(gpu)
            if used is None:
                continue
            if not self._opened and not self._late:
                trace.baseline[gpu] = used
            if gpu in trace.baseline:
                trace.faults.pop(gpu, None)
                trace.hear_peaks(self._phase, [(gpu, used)])
            else:
                trace.faults[gpu] = "its baseline is not known: NVML answered too late"
        self._opened = True

    def _hear_hang(self, said: Mapping[str, Any]) -> None:
        words = f"NVML did not answer within {said['after_s']:g} s ({said['hung']})"
        if said["gpu"] is None:
            self._trace.faults.update((gpu, words) for gpu in self._map)
            return
        gpu = self._map[said["gpu"]]
        self._trace.faults[gpu] = words
        self._hung[gpu] += 1
        if self._hung[gpu] >= _HANGS:
            self._dead[gpu] = words


def _failure(said: Mapping[str, Any]) -> str:
    """The child's last word."""
    if said["code"] is not None:
        return str(nvml_fault(said["failed"], said["code"]))
    return f"{said['failed']}: {said['text']}"
