"""Reports in Markdown: the support matrix of what was last verified where, and the summary of one run for GitHub.

It must never let a name or a log line become markup, a link, a mention or a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from ..claims.judgement import Verdict
from ..ledger.record import Record
from ..names import labelled
from .flips import tally
from .words import day, label_of, plain

#: GitHub takes so many bytes of a step's summary, and rejects a longer one whole.
SUMMARY_BYTES: Final = 1024 * 1024
#: Room for the note of the cut.
_NOTE: Final = 300
#: Characters of a fact in a row.
_FACT: Final = 300
#: What Markdown gives a meaning anywhere in a line, and what only where a line or a list's item begins.
_MARKUP: Final = re.compile(r"([\\`*_\[\]|~$])")
_BEGINS: Final = re.compile(r"^(\s*)([#+>=-]|\d{1,9}(?=[.)](?:\s|$)))")
#: Bare addresses, which GitHub makes links of.
_LINKS: Final = re.compile(r"(?i)(https?|ftp)://|\bwww\.")
#: Verdicts of which the summary gives the number only.
_COUNTED: Final = (Verdict.HOLDS.value, Verdict.NOT_EVALUATED.value)
#: Components that tell stacks apart at a glance, in this order.
_FIRST: Final = ("sglang", "vllm", "torch", "torch_cuda", "flashinfer-python", "driver")


def text(value: Any, limit: int = _FACT) -> str:
    """A text that shows as it is within a paragraph or a table's cell."""
    said = plain(value, limit).replace("&", "&amp;").replace("<", "&lt;").replace("@", "&#64;")
    said = _LINKS.sub(lambda match: match[0].replace(":", "&#58;").replace(".", "&#46;"), said)
    said = _MARKUP.sub(r"\\\1", said)
    return _BEGINS.sub(lambda match: f"{match[1]}&#{ord(match[2][0])};{match[2][1:]}", said)


def code(value: Any, limit: int = _FACT) -> str:
    """A name in a code span, where it can stand in one."""
    said = plain(value, limit)
    if not said.strip() or any(one in said for one in "`|\\"):
        return text(value, limit)
    return f"`{said}`"


def support_matrix(latest: Sequence[Record], stacks: Sequence[str] = (), link: str | None = None) -> str:
    """Claims × cards × stacks, each cell with the verdict, when it was last verified, and the run that shows it.

    ``latest`` are deciding records, of which the newest of a cell counts; ``stacks`` the columns, by default all that
    occur. ``link`` is where a run's evidence is, with ``{run}`` in it: ``"reports/{run}.html"``.

    :raises ValueError: ``link`` holds no ``{run}``.
    """
    if link is not None and "{run}" not in link:
        raise ValueError(f"the link {link!r} names no run: put {{run}} where the run's id belongs")
    cells: dict[tuple[str, tuple[str, ...]], dict[str, Record]] = {}
    for one in sorted(latest, key=lambda one: one.when):
        cells.setdefault((one.claim, one.cards), {})[one.stack] = one
    columns = list(stacks) or sorted({one.stack for one in latest})
    if not cells:
        return "Nothing was verified yet: the ledger holds no verdict that counts.\n"
    rows = [_row(["claim", "cards", *(text(name, 80) for name in columns)]), _row(["---"] * (len(columns) + 2))]
    for (claim, cards), found in sorted(cells.items()):
        used = text(", ".join(cards), 160) if cards else "–"
        said = [_cell(found[name], link) if name in found else "–" for name in columns]
        rows.append(_row([code(claim), used, *said]))
    legend = [f"- **{text(name, 80)}**: {_stack(name, latest)}" for name in columns]
    return "\n".join([*rows, "", "Stacks as last seen:", "", *legend, ""])


def summary(document: Mapping[str, Any], limit: int = SUMMARY_BYTES) -> str:
    """One run for ``GITHUB_STEP_SUMMARY``, flips first, of at most ``limit`` bytes; what is cut is said."""
    page = _Page(limit - _NOTE)
    counts, flips = document["counts"], document["flips"]
    page.add(f"## gpuguard: {_headline(document)}")
    if document["notice"]:
        page.add(f"\n> **{text(document['notice'])}**")
    run = document["run"]
    when = text(run["started"] or "?") + ("" if run["ended"] else ": **it never came to its end**")
    page.add(f"\n{text(run['rig'], 400)} on {text(run['host'])}, run {code(run['id'])}, {when}\n")
    if flips:
        page.add("\n### What flipped\n")
        page.all(map(_flip, flips))
    if document["differences"]:
        before = document["differences"][0]["before"]["stack"]
        page.add(f"\n### What differs from stack {text(before, 80)}\n")
        page.all(map(_flip, document["differences"]))
    page.add("\n### Verdicts\n")
    page.add(", ".join(f"{number} {text(verdict)}" for verdict, number in counts["verdicts"].items()) or "none")
    page.add("")
    for reason, one in counts["reasons"].items():
        page.add(f"- {one['claims']} not evaluated for {code(reason)}: {text(one['example'])}")
    told = [one for one in document["claims"] if one["verdict"] not in _COUNTED or one["flip"]]
    if told:
        page.table(["verdict", "claim", "stack", "fact"], map(_claim, told), "What did not go as claimed, and flips")
    for kind, lines in document["coverage"].items():
        if lines:
            page.add(f"\n### Claims: {text(kind.replace('_', ' '))}\n")
            page.all(f"- {text(line, 500)}" for line in lines)
    return page.text()


class _Page:
    """Pieces of a page as long as there is room; the rest is counted."""

    def __init__(self, room: int) -> None:
        self._room, self._parts, self._left_out = room, [""], 0

    def add(self, piece: str) -> bool:
        size = len(piece.encode()) + 1
        # Once cut, cut: a later piece that happens to be short would seem to follow what is missing.
        if self._left_out or size > self._room:
            self._left_out += 1
            return False
        self._room -= size
        self._parts.append(piece)
        return True

    def all(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self.add(piece)

    def table(self, head: Sequence[str], rows: Iterable[str], title: str) -> None:
        self.add("\n".join([f"\n### {title}\n", _row(head), _row(["---"] * len(head))]))
        self.all(rows)

    def text(self) -> str:
        if self._left_out:
            note = "the summary is as long as GitHub takes one; all of it is in the JSON and HTML reports"
            self._parts.append(f"\n**Cut here: {self._left_out:,} more pieces. {note[0].upper()}{note[1:]}.**")
        return "\n".join(self._parts[1:]) + "\n"


def _headline(document: Mapping[str, Any]) -> str:
    number, flips = document["counts"]["claims"], document["flips"]
    said = f"{number} claim{'s' if number != 1 else ''}"
    said = f"{said}, {tally(one['sort'] for one in flips)}" if flips else f"{said}, none flipped"
    return labelled(document["label"], said)


def _flip(flip: Mapping[str, Any]) -> str:
    before, now = flip["before"], flip["now"]
    lines = [
        f"- **{text(flip['sort'])}** {code(flip['claim'])} on {text(flip['stack'], 80)}: {text(flip['meaning'])}",
        f"  - was {_said(before)} ({(before['when'] or '?')[:10]}, run {code(before['run'])}, "
        f"stack {text(before['stack'], 80)}), now {_said(now)}",
        f"  - why: {text(now['fact'])}",
    ]
    if held := flip["held"]:
        where = f"run {code(held['run'])}, stack {text(held['stack'], 80)}"
        lines.append(f"  - held last on {(held['when'] or '?')[:10]} ({where}); what changed is counted from there")
    if now["decisive"] and now["decisive"] not in now["fact"]:
        lines.append(f"  - line: {text(now['decisive'])}")
    for one in flip["suspects"][:8]:
        rank = f"suspect {one['rank']}" if flip["ranked"] else "changed"
        reasons = [f"for: {text(said)}" for said in one["for"][:2]] + [
            f"against: {text(said)}" for said in one["against"][:2]
        ]
        because = f" ({'; '.join(reasons)})" if flip["ranked"] and reasons else ""
        lines.append(f"  - {rank}: {text(one['component'])} {_value(one['before'])} → {_value(one['now'])}{because}")
    if len(flip["suspects"]) > 8:
        lines.append(f"  - and {len(flip['suspects']) - 8} more changes")
    return "\n".join(lines)


def _said(side: Mapping[str, Any]) -> str:
    outcome = f", {text(side['outcome'])}" if side["outcome"] not in ("", "none") else ""
    return text(labelled(side["label"], side["verdict"])) + outcome


def _claim(claim: Mapping[str, Any]) -> str:
    hearsay = "hearsay: " if claim["hearsay"] else ""
    flipped = f", flipped: {text(claim['flip'])}" if claim["flip"] else ""
    said = text(labelled(claim["label"], claim["verdict"]))
    return _row([f"{hearsay}{said}{flipped}", code(claim["claim"]), text(claim["stack"], 80), text(claim["fact"])])


def _cell(record: Record, link: str | None) -> str:
    run = code(record.run, 80)
    if link is not None:
        # Angle brackets and blanks are quoted, so a run's id cannot end the address.
        run = f"[{text(record.run, 80)}]({link.replace('{run}', quote(record.run[:200], safe=''))})"
    hearsay = "hearsay: " if record.hearsay else ""
    said = text(labelled(label_of(record.kind), record.verdict))
    outcome = f", {text(record.outcome, 60)}" if record.outcome not in ("ready", "none", "") else ""
    return f"{hearsay}{said}{outcome}<br>{day(record.when)} {run}"


def _stack(name: str, latest: Sequence[Record]) -> str:
    components: dict[str, str | None] = {}
    for one in sorted(latest, key=lambda one: one.when):
        if one.stack == name:
            components.update(one.components)
    known = [f"{one} {text(components[one], 80)}" for one in _FIRST if components.get(one) is not None]
    return ", ".join(known) or "nothing is known of it"


def _value(value: str | None) -> str:
    return "absent" if value is None else text(value, 120)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
