"""From a run's records and flips to proposals: one for each test whose source no longer says what was seen.

It must never propose what the real judge would contradict, nor what would break the same claim elsewhere in the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..claims.claim import build_claim
from ..claims.errors import ClaimError
from ..claims.expect import Expectation, Ignores, Unsupported, Uses
from ..claims.judgement import Verdict
from ..claims.verdict import judge
from ..claims.window import parse_window
from ..ledger.flips import Flip
from ..ledger.record import Record
from .decorators import Change, Decorators, Drop, Insert, Narrow, Replace, Set
from .diff import edited
from .evidence import observation_of
from .imports import import_edits
from .marks import Mark, Scope, claimed
from .plan import Group, Plan, plan
from .source import Function, Place, Source, find, parse, place_of, read, without_others
from .values import Proposal, Refusal, Refused, applied
from .windows import version_in


def propose(
    records: Sequence[Record], flips: Sequence[Flip], root: Path, *, tighten: bool = False
) -> tuple[list[Proposal], list[Refused]]:
    """Proposals for the claims of one run, from its records with evidence, and what must be edited by hand.

    ``root`` is the folder that node ids begin at. ``tighten`` also raises floors that were beaten by far.
    """
    refused: list[Refused] = []
    files: dict[str, dict[tuple[str, ...], list[Group]]] = {}
    for group in _groups(records, refused, tighten):
        files.setdefault(group.place.file, {}).setdefault(group.place.names, []).append(group)
    by_record = {(one.now.claim, one.now.stack, one.now.nodeid): one for one in flips}
    proposals: list[Proposal] = []
    for file, functions in sorted(files.items()):
        asking = {names: groups for names, groups in functions.items() if any(one.asks(tighten) for one in groups)}
        if not asking:
            continue
        try:
            source = read(root, file)
        except Refusal as refusal:
            refused += [_refused(one, refusal) for groups in asking.values() for one in groups if one.asks(tighten)]
            continue
        scope, found = Scope(source), []
        for groups in asking.values():
            found += _Test(source, scope, groups, by_record, tighten, refused).proposals()
        proposals += _parsing(found, refused)
    return proposals, refused


def _groups(records: Iterable[Record], refused: list[Refused], tighten: bool) -> list[Group]:
    found: dict[tuple[str, str, str], list[Record]] = {}
    for one in records:
        found.setdefault((one.claim, one.stack, one.nodeid), []).append(one)
    groups = []
    for (claim, stack, nodeid), several in found.items():
        try:
            groups.append(Group(claim, stack, place_of(nodeid, stack), tuple(several)))
        except Refusal as refusal:
            group = Group(claim, stack, Place(nodeid.partition("::")[0], ()), tuple(several))
            refused += [_refused(group, refusal)] if group.asks(tighten) else []
    return groups


def _refused(group: Group, refusal: Refusal, line: int | None = None) -> Refused:
    at = refusal.line if refusal.line is not None else line
    return Refused(group.claim, group.stack, group.place.file, at, refusal.why, refusal.write)


def _parsing(found: list[Proposal], refused: list[Refused]) -> list[Proposal]:
    """All proposals of a file, or none where their sum is no Python."""
    try:
        edited(found)
    except Refusal as refusal:
        why = f"together with the other edits of this file it would not parse ({refusal.why})"
        refused += [Refused(one.claim, one.stack, one.file, one.line, why, one.after) for one in found]
        return []
    return found


@dataclass
class _Test:
    """One test function, and all that the run says of it."""

    source: Source
    scope: Scope
    groups: list[Group]
    flips: Mapping[tuple[str, str, str], Flip]
    tighten: bool
    refused: list[Refused]
    function: Function = field(init=False)

    def proposals(self) -> list[Proposal]:
        """None or one; what cannot be proposed is told."""
        asking = [one for one in self.groups if one.asks(self.tighten)]
        made: list[tuple[Group, Proposal]] = []
        failed = False
        for group in asking:
            try:
                one = self._proposal(group)
            except Refusal as refusal:
                self.refused.append(_refused(group, refusal))
                failed = True
                continue
            made += [(group, one)] if one is not None else []
        if not made:
            return []
        first = made[0][1]
        alike = all(one.edits == first.edits and one.imports == first.imports for _, one in made)
        if failed or not alike:
            why = "it came out otherwise on its other stacks or parameters, which share this source"
            self.refused += [_refused(one, Refusal(why, two.line, two.after)) for one, two in made]
            return []
        others = [f"also {group.claim} on {group.stack}" for group, _ in made[1:]]
        return [replace(first, notes=(*first.notes, *others))]

    def _proposal(self, group: Group) -> Proposal | None:
        self.function, classes = find(self.source, group.place)
        line = self.function.lineno
        marks = self.scope.marks_on(self.function, classes)
        key = next(((one.claim, one.stack, one.nodeid) for one in group.records), ("", "", ""))
        try:
            planned = plan(group, marks, self.flips.get(key), self.tighten)
            self.refused += [_refused(group, one, line) for one in planned.refused]
            if not planned.changes:
                return None
            self._only_some(group)
            return self._made(group, marks, planned)
        except Refusal as refusal:
            raise Refusal(refusal.why, refusal.line or line, refusal.write) from None
        except RecursionError:
            raise Refusal("its source nests too deeply to be read", line) from None

    def _only_some(self, group: Group) -> None:
        """Raises Refusal where parameters share the function and did not all come out otherwise."""
        same_stack = [one for one in self.groups if one.stack == group.stack]
        calm = [one.place.parameters for one in same_stack if not one.asks(self.tighten)]
        if calm:
            few = ", ".join(f"[{one}]" for one in calm[:3])
            raise Refusal(f"only some of its parameters came out otherwise, not {few}, and they share these decorators")

    def _made(self, group: Group, marks: Sequence[Mark], planned: Plan) -> Proposal:
        decorators = Decorators(self.source, self.scope, self.function)
        try:
            edits = decorators.edits(planned.changes)
            imports = tuple(dict.fromkeys(decorators.imports))
            # Without the other tests: what is edited here is no part of them, and they would be parsed each time.
            rest = without_others(self.source, self.function)
            text = applied(self.source.text, [*edits, *import_edits(self.source, imports), *rest])
            new_source = parse(self.source.file, text)
            function, classes = find(new_source, group.place)
            new_marks = self.scope.after(new_source, imports).marks_on(function, classes)
            self._check(group, marks, new_marks, planned.changes)
        except Refusal as refusal:
            raise Refusal(refusal.why, refusal.line, refusal.write or _said(planned.changes)) from None
        before = [f"@{self.source.of(one)}" for one in self.function.decorator_list]
        after = [f"@{new_source.of(one)}" for one in function.decorator_list]
        touched = [one.after if isinstance(one, Insert) else one.mark for one in planned.changes]
        return Proposal(
            claim=group.claim,
            stack=group.stack,
            file=self.source.file,
            line=min((one.node.lineno for one in touched if one is not None), default=self.function.lineno),
            before="\n".join(one for one in before if one not in after),
            after="\n".join(one for one in after if one not in before),
            why="; ".join(dict.fromkeys(planned.why)),
            edits=tuple(edits),
            imports=imports,
            notes=(*planned.notes, *_cards(group)),
            source=self.source,
        )

    # -------------------------------------------------------------------------------------------------------- checks

    def _check(self, group: Group, old: Sequence[Mark], new: Sequence[Mark], changes: Sequence[Change]) -> None:
        """The edited decorators must mean what was planned, be no contradiction, and hold. Raises Refusal."""
        was = [one.value for one in old if one.expects]
        now = [one.value for one in new if one.expects]
        meant, numbers = _meant(was, changes)
        missing, others = list(map(repr, meant)), list(map(repr, now))
        for text in [one for one in missing if one in others]:
            missing.remove(text)
            others.remove(text)
        if missing or len(others) != numbers:
            raise Refusal("the edited decorators would not mean what is proposed")
        try:
            claim = build_claim(*claimed(list(new)))
        except ClaimError as error:
            raise Refusal(f"the edited claim would be refused: {error}") from None
        if claim is None:
            raise Refusal("the edited test would claim nothing")
        for one in self.groups:
            self._holds(one, claim.stated(version_in(one.deciding.components)), was, own=one is group)

    def _holds(self, group: Group, stated: Sequence[Expectation], was: Sequence[Any], own: bool) -> None:
        """What is stated for these stack and parameters must be what was seen of them. Raises Refusal."""
        if not own and group.deciding.verdict != Verdict.HOLDS.value:
            return
        new = [one for one in stated if one not in was]
        if not own and not stated:
            raise Refusal(f"nothing would be stated any more on stack {group.stack}, where it holds")
        if own and not new:
            raise Refusal("what is proposed would not be stated on this stack")
        for one in new:
            if isinstance(one, (Uses, Ignores)) or (isinstance(one, Unsupported) and not one.negative):
                if own:
                    continue  # the evidence that contradicted the one shows the other
                raise Refusal(f"it holds on stack {group.stack}, and history does not say what separates the two")
            record = next((each for each in group.records if _alike(each, one)), group.deciding)
            found = judge(one, observation_of(record))
            if found.verdict is not Verdict.HOLDS:
                if own:
                    raise Refusal(f"{one.label} would be {found.verdict} on what was seen: {found.fact}")
                raise Refusal(
                    f"it holds on stack {group.stack}{_named(group)}, where {one.label} would be {found.verdict}: "
                    f"history does not say what separates the two"
                )


def _alike(record: Record, expectation: Expectation) -> bool:
    """Whether a judgement is on the same kind of thing: that of a rate names its numbers."""
    return record.expectation.partition("(")[0] == expectation.kind


def _named(group: Group) -> str:
    return f" [{group.place.parameters}]" if group.place.parameters else ""


def _cards(group: Group) -> tuple[str, ...]:
    cards = group.deciding.cards
    return (f"seen on {', '.join(cards)} only",) if cards else ()


def _meant(was: Sequence[Any], changes: Sequence[Change]) -> tuple[list[Any], int]:
    """The expectations after the changes, without those that get another number; and how many these are."""
    found = list(was)
    numbers = {id(one.mark): one.mark.value for one in changes if isinstance(one, Set)}
    for value in numbers.values():
        found.remove(value)
    for one in changes:
        if not isinstance(one, (Insert, Set)):
            found.remove(one.mark.value)
        if isinstance(one, Narrow):
            found.append(replace(one.mark.value, when=parse_window(one.when)))
        elif isinstance(one, (Replace, Insert)):
            found.append(_value(one.new.text()))
    return found, len(numbers)


def _value(text: str) -> Any:
    """What a statement declares, by the parsers of the marks. Raises Refusal."""
    import ast

    node = ast.parse(text, mode="eval").body
    mark = Scope(parse("", "from pytest_gpuguard import *\n")).read(node, "function")
    if mark is None or mark.value is None:
        raise Refusal(f"{text} is no statement that would be understood")
    return mark.value


def _said(changes: Sequence[Change]) -> str:
    """The changes in words that a person can type."""
    said = []
    for one in changes:
        if isinstance(one, Narrow):
            said.append(f'when="{one.when}" on {one.mark.name}')
        elif isinstance(one, (Replace, Insert)):
            said.append(f"@{one.new.text()}" + (f" for {one.mark.name}" if isinstance(one, Replace) else ""))
        elif isinstance(one, Set):
            card = f' of "{one.number.card}"' if one.number.card is not None else ""
            said.append(f"{one.number.argument}={one.number.text}{card} in {one.mark.name}")
        elif isinstance(one, Drop):
            said.append(f"no {one.mark.name}")
    return ", ".join(said)
