"""Which of the failures that a log shows is the cause: findings, their order, and the one that decides.

Cause before consequence, whichever rank printed first; of equals, the earliest. A failure that the engine survived
(it went on with its boot) is no finding any more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from ..claims.outcome import UNKNOWN
from .blocks import Block

#: How much each kind of finding says when the engine died of it (see ``signatures.TIERS``; ``unknown`` is an exception
#: that no signature knows, ``probe`` one of a type that is usually caught).
STRONG: Final = {
    "cause": 60,
    "symptom": 50,
    "unknown": 40,
    "probe": 39,
    "collective": 20,
    "last": 12,
    "consequence": 10,
}
#: The same for an exception that was printed without any sign that it ended the engine.
WEAK: Final = {"cause": 35, "symptom": 32, "unknown": 15, "probe": 14, "collective": 18, "last": 5, "consequence": 4}

_KEPT: Final = 8
_BOOTING: Final = ("weights", "kv_pool", "graph_capture")
_LATE: Final = ("warmup", "ready", "serving")


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

    @property
    def weight(self) -> int:
        """How much it says: the heaviest finding decides."""
        return (STRONG if self.strong else WEAK)[self.tier]


@dataclass(slots=True)
class Findings:
    """All findings of one log in constant memory: the earliest of each weight, and the first few after it."""

    by_weight: dict[int, Finding] = field(default_factory=dict)
    hint: Finding | None = None
    later: list[Finding] = field(default_factory=list)
    peers_died: bool = False

    def add(self, finding: Finding) -> None:
        """Keep a finding, if it is the first of its weight or among the first consequences."""
        if finding.weight not in self.by_weight:
            self.by_weight[finding.weight] = finding
        if len(self.later) < _KEPT * 2:
            self.later.append(finding)

    def forget_survived(self) -> None:
        """The boot went on: what was printed before did not end it."""
        self.by_weight = {weight: finding for weight, finding in self.by_weight.items() if finding.fatal}
        self.later = [finding for finding in self.later if finding.fatal]

    def decisive(self) -> Finding | None:
        """The finding that decides, or None. A lone SIGKILL counts only when nobody printed an exception."""
        known = sorted(self.by_weight.values(), key=lambda finding: -finding.weight)
        for finding in known:
            if finding.tier == "last" and self.peers_died:
                continue
            if finding.tier in ("unknown", "probe", "consequence") and self.hint is not None:
                return self.hint
            return finding
        # Only a SIGKILL, and yet a rank printed an exception: someone died, nobody says why.
        return known[0] if known else None

    def consequences(self, decisive: Finding) -> tuple[str, ...]:
        """The texts of what followed from the decisive finding, a few of them, in the order of the log."""
        others = [f for f in self.later if f.line != decisive.line and f.weight <= decisive.weight]
        texts = (f"{f.source}: {f.text[:300]}" if f.source else f.text[:300] for f in others)
        return tuple(dict.fromkeys(texts))[:_KEPT]


def memory_outcome(
    frames: tuple[tuple[str, re.Pattern[str]], ...], block: Block | None, phase: str, late: bool
) -> tuple[str, str]:
    """``oom.<phase>`` of a full GPU, and the phase: by the wrapper, the stack frames, then where the rank was.

    ``frames`` is what a stack frame tells about the phase; ``late``: the server was ready. Before the weights a full
    GPU proves nothing about the model (another process may hold it): unknown.
    """
    if late:
        return "oom.runtime", "serving"
    phase = block.phase if block is not None else phase
    if block is not None and block.wrapper_phase is not None:
        phase = block.wrapper_phase
    elif block is not None:
        text = block.frames_text()
        told = next((name for name, pattern in frames if pattern.search(text)), None)
        if told is not None and not (told == "serving" and phase in _BOOTING):
            phase = told
        elif phase == "kv_pool" and block.pool_done:
            phase = "warmup"
    if phase in _BOOTING:
        return f"oom.{phase}", phase
    return ("oom.runtime", phase) if phase in _LATE else (UNKNOWN, phase)
