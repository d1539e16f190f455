"""Changes of a test's decorators as edits of the file's text. It must never rewrite what it does not change."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..claims.expect import normal_card
from .imports import plain_import
from .marks import Mark, NotLiteral, Scope
from .numbers import Number
from .source import Function, Source
from .statements import Statement, literal
from .values import Edit, Refusal

#: The longest line that is written, in characters.
_WIDTH: Final = 100


@dataclass(frozen=True, slots=True)
class Narrow:
    """A mark gets this window."""

    mark: Mark
    when: str


@dataclass(frozen=True, slots=True)
class Replace:
    """A mark becomes this statement."""

    mark: Mark
    new: Statement


@dataclass(frozen=True, slots=True)
class Drop:
    """A mark goes."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class Insert:
    """A statement comes after a mark; without one, right above the function."""

    after: Mark | None
    new: Statement
    #: Whether it is stated on the stack that was seen; else it keeps what was stated before.
    here: bool = True


@dataclass(frozen=True, slots=True)
class Set:
    """An argument of a mark gets another number."""

    mark: Mark
    number: Number


Change = Narrow | Replace | Drop | Insert | Set


class Decorators:
    """The decorators of one function, and the edits that change them."""

    def __init__(self, source: Source, scope: Scope, function: Function) -> None:
        self.source, self.scope, self.function = source, scope, function
        self.imports: list[str] = []

    def edits(self, changes: Sequence[Change]) -> list[Edit]:
        """Raises Refusal for what cannot be edited in place."""
        found: list[Edit] = []
        for one in changes:
            mark = one.after if isinstance(one, Insert) else one.mark
            if mark is not None and not mark.direct and not isinstance(one, Insert):
                raise Refusal(self._elsewhere(mark), mark.written.lineno)
            found.append(self._edit(one))
        return found

    def _elsewhere(self, mark: Mark) -> str:
        if mark.variable is not None:
            return f"{mark.name} is the variable {mark.variable}, which other tests may use too"
        return f"{mark.name} is stated for the whole {mark.where}, and so for other tests too"

    def _edit(self, one: Change) -> Edit:
        if isinstance(one, Narrow):
            return self._with_window(one.mark, one.when)
        if isinstance(one, Replace):
            start, end = self.source.span(one.mark.node)
            return Edit(start, end, self._text(one.new, one.mark, one.mark.node.lineno))
        if isinstance(one, Drop):
            start, end = self._lines(one.mark)
            return Edit(start, end, "")
        if isinstance(one, Set):
            return self._with_number(one.mark, one.number)
        mark = one.after if one.after is not None and one.after.direct else None
        line = self.function.lineno
        at, indent = self.source.at(line, 0), self.source.indent(line)
        if mark is not None:
            at, line = self._lines(mark)[1], mark.node.end_lineno or line
        text = f"{indent}@{self._text(one.new, one.after, line)}{self.source.newline(line)}"
        return Edit(at, at, text)

    def _text(self, new: Statement, beside: Mark | None, line: int) -> str:
        """The statement as it stands at the indentation of a line; an argument to a line where one line is too long."""
        spelled, indent, newline = self.spelled(new, beside), self.source.indent(line), self.source.newline(line)
        text = new.text(spelled)
        if len(indent) + 1 + len(text) <= _WIDTH:
            return text
        arguments = "".join(f"{indent}    {one},{newline}" for one in new.given)
        return f"{spelled}({newline}{arguments}{indent})"

    def _lines(self, mark: Mark) -> tuple[int, int]:
        """The lines of a decorator, with what stands beside it."""
        node, source = mark.node, self.source
        if not source.line(node.lineno).lstrip(" \t").startswith("@"):
            raise Refusal(f"{mark.name} does not stand on a line that begins with @", node.lineno)
        return source.at(node.lineno, 0), source.next_line(node.end_lineno or node.lineno)

    # ------------------------------------------------------------------------------------------------------- names

    def spelled(self, new: Statement, beside: Mark | None) -> str:
        """How this file would write the name, as its neighbour does. Raises Refusal where it has no way to."""
        scope = self.scope
        if beside is not None:
            head = beside.written.func if isinstance(beside.written, ast.Call) else beside.written
            if isinstance(head, ast.Attribute):
                return f"{self.source.of(head.value)}.{new.name}"
        local = next((name for name, mark in scope.marks.items() if mark == new.name), None)
        if local is not None:
            return local
        if plain_import(self.source) is not None and new.name not in scope.bound:
            self.imports.append(new.name)
            return new.name
        owners = [*scope.packages, *(f"{one}.mark" for one in scope.pytests), *scope.pytest_marks]
        if not owners:
            taken = f"{new.name} is something else in this file" if new.name in scope.bound else "nothing to extend"
            raise Refusal(f"it does not import {new.name}, nor pytest ({taken})", self.function.lineno)
        return f"{owners[0]}.{new.name}"

    # --------------------------------------------------------------------------------------------------- arguments

    def _with_window(self, mark: Mark, when: str) -> Edit:
        node, source = mark.written, self.source
        text = literal(when)
        if not isinstance(node, ast.Call):
            end = source.span(node)[1]
            return Edit(end, end, f"(when={text})")
        for one in node.keywords:
            if one.arg == "when":
                return Edit(*source.span(self._plain(one.value, mark, f"when={text}")), text)
        return self._append(node, f"when={text}")

    def _append(self, node: ast.Call, argument: str) -> Edit:
        """One more argument, before the closing parenthesis: on a line of its own where the last one has one."""
        source = self.source
        end = source.span(node)[1]
        given = [*node.args, *(one.value for one in node.keywords)]
        if not given:
            return Edit(end - 1, end - 1, argument)
        last = max(given, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0))
        place = source.span(last)[1]
        gap = source.text[place : end - 1]
        marks = _punctuation(gap)
        comma = next((at for one, at in marks if one == ","), None)
        if comma is None:
            place += max((at + 1 for one, at in marks if one == ")"), default=0)  # of parentheses around it
            return Edit(place, place, f", {argument}")
        place += comma + 1
        line = last.end_lineno or last.lineno
        rest = source.text[place : end - 1]
        if "\n" not in rest:
            return Edit(place, place, f" {argument}")
        newline = source.newline(line)
        at = place + rest.index("\n") + 1 - len(newline)
        return Edit(at, at, f"{newline}{source.indent(line)}{argument},")

    def _with_number(self, mark: Mark, number: Number) -> Edit:
        node, name = mark.written, number.argument
        assert isinstance(node, ast.Call)
        value = next((one.value for one in node.keywords if one.arg == name), None)
        if value is None:
            places = {"limit": 0, "min": 0, "ratio": 1}
            at = places.get(name)
            if at is None or at >= len(node.args):
                raise Refusal(f"{name} is not among the arguments of {mark.name}", node.lineno, f"{name}={number.text}")
            value = node.args[at]
        if number.card is not None:
            value = self._entry(value, mark, number)
        found = self._plain(value, mark, f"{name}={number.text}")
        return Edit(*self.source.span(found), number.text)

    def _entry(self, value: ast.expr, mark: Mark, number: Number) -> ast.expr:
        if isinstance(value, ast.Dict):
            for key, one in zip(value.keys, value.values, strict=True):
                try:
                    card = self.scope.value(key) if key is not None else None
                except NotLiteral:
                    continue
                if isinstance(card, str) and normal_card(card) == number.card:
                    return one
        write = f'{number.argument}={{"{number.card}": {number.text}, …}}'
        raise Refusal(f"the entry of {number.card} is not written out in {mark.name}", value.lineno, write)

    def _plain(self, value: ast.expr, mark: Mark, write: str) -> ast.expr:
        """The value, if it is written out where it stands. Raises Refusal."""
        if isinstance(value, ast.Name):
            raise Refusal(
                f"an argument of {mark.name} is the name {value.id}, which may stand elsewhere too", value.lineno, write
            )
        if not isinstance(value, ast.Constant):
            raise Refusal(f"an argument of {mark.name} is not written out", value.lineno, write)
        return value


def _punctuation(text: str) -> list[tuple[str, int]]:
    """Commas and parentheses between a call's last argument and its end, with their places; comments have none."""
    found, at = [], 0
    while at < len(text):
        if text[at] == "#":
            at = text.find("\n", at)
            if at < 0:
                break
        if text[at] in ",)":
            found.append((text[at], at))
        at += 1
    return found
