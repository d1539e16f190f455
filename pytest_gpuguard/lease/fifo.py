"""Who may take which GPUs now: first come, first served, but small requests may pass a blocked big one a few times.

Pure: it knows requests and what is free, and never opens a file or takes a lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..claims.gpuset import GpuChoice

#: So often a request that cannot be served yet is passed by smaller ones; then what it waits for is kept free.
MOST_PASSED: Final = 2
#: What is in the way of a request for longer than this is slow: it may be passed at any time.
LATE_S: Final = 10.0
#: A waiter that was not heard of for so long is stopped (Ctrl-Z, a debugger): others need not wait for it.
ASLEEP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Request:
    """``n`` GPUs of ``choice``. ``number`` is the place in the queue. Times are monotonic seconds.

    ``since`` it waits, and ``beat`` is when it last looked. ``holds`` are GPUs that the asking process has already and
    keeps while it waits.
    """

    number: int
    n: int
    choice: GpuChoice
    beat: float = 0.0
    holds: tuple[str, ...] = ()
    since: float = 0.0

    def asleep(self, now: float) -> bool:
        """Whether its process does not look any more."""
        return now - self.beat > ASLEEP_S


@dataclass(frozen=True, slots=True)
class Turn:
    """What a request takes now, and the numbers of those that it passes by that."""

    take: tuple[str, ...]
    passes: tuple[int, ...] = ()


def turns(queue: Sequence[Request], free: Collection[str], passed: Mapping[int, int], now: float) -> dict[int, Turn]:
    """Who in the queue, given in its order, may take which of the ``free`` GPUs now, by number. Sleepers may nothing.

    One that cannot be served yet may be passed by a *smaller* request, ``MOST_PASSED`` times (``passed`` counts that by
    number): at the moment when others before it take GPUs that it wants, so that it has to wait for those anyway, or
    when it has waited for ``LATE_S``. Passing at any time would delay it, and gain less. GPUs that it cannot use are
    free for everybody.
    """
    left = set(free)
    begun: set[str] = set()
    times = dict(passed)
    blocked: list[tuple[Request, bool]] = []
    found = {}
    for one in queue:
        if one.asleep(now):
            continue
        take: tuple[str, ...] | None = None
        passable: list[Request] = []
        if len(left) >= one.n:
            passable = [
                other
                for other, may_be in blocked
                if may_be and one.n < other.n and times.get(other.number, 0) < MOST_PASSED
            ]
            kept = {uuid for other, _ in blocked if other not in passable for uuid in other.choice.uuids}
            wanted = {uuid for other in passable for uuid in other.choice.uuids}
            take = one.choice.pick(left - kept - wanted, one.n) or one.choice.pick(left - kept, one.n)
        if take is None:
            blocked.append((one, now - one.since > LATE_S or not begun.isdisjoint(one.choice.uuids)))
            continue
        left -= set(take)
        begun |= set(take)
        passes = tuple(other.number for other in passable if not set(take).isdisjoint(other.choice.uuids))
        times.update((number, times.get(number, 0) + 1) for number in passes)
        found[one.number] = Turn(take, passes)
    return found


def deadlocked(me: Request, others: Sequence[Request]) -> tuple[Request, ...]:
    """The requests that wait for each other for ever, ``me`` among them; empty when there is no such circle.

    Only a process that holds GPUs while it asks for more can be in one.
    """
    circle = [one for one in (me, *others) if one.holds]
    while True:
        held = {uuid for one in circle for uuid in one.holds}
        stuck = [one for one in circle if one.choice.pick(set(one.choice.uuids) - held, one.n) is None]
        if len(stuck) == len(circle):
            return tuple(circle) if me in circle else ()
        circle = stuck
