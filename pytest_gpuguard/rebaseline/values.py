"""Edits, proposals and refusals as frozen values. Nothing here reads or writes a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..claims.account import printable

if TYPE_CHECKING:
    from .source import Source


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters ``start`` to ``end`` of a file's text become ``text``."""

    start: int
    end: int
    text: str


class Refusal(Exception):
    """An edit cannot be made safely: why, at which line, and what a person should write instead."""

    def __init__(self, why: str, line: int | None = None, write: str | None = None) -> None:
        super().__init__(why)
        self.why, self.line, self.write = why, line, write


@dataclass(frozen=True, slots=True)
class Proposal:
    """The edit of one test. ``line`` is that of the first decorator concerned, of the file as it is now.

    ``before`` and ``after`` are its decorators in question; ``imports`` are names that the file must import from
    pytest_gpuguard besides; ``notes`` are for a person, and no part of the patch.
    """

    claim: str
    stack: str
    file: str
    line: int
    before: str
    after: str
    why: str
    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: Source = field(kw_only=True, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """With stable keys, for JSON."""
        names = ("claim", "stack", "file", "line", "before", "after", "why")
        return {**{name: getattr(self, name) for name in names}, "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class Refused:
    """A claim that came out otherwise and whose source is left alone: why, and what a person should ``write``."""

    claim: str
    stack: str
    file: str
    line: int | None
    why: str
    write: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """With stable keys, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file
        write = f"; write {self.write}" if self.write else ""
        return printable(f"{place}: {self.claim}: not edited: {self.why}{write}")


def applied(text: str, edits: Iterable[Edit]) -> str:
    """The text after edits that do not overlap; those at one place in the order given."""
    parts: list[str] = []
    at = 0
    for edit in sorted(edits, key=lambda one: (one.start, one.end)):
        if edit.start < at:
            raise Refusal("two edits of it overlap")
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join((*parts, text[at:]))
