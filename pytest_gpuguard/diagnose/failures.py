"""What in one boot's log is a failure, in which phase it happened, and whether the engine died of it.

It is given lines and exceptions by the classifier; what decides among the failures is up to ``findings``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from ..claims.outcome import UNKNOWN
from .blocks import Block, Spoken
from .boot import Boot, Event
from .findings import STRONG, Finding, Findings, memory_outcome, told
from .lines import Peeled
from .redact import redact
from .signature import BY_PHASE, Signature, SignatureSet

_MAJORS: Final = re.compile(r"major versions \[[\d, ]{0,80}\]")
#: A long text of fewer different characters says nothing.
_FEW_MARKS: Final = 8
_TEXT_LIMIT: Final = 4000
_EARLY: Final = ("start", "args", "init")
#: Phases whose full GPU has a name of its own; every later one is the run time.
OOM_OF: Final = {name: f"oom.{name}" for name in ("weights", "kv_pool", "graph_capture")}


def matching(text: str, frames: str, groups: tuple[tuple[Signature, ...], ...]) -> Signature | None:
    """The signature of the best tier that the text is, the first of equals."""
    best: Signature | None = None
    if len(text) > _TEXT_LIMIT and len(set(text)) < _FEW_MARKS:
        return None
    for group in groups:
        for signature in group:
            if best is not None and STRONG[signature.tier] <= STRONG[best.tier]:
                continue
            if signature.matches(text, frames):
                best = signature
                if best.tier == "cause":
                    return best
    return best


class Failures:
    """The failures of one boot. ``fatal``: the engine does not come back; ``stopping``: it was asked to end."""

    def __init__(self, signatures: SignatureSet, boot: Boot, majors: Collection[int], revision: int = 0) -> None:
        """``majors``: the compute capabilities' majors of the GPUs. ``revision``: where the findings' count begins."""
        self.findings = Findings(revision=revision)
        self.fatal = self.stopping = False
        self._signatures = signatures
        self._boot = boot
        self._majors = frozenset(majors)
        #: The phase that a traceback tells which is not the decisive one's.
        self._elsewhere: str | None = None

    def note_phase(self, frames: str) -> None:
        """Keep what a traceback's frames tell of the phase: it may not be the one that decides."""
        phase = told(self._signatures.frames, frames) if self._elsewhere != "execution" else None
        if phase is not None and phase != "forward":
            self._elsewhere = phase

    def placed(self, finding: Finding) -> Finding:
        """A full GPU whose phase its own lines do not tell: a bar, or another rank's traceback, may."""
        if finding.tier != "cause" or not (finding.outcome == UNKNOWN or finding.outcome[:4] == "oom."):
            return finding
        phase = "serving" if self._elsewhere == "execution" else None
        if finding.outcome == UNKNOWN and finding.phase in _EARLY:
            phase = phase or self._boot.shown or self._elsewhere
        if phase is None:
            return finding
        return replace(finding, outcome=OOM_OF.get(phase, "oom.runtime"), phase=phase)

    def said(
        self, outcome: str, tier: str, number: int, text: str, why: str, signature: str | None, peeled: Peeled
    ) -> Finding:
        """What a line says that is no failure by itself; it is not kept."""
        phase = "serving" if self._boot.ready else self._boot.phase_of(peeled.source)
        return Finding(outcome, tier, False, False, number, text, why, signature, phase, peeled.source)

    def found(
        self,
        signature: Signature,
        spoken: Spoken,
        block: Block | None,
        source: str = "",
        strong: bool | None = None,
        place: str = "",
        tier: str | None = None,
    ) -> None:
        """Keep a failure that a signature knows: said by a traceback (``block``), or on a line of ``source``."""
        outcome, phase = signature.outcome, signature.phase
        if signature.id == "arch.no_supported_majors":
            listed = _MAJORS.search(spoken.text)
            if listed is not None and self._majors & {int(number) for number in re.findall(r"\d{1,3}", listed[0])}:
                outcome = "jit.compile"  # the kernel has a target for this GPU: it is nvcc that has none
        if outcome == BY_PHASE:
            late = self._boot.ready or self._boot.phase == "serving"
            where = self._boot.phase_of(source)
            text = spoken.text[:_TEXT_LIMIT]
            text = f"{place} {text}" if place else text
            outcome, phase = memory_outcome(self._signatures.frames, self._signatures.told, text, block, where, late)
        if strong is None:
            strong = block is None or block.died or signature.fatal
        died = block is not None and block.died
        self.add(
            outcome,
            tier or signature.tier,
            spoken,
            block,
            signature.why,
            signature.id,
            phase or (block.wrapper_phase if block is not None else None),
            block.source if block is not None else source,
            fatal=signature.fatal or died,
            strong=strong or signature.fatal,
            cure=signature.cure,
            named=bool(block.place if block is not None else place),
        )

    def add(
        self,
        outcome: str,
        tier: str,
        spoken: Spoken,
        block: Block | None,
        why: str | None,
        signature: str | None,
        phase: str | None,
        source: str,
        *,
        fatal: bool,
        strong: bool | None = None,
        cure: str | None = None,
        named: bool = False,
    ) -> None:
        """Keep a failure, and announce it when it changes what the engine died of."""
        if self.stopping:
            return
        if self._boot.ready and not fatal:
            return
        phase = phase or (block.phase if block is not None else self._boot.phase_of(source))
        if self._boot.ready:
            phase = "serving"
        text = spoken.text[:_TEXT_LIMIT]
        strong = fatal if strong is None else strong
        before = self.findings.decisive() if self.fatal else None
        finding = Finding(outcome, tier, strong, fatal, spoken.line, text, why, signature, phase, source, cure, named)
        self.findings.add(finding)
        self.fatal = self.fatal or fatal
        after = self.findings.decisive()
        if self.fatal and after is not None and after != before:
            self._boot.announce(Event("fatal", after.phase, after.line, redact(after.text)))
