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
MODELS = SuiteModels(HERE)
#: What a rehearsal runs where nobody names a stack: the releases whose words the notes quote. Kimi-K2.5 and the flag
#: ``--moe-a2a-backend flashinfer`` came with 0.5.9; the crash of FlashInfer's allreduce is one of 0.5.6 and 0.5.7.
REHEARSED = StackRef("sglang-0.5.9", "sim:sglang==0.5.9")
REHEARSED_FUSION = StackRef("sglang-0.5.7", "sim:sglang==0.5.7")


def pytest_gpuguard_stack(item: pytest.Item) -> StackRef | None:
    """On a simulated rig without ``--gpuguard-stack`` a simulated stack, see above. Else the command line's."""
    settings = _settings(item)
    if not settings.simulated or settings.stacks:
        return None
    return REHEARSED_FUSION if item.name == "test_flashinfer_allreduce_fusion" else REHEARSED


def pytest_gpuguard_model(item: pytest.Item, model: str) -> str | None:
    """Where a claim's model is, see ``SuiteModels``."""
    return MODELS.find(_settings(item), model)


def _settings(item: pytest.Item) -> Config:
    return runner_of(item.config).settings
