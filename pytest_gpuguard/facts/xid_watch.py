"""Xid and double-bit ECC events of leased GPUs, told by NVML through a small child process of its own.

A driver that hangs must never be waited for: the child talks, a thread listens, and everybody else only looks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .kernel_log import Denied

_CHILD: Final = Path(__file__).with_name("xid_child.py")


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Something that NVML reported about one GPU: ``kind`` is "xid", "ecc" (double-bit) or "lost".

    ``number`` is the Xid; 0 for the other kinds. ``at`` is epoch seconds, when the child heard of it.
    """

    uuid: str
    kind: str
    number: int = 0
    at: float = 0.0


class XidWatch:
    """Listens for one boot. ``env`` is the child's environment (default: ours when it starts)."""

    def __init__(self, uuids: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._uuids = tuple(uuids)
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._events: list[GpuEvent] = []
        self._refused: dict[str, str] = {}
        self._news = threading.Event()
        self.registered = threading.Event()  #: Set once NVML has answered for every GPU.

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the child, and do not wait for NVML. Without pynvml there is nothing to listen to."""
        from .nvml import binding_folder

        folder = binding_folder()
        if folder is None or not self._uuids:
            self._refused = dict.fromkeys(self._uuids, "the Python package nvidia-ml-py is missing")
            self.registered.set()
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), str(folder), *self._uuids],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=None if self._env is None else dict(self._env),
            )
        except OSError as error:
            self._refused = dict.fromkeys(self._uuids, f"no process could be started: {error.strerror}")
            self.registered.set()
            return
        threading.Thread(target=self._listen, args=(self._process,), name="gpuguard-xid", daemon=True).start()

    def events(self, wait_s: float = 0.0) -> tuple[GpuEvent, ...]:
        """What was reported so far, after waiting at most ``wait_s`` seconds for the first of it."""
        if not self._events and self._process is not None and wait_s > 0 and self.registered.is_set():
            self._news.wait(wait_s)
        return tuple(self._events)

    def denied(self) -> tuple[Denied, ...]:
        """GPUs whose events NVML does not report, with its reason."""
        return tuple(Denied("NVML events", f"{uuid}: {why}") for uuid, why in sorted(self._refused.items()))

    def close(self) -> None:
        """End the child, and do not wait for it. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # the listening thread reaps it
        try:
            if process.stdin is not None:
                process.stdin.close()
        except OSError:
            pass

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                self._hear(json.loads(line))
        self.registered.set()  # a child that died has nothing more to say
        process.wait()

    def _hear(self, said: Mapping[str, Any]) -> None:
        if "refused" in said:
            self._refused = dict(said["refused"])
            self.registered.set()
        else:
            self._events.append(GpuEvent(said["uuid"], said["kind"], said["number"], time.time()))
            self._news.set()
