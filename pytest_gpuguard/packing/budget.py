"""Which claims to evaluate when there is not time for all: the most valuable ones that fit, pure and deterministic.

It must never choose more than fits by its own estimate; whether that was right is for the run's own clock to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..names import OUT_OF_BUDGET
from .history import Attempts, Expected, Seen, changed_parts, span
from .plan import Unit, Work, bound, simulate, units_of

#: A claim that so many runs in a row could not verify waits for its turn like those that are verified.
PATIENCE: Final = 3

#: Kinds of tests, most valuable first, as the summary calls them. The last three are one class: by how long ago.
NEW: Final = "never evaluated"
CHANGED: Final = "verified on another stack"
SAME: Final = "verified on this very stack"
STUCK: Final = "that earlier runs could not verify"
TEST: Final = "without a claim"
_CLASS: Final[Mapping[str, int]] = {NEW: 0, CHANGED: 1, SAME: 2, STUCK: 2, TEST: 2}


@dataclass(frozen=True, slots=True)
class Value:
    """What evaluating a claim is worth. ``since`` (epoch) is when it was run last; ``why`` is for people."""

    kind: str
    why: str
    since: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is worth more: of those that nothing speaks for, the one that was run longest ago."""
        place = _CLASS[self.kind]
        return place, self.since if place == _CLASS[SAME] else 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A test that the budget is for. ``work.seconds`` and ``work.boot_seconds`` are those of ``expected``."""

    work: Work
    expected: Expected
    value: Value


@dataclass(frozen=True, slots=True)
class Selected:
    """A test that was chosen: what it takes by itself, and besides a boot that is up already, in seconds."""

    seconds: float
    beside_boot: float
    kind: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A test that was not chosen, and the fact to tell of it."""

    fact: str
    kind: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen, by node id, and how long all of that is expected to take, in seconds."""

    chosen: Mapping[str, Selected] = field(default_factory=dict)
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)
    expected_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by ``from_dict``."""
        return {
            "expected_s": self.expected_s,
            "chosen": {name: [one.seconds, one.beside_boot, one.kind] for name, one in self.chosen.items()},
            "left_out": {name: [one.fact, one.kind] for name, one in self.left_out.items()},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Selection:
        """The selection that ``to_dict`` wrote."""
        return Selection(
            {name: Selected(*one) for name, one in data["chosen"].items()},
            {name: LeftOut(*one) for name, one in data["left_out"].items()},
            data["expected_s"],
        )


def value_of(
    seen: Seen | None, attempts: Attempts, parts: Mapping[str, str | None], now: float, is_claim: bool = True
) -> Value:
    """What a test is worth on this stack (``parts``), by what is known of it. ``now`` is epoch seconds."""
    if not is_claim:
        return Value(TEST, "a test without a claim", attempts.when)
    if attempts.number >= PATIENCE:
        tried = f"run {attempts.number} times without a verdict that counts"
        return Value(STUCK, f"{tried}, last {_ago(now - attempts.when)}", attempts.when)
    if seen is None:
        return Value(NEW, NEW if not attempts.number else f"{NEW}, though tried")
    changed = changed_parts(seen.parts, parts)
    if changed:
        return Value(CHANGED, f"{seen.verdict} {_ago(now - seen.when)}, before {', '.join(changed)}")
    since = max(seen.when, attempts.when)
    return Value(SAME, f"{seen.verdict} on this very stack {_ago(now - seen.when)}", since)


def select(candidates: Iterable[Candidate], budget_s: float, gpus: Sequence[str], workers: int = 1) -> Selection:
    """The most valuable tests that fit into ``budget_s`` seconds on these GPUs and so many workers.

    By value, then by what each adds: one that can join the server of a chosen one adds no boot. A test that does not
    fit is passed over for one that does. The order of ``candidates`` makes no difference.
    """
    everyone = sorted(candidates, key=lambda one: one.work.nodeid)
    chosen: list[Candidate] = []
    expected_s = 0.0
    waiting = list(everyone)
    refused: list[Candidate] = []
    while waiting:
        spared = _spared(chosen)
        best = min(waiting, key=lambda one: (*one.value.rank, _adds(one, spared), one.work.nodeid))
        waiting.remove(best)
        length = estimate([one.work for one in (*chosen, best)], gpus, workers, at_most=budget_s)
        if length is None:
            refused.append(best)
            continue
        chosen.append(best)
        expected_s = length
        # Others that can join its boot now cost less than when they did not fit.
        again = [one for one in refused if one.work.server is not None and one.work.server == best.work.server]
        refused = [one for one in refused if one not in again]
        waiting += again
    taken = {id(one) for one in chosen}
    rest = [one for one in everyone if id(one) not in taken]
    small = min((one.expected.seconds for one in rest), default=0.0)
    none = "" if chosen else f"; no claim fits into {span(budget_s)}, the cheapest needs {span(small)}"
    return Selection(
        {one.work.nodeid: Selected(one.expected.seconds, one.expected.beside_boot, one.value.kind) for one in chosen},
        {
            one.work.nodeid: LeftOut(f"{OUT_OF_BUDGET}: expected {one.expected}; {one.value.why}{none}", one.value.kind)
            for one in rest
        },
        expected_s,
    )


def estimate(works: Sequence[Work], gpus: Sequence[str], workers: int, at_most: float) -> float | None:
    """How long these tests take together, in seconds; None when that is more than ``at_most``.

    Unlike ``plan``, which searches for as long as it has time, it looks at two orders only: it must say the same
    in every process, and is asked once for every test.
    """
    units = units_of(sorted(works, key=lambda work: work.index))
    if bound(units, len(gpus), workers) > at_most:
        return None
    if workers <= 1:
        total = sum(unit.seconds for unit in units)
        return total if total <= at_most else None
    orders: list[Callable[[Unit], Any]] = [
        lambda unit: (not unit.exclusive, -unit.gpus * unit.seconds, -unit.seconds, unit.items),
        lambda unit: (-unit.seconds, unit.items),
    ]
    plans = (simulate(sorted(units, key=order), gpus, workers) for order in orders)
    lengths = (max((one.end for one in planned), default=0.0) for planned in plans)
    return next((length for length in lengths if length <= at_most), None)


def _spared(chosen: Iterable[Candidate]) -> dict[str, bool]:
    """The servers that are booted anyway, and whether a test whose own code uses its server may still join."""
    free: dict[str, bool] = {}
    for one in chosen:
        if one.work.server is not None:
            free[one.work.server] = free.get(one.work.server, True) and not one.work.uses
    return free


def _adds(one: Candidate, spared: Mapping[str, bool]) -> float:
    joins = one.work.server is not None and (
        spared.get(one.work.server, False) if one.work.uses else one.work.server in spared
    )
    return one.expected.beside_boot if joins else one.expected.seconds


def _ago(seconds: float) -> str:
    """``3 days ago``."""
    days = round(seconds / 86400)
    if days >= 2:
        return f"{days} days ago"
    hours = round(seconds / 3600)
    return f"{hours} hours ago" if hours >= 2 else "within the last hours"
