"""What compiles kernels while an engine runs, and whether the installed wheels belong together.

None of these leases a GPU: they need the rig's facts, or none.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard import claim, works

# What a script has several parts of is asked in one run, which all claims about it share. A part that does not hold
# there is asked once more by itself: so its log is its own, and names the reason.


def _ask(probe: Any, script: str, part: str, deadline: str) -> None:
    if "said" not in probe(script, deadline=deadline).data.get(part, {}):
        probe(script, args={"part": part}, deadline=deadline)


@pytest.mark.premerge
@claim(
    id="preflight.nvcc",
    title="the nvcc that a JIT build would take compiles for this SM",
    source="flashinfer-ai/flashinfer#2577: /usr/bin/nvcc 11.5 is taken although torch is built for CUDA 13",
    minutes=0.1,
)
@works
def test_nvcc_compiles_for_this_gpu(probe: Any) -> None:
    """Looked for as torch and FlashInfer do it; its list of architectures, its major against torch's, three lines."""
    probe("nvcc", deadline="120s")


@pytest.mark.premerge
@claim(
    id="preflight.ptxas",
    title="Triton's ptxas assembles for this SM",
    source="sgl-project/sglang#8879, sgl-project/sglang#9707: the bundled one did not know sm_120a",
    minutes=0.1,
)
@works
def test_the_ptxas_of_triton_assembles_for_this_gpu(probe: Any) -> None:
    """The bundled one, or the one of TRITON_PTXAS_PATH."""
    probe("ptxas", deadline="60s")


@pytest.mark.premerge
@claim(
    id="preflight.linked",
    title="the kernel libraries are linked against torch's CUDA",
    source="sgl-project/sglang#29646 (libnvrtc.so.12 under CUDA 13), sgl-project/sglang#18203 (libcudart.so.12)",
    minutes=0.1,
)
@works
def test_the_libraries_are_linked_against_the_cuda_of_torch(probe: Any) -> None:
    """DT_NEEDED of every compiled file, against the major that torch is built for."""
    _ask(probe, "linked", "needed", "180s")


@pytest.mark.premerge
@claim(
    id="preflight.one_runtime",
    title="one CUDA runtime is mapped beside torch and the kernel libraries",
    source="local-inference-lab/rtx6kpro: an image with libcudart.so.12 in its CUDA 13 folder",
    minutes=0.1,
)
@works
def test_one_cuda_runtime_is_mapped(probe: Any) -> None:
    """Two of them keep two states of one device: handles of one are unknown to the other."""
    _ask(probe, "linked", "mapped", "180s")


@pytest.mark.premerge
@claim(
    id="preflight.torch_pin",
    title="torch is the one that the engine pins",
    source="metadata of sglang and vllm; an engine's kernels are built against one torch",
    minutes=0.1,
)
@works
def test_torch_is_the_pinned_one(probe: Any) -> None:
    """By the engine's own Requires-Dist."""
    _ask(probe, "wheels", "torch", "60s")


@pytest.mark.premerge
@claim(
    id="preflight.engine_pins",
    title="what else the engine pins is installed in that version",
    source="metadata of sglang and vllm",
    minutes=0.1,
)
@works
def test_the_pins_of_the_engine_are_kept(probe: Any) -> None:
    """Of kernels, compilers and CUDA; what is not installed is listed, and a defect only where no GPU can serve."""
    _ask(probe, "wheels", "engine", "60s")


@pytest.mark.premerge
@claim(
    id="preflight.nvidia_wheels",
    title="the NVIDIA wheels are those that torch pins",
    source="local-inference-lab/rtx6kpro: a cu130 image with another nvidia-cublas crashed in speculative decoding",
    minutes=0.1,
)
@works
def test_the_nvidia_wheels_are_those_of_torch(probe: Any) -> None:
    """Also through the extras of cuda-toolkit, which newer releases of torch ask for."""
    _ask(probe, "wheels", "nvidia", "60s")


@pytest.mark.premerge
@claim(
    id="preflight.flashinfer_wheels",
    title="the wheels of FlashInfer are of one version",
    source="flashinfer/jit/env.py",
    minutes=0.1,
)
@works
def test_the_wheels_of_flashinfer_are_of_one_version(probe: Any) -> None:
    """With another one FlashInfer refuses to be imported, or with its check off runs old kernels."""
    _ask(probe, "wheels", "flashinfer", "60s")


@pytest.mark.premerge
@claim(
    id="preflight.other_pins",
    title="the kernel packages fit each other by their own words",
    source="vllm-project/vllm#49859: an upgrade in place keeps quack-kernels beside a newer nvidia-cutlass-dsl",
    minutes=0.1,
)
@works
def test_the_kernel_packages_fit_each_other(probe: Any) -> None:
    """Every requirement of a package that serving uses, on another of these."""
    _ask(probe, "wheels", "others", "60s")
