"""The kernel libraries: each imports, holds what it should have compiled, carries code for this SM, and runs.

A library that is not installed is NOT_EVALUATED: which ones an engine asks for, the claims about wheels say.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard import claim, needs_gpus, needs_sm, works

LIBRARIES = (
    "sgl_kernel",
    "flashinfer",
    "vllm",
    "triton",
    "deep_gemm",
    "deep_ep",
    "flash_mla",
    "flash_attn",
    "flash_attn_4",
    "quack",
    "cutlass",
)
LAUNCHED = ("sgl_kernel", "vllm", "triton", "flashinfer", "flash_attn")

# All are looked at in one run of the script, at once, which every claim here shares. What does not hold there is asked
# once more by itself: so its log is its own, and names the reason.


@pytest.mark.premerge
@pytest.mark.parametrize("name", LIBRARIES)
@claim(
    id="preflight.import",
    title="the kernel library imports, and is no stand-in",
    source="sgl-project/sglang#29646, sgl-project/sglang#18203, sgl-project/sglang#8373, vllm-project/vllm#49859",
    minutes=0.2,
)
@works
def test_the_library_imports(probe: Any, name: str) -> None:
    """A missing symbol, a library of another CUDA, names of another release: all show on import."""
    if name not in probe("libraries", args={"all": LIBRARIES}, deadline="180s").data["holds"]:
        probe("libraries", args={"name": name}, deadline="60s")


@pytest.mark.premerge
@pytest.mark.parametrize("name", ["sgl_kernel", "vllm", "flash_attn_2_cuda"])
@claim(
    id="preflight.code",
    title="the kernel library carries code for this SM",
    source="sgl-project/sglang#7249: a wheel without sm_120 dies in graph capture, with advice about memory",
    minutes=0.2,
)
@works
def test_the_library_carries_code_for_this_gpu(probe: Any, name: str) -> None:
    """Read from the files: a cubin of the same major and a lower or equal minor, of its family, or PTX."""
    probe("cubins", args={"name": name}, deadline="120s")


@pytest.mark.premerge
@pytest.mark.parametrize("name", ["deep_ep", "flash_mla"])
@claim(
    id="preflight.code.datacenter",
    title="a library for SM90 and SM100 carries code for this SM",
    source="deepseek-ai/DeepEP and deepseek-ai/FlashMLA are written for these",
    minutes=0.2,
)
@needs_sm("90", "100", "103")
@works
def test_the_library_for_datacenter_cards_carries_code_for_this_gpu(probe: Any, name: str) -> None:
    """On other cards engines must not use them: not evaluated there."""
    probe("cubins", args={"name": name}, deadline="120s")


@pytest.mark.parametrize("name", LAUNCHED)
@claim(
    id="preflight.runs",
    title="a kernel of the library runs on this GPU and is right",
    source="sgl-project/sglang#8879 (Triton's ptxas), vllm-project/vllm#32109 (FP8), flashinfer-ai/flashinfer#2577",
    minutes=0.2,
)
@needs_gpus(1)
@works
def test_a_kernel_of_the_library_runs(probe: Any, name: str) -> None:
    """RMSNorm of SGLang, the FP8 GEMM of vLLM, three lines of Triton; of FlashInfer what its JIT would build for."""
    if name not in probe("libraries", args={"all": LAUNCHED, "launch": True}, deadline="180s").data["holds"]:
        probe("libraries", args={"name": name, "launch": True}, deadline="60s")
