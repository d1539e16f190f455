"""Features of the field notes that one call decides: FlashInfer's fusion, symmetric memory, MSCCL++.

The claims of the same numbers in suites/blackwell boot a server; these look at the part that it would fail in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_gpuguard import claim, needs_gpus, needs_package, needs_sm120, unsupported, works

Probe = Callable[..., Any]

NOTES = "field notes, 8x RTX PRO 6000 Blackwell, Kimi-K2.5 on SGLang"


@needs_sm120
@needs_gpus(1)
@needs_package("flashinfer-python")
@unsupported(
    "flashinfer allreduce fusion",
    how="crashes",
    match=r"No supported CUDA architectures found for major versions \[9, 10\]",
    when="flashinfer-python<0.6.17",
)
@works(when="flashinfer-python>=0.6.17")
@claim(
    id="preflight.F9",
    title="FlashInfer's JIT makes its allreduce fusion for SM120 since 0.6.17 only",
    source=f"{NOTES}; flashinfer/jit/comm.py of 0.6.9, 0.6.16 and 0.6.17; flashinfer-ai/flashinfer#3903",
    recheck="2027-03-01",
    minutes=1,
)
def test_flashinfer_allreduce_fusion_compiles(probe: Probe) -> None:
    """An older one has no architecture to compile for. What this one compiles, SGLang may still refuse (F9).

    What is not in its cache is only generated: compiling takes minutes, and the first server does it.
    """
    probe("fusion_jit", deadline="3m")


@needs_gpus(2)
@works
@claim(
    id="preflight.symm_mem",
    title="GPUs that have P2P share torch's symmetric memory",
    source="pytorch torch/distributed/_symmetric_memory",
    minutes=1,
)
def test_torch_symmetric_memory(probe: Probe) -> None:
    """Torch's own part of it, without SGLang's table of sizes."""
    probe("symm_mem", args={"of": "torch"}, deadline="3m")


@needs_sm120
@needs_gpus(2)
@needs_package("sglang>=0.5.3")
@unsupported("torch symmetric memory", how="crashes", match=r"KeyError: 12\b", when="sglang<0.5.14")
@unsupported("torch symmetric memory", how="rejected", match="Device capability 12", when="sglang>=0.5.14")
@claim(
    id="preflight.F14",
    title="SGLang has no symmetric memory for SM120",
    source=f"{NOTES}; sglang/srt/distributed/device_communicators/torch_symm_mem.py",
    minutes=1,
)
def test_sglang_symmetric_memory(probe: Probe) -> None:
    """SM120 is not in its table of sizes: a KeyError up to 0.5.13, and since 0.5.14 a warning and nothing done."""
    probe("symm_mem", args={"of": "sglang"}, deadline="4m")


@unsupported("mscclpp", how="rejected", match="mscclpp is not installed")
@claim(id="preflight.F13", title="MSCCL++ is not installed", source=NOTES, minutes=1)
def test_mscclpp_is_not_installed(probe: Probe) -> None:
    """A flag for it is taken all the same."""
    probe("package", args={"name": "mscclpp"})
