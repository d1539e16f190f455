"""What the kernel and the driver say about one boot beside its log: messages, OOM counters, and NVML's Xid events.

It collects and never judges (see ``diagnose.evidence``), only reads, and never keeps a boot waiting or fails it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from . import kernel_log
from .kernel_log import Denied, KernelLog, Paths
from .oom_counters import Counter, OomCounters
from .xid_watch import GpuEvent, XidWatch

__all__ = ["Counter", "Denied", "Evidence", "GpuEvent", "KernelWatch", "Paths"]

#: What ``collect`` may take at most, in seconds.
COLLECT_S: Final = 0.3
#: The driver tells a program of an error and NVML of the Xid at the same moment: the event gets so long to arrive.
_EVENT_S: Final = 0.05
#: The inode of the first pid namespace of a kernel (PROC_PID_INIT_INO): outside of it, kernel messages name other pids.
_FIRST_NAMESPACE: Final = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was said from a boot's start until now.

    ``lines`` are the kernel's messages about GPUs and OOM kills, ``gpus`` the leased GPUs (UUID → PCI bus id, "" when
    unknown), ``pids`` every process of the boot that was seen. ``pids_differ``: in a container, kernel messages name
    other pids than we see. ``host_kills`` counts for the whole machine, ``cgroup_kills`` for the cgroups that
    the server ran in. ``denied`` is what could not be had.
    """

    lines: tuple[str, ...] = ()
    events: tuple[GpuEvent, ...] = ()
    host_kills: Counter | None = None
    cgroup_kills: tuple[Counter, ...] = ()
    gpus: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    pids: frozenset[int] = frozenset()
    pids_differ: bool = False
    denied: tuple[Denied, ...] = ()


class KernelWatch:
    """Watches kernel and driver for one boot. ``gpus`` are the leased ones, ``events`` their Xid events, if wanted."""

    def __init__(
        self,
        gpus: Mapping[str, str] = MappingProxyType({}),
        *,
        paths: Paths | None = None,
        events: XidWatch | None = None,
    ) -> None:
        self._gpus = MappingProxyType(dict(gpus))
        self._paths = paths or kernel_log.PATHS
        self._events = events
        self._counters = OomCounters(self._paths)
        self._log: KernelLog | None = None
        self._pids: set[int] = set()
        self._last = Evidence(gpus=self._gpus)
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin the window: call it before the server is started. Does not wait for anything."""
        self._log = KernelLog(self._paths)
        self._counters.start()
        if self._events is not None:
            self._events.start()

    def note(self, pids: Iterable[int]) -> None:
        """Learn processes of the boot and their cgroups while they live. Cheap when it knows them already."""
        with self._lock:
            self._pids |= set(pids)
            self._counters.note(pids)

    def collect(self, pids: Iterable[int] = ()) -> Evidence:
        """What was said until now, about these and all noted processes; takes at most ``COLLECT_S`` seconds."""
        if self._closed or self._log is None:
            return self._last
        deadline = time.monotonic() + COLLECT_S
        self.note(pids)
        denied: list[Denied] = []
        events: tuple[GpuEvent, ...] = ()
        if self._events is not None:
            events = self._events.events(_EVENT_S)
            denied += self._events.denied()
        lines = self._log.read(max(0.02, deadline - time.monotonic()))
        if isinstance(lines, Denied):
            denied.append(lines)
            lines = ()
        with self._lock:
            self._last = Evidence(
                lines=lines,
                events=events,
                host_kills=self._counters.host(),
                cgroup_kills=self._counters.cgroups(),
                gpus=self._gpus,
                pids=frozenset(self._pids),
                pids_differ=self._in_container(),
                denied=tuple(denied),
            )
        return self._last

    def close(self) -> None:
        """End the window; ``collect`` then gives what was collected last. Safe to call twice."""
        self._closed = True
        if self._log is not None:
            self._log.close()
        if self._events is not None:
            self._events.close()

    def _in_container(self) -> bool:
        try:
            return os.readlink(self._paths.proc / "self/ns/pid") != _FIRST_NAMESPACE
        except OSError:
            return False
