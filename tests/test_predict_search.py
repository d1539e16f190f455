"""The search over layouts, the laws of the arithmetic, and that only numbers count, never names."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest

from pytest_gpuguard.claims.layout import Layout
from pytest_gpuguard.facts.gpu import Gpu, GpuMemory, Rig
from pytest_gpuguard.facts.simulated import simulated_rig
from pytest_gpuguard.predict import Box, PredictError, Prediction, predict
from pytest_gpuguard.predict.boxes import box_of
from pytest_gpuguard.predict.predictor import facts_of
from pytest_gpuguard.predict.search import Found, layouts_of, search
from tests.laws import given, st
from tests.predict_models import DENSE, FP8_EXPERTS, H100, HYBRID, LATENT, RTX, WINDOWED, changed

FRACTION = ("--mem-fraction-static", "0.93")
MODELS = {
    "dense": DENSE,
    "latent": LATENT,
    "fp8": FP8_EXPERTS,
    "windowed": WINDOWED,
    "hybrid": HYBRID,
    "mxfp4": FP8_EXPERTS | {"quantization_config": {"quant_method": "mxfp4"}},
    "gptq": DENSE | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}},
    "awq": DENSE | {"quantization_config": {"quant_method": "awq", "w_bit": 4, "group_size": 128}},
    "modelopt": FP8_EXPERTS
    | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
}
each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def found(config: dict[str, Any], box: Box, flags: tuple[str, ...] = FRACTION, **measured: float) -> Found:
    return search(facts_of(config, box, measured), "sglang", "0.5.10", flags)


def with_layout(config: dict[str, Any], box: Box, layout: Layout, *flags: str, **measured: float) -> Prediction:
    return predict(config, box, "sglang", "0.5.10", flags or FRACTION, measured=measured, layout=layout)


# ------------------------------------------------------------------------------------------------------------- search


def test_every_layout_of_eight_gpus_is_tried_once() -> None:
    tried = list(layouts_of(8))
    assert len(tried) == len(set(tried)) == 50
    assert all(one.gpus <= 8 and not one.tp % one.ep and not one.tp % one.dp for one in tried)
    assert {Layout(8, ep=8), Layout(8, 8, 8), Layout(2, 2, 1, 4), Layout(pp=8), Layout()} <= set(tried)


def test_six_gpus_are_divided_by_their_divisors_and_by_powers_of_two() -> None:
    assert {one.tp for one in layouts_of(6)} == {1, 2, 3, 4, 6}
    assert {one.gpus for one in layouts_of(6)} == {1, 2, 3, 4, 6}


def test_layouts_are_ranked_by_the_tokens_of_the_whole_box() -> None:
    result = found(LATENT, RTX)
    tokens = [one.box_tokens for one in result.layouts]
    assert tokens == sorted(tokens, reverse=True)
    assert len(result.layouts) + len(result.refused) == 50
    replicated = next(one for one in result.layouts if str(one.prediction.layout) == "TP8 DP8 EP8")
    assert replicated.replicas == 8
    assert replicated.box_tokens == 8 * (replicated.prediction.kv_tokens or 0)


def test_a_search_says_what_a_single_prediction_says() -> None:
    for one in found(LATENT, RTX).layouts[::7]:
        alone = with_layout(LATENT, RTX, one.prediction.layout)
        assert alone == one.prediction


def test_what_cannot_boot_is_refused_with_its_first_reason() -> None:
    result = found(LATENT, RTX)
    refused = {one.layout: one for one in result.refused}
    assert refused["TP4 EP2"].verdict == "oom.weights"
    assert refused["TP4 EP2"].gpus_used == 4
    assert "GiB of weights a rank" in refused["TP4 EP2"].reason
    assert {one.verdict for one in result.refused} == {"oom.weights"}
    assert sum(len(names) for _, _, names in result.reasons()) == len(result.refused)


def test_experts_for_a_model_without_them_are_refused_in_the_engines_words() -> None:
    reasons = found(DENSE, RTX).reasons()
    verdict, reason, names = next(one for one in reasons if "EP8" in " ".join(one[2]))
    assert verdict == "rejected"
    assert "without experts" in reason
    assert "TP8 EP8" in names


def test_layouts_of_fewer_gpus_are_marked() -> None:
    whole = {str(one.prediction.layout): one.whole for one in found(DENSE, RTX).layouts}
    assert whole["TP8"]
    assert not whole["TP4"]


def test_of_equal_layouts_the_plainest_comes_first() -> None:
    names = [str(one.prediction.layout) for one in found(LATENT, RTX).layouts]
    assert names.index("TP8") < names.index("TP8 EP2") < names.index("TP8 EP8")


def test_a_backend_that_sets_ep_makes_one_server_of_several_layouts() -> None:
    flags = (*FRACTION, "--moe-a2a-backend", "deepep")
    ran = [str(one.prediction.layout) for one in found(LATENT, RTX, flags).layouts]
    assert len(ran) == len(set(ran))
    assert "TP8 EP8" in ran
    assert "TP8" not in ran


def test_parallel_sizes_among_the_flags_are_set_aside_and_said() -> None:
    result = found(LATENT, RTX, (*FRACTION, "--tp", "4", "--ep=2", "--enable-dp-attention"))
    assert result.layouts == found(LATENT, RTX).layouts
    assert result.notes == ("--tp-size 4, --ep-size 2, --enable-dp-attention: set aside, a search tries all layouts",)


def test_sizes_that_are_none_are_an_error_in_a_search_too() -> None:
    with pytest.raises(PredictError, match="--tp-size '-1' is not a count of ranks"):
        found(LATENT, RTX, ("--tp-size", "-1"))


def test_a_search_among_engines_that_nobody_knows_is_refused() -> None:
    with pytest.raises(PredictError, match="'tgi' is none of sglang, vllm"):
        search(facts_of(DENSE, RTX, {}), "tgi")


def test_vllm_splits_experts_over_all_ranks_or_none_and_has_no_attention_replicas() -> None:
    tried = list(layouts_of(8, "vllm"))
    assert len(tried) == len(set(tried)) == 16
    assert {one.dp for one in tried} == {1}
    assert all(one.ep in (1, one.tp) for one in tried)
    result = search(facts_of(LATENT, RTX, {}), "vllm", "0.11.0", ("--max-model-len", "8192"))
    assert len(result.layouts) + len(result.refused) == 16
    assert {one.prediction.engine for one in result.layouts} == {"vllm"}


def test_nothing_fits_on_cards_that_are_too_small() -> None:
    result = found(LATENT, Box("tiny", 2, 24564, None, "89"))
    assert not result.layouts
    assert result.refused


def test_a_search_over_eight_gpus_takes_less_than_a_second() -> None:
    facts = facts_of(LATENT, RTX, {})
    start = time.perf_counter()
    search(facts, "sglang", "0.5.10", FRACTION)
    assert time.perf_counter() - start < 1


def test_a_search_is_json() -> None:
    data = json.loads(json.dumps(found(LATENT, RTX).to_dict(), allow_nan=False))
    assert set(data) == {"layouts", "refused"}
    assert set(data["refused"][0]) == {"layout", "gpus_used", "verdict", "phase", "reason"}
    assert {"layout", "kv_tokens", "box_kv_tokens", "replicas", "uses_all_gpus", "close"} <= set(data["layouts"][0])


# --------------------------------------------------------------------------------------------------------------- laws

shapes = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(4, 64).map(lambda count: 128 * count),
        "intermediate_size": st.integers(1, 40).map(lambda count: 1024 * count),
        "num_hidden_layers": st.integers(1, 80),
        "num_attention_heads": st.sampled_from([8, 16, 32, 64]),
        "num_key_value_heads": st.sampled_from([1, 2, 4, 8]),
        "head_dim": st.sampled_from([64, 128, 256]),
        "vocab_size": st.integers(1000, 300_000),
        "max_position_embeddings": st.integers(1024, 1 << 20),
        "tie_word_embeddings": st.booleans(),
    }
)
expert_parts = st.fixed_dictionaries(
    {
        "num_experts": st.sampled_from([8, 64, 256]),
        "moe_intermediate_size": st.integers(1, 8).map(lambda count: 1024 * count),
        "n_shared_experts": st.integers(0, 2),
    }
)
quantizations = st.sampled_from(
    [
        None,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fp8"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
    ]
)
configs = st.builds(
    lambda shape, experts, quantization: (
        shape | (experts or {}) | ({"quantization_config": quantization} if quantization else {})
    ),
    shapes,
    st.none() | expert_parts,
    quantizations,
)
boxes = st.sampled_from([RTX, H100])


@given(configs, boxes)
def test_more_tensor_parallelism_never_means_more_weights_per_rank(config: dict[str, Any], box: Box) -> None:
    weights = [with_layout(config, box, Layout(tp=tp)).weights_gib or 0.0 for tp in (1, 2, 4, 8)]
    assert all(more >= less - 0.002 for more, less in pairwise(weights))


@given(configs, boxes, st.sampled_from([2, 4, 8]))
def test_expert_parallelism_changes_no_weight_bytes(config: dict[str, Any], box: Box, ep: int) -> None:
    if "num_experts" not in config:
        return
    plain, experts = with_layout(config, box, Layout(tp=8)), with_layout(config, box, Layout(tp=8, ep=ep))
    method = config.get("quantization_config", {}).get("quant_method")
    whole = method in ("compressed-tensors", "fp8") and "weight_block_size" not in config["quantization_config"]
    # A scale for each output channel is held by every rank that shares an expert: fewer of them share one under EP.
    scales = 0.005 * (plain.weights_gib or 0.0) if whole else 0.0
    assert plain.weights_gib == pytest.approx(experts.weights_gib, abs=0.0011 + scales)


@given(configs, boxes, st.floats(0.05, 0.99), st.floats(0.05, 0.99))
def test_tokens_grow_with_the_fraction(config: dict[str, Any], box: Box, one: float, other: float) -> None:
    low, high = sorted((one, other))
    less, more = (
        with_layout(config, box, Layout(tp=8), "--mem-fraction-static", str(fraction)).kv_tokens or 0
        for fraction in (low, high)
    )
    assert less <= more


@given(configs, boxes, st.floats(0, 100), st.floats(0, 100))
def test_tokens_shrink_with_the_weights(config: dict[str, Any], box: Box, one: float, other: float) -> None:
    light, heavy = sorted((one, other))
    more, less = (
        with_layout(config, box, Layout(tp=8), weights_gib=weights).kv_tokens or 0 for weights in (light, heavy)
    )
    assert less <= more


@given(configs, boxes, st.sampled_from([Layout(), Layout(8), Layout(8, 8, 8), Layout(4, ep=2), Layout(2, pp=4)]))
def test_every_number_is_finite_and_the_parts_add_up(config: dict[str, Any], box: Box, layout: Layout) -> None:
    one = with_layout(config, box, layout)
    json.dumps(one.to_dict(), allow_nan=False)
    assert one.gpus_used == layout.gpus
    if one.fits:
        assert one.kv_tokens
        assert (one.avail_before_gib or 0) - (one.weights_gib or 0) == pytest.approx(
            one.avail_after_weights_gib, abs=0.01
        )
        assert one.rest_gib == pytest.approx((one.avail_after_weights_gib or 0) - (one.reserved_gib or 0), abs=0.02)
        assert (one.mem_fraction_static or 0) > (one.f_min or 0) - 1e-3


# -------------------------------------------------------------------------------------------------------------- names


def renamed(config: dict[str, Any], words: random.Random) -> dict[str, Any]:
    """The same numbers under another model's names, with the keys of every object in another order."""
    text = json.loads(json.dumps(config))
    for part in (text, text.get("text_config", {}), text.get("vision_config", {})):
        part["model_type"] = words.choice(["deepseek_v3", "kimi_k25", "llama", "qwen3_moe", "gpt_oss", "nobody"])
        part["architectures"] = [words.choice(["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Nobody"])]
        part["_name_or_path"] = f"somebody/{words.randrange(1000)}"
        part["transformers_version"] = "4.57.1"

    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = list(value)
        words.shuffle(names)
        return {name: shuffled(value[name]) for name in names}

    mixed: dict[str, Any] = shuffled(text)
    return mixed


@each_model
@pytest.mark.parametrize("seed", range(3))
def test_no_number_changes_with_names_and_the_order_of_keys(config: dict[str, Any], seed: int) -> None:
    layout = Layout(8, 8, 8) if seed else Layout(8)
    expected = with_layout(config, RTX, layout)
    assert with_layout(renamed(config, random.Random(seed)), RTX, layout) == expected


def test_the_name_of_the_file_changes_no_number(tmp_path: Any) -> None:
    numbers = set()
    for name in ("kimi-k2.5", "llama-3", "x"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LATENT))
        numbers.add(json.dumps(predict(folder, RTX, "sglang", "0.5.7", FRACTION).to_dict(), sort_keys=True))
    assert len(numbers) == 1


# --------------------------------------------------------------------------------------------------------------- boxes


def rig_of(*gpus: Gpu, **more: Any) -> Rig:
    return Rig(gpus=gpus, driver="580", **more)


def gpu(index: int, mib: int = 97887, reserved: int | None = 636, version: int = 2, **more: Any) -> Gpu:
    memory = GpuMemory(mib << 20, 0, mib << 20, None if reserved is None else reserved << 20, version)
    return Gpu(index=index, uuid=f"GPU-{index}", name=f"card {mib}", bus_id="", sm="120", memory=memory, **more)


def test_the_box_of_a_rig_has_its_cards_numbers() -> None:
    box, notes = box_of(rig_of(gpu(0), gpu(1)))
    assert (box.count, box.total_mib, box.reserved_mib, box.sm, box.nvlink) == (2, 97887, 636, "120", False)
    assert notes == ()


def test_of_unequal_cards_the_smallest_counts() -> None:
    box, notes = box_of(rig_of(gpu(0), gpu(1, 32607), gpu(2)))
    assert (box.count, box.total_mib) == (3, 32607)
    assert "not equal" in notes[0]


def test_broken_cards_are_left_out_and_said() -> None:
    box, notes = box_of(rig_of(gpu(0), gpu(1, fault="lost")))
    assert box.count == 1
    assert notes == ("1 of 2 GPUs are broken and left out",)


def test_older_memory_numbers_tell_of_no_reserve() -> None:
    box, _ = box_of(rig_of(gpu(0, version=1)))
    assert box.reserved_mib is None


@pytest.mark.parametrize(("pairs", "linked"), [([(0, 1), (1, 0)], True), ([(0, 1)], False), ([], False)])
def test_cards_are_linked_when_every_pair_is(pairs: list[tuple[int, int]], linked: bool) -> None:
    links = {(f"GPU-{one}", f"GPU-{other}"): 18 for one, other in pairs}
    assert box_of(rig_of(gpu(0), gpu(1), nvlink=links))[0].nvlink is linked


def test_a_rig_without_gpus_is_an_error_that_names_a_cure() -> None:
    with pytest.raises(PredictError, match=r"no GPUs \(no NVIDIA driver\).*--rig sim:rtx-pro-6000-server:8"):
        box_of(Rig(reason="no NVIDIA driver"))


def test_a_simulated_rig_makes_the_box_of_its_card() -> None:
    box, _ = box_of(simulated_rig("sim:rtx-pro-6000-server:8"))
    assert (box.count, box.total_mib, box.reserved_mib, box.sm, box.nvlink) == (8, 97887, 636, "120", False)
    assert box_of(simulated_rig("sim:h200:8"))[0].nvlink


def test_some_of_a_rigs_cards_make_a_box_too() -> None:
    rig = simulated_rig("sim:rtx-pro-6000-server:8")
    assert box_of(rig, [rig.gpus[0].uuid, rig.gpus[5].uuid])[0].count == 2


def test_a_config_with_changed_sizes_changes_the_numbers() -> None:
    """The tests above would pass for a predictor that reads nothing."""
    assert with_layout(changed(LATENT, num_hidden_layers=30), RTX, Layout(8)) != with_layout(LATENT, RTX, Layout(8))
