"""A claim's verdict as plain JSON data, which travels on pytest's report through xdist. The keys are stable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..claims.claim import Claim
from ..claims.needs import Needs
from ..claims.observation import Observation
from ..claims.verdict import Judgement, Verdict, worst
from ..names import labelled as labelled

#: The attribute of a TestReport that carries the payload.
REPORT_KEY: Final = "gpuguard"


def spoken(data: Mapping[str, Any]) -> str:
    """A payload's verdict with its label: a rehearsal never looks like a verification."""
    return labelled(data.get("label"), str(data["verdict"]))


def lost_payload(nodeid: str, why: str, label: str | None = None) -> dict[str, Any]:
    """The payload of a claim whose verdict never arrived."""
    judgement = Judgement("claim", Verdict.INFRA, "infra.lost", why)
    return payload(nodeid, Claim(Needs(), None, ()), "", [judgement], [], label=label)


def payload(
    nodeid: str,
    claim: Claim,
    stack: str,
    judgements: Sequence[Judgement],
    observations: Sequence[Observation],
    translated: Sequence[str] = (),
    label: str | None = None,
    prediction: Mapping[str, Any] | None = None,
    parts: Mapping[str, str | None] | None = None,
    seconds: Mapping[str, float | None] | None = None,
    key: str | None = None,
    components: Mapping[str, str | None] | None = None,
    cards: Sequence[str] = (),
    confirmed: Mapping[str, Any] | None = None,
    line: int | None = None,
) -> dict[str, Any]:
    """Verdict, outcome, decisive fact and evidence of one claim; ``translated`` is what a portable claim exchanged.

    ``label`` is REHEARSED on a simulated rig; ``prediction`` stands beside what a boot on real GPUs measured. ``parts``
    are those of the stack that matter to the verdict, ``components`` all of them, ``seconds`` what its boots and the
    rest took so far. ``key`` is the claim's name in the ledger, ``cards`` those that it concerns if nothing was booted.
    """
    decides = worst(judgements)
    last = observations[-1] if observations else None
    return {
        "nodeid": nodeid,
        "line": line,
        "claim": claim.about.id or nodeid,
        "key": key or claim.about.id or nodeid,
        "title": claim.about.title,
        "stack": stack,
        "hearsay": claim.about.hearsay,
        "label": label,
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
                "details": list(one.details),
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
        "prediction": dict(prediction) if prediction is not None else None,
        "remedies": list(last.remedies) if last else [],
        "resolved": last.resolved.as_dict() if last else None,
        "samples": {name: list(one.samples) for name, one in last.series.items()} if last else {},
        "rates": _rates(judgements, last),
        "answers": _answers(last),
        "found": dict(last.found) if last is not None else {},
        "peak_gib": round(last.peak.gib, 3) if last is not None and last.peak is not None else None,
        "peak_phases": (
            {name: round(gib, 3) for name, gib in last.peak.phases}
            if last is not None and last.peak is not None
            else {}
        ),
        "confirmed": dict(confirmed) if confirmed is not None else None,
        "warnings": [one.warning for one in judgements if one.warning is not None],
        "elapsed_s": round(last.elapsed_s, 2) if last is not None and last.elapsed_s is not None else None,
        "seconds": dict(seconds) if seconds is not None else None,
        "parts": dict(parts) if parts is not None else None,
        "components": dict(components) if components is not None else {},
        "log": last.log if last else None,
        "argv": list(last.argv) if last else [],
        "translated": list(translated),
        "cards": sorted((last.cards if last is not None else ()) or cards),
        "gpus": list(last.gpus) if last else [],
    }


def _answers(last: Observation | None) -> dict[str, Any] | None:
    if last is None or last.answers is None:
        return None
    checks = [{"name": one.name, "ok": one.ok, "fact": one.fact} for one in last.answers.checks]
    return {"level": last.answers.level, "checks": checks}


def _rates(judgements: Sequence[Judgement], last: Observation | None) -> dict[str, dict[str, Any]]:
    """What was measured of each load, with the verdict on it."""
    if last is None:
        return {}
    verdicts = {one.subject: one.verdict.value for one in judgements}
    return {name: {"verdict": verdicts.get(name), **one.as_dict()} for name, one in last.series.items()}
