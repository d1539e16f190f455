"""The process that waits for NVML's events: one JSON line for what it may listen to, and one for each event.

Run by file path, with the folder of pynvml and the GPUs' UUIDs as arguments; imports nothing of ours. It must never
outlive its parent, even while a call hangs in the driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any

GPU_IS_LOST = 15
TIMEOUT = 10
WAIT_MS = 500
#: nvml.h: nvmlEventTypeDoubleBitEccError, nvmlEventTypeXidCriticalError.
DOUBLE_BIT, XID = 0x2, 0x8


def code_of(error: Exception) -> int | None:
    """NVML's number for the error (nvmlReturn_t); None when it is not NVML's."""
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def address(handle: Any) -> int | None:
    """What tells a handle from another: a GPU that is lost does not answer who it is any more."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class Listener:
    """One event set over the GPUs that support it."""

    def __init__(self, nvml: Any, out: Any) -> None:
        self.nvml, self.out = nvml, out
        self.handles: dict[str, Any] = {}

    def say(self, **words: Any) -> None:
        """Tell our parent."""
        self.out.write(json.dumps(words) + "\n")
        self.out.flush()

    def register(self, uuids: list[str]) -> Any:
        """An event set with every GPU that has one of the two kinds; the others are refused, with NVML's word."""
        refused: dict[str, str] = {}
        events: Any = None
        try:
            self.nvml.nvmlInit()
            events = self.nvml.nvmlEventSetCreate()
        except Exception as error:
            refused = dict.fromkeys(uuids, type(error).__name__)
            uuids = []
        for uuid in uuids:
            try:
                handle = self.nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
                known = self.nvml.nvmlDeviceGetSupportedEventTypes(handle) & (DOUBLE_BIT | XID)
                if not known & XID:
                    refused[uuid] = "not supported"
                if known:
                    self.nvml.nvmlDeviceRegisterEvents(handle, known, events)
                    self.handles[uuid] = handle
            except Exception as error:
                refused[uuid] = type(error).__name__
        self.say(refused=refused)
        return events if self.handles else None

    def listen(self, events: Any) -> None:
        """Wait for events for ever; a set that cannot be waited for any more ends it."""
        by_address = {address(handle): uuid for uuid, handle in self.handles.items()}
        lost: set[str] = set()
        while True:
            try:
                data = self.nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except Exception as error:
                if code_of(error) == GPU_IS_LOST:
                    for uuid in self.lost() - lost:
                        lost.add(uuid)
                        self.say(uuid=uuid, kind="lost", number=0)
                    time.sleep(WAIT_MS / 1000)
                elif code_of(error) != TIMEOUT:
                    return
                continue
            whose = by_address.get(address(data.device))
            if whose is not None and data.eventType == XID:
                self.say(uuid=whose, kind="xid", number=int(data.eventData))
            elif whose is not None and data.eventType == DOUBLE_BIT:
                self.say(uuid=whose, kind="ecc", number=0)

    def lost(self) -> set[str]:
        """Which of our GPUs are lost: the wait itself does not say."""
        found = set()
        for uuid, handle in self.handles.items():
            try:
                self.nvml.nvmlDeviceGetUUID(handle)
            except Exception as error:
                if code_of(error) == GPU_IS_LOST:
                    found.add(uuid)
        return found


def work(out: Any, folder: str, uuids: list[str]) -> None:
    """Register and listen."""
    sys.path.append(folder)
    try:
        import pynvml

        listener = Listener(pynvml, out)
        events = listener.register(uuids)
        if events is not None:
            listener.listen(events)
    finally:
        os._exit(0)


def die_with(parent: int) -> None:
    """End this process once its parent is gone, even if somebody else inherited our stdin's other end."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main() -> None:
    """NVML runs on another thread, so that a hanging call cannot keep us alive; stdin's end is our parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is our parent's affair
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not garble our words
    threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=work, args=(out, sys.argv[1], sys.argv[2:]), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
