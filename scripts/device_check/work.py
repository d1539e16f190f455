"""Our side of the processes that use the GPU: started, told what to do, heard with a deadline, and ended.

No process that it starts may outlive the check that started it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from .result import BASELINE, Findings, gib

if TYPE_CHECKING:
    from pytest_gpuguard.facts.nvml import NvmlChild

#: Names another script in the place of workload.py, for tests on machines without a GPU.
STAND_IN: Final = "DEVICE_CHECK_WORKLOAD"
_WORKLOAD: Final = Path(__file__).with_name("workload.py")
#: Importing torch and making a context may take so long on a cold machine, and an order.
START_S: Final = 90.0
ORDER_S: Final = 60.0
#: How long memory of the check before may take to come back, and how often it is looked at, in seconds.
SETTLE_S: Final = 20.0
_LOOK_S: Final = 0.05


class WorkFailed(RuntimeError):
    """A process that was to use the GPU did not: the text says what it said last."""


def command(*words: str) -> list[str]:
    """The command line of a workload."""
    return [sys.executable, os.environ.get(STAND_IN) or str(_WORKLOAD), *words]


def settled(found: Findings, child: NvmlChild, uuid: str, seconds: float = SETTLE_S) -> bool:
    """Wait until what the check before had is back, so that it is no part of this one's baseline; else a problem."""
    until = time.monotonic() + seconds
    while (used := child.memory([uuid])[uuid].used or 0) > BASELINE and time.monotonic() < until:
        time.sleep(_LOOK_S)
    said = f"{gib(used)} GiB were in use before this check began, {seconds:g} s long"
    return found.expect(used <= BASELINE, said)


class Worker:
    """A process that does with GPU memory what it is told; a context manager. Raises WorkFailed."""

    def __init__(self, env: Mapping[str, str], start_s: float = START_S, pass_fds: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            command("obey"),
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last = ""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.first = self._answer(start_s)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        while True:
            try:
                line = self._lines.get(timeout=seconds)
            except queue.Empty:
                raise WorkFailed(f"the process that uses the GPU said nothing for {seconds:g} s") from None
            if line is None:
                raise WorkFailed(f"the process that uses the GPU ended: {self._last.strip() or 'it said nothing'}")
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
            self._last = line if line.strip() else self._last

    def do(self, what: str, limit_s: float = ORDER_S, **arguments: Any) -> dict[str, Any]:
        """Have it do something, and return its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and said why
        return self._answer(limit_s)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass  # an order that it did not take

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
