"""What the answers of a ready server say: bad ones are a failure like any other, and no answer is no proof."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.claims.answers import Answers, Check
from pytest_gpuguard.claims.expect import (
    Expectation,
    ExpectToks,
    Fails,
    Fits,
    Ignores,
    MaxMem,
    Ooms,
    Unsupported,
    Uses,
    Works,
)
from pytest_gpuguard.claims.observation import MemoryTable, Observation
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.verdict import Body, Verdict, judge

READY = Observation("sglang", "ready", "ready", elapsed_s=42.4, memory=MemoryTable(weights_gib=1.0, kv_gib=1.0))
GOOD = Check("prefill", True, "400 tokens prefilled")
NAN = Check("burst", False, "the log-prob of output token 0 is null", "numerics")
LOST = Check("same prompt again", False, "the connection broke", "unknown")
OPEN = Check("long prompt", None, "the server refused: too long")


def seen(*checks: Check, level: str = "short", score: tuple[int, int] | None = None) -> Observation:
    return replace(READY, answers=Answers(level, checks, *(score or (None, None))))


@pytest.mark.parametrize(
    ("expectation", "verdict"),
    [
        (Fits(), "WORSE"),
        (Works(), "WORSE"),
        (Fails("numerics"), "HOLDS"),
        (Fails("numerics", match="log-prob"), "HOLDS"),
        (Fails("numerics", match="something else"), "CHANGED"),
        (Ooms(), "CHANGED"),
        (Unsupported("nvfp4", how="crashes"), "CHANGED"),
    ],
    ids=lambda value: getattr(value, "label", value),
)
def test_a_bad_answer_is_a_failure_like_any_other(expectation: Expectation, verdict: str) -> None:
    judgement = judge(expectation, seen(GOOD, NAN), Body("passed"))
    assert (judgement.verdict, judgement.outcome) == (Verdict[verdict], "numerics")
    assert "burst: the log-prob of output token 0 is null" in judgement.fact


@pytest.mark.parametrize("expectation", [MaxMem(9.0), Uses("x"), Ignores("--x"), Unsupported("x", "falls_back")])
def test_what_is_not_about_answers_is_judged_without_them(expectation: Expectation) -> None:
    assert judge(expectation, seen(NAN)) == judge(expectation, READY)


def test_a_request_that_failed_without_a_cause_contradicts_and_proves_no_negative_claim() -> None:
    assert judge(Fits(), seen(GOOD, LOST)).verdict is Verdict.WORSE
    assert judge(Ooms(), seen(GOOD, LOST)).verdict is Verdict.INCONCLUSIVE
    assert judge(Fails("numerics"), seen(GOOD, LOST)).verdict is Verdict.INCONCLUSIVE


def test_the_log_of_a_server_that_died_of_it_comes_first() -> None:
    died = replace(seen(GOOD, LOST), outcome="oom.runtime")
    assert judge(Ooms(("runtime",)), died).verdict is Verdict.HOLDS
    assert judge(Fits(), died).outcome == "oom.runtime"


@pytest.mark.parametrize(
    ("observation", "fact"),
    [
        (READY, "ready in 42 s"),
        (seen(GOOD), "ready in 42 s, and answers"),
        (seen(GOOD, OPEN), "ready in 42 s, and answers"),
        (seen(OPEN), "ready in 42 s, answers not checked (the server refused: too long)"),
    ],
)
def test_that_it_fits_says_whether_it_answers(observation: Observation, fact: str) -> None:
    judgement = judge(Fits(), observation)
    assert (judgement.verdict, judgement.fact) == (Verdict.HOLDS, fact)


def test_dummy_weights_show_that_it_answers_and_not_that_it_works() -> None:
    dummy = replace(READY, answers=Answers("short", (GOOD,), judged=False))
    fits, works = judge(Fits(), dummy), judge(Works(), dummy)
    assert (fits.verdict, fits.fact) == (
        Verdict.HOLDS, "ready in 42 s, and answers (dummy weights: what it answers is not judged)",
    )  # fmt: skip
    assert works.verdict is Verdict.INCONCLUSIVE
    assert judge(Works(), replace(READY, answers=Answers("short", (LOST,), judged=False))).verdict is Verdict.WORSE


def test_works_needs_an_answer() -> None:
    assert judge(Works(), READY).verdict is Verdict.INCONCLUSIVE
    assert judge(Works(), seen(OPEN)).verdict is Verdict.INCONCLUSIVE
    assert judge(Works("full"), seen(GOOD)).verdict is Verdict.INCONCLUSIVE
    judgement = judge(Works(), seen(GOOD, OPEN))
    assert judgement.verdict is Verdict.HOLDS
    assert "prefill: 400 tokens prefilled" in judgement.fact
    assert judgement.details == ("long prompt: not checked: the server refused: too long",)


@pytest.mark.parametrize(
    ("bound", "score", "verdict"),
    [
        (Comparison(">=", 0.85), (99, 100), "HOLDS"),
        (Comparison(">=", 0.85), (18, 20), "INCONCLUSIVE"),
        (Comparison(">=", 0.85), (0, 20), "WORSE"),
        (Comparison("<", 0.5), (99, 100), "BETTER"),
        (Comparison(">=", 0.85), None, "INCONCLUSIVE"),
    ],
)
def test_an_accuracy_floor_is_judged_by_the_interval(
    bound: Comparison, score: tuple[int, int] | None, verdict: str
) -> None:
    judgement = judge(Works("full", bound, "q.jsonl"), seen(GOOD, level="full", score=score))
    assert judgement.verdict is Verdict[verdict]
    if score is not None:
        assert f"{score[1]} questions), claimed {bound}" in judgement.fact


@pytest.mark.parametrize(("score", "verdict"), [((99, 100), "HOLDS"), ((18, 20), "INCONCLUSIVE"), ((0, 20), "WORSE")])
def test_every_verdict_on_accuracy_tells_how_it_was_measured(score: tuple[int, int], verdict: str) -> None:
    told = Check("accuracy", True, "so many answered rightly; 3 answers were cut at their max_tokens")
    judgement = judge(Works("full", Comparison(">=", 0.85), "q.jsonl"), seen(GOOD, told, level="full", score=score))
    assert judgement.verdict is Verdict[verdict]
    assert f"accuracy: {told.fact}" in judgement.details


def test_an_accuracy_that_could_not_be_measured_says_why() -> None:
    why = Check("accuracy", None, "30 of 30 answers were cut at their max_tokens before they began: raise max_tokens")
    judgement = judge(Works("full", Comparison(">=", 0.85), "q.jsonl"), seen(GOOD, why, level="full"))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.details == (f"accuracy: not checked: {why.fact}",)


def test_a_server_that_answers_garbage_has_no_speed() -> None:
    judgement = judge(ExpectToks(60), seen(NAN))
    assert (judgement.verdict, judgement.outcome) == (Verdict.WORSE, "numerics")
