"""vLLM's rules: its defaults, its stages and experts, what the profile run takes, its blocks, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpuguard.claims.layout import Layout
from pytest_gpuguard.predict import Box, PredictError, predict
from pytest_gpuguard.predict.values import Prediction
from tests.predict_models import (
    DENSE,
    FP8_EXPERTS,
    H100,
    H200,
    HYBRID,
    LATENT,
    MI355X,
    RTX,
    SMALL,
    WINDOWED,
    changed,
)

GIB = 1 << 30
B200 = Box("b200", 8, 183359, 726, "100", True)
EXPERTS = changed(FP8_EXPERTS, quantization_config=None)
LATENT_PLAIN = changed(LATENT, quantization_config=None, n_routed_experts=16)
SPARSE = changed(LATENT, index_n_heads=64, index_head_dim=128, index_topk=2048, max_position_embeddings=32768)


def served(
    model: dict[str, Any],
    flags: str | Sequence[str] = "",
    version: str | None = "0.20.2",
    box: Box = H100,
    layout: Layout | None = None,
    **measured: float,
) -> Prediction:
    argv = flags.split() if isinstance(flags, str) else flags
    return predict(model, box, "vllm", version, argv, measured=measured, layout=layout)


# Flags and defaults


@pytest.mark.parametrize(
    ("version", "utilization"), [("0.6.6", 0.9), ("0.19.1", 0.9), ("0.20.0", 0.92), ("0.33.0", 0.92)]
)
def test_the_default_utilization_is_that_of_the_release(version: str, utilization: float) -> None:
    assert served(DENSE, version=version).mem_fraction_static == utilization


@pytest.mark.parametrize(
    ("flags", "version", "box", "batched", "seqs"),
    [
        ("", "0.10.1", H100, 8192, 1024),
        ("", "0.10.1", SMALL, 2048, 256),
        ("", "0.10.1", replace(H100, name="NVIDIA A100-SXM4-80GB"), 2048, 256),
        ("", "0.8.5", replace(H100, name="NVIDIA A100-SXM4-80GB"), 8192, 1024),
        ("", "0.26.0", B200, 8192, 1024),
        ("", "0.29.0", B200, 16384, 1024),
        ("--max-num-batched-tokens 1024", "0.10.1", H100, 1024, 1024),
        ("--max-num-batched-tokens 512", "0.10.1", H100, 512, 512),
        ("--max-num-seqs 64", "0.20.2", H100, 8192, 64),
        ("--no-enable-chunked-prefill --max-model-len 8192", "0.20.2", SMALL, 8192, 256),
        ("--max-model-len 4000", "0.6.6", H100, 4000, 256),
        ("--max-model-len 1000", "0.6.6", H100, 2048, 256),
    ],
)
def test_one_step_is_as_large_as_card_and_release_make_it(
    flags: str, version: str, box: Box, batched: int, seqs: int
) -> None:
    made = served(DENSE, flags, version, box).resolved
    assert (made["max_num_batched_tokens"], made["max_num_seqs"]) == (batched, seqs)


@pytest.mark.parametrize(("version", "batched"), [("0.6.4", 512), ("0.6.6", 2048)])
def test_a_long_context_was_chunked_by_itself_before_v1(version: str, batched: int) -> None:
    long = changed(DENSE, max_position_embeddings=131072)
    assert served(long, version=version).resolved["max_num_batched_tokens"] == batched


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-parallel-size 2 --max-model-len 4096",
        "--tensor_parallel_size=2 --max_model_len=4096",
        "-tp 2 --max-model-len 4096",
        "-tp=2 --max-model-len 4K",
    ],
)
def test_the_spellings_of_a_flag_are_one(flags: str) -> None:
    made = served(DENSE, flags)
    assert (made.layout, made.resolved["max_model_len"]) == (Layout(tp=2), 4096)


def test_a_small_letter_is_a_thousand() -> None:
    assert served(DENSE, "--max-model-len 4k").resolved["max_model_len"] == 4000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--gpu-memory-utilization 1.2", "--gpu-memory-utilization 1.2 is impossible"),
        ("--gpu-memory-utilization -0.1", "impossible: it is at least 0"),
        ("--gpu-memory-utilization lots", "'lots' is not a number"),
        ("-tp 0", "impossible: it is at least 1"),
        ("--max-model-len 1.5", "is not a whole number"),
        ("--cpu-offload-gb -1", "impossible: it is at least 0"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
        ("--speculative-config {broken", "is no JSON"),
    ],
)
def test_impossible_flags_are_named(flags: str, said: str) -> None:
    with pytest.raises(PredictError, match=said.replace("(", "\\(")):
        served(DENSE, flags)


@pytest.mark.parametrize(
    ("version", "rules", "said"),
    [
        ("0.20.2", "0.20.2", None),
        ("0.10.0", "0.9.2", "0.10.0 was not read"),
        ("0.5.0", "0.6.4.post1", "older than what is known"),
        ("0.99.0", "0.33.0", "newer than what is known"),
        (None, "0.33.0", "no release is given"),
        ("main", "0.33.0", "'main' is no release"),
    ],
)
def test_the_nearest_rules_are_used_and_that_is_said(version: str | None, rules: str, said: str | None) -> None:
    found = served(DENSE, version=version)
    assert found.rules == rules
    assert said is None or any(said in note for note in found.assumptions)
    assert said is not None or not any("rules of" in note for note in found.assumptions)


# Weights


def dense_gib(layers: int, tables: int) -> float:
    """Bytes of the dense model: four attention matrices with four KV heads of sixteen, three of the MLP, two norms."""
    attention = 2048 * 2048 * 2 + 2 * 2048 * 512
    layer = attention + 3 * 2048 * 8192 + 2 * 2048
    return (layers * layer + tables * 32000 * 2048 + 8192 * 128) * 2 / GIB


def test_a_rank_holds_what_the_arithmetic_says() -> None:
    # The rotary table is in the model's dtype: 2 bytes, where SGLang has 4.
    assert served(DENSE).weights_gib == pytest.approx(dense_gib(16, 2), abs=0.001)


@pytest.mark.parametrize(
    ("version", "layers"),
    [("0.7.2", (4, 4, 4, 6)), ("0.8.0", (4, 5, 5, 4)), ("0.20.2", (4, 5, 5, 4))],
)
def test_left_over_layers_go_to_the_last_stage_once_and_to_the_middle_later(
    version: str, layers: tuple[int, ...]
) -> None:
    model = changed(DENSE, num_hidden_layers=18)
    stages = served(model, "-pp 4 --max-model-len 1024", version).stages_gib
    tables = (1, 0, 0, 1)
    expected = [dense_gib(count, table) for count, table in zip(layers, tables, strict=True)]
    assert stages == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize(("version", "heads"), [("0.6.6", 1), ("0.7.2", 1), ("0.8.0", 0)])
def test_latent_models_had_the_output_layer_on_every_stage(version: str, heads: int) -> None:
    box = replace(H200, count=16)
    staged = served(changed(LATENT_PLAIN, num_hidden_layers=60), "-tp 8 -pp 2", version, box)
    half = served(changed(LATENT_PLAIN, num_hidden_layers=30), "-tp 8", version, box)
    without = (half.weights_gib or 0) - half.parts_gib["head"]
    assert staged.stages_gib[0] == pytest.approx(without + heads * half.parts_gib["head"], abs=0.002)


def test_absorbed_copies_came_with_the_latent_cache() -> None:
    copies = 61 * 64 / 8 * (128 + 128) * 512 * 2 / GIB
    old, new = (served(LATENT_PLAIN, "-tp 8", version, H200).weights_gib or 0.0 for version in ("0.6.6", "0.8.0"))
    assert new - old == pytest.approx(copies, abs=0.002)


def test_products_of_projections_were_kept_for_a_while() -> None:
    between, after = (served(LATENT_PLAIN, "-tp 8", version, H200).weights_gib or 0.0 for version in ("0.7.2", "0.8.0"))
    products = 61 * (64 / 8) * (512 * (1536 + 7168) + 64 * 1536) * 2 / GIB
    assert between - after == pytest.approx(products, abs=0.002)


def test_experts_are_whole_on_a_rank_with_expert_parallel_and_weigh_the_same() -> None:
    split, whole = served(EXPERTS, "-tp 8"), served(EXPERTS, "-tp 8 --enable-expert-parallel")
    assert whole.layout == Layout(tp=8, ep=8)
    assert split.parts_gib["experts"] == whole.parts_gib["experts"]
    assert "whole experts, 16 of 128 a rank" in whole.explanation


def test_data_parallel_ranks_share_the_experts_and_repeat_the_rest() -> None:
    alone = served(EXPERTS, "-tp 2")
    for flags in ("-tp 2 -dp 4", "-tp 2 -dp 4 --enable-expert-parallel"):
        found = served(EXPERTS, flags)
        assert found.gpus_used == 8
        assert found.parts_gib["experts"] == pytest.approx(alone.parts_gib["experts"] / 4, abs=0.001)
        assert found.parts_gib["attention"] == alone.parts_gib["attention"]


def test_dense_replicas_share_nothing() -> None:
    one, four = served(DENSE), served(DENSE, "-dp 4")
    assert (one.weights_gib, one.gpus_used, four.gpus_used) == (four.weights_gib, 1, 4)


def test_a_declared_layout_goes_before_the_flags() -> None:
    found = served(EXPERTS, "-tp 2", layout=Layout(tp=8, ep=8))
    assert found.layout == Layout(tp=8, ep=8)


def test_attention_replicas_inside_of_tp_are_data_parallel_ranks() -> None:
    found = served(EXPERTS, layout=Layout(tp=8, dp=8, ep=8))
    assert (found.layout.tp, found.layout.dp, found.layout.ep, found.gpus_used) == (1, 8, 8, 8)
    assert any("-tp 1 -dp 8" in note for note in found.assumptions)


def test_an_ep_that_vllm_does_not_have_is_said() -> None:
    found = served(EXPERTS, layout=Layout(tp=8, ep=2))
    assert found.layout.ep == 8
    assert any("all 8 ranks or over none" in note for note in found.assumptions)


@pytest.mark.parametrize(
    ("version", "box", "pad"),
    [
        ("0.10.1", H100, (128, 256)),
        ("0.20.2", H100, (64, 1)),
        ("0.20.2", B200, (256, 256)),
        ("0.20.2", RTX, (128, 256)),
        ("0.20.2", MI355X, (256, 256)),
    ],
)
def test_mxfp4_experts_are_padded_for_the_kernels_of_the_card(version: str, box: Box, pad: tuple[int, int]) -> None:
    model = changed(
        EXPERTS, hidden_size=2880, moe_intermediate_size=2880, quantization_config={"quant_method": "mxfp4"}
    )
    inner, hidden = -(-2880 // pad[0]) * pad[0], -(-2880 // pad[1]) * pad[1]
    expected = 24 * 128 * 3 * inner * hidden * (4 + 8 / 32) / 8 / GIB
    assert served(model, version=version, box=box).parts_gib["experts"] == pytest.approx(expected, rel=0.001)


def test_offloaded_weights_leave_the_card() -> None:
    whole, offloaded = served(DENSE), served(DENSE, "--cpu-offload-gb 1")
    assert (whole.weights_gib or 0) - (offloaded.weights_gib or 0) == pytest.approx(1, abs=0.001)


def test_fp8_may_be_made_while_loading() -> None:
    full, eight = served(DENSE), served(DENSE, "--quantization fp8")
    assert eight.parts_gib["dense MLP"] == pytest.approx(full.parts_gib["dense MLP"] / 2, rel=0.002)
    assert eight.parts_gib["embedding"] == full.parts_gib["embedding"]
    other = served(DENSE, "--quantization awq")
    assert other.weights_gib == full.weights_gib
    assert any("as they are in the checkpoint" in note for note in other.assumptions)


def test_a_vision_tower_is_left_out_on_request() -> None:
    whole, text = (served(LATENT, f"-tp 8 {flags}", box=H200) for flags in ("", "--language-model-only"))
    assert whole.parts_gib["vision"] > 0
    assert "vision" not in text.parts_gib
    assert any("images are not counted" in note for note in whole.assumptions)


def test_the_draft_of_the_checkpoint_is_part_of_the_weights() -> None:
    spec = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3})]
    without, drafting = served(DENSE), served(DENSE, spec)
    layer = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    expected = (layer + 2 * 2048 * 2048) * 2 / GIB
    assert (drafting.weights_gib or 0) - (without.weights_gib or 0) == pytest.approx(expected, abs=0.002)
    assert drafting.kv_cell_bytes == 17 / 16 * (without.kv_cell_bytes or 0)


def test_a_draft_without_a_model_weighs_nothing() -> None:
    spec = ["--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3})]
    assert served(DENSE, spec).weights_gib == served(DENSE).weights_gib


# The budget


def test_the_budget_is_a_share_of_the_card_without_what_is_in_use() -> None:
    found = served(DENSE, "--gpu-memory-utilization 0.8", "0.19.1")
    made = found.resolved
    total = (81559 - 479) / 1024
    taken = (found.weights_gib or 0) + made["profile_peak_gib"] + made["outside_torch_gib"]
    assert found.rest_gib == pytest.approx(0.8 * total - taken, abs=0.003)
    assert found.reserved_gib == pytest.approx((found.avail_after_weights_gib or 0) - (found.rest_gib or 0), abs=0.002)


@pytest.mark.parametrize("context", [20000, 29000])
def test_without_chunks_the_peak_is_the_widest_layer_over_the_whole_context(context: int) -> None:
    # Gate and up, their product, and three of the hidden size, 16 bits each. Two boots of a model four times as wide
    # had 2.07 and 2.99 GiB (vllm-project/vllm#10517).
    model = changed(DENSE, max_position_embeddings=131072)
    found = served(model, f"--max-model-len {context} --max-num-seqs 16", "0.6.4.post1")
    assert found.resolved["profile_peak_gib"] == pytest.approx(context * (3 * 8192 + 3 * 2048) * 2 / GIB, abs=0.001)


@pytest.mark.parametrize(
    ("version", "each"), [("0.6.6", 39), ("0.11.0", 39), ("0.16.0", 39), ("0.18.0", 14), ("0.29.0", 8)]
)
def test_the_sampler_is_warmed_up_with_all_requests(version: str, each: int) -> None:
    # 1.26 GiB for 256 requests of 128256 tokens, whatever TP is (vllm-project/vllm#10511).
    model = changed(DENSE, vocab_size=201088)
    found = served(model, "--max-num-seqs 1024 --max-num-batched-tokens 1024 --max-model-len 1024", version)
    expected = (1024 * 201088 * each + 1024 * 2048 * 2) / GIB
    assert found.resolved["profile_peak_gib"] == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize(
    ("flags", "version", "box", "outside"),
    [
        ("", "0.6.4", SMALL, 0.35),
        ("-tp 2", "0.6.4", SMALL, 0.25 + 0.03),  # communicators over PCIe
        ("", "0.8.5", H100, 0.35 + 0.72),  # the CUDA context counts as the engine's own
        ("", "0.9.2", H100, 0.35),
        ("-tp 4", "0.9.2", H100, 1.05 + 3 * 0.14),  # communicators over NVLink
        ("-tp 4", "0.11.0", H100, 1.05),  # they are there before the snapshot
    ],
)
def test_memory_outside_of_torch_counts_as_the_release_counts(
    flags: str, version: str, box: Box, outside: float
) -> None:
    assert served(DENSE, flags, version, box).resolved["outside_torch_gib"] == pytest.approx(outside, abs=0.001)


def test_graphs_are_counted_since_they_are_estimated_and_not_without_them() -> None:
    def estimated(version: str, flags: str = "", box: Box = H100) -> float:
        return float(served(DENSE, flags, version, box).resolved["estimated_graphs_gib"])

    assert estimated("0.19.1") == 0
    assert 0.1 < estimated("0.20.0") < 0.3
    assert estimated("0.20.0", "--enforce-eager") == 0
    assert estimated("0.20.0", box=MI355X) == 0
    eager, graphs = served(DENSE, "--enforce-eager"), served(DENSE)
    assert (eager.kv_tokens or 0) > (graphs.kv_tokens or 0)


def test_a_measured_size_of_graphs_takes_the_place_of_the_estimate() -> None:
    found = served(EXPERTS, "-tp 8", graph_gib=6.5)
    assert found.resolved["estimated_graphs_gib"] == 6.5
    assert not any("graph_gib" in note for note in found.assumptions)
    assert any("graph_gib" in note for note in served(EXPERTS, "-tp 8").assumptions)


def test_measured_weights_take_the_place_of_the_rule() -> None:
    found = served(DENSE, weights_gib=40.0)
    assert found.weights_gib == 40.0
    assert found.bars["weights_gib"] == 0
    rest = (served(DENSE).rest_gib or 0) + (served(DENSE).weights_gib or 0) - 40
    assert found.rest_gib == pytest.approx(rest, abs=0.002)


def test_a_given_size_of_the_cache_is_taken_as_it_is() -> None:
    found = served(DENSE, f"--kv-cache-memory-bytes {GIB}")
    assert (found.rest_gib, found.kv_tokens) == (1.0, GIB // (16 * 4 * 2 * 128 * 2))


def test_a_given_number_of_blocks_is_taken_as_it_is() -> None:
    assert served(DENSE, "--num-gpu-blocks-override 1000", "0.11.0").kv_tokens == 16000


# Blocks and tokens


def test_tokens_come_in_blocks() -> None:
    small, large = served(DENSE, version="0.11.0"), served(DENSE, "--block-size 128", "0.11.0")
    assert (small.kv_tokens or 1) % 16 == 0
    assert (large.kv_tokens or 1) % 128 == 0
    assert small.kv_gib == pytest.approx((small.kv_tokens or 0) * 4 * 2 * 128 * 2 * 16 / GIB, abs=0.001)


@pytest.mark.parametrize(
    ("flags", "version", "box", "cell"),
    [
        ("", "0.20.2", H200, 576 * 2),
        ("--kv-cache-dtype fp8", "0.20.2", H200, 576),
        ("", "0.6.6", H200, 64 // 8 * 2 * 256 * 2),
    ],
)
def test_a_latent_is_kept_since_0_7_and_expanded_heads_before(flags: str, version: str, box: Box, cell: int) -> None:
    found = served(LATENT_PLAIN, f"-tp 8 --max-model-len 4096 {flags}", version, box)
    assert found.kv_cell_bytes == cell * 61


def test_other_quantizations_had_no_latent_cache_at_first() -> None:
    int4 = changed(LATENT, num_hidden_layers=30)
    first, then = (served(int4, "-tp 8 --max-model-len 4096", version, H200) for version in ("0.7.2", "0.8.0"))
    assert (first.kv_cell_bytes, then.kv_cell_bytes) == (8 * 2 * 256 * 2 * 30, 576 * 2 * 30)


@pytest.mark.parametrize(
    ("flags", "version", "box", "cell"),
    [
        # 61464 bytes a token for 78 layers: 656 and the indexer's 132 (a boot on RTX PRO 6000).
        ("--kv-cache-dtype fp8", "0.20.2", RTX, 656 + 132),
        ("--kv-cache-dtype fp8", "0.20.2", B200, 576 + 132),
        ("", "0.20.2", RTX, 576 * 2 + 132),
        ("", "0.11.0", H200, 656 + 132),
    ],
)
def test_sparse_attention_packs_its_cache_and_keeps_its_keys(flags: str, version: str, box: Box, cell: int) -> None:
    found = served(SPARSE, f"-tp 8 --max-model-len 4096 {flags}", version, box)
    assert found.kv_cell_bytes == cell * 61


def test_decode_context_parallel_multiplies_the_tokens_and_nothing_else() -> None:
    one, eight = (served(LATENT, f"-tp 8 -dcp {dcp} --max-model-len 8192", box=H200) for dcp in (1, 8))
    assert eight.weights_gib == one.weights_gib
    assert eight.kv_tokens == 8 * (one.kv_tokens or 0)


def test_windowed_layers_have_blocks_of_their_own() -> None:
    # One full layer and five windowed ones: six groups of one layer, which share every block.
    found = served(WINDOWED, "--max-model-len 8192 --max-num-batched-tokens 2048", "0.11.0")
    page = 16 * 4 * 2 * 128 * 2
    blocks = int((found.rest_gib or 0) * GIB // page)
    assert found.kv_tokens == pytest.approx(blocks // 6 * 16, rel=0.001)


def test_newer_releases_print_what_requests_of_the_longest_context_hold() -> None:
    found = served(WINDOWED, "--max-model-len 8192 --max-num-batched-tokens 2048")
    blocks = (found.rest_gib or 0) * GIB / (16 * 4 * 2 * 128 * 2)
    each = 8192 / 16 + 5 * ((1024 - 1 + 2048 + 15) // 16 + 1)
    assert found.kv_tokens == pytest.approx(blocks / each * 8192, rel=0.001)


def test_without_the_hybrid_manager_a_window_is_kept_whole() -> None:
    for flags, version in (("--disable-hybrid-kv-cache-manager", "0.20.2"), ("", "0.8.5")):
        assert served(WINDOWED, flags, version).kv_cell_bytes == 6 * 4 * 2 * 128 * 2


def test_blocks_are_as_large_as_a_state_of_linear_attention() -> None:
    # Two full layers and six linear ones: four groups of two. A layer's state: 48 heads of 128 x 128 in float32, and
    # three inputs of its convolution.
    found = served(HYBRID, "--max-model-len 8192", "0.19.1")
    state = 48 * 128 * 128 * 4 + (2 * 16 * 128 + 48 * 128) * 3 * 2
    token = 4 * 2 * 128 * 2
    block = -(-state // (16 * token)) * 16
    blocks = int((found.rest_gib or 0) * GIB // (block * token * 2))
    assert found.kv_tokens == pytest.approx(blocks // 4 * block, rel=0.001)
    assert (found.kv_tokens or 1) % block == 0


# Verdicts


def test_a_context_longer_than_the_cache_is_refused() -> None:
    # Two boots of one model: 20000 fits, 29000 does not, on a 24 GB card at 0.9 (vllm-project/vllm#10517).
    model = changed(
        DENSE,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    box = Box("rtx-3090", 1, 24576, None, "86", False)
    fits, short = (served(model, f"--max-model-len {size}", "0.6.4", box) for size in (20000, 29000))
    assert (fits.verdict, short.verdict, short.phase) == ("fits", "oom.kv_pool", "kv_pool")
    assert fits.weights_gib == pytest.approx(14.9888, abs=0.005)
    assert fits.kv_tokens == pytest.approx(31232, rel=0.005)
    assert short.kv_tokens == pytest.approx(23648, rel=0.005)
    assert "larger than the available KV cache memory" in short.explanation
    assert fits.f_min is not None
    assert short.f_min is not None
    assert fits.f_min < 0.9 < short.f_min


def test_the_least_utilization_is_where_the_longest_request_fits() -> None:
    flags = "--max-model-len 8192 --max-num-seqs 32"
    least = served(DENSE, flags, box=SMALL).f_min or 0
    below, above = (
        served(DENSE, f"{flags} --gpu-memory-utilization {least + d:.4f}", box=SMALL) for d in (-0.003, 0.003)
    )
    assert (below.verdict, above.verdict) == ("oom.kv_pool", "fits")


def test_the_longest_context_that_fits_is_asked_for_with_auto() -> None:
    flags = "--gpu-memory-utilization 0.28 --max-num-seqs 32 --enforce-eager --max-num-batched-tokens 512"
    long = changed(DENSE, max_position_embeddings=1 << 20)
    assert served(long, flags, box=SMALL).verdict == "oom.kv_pool"
    assert served(long, f"{flags} --max-model-len auto", box=SMALL).verdict == "fits"


def test_weights_larger_than_the_card_are_an_oom_of_the_weights() -> None:
    found = served(LATENT, "-tp 4", box=H100)
    assert (found.verdict, found.phase) == ("oom.weights", "weights")
    assert "does not fit at any utilization" in found.explanation


def test_a_peak_larger_than_the_card_is_an_oom_of_the_profile_run() -> None:
    found = served(DENSE, "--max-num-batched-tokens 1m", box=SMALL)
    assert (found.verdict, found.phase) == ("oom.runtime", "runtime")


def test_graphs_outside_of_the_budget_may_not_fit() -> None:
    found = served(DENSE, "--gpu-memory-utilization 0.99", "0.8.5", SMALL)
    assert (found.verdict, found.phase) == ("oom.graph_capture", "graph_capture")


@pytest.mark.parametrize(
    ("model", "flags", "text", "phase"),
    [
        (DENSE, "-tp 3", "Total number of attention heads (16) must be divisible by tensor parallel size (3)", "args"),
        (DENSE, "-tp 8 -pp 2", "World size (16) is larger than the number of available GPUs (8)", "args"),
        (DENSE, "-dp 9", "World size (9) is larger than the number of available GPUs (8)", "args"),
        (DENSE, "--enable-expert-parallel", "Number of experts in the model must be greater than 0", "args"),
        (DENSE, "--max-model-len 9000", "User-specified max_model_len (9000) is greater than the derived", "args"),
        (LATENT, "-tp 8 -dcp 3", "tp_size=8 must be divisible by dcp_size=3", "args"),
        (DENSE, "-tp 4 -dcp 2", "must be greater than total num kv heads 4", "args"),
        (
            DENSE,
            "--no-enable-chunked-prefill --max-num-batched-tokens 512",
            "max_num_batched_tokens (512) is smaller than max_model_len (8192)",
            "args",
        ),
        (DENSE, "--gpu-memory-utilization 1", "is less than desired GPU memory utilization", "init"),
        (changed(DENSE, num_key_value_heads=3), "-tp 2", "3 KV heads do not split over TP2", "weights"),
        (changed(DENSE, intermediate_size=8195), "-tp 2", "8195 is not divisible by 2", "weights"),
        (
            FP8_EXPERTS,
            "-tp 4",
            "gate's and up's weight = 192 is not divisible by weight quantization block_n",
            "weights",
        ),
    ],
)
def test_vllm_refuses_in_its_own_words(model: dict[str, Any], flags: str, text: str, phase: str) -> None:
    found = served(model, flags, box=H100)
    assert found.verdict == "rejected"
    assert found.phase == phase
    assert text in found.rejections[0].text
    assert text.split("(")[0] in found.explanation


def test_whole_experts_are_not_refused_for_their_blocks() -> None:
    assert served(FP8_EXPERTS, "-tp 4 --enable-expert-parallel").verdict == "fits"


@pytest.mark.parametrize(("dtype", "block"), [("auto", 784), ("fp8", 1568)])
def test_the_block_of_a_hybrid_model_is_what_a_boot_printed(dtype: str, block: int) -> None:
    # "Setting attention block size to 1568 tokens", padded by 0.13% (noonghunna/club-3090#1047).
    model = changed(HYBRID, head_dim=256, num_hidden_layers=8)
    found = served(model, f"--max-model-len 8192 --kv-cache-dtype {dtype}", "0.19.1")
    assert (found.kv_tokens or 1) % block == 0


@pytest.mark.parametrize(("version", "verdict"), [("0.10.1", "rejected"), ("0.11.0", "fits")])
def test_sparse_attention_is_refused_by_releases_without_it(version: str, verdict: str) -> None:
    assert served(SPARSE, "-tp 8", version, H200).verdict == verdict


# Laws

MODELS = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT_PLAIN, "windows": WINDOWED, "linear": HYBRID}
VERSIONS = ("0.6.6", "0.8.5", "0.11.0", "0.20.2", "0.33.0")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model", MODELS)
def test_more_tensor_parallel_ranks_never_hold_more(model: str, version: str) -> None:
    sizes = [served(MODELS[model], f"-tp {tp}", version, H200).weights_gib or 0 for tp in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_grow_with_the_utilization(model: str, version: str) -> None:
    shares = (0.5, 0.6, 0.7, 0.8, 0.9)
    flags = "-tp 8 --max-model-len 4096"
    tokens = [
        served(MODELS[model], f"{flags} --gpu-memory-utilization {share}", version, H200).kv_tokens or 0
        for share in shares
    ]
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_cache_that_holds_the_longest_request_is_never_refused_and_a_smaller_one_always(
    model: str, version: str
) -> None:
    for size in (1 << 20, 64 << 20, 512 << 20, 4 << 30):
        found = served(MODELS[model], f"-tp 8 --max-model-len 8192 --kv-cache-memory-bytes {size}", version, H200)
        holds = found.resolved["longest_request"] >= 8192
        assert found.verdict == ("fits" if holds else "oom.kv_pool")


def test_names_do_not_count() -> None:
    named = LATENT | {"architectures": ["SomethingElse"], "model_type": "unheard_of", "_name_or_path": "a/b"}
    assert replace(served(named, "-tp 8", box=H200)) == served(LATENT, "-tp 8", box=H200)
