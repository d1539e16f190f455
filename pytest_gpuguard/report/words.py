"""Words and numbers of others made fit for a report: one line, cut, without secrets and without what acts on a screen.

It must never pass a control character, an escape sequence, a direction override or half a surrogate pair on.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from ..claims.account import printable
from ..diagnose.redact import redact
from ..ledger.flips import Change
from ..ledger.record import Kind
from ..names import REHEARSED

#: Characters of one text in a report. Longer ones are cut, which is said.
LONGEST: Final = 2000
#: So much more is looked at for secrets, so that a cut does not hide one's end from the search and show its beginning.
_BEYOND: Final = 600
#: Characters of a text that is worth keeping in mind.
_OFTEN: Final = 200
#: How a cut is noted, and the most characters that this takes.
_CUT: Final = re.compile(r"… \(cut: ([\d,]{1,20}) characters\)$")
_NOTE: Final = 48
#: Escape sequences of a terminal: CSI, OSC (titles, links) and the two-character ones.
_ESCAPES: Final = re.compile(
    r"\x1b\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)"
    r"|(?:(?:\x1b|#033)\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|\x1b[@-_=>]"
)

#: What results are labelled that verify nothing, wherever they appear.
LABELS: Final[Mapping[str, str]] = {"rehearsed": REHEARSED, "replayed": "REPLAYED"}


def label_of(kind: Kind | str) -> str | None:
    """``REHEARSED``, ``REPLAYED``, or None for what was verified."""
    return LABELS.get(kind)


def plain(text: Any, limit: int = LONGEST) -> str:
    """One line of at most ``limit`` characters and a note of the cut; what cannot be printed is spelled out."""
    whole = text if isinstance(text, str) else str(text)
    return _again(whole, limit) if len(whole) <= _OFTEN else _plain(whole, limit)


def _plain(whole: str, limit: int) -> str:
    near = whole[: limit + _BEYOND]
    if not near.isprintable():
        near = printable(_ESCAPES.sub("", near))
    near = redact(near)
    # What was cut before, at the same length, is not cut again; at a shorter one, the note tells of the whole.
    before = _CUT.search(whole[-_NOTE:])
    if len(whole) <= limit + _BEYOND and len(near) <= limit + (len(before[0]) if before else 0):
        return near
    return f"{near[:limit]}… (cut: {before[1] if before else f'{len(whole):,}'} characters)"


#: Names, verdicts and versions stand in a report thousands of times.
_again = lru_cache(maxsize=16384)(_plain)


def optional(text: Any, limit: int = LONGEST) -> str | None:
    """``plain``, or None of None."""
    return None if text is None else plain(text, limit)


def number(value: Any) -> float | None:
    """A finite number, or None of anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def stamp(seconds: float | None) -> str | None:
    """``2026-01-30T13:04:55Z`` of epoch seconds; None of None, and of what is no time of this era."""
    value = number(seconds)
    if value is None or not 0 <= value < 253402300800:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))


def day(seconds: float | None) -> str:
    """``2026-01-30`` (UTC) of epoch seconds, or ``?``."""
    said = stamp(seconds)
    return said[:10] if said else "?"


def value_of(value: str | None) -> str:
    """A component's value for a person; None is known to be absent."""
    return "absent" if value is None else plain(value, 120)


def change_line(change: Change) -> str:
    """``driver 570.86 -> 580.65``."""
    return f"{plain(change.component, 80)} {value_of(change.before)} -> {value_of(change.now)}"
