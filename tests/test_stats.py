"""The noise model: what a few rates may decide, and how often wrongly. benchmarks/calibration.py has the table."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.calibration import CASES, NOISES, Case, simulate
from pytest_gpuguard.claims.stats import (
    CONFIDENCE,
    LEAST,
    MOST,
    RESOLUTION,
    Interval,
    Standing,
    decide,
    interval,
    ratio_samples,
    student_quantile,
)

CLAIMS = 300
SEED = 1
#: Two per cent of 300 claims, and two standard deviations of their count.
FEW = 0.02 + 2 * math.sqrt(0.02 * 0.98 / CLAIMS)

#: More correlation than the model claims to bear, and noise that asks less of it than others in the list.
BEYOND_OR_EASY = ("AR(1) ρ 0.8", "white, σ 1 %", "5 % outliers", "heavy tails (t3)")
RATES = st.lists(st.floats(50, 200), min_size=LEAST, max_size=MOST)


def of(samples: Sequence[float]) -> Interval:
    found = interval(samples)
    assert found is not None
    return found


def width(samples: Sequence[float]) -> float:
    found = of(samples)
    return math.log(found.high / found.low)


def noisy(sigma: float, n: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [65 * math.exp(rng.gauss(0, sigma)) for _ in range(n)]


def case_of(claim: str, truth: float) -> Case:
    return next(case for case in CASES if case.claim == claim and case.truth == truth)


# How often it is wrong, and how often it answers


@pytest.mark.parametrize("noise", [noise for noise in NOISES if noise not in BEYOND_OR_EASY])
@pytest.mark.parametrize(("claim", "truth"), [("min", 1.0), ("about ± 5 %", 0.95), ("ratio > 1.05", 1.05)])
def test_a_true_claim_on_its_bound_is_rarely_contradicted_and_a_hair_beyond_it_rarely_holds(
    claim: str, truth: float, noise: str
) -> None:
    row = simulate(case_of(claim, truth), noise, CLAIMS, SEED)
    assert row.false_contradicted <= FEW
    assert row.right <= FEW  # so often would the claim hold if its bound were the next number


@pytest.mark.parametrize("noise", ["white", "AR(1) ρ 0.3", "heavy tails (t3)", "drift −3 %", "drift +3 %"])
@pytest.mark.parametrize(
    ("claim", "truth"),
    [
        ("min", 0.9),
        ("min", 1.1),
        ("about ± 5 %", 1.0),
        ("about ± 5 %", 0.9),
        ("about ± 5 %", 1.1),
        ("ratio > 2", 2.2),
    ],
)
def test_differences_of_none_and_of_a_tenth_are_nearly_all_decided_rightly(
    claim: str, truth: float, noise: str
) -> None:
    row = simulate(case_of(claim, truth), noise, 100, SEED)
    assert row.right >= 0.9
    assert row.false_contradicted == row.false_holds == 0


@pytest.mark.parametrize("noise", ["AR(1) ρ 0.6", "5 % outliers", "ρ 0.6 and outliers", "bursts of 3"])
@pytest.mark.parametrize(
    ("claim", "truth", "right"), [("min", 0.9, 0.95), ("min", 1.1, 0.95), ("about ± 5 %", 1.0, 0.6)]
)
def test_hard_noise_leaves_claims_open_and_does_not_turn_them(
    claim: str, truth: float, right: float, noise: str
) -> None:
    row = simulate(case_of(claim, truth), noise, 100, SEED)
    assert row.right >= right
    assert row.false_contradicted <= 0.01
    assert row.false_holds == 0


@pytest.mark.parametrize(("truth", "samples"), [(1.0, 12), (0.9, 10), (1.1, 12)])
def test_a_quiet_server_is_judged_with_few_samples(truth: float, samples: int) -> None:
    row = simulate(case_of("about ± 5 %", truth), "white, σ 1 %", 100, SEED)
    assert row.right == 1
    assert row.samples <= samples


# What the interval is


@settings(deadline=None)
@given(RATES, st.floats(0.001, 1000))
def test_the_unit_does_not_matter(samples: list[float], unit: float) -> None:
    one, other = of(samples), of([unit * sample for sample in samples])
    assert other.center == pytest.approx(unit * one.center)
    assert other.low == pytest.approx(unit * one.low)
    assert other.high == pytest.approx(unit * one.high)


@settings(deadline=None)
@given(RATES)
def test_which_one_is_the_divisor_does_not_matter(samples: list[float]) -> None:
    one, other = of(samples), of([1 / sample for sample in samples])
    assert (other.low, other.center, other.high) == pytest.approx((1 / one.high, 1 / one.center, 1 / one.low))


@settings(deadline=None)
@given(RATES, st.floats(1.01, 3))
def test_more_noise_is_a_wider_interval(samples: list[float], factor: float) -> None:
    louder = [100 * (sample / 100) ** factor for sample in samples]
    least = 2 * RESOLUTION
    assert width(louder) >= width(samples) * (1 - 1e-9)
    if width(samples) > least * (1 + 1e-9):
        assert width(louder) == pytest.approx(factor * width(samples))


@pytest.mark.parametrize("n", [12, 20, MOST])
def test_the_same_rates_in_a_slow_wave_say_less(n: int) -> None:
    samples = noisy(0.03, n)
    slow = sorted(samples[::2]) + sorted(samples[1::2], reverse=True)
    assert width(slow) > 1.3 * width(samples)
    assert of(slow).center == pytest.approx(of(samples).center)


@pytest.mark.parametrize(("n", "times"), [(LEAST, 7), (12, 8), (MOST, 4)])
def test_samples_that_look_independent_are_not_believed_to_be(n: int, times: float) -> None:
    samples = [65 * (1.02 if index % 2 else 0.98) for index in range(n)]
    naive = 2 * student_quantile(0.991, n - 1) * 0.02 / math.sqrt(n)
    assert width(samples) > times * naive


@settings(deadline=None)
@given(RATES, st.floats(0.001, 1))
def test_how_slow_the_slowest_sample_is_does_not_matter(samples: list[float], slowdown: float) -> None:
    slowest = samples.index(min(samples))
    disturbed = [*samples[:slowest], samples[slowest] * slowdown, *samples[slowest + 1 :]]
    assert of(disturbed) == of(samples)


@pytest.mark.parametrize(("n", "slow"), [(10, 2), (20, 4), (35, 7)])
def test_one_disturbed_sample_in_five_moves_the_center_by_less_than_the_noise(n: int, slow: int) -> None:
    samples = noisy(0.03, n)
    disturbed = [sample * (0.5 if index % 5 == 2 else 1) for index, sample in enumerate(samples)]
    assert sum(one != other for one, other in zip(samples, disturbed, strict=True)) == slow
    assert abs(of(disturbed).center / of(samples).center - 1) < 0.03


def test_more_samples_of_the_same_noise_are_a_narrower_interval() -> None:
    rounds = [[width(noisy(0.03, n, seed)) for seed in range(40)] for n in (8, 12, 18, 27, MOST)]
    means = [sum(widths) / len(widths) for widths in rounds]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.08  # ± 4 %, where a claim asks for ± 5 %


@settings(deadline=None)
@given(RATES)
def test_an_interval_holds_its_center_and_says_what_it_is_of(samples: list[float]) -> None:
    found = of(samples)
    assert min(samples) * (1 - 1e-9) <= found.center <= max(samples) * (1 + 1e-9)
    assert found.low < found.center < found.high
    assert found.n == len(samples)
    assert found.confidence == CONFIDENCE == 0.96


# What it decides


@pytest.mark.parametrize(
    ("low", "high", "standing"),
    [
        (60, None, Standing.INSIDE),
        (66, None, Standing.BELOW),
        (None, 66, Standing.INSIDE),
        (None, 60, Standing.ABOVE),
        (61.75, 68.25, Standing.INSIDE),
        (66, 70, Standing.BELOW),
        (60, 64, Standing.ABOVE),
    ],
)
def test_constant_samples_decide_as_soon_as_they_may(low: float | None, high: float | None, standing: Standing) -> None:
    assert decide([65.0] * LEAST, low, high).standing is standing
    early = decide([65.0] * (LEAST - 1), low, high)
    assert early.standing is Standing.OPEN
    assert early.interval is None


@pytest.mark.parametrize(("low", "high"), [(65.0, None), (65.2, None), (None, 64.8), (64.8, 65.2)])
def test_no_meter_is_exact_so_that_equal_samples_near_a_bound_decide_nothing(
    low: float | None, high: float | None
) -> None:
    decision = decide([65.0] * MOST, low, high)
    assert decision.standing is Standing.OPEN
    assert decision.interval is not None


@settings(deadline=None)
@given(st.lists(st.floats(97, 103), min_size=12, max_size=MOST), st.floats(85, 115), st.floats(0.01, 0.2))
def test_the_answer_is_where_the_interval_lies(samples: list[float], about: float, tolerance: float) -> None:
    low, high = about * (1 - tolerance), about * (1 + tolerance)
    decision, found = decide(samples, low, high), of(samples)
    assert decision.interval == found
    assert (
        decision.standing
        is {
            (False, False, False): Standing.OPEN,
            (True, False, False): Standing.BELOW,
            (False, True, False): Standing.INSIDE,
            (False, False, True): Standing.ABOVE,
        }[(found.high < low, low <= found.low and found.high <= high, found.low > high)]
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1, 500), min_size=1, max_size=50))
def test_after_the_last_look_the_answer_stays(more: list[float]) -> None:
    samples = noisy(0.03, MOST)
    for low, high in ((60, None), (61.75, 68.25), (65, None)):
        assert decide([*samples, *more], low, high) == decide(samples, low, high)


# Ratios


def test_a_ratio_of_each_block_of_four() -> None:
    series = [("a", 20.0), ("b", 10.0), ("b", 10.0), ("a", 20.0), ("a", 30.0), ("b", 10.0), ("b", 10.0), ("a", 30.0)]
    assert ratio_samples(series) == pytest.approx((2.0, 3.0))
    assert ratio_samples([("b" if side == "a" else "a", rate) for side, rate in series]) == pytest.approx(
        (1 / 2, 1 / 3)
    )


def test_the_oldest_partner_is_taken() -> None:
    series = [("a", 10.0), ("a", 20.0), *[("b", 10.0)] * 4, ("a", 10.0), ("a", 20.0)]
    assert ratio_samples(series) == pytest.approx((1.0, 2.0))


@settings(deadline=None)
@given(st.floats(-0.05, 0.05), st.floats(0.8, 1.25), st.sampled_from(["abba", "baab", "aabbbbaa", "abbabaab"]))
def test_a_steady_drift_cancels_in_every_ratio(drift: float, habit: float, order: str) -> None:
    series = []
    for index, side in enumerate(order * 3):
        rate = (2.2 if side == "a" else 1.0) * math.exp(drift * index)
        second = index % 2 == 1 and order != "aabbbbaa"  # whatever comes second of two may be slower, or faster
        series.append((side, rate * habit if second else rate))
    assert ratio_samples(series) == pytest.approx([2.2] * (len(series) // 4))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(1, 100)), max_size=40), st.integers(0, 40))
def test_a_ratio_once_complete_stays(series: list[tuple[str, float]], n: int) -> None:
    early = ratio_samples(series[:n])
    assert ratio_samples(series)[: len(early)] == early


@pytest.mark.parametrize(
    ("order", "ratios"), [("", 0), ("abb", 0), ("abab", 0), ("aaaa", 0), ("abbaabb", 1), ("abbaa", 1), ("abbbbaaa", 1)]
)
def test_what_has_no_partner_gives_no_ratio(order: str, ratios: int) -> None:
    assert len(ratio_samples([(side, 10.0) for side in order])) == ratios


# Student's t


@pytest.mark.parametrize(
    ("freedom", "at_95", "at_975", "at_99", "at_995"),
    [
        (2, 2.920, 4.303, 6.965, 9.925),
        (3, 2.353, 3.182, 4.541, 5.841),
        (5, 2.015, 2.571, 3.365, 4.032),
        (10, 1.812, 2.228, 2.764, 3.169),
        (20, 1.725, 2.086, 2.528, 2.845),
        (30, 1.697, 2.042, 2.457, 2.750),
        (60, 1.671, 2.000, 2.390, 2.660),
        (100, 1.660, 1.984, 2.364, 2.626),
    ],
)
def test_quantiles_are_those_of_the_tables(
    freedom: float, at_95: float, at_975: float, at_99: float, at_995: float
) -> None:
    found = [student_quantile(probability, freedom) for probability in (0.95, 0.975, 0.99, 0.995)]
    assert [round(one, 3) for one in found] == [at_95, at_975, at_99, at_995]


@settings(deadline=None)
@given(st.floats(0.55, 0.999))
def test_quantiles_agree_with_the_closed_forms(probability: float) -> None:
    twice = 2 * probability - 1
    assert student_quantile(probability, 2) == pytest.approx(twice * math.sqrt(2 / (1 - twice**2)), rel=1e-5)
    tail = 4 * probability * (1 - probability)
    root = math.cos(math.acos(math.sqrt(tail)) / 3) / math.sqrt(tail)
    assert student_quantile(probability, 4) == pytest.approx(2 * math.sqrt(root - 1), rel=1e-5)


@settings(deadline=None)
@given(st.floats(2, 60), st.floats(0.1, 10))
def test_quantiles_fall_with_the_degrees_of_freedom_whole_or_not(freedom: float, more: float) -> None:
    assert student_quantile(0.991, freedom) > student_quantile(0.991, freedom + more) > 2.3656


# Bad input


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -65.0])
@pytest.mark.parametrize(("at", "n"), [(0, 1), (LEAST, MOST), (MOST + 3, MOST + 5)])
def test_a_sample_that_is_no_rate_is_refused_wherever_it_is(bad: float, at: int, n: int) -> None:
    samples = [65.0] * n
    samples[at] = bad
    with pytest.raises(ValueError, match="is not a rate"):
        interval(samples)
    with pytest.raises(ValueError, match="is not a rate"):
        decide(samples, 60, None)
    with pytest.raises(ValueError, match="is not a rate"):
        ratio_samples([("a", sample) for sample in samples])


@pytest.mark.parametrize(
    ("low", "high"), [(70, 60), (math.nan, None), (None, math.nan), (60, math.inf), (math.inf, None)]
)
def test_bounds_that_bound_nothing_are_refused(low: Any, high: Any) -> None:
    with pytest.raises(ValueError, match="finite numbers in order"):
        decide([65.0] * LEAST, low, high)


def test_no_bound_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a lower nor an upper bound"):
        decide([65.0] * LEAST, None, None)


def test_a_third_side_is_refused() -> None:
    with pytest.raises(ValueError, match="'A' is neither"):
        ratio_samples([("a", 1.0), ("A", 1.0)])
