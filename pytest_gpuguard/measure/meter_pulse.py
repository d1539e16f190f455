"""When the server last spoke to any process of a meter: a request in a queue is quiet, a dead server is silent.

Each process writes one place of a shared piece of memory, and all read the latest. It must never cost time between two
tokens: no lock, no message.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time

_PLACE = 8  # bytes of one time


class Pulse:
    """The time of the last byte from the server; without ``fd`` of this process alone.

    ``fd`` is from `shared_memory`, and is closed; ``own`` is this process's place in it.
    """

    def __init__(self, fd: int | None = None, own: int = 0) -> None:
        self._times: memoryview[float] = memoryview(bytearray(_PLACE)).cast("d")
        if fd is not None:
            self._times = memoryview(mmap.mmap(fd, 0)).cast("d")
            os.close(fd)
        self._own = own

    def beat(self) -> None:
        """A byte came."""
        self._times[self._own] = time.monotonic()

    def last(self) -> float:
        """``time.monotonic()`` of the last byte that came to any of the processes; 0 before the first one."""
        return max(self._times)


def shared_memory(processes: int) -> int:
    """A descriptor of zeros for so many processes, to be inherited by them. Raises OSError."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("gpuguard-meter")
    else:  # not every build of Python has it
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, processes * _PLACE)
    except OSError:
        os.close(fd)
        raise
    return fd
