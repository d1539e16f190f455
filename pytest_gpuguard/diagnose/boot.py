"""How far a boot has come: phases per rank, progress bars, ready, and the numbers that each rank prints on the way.

It judges nothing: that a line is healthy or not is decided in ``classify``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from ..claims.observation import MemoryTable
from .lines import Peeled
from .memory import MAX_RANKS, RankStore
from .redact import redact
from .signatures import SignatureSet
from .spellings import LogRule, Spellings

_BAR: Final = re.compile(
    r"(?P<label>[^|%\n]{0,200}?)[ :]{0,3}(?P<percent>\d{1,3})%(?: Completed)? ?\|[^|\n]{0,200}\|? {0,3}"
    r"(?P<done>\d{1,9})/(?P<total>\d{1,9})\b"
)
_CLIPPED: Final = re.compile(r"max_total_tokens=(\d{1,15}) is larger than the profiled value (-?\d{1,15})")
_FRACTION: Final = re.compile(r"mem[_-]fraction[_-]static['\"]? ?[=:] ?(\d{1,3}(?:\.\d{1,12})?)")
_F_MIN: Final = re.compile(r"minimum viable = 1 - available/pre = (\d\.\d{1,8})")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the boot is: its phase, and how much of something countable (checkpoint shards, captured batch sizes).

    ``label`` is the bar's own text; without a bar in this phase it is "" and the counts are None.
    """

    phase: str
    label: str = ""
    done: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a watcher waits for: ``kind`` is phase, progress, ready or fatal."""

    kind: str
    phase: str
    line: int
    text: str = ""
    progress: Progress | None = None


def match_bar(text: str) -> re.Match[str] | None:
    """A tqdm bar at the start of the text, if it is one."""
    return _BAR.match(text) if "%" in text[:220] else None


@dataclass(slots=True)
class Boot:
    """The state of one boot. ``clipped``: (tokens asked for, tokens granted)."""

    signatures: SignatureSet
    spellings: Spellings
    phase: str = "start"
    ready: bool = False
    progress: Progress | None = None
    clipped: tuple[int, int] | None = None
    store: RankStore = field(default_factory=RankStore)
    _rank_phase: dict[str, str] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)

    def drain(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def announce(self, event: Event) -> None:
        """Add an event of someone else's."""
        self._events.append(event)

    def phase_of(self, source: str) -> str:
        """The phase that a rank is in; the boot's own for a source that printed no phase."""
        return self._rank_phase.get(source, self.phase)

    def memory(self) -> MemoryTable:
        """The memory table of the fullest rank so far."""
        return self.store.table()

    def line(self, number: int, peeled: Peeled, engine: str | None) -> bool:
        """Take a healthy-looking line; True when it shows that the boot has gone on."""
        body = peeled.body
        rule = self.spellings.rule_for(body)
        if rule is not None:
            return self._rule(rule, number, peeled)
        moved = False
        for literal, phase in self.signatures.phases:
            if literal in body:
                moved = self._enter(phase, number, peeled.source)
        if engine != "sglang" and self.signatures.ready and body.startswith(self.signatures.ready):
            moved = self._enter("ready", number, peeled.source)
            self._become_ready(number)
        return moved

    def bar(self, bar: re.Match[str], number: int) -> None:
        """Take a progress bar."""
        label = " ".join(bar["label"].split()).strip(" :")
        progress = Progress(self.phase, redact(label[:120]), int(bar["done"]), int(bar["total"]))
        if progress != self.progress:
            self.progress = progress
            self._events.append(Event("progress", self.phase, number, progress=progress))

    def arguments(self, body: str) -> None:
        """Take the fraction from a dump of arguments (a repr; it is searched, never evaluated)."""
        match = _FRACTION.search(body)
        if match is not None and self.store.fraction is None:
            self.store.fraction = float(match[1])

    def error_numbers(self, text: str) -> None:
        """Take what the error text of a full KV pool says: the fraction, and the least that would do."""
        self.arguments(text)
        match = _F_MIN.search(text)
        if match is not None:
            self.store.f_min = float(match[1])

    def clip(self, body: str) -> bool:
        """Take the warning that fewer tokens are granted than were asked for; True when the line is one."""
        match = _CLIPPED.search(body) if "profiled value" in body else None
        if match is not None:
            self.clipped = (int(match[1]), int(match[2]))
        return match is not None

    def _rule(self, rule: LogRule, number: int, peeled: Peeled) -> bool:
        if rule.ignore:
            return False
        rank = self.store.rank(peeled.source)
        for value, amount in self.spellings.numbers_in(rule, peeled.body):
            rank.take(value, amount)
        rank.pool_done = rank.pool_done or rule.pool_done
        moved = self._enter(rule.phase, number, peeled.source) if rule.phase is not None else False
        if rule.ready:
            self._become_ready(number)
        return moved

    def _enter(self, phase: str, number: int, source: str) -> bool:
        if phase == "serving" and not self.ready:
            # The warm-up request runs before the ready line; a log that begins in the middle is already serving.
            phase = "serving" if self.phase in ("start", "serving") else "warmup"
        elif self.ready and phase == "warmup":
            return False
        if len(self._rank_phase) < MAX_RANKS or source in self._rank_phase:
            self._rank_phase[source] = phase
        if phase != self.phase:
            self.phase = phase
            self._events.append(Event("phase", phase, number))
        return phase != "args"

    def _become_ready(self, number: int) -> None:
        self.ready = True
        self._events.append(Event("ready", self.phase, number))
