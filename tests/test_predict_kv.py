"""Bytes a token, pools beside it, and the verdict that a budget comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpuguard.predict import Box, predict
from pytest_gpuguard.predict.values import Prediction
from tests.predict_models import DENSE, FP8_EXPERTS, H100, H200, HYBRID, LATENT, RTX, WINDOWED, changed

GIB = 1 << 30


def served(
    model: dict[str, Any], flags: str, version: str = "0.5.12", box: Box = H100, **measured: float
) -> Prediction:
    return predict(model, box, version=version, flags=flags.split(), measured=measured)


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_keys_and_values_of_the_heads_of_a_rank(tp: int, heads: int) -> None:
    assert served(DENSE, f"--tp-size {tp}").kv_cell_bytes == heads * 2 * 128 * 16 * 2


def test_a_latent_is_the_same_on_every_rank() -> None:
    boxes = {8: H200, 16: replace(H200, count=16)}
    sizes = {served(LATENT, f"--tp-size {tp}", box=box).kv_cell_bytes for tp, box in boxes.items()}
    assert sizes == {576 * 61 * 2}


@pytest.mark.parametrize(("dtype", "element"), [("fp8_e4m3", 1), ("bfloat16", 2), ("auto", 2)])
def test_the_cache_dtype_counts(dtype: str, element: int) -> None:
    assert served(DENSE, f"--kv-cache-dtype {dtype}").kv_cell_bytes == 4 * 2 * 128 * 16 * element


def test_a_checkpoint_with_scales_for_its_cache_is_served_with_an_fp8_cache() -> None:
    told = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    found = served(DENSE | {"quantization_config": told}, "--tp-size 1")
    assert (found.resolved["kv_cache_dtype"], found.kv_cell_bytes) == ("fp8_e4m3", 4 * 2 * 128 * 16)


def test_a_published_log_comes_out_exactly() -> None:
    # 367404 tokens took 8.23 + 8.23 GB: 94 layers, one KV head of 128 a rank (vllm-project/vllm#21348).
    model = changed(FP8_EXPERTS, num_hidden_layers=94, num_key_value_heads=4, num_attention_heads=64, hidden_size=4096)
    found = served(model, "--tp-size 4 --max-total-tokens 367404", box=H200)
    assert found.kv_tokens == 367404
    assert found.kv_gib == pytest.approx(8.23 + 8.23, abs=0.01)


SPARSE = {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048}


def test_sparse_attention_keeps_keys_of_its_indexer() -> None:
    model = changed(LATENT["text_config"], **SPARSE)
    assert served(model, "--tp-size 8 --kv-cache-dtype bfloat16", box=H200).kv_cell_bytes == (1152 + 132) * 61
    old = served(model, "--tp-size 8 --kv-cache-dtype fp8_e4m3", "0.5.12", H200)
    new = served(model, "--tp-size 8 --kv-cache-dtype fp8_e4m3", "0.5.18", H200)
    assert (old.kv_cell_bytes, new.kv_cell_bytes) == ((576 + 132) * 61, (656 + 132) * 61)
    assert old.resolved["page_size"] == 64


def test_layers_that_share_an_indexer_keep_no_keys_since_0_5_18() -> None:
    kinds = ["full"] * 3 + ["shared", "shared", "shared", "full"] * 14 + ["shared", "shared"]
    model = changed(LATENT["text_config"], indexer_types=kinds, **SPARSE)
    cells = [
        served(model, "--tp-size 8 --kv-cache-dtype bfloat16", version, H200).kv_cell_bytes
        for version in ("0.5.17", "0.5.18")
    ]
    assert cells == [(1152 + 132) * 61, 1152 * 61 + 132 * 17]
    weights = [served(model, "--tp-size 8", version, H200).parts_gib["indexer"] for version in ("0.5.17", "0.5.18")]
    assert weights[1] == pytest.approx(weights[0] * 17 / 61, rel=0.01)


def test_windowed_layers_have_a_pool_of_their_own() -> None:
    each = 4 * 2 * 128 * 2
    assert served(WINDOWED, "--tp-size 1", "0.5.12").kv_cell_bytes == each * (1 + 0.8 * 5)
    assert served(WINDOWED, "--tp-size 1 --swa-full-tokens-ratio 0.1").kv_cell_bytes == each * (1 + 0.1 * 5)
    assert served(WINDOWED, "--tp-size 1", "0.5.7").kv_cell_bytes == each * 6


def test_a_windowed_pool_is_sized_by_requests_where_those_are_bounded() -> None:
    flags = "--tp-size 1 --disable-radix-cache --max-running-requests 64"
    found = served(WINDOWED, flags, "0.5.16")
    assert found.kv_cell_bytes == 4 * 2 * 128 * 2
    assert (found.kv_tokens or 0) > (served(WINDOWED, "--tp-size 1", "0.5.16").kv_tokens or 0)


def test_models_that_scale_their_queries_are_served_without_window_pools() -> None:
    found = served(WINDOWED | {"query_pre_attn_scalar": 256}, "--tp-size 1")
    assert found.kv_cell_bytes == 4 * 2 * 128 * 2 * 6


def test_linear_attention_shares_the_budget_between_state_and_tokens() -> None:
    found = served(HYBRID, "--tp-size 1", "0.5.10")
    assert found.kv_cell_bytes == 2 * (4 * 2 * 128) * 2
    each = 6 * (10240 * 3 * 2 + 48 * 128 * 128 * 4)
    assert found.rest_gib is not None
    assert found.state_gib is not None
    assert found.kv_gib is not None
    slots = int(found.rest_gib * GIB * 0.9 / 1.9 // each)
    assert found.state_gib == pytest.approx(slots * each / GIB, abs=0.03)
    assert found.kv_gib == pytest.approx(found.rest_gib - found.state_gib, abs=0.01)


def test_the_state_shrinks_with_its_dtype_and_with_a_bound() -> None:
    whole = served(HYBRID, "--tp-size 1 --disable-radix-cache --max-running-requests 32")
    half = served(HYBRID, "--tp-size 1 --disable-radix-cache --max-running-requests 32 --mamba-ssm-dtype bfloat16")
    assert whole.state_gib is not None
    assert half.state_gib is not None
    assert whole.state_gib == pytest.approx(32 * 6 * (10240 * 6 + 48 * 16384 * 4) / GIB, abs=0.01)
    assert half.state_gib < 0.6 * whole.state_gib


COMPRESSED = {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "sliding_window": 128,
    "hc_mult": 4,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_compressed_attention_takes_the_bytes_that_were_printed() -> None:
    # "bytes_per_full_token=15955.85" of a boot with --page-size 256 and swa_full_tokens_ratio 0.1.
    found = served(COMPRESSED, "--tp-size 8", "0.5.12", H200)
    assert found.kv_cell_bytes == pytest.approx(15955.85, abs=0.05)
    assert found.resolved["page_size"] == 256
    assert (found.kv_tokens or 0) % 256 == 0
    # The engine sets that page, whatever is asked for.
    assert served(COMPRESSED, "--tp-size 8 --page-size 64", "0.5.12", H200).resolved["page_size"] == 256


def test_compressed_attention_keeps_its_rotary_table_in_two_forms_since_0_5_15() -> None:
    before, after = (served(COMPRESSED, "--tp-size 8", version, H200).parts_gib for version in ("0.5.12", "0.5.15"))
    assert after["rotary"] == pytest.approx(2 * before["rotary"], abs=0.002)


def test_tokens_are_whole_pages_and_no_more_than_asked() -> None:
    assert (served(DENSE, "--page-size 64").kv_tokens or 0) % 64 == 0
    assert served(DENSE, "--max-total-tokens 1000 --page-size 64").kv_tokens == 960


def test_a_draft_takes_its_part_of_a_token_since_0_5_14() -> None:
    flags = "--tp-size 1 --speculative-algorithm EAGLE --speculative-num-draft-tokens 4"
    model = changed(DENSE, num_nextn_predict_layers=1)
    old, new = served(model, flags, "0.5.12"), served(model, flags, "0.5.14")
    assert (old.kv_cell_bytes or 0) * (1 + 1 / 16) == new.kv_cell_bytes
    assert (old.avail_after_weights_gib or 0) > (new.avail_after_weights_gib or 0)


def test_the_budget_is_what_is_free_less_what_is_held_back() -> None:
    found = served(DENSE, "--tp-size 1 --mem-fraction-static 0.8", avail_before_gib=78.0, weights_gib=10.0)
    assert found.reserved_gib == pytest.approx(15.6)
    assert found.rest_gib == pytest.approx(68.0 - 15.6)
    assert found.kv_tokens == int((68.0 - 15.6) * GIB / (4 * 2 * 128 * 16 * 2))
    assert found.f_min == pytest.approx(10 / 78, abs=1e-4)


def test_the_weights_may_be_known_by_what_is_left() -> None:
    found = served(DENSE, "--tp-size 1", avail_before_gib=78.0, avail_after_weights_gib=60.0)
    assert found.weights_gib == pytest.approx(18.0)


def test_the_table_of_requests_grows_with_the_context() -> None:
    short = served(DENSE, "--tp-size 1 --context-length 8192")
    long = served(DENSE, "--tp-size 1 --context-length 131072")
    assert long.req_to_token_gib == pytest.approx(4096 * (131072 + 4) * 4 / GIB, abs=0.001)
    assert (short.req_to_token_gib or 0) < (long.req_to_token_gib or 0)
    few = served(DENSE, "--tp-size 1 --context-length 131072 --max-running-requests 256")
    assert few.req_to_token_gib == pytest.approx(256 * (131072 + 4) * 4 / GIB, abs=0.001)


def test_a_pool_that_does_not_fit_names_the_window_that_cures_it() -> None:
    flags = "--tp-size 8 --ep-size 8 --cuda-graph-max-bs 128 --chunked-prefill-size 8192"
    found = served(LATENT, flags, "0.5.7", RTX, weights_gib=77.7, avail_before_gib=94.0)
    assert (found.verdict, found.phase) == ("oom.kv_pool", "kv_pool")
    assert found.rest_gib == pytest.approx(16.3 - 20.8, abs=0.01)
    assert (found.f_min, found.f_max) == (0.8266, 0.8537)
    assert "0.83 to 0.85" in found.explanation
    cured = served(LATENT, f"{flags} --mem-fraction-static 0.85", "0.5.7", RTX, weights_gib=77.7, avail_before_gib=94.0)
    assert cured.verdict == "fits"


def test_four_gpus_cannot_hold_what_eight_can() -> None:
    found = served(LATENT, "--tp-size 4 --ep-size 2 --mem-fraction-static 0.9", "0.5.7", RTX)
    assert (found.verdict, found.phase, found.gpus_used) == ("oom.weights", "weights", 4)
    assert "uses 4 of 8 GPUs: EP subdivides TP and adds none" in found.explanation
    assert "TP8 would hold" in found.explanation
    assert served(LATENT, "--tp-size 8 --ep-size 8 --mem-fraction-static 0.85", "0.5.7", RTX).verdict == "fits"


def test_a_fraction_that_leaves_nothing_for_graphs_ends_in_their_capture() -> None:
    found = served(DENSE, "--tp-size 1 --mem-fraction-static 0.999 --context-length 131072")
    assert (found.verdict, found.phase) == ("oom.graph_capture", "graph_capture")


@pytest.mark.parametrize(
    ("model", "flags", "version", "text", "phase"),
    [
        (LATENT, "--tp-size 2 --ep-size 4", "0.5.7", "tp_size 2 must be divisible by ep_size 4", "args"),
        (
            LATENT,
            "--tp-size 4 --ep-size 2 --moe-runner-backend flashinfer_cutlass",
            "0.5.7",
            "parallel size must",
            "args",
        ),
        (LATENT, "--tp-size 16", "0.5.7", "needs 16 GPUs and the rig has 8", "init"),
        (DENSE, "--tp-size 3", "0.5.7", "16 attention heads are not divisible", "weights"),
        (DENSE, "--tp-size 8 --dp-size 3 --enable-dp-attention", "0.5.7", "divisible by dp_size 3", "args"),
        (FP8_EXPERTS, "--tp-size 8", "0.5.7", "= 96 is not divisible by weight quantization block_n = 128", "weights"),
        (FP8_EXPERTS, "--tp-size 4 --ep-size 4 --moe-runner-backend cutlass", "0.5.7", "ep_size == 1", "args"),
    ],
)
def test_what_the_engine_refuses_is_refused_in_its_words(
    model: dict[str, Any], flags: str, version: str, text: str, phase: str
) -> None:
    found = served(model, flags, version, H200)
    assert (found.verdict, found.phase) == ("rejected", phase)
    assert text in found.rejections[0].text
    assert text in found.explanation


def test_whole_experts_make_wide_tensor_parallelism_legal() -> None:
    assert served(FP8_EXPERTS, "--tp-size 8 --ep-size 8", "0.5.7", H200).verdict == "fits"
