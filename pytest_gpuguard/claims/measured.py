"""What a server that is ready says of an expectation: its numbers here, what it uses in ``presence``.

A number that is not known, or that straddles the claim, is INCONCLUSIVE; it is never taken for a zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .answered import answering, works
from .expect import Compare, ExpectToks, Fits, Ignores, MaxMem, Unsupported, Uses, Works
from .judgement import Judgement, Verdict, details
from .observation import Observation
from .presence import falls_back, uses
from .rates import compare, expect_toks


def _fits(expectation: Fits, observation: Observation) -> Judgement:
    label, outcome, memory = expectation.label, observation.outcome, observation.memory
    facts = [answering(observation)]
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
        # NVML's number after the probe is later than the engine's own, and counts what others took meanwhile.
        free = observation.free_gib if observation.free_gib is not None else memory.free_gib
        if free is None:
            return Judgement(label, Verdict.INCONCLUSIVE, outcome, "ready, but the free memory is not known")
        if free < expectation.margin_gib:
            fact = f"ready with {free:.2f} GiB free, claimed a margin of {expectation.margin_gib:g} GiB"
            return Judgement(label, Verdict.WORSE, outcome, fact, details(observation))
        facts.append(f"{free:.2f} GiB free")
    return Judgement(label, Verdict.HOLDS, outcome, ", ".join(facts))


#: A server fills what ``--mem-fraction-static`` leaves to it, whatever it needs.
_FILLED: Final = (
    "a server's KV pool always fills up to the fraction that it is given, so its peak says little of what it needs: "
    'claim of="weights", "graph" or "static" instead'
)


def _max_mem(expectation: MaxMem, observation: Observation) -> Judgement:
    memory, label, outcome = observation.memory, expectation.label, observation.outcome
    static = (
        memory.weights_gib + memory.kv_gib if memory.weights_gib is not None and memory.kv_gib is not None else None
    )
    peak, warning, said = observation.peak, None, ""
    if expectation.of == "peak":
        used = peak.gib if peak is not None else None
        warning = _FILLED if memory.kv_gib or memory.kv_tokens else None
    else:
        used = {"weights": memory.weights_gib, "graph": memory.graph_gib, "static": static}[expectation.of]
    if used is None:
        who = (
            "nothing was sampled of its peak"
            if expectation.of == "peak"
            else (f"the server does not say its {expectation.of} memory")
        )
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, f"ready, but {who}", warning=warning)
    said = str(peak) if expectation.of == "peak" else f"{used:.2f} GiB as the engine reports it"
    verdict = Verdict.HOLDS if used <= expectation.limit_gib else Verdict.WORSE
    if verdict is Verdict.HOLDS and expectation.of == "peak" and peak is not None and peak.missing:
        verdict = Verdict.INCONCLUSIVE  # what was not looked at may have been higher
    fact = f"{expectation.of} memory {said}, claimed at most {expectation.limit_gib:g} GiB"
    if verdict is Verdict.WORSE and expectation.of == "peak" and observation.strangers:
        fact += f": others used these GPUs meanwhile: {'; '.join(observation.strangers)}"
        return Judgement(label, Verdict.INFRA, "infra.dirty_gpu", fact)
    more = () if verdict is Verdict.HOLDS else details(observation)
    return Judgement(label, verdict, outcome, fact, more, warning=warning)


#: Expectation → the function that judges it once the server is ready.
MEASURES: Final[dict[type, Callable[..., Judgement]]] = {
    Fits: _fits,
    Works: works,
    MaxMem: _max_mem,
    ExpectToks: expect_toks,
    Compare: compare,
    Uses: uses,
    Ignores: falls_back,
    Unsupported: falls_back,
}
