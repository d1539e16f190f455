"""Marks of ours as a file writes them: which decorator is which mark, under what name, with which arguments.

It must never run what it reads: only literals, names that stand for literals, and marks within marks are understood.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ..claims.claim import About, Serves
from ..claims.errors import ClaimError
from ..claims.expect import Expectation
from ..claims.markers import MARKERS
from ..claims.needs import Needs
from .imports import PACKAGE
from .source import Function, Source, statements

Where = Literal["function", "class", "module"]
_DEEPEST: Final = 20


class NotLiteral(ValueError):
    """An argument that only running the file would tell."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark on a test. ``node`` is the decorator, or the entry of ``pytestmark``; ``written`` the mark itself, which
    is elsewhere where ``variable`` names it. ``value`` is what it declares; None where that cannot be read.
    """

    name: str
    node: ast.expr = field(repr=False)
    written: ast.expr = field(repr=False)
    where: Where
    value: Any
    variable: str | None = None

    @property
    def direct(self) -> bool:
        """Whether it is a decorator of the function itself, written out."""
        return self.where == "function" and self.variable is None

    @property
    def expects(self) -> bool:
        """Whether it is an expectation, readable or not."""
        if self.value is not None:
            return isinstance(self.value, Expectation)
        return not self.name.startswith("needs_") and self.name not in ("serves", "claim")


class Scope:
    """The names of a file's top level, as far as marks are concerned."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.marks: dict[str, str] = {}  # local name → mark
        self.packages: list[str] = []
        self.pytests: list[str] = []
        self.pytest_marks: list[str] = []
        self.bound: set[str] = set()
        self._assigned: dict[str, ast.expr | None] = {}
        for one in source.body:
            self._take(one)
        for name in self._assigned:
            self.marks.pop(name, None)  # it was imported, and is something else now

    def after(self, source: Source, imported: Collection[str]) -> Scope:
        """The same names for an edited text, which imports some more."""
        found = copy(self)
        found.source, found.marks = source, {**self.marks, **{name: name for name in imported}}
        return found

    def _take(self, one: ast.stmt) -> None:
        if isinstance(one, (ast.Import, ast.ImportFrom)):
            for alias in one.names:
                self._import(one, alias)
            return
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._assign(one.name, None)
            return
        value = one.value if isinstance(one, (ast.Assign, ast.AnnAssign)) else None
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        plain = [target.id for target in targets if isinstance(target, ast.Name)]
        for node in _own_names(one):
            self._assign(node, value if node in plain else None)

    def _import(self, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        local = alias.asname or alias.name.partition(".")[0]
        self.bound.add(local)
        if isinstance(statement, ast.Import):
            if alias.name in (PACKAGE, "pytest"):
                (self.packages if alias.name == PACKAGE else self.pytests).append(local)
        elif statement.module in (PACKAGE, f"{PACKAGE}.claims.markers") and not statement.level:
            if alias.name == "*":
                self.marks.update({name: name for name in MARKERS})
                self.bound.update(MARKERS)
            elif alias.name in MARKERS:
                self.marks[local] = alias.name
        elif statement.module == "pytest" and alias.name == "mark":
            self.pytest_marks.append(local)

    def _assign(self, name: str, value: ast.expr | None) -> None:
        self._assigned[name] = value if name not in self._assigned else None
        self.bound.add(name)

    def mark_of(self, node: ast.expr) -> str | None:
        """The mark that this expression names, such as ``fits``, ``gg.fits``, ``pytest.mark.fits``."""
        if isinstance(node, ast.Name):
            return self.marks.get(node.id)
        if not isinstance(node, ast.Attribute) or node.attr not in MARKERS:
            return None
        owner = node.value
        if isinstance(owner, ast.Attribute):
            is_pytest = isinstance(owner.value, ast.Name) and owner.value.id in self.pytests and owner.attr == "mark"
            return node.attr if is_pytest else None
        known = isinstance(owner, ast.Name) and owner.id in (*self.packages, *self.pytest_marks)
        return node.attr if known else None

    def read(self, node: ast.expr, where: Where) -> Mark | None:
        """The mark of ours that a decorator is; None for all else."""
        written, variable = self._behind(node)
        name = self.mark_of(written.func if isinstance(written, ast.Call) else written)
        if name is None:
            return None
        try:
            value_of = MARKERS[name].parse(self._mark(name, written, 0).mark)
        except (NotLiteral, ClaimError, TypeError, ValueError, RecursionError):
            value_of = None
        return Mark(name, node, written, where, value_of, variable)

    def _behind(self, node: ast.expr) -> tuple[ast.expr, str | None]:
        """What a variable was set to, and its name; a decorator that is none as it is."""
        variable = None
        for _ in range(_DEEPEST):  # a name may lead to itself
            if not isinstance(node, ast.Name):
                break
            name = node.id
            value = self._assigned.get(name)
            if value is None:
                break
            node, variable = value, name
        return node, variable

    def _mark(self, name: str, node: ast.expr, depth: int) -> Any:
        if not isinstance(node, ast.Call):
            return MARKERS[name]
        arguments = [self.value(one, depth + 1) for one in node.args]
        keywords = {one.arg: self.value(one.value, depth + 1) for one in node.keywords if one.arg is not None}
        if len(keywords) < len(node.keywords):
            raise NotLiteral("**")
        return MARKERS[name](*arguments, **keywords)

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """What an argument is. Raises NotLiteral."""
        if depth > _DEEPEST:
            raise NotLiteral(type(node).__name__)
        assigned = self._assigned.get(node.id) if isinstance(node, ast.Name) else None
        if assigned is not None:
            return self.value(assigned, depth + 1)
        if isinstance(node, ast.Call):
            name = self.mark_of(node.func)
            if name is not None:
                return self._mark(name, node, depth)
        if isinstance(node, ast.Dict) and None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {self.value(key, depth + 1): self.value(one, depth + 1) for key, one in pairs if key is not None}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
            if isinstance(left, str) and isinstance(right, str):
                return left + right
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise NotLiteral(type(node).__name__) from None

    def marks_on(self, function: Function, classes: tuple[ast.ClassDef, ...]) -> list[Mark]:
        """All marks of ours on a test, as far as its file shows them: the function's first, top down."""
        found = [self.read(one, "function") for one in function.decorator_list]
        for one in classes[::-1]:
            found += [self.read(node, "class") for node in (*one.decorator_list, *_pytestmark(statements(one.body)))]
        found += [self.read(node, "module") for node in _pytestmark(self.source.body)]
        return [one for one in found if one is not None]


def claimed(marks: list[Mark]) -> tuple[list[Needs], Serves | None, list[Expectation], About | None]:
    """What marks that could be read declare, for ``build_claim``."""
    values = [one.value for one in marks]
    serves = next((one for one in values if isinstance(one, Serves)), None)
    about = next((one for one in values if isinstance(one, About)), None)
    needs = [one for one in values if isinstance(one, Needs)]
    return needs, serves, [one for one in values if isinstance(one, Expectation)], about


def _pytestmark(body: Iterable[ast.stmt]) -> Iterator[ast.expr]:
    for one in body:
        if isinstance(one, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == "pytestmark" for to in one.targets
        ):
            yield from one.value.elts if isinstance(one.value, (ast.List, ast.Tuple)) else (one.value,)


def _own_names(one: ast.stmt) -> Iterator[str]:
    """The names that a statement binds by itself, without those within it."""
    bodies = {id(node) for part in ("body", "orelse", "finalbody", "handlers") for node in getattr(one, part, ())}
    waiting: list[ast.AST] = [one]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        if not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            waiting += [child for child in ast.iter_child_nodes(node) if id(child) not in bodies]
