"""The prediction of a boot that was real, beside what it measured: gathers config.json, cards, flags and release.

It changes no verdict: whatever keeps a prediction from being made is told in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .predict.beside import absent, compared
from .predict.boxes import box_of
from .predict.predictor import predict

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .facts.gpu import Rig


def forecast(live: LiveBoot, rig: Rig, version: str | None, measured: Mapping[str, float]) -> dict[str, Any]:
    """The payload's ``prediction`` of one boot on GPUs (docs/prediction.md). Never raises.

    ``measured`` are the claim's known facts, which take the place of rules here and never reach the boot.
    """
    from .facts.models import find_model

    spec, seen = live.spec, live.observation
    try:
        model = find_model(spec.model, {})
        box, notes = box_of(rig, seen.gpus)
        release = seen.engine_version or version
        found = predict(model.folder, box, spec.engine, release, spec.flags, dict(spec.env), measured)
    except Exception as error:  # also a mistake of ours: a claim is about the server
        said = str(error) if isinstance(error, (LookupError, ValueError)) else f"{type(error).__name__}: {error}"
        return absent(said)
    return compared(replace(found, assumptions=(*found.assumptions, *notes)), seen)
