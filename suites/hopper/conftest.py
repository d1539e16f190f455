"""Which stack and which models these claims are about: rehearsed ones on a simulated rig, yours on a real one.

Nothing here decides a verdict, and nothing is downloaded: models are fetched beforehand with ``gpuguard fetch``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpuguard.facts.stackref import StackRef
from pytest_gpuguard.options import Config
from pytest_gpuguard.plugin import runner_of
from pytest_gpuguard.suite_models import SuiteModels

HERE = Path(__file__).parent
#: The same ones that suites/blackwell is about.
MODELS = SuiteModels(HERE.parent / "blackwell")
#: What a rehearsal runs where nobody names a stack: a release that says when FlashInfer's fusion is on.
REHEARSED = StackRef("sglang-0.5.20", "sim:sglang==0.5.20")


def pytest_gpuguard_stack(item: pytest.Item) -> StackRef | None:
    """On a simulated rig without ``--gpuguard-stack`` a simulated stack, see above. Else the command line's."""
    settings = _settings(item)
    return REHEARSED if settings.simulated and not settings.stacks else None


def pytest_gpuguard_model(item: pytest.Item, model: str) -> str | None:
    """Where a claim's model is, see ``SuiteModels``."""
    return MODELS.find(_settings(item), model)


def _settings(item: pytest.Item) -> Config:
    return runner_of(item.config).settings
