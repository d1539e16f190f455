"""What upgrades have broken on SM120, as claims to run after the next one; and what CUDA 13 was expected to unblock.

Mostly positive: each says that something works which an upgrade once broke, so that it is seen when it breaks again.
Those that need no served model (wheels without SM120 code, a stale nvcc, an allreduce between two ranks) are pre-flight
checks and not here.
"""

from __future__ import annotations

import pytest

from pytest_gpuguard import (
    claim,
    compare,
    fits,
    needs_cuda,
    needs_gpus,
    needs_package,
    needs_sm120,
    serves,
    unsupported,
    uses,
    works,
)

NOTES = "field notes, 8x RTX PRO 6000 Blackwell, Kimi-K2.5 on SGLang"

one = needs_gpus(1, vram="24GB")
one_large = needs_gpus(1, vram="48GB")
two = needs_gpus(2, vram="24GB", link="pcie")
two_large = needs_gpus(2, vram="48GB", link="pcie")
eight = needs_gpus(8, vram="96GB", link="pcie")
#: The release that brought these models.
has_kimi = needs_package("sglang>=0.5.9")

SMALL = (
    "--context-length 8192 --chunked-prefill-size 4096 --max-running-requests 64 "
    "--mem-fraction-static 0.80 --cuda-graph-max-bs 32"
)
KIMI = (
    "--trust-remote-code --context-length 32768 --chunked-prefill-size 8192 "
    "--max-running-requests 128 --mem-fraction-static 0.85"
)
GRAPH = "--cuda-graph-max-bs 128"
DUMMY = "--load-format dummy"
EAGLE3 = "--speculative-algorithm EAGLE3 --speculative-draft-model-path lightseekorg/kimi-k2.5-eagle3"
STEPS = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"

kimi = serves("sglang", "kimi-k2.5", KIMI, GRAPH, DUMMY, layout="TP8", portable=True)


# ------------------------------------------------------------------------------------------ seen in releases


@pytest.mark.premerge
@needs_sm120
@one
@serves("sglang", "qwen3-8b", SMALL, portable=True)
@fits
@claim(id="sglang-7249", title="a small model boots on one card", source="sgl-project/sglang#7249", minutes=3)
def test_a_small_model_boots_on_one_card() -> None:
    """A wheel of kernels without SM120 code fails here, dressed up as a graph capture that wants more memory."""


@pytest.mark.premerge
@needs_sm120
@two_large
@serves("sglang", "qwen3-30b-a3b", SMALL, DUMMY, layout="TP2", portable=True)
@fits(when="sglang<0.5.7")
@unsupported(
    "the default flags",
    how="crashes",
    match="No supported CUDA architectures found for major versions",
    when="sglang>=0.5.7,<0.5.8",
)
@fits(when="sglang>=0.5.8")
@claim(
    id="sglang-15650",
    title="a mixture of experts boots on two cards with the default flags",
    source="sgl-project/sglang#15650; sglang/srt/server_args.py",
    minutes=3,
)
def test_the_default_flags_boot_on_two_cards() -> None:
    """0.5.7 turns FlashInfer's allreduce fusion on by itself, for this architecture, on every Blackwell: see F9."""


@needs_sm120
@has_kimi
@eight
@serves("sglang", "kimi-k2.5", KIMI, GRAPH, DUMMY, "--attention-backend trtllm_mla", layout="TP8", portable=True)
@unsupported("trtllm_mla", how="crashes", match="Unsupported architecture")
@claim(
    id="sglang-24633",
    title="TRT-LLM's MLA kernels are not for SM120",
    source="sgl-project/sglang#24633, flashinfer-ai/flashinfer#3263; sglang/srt/server_args.py",
    minutes=4,
)
def test_trtllm_mla_is_unsupported() -> None:
    """The gate asks for "Blackwell", which means SM120 too since 0.5.5; the kernel still does not know it.

    Whatever routes an MLA prefill there by default breaks in the same way: then the claims below fail first.
    """


@needs_sm120
@has_kimi
@eight
@kimi
@fits
@claim(
    id="sglang-14311",
    title="an MLA model answers, also from its prefix cache",
    source="sgl-project/sglang#24633, sgl-project/sglang#14311",
    minutes=5,
)
def test_the_same_prompt_twice() -> None:
    """Booted is not working: one release died on its first prefill, another on its second, from the cache.

    There, blocks sized for 228 KB of shared memory met the 99 KB of SM120. What is answered does not matter: ``fits``
    sends a prefill, the same again, a long one and a burst, with dummy weights too.
    """


@needs_sm120
@has_kimi
@eight
@kimi
@uses("attention_backend=triton")
@claim(
    id="sglang-37105.mla",
    title="MLA attention resolves to triton",
    source="sgl-project/sglang#37105; sglang/srt/server_args.py",
    minutes=1,
)
def test_mla_resolves_to_triton() -> None:
    """One image chose a backend by "major at least 10" and ended in a kernel without SM120: look at what resolved."""


@needs_sm120
@has_kimi
@eight
@serves("sglang", "kimi-k2.5", KIMI, GRAPH, DUMMY, "--attention-backend triton", layout="TP8", portable=True)
@uses("attention_backend=triton")
@claim(
    id="sglang-37105.asked",
    title="an attention backend that is asked for is the one that runs",
    source="sgl-project/sglang#37105",
    minutes=4,
)
def test_the_backend_that_is_asked_for_runs() -> None:
    """There, naming another one led back to the one without kernels. That the argument was taken is no evidence."""


@pytest.mark.premerge
@needs_sm120
@one
@serves("sglang", "qwen3-8b", SMALL, portable=True)
@uses("attention_backend=flashinfer")
@claim(
    id="sglang-37105.mha",
    title="other attention resolves to flashinfer",
    source="sgl-project/sglang#37105; sglang/srt/server_args.py",
    minutes=1,
)
def test_mha_resolves_to_flashinfer() -> None:
    """The same for a model without MLA; triton means that FlashInfer could not be imported."""


@needs_sm120
@one
@serves("sglang", "gpt-oss-20b", SMALL, portable=True)
@fits
@claim(
    id="sglang-8879",
    title="GPT-OSS boots on one card",
    source="sgl-project/sglang#8879, sgl-project/sglang#9707",
    minutes=4,
)
def test_gpt_oss_boots() -> None:
    """Its experts went through Triton, whose bundled ptxas was too old for sm_120a: exit 255 while capturing."""


@needs_sm120
@needs_package("flashinfer-python>=0.6.12")
@one
@serves("sglang", "qwen3-8b", SMALL, "--attention-backend flashinfer", portable=True)
@fits
@claim(
    id="flashinfer-2577",
    title="FlashInfer finds an nvcc that is new enough",
    source="flashinfer-ai/flashinfer#2577",
    minutes=5,
)
def test_flashinfer_finds_its_compiler() -> None:
    """It took an old nvcc from /usr/bin, and said "SM 12.x requires CUDA >= 12.9" on a stack that had it."""


@needs_sm120
@eight
@needs_package("sglang>=0.5.9")
@serves("sglang", "glm-5.2-nvfp4", SMALL, layout="TP8", portable=True)
@fits
@claim(
    id="sglang-29562",
    title="GLM-5.2 NVFP4 loads with the default flags",
    source="sgl-project/sglang#29562, sgl-project/sglang#29580",
    minutes=15,
)
def test_glm_nvfp4_loads() -> None:
    """Its shared experts are not quantized; fusing them with those that are ended in 3072 against 6144.

    The weights themselves are what is loaded here, so no dummy does.
    """


@needs_sm120
@eight
@needs_package("sglang>=0.5.9")
@serves("sglang", "glm-5.2-nvfp4", SMALL, "--disable-shared-experts-fusion", layout="TP8", portable=True)
@fits
@claim(
    id="sglang-29562.cure",
    title="GLM-5.2 NVFP4 loads without fused shared experts",
    source="sgl-project/sglang#29562",
    minutes=15,
)
def test_glm_nvfp4_loads_without_fusion() -> None:
    """What helped then. When only this holds, the defect is back."""


@needs_sm120
@eight
@needs_package("sglang>=0.5.9")
@serves("sglang", "glm-5.2-nvfp4", SMALL, layout="TP8", portable=True)
@works
@claim(
    id="sglang-34629",
    title="GLM-5.2 NVFP4 answers without NaN",
    source="sgl-project/sglang#34629 (seen on B200)",
    minutes=5,
)
def test_glm_nvfp4_answers() -> None:
    """A new FlashInfer chose an NVFP4 tile that gave NaN logits: the server stayed up, and every answer was wrong."""


@needs_sm120
@two_large
@needs_package("sglang>=0.5.10")
@serves("sglang", "qwen3.6-27b", SMALL, DUMMY, "--attention-backend flashinfer", layout="TP2", portable=True)
@fits
@claim(
    id="sglang-35080",
    title="a hybrid GDN model takes flashinfer",
    source="sgl-project/sglang#35080, sgl-project/sglang#20709; sglang/srt/layers/attention/attention_registry.py",
    minutes=4,
)
def test_hybrid_gdn_takes_flashinfer() -> None:
    """Refused up to 0.5.9, then allowed, then refused again elsewhere on Blackwell: gates come back, so this stays."""


@needs_sm120
@one_large
@serves("vllm", "qwen3-30b-a3b-fp8", "--max-model-len 8192")
@fits
@claim(
    id="vllm-32109",
    title="vLLM boots an FP8 mixture of experts",
    source="vllm-project/vllm#32109",
    minutes=6,
)
def test_vllm_boots_fp8_experts() -> None:
    """It chose a kernel that was not compiled for SM120 and failed while profiling, with words about memory."""


# --------------------------------------------------------------------------------- what CUDA 13 was to unblock


@needs_sm120
@two_large
@needs_cuda(">=13")
@serves("sglang", "qwen3-30b-a3b", SMALL, DUMMY, "--enable-flashinfer-allreduce-fusion", layout="TP2", portable=True)
@uses("flashinfer allreduce fusion")
@claim(
    id="F16",
    title="CUDA 13 brings FlashInfer allreduce fusion",
    source=NOTES,
    status="hearsay",
    recheck="2027-03-01",
    minutes=3,
)
def test_cuda13_brings_allreduce_fusion() -> None:
    """Why all this is written down: F9, F14 and F15 were expected to flip with the upgrade.

    What F9 really waits for is kernels for SM12x in FlashInfer and a gate in SGLang that lets them through.
    """


@needs_sm120
@two
@needs_cuda(">=13")
@serves("sglang", "qwen3-8b", SMALL, DUMMY, "--enable-torch-symm-mem", layout="TP2", portable=True)
@uses("torch symmetric memory")
@claim(
    id="F16.symm-mem",
    title="CUDA 13 brings Torch symmetric memory",
    source=NOTES,
    status="hearsay",
    recheck="2027-03-01",
    minutes=3,
)
def test_cuda13_brings_symmetric_memory() -> None:
    """F14 waits for a row in SGLang's table, and for multicast, which PCIe does not have."""


@needs_sm120
@has_kimi
@eight
@needs_cuda(">=13")
@serves("sglang", "kimi-k2.5", KIMI, GRAPH, EAGLE3, STEPS, layout="TP8", portable=True)
@compare(
    other=serves("sglang", "kimi-k2.5", KIMI, GRAPH, layout="TP8", portable=True),
    ratio=">1",
    concurrency=1,
    input_len=128,
    output_len=512,
)
@claim(
    id="F16.eagle3",
    title="CUDA 13 makes EAGLE-3 worth it",
    source=NOTES,
    status="hearsay",
    recheck="2027-03-01",
    minutes=50,
)
def test_cuda13_makes_eagle3_worth_it() -> None:
    """F15 turned round: only a faster allreduce can do that."""
