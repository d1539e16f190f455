"""Which kernels SM90 gets, and which are Blackwell's alone: attention, FP8, FP4 and the formats of the KV cache.

Read from the sources of the releases named beside each; nobody has run them by these claims yet. Small models with
random weights do: the gates look at the card.
"""

from __future__ import annotations

from pytest_gpuguard import claim, fits, needs_gpus, needs_package, needs_sm90, serves, unsupported, uses

one = needs_gpus(1, vram="80GB")
eight_large = needs_gpus(8, vram="140GB", link="nvlink")

SMALL = (
    "--context-length 8192 --chunked-prefill-size 4096 --max-running-requests 64 "
    "--mem-fraction-static 0.80 --cuda-graph-max-bs 32 --load-format dummy"
)
KIMI = (
    "--trust-remote-code --context-length 32768 --chunked-prefill-size 8192 "
    "--max-running-requests 128 --mem-fraction-static 0.85 --cuda-graph-max-bs 128 --load-format dummy"
)
GATES = "sglang/srt/server_args.py"


# ---------------------------------------------------------------------------------------------------- attention


@needs_sm90
@needs_package("sglang>=0.5.7")
@one
@serves("sglang", "qwen3-8b", SMALL, portable=True)
@uses("attention_backend=fa3")
@claim(
    id="H1",
    title="FlashAttention 3 is the default on Hopper",
    source=f"{GATES}; sglang/srt/arg_groups/model_override_base.py get_default_attn_backend",
    minutes=3,
)
def test_flash_attention_3_is_the_default() -> None:
    """Nobody asked for it: SM90 takes fa3, SM100 TensorRT-LLM's, everything else FlashInfer's."""


@needs_sm90
@needs_package("sglang>=0.5.9")
@eight_large
@serves("sglang", "kimi-k2.5", KIMI, layout="TP8", portable=True)
@uses("attention_backend=fa3")
@fits(kv_tokens=">=32768")
@claim(
    id="H1.latent",
    title="FlashAttention 3 is the default for latent attention too",
    source=f"{GATES}; sglang/srt/arg_groups/model_override_base.py get_default_attn_backend",
    minutes=5,
)
def test_flash_attention_3_is_the_default_for_latent_attention() -> None:
    """On SM120 a model with MLA falls to Triton; Hopper has a kernel for it. Eight cards of 140 GB hold the weights."""


@needs_sm90
@needs_package("sglang>=0.5.1")
@one
@serves("sglang", "qwen3-8b", SMALL, "--attention-backend trtllm_mha", portable=True)
@unsupported("trtllm_mha", how="rejected", match="only supported on Blackwell GPUs", when="sglang<0.5.19")
@fits(when="sglang>=0.5.19")
@claim(
    id="H2",
    title="TensorRT-LLM's MHA kernels are Blackwell's until 0.5.19",
    source=f"{GATES}; since 0.5.19 sglang/srt/arg_groups/attention_hook.py",
    minutes=3,
)
def test_trtllm_mha() -> None:
    """Since 0.5.19 the check takes SM90 as well, "Hopper (SM90), Blackwell (SM100), or SM120": a gate that moved."""


@needs_sm90
@needs_package("sglang>=0.4.10")
@one
@serves("sglang", "qwen3-8b", SMALL, "--attention-backend trtllm_mla", portable=True)
@unsupported("trtllm_mla", how="rejected", match="only supported on Blackwell GPUs")
@claim(
    id="H3",
    title="TensorRT-LLM's MLA kernels are Blackwell's",
    source=f"{GATES}; since 0.5.15 sglang/srt/arg_groups/overrides.py",
    recheck="2027-06-01",
    minutes=2,
)
def test_trtllm_mla() -> None:
    """Refused with a text before anything is loaded, since 0.4.10 knows the flag; only the list in it has grown."""


# ---------------------------------------------------------------------------------------------- FP4 and FP8


@needs_sm90
@needs_package("sglang>=0.5.20")
@one
@serves("sglang", "qwen3-8b", SMALL, "--kv-cache-dtype nvfp4", portable=True)
@unsupported("an NVFP4 KV cache", how="rejected", match="requires Blackwell SM100 or SM120")
@claim(id="H4", title="an FP4 KV cache needs Blackwell", source=GATES, recheck="2027-06-01", minutes=2)
def test_fp4_kv_cache() -> None:
    """FP4 is no format of Hopper's tensor cores: weights in it are unpacked by Marlin, and a KV cache is refused."""


@needs_sm90
@needs_package("sglang>=0.5.20")
@one
@serves("sglang", "qwen3-8b", SMALL, "--kv-cache-dtype mxfp8", portable=True)
@unsupported("an MXFP8 KV cache", how="rejected", match=r"requires an SM100\+ \(Blackwell\) GPU")
@claim(id="H4.mxfp8", title="a block-scaled FP8 KV cache needs Blackwell", source=GATES, minutes=2)
def test_mxfp8_kv_cache() -> None:
    """Plain fp8_e4m3 is Hopper's own format; the block-scaled one is not."""


@needs_sm90
@one
@serves("sglang", "gpt-oss-20b", SMALL, portable=True)
@fits
@claim(
    id="H5",
    title="a model in MXFP4 boots although FP4 is not native",
    source="sglang/srt/layers/quantization/mxfp4.py",
    status="hearsay",
    minutes=3,
)
def test_a_model_in_mxfp4() -> None:
    """Its experts go through Triton or Marlin there, and FlashInfer's kernels want 0.6.11. Which, was not recorded."""


@needs_sm90
@one
@serves("sglang", "qwen3-30b-a3b-fp8", SMALL, portable=True)
@uses("deepgemm_jit")
@claim(
    id="H6",
    title="FP8 matrices go through DeepGEMM on Hopper",
    source="sglang/srt/layers/deep_gemm_wrapper; --fp8-gemm-backend auto: DeepGEMM before FlashInfer and Triton",
    minutes=6,
)
def test_deep_gemm_for_fp8() -> None:
    """Its own sources compile at the first start, which takes minutes; without the package SGLang says nothing."""
