"""Weights counted by hand: which part of a model a rank holds, and what a quantization makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pytest_gpuguard.predict import predict
from pytest_gpuguard.predict.config import read_config
from pytest_gpuguard.predict.quant import bare, quantization_of
from pytest_gpuguard.predict.reading import shape_of
from pytest_gpuguard.predict.weights import GIB, Sharding, weights_of
from tests.predict_models import DENSE, FP8_EXPERTS, H100, H200, HYBRID, LATENT, RTX, changed


def walked(config: dict[str, Any], **sharding: object) -> dict[str, float]:
    read = read_config(config)
    return dict(weights_of(shape_of(read), quantization_of(read), Sharding(**sharding)).parts)  # type: ignore[arg-type]


def test_a_dense_model_by_hand() -> None:
    parts = walked(DENSE)
    attention = 2048 * (16 * 128) + 2 * 2048 * (4 * 128) + (16 * 128) * 2048
    assert parts["attention"] == 16 * attention * 2
    assert parts["dense MLP"] == 16 * 3 * 2048 * 8192 * 2
    assert parts["embedding"] == parts["head"] == 32000 * 2048 * 2
    assert parts["rotary"] == 8192 * 128 * 4


def test_tied_embeddings_have_no_output_layer() -> None:
    assert "head" not in walked(changed(DENSE, tie_word_embeddings=True))


def test_key_and_value_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    whole, split = walked(DENSE), walked(DENSE, attention=8)
    queries = 16 * 2 * 2048 * 16 * 128 * 2
    keys = whole["attention"] - queries
    assert split["attention"] == queries / 8 + keys / 4


def test_the_vocabulary_is_padded_over_the_ranks() -> None:
    parts = walked(changed(DENSE, vocab_size=32001), embedding=4, head=4)
    assert parts["embedding"] == math.ceil(32001 / 256) * 256 / 4 * 2048 * 2


def test_experts_are_split_over_the_tensor_group_whatever_ep_is() -> None:
    sizes = {ep: walked(LATENT, expert_parallel=ep, expert_tensor=8 // ep)["experts"] for ep in (1, 2, 4, 8)}
    elements = 60 * 384 / 8 * 3 * 7168 * 2048
    assert set(sizes.values()) == {elements * (0.5 + 2 / 32)}


def test_latent_attention_keeps_its_latents_whole_and_its_halves_twice() -> None:
    parts = walked(LATENT, attention=8)
    heads = 64 / 8
    latent = 7168 * 1536 + 7168 * (512 + 64)
    per_rank = 1536 * heads * 192 + heads * 256 * 512 + heads * 128 * 7168
    absorbed = heads * 256 * 512
    assert parts["attention"] == 61 * (latent + per_rank + absorbed) * 2


def test_what_a_checkpoint_leaves_alone_stays_in_sixteen_bits() -> None:
    parts = walked(LATENT)
    assert parts["shared experts"] == 60 * 3 * 7168 * 2048 * 2
    assert parts["dense MLP"] == 3 * 7168 * 18432 * 2


def test_block_fp8_has_a_float_for_each_block() -> None:
    parts = walked(FP8_EXPERTS)
    elements = 24 * 128 * 3 * 2048 * 768
    assert parts["experts"] == elements + elements / (128 * 128) * 4


def test_a_pipeline_gives_the_last_stages_one_more_layer_each() -> None:
    found = predict(LATENT, RTX, version="0.5.7", flags=["--pp-size", "8"])
    assert len(found.stages_gib) == 8
    assert found.stages_gib[0] < found.stages_gib[1] < found.stages_gib[3] < found.stages_gib[7]
    assert found.weights_gib == pytest.approx(max(found.stages_gib), rel=0.01)


def test_the_first_stage_has_the_dense_layers_and_the_embedding() -> None:
    read = read_config(DENSE)
    stages = weights_of(shape_of(read), quantization_of(read), Sharding(partition=(8, 8))).stages
    assert stages[0] == stages[1]  # an untied output layer is as large as the embedding
    tied = read_config(changed(DENSE, tie_word_embeddings=True))
    assert weights_of(shape_of(tied), quantization_of(tied), Sharding(partition=(8, 8))).stages[0] == stages[0]


def test_attention_replicas_hold_whole_attention_and_a_whole_embedding() -> None:
    split = predict(LATENT, H200, version="0.5.7", flags=["--tp-size", "8"]).parts_gib
    whole = predict(LATENT, H200, version="0.5.7", flags=["--tp-size", "8", "--dp-size", "8", "--enable-dp-attention"])
    assert whole.parts_gib["embedding"] == pytest.approx(8 * split["embedding"], abs=0.01)
    assert whole.parts_gib["experts"] == split["experts"]
    assert whole.parts_gib["attention"] > 3 * split["attention"]


def test_linear_attention_is_split_by_its_heads() -> None:
    one, four = walked(HYBRID)["linear attention"], walked(HYBRID, attention=4)["linear attention"]
    assert one == pytest.approx(4 * four, rel=1e-6)
    values, keys = 48 * 128, 16 * 128
    each = 2048 * (2 * keys + 2 * values + 2 * 48) + (2 * keys + values) * 4 + values * 2048
    assert one == 6 * each * 2


@pytest.mark.parametrize(
    ("quantization", "bytes_each"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + (2 + 0.5) / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 0.5 + 2 / 128),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1 + 4 / 2048),
    ],
)
def test_every_known_format_has_its_bytes(quantization: dict[str, Any], bytes_each: float) -> None:
    parts = walked(DENSE | {"quantization_config": quantization})
    down, up = 2048 * 8192, 2 * 2048 * 8192
    if quantization.get("quant_algo") == "FP8":
        expected = 16.0 * (up + 2 * 8192 * 4 + down + 2048 * 4)
    else:
        expected = 16 * (up + down) * bytes_each
    assert parts["dense MLP"] == pytest.approx(expected, rel=1e-9)


def test_mxfp4_takes_the_experts_only_and_is_padded() -> None:
    model = FP8_EXPERTS | {"moe_intermediate_size": 720, "quantization_config": {"quant_method": "mxfp4"}}
    parts = walked(model, expert_pad={"mxfp4": (64, 256)})
    assert parts["experts"] == 24 * 128 * 3 * 768 * 2048 * (0.5 + 1 / 32)
    assert parts["attention"] == walked(model | {"quantization_config": None})["attention"]


def test_four_bit_experts_of_an_fp8_checkpoint_keep_what_their_kernel_needs() -> None:
    model = FP8_EXPERTS | {"expert_dtype": "fp4"}
    elements = 24 * 128 * 3 * 2048 * 768
    assert walked(model)["experts"] == elements * (0.5 + 1 / 32)
    flags = ["--tp-size", "1"]
    marlin = predict(model, H100, version="0.5.12", flags=flags).parts_gib["experts"]
    newer = predict(model, H100, version="0.5.20", flags=flags).parts_gib["experts"]
    assert marlin == pytest.approx(elements * (0.5 + 5 / 32) / GIB, abs=0.001)
    assert newer == pytest.approx(elements * (0.5 + 1 / 32) / GIB, abs=0.001)


def test_layers_that_are_named_have_formats_of_their_own() -> None:
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.language_model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4"},
            "model.language_model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
            "lm_head": {"quant_algo": "NVFP4"},
        },
    }
    parts, plain = walked(DENSE | {"quantization_config": quantization}), walked(DENSE)
    assert plain["dense MLP"] - parts["dense MLP"] == 2048 * 8192 * (2 - 0.5 - 1 / 16)
    assert plain["attention"] - parts["attention"] == 2048 * 2048 - 2048 * 4
    assert parts["head"] == 32000 * 2048 * (0.5 + 1 / 16)


@pytest.mark.parametrize(
    ("pattern", "name", "left"),
    [
        ("model.layers.3.mlp", "layers.3.mlp.up_proj", True),
        ("model.layers.3.mlp", "layers.30.mlp.up_proj", False),
        ("model.layers.3*", "layers.3.self_attn.o_proj", True),
        ("language_model.model.layers.1.mlp.shared_experts*", "layers.1.mlp.shared_experts.up_proj", True),
        ("re:.*self_attn.*", "layers.7.self_attn.o_proj", True),
        ("re:.*self_attn.*", "layers.7.mlp.up_proj", False),
        ("gate", "layers.7.mlp.gate", True),
        ("gate", "layers.7.mlp.gate_proj", False),
        ("re:(", "layers.7.mlp.gate_proj", False),
    ],
)
def test_lists_of_what_is_left_alone_are_read_in_every_form(pattern: str, name: str, left: bool) -> None:
    told = {"quant_method": "fp8", "ignored_layers": [pattern]}
    quantization = quantization_of(read_config(DENSE | {"quantization_config": told}))
    assert quantization.left_alone(name) is left


def test_a_module_is_called_alike_in_every_part_of_a_model() -> None:
    for name in ("model.layers.0.mlp", "language_model.model.layers.0.mlp", "model.language_model.layers.0.mlp"):
        assert bare(name) == "layers.0.mlp"


def test_an_unknown_format_is_said_and_bounds_from_above() -> None:
    found = predict(DENSE | {"quantization_config": {"quant_method": "newfp3"}}, H100, version="0.5.12")
    assert any("'newfp3' is not known here" in note for note in found.assumptions)
    plain = predict(DENSE, H100, version="0.5.12")
    assert found.weights_gib == plain.weights_gib
    assert found.bars["weights_gib"] > 3 * plain.bars["weights_gib"]


def test_a_checkpoint_in_sixteen_bits_may_be_quantized_while_it_is_loaded() -> None:
    asked = predict(DENSE, H100, version="0.5.12", flags=["--quantization", "fp8"])
    plain = predict(DENSE, H100, version="0.5.12")
    assert asked.parts_gib["dense MLP"] == pytest.approx(plain.parts_gib["dense MLP"] / 2, rel=0.01)
    told = predict(FP8_EXPERTS, H100, version="0.5.12", flags=["--quantization", "fp8"])
    assert told.parts_gib == predict(FP8_EXPERTS, H100, version="0.5.12").parts_gib
    strange = predict(DENSE, H100, version="0.5.12", flags=["--quantization", "newfp3"])
    assert any("newfp3" in note for note in strange.assumptions)


def test_windowed_layers_may_have_heads_of_their_own() -> None:
    model = changed(
        DENSE,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=1024,
        global_head_dim=256,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
    )
    window = 2048 * (16 * 128 * 2 + 2 * 4 * 128)
    full = 2048 * (16 * 256 * 2 + 2 * 256)
    assert walked(model)["attention"] == (window + full) * 2
    named = changed(DENSE, num_hidden_layers=2, layer_types=model["layer_types"], swa_num_key_value_heads=8)
    assert walked(named)["attention"] - walked(changed(named, swa_num_key_value_heads=None))["attention"] == (
        2 * 2048 * 4 * 128 * 2
    )


def test_layers_of_one_mixer_hold_that_mixer_only() -> None:
    model = changed(
        DENSE,
        num_hidden_layers=3,
        hybrid_override_pattern="M-*",
        mamba_num_heads=32,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
    )
    parts = walked(model)
    inner, width = 32 * 64, 32 * 64 + 2 * 8 * 128
    assert parts["linear attention"] == (2048 * (inner + width + 32) + width * 4 + inner * 2048) * 2
    assert parts["dense MLP"] == 3 * 2048 * 8192 * 2
    assert parts["attention"] == 2048 * (2 * 16 * 128 + 2 * 4 * 128) * 2


def test_linear_attention_may_be_listed_layer_by_layer() -> None:
    told = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 16, "head_dim": 128}
    parts = walked(changed(DENSE, num_hidden_layers=4, linear_attn_config=told))
    assert parts["attention"] == 2048 * (2 * 16 * 128 + 2 * 4 * 128) * 2
    assert parts["linear attention"] > 0


def test_a_model_with_a_dense_width_of_its_own_has_a_shared_expert() -> None:
    model = changed(DENSE, num_local_experts=16, intermediate_size_mlp=16384, interleave_moe_layer_step=1)
    parts = walked(model)
    assert parts["experts"] == 16 * 16 * 3 * 2048 * 8192 * 2
    assert parts["shared experts"] == 16 * 3 * 2048 * 8192 * 2
    assert "dense MLP" not in parts


@pytest.mark.parametrize(("version", "share"), [("0.5.7", 1), ("0.5.8", 4), ("0.5.23", 4)])
def test_attention_replicas_share_the_embedding_among_their_own_ranks_since_0_5_8(version: str, share: int) -> None:
    flags = ["--tp-size", "8", "--dp-size", "2", "--enable-dp-attention"]
    parts = predict(changed(DENSE, num_key_value_heads=8), H100, version=version, flags=flags).parts_gib
    assert parts["embedding"] == pytest.approx(32000 * 2048 * 2 / share / GIB, abs=0.001)


def test_a_projector_that_merges_patches_is_split_over_the_ranks() -> None:
    tower = {"depth": 2, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
    whole = walked(DENSE | {"vision_config": tower | {"merge_kernel_size": [2, 2]}}, vision=8)["vision"]
    split = walked(DENSE | {"vision_config": tower | {"spatial_merge_size": 2}}, vision=8)["vision"]
    assert whole - split == (4096 * 4096 + 4096 * 2048) * 2 * 7 / 8


@pytest.mark.parametrize("told", [{"rope_local_base_freq": 1e4}, {"hidden_size_per_layer_input": 0}])
def test_a_scaled_embedding_is_whole_on_every_rank(told: dict[str, Any]) -> None:
    flags = ["--tp-size", "8"]
    parts = predict(DENSE | told, H100, version="0.5.23", flags=flags).parts_gib
    assert parts["embedding"] == pytest.approx(32000 * 2048 * 2 / GIB, abs=0.001)


def test_inputs_of_each_layer_have_an_embedding_of_their_own() -> None:
    model = DENSE | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 32000}
    assert walked(model, embedding=8)["embedding"] - walked(DENSE, embedding=8)["embedding"] == 32000 * 16 * 256 * 2


def test_windowed_layers_with_a_rotary_base_of_their_own_have_a_table_of_their_own() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    model = DENSE | {"rope_parameters": kinds, "global_head_dim": 512}
    assert walked(model)["rotary"] == 8192 * (512 + 128) * 4


def test_gated_linear_attention_gates_its_queries_unless_it_says_otherwise() -> None:
    gated, plain = walked(HYBRID), walked(HYBRID | {"attn_output_gate": False})
    assert gated["attention"] - plain["attention"] == 2 * 16 * 128 * 2048 * 2
