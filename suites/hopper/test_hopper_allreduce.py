"""Ways to reduce over NVLink on SM90: what is refused or stays off on PCIe cards of SM120 is allowed here.

The counterparts are in suites/blackwell/test_allreduce.py, with the same small models.
"""

from __future__ import annotations

from pytest_gpuguard import claim, fits, needs_gpus, needs_package, needs_sm90, serves, uses

two = needs_gpus(2, vram="80GB", link="nvlink")
eight = needs_gpus(8, vram="80GB", link="nvlink")

SMALL = (
    "--context-length 8192 --chunked-prefill-size 4096 --max-running-requests 64 "
    "--mem-fraction-static 0.80 --cuda-graph-max-bs 32 --load-format dummy"
)


@needs_sm90
@needs_package("sglang>=0.5.8")
@two
@serves("sglang", "qwen3-30b-a3b", SMALL, "--enable-flashinfer-allreduce-fusion", layout="TP2", portable=True)
@fits(when="sglang<0.5.14")
@uses("flashinfer_allreduce_fusion", when="sglang>=0.5.14")
@claim(
    id="H7",
    title="FlashInfer allreduce fusion is allowed on SM90",
    source="sglang/srt/layers/flashinfer_comm_fusion.py (SM90 or SM10X); the counterpart of F9",
    minutes=4,
)
def test_flashinfer_allreduce_fusion() -> None:
    """SM120 is refused with "requires SM90 or SM10X".

    Before 0.5.14 the log tells of a workspace only, and not that the fusion is on: there the server just boots.
    """


@needs_sm90
@eight
@serves("sglang", "qwen3-8b", SMALL, layout="TP8", portable=True)
@uses("custom_allreduce", when="sglang<0.5.14")
@fits(when="sglang>=0.5.14,<0.5.16")
@uses("custom_allreduce", when="sglang>=0.5.16")
@claim(
    id="H8",
    title="custom allreduce is on over NVLink with eight GPUs",
    source="sglang/srt/distributed/device_communicators/custom_all_reduce.py; custom_all_reduce_v2.py; "
    "the counterpart of F10.gate",
    minutes=4,
)
def test_custom_allreduce_over_nvlink() -> None:
    """Every pair has NVLink by NVML, so the gate for more than two GPUs is open.

    Graphs register its buffers, which is logged; 0.5.14 and 0.5.15 log nothing of it, so there the server just boots.
    Since 0.5.16 its configuration is logged once it is built.
    """


@needs_sm90
@two
@serves("sglang", "qwen3-8b", SMALL, "--enable-torch-symm-mem", layout="TP2", portable=True)
@fits
@claim(
    id="H9",
    title="Torch symmetric memory does not keep a server from booting",
    source="sglang/srt/distributed/device_communicators/torch_symm_mem.py (capability 9 or 10); the counterpart of F14",
    minutes=3,
)
def test_torch_symmetric_memory() -> None:
    """SM90 is in its table of sizes, where SM120 was a KeyError. It prints nothing when it works: there is no more."""
