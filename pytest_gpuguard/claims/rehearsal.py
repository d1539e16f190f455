"""What a rehearsal may judge: memory and arguments, by rules that exist. All else is NOT_EVALUATED, with the reason.

Pure. It never turns a judgement into a better or a worse one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from .claim import Claim
from .expect import MaxMem
from .judgement import Body, Judgement, Verdict, decisive, ready
from .observation import Observation

#: What such NOT_EVALUATEDs are counted by.
SIMULATED: Final = "simulated"
NO_SPEED: Final = "a simulated rig has no speed"
NO_ANSWERS: Final = "a simulated rig gives no answers worth checking"
NO_PEAKS: Final = "a simulated rig has no peaks of memory"
_REASONS: Final = {"expect_toks": NO_SPEED, "compare": NO_SPEED, "works": NO_ANSWERS}


def as_rehearsed(
    claim: Claim,
    judgements: Sequence[Judgement],
    observations: Sequence[Observation],
    unknown: Sequence[str],
    body: Body,
) -> tuple[Judgement, ...]:
    """The judgements that a simulated rig can stand by.

    ``unknown`` are settings of these boots that the simulation has no rule for: nothing is judged by such a boot.
    """
    reasons = {one.label: _REASONS[one.kind] for one in claim.expectations if one.kind in _REASONS}
    reasons |= {one.label: NO_PEAKS for one in claim.expectations if isinstance(one, MaxMem) and one.of == "peak"}
    found = []
    for judgement in judgements:
        why = None
        open_ = judgement.verdict is Verdict.NOT_EVALUATED
        if judgement.verdict is Verdict.INFRA or open_:
            pass
        elif unknown:
            why = f"a simulated rig has no rule for {', '.join(unknown)}"
        elif judgement.expectation in reasons:
            why = f"{reasons[judgement.expectation]} ({_happened(observations)})"
        elif body.kind == "assertion" and judgement.verdict is Verdict.WORSE and _all_ready(observations):
            why = f"{NO_ANSWERS}: {body.error}"
        if why is None:
            found.append(judgement)
        else:
            found.append(replace(judgement, verdict=Verdict.NOT_EVALUATED, fact=why, details=(), reason=SIMULATED))
    return tuple(found)


def _all_ready(observations: Sequence[Observation]) -> bool:
    return bool(observations) and all(one.ready for one in observations)


def _happened(observations: Sequence[Observation]) -> str:
    """What became of the server, in few words: it is what such a claim can still learn here."""
    if not observations:
        return "nothing was booted"
    last = observations[-1]
    if not last.ready:
        return f"its server: {decisive(last)}"
    tokens = last.memory.kv_tokens
    return f"its server: {ready(last)}" + (f", {tokens} KV tokens" if tokens is not None else "")
