"""Input at the edges of what can be: each verdict names its own cause, and what cannot be meant is said to be so."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard.facts.simulated import simulated_rig
from pytest_gpuguard.predict import Box, PredictError, Prediction, predict
from pytest_gpuguard.predict.boxes import box_of
from tests.predict_models import DENSE, H100, H200, HYBRID, WINDOWED, changed


def served(
    model: dict[str, Any], flags: str, box: Box = H100, version: str = "0.5.23", **measured: float
) -> Prediction:
    return predict(model, box, version=version, flags=flags.split(), measured=measured)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ("--max-total-tokens 5 --page-size 64", "--max-total-tokens 5 is less than one page of 64 tokens"),
        ("--page-size 1000000000", "It holds not one page of 1000000000 tokens"),
    ],
)
def test_a_pool_below_one_page_is_not_blamed_on_the_fraction(flags: str, cause: str) -> None:
    found = served(DENSE, flags)
    assert found.verdict == "oom.kv_pool"
    assert cause in found.explanation
    assert "fraction of" not in found.explanation


def test_what_a_pool_lacks_is_told_as_a_lack() -> None:
    found = served(DENSE, "--mem-fraction-static 0.02")
    assert found.verdict == "oom.kv_pool"
    assert found.rest_gib is not None
    assert f"{-found.rest_gib:.1f} GiB are missing for any KV pool" in found.explanation


def test_windowed_layers_that_hold_no_window_are_refused_since_0_5_16() -> None:
    flags = "--max-total-tokens 4000 --swa-full-tokens-ratio 0.00000001"
    found = served(WINDOWED, flags)
    assert found.verdict == "oom.kv_pool"
    assert "not one window and a page" in found.explanation
    assert served(WINDOWED, flags, version="0.5.15").fits


def test_a_pool_of_windows_is_sized_by_requests_only_where_prefill_is_chunked() -> None:
    capped = "--disable-radix-cache --max-running-requests 8 --mem-fraction-static 0.8"
    plain = served(WINDOWED, f"{capped} --chunked-prefill-size -1").kv_tokens
    assert plain == served(WINDOWED, "--mem-fraction-static 0.8").kv_tokens
    assert (served(WINDOWED, capped).kv_tokens or 0) > (plain or 0)


def test_a_card_that_is_only_a_size_is_not_taken_for_amds() -> None:
    box, _ = box_of(simulated_rig("sim:24GiB:1"))
    found = predict(DENSE | {"max_position_embeddings": 40960}, box, flags=["--mem-fraction-static", "0.8"])
    assert found.mem_fraction_static == 0.8
    assert any("only a size" in note for note in found.assumptions)
    assert not any("aiter" in note for note in found.assumptions)
    amd, _ = box_of(simulated_rig("sim:mi355x:1"))
    assert any("aiter" in note for note in predict(DENSE | {"max_position_embeddings": 40960}, amd).assumptions)


def test_the_engines_own_fraction_is_never_said_to_be_above_its_own_rule() -> None:
    assert "own rule" not in served(DENSE, "").explanation
    assert "own rule" in served(DENSE, "--mem-fraction-static 0.9").explanation


def test_gpus_that_are_not_there_are_not_said_to_be_used() -> None:
    found = served(changed(DENSE, num_key_value_heads=16), "--tp-size 16")
    assert found.verdict == "rejected"
    assert "TP16 needs 16 GPUs and the rig has 8" in found.explanation
    assert "of 8 GPUs" not in found.explanation


def test_a_context_beyond_the_models_own_is_told() -> None:
    def told(flags: str, **env: str) -> bool:
        found = predict(DENSE, H200, flags=flags.split(), env=env)
        return any("longer than the model's own 8192" in note for note in found.assumptions)

    assert told("--context-length 20000")
    assert not told("--context-length 8192")
    assert not told("--context-length 20000", SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1")


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ("--kv-cache-dtype banana", "write auto, bfloat16 or fp8_e4m3"),
        ("--disaggregation-mode banana", "none of null, prefill, decode"),
        ("--cuda-graph-bs", "needs sizes from 1 on, such as 1 2 4"),
        ("--cuda-graph-bs 0", "needs sizes from 1 on, such as 1 2 4"),
    ],
)
def test_a_value_that_no_flag_can_have_is_named_with_its_cure(flags: str, cure: str) -> None:
    with pytest.raises(PredictError, match=cure):
        served(DENSE, flags)


@pytest.mark.parametrize("name", ["kv_cell_bytes", "avail_before_gib"])
def test_a_known_number_of_zero_that_nothing_can_be_divided_by_is_refused(name: str) -> None:
    with pytest.raises(PredictError, match=f"{name} is 0.*leave it out"):
        predict(DENSE, H100, measured={name: 0.0})


def test_slots_of_states_are_those_of_all_attention_replicas_together() -> None:
    flags = "--tp-size 4 --mem-fraction-static 0.8 --max-mamba-cache-size"
    whole = served(HYBRID, f"{flags} 50").state_gib
    assert served(HYBRID, f"{flags} 200 --dp-size 4 --enable-dp-attention").state_gib == pytest.approx(
        (whole or 0) * 4, abs=0.005
    )


@pytest.mark.parametrize("slots", ["--max-mamba-cache-size 100", "--disable-radix-cache --max-running-requests 20"])
def test_states_of_a_verification_are_kept_however_the_slots_are_told(slots: str) -> None:
    flags = f"--tp-size 4 --mem-fraction-static 0.8 {slots}"
    plain = served(HYBRID, flags)
    drafting = served(HYBRID, f"{flags} --speculative-algorithm EAGLE --speculative-num-draft-tokens 4")
    held = 101 if "mamba" in slots else 21
    assert drafting.state_gib == pytest.approx((plain.state_gib or 0) * (1 + 21 * 4 / held), abs=0.002)


@pytest.mark.parametrize(
    ("engine", "flag", "instead"),
    [
        ("vllm", "--tp-size", "--tensor-parallel-size"),
        ("vllm", "--mem-fraction-static=0.9", "--gpu-memory-utilization"),
        ("sglang", "--max-model-len", "--context-length"),
        ("sglang", "-tp", "--tp-size"),
    ],
)
def test_a_flag_of_the_other_engine_is_refused_and_not_overlooked(engine: str, flag: str, instead: str) -> None:
    with pytest.raises(PredictError, match=f"is no flag of {engine}: write {instead}"):
        predict(DENSE, H100, engine, flags=[flag, "4"])
