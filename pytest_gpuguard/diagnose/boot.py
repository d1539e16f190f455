"""How far a boot has come: phases per rank, progress bars, ready, and the numbers that each rank prints on the way.

It judges nothing: that a line is healthy or not is decided in ``classify``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from ..claims.observation import MemoryTable
from ..claims.outcome import PHASES
from .lines import Peeled
from .memory import MAX_RANKS, RankStore
from .redact import redact
from .signature import PhaseLine, SignatureSet
from .spellings import LogRule, Spellings

_BAR: Final = re.compile(
    r"(?P<label>[^|%\n]{0,200}?)[ :]{0,3}(?P<percent>\d{1,3})%(?: Completed)? ?\|[^|\n]{0,200}\|? {0,3}"
    r"(?<!\d)(?P<done>\d{1,9})/(?P<total>\d{1,9})\b"
)
_CLIPPED: Final = re.compile(r"max_total_tokens=(\d{1,15}) is larger than the profiled value (-?\d{1,15})")
_FRACTION: Final = re.compile(r"mem[_-]fraction[_-]static['\"]? ?[=:] ?(\d{1,3}(?:\.\d{1,12})?)")
_UTILIZATION: Final = re.compile(r"gpu_memory_utilization['\"]? ?[=:] ?(\d{1,3}(?:\.\d{1,12})?)")
_F_MIN: Final = re.compile(r"minimum viable = 1 - available/pre = (\d\.\d{1,8})")


#: What a bar's label tells about the phase, in every engine.
_BAR_PHASES: Final = (
    (re.compile(r"^(?:Loading|Multi-thread loading)\b.{0,40}(?:shards|weights|safetensors)"), "weights"),
    (re.compile(r"^Captur(?:ing|e)\b|[Cc]udagraph|CUDA [Gg]raph"), "graph_capture"),
)


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
    #: Counts what may have changed something: a rank's phase, a number, a bar.
    moves: int = 0
    #: The furthest phase of any rank; and whether what the log said last is where all ranks are.
    furthest: str = "start"
    one_by_one: bool = True
    #: The phase that the last unfinished bar belonged to.
    shown: str | None = None
    #: The share of the checkpoint that the last bar showed as loaded.
    loaded: float | None = None
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
        if not source and len(self._rank_phase) > ("" in self._rank_phase):
            # Lines that name no rank, where ranks have names: the main process, or a rank's bare traceback.
            return self.phase if self.one_by_one else self.furthest
        return self._rank_phase.get(source, self.phase if self.one_by_one else self.furthest)

    @property
    def in_step(self) -> bool:
        """Whether all ranks are in the boot's own phase."""
        return all(phase == self.phase for phase in self._rank_phase.values())

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
        for line in self.signatures.phases:
            if line.literal in body:
                self._numbers(line, peeled)
                if line.phase is not None:
                    moved = self._enter(line.phase, number, peeled.source)
        if engine != "sglang" and self.signatures.ready and body.startswith(self.signatures.ready):
            moved = self._enter("ready", number, peeled.source)
            self._become_ready(number)
        return moved

    def bar(self, bar: re.Match[str], number: int) -> None:
        """Take a progress bar."""
        label = " ".join(bar["label"].split()).strip(" :")
        self.moves += 1
        phase = next((phase for pattern, phase in _BAR_PHASES if pattern.search(label)), None)
        done, total = int(bar["done"]), int(bar["total"])
        if phase == "weights" and 0 < done <= total:
            self.loaded = done / total
        if phase is not None and (done < total or self.phase == "start"):
            self.shown = phase
            if self.phase in ("start", "args", "init"):
                self._enter(phase, number, "")
        progress = Progress(self.phase, redact(label[:120]), done, total)
        if progress != self.progress:
            self.progress = progress
            self._events.append(Event("progress", self.phase, number, progress=progress))

    def arguments(self, body: str) -> None:
        """Take the fraction from a dump of arguments (a repr; it is searched, never evaluated)."""
        match = _FRACTION.search(body)
        if match is not None and self.store.fraction is None:
            self.store.fraction = float(match[1])
            self.moves += 1
        match = _UTILIZATION.search(body)
        if match is not None and self.store.utilization != float(match[1]):
            self.store.utilization = float(match[1])
            self.moves += 1

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
            self.moves += 1
        return match is not None

    def _numbers(self, line: PhaseLine, peeled: Peeled) -> None:
        for value, pattern in line.take:
            match = pattern.search(peeled.body)
            if match is not None:
                self.store.rank(peeled.source).take(value, float(match[1].replace(",", "")))
                self.moves += 1

    def _rule(self, rule: LogRule, number: int, peeled: Peeled) -> bool:
        if rule.ignore:
            return False
        if rule.take or rule.pool_done:
            rank = self.store.rank(peeled.source)
            for value, amount in self.spellings.numbers_in(rule, peeled.body):
                rank.take(value, amount)
            rank.pool_done = rank.pool_done or rule.pool_done
            self.moves += 1
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
        if phase in ("ready", "serving"):
            self._rank_phase.clear()  # all ranks are
        else:
            if len(self._rank_phase) < MAX_RANKS or source in self._rank_phase:
                self._rank_phase[source] = phase
            self.moves += 1
        self.furthest = max(self.furthest, phase, key=PHASES.index)
        if phase != self.phase:
            self.phase = phase
            self.moves += 1
            self._events.append(Event("phase", phase, number))
        return phase != "args"

    def become_ready(self, number: int) -> None:
        """Be ready after this line, although it does not say so."""
        if not self.ready:
            self._enter("ready", number, "")
            self._become_ready(number)

    def _become_ready(self, number: int) -> None:
        self.ready = True
        self._events.append(Event("ready", self.phase, number))
