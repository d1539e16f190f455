"""Which of the failures that a log shows is the cause: findings, their order, and the one that decides.

Cause before consequence, whichever rank printed first; of equals, the earliest. A failure that the engine survived
(it went on with its boot) is no finding any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ..claims.outcome import PHASES, UNKNOWN
from .blocks import Block

#: How much each kind of finding says when the engine died of it (see ``signatures.TIERS``; ``unknown`` is an exception
#: that no signature knows, ``probe`` one of a type that is usually caught, ``silent`` an end announced without one).
STRONG: Final = {
    "cause": 60,
    "symptom": 50,
    "unknown": 40,
    "probe": 39,
    "collective": 20,
    "mention": 12,
    "silent": 3,
    "last": 12,
    "consequence": 10,
}
#: The same for an exception that was printed without any sign that it ended the engine.
WEAK: Final = {
    "cause": 35,
    "symptom": 32,
    "collective": 18,
    "unknown": 16,
    "probe": 15,
    "mention": 12,
    "silent": 2,
    "last": 5,
    "consequence": 4,
}

#: Failures that say themselves that another one before them is the cause, which may have been printed as a warning.
SAYS_EARLIER: Final = frozenset({"graph.capture_broken"})

_KEPT: Final = 8
_BOOTING: Final = ("weights", "kv_pool", "graph_capture")
_LATE: Final = ("warmup", "ready", "serving")


def _kind(source: str) -> str:
    """What a process is, without its numbers: ``TP``, ``(Worker_TP pid=)``."""
    return "".join(mark for mark in source if not mark.isdigit())


@dataclass(frozen=True, slots=True)
class Finding:
    """One failure in the log. ``strong``: it ended the engine, or its text can mean nothing else."""

    outcome: str
    tier: str
    strong: bool
    fatal: bool
    line: int
    text: str
    why: str | None
    signature: str | None
    phase: str
    source: str
    cure: str | None = None
    #: The process that printed it is known although its name is "" (the driver among vLLM's workers).
    named: bool = False

    def outlives(self, source: str) -> bool:
        """Whether it still counts after another process of the same kind went on: that one says nothing of this."""
        if self.source == source or self.outcome == "bad.args":
            return False
        return _kind(self.source) == _kind(source) or (self.named and not self.source and "Worker" in source)

    @property
    def final(self) -> bool:
        """Whether no later line takes it back. A refused command line may be another program's, before the engine's."""
        return self.fatal and self.outcome != "bad.args"

    @property
    def weight(self) -> int:
        """How much it says: the heaviest finding decides."""
        return (STRONG if self.strong else WEAK)[self.tier]


@dataclass(slots=True)
class Findings:
    """All findings of one log in constant memory: the earliest of each weight, and the first few after it."""

    by_weight: dict[int, Finding] = field(default_factory=dict)
    hint: Finding | None = None
    #: Why a module of the engine was left out, which then looks like an unsupported model.
    left_out: Finding | None = None
    later: list[Finding] = field(default_factory=list)
    #: The earliest of each weight that is final: what is left when an earlier one of the same weight was survived.
    final: dict[int, Finding] = field(default_factory=dict)
    peers_died: bool = False
    #: Counts what was added; with it one can tell that nothing was.
    revision: int = 0

    @property
    def undecided(self) -> bool:
        """Whether there is a failure that the engine may still survive."""
        return any(not finding.final for finding in self.by_weight.values())

    @property
    def fatal(self) -> bool:
        """Whether the engine does not come back from one of them."""
        return any(finding.fatal for finding in self.by_weight.values())

    def add(self, finding: Finding) -> None:
        """Keep a finding, if it is the first of its weight or among the first consequences."""
        self.revision += 1
        _keep_first(self.by_weight, finding)
        if finding.final:
            _keep_first(self.final, finding)
        if len(self.later) < _KEPT * 2:
            self.later.append(finding)

    def forget_survived(self, source: str) -> None:
        """A process went on with the boot: what it printed before did not end it."""
        if not self.undecided:
            return
        self._keep(lambda one: one.final or one.outlives(source))

    def forget_weak(self, source: str) -> None:
        """A rank goes on printing: what it printed without any sign that it ended the engine did not end it."""
        self._keep(lambda one: one.strong or one.fatal or one.source != source)

    def forget_hint(self, furthest: str) -> None:
        """The boot has come further than what a warning could explain: the GPU and its driver do work."""
        if self.hint is not None:
            over = max(PHASES.index(self.hint.phase) + 1, PHASES.index("kv_pool"))
            self.hint = self.hint if PHASES.index(furthest) < over else None

    def _keep(self, wanted: Callable[[Finding], bool]) -> None:
        known = (*self.by_weight.values(), *self.final.values(), *self.later)
        kept = sorted(filter(wanted, known), key=lambda one: one.line)
        self.by_weight = {}
        for one in kept:
            _keep_first(self.by_weight, one)
        self.later = [one for one in self.later if one in kept]

    def decisive(self) -> Finding | None:
        """The finding that decides, or None. A lone SIGKILL counts only when nobody printed an exception."""
        known = sorted(self.by_weight.values(), key=lambda finding: -finding.weight)
        for finding in known:
            if finding.tier == "last" and self.peers_died:
                continue
            if finding.tier in ("unknown", "probe", "silent", "consequence") and self.hint is not None:
                return self.hint
            if finding.outcome == UNKNOWN and finding.tier == "cause":
                # A full GPU whose phase the line does not tell: another line may.
                placed = [one for one in known if one.outcome.startswith("oom.") and one.signature != finding.signature]
                return placed[0] if placed else finding
            if finding.signature in SAYS_EARLIER:
                earlier = [one for one in known if one.tier == "cause" and one.line < finding.line]
                return min(earlier, key=lambda one: one.line) if earlier else finding
            if self.left_out is not None and finding.outcome == "unsupported.model":
                return self.left_out
            return finding
        # Only a SIGKILL, and yet a rank printed an exception: someone died, nobody says why.
        return known[0] if known else None

    def consequences(self, decisive: Finding) -> tuple[str, ...]:
        """The texts of what followed from the decisive finding, a few of them, in the order of the log."""
        others = [f for f in self.later if f.line != decisive.line and f.weight <= decisive.weight]
        texts = (f"{f.source}: {f.text[:300]}" if f.source else f.text[:300] for f in others)
        return tuple(dict.fromkeys(texts))[:_KEPT]


def _keep_first(by_weight: dict[int, Finding], finding: Finding) -> None:
    known = by_weight.get(finding.weight)
    # A full GPU whose phase its line does not tell gives way to one that tells it.
    if known is None or (known.outcome == UNKNOWN and known.tier == "cause" and finding.outcome[:4] == "oom."):
        by_weight[finding.weight] = finding


Patterns: TypeAlias = "tuple[tuple[str, re.Pattern[str]], ...]"


def told(patterns: Patterns, text: str) -> str | None:
    """The phase that the first matching pattern tells, or None."""
    return next((name for name, pattern in patterns if pattern.search(text)), None)


def memory_outcome(
    frames: Patterns, words: Patterns, text: str, block: Block | None, phase: str, late: bool
) -> tuple[str, str]:
    """``oom.<phase>`` of a full GPU, and the phase: by the wrapper, the frames, the words, then where the rank was.

    ``frames`` and ``words`` are what a stack frame, or the failure's own text, tell about the phase; ``late``: the
    server was ready. Before the weights a full GPU proves nothing about the model (another process may hold it):
    unknown.
    """
    if late:
        return "oom.runtime", "serving"
    phase = block.phase if block is not None else phase
    if block is not None and block.wrapper_phase is not None:
        phase = block.wrapper_phase
    else:
        said = told(frames, block.frames_text()) if block is not None else None
        said = said or told(frames, text) or (told(words, text) if phase not in _BOOTING else None)
        if said == "execution":
            return "oom.runtime", "serving"
        if said == "forward":
            said = None if phase in ("weights", "graph_capture") else "warmup"
        if said is not None and not (said == "serving" and phase in _BOOTING):
            phase = said
        elif phase == "kv_pool" and block is not None and block.pool_done:
            phase = "warmup"
    if phase in _BOOTING:
        return f"oom.{phase}", phase
    return ("oom.runtime", phase) if phase in _LATE else (UNKNOWN, phase)
