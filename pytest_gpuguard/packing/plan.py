"""The packing of units onto GPUs, pure: the order to start them in, and which of them may start now.

It must never decide who holds a GPU (the lease does), and never delay a unit that waits by one that came later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from .units import BESIDE_BOOT, Unit, Work, units_of

if TYPE_CHECKING:
    from ..claims.gpuset import GpuChoice

__all__ = [
    "BESIDE_BOOT",
    "Planned",
    "Running",
    "Start",
    "Unit",
    "Work",
    "bound",
    "choose",
    "makespan",
    "plan",
    "simulate",
    "units_of",
]

#: How long the search for a good order may take, in seconds, and how many orders are tried at most.
SEARCH_S: Final = 0.15
ORDERS: Final = 200


@dataclass(frozen=True, slots=True)
class Running:
    """A unit on a worker: the GPUs that it was given, and when it started, in seconds of the caller's clock."""

    unit: Unit
    uuids: tuple[str, ...]
    started: float

    def ends(self, now: float) -> float:
        """When it is expected to end. One that is overdue is expected to take a quarter longer than it took so far."""
        planned = self.started + self.unit.seconds
        return planned if planned > now else now + max(1.0, (now - self.started) / 4)


@dataclass(frozen=True, slots=True)
class Start:
    """A unit that may start now, and on which GPUs."""

    unit: Unit
    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A unit of a plan: from when to when, in seconds from the plan's beginning, and on which GPUs."""

    unit: Unit
    uuids: tuple[str, ...]
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Held:
    """The place of the first unit that has to wait: from ``at`` on these GPUs are its own, and the slot if so."""

    at: float
    uuids: frozenset[str]
    slot: bool


# ------------------------------------------------------------------------------------------------------------- choice


def choose(
    pending: Sequence[Unit], running: Sequence[Running], free: Sequence[str], now: float, workers: int
) -> list[Start]:
    """The units to start now, of ``pending`` in its order. ``free`` are GPUs that nobody runs on, preferred ones first.

    ``workers`` is how many are idle. The first unit that does not fit keeps its place: a later one starts only on
    GPUs that it will not want, or when it is expected to end before the first one could start.
    """
    box = (*free, *(uuid for one in running for uuid in one.uuids))
    slot = not any(one.unit.cpu_server or one.unit.exclusive for one in running)
    left = list(free)
    room = beside = len(left)  # ``beside``: how many of them the waiting unit will not want
    held: _Held | None = None
    starts: list[Start] = []
    for unit in pending:
        if workers <= 0:
            break
        uuids: tuple[str, ...] = ()
        if unit.gpus or unit.cpu_server or unit.exclusive:
            ends = now + unit.seconds
            if held is not None and unit.gpus > (beside if ends > held.at else room):
                continue  # most units: the rest of this loop is for few
            found = _fit(unit, left, slot, box, held, ends)
            if found is None:
                if held is None and not unit.cpu_server:
                    held = _reserve(unit, [*running, *(Running(one.unit, one.uuids, now) for one in starts)], left, now)
                    beside = sum(uuid not in held.uuids for uuid in left)
                continue
            uuids = found
        starts.append(Start(unit, uuids))
        workers -= 1
        if uuids:
            left = [uuid for uuid in left if uuid not in uuids]
            room = len(left)
            beside = sum(held is None or uuid not in held.uuids for uuid in left)
        slot = slot and not (unit.cpu_server or unit.exclusive)
    return starts


def _fit(
    unit: Unit, left: Sequence[str], slot: bool, box: Sequence[str], held: _Held | None, ends: float
) -> tuple[str, ...] | None:
    """The GPUs to start a unit on now, or None when it has to wait."""
    if unit.exclusive:
        return tuple(left) if slot and len(left) == len(box) and held is None else None
    late = held is not None and ends > held.at
    if unit.cpu_server:
        return () if slot and not (late and held is not None and held.slot) else None
    if _width(unit, len(box)) > len(left):
        return None
    if held is None:
        return _pick(unit, left, box)
    rest = [uuid for uuid in left if uuid not in held.uuids]
    if late:
        return _pick(unit, rest, box)
    # It ends in time, so it goes where the waiting unit will run: what is beside that stays free for longer ones.
    return _pick(unit, [uuid for uuid in left if uuid in held.uuids], box) or _pick(unit, [*left], box)


def _reserve(unit: Unit, running: Sequence[Running], left: Sequence[str], now: float) -> _Held:
    """When a unit that does not fit now can start, and where: on GPUs that are not free yet, as far as it may."""
    box = [*left, *(uuid for one in running for uuid in one.uuids)]
    ends = sorted(((one.ends(now), one) for one in running), key=lambda one: one[0])
    coming: list[str] = []
    busy = sum(one.unit.cpu_server for one in running)
    at = now
    for at, one in ends:
        coming = [*one.uuids, *coming]
        busy -= one.unit.cpu_server
        if unit.exclusive:
            if not busy and len(coming) + len(left) == len(box):
                break
        else:
            picked = _pick(unit, coming, box) or _pick(unit, [*coming, *left], box)
            if picked is not None:
                return _Held(at, frozenset(picked), False)
    return _Held(at, frozenset(box), unit.exclusive)


def _width(unit: Unit, most: int) -> int:
    """GPUs that a unit holds: one that asks for more than there are is started all the same, to be told so."""
    return min(unit.gpus, most)


def _pick(unit: Unit, free: Sequence[str], box: Sequence[str]) -> tuple[str, ...] | None:
    """GPUs of ``free`` for a unit, None when there are none that it takes.

    A unit that no GPUs of this box would do for is given any: it is started, and says itself what it lacks.
    """
    count = _width(unit, len(box))
    if unit.choice is not None and count:
        picked = _picked(unit.choice, frozenset(free), count)
        if picked is not None or _picked(unit.choice, frozenset(box), count) is not None:
            return picked
    return tuple(free[:count]) if count <= len(free) else None


@lru_cache(maxsize=8192)
def _picked(choice: GpuChoice, free: frozenset[str], count: int) -> tuple[str, ...] | None:
    """A simulation asks the same again and again, and a pick may take a millisecond."""
    return choice.pick(free, count)


# --------------------------------------------------------------------------------------------------------------- plan


def simulate(order: Sequence[Unit], gpus: Sequence[str], workers: int) -> list[Planned]:
    """What happens when units are started in this order, each as soon as ``choose`` lets it, by expected times."""
    pending = list(order)
    running: list[Running] = []
    done: list[Planned] = []
    ends: list[tuple[float, int, Running]] = []
    free = list(gpus)
    now, number = 0.0, 0
    idle = max(workers, 1)
    while pending or ends:
        started = choose(pending, running, free, now, idle) if pending and idle else []
        if started:
            chosen = {id(one.unit) for one in started}
            pending = [unit for unit in pending if id(unit) not in chosen]
            for start in started:
                one = Running(start.unit, start.uuids, now)
                running.append(one)
                heappush(ends, (now + start.unit.seconds, number, one))
                number += 1
                done.append(Planned(start.unit, start.uuids, now, now + start.unit.seconds))
                free = [uuid for uuid in free if uuid not in start.uuids]
            idle -= len(started)
        if not ends:
            raise AssertionError(f"{len(pending)} units could never start")  # choose() starts something on an idle box
        now, _, _ = ends[0]
        while ends and ends[0][0] <= now:
            _, _, over = heappop(ends)
            running = [one for one in running if one is not over]
            idle += 1
            back = {*free, *over.uuids}
            free = [uuid for uuid in gpus if uuid in back]
    return done


def plan(units: Sequence[Unit], gpus: Sequence[str], workers: int, seed: int = 0) -> list[Unit]:
    """The units in the order to start them in: the best of several by simulated makespan, found in SEARCH_S seconds.

    Never worse than the order that they are given in. More urgent ones come first, whatever that costs.
    """
    deadline = time.monotonic() + SEARCH_S
    every = len(gpus)
    area = {id(unit): (every if unit.exclusive else _width(unit, every)) * unit.seconds for unit in units}
    wide = {id(unit): every + 1 if unit.exclusive else _width(unit, every) for unit in units}
    orders = [
        sorted(units, key=lambda unit: (-area[id(unit)], -unit.seconds)),
        sorted(units, key=lambda unit: (-wide[id(unit)], -unit.seconds)),
        sorted(units, key=lambda unit: (-unit.seconds, -wide[id(unit)])),
        sorted(units, key=lambda unit: (not unit.exclusive, -unit.seconds)),
        sorted(units, key=lambda unit: (unit.exclusive, -unit.seconds)),
    ]
    # The given order is always among them, and the search ends at the bound: no order can be better.
    best = _urgent_first(units)
    least = _length(simulate(best, gpus, workers))
    enough = bound(units, len(gpus), workers) * (1 + 1e-9)
    chance = random.Random(seed)
    for number in range(ORDERS):
        if least <= enough or time.monotonic() > deadline:
            break
        order = orders[number] if number < len(orders) else _disturbed(best, chance)
        order = _urgent_first(order)
        length = _length(simulate(order, gpus, workers))
        if length < least:
            best, least = order, length
    return best


def _urgent_first(units: Iterable[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: unit.urgency)


def _disturbed(order: Sequence[Unit], chance: random.Random) -> list[Unit]:
    """The same units with a few of them elsewhere."""
    found = list(order)
    for _ in range(chance.randint(1, 3)):
        unit = found.pop(chance.randrange(len(found)))
        found.insert(chance.randrange(len(found) + 1), unit)
    return found


def makespan(units: Sequence[Unit], gpus: Sequence[str], workers: int) -> float:
    """How long the planned run takes, in seconds, by expected times."""
    return _length(simulate(plan(units, gpus, workers), gpus, workers))


def bound(units: Iterable[Unit], gpus: int, workers: int) -> float:
    """A time that no plan can beat, in seconds: GPUs, workers and the CPU slot all full, or the longest unit."""
    area = alone = slot = longest = total = 0.0
    for unit in units:
        width = gpus if unit.exclusive else _width(unit, gpus)
        area += width * unit.seconds
        alone += unit.seconds if unit.exclusive else 0.0
        slot += unit.seconds if unit.cpu_server else 0.0
        total += unit.seconds
        longest = max(longest, unit.seconds)
    return max(area / gpus if gpus else alone, total / max(workers, 1), slot + alone, longest)


def _length(planned: Iterable[Planned]) -> float:
    return max((one.end for one in planned), default=0.0)
