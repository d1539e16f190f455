"""What the numbers of a server that is ready say: KV tokens, margin, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.claims.expect import Expectation, Fits, MaxMem
from pytest_gpuguard.claims.measurement import Peak
from pytest_gpuguard.claims.observation import MemoryTable, Observation
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.verdict import Body, Verdict, judge

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
            "weights memory 75.00 GiB as the engine reports it, claimed at most 75 GiB",
        ),
        (
            MaxMem(75.0, "weights"),
            with_memory(weights_gib=75.01),
            "WORSE",
            "weights memory 75.01 GiB as the engine reports it, claimed at most 75 GiB",
        ),
        (
            MaxMem(5.0, "graph"),
            with_memory(graph_gib=2.0),
            "HOLDS",
            "graph memory 2.00 GiB as the engine reports it, claimed at most 5 GiB",
        ),
        (
            MaxMem(60.0),
            with_memory(weights_gib=40.0, kv_gib=20.5),
            "WORSE",
            "static memory 60.50 GiB as the engine reports it, claimed at most 60 GiB",
        ),
        (
            Fits(2.0),
            replace(with_memory(free_gib=9.0), free_gib=1.5),
            "WORSE",
            "ready with 1.50 GiB free, claimed a margin of 2 GiB",
        ),
        (Fits(2.0), replace(with_memory(free_gib=1.0), free_gib=2.5), "HOLDS", "ready in 42 s, 2.50 GiB free"),
        (
            MaxMem(20.0, "peak"),
            replace(READY, peak=Peak(19.5, "GPU-a")),
            "HOLDS",
            "peak memory 19.50 GiB (sampled every 20 ms, at least), claimed at most 20 GiB",
        ),
        (
            MaxMem(20.0, "peak"),
            replace(READY, peak=Peak(20.5, "GPU-a", "accounting")),
            "WORSE",
            "peak memory 20.50 GiB (driver accounting), claimed at most 20 GiB",
        ),
        (MaxMem(20.0, "peak"), READY, "INCONCLUSIVE", "ready, but nothing was sampled of its peak"),
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


def test_a_peak_of_some_of_the_gpus_proves_no_limit() -> None:
    part = replace(READY, peak=Peak(19.5, "GPU-a", missing=("GPU-b",)))
    assert said(MaxMem(20.0, "peak"), part)[0] is Verdict.INCONCLUSIVE
    assert "without GPU-b" in said(MaxMem(20.0, "peak"), part)[1]
    assert said(MaxMem(19.0, "peak"), part)[0] is Verdict.WORSE


def test_the_peak_of_a_server_is_told_to_say_little() -> None:
    seen = replace(with_memory(kv_gib=40.0), peak=Peak(80.0, "GPU-a"))
    assert "fills up to the fraction" in (judge(MaxMem(90.0, "peak"), seen).warning or "")
    assert judge(MaxMem(90.0, "peak"), replace(READY, peak=Peak(80.0, "GPU-a"))).warning is None
    assert judge(MaxMem(90.0, "weights"), with_memory(weights_gib=40.0, kv_gib=40.0)).warning is None
