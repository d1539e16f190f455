"""The known breakages of which no boot says anything: the shipped claim, once with the symptom there and once cured.

What answers is a made-up model on cards of the NVML stand-in, whose answers are wrong in the way that was reported.
Nothing here says anything about real hardware: docs/breakages.md tells what each does not show.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpuguard.measure.ask import Asker
from pytest_gpuguard.measure.questions import read_questions
from pytest_gpuguard.measure.reference import make, write

from .answers_server import answers_server
from .breakages import (
    HOLDS,
    SERVICE,
    SILENT,
    SUITE,
    UPGRADES,
    WORSE,
    Judge,
    judged,
    stack_with_breakages,
    suite,
)
from .measured import QUICK

__all__ = ["judged", "stack_with_breakages", "suite"]

GLM = "glm-5.2-nvfp4"
REPLIES = json.dumps({one.text: f"That makes {one.answer}." for one in read_questions(SUITE / "questions.jsonl")})


@pytest.mark.parametrize(("symptom", "verdict"), [("speculation", WORSE), ("", HOLDS)], ids=["broken", "cured"])
def test_18_a_draft_worker_that_dies_under_load(judged: Judge, suite: Path, symptom: str, verdict: str) -> None:
    quick(suite)
    load = "test_mtp_under_load"
    found, said = judged(symptom, SILENT, load)[load]
    assert found == verdict, said
    assert ("illegal_memory" in said) is bool(symptom)


@pytest.mark.parametrize(
    ("symptom", "verdict", "told"),
    [
        ("rambles", WORSE, "after a long text the code of the lighthouse is said to be"),
        ("keeps_repeating", WORSE, "after a long text one run of four words makes up"),
        ("", HOLDS, "ready"),
    ],
)
def test_19_a_long_context_that_is_not_read_or_makes_it_ramble(
    judged: Judge, symptom: str, verdict: str, told: str
) -> None:
    read = "test_a_long_context_is_read"
    found, said = judged(symptom, SILENT, read)[read]
    assert found == verdict, said
    assert told in said


@pytest.mark.parametrize(("symptom", "verdict"), [("wrong_kernel", WORSE), ("", HOLDS)], ids=["broken", "cured"])
def test_22_log_probs_that_moved_are_seen_by_a_reference_of_the_good_stack(
    judged: Judge, suite: Path, symptom: str, verdict: str
) -> None:
    reference = suite / f"{GLM}.ref.json"
    with (
        answers_server(model_info={"model_path": f"/models/{GLM}"}) as good,
        Asker(good.url, {}, deadline_s=20.0) as asker,
    ):
        write(make(asker), reference)
    likely = "test_log_probs_are_those_of_the_reference"
    found, said = judged(symptom, SILENT, likely)[likely]
    assert found == verdict, said
    assert ("numerics" in said) is bool(symptom)
    assert "nats" in said


def test_22_without_a_reference_it_is_not_evaluated_and_the_report_says_how_to_make_one(judged: Judge) -> None:
    likely = "test_log_probs_are_those_of_the_reference"
    found, said = judged("", SILENT, likely)[likely]
    assert found == "NOT_EVALUATED"
    assert f"run gpuguard reference URL -o {GLM}.ref.json" in said


@pytest.mark.parametrize(("toks", "verdict"), [(70, WORSE), (90.5, HOLDS)], ids=["broken", "cured"])
def test_23_a_baseline_that_is_missed_without_an_error(judged: Judge, suite: Path, toks: float, verdict: str) -> None:
    """Answers of 64 tokens in the place of 512, for the time of this test; the bounds are the shipped ones."""
    quick(suite)
    file = suite / SERVICE
    text = file.read_text(encoding="utf-8")
    claimed = '@expect_toks(about=89.5, tolerance="5%", concurrency=1, input_len=128, output_len='
    assert f"{claimed}512)" in text
    file.write_text(text.replace(f"{claimed}512)", f"{claimed}64)"), encoding="utf-8")
    speed = "test_the_baseline_makes_89_tokens_per_second"
    found, said = judged("", SERVICE, speed, BREAKAGE_TOKS=str(toks))[speed]
    assert found == verdict, said
    assert ("tok/s" in said) is (verdict == WORSE)


@pytest.mark.parametrize(("symptom", "verdict"), [("nan", WORSE), ("", HOLDS)], ids=["broken", "cured"])
def test_24_nan_in_the_log_probs(judged: Judge, symptom: str, verdict: str) -> None:
    answers = "test_glm_nvfp4_answers"
    found, said = judged(symptom, UPGRADES, answers)[answers]
    assert found == verdict, said
    assert ("is nan" in said) is bool(symptom)


@pytest.mark.parametrize(
    ("symptom", "verdict", "told"),
    [("wrong_answers", WORSE, "accuracy 0.000"), ("", HOLDS, "accuracy 1.000")],
    ids=["broken", "cured"],
)
def test_24_wrong_answers_without_nan(judged: Judge, symptom: str, verdict: str, told: str) -> None:
    twenty = "test_twenty_questions"
    found, said = judged(symptom, SILENT, twenty, BREAKAGE_REPLIES=REPLIES)[twenty]
    assert found == verdict, said
    assert told in said


def quick(suite: Path) -> None:
    """Samples of a fifth of a second: the suite's conftest stays as it is, this one is beside the suites."""
    conftest = suite.parent / "conftest.py"
    conftest.write_text(f"{conftest.read_text(encoding='utf-8')}\n{QUICK}", encoding="utf-8")
