"""A judgement against what was verified before: what flipped, which way, and what changed in between. Pure.

It must never hold a rehearsal against a verification, nor take a verdict that says nothing for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ..claims.judgement import Verdict
from .changes import Change
from .record import Kind, Record, Run
from .suspects import COUNTING, HOLDS, Suspect, counts, rank, same_outcome, unsteady

__all__ = [
    "COUNTING", "SORTS", "Change", "Flip", "Index", "Sort", "Suspect", "baseline", "differences", "flip_of", "flips",
    "index",
]  # fmt: skip

Sort = Literal["worse", "changed", "better", "recovered", "flaky"]

#: What a reader must see first, first.
SORTS: Final[tuple[Sort, ...]] = ("worse", "changed", "flaky", "better", "recovered")

#: Judgements that say how a claim came out, by claim, cards and kind; oldest first.
Index = Mapping[tuple[str, tuple[str, ...], Kind], Sequence[Record]]

_SORT_OF: Final[Mapping[str, Sort]] = {
    HOLDS: "recovered",
    Verdict.WORSE.value: "worse",
    Verdict.CHANGED.value: "changed",
    Verdict.BETTER.value: "better",
}


#: Claims whose histories are in memory at once: an upgrade may flip them all, and each has a record for every run.
_AT_ONCE: Final = 200


@dataclass(frozen=True, slots=True)
class Flip:
    """A claim that came out otherwise than when it was last verified. ``ranked``: history separates the suspects.

    ``sort``: ``worse`` (what should work does not), ``changed`` (it fails for another reason), ``better`` (what should
    fail works: drop the workaround), ``recovered`` (as claimed again), ``flaky`` (fresh boots disagreed).
    ``held`` is when it last held, where ``before`` did not hold either: the suspects are then what changed since.
    """

    sort: Sort
    before: Record
    now: Record
    suspects: tuple[Suspect, ...] = ()
    ranked: bool = False
    held: Record | None = None

    @property
    def components(self) -> Mapping[str, tuple[str | None, str | None]]:
        """What changed: component → (before, now)."""
        return {one.change.component: (one.change.before, one.change.now) for one in self.suspects}


def flip_of(before: Record | None, now: Record) -> Sort | None:
    """Which way it flipped; None when it did not, or when one of the two does not say how its claim came out.

    What holds and held is none, whatever the outcomes: its windows claim that. The same verdict with another outcome is
    ``changed``. ``flaky`` where fresh boots disagreed on it (``evidence["confirmed"]``).
    """
    if before is None or before.kind != now.kind or before.verdict not in COUNTING:
        return None
    if unsteady(now) and not same_outcome(before, now):  # whatever verdict the disagreement was given
        return "flaky"
    if now.verdict not in COUNTING or same_outcome(before, now):
        return None
    return "changed" if before.verdict == now.verdict else _SORT_OF[now.verdict]


def index(records: Iterable[Record]) -> Index:
    """The judgements that decided their claim and say how it came out, for ``baseline``."""
    found: dict[tuple[str, tuple[str, ...], Kind], list[Record]] = {}
    for one in records:
        if counts(one) or (one.decides and unsteady(one)):
            found.setdefault(_key(one), []).append(one)
    for several in found.values():
        several.sort(key=_age)
    return found


def baseline(now: Record, before: Index, in_run: Index | None = None, first: str | None = None) -> Record | None:
    """What a judgement is held against: the last one of the same claim, cards and kind that says how it came out.

    That of an earlier run on a stack of the same name; else, of its own run (``in_run``), that on the run's ``first``
    stack; else that of an earlier run on any stack. None: it was never verified on such cards.
    """
    earlier = [one for one in before.get(_key(now), ()) if one.run != now.run]
    same_name = [one for one in earlier if one.stack == now.stack]
    if same_name:
        return same_name[-1]
    if first is not None and first != now.stack:
        beside = _on_stack(now, in_run or {}, first)
        if beside is not None:
            return beside
    return earlier[-1] if earlier else None


def flips(
    run: Run,
    now: Sequence[Record],
    before: Sequence[Record],
    histories: Callable[[Sequence[str]], Mapping[str, Sequence[Record]]],
) -> tuple[Flip, ...]:
    """The flips of a run, worst first; of one sort those with the fewest changes first.

    ``now`` are all the run's records, ``before`` those of ``Store.before(run.id)``. ``histories`` (as that of a ledger)
    is asked for the claims that flipped, many at once: all their records with all expectations rank the suspects.
    """
    earlier = index(before)
    in_run, first, of_claim = _grouped(run, now)
    flipped: dict[str, list[tuple[Sort, Record, Record]]] = {}
    for one in (one for several in in_run.values() for one in several):
        against = baseline(one, earlier, in_run, first)
        sort = flip_of(against, one)
        if against is not None and sort is not None:
            flipped.setdefault(one.claim, []).append((sort, against, one))
    found = []
    claims = list(flipped)
    for some in (claims[at : at + _AT_ONCE] for at in range(0, len(claims), _AT_ONCE)):
        known = histories(some)
        for claim in some:
            # An alias's records are this claim's too.
            past = (past if past.claim == claim else replace(past, claim=claim) for past in known.get(claim, ()))
            trials = [*past, *of_claim[claim]]
            for sort, against, one in flipped[claim]:
                held = _held(against, one, trials)
                suspects, ranked = rank(held or against, one, trials)
                found.append(Flip(sort, against, one, suspects, ranked, held))
    return _worst_first(found)


def differences(run: Run, now: Sequence[Record]) -> tuple[Flip, ...]:
    """What came out otherwise on a run's other stacks than on its first one, in the order of ``flips``."""
    if all(one.stack in run.stacks[:1] for one in now) or not run.stacks:
        return ()
    in_run, first, of_claim = _grouped(run, now)
    found = []
    for one in (one for several in in_run.values() for one in several):
        if first is None or one.stack == first:
            continue
        beside = _on_stack(one, in_run, first)
        sort = flip_of(beside, one)
        if beside is not None and sort is not None:
            found.append(Flip(sort, beside, one, *rank(beside, one, of_claim[one.claim])))
    return _worst_first(found)


def _grouped(run: Run, now: Sequence[Record]) -> tuple[Index, str | None, Mapping[str, list[Record]]]:
    """What decided, the first stack's name, and all records by claim."""
    of_claim: dict[str, list[Record]] = {}
    for one in now:
        of_claim.setdefault(one.claim, []).append(one)
    return index(now), (run.stacks[0] if run.stacks else None), of_claim


def _held(before: Record, now: Record, past: Sequence[Record]) -> Record | None:
    """The last that held before a flip between two that did not; on a stack of the same name if there is one."""
    if HOLDS in (before.verdict, now.verdict):
        return None
    held = [
        one
        for one in past
        if counts(one) and one.verdict == HOLDS and not unsteady(one) and _key(one) == _key(now)
        if one.run != now.run and one.when <= before.when
    ]
    return max(held, key=lambda one: (one.stack == now.stack, _age(one)), default=None)


def _on_stack(now: Record, in_run: Index, stack: str) -> Record | None:
    """Its claim's judgement on another stack of the same run."""
    found = [one for one in in_run.get(_key(now), ()) if one.stack == stack and one.run == now.run]
    return found[-1] if found else None


def _worst_first(found: Iterable[Flip]) -> tuple[Flip, ...]:
    def place(flip: Flip) -> tuple[int, int, str, str, str]:
        return SORTS.index(flip.sort), len(flip.suspects), flip.now.claim, flip.now.stack, flip.now.nodeid

    return tuple(sorted(found, key=place))


def _key(one: Record) -> tuple[str, tuple[str, ...], Kind]:
    return one.claim, one.cards, one.kind


def _age(one: Record) -> tuple[float, str, str, str, str]:
    return one.when, one.run, one.stack, one.nodeid, one.expectation
