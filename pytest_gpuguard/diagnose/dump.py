"""Read fields out of a printed object, ``ServerArgs(tp_size=1, …)`` or ``{'tp_size': 1, …}``, without evaluating it.

Linear in the text, which is cut at a limit; a field that the cut goes through is left out. Nothing is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

#: No more of a dump is read than this.
DUMP_LIMIT: Final = 64 * 1024

_MARKS: Final = re.compile(r"[\\'\"(){}\[\],]")
_FIELD: Final = re.compile(r"\s{0,8}['\"]?(\w{1,80})['\"]? {0,2}[=:] {0,2}")
_ENUM: Final = re.compile(r"<[\w.]{1,80}: ['\"]?([\w.-]{1,80})['\"]?>")


def fields(text: str, wanted: Collection[str]) -> dict[str, str]:
    """The fields of the outermost object, as printed; ``text`` begins with it, or with its first field.

    Of a field that is printed twice the first counts.
    """
    text = text[:DUMP_LIMIT]
    opens = re.match(r"\s{0,8}[\w.]{0,80}[({]", text)
    start = opens.end() if opens is not None else 0
    found: dict[str, str] = {}
    for item in _items(text, start):
        match = _FIELD.match(item)
        if match is not None and match[1] in wanted:
            found.setdefault(match[1], item[match.end() :].strip())
    return found


def look_up(found: dict[str, str], key: str) -> str | None:
    """A field by its key, whose dots go into nested objects; a scalar without its quotes, None when it is not there."""
    head, _, rest = key.partition(".")
    value = found.get(head)
    if value is None or not rest:
        return scalar(value) if value is not None else None
    return look_up(fields(value, {rest.partition(".")[0]}), rest)


def scalar(value: str) -> str:
    """``'fa3'`` → ``fa3``, ``<Backend.FULL: 'full'>`` → ``full``."""
    match = _ENUM.fullmatch(value)
    if match is not None:
        return match[1]
    quoted = len(value) >= 2 and value[0] in "'\"" and value[-1] == value[0]
    return value[1:-1] if quoted else value


def _items(text: str, start: int) -> list[str]:
    items: list[str] = []
    depth, quote, escaped = 0, "", -1
    for match in _MARKS.finditer(text, start):
        mark, at = match[0], match.start()
        if quote:
            if mark == "\\" and at != escaped:
                escaped = at + 1
            elif mark == quote and at != escaped:
                quote = ""
        elif mark in "'\"":
            quote = mark
        elif mark in "({[":
            depth += 1
        elif mark in ")}]":
            depth -= 1
            if depth < 0:
                items.append(text[start:at])
                return items
        elif mark == "," and not depth:
            items.append(text[start:at])
            start = at + 1
    return items
