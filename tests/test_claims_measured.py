"""What the numbers of a server that is ready say: KV tokens, margin, memory, tokens per second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.claims.expect import Expectation, ExpectToks, Fits, MaxMem
from pytest_gpuguard.claims.observation import MemoryTable, Observation
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.verdict import Body, Verdict, judge
from tests.laws import given, st

READY = Observation("sglang", "ready", "ready", elapsed_s=42.4)
TOKENS = Fits(kv_tokens=Comparison(">=", 32768))


def with_memory(**numbers: float) -> Observation:
    return replace(READY, memory=MemoryTable(**numbers))  # type: ignore[arg-type]


def said(expectation: Expectation, observation: Observation) -> tuple[Verdict, str]:
    judgement = judge(expectation, observation, Body("passed"))
    return judgement.verdict, judgement.fact


@pytest.mark.parametrize(
    ("expectation", "observation", "verdict", "fact"),
    [
        (Fits(), READY, "HOLDS", "ready in 42 s"),
        (TOKENS, with_memory(kv_tokens=40000), "HOLDS", "ready in 42 s, 40000 KV tokens"),
        (TOKENS, with_memory(kv_tokens=32768), "HOLDS", "ready in 42 s, 32768 KV tokens"),
        (TOKENS, with_memory(kv_tokens=32767), "WORSE", "ready with 32767 KV tokens, claimed >=32768"),
        (TOKENS, READY, "INCONCLUSIVE", "ready, but the server does not say its KV tokens"),
        (
            TOKENS,
            replace(with_memory(kv_tokens=9000), requested_tokens=262144),
            "WORSE",
            "ready with 9000 KV tokens (asked for 262144, silently clipped), claimed >=32768",
        ),
        (
            TOKENS,
            replace(with_memory(kv_tokens=40000), requested_tokens=262144),
            "HOLDS",
            "ready in 42 s, 40000 KV tokens (asked for 262144, silently clipped)",
        ),
        (
            TOKENS,
            replace(with_memory(kv_tokens=40000), requested_tokens=40000),
            "HOLDS",
            "ready in 42 s, 40000 KV tokens",
        ),
        (Fits(2.0), with_memory(free_gib=2.0), "HOLDS", "ready in 42 s, 2.00 GiB free"),
        (Fits(2.0), with_memory(free_gib=1.99), "WORSE", "ready with 1.99 GiB free, claimed a margin of 2 GiB"),
        (Fits(2.0), READY, "INCONCLUSIVE", "ready, but the free memory is not known"),
        (
            Fits(2.0, Comparison(">=", 9)),
            with_memory(free_gib=1.0, kv_tokens=9),
            "WORSE",
            "ready with 1.00 GiB free, claimed a margin of 2 GiB",
        ),
        (
            Fits(2.0, Comparison(">=", 9)),
            with_memory(free_gib=3.0, kv_tokens=9),
            "HOLDS",
            "ready in 42 s, 9 KV tokens, 3.00 GiB free",
        ),
        (
            MaxMem(75.0, "weights"),
            with_memory(weights_gib=75.0),
            "HOLDS",
            "weights memory 75.00 GiB, claimed at most 75 GiB",
        ),
        (
            MaxMem(75.0, "weights"),
            with_memory(weights_gib=75.01),
            "WORSE",
            "weights memory 75.01 GiB, claimed at most 75 GiB",
        ),
        (MaxMem(5.0, "graph"), with_memory(graph_gib=2.0), "HOLDS", "graph memory 2.00 GiB, claimed at most 5 GiB"),
        (
            MaxMem(60.0),
            with_memory(weights_gib=40.0, kv_gib=20.5),
            "WORSE",
            "static memory 60.50 GiB, claimed at most 60 GiB",
        ),
        (
            MaxMem(60.0),
            with_memory(weights_gib=40.0),
            "INCONCLUSIVE",
            "ready, but the server does not say its static memory",
        ),
    ],
)
def test_a_server_that_is_ready_is_judged_by_its_numbers(
    expectation: Expectation, observation: Observation, verdict: str, fact: str
) -> None:
    assert said(expectation, observation) == (Verdict[verdict], fact)


@pytest.mark.parametrize(
    ("samples", "verdict", "fact"),
    [
        ((60.0, 64.0, 62.0), "HOLDS", "62.0 tok/s (60.0–64.0 in 3 runs), claimed at least 60"),
        ((50.0, 59.9), "WORSE", "55.0 tok/s (50.0–59.9 in 2 runs), claimed at least 60"),
        (
            (59.0, 61.0, 62.0),
            "INCONCLUSIVE",
            "61.0 tok/s (59.0–62.0 in 3 runs), claimed at least 60: the runs straddle it",
        ),
        ((50.0, 60.0), "INCONCLUSIVE", "55.0 tok/s (50.0–60.0 in 2 runs), claimed at least 60: the runs straddle it"),
        ((99.0,), "INCONCLUSIVE", "ready, but too few samples of tok/s were taken"),
        ((), "INCONCLUSIVE", "ready, but too few samples of tok/s were taken"),
    ],
)
def test_a_rate_holds_when_all_runs_reach_it_and_fails_when_none_does(
    samples: tuple[float, ...], verdict: str, fact: str
) -> None:
    expectation = ExpectToks(60)
    assert said(expectation, replace(READY, samples={expectation.subject: samples})) == (Verdict[verdict], fact)


def test_samples_of_another_load_shape_do_not_count() -> None:
    other = replace(READY, samples={ExpectToks(60, concurrency=8).subject: (99.0, 99.0)})
    assert said(ExpectToks(60), other)[0] is Verdict.INCONCLUSIVE


def test_a_rate_per_request_says_so() -> None:
    expectation = ExpectToks(60, per="request")
    fact = said(expectation, replace(READY, samples={expectation.subject: (70.0, 72.0)}))[1]
    assert fact.startswith("71.0 tok/s per request (")


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=6), st.floats(1, 1000))
def test_a_higher_floor_never_makes_a_rate_better(samples: list[float], floor: float) -> None:
    low, high = ExpectToks(floor), ExpectToks(floor + 1)
    observation = replace(READY, samples={low.subject: tuple(samples)})
    order = [Verdict.HOLDS, Verdict.INCONCLUSIVE, Verdict.WORSE]
    assert order.index(said(low, observation)[0]) <= order.index(said(high, observation)[0])
