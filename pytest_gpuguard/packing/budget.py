"""Which claims to evaluate when there is not time for all: the most valuable ones that fit, pure and deterministic.

It must never choose more than fits by its own estimate; whether that was right is for the run's own clock to say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
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
#: The class of everything else, to plan by.
LAST: Final = 3


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
    """A test with a share: what it takes by itself, and besides a boot that is up already, in seconds.

    ``rank`` is that of its value, smaller is worth more; ``server`` and ``uses`` are those of its ``Work``.
    """

    seconds: float
    beside_boot: float
    kind: str
    rank: tuple[int, float] = (0, 0.0)
    server: str | None = None
    uses: bool = False

    @staticmethod
    def of(one: Candidate) -> Selected:
        """What is kept of a candidate."""
        took, value = one.expected, one.value
        return Selected(took.seconds, took.beside_boot, value.kind, value.rank, one.work.server, one.work.uses)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A test that was not chosen, the fact to tell of it, and what it would be if it were chosen."""

    fact: str
    test: Selected


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
            "chosen": {name: astuple(one) for name, one in self.chosen.items()},
            "left_out": {name: [one.fact, astuple(one.test)] for name, one in self.left_out.items()},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Selection:
        """The selection that ``to_dict`` wrote."""
        return Selection(
            {name: _selected(one) for name, one in data["chosen"].items()},
            {name: LeftOut(fact, _selected(one)) for name, (fact, one) in data["left_out"].items()},
            data["expected_s"],
        )


def _selected(data: Sequence[Any]) -> Selected:
    seconds, beside_boot, kind, (place, since), server, uses = data
    return Selected(seconds, beside_boot, kind, (place, since), server, uses)


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


def select(
    candidates: Iterable[Candidate],
    budget_s: float,
    gpus: Sequence[str],
    workers: int = 1,
    left_s: float | None = None,
) -> Selection:
    """The most valuable tests that fit into ``budget_s`` seconds on these GPUs and so many workers.

    ``left_s`` is how much of that is left, in seconds; without it nothing is spent yet.
    By value, then by what each adds: one that can join the server of a chosen one adds no boot. A test that does not
    fit is passed over for one that does. The order of ``candidates`` makes no difference.
    """
    room_s = budget_s if left_s is None else max(min(left_s, budget_s), 0.0)
    everyone = sorted(candidates, key=lambda one: one.work.nodeid)
    chosen: list[Candidate] = []
    expected_s = 0.0
    waiting = list(everyone)
    refused: list[Candidate] = []
    while waiting:
        spared = _spared(chosen)
        best = min(waiting, key=lambda one: (*one.value.rank, _adds(one, spared), one.work.nodeid))
        waiting.remove(best)
        length = estimate([one.work for one in (*chosen, best)], gpus, workers, at_most=room_s)
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
    room = span(budget_s) if small > budget_s else f"the {span(room_s)} that are left of {span(budget_s)}"
    none = "" if chosen else f"; no claim fits into {room}, the cheapest needs {span(small)}"
    return Selection(
        {one.work.nodeid: Selected.of(one) for one in chosen},
        {
            one.work.nodeid: LeftOut(
                f"{OUT_OF_BUDGET}: expected {one.expected}; {one.value.why}{none}", Selected.of(one)
            )
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


def has_room(test: Selected, before: Sequence[Selected], left_s: float, up: str | None = None) -> bool:
    """Whether a test fits into ``left_s`` seconds, one after the other with those of ``before`` that themselves fit.

    ``before`` are still to come, and worth more. ``up`` is the server that is up already.
    """
    if _one_by_one([test, *before], up) <= left_s:
        return True
    booted, taken = {up}, 0.0

    def adds(one: Selected) -> float:
        return one.beside_boot if one.server is not None and one.server in booted else one.seconds

    for one in sorted(before, key=lambda one: one.rank):
        if taken + adds(one) <= left_s:
            taken += adds(one)
            booted.add(one.server)
    return taken + adds(test) <= left_s


def _one_by_one(tests: Sequence[Selected], up: str | None) -> float:
    """How long these tests take without workers, in seconds, as a selection counts them."""
    joining = [one for one in tests if up is not None and one.server == up]
    works = [
        Work(index, "", 1, one.seconds, False, False, one.server, one.uses, None, one.seconds - one.beside_boot)
        for index, one in enumerate(tests)
        if up is None or one.server != up
    ]
    return sum(one.beside_boot for one in joining) + sum(unit.seconds for unit in units_of(works))


def by_value(names: Sequence[str], servers: Sequence[Hashable], selection: Selection) -> list[int]:
    """The order to run tests in, as places in ``names``: estimates may be short, so the most valuable go first.

    Tests side by side that share a server (equal in ``servers``, None for none) stay together, in the place of the
    best of them. What was left out comes last, and what the budget is not for stays where it is.
    """
    blocks: list[list[int]] = []
    for index, server in enumerate(servers):
        if index and server is not None and server == servers[index - 1]:
            blocks[-1].append(index)
        else:
            blocks.append([index])
    chosen: list[tuple[tuple[int, float], list[int]]] = []
    left_out: list[tuple[tuple[int, float], list[int]]] = []
    places: set[int] = set()
    for place, block in enumerate(blocks):
        inside = [selection.chosen[names[index]].rank for index in block if names[index] in selection.chosen]
        out = [index for index in block if names[index] in selection.left_out]
        if inside:
            chosen.append((min(inside), [index for index in block if index not in out]))
        if out:
            best = min(selection.left_out[names[index]].test.rank for index in out)
            left_out.append((best, out if inside else block))
        if inside or out:
            places.add(place)
    moved = [block for group in (chosen, left_out) for _, block in sorted(group, key=lambda one: one[0])]
    found: list[int] = []
    for place, block in enumerate(blocks):
        if place not in places:
            found += block
            continue
        take = 1 if place != max(places) else len(moved)
        found += [index for one in moved[:take] for index in one]
        del moved[:take]
    return found


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
