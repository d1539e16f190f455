"""The process that samples GPU memory: commands on stdin, one JSON report a line on what was its stdout.

Run by file path with the folder of pynvml, a JSON of settings and the GPUs' UUIDs as arguments. It keeps only peaks,
and must never outlive its parent, even while a call hangs in the driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: New peaks are reported after so long; the rest, and that we live, after a second.
REPORT_S = 0.25
HEARTBEAT_S = 1.0
CLOCKS_S = 0.5
PROCESSES_S = 1.0
#: GPUs that are asked for the slower things in one tick: after a sleep the first one costs most.
GROUP = 4
#: With ticks further apart, all groups that are due are asked in one.
GROUP_BELOW_S = 0.05
#: A GPU that answered with an error is asked again so much later.
RETRY_S = 1.0
MAX_PHASES = 64
HERE = Path(__file__)


def load_facts() -> Any:
    """``facts/nvml_child.py`` as a module: an isolated child has no folder of ours on its path."""
    spec = importlib.util.spec_from_file_location("nvml_child", HERE.parent.parent / "facts" / "nvml_child.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fast_reader(binding: Any, handle: Any, version: int) -> Callable[[], int] | None:
    """Used bytes without a new struct for each look, a fifth of the cost; None with a binding of another make."""
    try:
        if version == 2:
            function = binding._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo_v2")
            info = binding.c_nvmlMemory_v2_t()
            info.version = binding.nvmlMemory_v2
        else:
            function = binding._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo")
            info = binding.c_nvmlMemory_t()
    except AttributeError:
        return None
    reference = ctypes.byref(info)

    def read() -> int:
        code = function(handle, reference)
        if code:
            raise binding.NVMLError(code)
        used: int = info.used
        return used

    return read


class Worker:
    """Sweeps over the GPUs, and reports what changed. ``requests`` and ``phase`` are written by the main thread."""

    def __init__(self, settings: dict[str, Any], uuids: list[str]) -> None:
        self.uuids = uuids
        self.interval_s: float = settings["interval_s"]
        self.phase: str = settings["phase"]
        self.requests: deque[dict[str, Any]] = deque()
        self.calling: tuple[float, str] | None = None  # since when NVML is being called, and what for
        self.current = 0
        self.facts: Any = None
        self.nvml: Any = None
        self.readers: list[tuple[int, Callable[[], int]]] = []
        self.peaks: dict[str, list[int]] = {}
        self.changed: set[str] = set()
        self.samples = self.gaps = 0
        self.retry: dict[int, float] = {}
        self.news: dict[str, list[Any]] = {"clocks": [], "processes": [], "faults": []}
        self.due: list[tuple[float, str, list[int]]] = []
        self.rest_until = 0.0
        self.accounting: list[bool] = [False] * len(uuids)

    # --- NVML -----------------------------------------------------------------------------------------------------

    def open(self, folder: str) -> None:
        """Load NVML, take the first sample of every GPU, and report it as ``ready``."""
        self.calling = (time.monotonic(), "nvmlInit")
        sys.path.append(folder)
        import pynvml

        self.facts = load_facts()
        self.nvml = self.facts.Nvml(pynvml)
        pynvml.nvmlInit()
        first: list[int | None] = []
        for gpu in range(len(self.uuids)):
            self.calling, self.current = (time.monotonic(), "memory"), gpu
            first.append(self.admit(gpu))
        self.calling = None
        now = time.monotonic()
        groups = [list(range(len(self.uuids)))[start : start + GROUP] for start in range(0, len(self.uuids), GROUP)]
        for number, group in enumerate(groups):
            # not all in one tick: a real driver may take a millisecond for each
            for kind, every in (("clocks", CLOCKS_S), ("processes", PROCESSES_S)):
                self.due.append((now + number * every / len(groups), kind, group))
        say(ready=first, at=now, accounting=self.accounting, faults=self.take("faults"))

    def admit(self, gpu: int) -> int | None:
        """Begin to sample a GPU; its used bytes now, None when that cannot be known."""
        try:
            handle = self.nvml.handle(self.uuids[gpu])
            memory, unified = self.nvml.memory(handle)
            mode = self.nvml.attempt("nvmlDeviceGetAccountingMode", handle)
        except Exception as error:
            self.fault(gpu, self.facts.describe(error)["name"])
            return None
        if unified or not memory:
            self.news["faults"].append([gpu, "NVML does not tell its memory" + " (unified)" * unified])
            return None  # and never asked again
        self.accounting[gpu] = mode == 1
        read = fast_reader(self.nvml.nvml, handle, memory["version"])
        self.readers.append((gpu, read or (lambda: self.nvml.memory(handle)[0]["used"])))
        used: int = memory["used"]
        return used

    def fault(self, gpu: int, why: str) -> None:
        """Leave a GPU out for a while."""
        self.readers = [one for one in self.readers if one[0] != gpu]
        self.retry[gpu] = time.monotonic() + RETRY_S
        self.news["faults"].append([gpu, why])

    def sweep(self) -> None:
        """One sample of every GPU."""
        phase = self.phase
        row = self.peaks.get(phase)
        if row is None:
            if len(self.peaks) >= MAX_PHASES:
                phase = next(reversed(self.peaks))
            row = self.peaks.setdefault(phase, [-1] * len(self.uuids))
        for gpu, read in self.readers:
            self.current = gpu
            try:
                used = read()
            except Exception as error:
                self.fault(gpu, self.facts.describe(error)["name"])
                continue
            if used > row[gpu]:
                row[gpu] = used
                self.changed.add(phase)
        self.samples += 1

    def look(self, kind: str, gpu: int) -> None:
        """Ask for the slower things of one GPU."""
        self.current = gpu
        if gpu in self.retry:
            if time.monotonic() >= self.retry[gpu]:
                del self.retry[gpu]
                if self.admit(gpu) is not None:
                    self.news["faults"].append([gpu, None])
            return
        read = next((read for number, read in self.readers if number == gpu), None)
        if read is None:
            return
        try:
            handle = self.nvml.handle(self.uuids[gpu])
            if kind == "clocks":
                self.news[kind].append([gpu, time.monotonic(), *self.clocks(handle)])
            else:
                self.news[kind].append([gpu, time.monotonic(), read(), self.processes(gpu)])
        except Exception as error:
            self.fault(gpu, self.facts.describe(error)["name"])

    def processes(self, gpu: int) -> list[Any] | None:
        """(pid, bytes or None) of all that hold the GPU; None where the driver does not list them."""
        try:
            found: list[Any] = self.nvml.processes_of(self.uuids[gpu])
        except Exception as error:
            if self.facts.code_of(error) in self.facts.GPU_BROKEN:
                raise
            return None
        return found

    def clocks(self, handle: Any) -> list[int | None]:
        """SM clock in MHz, the event reasons' bits, utilization in percent; None where it is not told."""
        attempt, binding = self.nvml.attempt, self.nvml.nvml
        reasons = attempt("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # before R535
            reasons = attempt("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        rates = attempt("nvmlDeviceGetUtilizationRates", handle)
        mhz = attempt("nvmlDeviceGetClockInfo", handle, binding.NVML_CLOCK_SM)
        return [mhz, reasons, None if rates is None else rates.gpu]

    def accounts(self, pids: list[int]) -> list[list[Any]]:
        """[GPU, pid, peak bytes, start in epoch µs] of those processes that the driver keeps account of."""
        found = []
        for gpu, _ in self.readers:
            if not self.accounting[gpu]:
                continue
            self.current = gpu
            handle = self.nvml.handle(self.uuids[gpu])
            for pid in pids:
                try:
                    stats = self.nvml.nvml.nvmlDeviceGetAccountingStats(handle, pid)
                except Exception:
                    continue  # it never used this GPU, or is forgotten
                if stats.maxMemoryUsage is not None:
                    found.append([gpu, pid, stats.maxMemoryUsage, stats.startTime])
        return found

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Sample for ever, at moments that do not drift."""
        interval = self.interval_s
        due = reported = time.monotonic()
        while True:
            now = time.monotonic()
            if now - due > 2 * interval:
                self.gaps += 1
                due = now
            due += interval
            self.calling = (now, "memory")
            self.sweep()
            self.slow(now)
            self.calling = None
            if self.requests:
                self.obey(self.requests.popleft())
            if now - reported >= (REPORT_S if self.changed else HEARTBEAT_S):
                reported = now
                self.report()
            while not self.requests and (rest := due - time.monotonic()) > 0:
                time.sleep(min(rest, 0.1))

    def slow(self, now: float) -> None:
        """The slow questions that are due: one group of GPUs at 50 Hz, all that are due at slower rates.

        With a driver that is slow they may take no more than a fifth of the time.
        """
        while now >= self.rest_until:
            self.due.sort()
            when, kind, group = self.due[0]
            if when > now:
                return
            for gpu in group:
                self.calling = (time.monotonic(), kind)
                self.look(kind, gpu)
            every = CLOCKS_S if kind == "clocks" else PROCESSES_S
            self.due[0] = (max(when + every, now + every / 2), kind, group)
            end = time.monotonic()
            self.rest_until = end + 4 * (end - now)
            if self.interval_s < GROUP_BELOW_S:
                return

    def obey(self, request: dict[str, Any]) -> None:
        """A report at once, with the driver's accounts of ``pids``, after a ``look`` at all processes if asked."""
        self.calling = (time.monotonic(), "accounting")
        accounts = self.accounts(request["pids"])
        for gpu in range(len(self.uuids)) if request["do"] == "look" else ():
            self.calling = (time.monotonic(), "processes")
            self.look("processes", gpu)
        self.calling = None
        self.report(answer=request["id"], accounts=accounts)
        if request["do"] == "stop":
            os._exit(0)

    def report(self, **more: Any) -> None:
        """Send what is new."""
        news = {kind: self.take(kind) for kind in self.news if self.news[kind]}
        if self.changed:
            news["peaks"] = [[phase, self.peaks[phase]] for phase in self.peaks if phase in self.changed]
            self.changed.clear()
        say(at=time.monotonic(), samples=self.samples, gaps=self.gaps, **news, **more)

    def take(self, kind: str) -> list[Any]:
        """The news of a kind, which are old from now on."""
        taken, self.news[kind] = self.news[kind], []
        return taken


OUT = -1


def say(**words: Any) -> None:
    """Tell our parent, a whole line at once."""
    line = (json.dumps(words, separators=(",", ":")) + "\n").encode()
    while line:
        line = line[os.write(OUT, line) :]


def work(worker: Worker, folder: str) -> None:
    """Sample; an error that is not one GPU's is our last word."""
    try:
        worker.open(folder)
        worker.run()
    except BaseException as error:
        code = getattr(error, "value", None)
        say(failed=type(error).__name__, code=code if isinstance(code, int) else None, text=str(error))
    finally:
        os._exit(1)


def watch(worker: Worker, parent: int, deadline_s: float, init_deadline_s: float) -> None:
    """End this process when its parent is gone, or a call does not come back: then it says which."""
    while os.getppid() == parent:
        calling = worker.calling
        if calling is not None:
            since, what = calling
            limit = init_deadline_s if what == "nvmlInit" else deadline_s
            if time.monotonic() - since > limit:
                say(hung=what, gpu=None if what == "nvmlInit" else worker.current, after_s=limit)
                break
        time.sleep(0.5)
    os._exit(2)


def main() -> None:
    """Obey stdin. NVML is called on another thread, so that a hanging call cannot keep us alive."""
    global OUT
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is our parent's affair
    OUT = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not garble the reports
    settings = json.loads(sys.argv[2])
    worker = Worker(settings, sys.argv[3:])
    limits = (settings["deadline_s"], settings["init_deadline_s"])
    threading.Thread(target=watch, args=(worker, os.getppid(), *limits), daemon=True).start()
    threading.Thread(target=work, args=(worker, sys.argv[1]), daemon=True).start()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "mark":
            worker.phase = request["phase"]
        else:
            worker.requests.append(request)
    os._exit(0)


if __name__ == "__main__":
    main()
