"""Flips as plain lines: what a claim was, what it is, why, and what changed in between, the worst first.

It must never show what a terminal acts on, nor an order of suspects that the ledger's history does not support.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from ..ledger.flips import SORTS, Flip, Suspect
from ..ledger.record import Record
from ..names import labelled
from .words import change_line, day, label_of, plain

#: What each means to the reader.
MEANING: Final = {
    "worse": "got worse",
    "changed": "fails for another reason",
    "better": "got better: is the workaround still needed?",
    "flaky": "flaky: fresh boots disagreed",
    "recovered": "is as claimed again",
}
#: Changes that are told of one flip.
MOST: Final = 8
#: Lines that one text may take, and the least columns that are used.
_LINES: Final = 3
_LEAST: Final = 40


def ordered(flips: Iterable[Flip]) -> list[Flip]:
    """The worst first; of one sort those with the fewest changes, then by claim and stack."""
    return sorted(flips, key=lambda one: (SORTS.index(one.sort), len(one.suspects), one.now.claim, one.now.stack))


def suspects_of(flip: Flip) -> list[Suspect]:
    """By rank where history separates them; else, and within a rank, the shortest first."""

    def key(one: Suspect) -> tuple[int, int, str]:
        line = change_line(one.change)
        return (one.rank if flip.ranked else 0, len(line), line)

    return sorted(flip.suspects, key=key)


def why(record: Record) -> str:
    """The fact, and the decisive line of the log where the fact does not hold it already."""
    fact = plain(record.fact)
    line = decisive(record)
    return fact if line is None or line in fact else f"{fact} | {line}"


def decisive(record: Record) -> str | None:
    """The line of the log that decided, without its surroundings; None where none did or no evidence was asked for."""
    found = record.evidence.get("decisive")
    text = found.get("text") if isinstance(found, dict) else None
    return plain(text.strip()) if isinstance(text, str) and text.strip() else None


def spoken(record: Record) -> str:
    """``REHEARSED CONTRADICTED (worse), oom.weights``."""
    said = plain(record.verdict, 60)
    if record.outcome not in ("", "none"):
        said += f", {plain(record.outcome, 60)}"
    return labelled(label_of(record.kind), said)


def tally(sorts: Iterable[str]) -> str:
    """``2 worse, 1 recovered``."""
    counted = Counter(sorts)
    return ", ".join(f"{counted[sort]} {sort}" for sort in SORTS if counted[sort])


def lines(flips: Sequence[Flip], width: int = 80) -> list[str]:
    """Every flip in a few lines of at most ``width`` columns (40 at least); none of no flips."""
    if not flips:
        return []
    width = max(width, _LEAST)
    claims = len({(one.now.claim, one.now.stack) for one in flips})
    said = f"{claims} claim{'s' if claims != 1 else ''} flipped: {tally(one.sort for one in flips)}"
    found = [labelled(label_of(flips[0].now.kind), said)]
    for flip in ordered(flips):
        found += _flip(flip, width)
    return found


def _flip(flip: Flip, width: int) -> list[str]:
    before, now = flip.before, flip.now
    name = plain(now.claim, 300) + (f" [{plain(now.stack, 60)}]" if now.stack else "")
    found = _wrapped(f"{flip.sort.upper()} ", f"{name} {MEANING[flip.sort]}", width)
    found += _wrapped("    was ", f"{spoken(before)} ({day(before.when)}, run {plain(before.run, 60)})", width)
    if flip.held is not None:
        found += _wrapped("    held ", f"last on {day(flip.held.when)}, run {plain(flip.held.run, 60)}", width)
    found += _wrapped("    now ", f"{spoken(now)}: {plain(now.expectation, 200)}", width)
    if now.fact or decisive(now):
        found += _wrapped("    why ", why(now), width)
    return found + _changed(flip, width)


def _changed(flip: Flip, width: int) -> list[str]:
    suspects = suspects_of(flip)
    if not suspects:
        return [f"    changed{' since it held' if flip.held is not None else ''}: nothing that is known"]
    how = ", ranked by this ledger's history" if flip.ranked else ""
    since = " since it held" if flip.held is not None else ""
    found = _wrapped("    ", f"changed{since} ({len(suspects)}{how}):", width)
    for one in suspects[:MOST]:
        head = f"      {one.rank}. " if flip.ranked else "      - "
        found += _wrapped(head, change_line(one.change), width)
        if flip.ranked:
            for said, reasons in (("for", one.pro), ("against", one.contra)):
                for reason in reasons[:3]:
                    found += _wrapped(f"         {said}: ", plain(reason, 300), width)
    if len(suspects) > MOST:
        found.append(f"      … and {len(suspects) - MOST} more")
    return found


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * min(len(head), 12),
        max_lines=_LINES,
        placeholder=" …",
        break_on_hyphens=False,
    )
