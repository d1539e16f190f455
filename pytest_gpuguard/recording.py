"""The payload of one claim in this run: what was judged, on what, and what it took. It must never hold a secret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from .claims.judgement import Judgement, Verdict, worst
from .claims.observation import Observation
from .packing.history import key_of
from .report.payload import payload, spoken
from .secrets import Secrets
from .stacks import plain_nodeid

if TYPE_CHECKING:
    import pytest

    from .evaluate import Evaluation
    from .run import Runner

#: Keys of a payload that JUnit gets as properties.
PROPERTIES: Final = ("verdict", "label", "outcome", "fact", "expectation", "reason", "stack", "phase", "log")


def recorded(
    runner: Runner,
    item: pytest.Item,
    judgements: Sequence[Judgement],
    observations: Sequence[Observation],
    confirmed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """JSON-able data with the keys of docs/verdicts.md. ``confirmed``: what fresh boots came to, if there were any."""
    evaluation = runner.evaluation(item)
    claim, plain = evaluation.claim, plain_nodeid(item)
    tried = worst(judgements).verdict not in (Verdict.INFRA, Verdict.NOT_EVALUATED)
    data = payload(
        item.nodeid,
        claim,
        evaluation.ref.name,
        judgements,
        observations,
        translated=evaluation.translated,
        label=runner.settings.label,
        prediction=evaluation.forecast(),
        parts=runner.memory.parts(item) if tried else None,
        seconds=runner.memory.watch(item).seconds(observations),
        key=key_of(claim.about.id or plain, plain),
        components=runner.memory.components(item) if tried else None,
        cards=_cards(evaluation),
        confirmed=confirmed,
        line=None if item.location[1] is None else item.location[1] + 1,
    )
    if evaluation.place is not None:
        data["warnings"] += evaluation.place.told
    clean: dict[str, Any] = secrets_of(evaluation).clean(data)
    return clean


def secrets_of(evaluation: Evaluation) -> Secrets:
    """What must not be told of a claim: of this environment, and of its servers, also those that its body boots."""
    serves, specs = evaluation.claim.serves, [live.spec for live in evaluation.live]
    declared = [(serves.env, serves.flags)] if serves is not None else []
    started = [(dict(spec.env), spec.flags) for spec in specs]
    both = [*declared, *started, *((env, ()) for env in evaluation.asked_texts)]
    return Secrets([env for env, _ in both], [flags for _, flags in both])


def shown(judgement: Judgement, secrets: Secrets) -> Judgement:
    """The judgement as pytest, and with it JUnit and the terminal, may say it."""
    hide = secrets.hide
    return replace(
        judgement,
        expectation=hide(judgement.expectation),
        fact=hide(judgement.fact),
        details=tuple(map(hide, judgement.details)),
    )


def properties(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What JUnit gets of a payload."""
    return [
        (f"gpuguard_{name}", spoken(data) if name == "verdict" else data[name]) for name in PROPERTIES if data.get(name)
    ]


def _cards(evaluation: Evaluation) -> tuple[str, ...]:
    """The kinds of cards that a claim concerns, also where it was decided before any lease."""
    if not (evaluation.claim.gpus or evaluation.claim.needs.any_gpu) or evaluation.rig_fault() is not None:
        return ()
    session = evaluation.session
    return session.cards([gpu.uuid for gpu in session.rig.usable])
