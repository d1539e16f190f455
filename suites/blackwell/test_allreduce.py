"""Ways to reduce over PCIe on SM120, where there is no NVLink: most are refused, crash or quietly stay off.

"Unsupported" is four different things, and a feature moves between them from release to release: refused with a text,
a crash in a kernel, a warning and something else in its place, or nothing at all to be seen. Each window below says
which. Small models do: the gates look at the card and the number of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard import claim, compare, fits, needs_gpus, needs_package, needs_sm120, ooms, serves, unsupported

NOTES = "field notes, 8x RTX PRO 6000 Blackwell, Kimi-K2.5 on SGLang"

two = needs_gpus(2, vram="24GB", link="pcie")
two_large = needs_gpus(2, vram="48GB", link="pcie")
four = needs_gpus(4, vram="24GB", link="pcie")
eight = needs_gpus(8, vram="96GB", link="pcie")
#: The release that brought these models.
has_kimi = needs_package("sglang>=0.5.9")

SMALL = (
    "--context-length 8192 --chunked-prefill-size 4096 --max-running-requests 64 "
    "--mem-fraction-static 0.80 --cuda-graph-max-bs 32 --load-format dummy"
)
KIMI = (
    "--trust-remote-code --context-length 32768 --chunked-prefill-size 8192 "
    "--max-running-requests 128 --mem-fraction-static 0.85"
)
GRAPH = "--cuda-graph-max-bs 128"
DUMMY = "--load-format dummy"

baseline = serves("sglang", "kimi-k2.5", KIMI, GRAPH, layout="TP8", portable=True)
nccl_only = serves("sglang", "kimi-k2.5", KIMI, GRAPH, "--disable-custom-all-reduce", layout="TP8", portable=True)


# ------------------------------------------------------------------------------ FlashInfer allreduce fusion


@pytest.mark.premerge
@needs_sm120
@two_large
@serves("sglang", "qwen3-30b-a3b", SMALL, "--enable-flashinfer-allreduce-fusion", layout="TP2", portable=True)
@unsupported(
    "flashinfer allreduce fusion",
    how="crashes",
    match="No supported CUDA architectures found for major versions",
    when="sglang>=0.5.6,<0.5.8",
)
@fits(when="sglang>=0.5.8,<0.5.14")
@unsupported(
    "flashinfer allreduce fusion",
    how="rejected",
    match="requires SM90 or SM10X",
    when="sglang>=0.5.14",
)
@claim(
    id="F9",
    title="FlashInfer allreduce fusion is unsupported on SM120",
    source=f"{NOTES}; sgl-project/sglang#15650, #32330, flashinfer-ai/flashinfer#3903",
    recheck="2027-03-01",
    minutes=3,
)
def test_flashinfer_allreduce_fusion() -> None:
    """Its kernels are compiled for SM90 and SM100 only. What follows from that depends on the release.

    0.5.6 and 0.5.7: one of two gates does not look at the card, and the JIT dies in graph capture, for models whose
    layers ask for fusion (this one's do). 0.5.8 to 0.5.13: both gates look, the flag does nothing, and nothing says so:
    all that can be claimed is that it boots. Since 0.5.14 it is refused, late: after weights and KV pool. Before 0.5.6
    it did nothing either, and nobody has looked. One day it should flip: kernels for SM12x have been proposed.
    """


# -------------------------------------------------------------------------------------- custom allreduce


@pytest.mark.premerge
@needs_sm120
@four
@serves("sglang", "qwen3-8b", SMALL, layout="TP4", portable=True)
@unsupported("custom allreduce", how="falls_back", match="more than two PCIe-only GPUs")
@claim(
    id="F10.gate",
    title="custom allreduce stays off on more than two PCIe GPUs",
    source="sglang/srt/distributed/device_communicators/custom_all_reduce.py",
    minutes=3,
)
def test_custom_allreduce_stays_off_over_pcie() -> None:
    """SGLang asks NVML whether every pair has NVLink, warns, and reduces with NCCL."""


@needs_sm120
@has_kimi
@eight
@baseline
@compare(other=nccl_only, ratio="<0.5", concurrency=1, input_len=128, output_len=512)
@claim(id="F10", title="forced on, it is over 2x slower than NCCL", source=NOTES, status="hearsay", minutes=50)
def test_custom_allreduce_forced_over_pcie() -> None:
    """38 tok/s against 89.5. Stock SGLang cannot be told to: the gate above was patched out, and how is not recorded.

    On a stack as it is both servers reduce with NCCL, and the ratio is 1.
    """


# ------------------------------------------------------------------------------------------------- NCCL


@needs_sm120
@has_kimi
@eight
@serves("sglang", "kimi-k2.5", KIMI, GRAPH, DUMMY, layout="TP8", env={"NCCL_ALGO": "Tree"}, portable=True)
@unsupported("NCCL_ALGO=Tree", how="crashes", match=r"(?i)nccl|no algorithm")
@claim(id="F11", title="NCCL_ALGO=Tree and CUDA graphs do not go together", source=NOTES, status="hearsay", minutes=4)
def test_nccl_tree_with_graphs() -> None:
    """A bare "Tree" is for every collective, and there is no tree for AllGather.

    So the failure is of AllGather as much as of graphs; the claim below tells them apart.
    """


@needs_sm120
@has_kimi
@eight
@serves(
    "sglang",
    "kimi-k2.5",
    KIMI,
    "--disable-cuda-graph",
    DUMMY,
    layout="TP8",
    env={"NCCL_ALGO": "Tree"},
    portable=True,
)
@unsupported("NCCL_ALGO=Tree", how="crashes", match=r"(?i)nccl|no algorithm")
@claim(id="F11.eager", title="NCCL_ALGO=Tree fails without graphs too", source=NOTES, status="hearsay", minutes=4)
def test_nccl_tree_without_graphs() -> None:
    """If this boots and the one above does not, it is the graphs after all."""


@needs_sm120
@has_kimi
@eight
@serves("sglang", "kimi-k2.5", KIMI, GRAPH, DUMMY, layout="TP8", env={"NCCL_MAX_NCHANNELS": "2"}, portable=True)
@ooms()
@claim(id="F12", title="fewer NCCL channels run out of memory", source=NOTES, status="hearsay", minutes=4)
def test_fewer_nccl_channels() -> None:
    """How many, and in which phase, was not recorded. It is odd: fewer channels have fewer buffers."""


# --------------------------------------------------------------------------------------- MSCCL++, symm mem


@pytest.mark.premerge
@needs_sm120
@eight
@serves("sglang", "qwen3-8b", SMALL, "--enable-mscclpp", layout="TP8", portable=True)
@fits(when="sglang<0.5.21")
@unsupported("mscclpp", how="falls_back", match="dependencies failed to import", when="sglang>=0.5.21")
@claim(id="F13", title="MSCCL++ is not installed", source=NOTES, minutes=3)
def test_mscclpp_is_not_installed(stack: Any) -> None:
    """The flag is taken all the same, and only since 0.5.21 the log says that the package is missing.

    Up to 0.5.13 the kernels came with SGLang's own, and the package made no difference.

    Eight ranks, because with another number (but sixteen) it is off for that reason.
    """
    assert stack.package("mscclpp") is None


@pytest.mark.premerge
@needs_sm120
@two
@serves("sglang", "qwen3-8b", SMALL, "--enable-torch-symm-mem", layout="TP2", portable=True)
@unsupported("torch symmetric memory", how="crashes", match=r"KeyError: 12", when="sglang<0.5.14")
@unsupported("torch symmetric memory", how="falls_back", match="Device capability 12", when="sglang>=0.5.14")
@claim(id="F14", title="Torch symmetric memory crashes with KeyError: 12", source=NOTES, minutes=3)
def test_torch_symmetric_memory() -> None:
    """SM120 is not in its table of sizes. Since 0.5.14 it looks before it reads, warns and stays off."""
