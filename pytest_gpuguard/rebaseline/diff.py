"""Proposals as one unified diff, as ``git diff`` prints it. It must never touch a file, and reads none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from .imports import import_edits
from .source import Source, parse
from .values import Edit, Proposal, applied


def patch(proposals: Sequence[Proposal]) -> str:
    """One patch for all of them, for ``git apply`` or ``patch -p1`` in the root folder; empty for none."""
    return "".join(difference(source.file, source.text, text) for source, text in edited(proposals))


def edited(proposals: Iterable[Proposal]) -> list[tuple[Source, str]]:
    """Each file, and what it should read: all its edits, with the imports that they need. Raises Refusal."""
    files: dict[str, list[Proposal]] = {}
    for one in proposals:
        files.setdefault(one.file, []).append(one)
    found = []
    for file, several in sorted(files.items()):
        source = several[0].source
        edits: list[Edit] = [edit for one in several for edit in one.edits]
        edits += import_edits(source, {name for one in several for name in one.imports})
        text = applied(source.text, edits)
        parse(file, text)
        found.append((source, text))
    return found


def difference(file: str, before: str, after: str) -> str:
    """What ``git diff`` would print of one file."""
    if before == after:
        return ""
    old, new = (_lines(text) for text in (before, after))
    names = [_quoted(f"{side}/{file}") for side in "ab"]
    tab = "\t" if " " in file else ""  # how git marks where a name with blanks ends
    head = f"diff --git {names[0]} {names[1]}\n"
    body = difflib.unified_diff(old, new, names[0] + tab, names[1] + tab)
    return head + "".join(one if one.endswith("\n") else f"{one}\n\\ No newline at end of file\n" for one in body)


def _lines(text: str) -> list[str]:
    """Lines end with a line feed, and with nothing else that Unicode calls a line's end."""
    lines = [f"{one}\n" for one in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _quoted(name: str) -> str:
    """A file's name as git writes it: in quotes, bytes in octal, where it has unusual ones."""
    if all(" " <= one <= "~" and one not in '"\\' for one in name):
        return name
    known = {
        **dict(zip(range(7, 14), ("\\a", "\\b", "\\t", "\\n", "\\v", "\\f", "\\r"), strict=True)),
        34: '\\"',
        92: "\\\\",
    }
    octal = [
        known.get(one) or (chr(one) if 32 <= one < 127 else f"\\{one:03o}")
        for one in name.encode("utf-8", "surrogateescape")
    ]
    return f'"{"".join(octal)}"'
