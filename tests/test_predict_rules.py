"""The default fraction of each release, as boots of real people printed it, and what else depends on the release."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pytest_gpuguard.predict as predict_package
from pytest_gpuguard.predict import Box, PredictError, predict
from tests.predict_models import DENSE, FP8_EXPERTS, H100, H200, HYBRID, LATENT, MI355X, RTX, SMALL, WINDOWED, changed

DP8_FLAGS = ("--tp-size", "8", "--dp-size", "8", "--enable-dp-attention")
DUAL = Box("h100", 2, 81559, 479, "90", True)


def fraction(model: dict[str, Any], box: Box, version: str, flags: str) -> float | None:
    return predict(model, box, version=version, flags=flags.split()).mem_fraction_static


@pytest.mark.parametrize(
    ("version", "box", "flags", "printed"),
    [
        ("0.4.2", H100, "--tp-size 1", 0.88),
        ("0.4.2", SMALL, "--tp-size 1", 0.88),
        ("0.4.2", H200, "--tp-size 8", 0.81),
        ("0.4.6", H100, "--tp-size 8", 0.81),
        ("0.4.10", H100, "--tp-size 1", round((81559 - 10 * 1024) / 81559, 3)),
        ("0.4.10", SMALL, "--tp-size 2", round((24564 - 3 * 1024) / 24564, 3)),
        ("0.5.8", H100, "--tp-size 1 --cuda-graph-max-bs 4", 0.841),
        ("0.5.8", H100, "--tp-size 1", 0.835),
        ("0.5.10", H100, "--tp-size 1", 0.83),
        ("0.5.13", DUAL, "--tp-size 2", 0.828),
        ("0.5.20", H100, "--tp-size 1", 0.83),
        ("0.5.15", MI355X, "--tp-size 1 --attention-backend triton", 0.911),
        ("0.5.15", MI355X, "--tp-size 1 --context-length 8192", 0.911),
        ("0.5.15", MI355X, "--tp-size 1 --context-length 16384", 0.911 * 0.85),
    ],
)
def test_the_default_fraction_is_the_one_that_was_printed(version: str, box: Box, flags: str, printed: float) -> None:
    assert fraction(DENSE, box, version, flags) == printed


def test_the_vision_factor_gives_the_printed_number_to_its_last_digit() -> None:
    found = fraction(LATENT, RTX, "0.5.7", "--tp-size 8 --chunked-prefill-size 8192 --cuda-graph-max-bs 128")
    assert found == 0.778734296875
    assert fraction(LATENT, MI355X, "0.5.8.post1", "--tp-size 8") == 0.8260405859375


def test_a_tower_that_names_its_depth_otherwise_counts_as_the_engine_counts_it() -> None:
    # SGLang reads num_hidden_layers; "depth" is not that, so it takes its own default of 24 layers.
    tower = {"depth": 40, "hidden_size": 1024, "intermediate_size": 4096}
    assert fraction(DENSE | {"vision_config": tower}, H100, "0.5.8", "--tp-size 1") == 0.835 * 0.95


def test_latent_attention_reserves_for_prefill_graphs_since_0_5_10() -> None:
    flags = "--tp-size 8 --cuda-graph-max-bs 128"
    text = LATENT["text_config"]
    before, after = fraction(text, RTX, "0.5.9", flags), fraction(text, RTX, "0.5.10", flags)
    assert before == round((97887 - 14080) / 97887, 3)
    assert after == round((97887 - 14080 - 1536) / 97887, 3)
    assert fraction(text, RTX, "0.5.10", f"{flags} --disable-piecewise-cuda-graph") == before


def test_a_multimodal_model_captures_no_prefill_graphs() -> None:
    flags = "--tp-size 8 --cuda-graph-max-bs 128"
    assert fraction(LATENT, RTX, "0.5.10", flags) == 0.778734296875


@pytest.mark.parametrize(
    ("version", "algorithm", "mib"),
    [
        ("0.5.3", "EAGLE", 2048),
        ("0.5.3", "STANDALONE", 6144),
        ("0.5.3", "NGRAM", 0),
        ("0.5.12", "EAGLE", 4096),
        ("0.5.14", "EAGLE", 0),
    ],
)
def test_speculation_costs_what_the_release_adds(version: str, algorithm: str, mib: int) -> None:
    flags = "--tp-size 1 --disable-piecewise-cuda-graph"
    reserve = 512 + 8192 * 1.5 + 256 * 2 + 128
    assert fraction(DENSE, H100, version, flags) == round((81559 - reserve) / 81559, 3)
    asked = f"{flags} --speculative-algorithm {algorithm} --speculative-num-draft-tokens 4"
    assert fraction(DENSE, H100, version, asked) == round((81559 - reserve - mib) / 81559, 3)


def test_attention_replicas_pad_and_more_so_for_many_captured_requests() -> None:
    def reserve(graph_bs: int, each: float) -> float:
        return 512 + 8192 * 1.5 + graph_bs * 2 + 1024 + graph_bs * 8 * each

    for graph_bs, each in ((256, 3), (320, 4.5)):
        flags = f"--tp-size 8 --dp-size 8 --enable-dp-attention --cuda-graph-max-bs {graph_bs}"
        expected = round((143771 - reserve(graph_bs, each)) / 143771, 3)
        assert fraction(changed(DENSE, num_key_value_heads=16), H200, "0.5.7", flags) == expected


def test_a_large_card_keeps_ten_gib_whatever_the_flags() -> None:
    flags = "--tp-size 1 --chunked-prefill-size 2048 --cuda-graph-max-bs 8"
    assert fraction(DENSE, H100, "0.5.7", flags) == round((81559 - 10240) / 81559, 3)
    assert fraction(DENSE, SMALL, "0.5.7", flags) == round((24564 - 512 - 3072 - 16 - 128) / 24564, 3)


def test_deepep_reserves_its_buffers_and_disabled_graphs_reserve_nothing_since_0_5_15() -> None:
    plain = 512 + 8192 * 1.5 + 512 * 2 + 1024
    flags = "--tp-size 8 --moe-a2a-backend deepep"
    model = changed(DENSE, num_key_value_heads=16, num_experts=64, moe_intermediate_size=1024)
    assert fraction(model, H200, "0.5.15", flags) == round((143771 - plain - 2048) / 143771, 3)
    assert fraction(model, H200, "0.5.12", flags) == round((143771 - plain) / 143771, 3)
    off = "--tp-size 8 --disable-cuda-graph"
    assert fraction(model, H200, "0.5.15", off) == round((143771 - plain + 1024) / 143771, 3)
    assert fraction(model, H200, "0.5.7", off) == round((143771 - plain) / 143771, 3)


def test_small_cards_capture_more_since_0_5_20() -> None:
    def resolved(version: str) -> tuple[int, int]:
        found = predict(DENSE, SMALL, version=version, flags=["--tp-size", "1"]).resolved
        return found["chunked_prefill_size"], found["cuda_graph_max_bs"]

    assert resolved("0.5.3") == (2048, 16)
    assert resolved("0.5.12") == (2048, 24)
    assert resolved("0.5.20") == (4096, 48)


def test_attention_replicas_share_the_prefill_chunk_but_not_in_the_fraction() -> None:
    flags = ["--tp-size", "8", "--dp-size", "4", "--enable-dp-attention"]
    found = predict(changed(DENSE, num_key_value_heads=16), H200, version="0.5.7", flags=flags)
    assert found.resolved["chunked_prefill_size"] == 8192 // 4
    reserve = 512 + 8192 * 1.5 + 512 * 2 + 1024 + 512 * 4 * 4.5
    assert found.mem_fraction_static == round((143771 - reserve) / 143771, 3)


@pytest.mark.parametrize("version", ["0.6.0", "1.2", "main", None])
def test_a_release_that_nobody_knows_gets_the_nearest_rules_and_says_so(version: str | None) -> None:
    found = predict(DENSE, H100, version=version)
    assert found.rules == "0.5.23"
    assert any("rules of" in note for note in found.assumptions)


def test_an_old_release_gets_the_oldest_rules_and_says_so() -> None:
    found = predict(DENSE, H100, version="0.3.1")
    assert found.rules == "0.4.2"
    assert any("older than what is known" in note for note in found.assumptions)


def test_a_known_release_says_nothing_about_rules() -> None:
    assert predict(DENSE, H100, version="0.5.12.post2").assumptions == ()


@pytest.mark.parametrize(
    ("said", "rules", "note"),
    [
        ("~0.5.12 (2026-05-15)", "0.5.12", "0.5.12, which stands in it, is taken"),
        ("lmsysorg/sglang:v0.5.10-cu130", "0.5.10", "0.5.10, which stands in it, is taken"),
        ("main 2025-08-13", "0.5.1", "the first one after that day"),
        ("nightly-20260716", "0.5.16", "the first one after that day"),
        ("PR branch 2026-07", "0.5.16", "the first one after that day"),
        ("lmsysorg/sglang:deepseek-v4-hopper", "0.5.23", "the newest known, are used"),
        ("0.5.x", "0.5.23", "the newest known, are used"),
    ],
)
def test_words_that_are_no_release_mean_the_nearest_one_and_that_is_said(said: str, rules: str, note: str) -> None:
    found = predict(DENSE, H100, version=said)
    assert found.rules == rules
    assert any("is no release" in one and note in one for one in found.assumptions)
    other = predict(DENSE, H100, "vllm", version=said)
    assert any("is no release" in one for one in other.assumptions)


@pytest.mark.parametrize(
    ("release", "backend", "runs"),
    [("0.5.7", "deepep", 4), ("0.5.7", "flashinfer", 2), ("0.5.9", "flashinfer", 4), ("0.5.5", "mooncake", 4)],
)
def test_an_all_to_all_backend_sets_ep_to_tp(release: str, backend: str, runs: int) -> None:
    flags = f"--tp-size 4 --ep-size 2 --moe-a2a-backend {backend} --moe-runner-backend flashinfer_cutlass".split()
    found = predict(LATENT, H200, version=release, flags=flags)
    assert found.resolved["ep_size"] == runs
    assert any("EP4 runs, not EP2" in note for note in found.assumptions) is (runs == 4)


def test_a_backend_that_a_release_does_not_know_is_refused() -> None:
    flags = ["--tp-size", "8", "--moe-a2a-backend", "flashinfer", "--moe-runner-backend", "flashinfer_cutlass"]
    old, new = (predict(LATENT, RTX, version=version, flags=flags) for version in ("0.5.8", "0.5.9"))
    assert (old.verdict, new.verdict) == ("rejected", "oom.kv_pool")
    assert "invalid choice: 'flashinfer'" in old.rejections[0].text
    other = predict(LATENT, RTX, version="0.5.9", flags=["--tp-size", "8", "--moe-a2a-backend", "flashinfer"])
    assert "only supported with flashinfer_cutlass" in other.rejections[0].text


def test_the_expert_kernels_that_an_all_to_all_takes_are_those_of_the_release() -> None:
    flags = [*DP8_FLAGS, "--moe-a2a-backend", "flashinfer", "--moe-runner-backend"]

    def refused(version: str, runner: str) -> list[str]:
        return [one.text for one in predict(LATENT, H200, version=version, flags=[*flags, runner]).rejections]

    assert "only supported with flashinfer_cutlass moe runner" in refused("0.5.12", "flashinfer_cutedsl")[0]
    assert not refused("0.5.13", "flashinfer_cutedsl")
    assert "flashinfer_cutlass or flashinfer_cutedsl" in refused("0.5.13", "flashinfer_trtllm_routed")[0]
    assert not refused("0.5.15", "flashinfer_trtllm_routed")


def test_an_all_to_all_backend_makes_every_rank_hold_the_shared_experts_whole() -> None:
    # 60 layers of 3 x 7168 x 2048 in 16 bits: 4.9 GiB instead of 0.6, most of the 5.4 GiB that somebody measured.
    flags = ["--tp-size", "8", "--ep-size", "8", "--cuda-graph-max-bs", "128"]
    backend = ["--moe-a2a-backend", "flashinfer", "--moe-runner-backend", "flashinfer_cutlass"]
    split = predict(LATENT, RTX, version="0.5.9", flags=flags).parts_gib["shared experts"]
    found = predict(LATENT, RTX, version="0.5.9", flags=[*flags, *backend])
    assert found.parts_gib["shared experts"] == pytest.approx(8 * split, abs=0.01)
    assert (found.mem_fraction_static, found.verdict) == (0.778734296875, "oom.kv_pool")


def test_no_model_is_known_by_name() -> None:
    families = (
        "deepseek|kimi|qwen|glm|llama|gemma|gpt.?oss|minimax|mistral|mixtral|nemotron|moonshot|granite|falcon|"
        "huggingface|[\"']architectures|[\"']model_type|_name_or_path"
    )
    folder = Path(predict_package.__file__).parent
    named = [
        f"{file.name}: {line.strip()}"
        for file in sorted(folder.glob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(families, line, re.IGNORECASE)
    ]
    assert named == []


#: Values of every kind that a field may hold by mistake.
STRANGE: tuple[object, ...] = (
    *(0, -1, 1.5, 1e308, float("inf"), float("nan"), 10**12, None, True),
    *("", "x", "16", [], [1], [[1]], {}, {"a": 1}),
)


@pytest.mark.parametrize("model", [DENSE, LATENT, FP8_EXPERTS, WINDOWED, HYBRID], ids=range(5))
def test_no_field_in_a_strange_form_makes_more_than_a_plain_error(model: dict[str, Any]) -> None:
    def fields(of: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, value in of.items():
            yield (*path, name)
            if isinstance(value, dict):
                yield from fields(value, (*path, name))

    for path in fields(model):
        for value in STRANGE:
            broken = copy.deepcopy(model)
            parent = broken
            for name in path[:-1]:
                parent = parent[name]
            parent[path[-1]] = value
            for version, flags in (("0.5.7", ["--tp-size", "8"]), ("0.5.23", ["--pp-size", "2"])):
                with contextlib.suppress(PredictError):
                    json.dumps(predict(broken, H200, version=version, flags=flags).to_dict(), allow_nan=False)
