"""What samples say of ``expect_toks`` and ``compare``: the interval, what was not counted, cards, drift, ``uses``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.claims.claim import Claim, Serves
from pytest_gpuguard.claims.expect import Compare, Expectation, ExpectToks, Fits, Rated, Uses
from pytest_gpuguard.claims.judgement import Body, Judgement, Verdict
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.observation import Decisive, Observation
from pytest_gpuguard.claims.resolved import FeatureEvidence, Resolved, Term, Vocabulary
from pytest_gpuguard.claims.series import Baseline, Series
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.verdict import judge, judge_claim
from tests.laws import given, st

READY = Observation("sglang", "ready", "ready", elapsed_s=42.4)
FLOOR = ExpectToks(60)
ABOUT = ExpectToks(None, 65)
OTHER = Serves("sglang", "m", ("--disable-custom-all-reduce",))
TWICE = Compare(other=OTHER, ratio=Comparison(">", 2))
STEADY = (70.0, 70.2, 69.9, 70.1, 70.0, 70.1, 69.9)


def of(stated: Rated, series: Series, observation: Observation = READY) -> Observation:
    return replace(observation, series={stated.subject: series})


def said(stated: Rated, series: Series, observation: Observation = READY) -> Judgement:
    return judge(stated, of(stated, series, observation), Body("passed"))


def scaled(rate: float) -> tuple[float, ...]:
    return tuple(sample * rate / 70 for sample in STEADY)


@pytest.mark.parametrize(
    ("stated", "rate", "verdict"),
    [
        (FLOOR, 70, "HOLDS"),
        (FLOOR, 55, "WORSE"),
        (ABOUT, 65, "HOLDS"),
        (ABOUT, 60, "WORSE"),
        (ABOUT, 70, "BETTER"),
        (TWICE, 2.3, "HOLDS"),
        (TWICE, 1.2, "WORSE"),
        (Compare(other=OTHER, ratio=Comparison("<", 0.5)), 0.42, "HOLDS"),
        (Compare(other=OTHER, ratio=Comparison("<", 0.5)), 0.9, "BETTER"),
    ],
    ids=lambda value: getattr(value, "label", str(value)),
)
def test_the_interval_of_the_true_rate_decides(stated: Rated, rate: float, verdict: str) -> None:
    judgement = said(stated, Series(scaled(rate)))
    assert judgement.verdict is Verdict[verdict]
    assert "7 samples" in judgement.fact
    assert "claimed" in judgement.fact


def test_the_fact_shows_the_interval_and_the_claim() -> None:
    assert said(FLOOR, Series(STEADY)).fact.startswith("70.0 tok/s (6")
    assert said(FLOOR, Series(STEADY)).fact.endswith("7 samples), claimed at least 60")
    assert said(ABOUT, Series(scaled(65))).fact.endswith("claimed 65 ± 5% (61.8–68.2)")
    assert "70.0 tok/s per request (" in said(ExpectToks(60, per="request"), Series(STEADY)).fact
    assert "2.301 × the other's tok/s (" in said(TWICE, Series(scaled(2.3), how="both up at once")).fact
    assert "the two servers: both up at once" in said(TWICE, Series(scaled(2.3), how="both up at once")).details


def test_what_straddles_or_is_too_little_is_inconclusive() -> None:
    straddling = said(FLOOR, Series((50.0, 70.0, 52.0, 69.0, 51.0, 68.0, 60.0)))
    assert straddling.verdict is Verdict.INCONCLUSIVE
    assert straddling.fact.endswith("the interval straddles it")
    few = said(FLOOR, Series((70.0,)))
    assert (few.verdict, few.fact) == (
        Verdict.INCONCLUSIVE, "ready, but too few samples of tok/s count (1 sample), claimed at least 60",
    )  # fmt: skip


def test_rejected_samples_are_told_with_the_commonest_reason() -> None:
    judgement = said(FLOOR, Series((), rejected=("GPU-a: power limit", "GPU-b: thermal limit", "GPU-b: thermal limit")))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "3 rejected: GPU-b: thermal limit" in judgement.fact


def test_requests_that_fail_contradict_and_a_meter_that_fails_does_not() -> None:
    failed = said(FLOOR, Series(STEADY, failed=("HTTP 500: boom",)))
    assert failed.verdict is Verdict.WORSE
    assert failed.fact == "ready, but requests failed in 1 of 8 runs: HTTP 500: boom"
    ours = said(FLOOR, Series(ours="the meter's process was killed"))
    assert (ours.verdict, ours.outcome) == (Verdict.INFRA, "infra.test")


def test_a_meter_that_was_short_of_cpu_contradicts_nothing() -> None:
    slow = said(ExpectToks(100), Series(STEADY, doubts=("the meter was busy",), understated=True))
    assert (slow.verdict, slow.details) == (Verdict.INCONCLUSIVE, ("the meter was busy",))
    assert slow.fact.endswith("claimed at least 100: the meter was short of CPU")
    assert said(FLOOR, Series(STEADY, understated=True)).verdict is Verdict.HOLDS
    assert said(ABOUT, Series(scaled(65), understated=True)).verdict is Verdict.INCONCLUSIVE
    assert said(ABOUT, Series(scaled(80), understated=True)).verdict is Verdict.BETTER


@pytest.mark.parametrize(
    ("ratio", "rate", "ours", "others"),
    [(">2", 2.3, True, False), (">2", 1.2, False, True), ("<0.5", 0.4, False, True), ("<0.5", 0.9, True, False)],
)
def test_a_ratio_stands_only_if_it_cannot_be_the_meters_doing(
    ratio: str, rate: float, ours: bool, others: bool
) -> None:
    """``ours``, ``others``: whose rate may be higher without changing the verdict."""
    stated = replace(TWICE, ratio=Comparison(ratio[0], float(ratio[1:])))
    clear = said(stated, Series(scaled(rate))).verdict
    assert clear is not Verdict.INCONCLUSIVE
    for series, stands in (
        (Series(scaled(rate), understated=True), ours),
        (Series(scaled(rate), others_understated=True), others),
    ):
        assert said(stated, series).verdict is (clear if stands else Verdict.INCONCLUSIVE)


def test_samples_of_another_load_shape_do_not_count() -> None:
    other = of(ExpectToks(60, concurrency=8), Series(STEADY))
    assert judge(FLOOR, other, Body("passed")).verdict is Verdict.INCONCLUSIVE


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=9), st.floats(1, 1000))
def test_a_higher_floor_never_makes_a_rate_better(samples: list[float], floor: float) -> None:
    order = [Verdict.HOLDS, Verdict.INCONCLUSIVE, Verdict.WORSE]
    low, high = (said(ExpectToks(one), Series(tuple(samples))).verdict for one in (floor, floor + 1))
    assert order.index(low) <= order.index(high)


# ------------------------------------------------------------------------------------------------------------- cards


BY_CARD = ExpectToks(cards=(("h200", 100.0), ("NVIDIA L4", 60.0)), by="min")


@pytest.mark.parametrize(
    ("cards", "verdict"),
    [
        (("h200",), "WORSE"),
        (("l4",), "HOLDS"),
        (("NVIDIA H200",), "WORSE"),
        (("h200", "l4"), "HOLDS"),  # the slowest card sets the pace
        (("h200", "h100"), "NOT_EVALUATED"),
        ((), "NOT_EVALUATED"),
    ],
)
def test_a_reference_is_that_of_the_card(cards: tuple[str, ...], verdict: str) -> None:
    judgement = said(BY_CARD, Series(STEADY), replace(READY, cards=cards))
    assert judgement.verdict is Verdict[verdict]
    assert judgement.expectation == "expect_toks(min by card, concurrency=1)"
    if verdict == "NOT_EVALUATED":
        assert judgement.reason == "card"
        assert "it is stated for h200, NVIDIA L4" in judgement.fact


# ------------------------------------------------------------------------------------------------------------- drift


@pytest.mark.parametrize(
    ("rate", "drifts"),
    [(76.0, True), (75.0, True), (71.0, False), (65.0, False)],
)
def test_a_rate_that_holds_and_is_surely_lower_than_once_verified_drifts(rate: float, drifts: bool) -> None:
    judgement = said(FLOOR, Series(STEADY, baseline=Baseline(rate, 1_780_000_000.0)))
    assert judgement.verdict is Verdict.HOLDS
    assert (judgement.warning is not None) is drifts
    if drifts:
        assert "less than the" in (judgement.warning or "")
        assert "verified on 2026-05-28" in (judgement.warning or "")


# --------------------------------------------------------------------------------------------------- other conditions


def test_a_server_that_is_compared_with_one_that_failed_is_judged_by_that_failure() -> None:
    failed = Observation("sglang", "oom.weights", "weights", decisive=Decisive(7, "CUDA out of memory"))
    seen = replace(READY, others={TWICE.subject: failed})
    judgement = judge(TWICE, seen, Body("passed"))
    assert (judgement.verdict, judgement.outcome) == (Verdict.WORSE, "oom.weights")
    assert judgement.fact.startswith("the other server: oom.weights: CUDA out of memory")
    busy = replace(READY, others={TWICE.subject: replace(failed, outcome="infra.lease")})
    assert judge(TWICE, busy, Body("passed")).verdict is Verdict.INFRA
    absent = said(TWICE, Series(unmet=("models", "no model folder")))
    assert (absent.verdict, absent.reason) == (Verdict.NOT_EVALUATED, "models")


def test_two_comparisons_with_different_servers_are_apart() -> None:
    others = [
        OTHER,
        Serves("sglang", "m"),
        replace(OTHER, env={"NCCL_ALGO": "Ring"}),
        replace(OTHER, wrapper=("nice",)),
    ]
    found = {replace(TWICE, other=one).subject for one in others} | {replace(TWICE, together=False).subject}
    assert len(found) == 5
    assert not any("Ring" in one for one in found)  # an environment may hold secrets


@pytest.mark.parametrize("shown", [True, False, None])
def test_a_speed_decides_nothing_unless_what_it_is_claimed_of_is_used(shown: bool | None) -> None:
    resolved = READY.resolved if shown is None else uses_shown(shown)
    observation = replace(of(FLOOR, Series(STEADY)), resolved=resolved)
    stated: tuple[Expectation, ...] = (FLOOR, Uses("custom"), Fits())
    claim = Claim(Needs(), Serves("sglang", "m"), stated)
    rate, _, fits = judge_claim(claim, [observation], lambda name: None, Body("passed"))
    assert fits.verdict is Verdict.HOLDS
    assert rate.verdict is (Verdict.HOLDS if shown else Verdict.INCONCLUSIVE)
    if not shown:
        assert "not decided, because uses(custom) is" in rate.fact


def uses_shown(on: bool) -> Resolved:
    """A server whose log shows the feature on, or off."""
    evidence = FeatureEvidence("custom", on, "line 4: it says so")
    return Resolved(features=(evidence,), vocabulary=Vocabulary({"custom": Term("feature", "custom")}))
