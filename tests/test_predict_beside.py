"""A prediction beside a measurement: what is said, what is said aloud, and that no verdict depends on it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.layout import Layout
from pytest_gpuguard.claims.observation import MemoryTable, Observation
from pytest_gpuguard.predict import Prediction
from pytest_gpuguard.predict.beside import absent, beside, compared, lines_of
from tests.predict_models import DENSE, changed

Run = Any
FakeRigs = Any

PREDICTED = Prediction(
    engine="sglang",
    version="0.5.7",
    rules="0.5.7",
    layout=Layout(8, ep=8),
    gpus_used=8,
    verdict="fits",
    phase="ready",
    explanation="",
    avail_before_gib=94.0,
    weights_gib=71.8,
    rest_gib=8.2,
    kv_tokens=125_000,
    graph_gib=0.8,
    margin_gib=10.0,
    bars={"avail_before_gib": 0.4, "weights_gib": 2.3, "rest_gib": 2.6, "kv_tokens": 40_000, "graph_gib": 0.8},
)


def seen(outcome: str = "ready", **memory: Any) -> Observation:
    return Observation("sglang", outcome, "ready", memory=MemoryTable(**memory), was_ready=outcome == "ready")


def test_numbers_within_their_bars_are_told_side_by_side() -> None:
    (line,) = beside(PREDICTED, seen(weights_gib=72.3, kv_tokens=120_000, rest_gib=7.7, free_gib=9.5))
    assert line == (
        "prediction (rules of 0.5.7): weights predicted 71.8 ± 2.3 GiB, measured 72.3; "
        "room for the KV pool predicted 8.20 ± 2.60 GiB, measured 7.70; "
        "KV tokens predicted 125,000 ± 40,000 tokens, measured 120,000; margin predicted 10.0 GiB, measured 9.50"
    )


def test_a_difference_beyond_the_bar_is_said_aloud_with_the_fact_to_take() -> None:
    lines = beside(PREDICTED, seen(weights_gib=77.2, avail_before_gib=94.1))
    assert lines[1] == (
        "the weights are 5.4 GiB more than predicted (bar 2.3): buffers taken while loading (all-to-all, a draft, "
        'adapters) are in no config.json; measured={"weights_gib": 77.2} takes the fact'
    )
    assert len(lines) == 2


def test_less_than_predicted_is_said_too() -> None:
    (_, line) = beside(PREDICTED, seen(weights_gib=60.0))
    assert line.startswith("the weights are 11.8 GiB less than predicted (bar 2.3): measured=")


def test_what_follows_from_another_number_says_so() -> None:
    data = compared(PREDICTED, seen(weights_gib=77.2, rest_gib=2.8, kv_tokens=40_000))
    assert data["beyond"] == ["weights_gib", "rest_gib", "kv_tokens"]
    said = lines_of(data)
    assert said[2] == "the room for the KV pool is 5.40 GiB less than predicted (bar 2.60): it follows from the weights"
    assert said[3].endswith("(bar 40,000): it follows from the weights and the room for the KV pool")


def test_half_of_the_last_printed_digit_is_no_difference() -> None:
    assert compared(PREDICTED, seen(weights_gib=74.104))["beyond"] == []
    assert compared(PREDICTED, seen(weights_gib=74.11))["beyond"] == ["weights_gib"]


def test_a_number_that_one_side_lacks_is_left_out() -> None:
    data = compared(replace(PREDICTED, kv_tokens=None), seen(weights_gib=72.0, kv_tokens=1))
    assert list(data["predicted"]) == list(data["measured"]) == ["weights_gib"]
    assert beside(PREDICTED, seen("oom.weights")) == (
        "prediction (rules of 0.5.7): fits; the boot printed no number of it",
        "the boot ended oom.weights, where fits was predicted",
    )


def test_free_memory_is_a_margin_only_of_a_server_that_was_up() -> None:
    assert "margin_gib" not in compared(PREDICTED, seen("oom.kv_pool", free_gib=16.3))["measured"]
    assert compared(PREDICTED, seen(free_gib=9.0))["measured"] == {"margin_gib": 9.0}


def test_a_number_that_was_given_has_no_error() -> None:
    known = replace(PREDICTED, weights_gib=77.7, bars={"weights_gib": 0.0})
    (_, line) = beside(known, seen(weights_gib=71.0))
    assert "(a number that was given)" in line


@pytest.mark.parametrize(
    ("verdict", "outcome", "aloud"),
    [
        ("fits", "ready", False),
        ("fits", "oom.kv_pool", True),
        ("oom.kv_pool", "oom.kv_pool", False),
        ("oom.kv_pool", "oom.weights", True),
        ("rejected", "ready", True),
        ("fits", "illegal_memory", False),  # says nothing of memory
        ("fits", "oom.runtime", False),  # after the boot
        ("fits", "infra.deadline", False),
    ],
)
def test_an_end_that_memory_decided_otherwise_is_said_aloud(verdict: str, outcome: str, aloud: bool) -> None:
    data = compared(replace(PREDICTED, verdict=verdict), seen(outcome))
    assert ("verdict" in data["beyond"]) is aloud


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"rest_gib": 1.0}, "oom.kv_pool"),
        ({"verdict": "oom.kv_pool", "rest_gib": -2.0}, "ready"),
        ({"verdict": "oom.weights", "weights_gib": 95.0}, "oom.kv_pool"),
    ],
)
def test_an_end_that_was_too_close_to_tell_is_not(changes: dict[str, Any], outcome: str) -> None:
    assert compared(replace(PREDICTED, **changes), seen(outcome))["beyond"] == []


def test_without_a_prediction_the_reason_is_told() -> None:
    data = absent("config.json: hidden_size is missing")
    assert set(data) == set(compared(PREDICTED, seen()))
    assert lines_of(data) == ("no prediction beside it: config.json: hidden_size is missing",)
    assert lines_of(data, everything=False) == ()


def test_only_what_is_beyond_is_told_where_it_must_be_short() -> None:
    data = compared(PREDICTED, seen(weights_gib=77.2))
    assert len(lines_of(data, everything=False)) == 1
    assert lines_of(compared(PREDICTED, seen(weights_gib=72.0)), everything=False) == ()


def test_the_payload_is_json_with_documented_keys() -> None:
    data = json.loads(json.dumps(compared(PREDICTED, seen(weights_gib=77.2)), allow_nan=False))
    text = (Path(__file__).parents[1] / "docs" / "prediction.md").read_text(encoding="utf-8")
    assert [key for key in data if f"`{key}`" not in text] == []


# ------------------------------------------------------------------------------------------------------------- in a run

#: About 1.4 GiB on one rank: the stand-in server says that it holds 1.50 of 94.00 free.
FITTING = changed(DENSE, num_hidden_layers=9, max_position_embeddings=2048)
CLAIM = """
    @needs_sm120
    @serves("sglang", MODEL, "--mem-fraction-static 0.8 --max-total-tokens 4096")
    @fits
    def test_it(): ...
    """


def payloads(pytester: pytest.Pytester) -> None:
    """Print every payload of the run."""
    pytester.makeconftest(
        """
        import json

        def pytest_runtest_logreport(report):
            data = getattr(report, "gpuguard", None)
            if data is not None:
                print("PAYLOAD", json.dumps(data["prediction"]))
        """
    )


def of(result: pytest.RunResult) -> Any:
    return json.loads(re.findall(r"PAYLOAD (.*)", result.stdout.str())[-1])


@pytest.fixture
def on_gpus(fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> None:
    fake_rig(n=2).apply(monkeypatch)
    payloads(pytester)


@pytest.mark.usefixtures("on_gpus")
def test_a_boot_on_gpus_is_told_beside_its_prediction(claims: Run, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(FITTING))
    result = claims(CLAIM, "-v", "-s")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "HOLDS *test_it*",
            "*prediction (rules of 0.5.23): *weights predicted 1.? ± 0.? GiB, measured 1.5;*",
        ]
    )
    data = of(result)
    assert data["measured"] | {"avail_before_gib": 94.0, "weights_gib": 1.5, "kv_tokens": 4096} == data["measured"]
    assert data["predicted"]["kv_tokens"] == 4096
    assert data["bars"]["weights_gib"] > 0
    assert data["absent"] is None


@pytest.mark.usefixtures("on_gpus")
def test_a_difference_is_said_without_being_asked_and_changes_no_verdict(claims: Run, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(changed(DENSE, num_hidden_layers=40)))
    result = claims(CLAIM, "-s")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["HOLDS *test_it*", "*the weights are * GiB less than predicted (bar *"])
    assert "weights_gib" in of(result)["beyond"]


@pytest.mark.usefixtures("on_gpus")
def test_a_known_fact_takes_the_place_of_a_rule_in_the_prediction_only(
    claims: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boots = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(boots))
    (model / "config.json").write_text(json.dumps(changed(DENSE, num_hidden_layers=40)))
    declared = CLAIM.replace(' 4096")', ' 4096", measured={"weights_gib": 1.5})')
    data = of(claims(declared, "-s"))
    assert data["predicted"]["weights_gib"] == 1.5
    assert "weights_gib" not in data["beyond"]
    assert "measured" not in boots.read_text()


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("config", ["{}", "[1]", '{"hidden_size": -1}'])
def test_a_model_that_cannot_be_predicted_changes_nothing(claims: Run, model: Path, config: str) -> None:
    (model / "config.json").write_text(config)
    result = claims(CLAIM, "-v", "-s")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["HOLDS *test_it*", "*no prediction beside it: *config.json*"])
    assert of(result)["absent"]


def test_nothing_is_predicted_for_a_server_on_the_cpu(claims: Run, model: Path, pytester: pytest.Pytester) -> None:
    payloads(pytester)
    (model / "config.json").write_text(json.dumps(FITTING))
    result = claims('@serves("sglang", MODEL, CPU)\n@fits\ndef test_it(): ...\n', "-v", "-s")
    assert result.ret == 0
    assert of(result) is None
    assert "prediction" not in result.stdout.str().replace("PAYLOAD null", "")
