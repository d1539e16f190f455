"""A claim's verdict as plain JSON data, which travels on pytest's report through xdist. The keys are stable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..claims.claim import Claim
from ..claims.needs import Needs
from ..claims.observation import Observation
from ..claims.verdict import Judgement, Verdict, worst

#: The attribute of a TestReport that carries the payload.
REPORT_KEY: Final = "gpuguard"


def lost_payload(nodeid: str, why: str) -> dict[str, Any]:
    """The payload of a claim whose verdict never arrived."""
    judgement = Judgement("claim", Verdict.INFRA, "infra.lost", why)
    return payload(nodeid, Claim(Needs(), None, ()), "", [judgement], [])


def payload(
    nodeid: str, claim: Claim, stack: str, judgements: Sequence[Judgement], observations: Sequence[Observation]
) -> dict[str, Any]:
    """Verdict, outcome, decisive fact and evidence of one claim."""
    decides = worst(judgements)
    last = observations[-1] if observations else None
    return {
        "nodeid": nodeid,
        "claim": claim.about.id or nodeid,
        "title": claim.about.title,
        "stack": stack,
        "hearsay": claim.about.hearsay,
        "verdict": decides.verdict.value,
        "outcome": decides.outcome,
        "expectation": decides.expectation,
        "fact": decides.fact,
        "reason": decides.reason,
        "judgements": [
            {
                "expectation": one.expectation,
                "verdict": one.verdict.value,
                "outcome": one.outcome,
                "fact": one.fact,
                "reason": one.reason,
            }
            for one in judgements
        ],
        "phase": last.phase if last else None,
        "engine": last.engine if last else None,
        "engine_version": last.engine_version if last else None,
        "decisive": (
            {"line": last.decisive.line, "text": last.decisive.text} if last is not None and last.decisive else None
        ),
        "memory": last.memory.as_dict() if last else None,
        "remedies": list(last.remedies) if last else [],
        "resolved": last.resolved.as_dict() if last else None,
        "samples": {name: list(values) for name, values in last.samples.items()} if last else {},
        "elapsed_s": round(last.elapsed_s, 2) if last is not None and last.elapsed_s is not None else None,
        "log": last.log if last else None,
        "argv": list(last.argv) if last else [],
        "gpus": list(last.gpus) if last else [],
    }
