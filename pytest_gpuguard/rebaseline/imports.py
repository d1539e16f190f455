"""Names that an edited file must import from pytest_gpuguard: where they go. It must never reorder what is there."""

from __future__ import annotations

import ast
from collections.abc import Collection

from .source import Source
from .values import Edit

PACKAGE = "pytest_gpuguard"


def plain_import(source: Source) -> ast.ImportFrom | None:
    """The file's first ``from pytest_gpuguard import a, b`` that is a statement of its own."""
    for one in source.tree.body:
        if isinstance(one, ast.ImportFrom) and one.module == PACKAGE and not one.level and one.names[0].name != "*":
            return one
    return None


def import_edits(source: Source, names: Collection[str]) -> list[Edit]:
    """The edits that add names to the plain import, in alphabetical order where it has that."""
    statement = plain_import(source)
    if not names or statement is None:
        return []
    there = [one.name for one in statement.names]
    ordered = there == sorted(there)
    by_place: dict[int, list[str]] = {}
    for name in sorted(set(names) - {one.name for one in statement.names if one.asname is None}):
        after = sum(one < name for one in there) if ordered else len(there)
        by_place.setdefault(after, []).append(name)
    return [_insert(source, statement, place, several) for place, several in by_place.items()]


def _insert(source: Source, statement: ast.ImportFrom, place: int, names: list[str]) -> Edit:
    """Before the alias at ``place``, or after the last one; on lines of their own where the others are."""
    aliases = statement.names
    own_lines = len({one.lineno for one in aliases}) == len(aliases) and aliases[0].lineno > statement.lineno
    first = aliases[0]
    line_break = f"{source.newline(first.lineno)}{source.indent(first.lineno)}"
    if place < len(aliases):
        start = source.span(aliases[place])[0]
        between = "," + (line_break if own_lines else " ")
        return Edit(start, start, "".join(f"{name}{between}" for name in names))
    end = source.span(aliases[-1])[1]
    if not own_lines:
        return Edit(end, end, "".join(f", {name}" for name in names))
    last = aliases[-1].end_lineno or aliases[-1].lineno
    line_end = source.next_line(last) - len(source.newline(last))
    if source.text[end:line_end].lstrip().startswith(","):
        return Edit(line_end, line_end, "".join(f"{line_break}{name}," for name in names))
    return Edit(end, end, "".join(f",{line_break}{name}" for name in names))
