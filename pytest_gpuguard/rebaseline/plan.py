"""From what a run saw of one test to the changes of its decorators. Pure; it must never plan what it did not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..claims.expect import ExpectToks, Ignores, Unsupported, Uses
from ..claims.judgement import Verdict
from ..claims.outcome import READY
from ..ledger.flips import Flip
from ..ledger.record import Record
from ..ledger.suspects import unsteady
from .decorators import Change, Drop, Insert, Narrow, Replace, Set
from .evidence import observation_of
from .marks import Mark
from .numbers import beaten, drifted, numbers_for
from .source import Place
from .statements import Statement, instead
from .values import Refusal
from .windows import Split, narrowed, split_of, version_in, window_for

BAD: Final = frozenset(one.value for one in (Verdict.WORSE, Verdict.CHANGED, Verdict.BETTER))
UNSTATED: Final = Verdict.UNSTATED.value
HOLDS: Final = Verdict.HOLDS.value
#: How a fact begins of a server that is up while the test's own code, or a request, failed.
_OWN: Final = "ready, but "


@dataclass(frozen=True, slots=True)
class Group:
    """The judgements of one claim on one stack, in one run."""

    claim: str
    stack: str
    place: Place
    records: tuple[Record, ...]

    @property
    def deciding(self) -> Record:
        """The one that the claim came out as."""
        return next((one for one in self.records if one.decides), self.records[0])

    def asks(self, tighten: bool) -> bool:
        """Whether something may have to be edited."""
        if self.deciding.verdict in BAD or self.deciding.verdict == UNSTATED or unsteady(self.deciding):
            return True
        warnings = self.deciding.evidence.get("warnings") or ()
        rated = any(one.expectation.startswith("expect_toks(") and one.verdict == HOLDS for one in self.records)
        return rated and (tighten or any(str(one).startswith("drift:") for one in warnings))


@dataclass(slots=True)
class Plan:
    """Changes, why, and what else a person should know; ``refused`` is what could not be planned beside them."""

    changes: list[Change] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def plan(group: Group, marks: Sequence[Mark], flip: Flip | None, tighten: bool) -> Plan:
    """What to change. Raises Refusal where nothing can be."""
    if unsteady(group.deciding) or (flip is not None and flip.sort == "flaky"):
        raise Refusal("fresh boots disagreed, so that nothing can be stated of it yet")
    expectations = [one for one in marks if one.expects]
    if group.deciding.verdict == UNSTATED:
        return _unstated(group, expectations)
    stated = _stated(group, expectations)
    bad = [one for one in group.records if one.verdict in BAD]
    if bad and group.deciding.outcome != READY:
        return _failed(group, expectations, stated, flip)
    found = Plan()
    for one in bad:
        try:
            _ready(found, one, _mark_of(one, stated, expectations), flip)
        except Refusal as refusal:
            found.refused.append(refusal)
    if not bad:
        _rates(found, group, stated, tighten)
    return found


def _stated(group: Group, expectations: Sequence[Mark]) -> list[Mark]:
    """The marks that are stated on this stack. Raises Refusal where they are not those that were judged."""
    version_of = version_in(group.deciding.components)
    known = [one for one in expectations if one.value is not None]
    stated = [one for one in known if one.value.when is None or one.value.when.matches(version_of)]
    there, judged = {one.value.label for one in stated}, {one.expectation for one in group.records}
    opaque = len(known) < len(expectations)
    implied = not expectations and judged == {"fits"}  # serves() alone expects that
    if not implied and (there - judged or (judged - there and not opaque)):
        now = ", ".join(sorted(there)) or "nothing"
        then = ", ".join(sorted(judged))
        raise Refusal(f"it states {now} on this stack, and {then} was judged: edited since, or stated elsewhere?")
    return stated


def _mark_of(record: Record, stated: Sequence[Mark], expectations: Sequence[Mark]) -> Mark | None:
    """The mark that was judged; None for the one that ``serves`` implies. Raises Refusal."""
    found = [one for one in stated if one.value.label == record.expectation]
    if len(found) > 1:
        raise Refusal(f"{record.expectation} is stated {len(found)} times on this stack", found[0].node.lineno)
    if not found and expectations:
        raise _opaque(expectations)
    return found[0] if found else None


def _opaque(expectations: Sequence[Mark]) -> Refusal:
    one = next(one for one in expectations if one.value is None)
    return Refusal(f"the arguments of {one.name} are known to a run only", one.written.lineno)


# ------------------------------------------------------------------------------------------------------- statements


def _failed(group: Group, expectations: Sequence[Mark], stated: Sequence[Mark], flip: Flip | None) -> Plan:
    """The boot failed otherwise than stated: one failure takes the place of all that is stated here."""
    record = group.deciding
    if any(one.value is None for one in expectations):
        raise _opaque(expectations)
    if record.fact.startswith("the other server:"):
        raise Refusal("the server that it is compared with failed, and this claim does not state anything of that one")
    mark = _mark_of(record, stated, expectations)
    old = next((one for one in stated if isinstance(one.value, Unsupported)), mark)
    new = instead(old.value if old is not None else None, record.outcome, observation_of(record))
    split, reason = _split(flip, mark)
    found = Plan(why=[_came_out(record), reason])
    if split is not None:
        found.changes += [Narrow(one, narrowed(one.value.when, split.name, split.old)) for one in stated]
        if not stated:
            found.changes.append(Insert(None, Statement("fits", when=f"{split.name}{split.old}"), here=False))
        found.changes.append(Insert(stated[-1] if stated else None, _windowed(new, mark, split)))
    elif stated:
        found.changes.append(Replace(stated[0], _kept(new, stated[0])))
        found.changes += [Drop(one) for one in stated[1:]]
    else:
        found.changes.append(Insert(None, new))
    return found


def _ready(found: Plan, record: Record, mark: Mark | None, flip: Flip | None) -> None:
    """It came up, and one thing is otherwise than stated. Raises Refusal."""
    if record.fact.startswith(_OWN):
        raise Refusal(f"no statement of ours would say it: {record.fact}", mark.node.lineno if mark else None)
    if record.fact.startswith("the other server:"):
        raise Refusal("the server that it is compared with failed")
    if mark is None:
        raise Refusal(f"its {record.expectation} is contradicted though it came up: {record.fact}")
    if not mark.value.negative and not isinstance(mark.value, (Uses, Ignores, Unsupported)):
        numbers = numbers_for(mark.value, observation_of(record), record.evidence)
        if not numbers:
            raise Refusal(f"no number was measured that it could state: {record.fact}", mark.node.lineno)
        found.changes += [Set(mark, one) for one in numbers]
        found.why.append(_came_out(record))
        return
    new = instead(mark.value, READY, observation_of(record))
    split, reason = _split(flip, mark)
    found.why += [_came_out(record), reason]
    if split is not None:
        found.changes.append(Narrow(mark, narrowed(mark.value.when, split.name, split.old)))
        found.changes.append(Insert(mark, _windowed(new, mark, split)))
    else:
        found.changes.append(Replace(mark, _kept(new, mark)))


def _split(flip: Flip | None, mark: Mark | None) -> tuple[Split | None, str]:
    """What separates old and new, where the old statement covers what was seen before."""
    split, reason = split_of(flip)
    window = mark.value.when if mark is not None else None
    if split is None or flip is None or window is None:
        return split, reason
    before = (flip.held or flip.before).components
    if window.matches(version_in(before)):
        return split, reason
    return None, f"{reason}; the window {window} does not cover what was before"


def _windowed(new: Statement, mark: Mark | None, split: Split) -> Statement:
    window = mark.value.when if mark is not None else None
    return Statement(new.name, new.arguments, narrowed(window, split.name, split.new))


def _kept(new: Statement, mark: Mark) -> Statement:
    """The new statement for the stacks that the old one was for."""
    return Statement(new.name, new.arguments, mark.value.when.text if mark.value.when is not None else None)


def _unstated(group: Group, expectations: Sequence[Mark]) -> Plan:
    """Nothing was stated for this stack: what it did is, with a window that begins here."""
    record = group.deciding
    if any(one.value is None for one in expectations):
        raise _opaque(expectations)
    labels = " / ".join(one.value.label for one in expectations)
    if sorted(labels.split(" / ")) != sorted(record.expectation.split(" / ")):
        raise Refusal(f"it states {labels or 'nothing'}, and {record.expectation} was its claim: edited since?")
    if f": {_OWN}" in record.fact:
        raise Refusal(f"no statement of ours would say it: {record.fact}")
    values = [one.value for one in expectations]
    when = window_for(values, version_in(record.components))
    if when is None:
        raise Refusal("no window covers this stack without meeting another one: its versions may not be recorded")
    off = [one for one in values if isinstance(one, Unsupported)]
    new = instead(off[-1] if off and record.outcome != READY else None, record.outcome, observation_of(record))
    found = Plan(why=[_came_out(record), "nothing is stated for this stack"])
    found.changes.append(Insert(expectations[-1], Statement(new.name, new.arguments, when)))
    if record.outcome == READY:
        found.notes.append("that it answers was not asked, nothing being stated")
    return found


# ------------------------------------------------------------------------------------------------------------ rates


def _rates(found: Plan, group: Group, stated: Sequence[Mark], tighten: bool) -> None:
    """Floors and references that hold, and say little about what was measured."""
    for mark in stated:
        value, records = mark.value, [one for one in group.records if one.expectation == mark.value.label]
        if not isinstance(value, ExpectToks) or len(records) != 1 or records[0].verdict != HOLDS:
            continue
        record = records[0]
        drift = drifted(record.evidence, value)
        if not drift and not (tighten and beaten(record.evidence, value, record.cards)):
            continue
        here = value.on(record.cards)
        for one in numbers_for(value, observation_of(record), record.evidence):
            if one.argument == "min" and here is not None and float(one.text) <= (here.minimum or 0.0):
                continue  # a warning is no reason to guard less
            found.changes.append(Set(mark, one))
            found.why.append(f"{'drift' if drift else 'beaten by far'}: {record.fact}")


def _came_out(record: Record) -> str:
    return f"{record.verdict}: {record.fact}"
