"""Which stack and which models these claims are about: rehearsed ones on a simulated rig, yours on a real one.

Nothing here decides a verdict, and nothing is downloaded: models are fetched beforehand with ``gpuguard fetch``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from pytest_gpuguard.facts.models import ModelsFileError, read_models
from pytest_gpuguard.facts.stackref import StackRef
from pytest_gpuguard.options import Config
from pytest_gpuguard.plugin import runner_of

HERE = Path(__file__).parent
#: The same models that suites/blackwell is about: their numbers, and where they are on a real rig.
ARCHITECTURES = HERE.parent / "blackwell" / "architectures"
MODELS = HERE.parent / "blackwell" / "models.toml"
#: What a rehearsal runs where nobody names a stack: a release that says when FlashInfer's fusion is on.
REHEARSED = StackRef("sglang-0.5.20", "sim:sglang==0.5.20")


def pytest_gpuguard_stack(item: pytest.Item) -> StackRef | None:
    """On a simulated rig without ``--gpuguard-stack`` a simulated stack, see above. Else the command line's."""
    settings = _settings(item)
    return REHEARSED if settings.simulated and not settings.stacks else None


def pytest_gpuguard_model(item: pytest.Item, model: str) -> str | None:
    """A simulated rig reads the numbers in ``architectures``; a real one what Blackwell's ``models.toml`` names.

    A name that the ini option gpuguard_models has is the user's own, and wins on a real rig.
    """
    settings = _settings(item)
    if settings.simulated:
        folder = ARCHITECTURES / model
        return str(folder) if folder.is_dir() else None
    return None if model in dict(settings.models) else _models().get(model)


@cache
def _models() -> dict[str, str]:
    try:
        return read_models(MODELS)
    except ModelsFileError as error:
        raise pytest.UsageError(str(error)) from None


def _settings(item: pytest.Item) -> Config:
    return runner_of(item.config).settings
