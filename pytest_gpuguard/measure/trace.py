"""What a sampler has heard so far, and what follows from it: the peak, and the conditions between two moments.

Nothing here grows with time beyond a bound, and nothing asks NVML.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..claims.measurement import ACCOUNTING, POWER_LIMIT, SAMPLED, Conditions, Peak
from ..facts.holders import describe_pid, host_pids

GIB: Final = 1 << 30
#: Looks at the clocks that are kept for each GPU: half an hour, at two a second.
MAX_LOOKS: Final = 3600
MAX_STAYS: Final = 1024
IDLE: Final = 0x1
#: nvml.h, nvmlClocksEventReason*: those that hold a working GPU down. Idle, set clocks, sync boost do not count.
REASONS: Final = {
    0x04: f"{POWER_LIMIT} (software power cap)",
    0x08: "hardware slowdown",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake (asserted from outside)",
}
#: nvml.h: the hardware slowdown is an umbrella over these two.
_SLOWDOWN: Final = 0x08
_KINDS_OF_SLOWDOWN: Final = 0x40 | 0x80
#: From this utilization on, in percent, the clock says how fast the GPU works.
BUSY_PERCENT: Final = 50
#: Clocks that are lower by a greater share have fallen.
FALL: Final = 0.05
#: What the driver may count beside a process's own memory, or the other way round.
_SLACK: Final = 64 << 20
#: A process with less computes nothing: a CUDA context alone takes more, a display server some MiB.
_CONTEXT: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class Clocks:
    """One look at a GPU's clocks: monotonic time, SM clock in MHz, event reasons' bits, utilization in percent."""

    at: float
    mhz: int | None
    reasons: int | None
    percent: int | None

    @property
    def busy(self) -> bool:
        """Whether the GPU works: an idle one's clock is low, and says nothing."""
        if self.reasons is not None and self.reasons & IDLE:
            return False
        return self.percent >= BUSY_PERCENT if self.percent is not None else self.reasons is not None


@dataclass(slots=True)
class Stay:
    """A process on a GPU; pid 0 is memory that NVML gives to no process.

    It came after the look ``came``, was seen until the look ``last``, and had ``left`` at the next one. ``named`` says
    whether ``words`` describe the process that NVML means.
    """

    gpu: int
    pid: int
    came: float
    last: float
    used: int | None
    words: str
    named: bool
    left: float | None = None


class Trace:
    """All that was heard of ``uuids``. Not safe to share by threads without a lock."""

    def __init__(self, uuids: Sequence[str], interval_s: float) -> None:
        self.uuids = tuple(uuids)
        self.interval_s = interval_s
        self.began: float | None = None  # monotonic, of the first sample
        self.ended = 0.0
        self.samples = self.gaps = 0
        self.baseline: dict[int, int] = {}
        self.peaks: dict[str, dict[int, int]] = {}
        self.faults: dict[int, str] = {}
        self.accounted: set[int] = set()  # GPUs with accounting mode on
        self.accounts: dict[tuple[int, int], tuple[int, int]] = {}  # (GPU, pid) → peak bytes, start in epoch µs
        self.clocks = [deque[Clocks](maxlen=MAX_LOOKS) for _ in uuids]
        self._high = [0] * len(self.uuids)  # busy clock held at two looks in succession, among those forgotten
        self.processes_at = [0.0] * len(self.uuids)
        self.untold: set[int] = set()  # GPUs whose processes the driver does not list
        self.here: dict[tuple[int, int], Stay] = {}
        self.gone: deque[Stay] = deque(maxlen=MAX_STAYS)

    # --- what is heard ----------------------------------------------------------------------------------------------

    def hear_peaks(self, phase: str, row: Iterable[tuple[int, int]]) -> None:
        """The highest used bytes of each GPU in a phase; -1 where there was no sample."""
        known = self.peaks.setdefault(phase, {})
        for gpu, used in row:
            if used >= 0:
                known[gpu] = max(used, known.get(gpu, 0))

    def hear_clocks(self, gpu: int, look: Clocks) -> None:
        """One look at the clocks."""
        kept = self.clocks[gpu]
        if len(kept) == MAX_LOOKS:
            self._high[gpu] = max(self._high[gpu], _held(kept[0], kept[1]))
        kept.append(look)

    def hear_processes(
        self, gpu: int, at: float, used: int, found: Sequence[tuple[int, int | None]] | None, ours: Collection[int]
    ) -> None:
        """One look at who is on a GPU with ``used`` bytes in use: (pid, bytes or None) of each; None: not told."""
        (self.untold.add if found is None else self.untold.discard)(gpu)
        if found is None:
            self.processes_at[gpu] = at
            return
        over = used - self.baseline.get(gpu, 0)
        before = self.processes_at[gpu] or self.began or at
        for pid, size in found or ([(0, over)] if over > _SLACK else []):
            stay = self.here.get((gpu, pid))
            if stay is None:
                self.here[gpu, pid] = Stay(gpu, pid, before, at, size, *_who(pid, ours))
            else:
                stay.last = at
                stay.used = max((one for one in (size, stay.used) if one is not None), default=None)
        for key, stay in list(self.here.items()):
            if key[0] == gpu and stay.last < at:
                stay.left = at
                self.gone.append(self.here.pop(key))
        self.processes_at[gpu] = at

    # --- what follows -----------------------------------------------------------------------------------------------

    def peak(self, ours: Collection[int], since_us: float) -> Peak | None:
        """The peak above the baseline, on the GPU where it was highest; None when nothing was sampled.

        Accounting knows the exact peak of each of our processes that began after ``since_us`` (epoch). Peaks of
        several processes of one GPU need not have come together: their sum would be an upper bound, the greatest of
        them is a lower one. So the figure is the greater of sampled and largest single process, and it is exact
        ("accounting") only when every GPU has accounting on and at most one process of ours, that holds all of it.
        """
        sampled: dict[int, int] = {}
        for row in self.peaks.values():
            for gpu, used in row.items():
                if gpu in self.baseline:
                    sampled[gpu] = max(sampled.get(gpu, 0), used - self.baseline[gpu])
        if not sampled:
            return None
        most, exact = dict(sampled), True
        for gpu, over in sampled.items():
            known = [one for (where, pid), one in self.accounts.items() if where == gpu and pid in ours]
            fresh = [peak for peak, start in known if start >= since_us]
            most[gpu] = max(over, *fresh, 0)
            whole = fresh[0] if len(fresh) == 1 else 0
            exact &= gpu in self.accounted and len(known) == len(fresh) <= 1 and whole >= over - _SLACK * len(fresh)
        where = max(most, key=lambda gpu: most[gpu])
        span = self.ended - self.began if self.began is not None else 0.0
        mean = span / self.samples if self.samples else 0.0
        return Peak(
            most[where] / GIB,
            self.uuids[where],
            ACCOUNTING if exact else SAMPLED,
            mean if mean > 1.5 * self.interval_s and self.samples > 4 else self.interval_s,
            self.samples,
            self.gaps,
            tuple(self._phases()),
            tuple(uuid for gpu, uuid in enumerate(self.uuids) if gpu not in sampled or gpu in self.faults),
        )

    def _phases(self) -> Iterator[tuple[str, float]]:
        for phase, row in self.peaks.items():
            over = [used - self.baseline[gpu] for gpu, used in row.items() if gpu in self.baseline]
            if over:
                yield phase, max(0, *over) / GIB

    def conditions(self, since: float, until: float, ours: Collection[int]) -> Conditions:
        """What happened from ``since`` to ``until`` (monotonic seconds).

        Clocks count at the looks between them. A process counts that may have been there: looks at processes are a
        second apart, so one that came or left within a second of that time is told too.
        """
        slowed: list[str] = []
        unknown: list[str] = []
        silent: list[str] = []
        for gpu, uuid in enumerate(self.uuids):
            if gpu in self.faults:
                unknown.append(f"{uuid}: {self.faults[gpu]}")
            looks = [look for look in self.clocks[gpu] if since <= look.at <= until]
            if gpu in self.faults and not looks and self.processes_at[gpu] < since:
                silent.append(f"{uuid}: {self.faults[gpu]}")
            if not looks:
                unknown.append(f"{uuid}: its clocks were not looked at in this time")
            elif all(look.mhz is None for look in looks):
                unknown.append(f"{uuid}: its SM clock is not told")
            if looks and all(look.reasons is None for look in looks):
                unknown.append(f"{uuid}: what holds its clocks down is not told")
            slowed += (f"{uuid}: {line}" for line in self._slowed(gpu, looks, until))
            if self.processes_at[gpu] < since:
                unknown.append(f"{uuid}: its processes were not looked at in this time")
            elif gpu in self.untold:
                unknown.append(f"{uuid}: NVML does not list its processes")
        foreign: list[str] = []
        for stay in (*self.gone, *self.here.values()):
            end = stay.last if stay.left is None else stay.left
            small = stay.named and stay.used is not None and stay.used < _CONTEXT
            if stay.pid in ours or end < since or stay.came > until or small:
                continue
            size = "an unknown amount" if stay.used is None else f"{stay.used / GIB:.2f} GiB"
            line = f"{self.uuids[stay.gpu]}: {stay.words} with {size}"
            (foreign if stay.named else unknown).append(line)
        return Conditions(tuple(slowed), tuple(foreign), tuple(unknown), tuple(silent))

    def _slowed(self, gpu: int, looks: Sequence[Clocks], until: float) -> Iterator[str]:
        told = [look.reasons for look in looks if look.reasons is not None and not look.reasons & IDLE]
        for bit, words in REASONS.items():
            hit = [one for one in told if one & bit and not (bit == _SLOWDOWN and one & _KINDS_OF_SLOWDOWN)]
            if hit:
                yield f"{words} at {len(hit)} of {len(looks)} looks"
        working = [look for look in looks if look.busy and look.mhz is not None]
        if not working:
            return
        earlier = [look for look in self.clocks[gpu] if look.at <= until]
        high = max([self._high[gpu], *map(_held, earlier, earlier[1:])])
        # the mean, as work done goes by it: a short dip in a long window does little
        mean = sum(look.mhz or 0 for look in working) / len(working)
        if mean < (1 - FALL) * high:
            capped = all((look.reasons or 0) & 0x04 for look in working if (look.mhz or 0) < (1 - FALL) * high)
            yield f"clocks fell from {high} to {mean:.0f} MHz" + f" (at the {POWER_LIMIT})" * capped


def _held(one: Clocks, other: Clocks) -> int:
    """The SM clock in MHz that a working GPU held at two looks in succession; 0 when it did not. A boost is no norm."""
    if one.mhz is None or other.mhz is None or not (one.busy and other.busy):
        return 0
    return min(one.mhz, other.mhz)


def _who(pid: int, ours: Collection[int]) -> tuple[str, bool]:
    """The process in words, and whether that is the one NVML means."""
    if not pid:
        return "memory is in use, but NVML names no process", False
    if pid in ours:
        return f"pid {pid}", True
    if not host_pids():
        return f"pid {pid} from another pid namespace: whether it is ours cannot be told", False
    return describe_pid(pid), os.path.exists(f"/proc/{pid}")
