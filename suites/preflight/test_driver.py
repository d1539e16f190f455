"""The driver and torch on the leased GPUs: what every engine needs before it loads anything.

No model and no engine is imported.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard import claim, needs_gpus, works


@pytest.mark.premerge
@claim(
    id="preflight.cuinit",
    title="CUDA's driver comes up and counts every leased GPU",
    source="sgl-project/sglang#27487 (802), gpustack/gpustack#4678 (803)",
    minutes=0.2,
)
@needs_gpus(1)
@works
def test_the_driver_comes_up(probe: Any) -> None:
    """The number of cuInit is kept: 802 is no running fabric manager, 803 and 804 are compat libraries."""
    probe("cuinit", gpus="all", deadline="30s")


@pytest.mark.premerge
@claim(
    id="preflight.torch_gpus",
    title="torch sees every leased GPU and computes right on it",
    source="club-3090#222: an image of a newer CUDA than the driver knows serves from the CPU, in silence",
    minutes=0.2,
)
@needs_gpus(1)
@works
def test_torch_computes_on_every_gpu(probe: Any) -> None:
    """A product of whole numbers, in float32 and bfloat16, compared exactly; torch's CUDA against the driver's."""
    if "torch" not in probe("p2p", args={"all": True}, gpus="all", deadline="4m").data["holds"]:
        probe("torch_gpus", gpus="all", deadline="180s")
