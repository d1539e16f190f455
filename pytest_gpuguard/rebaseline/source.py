"""A test file as it stands: its text, its syntax tree, and where in it a test is. It must never import the file."""

from __future__ import annotations

import ast
import codecs
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from .values import Edit, Refusal

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.stmt)

_BOM: Final = "\ufeff"
#: Longer files are no tests that a person wrote, in bytes.
_LARGEST: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node id leads: a file below the root, classes and a function, and the parameters as one text."""

    file: str
    names: tuple[str, ...]
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """``file`` is its path below the root as a patch names it; ``starts`` are the places of its lines in ``text``."""

    file: str
    text: str
    tree: ast.Module = field(repr=False, compare=False)
    starts: tuple[int, ...] = field(repr=False, compare=False)
    #: Its statements as ``statements`` gives them, and its definitions as edits that take them away.
    body: tuple[ast.stmt, ...] = field(default=(), repr=False, compare=False)
    definitions: tuple[Edit, ...] = field(default=(), repr=False, compare=False)

    def at(self, line: int, column: int) -> int:
        """The place of a line (from 1) and a column (from 0, in bytes of UTF-8), as the syntax tree counts them."""
        start = self.starts[line - 1]
        text = self.line(line)
        return start + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        """Where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt | ast.alias) -> str:
        """A node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def line(self, number: int) -> str:
        """A line with its end."""
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end]

    def next_line(self, number: int) -> int:
        """Where the line after this one begins."""
        return self.starts[number] if number < len(self.starts) else len(self.text)

    def indent(self, number: int) -> str:
        """The blanks that a line begins with."""
        text = self.line(number)
        return text[: len(text) - len(text.lstrip(" \t"))]

    def newline(self, number: int) -> str:
        """How a line ends; of a last one without an end, how the first does."""
        line = self.line(number)
        line = line if line.endswith("\n") else self.line(1)
        return "\r\n" if line.endswith("\r\n") else "\n"


def place_of(nodeid: str, stack: str) -> Place:
    """Where a node id leads; the name of a stack that the test was multiplied for is none of its parameters.

    Raises Refusal.
    """
    file, found, rest = nodeid.partition(".py::")
    names, bracket, parameters = rest.partition("[")
    if not found or not names:
        raise Refusal(f"{nodeid!r} names no function in a Python file")
    if bracket:
        parameters = parameters.removesuffix("]")
        parameters = "" if parameters == stack else parameters.removesuffix(f"-{stack}")
    return Place(f"{file}.py", tuple(names.split("::")), parameters)


def read(root: Path, file: str) -> Source:
    """The file below ``root``, where links lead. Raises Refusal: not there, not below it, not UTF-8, no Python."""
    top = root.resolve()
    try:
        path = (top / file).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise Refusal(f"it cannot be read: {error}") from None
    if not path.is_relative_to(top):
        raise Refusal(
            f"it lies outside {root}, which a patch cannot reach: run this in the tests' root folder, or --root"
        )
    try:
        if not path.is_file():
            raise Refusal(f"there is no such file below {root}: was it moved? --root names the tests' root folder")
        if path.stat().st_size > _LARGEST:
            raise Refusal(f"it is larger than {_LARGEST >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise Refusal(f"it cannot be read: {error.strerror or error}") from None
    return parsed(path.relative_to(top).as_posix(), data)


def parsed(file: str, data: bytes) -> Source:
    """The source that these bytes are. Raises Refusal."""
    cookie = re.match(rb"(?:[ \t\f]*(?:#.*)?\r?\n)?[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", data)
    try:
        if cookie is not None and codecs.lookup(cookie[1].decode()).name not in ("utf-8", "utf-8-sig", "ascii"):
            raise Refusal(f"it is encoded in {cookie[1].decode()}, and patches are text in UTF-8")
        text = data.decode("utf-8")
    except (UnicodeDecodeError, LookupError):
        raise Refusal("it is not encoded in UTF-8, which patches are") from None
    if re.search(r"\r(?!\n)", text):
        raise Refusal("it has carriage returns that end no line")
    return parse(file, text)


def parse(file: str, text: str) -> Source:
    """The source that this text is. Raises Refusal for what is no Python."""
    skipped = len(_BOM) if text.startswith(_BOM) else 0
    starts = [skipped, *(one.end() for one in re.finditer("\n", text))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the file's own escapes
            tree = ast.parse(text[skipped:])
        body = tuple(statements(tree.body))
    except SyntaxError as error:
        raise Refusal(f"it is no Python that this interpreter reads: {error.msg}", error.lineno) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Refusal(f"it is no Python that this interpreter reads: {error}") from None
    source = Source(file, text, tree, tuple(starts), body)
    return replace(source, definitions=_definitions(source))


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body and of its ``if``, ``try``, ``with`` and loops, but not of functions and classes."""
    for one in body:
        yield one
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from statements(getattr(one, part, ()))
        for handler in getattr(one, "handlers", ()):
            yield from statements(handler.body)


def without_others(source: Source, function: Function) -> list[Edit]:
    """Edits that take away the functions and classes of the top level that this function does not stand in."""
    at = source.at(function.lineno, 0)
    return [one for one in source.definitions if not one.start <= at < one.end]


def _definitions(source: Source) -> tuple[Edit, ...]:
    """The lines of each function and class of the top level, with its decorators, taken away."""
    found = []
    for one in source.tree.body:
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and one.end_lineno is not None:
            first = min((each.lineno for each in one.decorator_list), default=one.lineno)
            found.append(Edit(source.at(first, 0), source.next_line(one.end_lineno), ""))
    return tuple(found)


def find(source: Source, place: Place) -> tuple[Function, tuple[ast.ClassDef, ...]]:
    """The function, and the classes that it stands in, the outermost first. Raises Refusal."""
    classes: list[ast.ClassDef] = []
    body: Sequence[ast.stmt] = source.body
    for name in place.names[:-1]:
        inner = [one for one in body if isinstance(one, ast.ClassDef) and one.name == name]
        classes.append(_only(inner, f"class {name}"))
        body = tuple(statements(classes[-1].body))
    name = place.names[-1]
    functions: list[Function] = [
        one for one in body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name == name
    ]
    where = f" in class {classes[-1].name}: it may be inherited" if classes else ""
    return _only(functions, f"function {name}", where), tuple(classes)


def _only(found: list[Node], what: str, where: str = "") -> Node:
    if not found:
        raise Refusal(f"there is no {what}{where}: was it renamed?")
    if len(found) > 1:
        raise Refusal(f"there are {len(found)} of {what}", found[-1].lineno)
    return found[0]
