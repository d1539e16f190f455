"""Which of the things that changed a verdict follows, by what the ledger remembers of other combinations.

It must never make up an order: what was never seen apart shares a rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..claims.judgement import Verdict
from .changes import UNKNOWN, Change, Components, Unknown, changes, shown, value_of
from .record import Record

#: Verdicts that say something about a claim. All others leave open whether it holds.
COUNTING: Final = frozenset(one.value for one in (Verdict.HOLDS, Verdict.WORSE, Verdict.CHANGED, Verdict.BETTER))
HOLDS: Final = Verdict.HOLDS.value

#: How many of a candidate's trials may speak against it, before it is said that the verdict does not follow it: one,
#: and one more for each so many. At one flaky trial in twenty the true one passes in 98 of 100 histories.
_ONE_MORE_FOR: Final = 6
#: Lines for, and against, each suspect.
_LINES: Final = 3
#: What a line names of the stack, the first that is known.
_CONTEXT: Final = ("sglang", "vllm", "torch")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A change with what the ledger's history says for and against it, one line each.

    ``rank`` begins with 1; suspects that nothing separates share it, and the next one counts them all (1, 1, 3).
    """

    change: Change
    rank: int
    pro: tuple[str, ...] = ()
    contra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Trial:
    """An earlier judgement: did it come out ``as_now`` (else as before), and with which values."""

    record: Record
    as_now: bool
    components: Components
    context: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A change, and of each trial its value there, and whether that lets expect the verdict of now (None: nothing)."""

    change: Change
    values: Sequence[str | Unknown | None]
    says: Sequence[bool | None]
    known: int


_Place = tuple[str, str, str, tuple[str, ...]]
#: What each claim expected in each run on each stack.
Claimed = Mapping[_Place, frozenset[str]]


def rank(before: Record, now: Record, history: Iterable[Record]) -> tuple[tuple[Suspect, ...], bool]:
    """What changed between two judgements of a claim, the likeliest first; and whether history separates any of it.

    A trial is a judgement of ``history`` that decided the same claim on the same cards and of the same kind, not later
    than ``now``, and came out like one of the two; any stack's. "The verdict follows this component" is contradicted by
    a trial with the value of now and the verdict of before, by one the other way round, and where trials with one other
    value disagree, by the fewer of them. Nothing is assumed of values in between, or of values that nobody noted. Ranks
    are by the number of contradictions. Where even the best has more of them than flaky trials explain, no single
    component is it: then, as without trials that separate anything, all rank 1, in the order of ``changes``.
    """
    history = tuple(history)
    claimed = claims_of((*history, before, now))
    differ = differing(before, now, claimed)
    trials = _trials(before, now, history, claimed) if differ else []
    candidates, trials = _candidates(differ, trials)
    against = [_against(one, trials) for one in candidates]
    counts = sorted(len(one) for one in against)
    ranked = bool(counts) and counts[0] < counts[-1]
    if ranked:
        known = max(one.known for one, found in zip(candidates, against, strict=True) if len(found) == counts[0])
        ranked = counts[0] <= 1 + known // _ONE_MORE_FOR
    beside = _beside(candidates, trials)
    suspects = [
        Suspect(
            one.change,
            1 + bisect_left(counts, len(contradicting)) if ranked else 1,
            _lines(_for(one, trials, beside), one, trials, beside),
            _lines(contradicting, one, trials),
        )
        for one, contradicting in zip(candidates, against, strict=True)
    ]
    return tuple(sorted(suspects, key=lambda one: one.rank)), ranked


def claims_of(records: Iterable[Record]) -> Claimed:
    """What each claim expected in each run on each stack: one record may be one of several expectations."""
    found: dict[_Place, set[str]] = {}
    for one in records:
        found.setdefault(_place(one), set()).update(expected_in(one))
    return {place: frozenset(expected) for place, expected in found.items()}


def expected_in(record: Record) -> set[str]:
    """Its expectation, and those that its evidence says were judged beside it."""
    judgements = record.evidence.get("judgements")
    listed = judgements if isinstance(judgements, list | tuple) else ()  # evidence may have been imported
    texts = (one.get("expectation") for one in listed if isinstance(one, Mapping))
    return {record.expectation, *(str(one) for one in texts if one is not None)}


def differing(before: Record, now: Record, claimed: Claimed) -> tuple[Change, ...]:
    """The components that differ; ``claim`` first, when it expects something else than it did."""
    old, new = claimed[_place(before)], claimed[_place(now)]
    found = changes(before.components, now.components)
    if old == new:
        return found
    gone, added = (" and ".join(sorted(one)) or None for one in (old - new, new - old))
    return (Change("claim", gone, added), *found)


def counts(record: Record) -> bool:
    """Whether it says how its claim came out."""
    return record.decides and record.verdict in COUNTING


def unsteady(record: Record) -> bool:
    """Whether fresh boots disagreed: ``evidence["confirmed"]`` is ``{"boots": N, "agreed": k}`` with k below N."""
    confirmed = record.evidence.get("confirmed")
    if not isinstance(confirmed, Mapping):
        return False
    boots, agreed = confirmed.get("boots"), confirmed.get("agreed")
    return isinstance(boots, int) and isinstance(agreed, int) and agreed < boots


def same_outcome(one: Record, other: Record) -> bool:
    """Whether two judgements came out alike: what holds, holds; else with one verdict and one outcome."""
    if one.verdict != other.verdict:
        return False
    return one.verdict == HOLDS or one.outcome == other.outcome


def _place(one: Record) -> _Place:
    return one.run, one.claim, one.stack, one.cards


def _trials(before: Record, now: Record, history: Sequence[Record], claimed: Claimed) -> list[_Trial]:
    """The judgements that can tell candidates apart, oldest first."""
    if same_outcome(before, now):
        return []
    expected = claimed[_place(before)] | claimed[_place(now)]
    found: dict[Hashable, _Trial] = {}  # a history may hold a run's records that were given already
    for one in history:
        if (one.claim, one.cards, one.kind) != (now.claim, now.cards, now.kind):
            continue
        if not counts(one) or unsteady(one) or (one.when > now.when and one.run != now.run):
            continue
        as_now = same_outcome(one, now)
        if (as_now or same_outcome(one, before)) and claimed[_place(one)] & expected:
            context = tuple((name, value) for name in _CONTEXT if (value := one.components.get(name)) is not None)
            found[_place(one), one.nodeid] = _Trial(one, as_now, _with_claim(one, before, now, claimed), context)
    return sorted(
        found.values(), key=lambda one: (one.record.when, one.record.run, one.record.stack, one.record.nodeid)
    )


def _with_claim(one: Record, before: Record, now: Record, claimed: Claimed) -> Components:
    """Its components, and ``claim`` where it was edited between the two: what it expected then."""
    old, new, then = claimed[_place(before)], claimed[_place(now)], claimed[_place(one)]
    change = " and ".join(sorted(then - (old & new))) or None
    return {**one.components, "claim": change} if old != new else one.components


def _candidates(differ: Sequence[Change], trials: Sequence[_Trial]) -> tuple[list[_Candidate], list[_Trial]]:
    """The candidates, and the trials but those that all of them lead to expect."""
    names = [one.component for one in differ]
    as_expected = [one.before for one in differ], [one.now for one in differ]
    quiet = 0
    telling: list[tuple[_Trial, Sequence[str | Unknown | None], list[bool | None]]] = []
    for trial in trials:
        row = _row(trial.components, names)
        if row == as_expected[trial.as_now]:  # most of a long history is one stack, again and again
            quiet += 1
            continue
        says = [
            True if value == one.now else False if value == one.before else None
            for value, one in zip(row, differ, strict=True)
        ]
        telling.append((trial, row, says))
    candidates = [
        _Candidate(
            change,
            [row[at] for _, row, _ in telling],
            [says[at] for _, _, says in telling],
            quiet + sum(row[at] is not UNKNOWN for _, row, _ in telling),
        )
        for at, change in enumerate(differ)
    ]
    return candidates, [trial for trial, _, _ in telling]


def _row(components: Components, names: Sequence[str]) -> Sequence[str | Unknown | None]:
    """The values of these components; a long history asks for many."""
    row = [components.get(name, UNKNOWN) for name in names]
    if UNKNOWN in row:
        return [value_of(components, name) for name in names]
    return row


def _against(candidate: _Candidate, trials: Sequence[_Trial]) -> list[int]:
    """The trials that contradict that the verdict follows this component."""
    found: list[int] = []
    others: dict[str | None, tuple[list[int], list[int]]] = {}
    for at, (trial, value, says) in enumerate(zip(trials, candidate.values, candidate.says, strict=True)):
        if says is not None:
            if says is not trial.as_now:
                found.append(at)
        elif not isinstance(value, Unknown):
            others.setdefault(value, ([], []))[trial.as_now].append(at)
    for as_before, as_now in others.values():
        found += as_now if len(as_now) < len(as_before) else as_before
    return sorted(found)


def _beside(candidates: Sequence[_Candidate], trials: Sequence[_Trial]) -> list[list[_Candidate]]:
    """Of each trial the candidates that let expect the other verdict than it had."""
    return [[one for one in candidates if one.says[at] is (not trial.as_now)] for at, trial in enumerate(trials)]


def _for(candidate: _Candidate, trials: Sequence[_Trial], beside: Sequence[Sequence[_Candidate]]) -> list[int]:
    """The trials that came out as this component lets expect, while another one lets expect otherwise."""
    return [at for at, trial in enumerate(trials) if candidate.says[at] is trial.as_now and beside[at]]


def _lines(
    found: Sequence[int],
    candidate: _Candidate,
    trials: Sequence[_Trial],
    beside: Sequence[Sequence[_Candidate]] | None = None,
) -> tuple[str, ...]:
    """The newest trials, a line each; alike ones are counted. ``beside`` for those that separate it from others."""
    alike: dict[Hashable, list[int]] = {}
    for at in reversed(found):
        trial = trials[at]
        seen = beside[at][0].change.component if beside is not None else trial.context[:2]
        alike.setdefault((trial.record.outcome, trial.as_now, candidate.values[at], seen), []).append(at)
    lines = []
    for newest, *more in list(alike.values())[:_LINES]:
        text = _told(trials[newest], candidate, newest, beside[newest] if beside is not None else ())
        times = f", and {len(more)} more like it" if more else ""
        lines.append(f"{text} (run {shown(trials[newest].record.run)}{times})")
    rest = sum(len(one) for one in list(alike.values())[_LINES:])
    return (*lines, f"and {rest} other{'s' if rest > 1 else ''}") if rest else tuple(lines)


def _told(trial: _Trial, candidate: _Candidate, at: int, beside: Sequence[_Candidate]) -> str:
    """``held with driver 580.82 on sglang 0.5.9``; or ``held with driver 570 as before, with torch 2.13 as now``."""
    text = f"{_came_out(trial.record)} {_with(candidate.change.component, candidate.values[at])}"
    if beside:
        mine, theirs = ("now", "before") if trial.as_now else ("before", "now")
        other = _with(beside[0].change.component, beside[0].values[at])
        more = f" and {len(beside) - 1} more" if len(beside) > 1 else ""
        return f"{text} as {mine}, {other}{more} as {theirs}"
    context = next(
        (f" on {name} {shown(one)}" for name, one in trial.context if name != candidate.change.component), ""
    )
    return text + context


def _with(component: str, value: str | Unknown | None) -> str:
    if not isinstance(value, str):
        return f"without {shown(component)}"
    return f"with {shown(component)} {shown(value)}"


def _came_out(record: Record) -> str:
    if record.verdict == HOLDS:
        return "held"
    if record.verdict == Verdict.BETTER.value or record.outcome in ("ready", "none"):
        return {Verdict.WORSE.value: "worse", Verdict.BETTER.value: "better"}.get(record.verdict, "changed")
    return shown(record.outcome)
