"""The parent's handle of one load-generating process: a child that dies is reported, and never waited for."""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, Final

_PACKAGE: Final = Path(__file__).resolve().parent.parent
#: What httpx needs; the child sees the folders of these, and nothing else of the user's environment.
_NEEDED: Final = (
    *("httpx", "httpcore", "h11", "anyio", "certifi", "idna", "sniffio", "typing_extensions", "exceptiongroup"),
)
#: Our package is made known by its folder alone: its __init__ would import pytest.
_START: Final = """
import json, os, sys, types
answers = os.dup(1)
def crashed(kind, error, trace):
    os.write(answers, json.dumps({"crashed": f"{kind.__name__}: {error}"}).encode() + b"\\n")
sys.excepthook = crashed
package = types.ModuleType("pytest_gpuguard")
package.__path__ = [sys.argv[1]]
sys.modules["pytest_gpuguard"] = package
sys.path += sys.argv[2:]
from pytest_gpuguard.measure.meter_child import main
main()
"""


class MeterProcess:
    """One child; its messages arrive in ``inbox`` as (this, message), None when it has ended."""

    def __init__(
        self, config: dict[str, Any], inbox: queue.SimpleQueue[tuple[MeterProcess, dict[str, Any] | None]]
    ) -> None:
        self.slots: Sequence[int] = config["slots"]
        self.heard = inf  # when it last said something; nothing is due before it is ready
        self._inbox = inbox
        # -I -S: neither the user's sitecustomize nor any .pth file can slow or disturb the child
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(_PACKAGE), *httpx_folders()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[config["pulse"]],
        )
        threading.Thread(target=self._read, name="gpuguard-meter", daemon=True).start()
        self.tell(**config)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, **command: Any) -> None:
        """Send a command; one to a process that is gone is lost, its end is reported by ``inbox``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass

    def fate(self) -> str:
        """How it ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"died of signal {-code}" if code < 0 else f"ended with status {code}"

    def kill(self) -> None:
        """End it; what it had in flight is disconnected."""
        self._process.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            pass  # stuck in the kernel: it goes as soon as it can
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
        except OSError:
            pass  # an unsent command, to a process that is gone

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                try:
                    message = json.loads(line)
                except ValueError:
                    break  # cut off by its death
                self.heard = time.monotonic()
                self._inbox.put((self, message))
        self._inbox.put((self, None))


def httpx_folders() -> list[str]:
    """The folders that the child must look into to import httpx, in this process's order."""
    folders: list[str] = []
    for name in _NEEDED:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            path = Path(spec.origin).parent
            folder = str(path.parent if spec.submodule_search_locations else path)
            if folder not in folders:
                folders.append(folder)
    return folders
