"""What a server that is ready says of an expectation: its numbers here, what it uses in ``presence``.

A number that is not known, or that straddles the claim, is INCONCLUSIVE; it is never taken for a zero.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from statistics import median
from typing import Final

from .expect import ExpectToks, Fits, Ignores, MaxMem, Unsupported, Uses
from .judgement import Judgement, Verdict, details, ready
from .observation import Observation
from .presence import falls_back, uses


def _fits(expectation: Fits, observation: Observation) -> Judgement:
    label, outcome, memory = expectation.label, observation.outcome, observation.memory
    facts = [ready(observation)]
    if expectation.kv_tokens is not None:
        tokens = memory.kv_tokens
        if tokens is None:
            return Judgement(label, Verdict.INCONCLUSIVE, outcome, "ready, but the server does not say its KV tokens")
        asked = observation.requested_tokens
        clipped = f" (asked for {asked}, silently clipped)" if asked is not None and tokens < asked else ""
        if not expectation.kv_tokens.holds(tokens):
            fact = f"ready with {tokens} KV tokens{clipped}, claimed {expectation.kv_tokens}"
            return Judgement(label, Verdict.WORSE, outcome, fact, details(observation))
        facts.append(f"{tokens} KV tokens{clipped}")
    if expectation.margin_gib is not None:
        if memory.free_gib is None:
            return Judgement(label, Verdict.INCONCLUSIVE, outcome, "ready, but the free memory is not known")
        if memory.free_gib < expectation.margin_gib:
            fact = f"ready with {memory.free_gib:.2f} GiB free, claimed a margin of {expectation.margin_gib:g} GiB"
            return Judgement(label, Verdict.WORSE, outcome, fact, details(observation))
        facts.append(f"{memory.free_gib:.2f} GiB free")
    return Judgement(label, Verdict.HOLDS, outcome, ", ".join(facts))


def _max_mem(expectation: MaxMem, observation: Observation) -> Judgement:
    memory, label, outcome = observation.memory, expectation.label, observation.outcome
    static = (
        memory.weights_gib + memory.kv_gib if memory.weights_gib is not None and memory.kv_gib is not None else None
    )
    used = {"weights": memory.weights_gib, "graph": memory.graph_gib, "static": static}[expectation.of]
    if used is None:
        return Judgement(
            label, Verdict.INCONCLUSIVE, outcome, f"ready, but the server does not say its {expectation.of} memory"
        )
    verdict = Verdict.HOLDS if used <= expectation.limit_gib else Verdict.WORSE
    fact = f"{expectation.of} memory {used:.2f} GiB, claimed at most {expectation.limit_gib:g} GiB"
    return Judgement(label, verdict, outcome, fact, () if verdict is Verdict.HOLDS else details(observation))


def _expect_toks(expectation: ExpectToks, observation: Observation) -> Judgement:
    label, outcome = expectation.label, observation.outcome
    samples = observation.samples.get(expectation.subject, ())
    failed = sum(isnan(sample) for sample in samples)
    if failed:
        fact = f"ready, but requests failed in {failed} of {len(samples)} runs"
        return Judgement(label, Verdict.WORSE, outcome, fact, details(observation))
    if len(samples) < 2 or expectation.minimum is None:
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, "ready, but too few samples of tok/s were taken")
    low, high, middle = min(samples), max(samples), median(samples)
    per = "" if expectation.per == "total" else " per request"
    runs = f"{low:.1f}–{high:.1f} in {len(samples)} runs"
    fact = f"{middle:.1f} tok/s{per} ({runs}), claimed at least {expectation.minimum:g}"
    if low >= expectation.minimum:
        return Judgement(label, Verdict.HOLDS, outcome, fact)
    if high < expectation.minimum:
        return Judgement(label, Verdict.WORSE, outcome, fact)
    return Judgement(label, Verdict.INCONCLUSIVE, outcome, f"{fact}: the runs straddle it")


#: Expectation → the function that judges it once the server is ready.
MEASURES: Final[dict[type, Callable[..., Judgement]]] = {
    Fits: _fits,
    MaxMem: _max_mem,
    ExpectToks: _expect_toks,
    Uses: uses,
    Ignores: falls_back,
    Unsupported: falls_back,
}
