"""What somebody knows of SGLang on RTX PRO 6000, written down while CUDA 12.8 was current: docs/upgrade.md."""

from __future__ import annotations

from pytest_gpuguard import claim, fits, needs_gpus, needs_sm120, serves, unsupported

SMALL = "--mem-fraction-static 0.8 --context-length 32768"


@needs_sm120
@needs_gpus(2)
@serves("sglang", "qwen3-8b", SMALL, "--enable-flashinfer-allreduce-fusion", layout="TP2")
@unsupported("flashinfer allreduce fusion", how="crashes", match="No supported CUDA architectures")
@claim(id="allreduce-fusion", source="a boot of ours: its JIT knows majors 9 and 10 only")
def test_allreduce_fusion_crashes() -> None:
    """The workaround is to leave it off, which costs latency at small batches."""


@needs_sm120
@needs_gpus(2)
@serves("sglang", "qwen3-8b", SMALL, "--enable-torch-symm-mem", layout="TP2")
@unsupported("torch symmetric memory", how="crashes", match="KeyError: 12")
@claim(id="symmetric-memory", source="a boot of ours: the table of multimem sizes has no major 12")
def test_symmetric_memory_crashes() -> None:
    """The workaround is not to ask for it."""


@needs_sm120
@needs_gpus(2)
@serves("sglang", "qwen3-30b-a3b", SMALL, layout="TP2 EP2")
@fits(kv_tokens=">=262144")
@claim(id="experts-fit")
def test_the_experts_fit_on_two_cards() -> None:
    """What production runs."""
