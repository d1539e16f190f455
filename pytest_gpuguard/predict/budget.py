"""SGLang's memory budget: free before, weights, held back, rest, tokens, and the verdict that follows.

Pure. ``rest = free after the weights - free before x (1 - fraction)``; nothing is subtracted for graphs, activations,
or the table of requests: those live in what is held back (sglang/srt/model_executor, mem_cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from .bars import Bars, bars_of
from .explain import explanation_of
from .facts import Facts
from .free_memory import available_before_gib, reserve_mib
from .kv import Pools, pools_of
from .quant import Quantization, requantized
from .refusals import rejections
from .rules import Rules, rules_for
from .settings import Settings
from .sglang import Resolved, partition, resolve, sharding_of
from .values import Prediction, Rejection
from .weights import GIB, Sharding, Weights, draft_bytes, weights_of

#: Captured decode graphs: 0.11 GiB for 8 requests (two boots), 1.93 for 320 (two boots); prefill graphs 0.9 and 2.3.
_GRAPH_GIB: Final = 0.06
_GRAPH_EACH_GIB: Final = 0.006
_PREFILL_GRAPH_GIB: Final = 1.2
#: What a server needs beside pools, tables and graphs to get through its first request.
_LEAST_GIB: Final = 0.2
#: What a load leaves on the device beside the weights, as SGLang counts it (free before minus free after): 0 to 0.12
#: GiB on six boots with one rank; and where a 4-bit format is packed anew, segments that stay: 0.2 to 2.4 % on five.
_LOAD_GIB: Final = 0.05
_REPACKED: Final = 0.007
#: The embedding cache of multimodal models, and the pool of features that are handed over on the GPU.
_EMBEDDINGS_MIB: Final = 100
_FEATURES_MIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Budget:
    """The numbers of one configuration, in GiB; ``rest`` may be negative."""

    resolved: Resolved
    weights: Weights
    before: float
    weights_gib: float
    draft_gib: float
    after: float
    reserved: float
    rest: float
    pools: Pools | None
    table: float
    graph: float
    margin: float | None
    f_min: float
    f_max: float
    bars: Bars


def predict_sglang(facts: Facts, version: str | None, settings: Settings, env: Mapping[str, str]) -> Prediction:
    """The prediction for SGLang. Raises PredictError."""
    rules = rules_for(version)
    facts = replace(facts, quantization=requantized(facts.quantization, settings.quantization))
    resolved = resolve(settings, facts.shape, facts.cache_fp8, facts.box, rules)
    refused = tuple(rejections(resolved, settings, facts.shape, facts.quantization, facts.box, rules))
    budget = budget_of(facts, settings, resolved, rules) if _countable(resolved) else None
    verdict, phase = _verdict(refused, budget)
    notes = _notes(facts, settings, resolved, rules, env)
    found = _prediction(facts, version, settings, rules, resolved, budget)
    found = replace(found, verdict=verdict, phase=phase, rejections=refused, assumptions=notes)
    return replace(found, explanation=explanation_of(found, facts, budget))


def _countable(resolved: Resolved) -> bool:
    """Whether the ranks of a layout can be counted at all: a refused one may still have numbers."""
    layout = resolved.layout
    return not layout.tp % resolved.ep and not (resolved.dp_attention and layout.tp % layout.dp)


def budget_of(facts: Facts, settings: Settings, resolved: Resolved, rules: Rules) -> Budget:
    """Count everything. The layout must be one whose ranks can be counted."""
    shape, box, known = facts.shape, facts.box, facts.measured
    sharding = sharding_of(resolved, settings, shape, box, rules)
    weights = weights_of(shape, facts.quantization, sharding)
    ranks = resolved.layout.tp * resolved.layout.pp
    before = known.get("avail_before_gib", available_before_gib(box, ranks))
    draft = _draft_gib(facts, resolved, known, sharding)
    counted = draft if "draft" in rules.pools else 0.0
    held = known.get("weights_gib")
    if held is None and "avail_after_weights_gib" in known:
        held = before - known["avail_after_weights_gib"]
    if held is None:
        held = weights.fullest / GIB + _loading_gib(facts.quantization, weights)
    after = known.get("avail_after_weights_gib", before - held) - counted
    reserved = before * (1 - resolved.fraction)
    rest = after - reserved - _multimodal_gib(shape.multimodal, settings, rules)
    pools = _pools(facts, settings, resolved, rules, rest)
    table = _table_gib(pools, resolved, rules)
    graph = known.get("graph_gib", _graph_gib(resolved))
    margin = None
    if pools is not None and pools.tokens > 0:
        margin = max(after - (pools.kv_bytes + pools.state_bytes) / GIB - table - graph - (draft - counted), 0.0)
    total = held + counted
    f_min = total / before if before > 0 else 1.0
    f_max = 1 - resolved.reserve_mib / 1024 / before if before > 0 else 0.0
    bars = bars_of(
        weights=held,
        ranks=ranks,
        linked=box.nvlink,
        fraction=resolved.fraction,
        cell=pools.cell if pools is not None else 0.0,
        graph=graph,
        understood=facts.understood,
        weights_known="weights_gib" in known or "avail_after_weights_gib" in known,
        before_known="avail_before_gib" in known,
        before=before,
        graph_known="graph_gib" in known,
    )
    return Budget(
        resolved, weights, before, held, draft, after, reserved, rest, pools, table, graph, margin, f_min, f_max, bars
    )


def _loading_gib(quantization: Quantization, weights: Weights) -> float:
    repacked = 4 in (quantization.expert.bits, quantization.linear.bits)
    return _LOAD_GIB + (_REPACKED * weights.fullest / GIB if repacked else 0.0)


def _draft_gib(facts: Facts, resolved: Resolved, known: Mapping[str, float], sharding: Sharding) -> float:
    if not resolved.draft_layers:
        return 0.0
    return known.get("draft_gib", draft_bytes(facts.shape, facts.quantization, sharding) / GIB)


def _multimodal_gib(multimodal: bool, settings: Settings, rules: Rules) -> float:
    if not multimodal or "multimodal" not in rules.pools:
        return 0.0
    return (_EMBEDDINGS_MIB + (_FEATURES_MIB if settings.feature_pool else 0)) / 1024


def _pools(facts: Facts, settings: Settings, resolved: Resolved, rules: Rules, rest: float) -> Pools | None:
    """The pools of the stage that holds the fewest tokens; None where nothing is left for them."""
    if rest <= 0:
        return None
    found: list[Pools] = []
    start = 0
    shape = facts.shape
    for count in partition(len(shape.layers), resolved.layout.pp):
        # Free memory is the least of all ranks, so a lighter stage gains nothing.
        layers = shape.layers[start : start + count]
        start += count
        pools = pools_of(
            shape,
            layers,
            rest * GIB,
            resolved.attention_tp,
            resolved.kv_dtype,
            settings,
            rules,
            page=resolved.page,
            context=resolved.context,
            chunk=resolved.chunk,
            requests=resolved.requests,
            draft_layers=resolved.draft_layers,
            sm=facts.box.sm,
        )
        if "kv_cell_bytes" in facts.measured:
            cell = facts.measured["kv_cell_bytes"]
            tokens = int((rest * GIB - pools.state_bytes) / cell) // resolved.page * resolved.page if cell else 0
            pools = replace(pools, cell=cell, tokens=max(tokens, 0), kv_bytes=max(tokens, 0) * cell)
        if pools.cell:
            found.append(pools)
    if not found:
        return None
    least = min(found, key=lambda one: one.tokens)
    if settings.max_tokens is not None and settings.max_tokens < least.tokens:
        tokens = settings.max_tokens // resolved.page * resolved.page
        least = replace(least, tokens=tokens, kv_bytes=tokens * least.cell)
    return least


def _table_gib(pools: Pools | None, resolved: Resolved, rules: Rules) -> float:
    """The table of requests: a row for each, four bytes a position."""
    if pools is None or pools.tokens <= 0:
        return 0.0
    requests = resolved.requests
    if requests is None:
        requests = max(min(int(pools.tokens / resolved.context * 512), 4096), 2048)
    if rules.since("0.5.14"):
        requests = min(requests, pools.tokens // 2)
    if pools.requests is not None:
        requests = min(requests, max(pools.requests, 0))
    return requests * (resolved.context + 4) * 4 / GIB


def _graph_gib(resolved: Resolved) -> float:
    decode = _GRAPH_GIB + _GRAPH_EACH_GIB * resolved.graph_bs if resolved.graphs else 0.0
    return decode + (_PREFILL_GRAPH_GIB if resolved.prefill_graphs else 0.0)


def _verdict(refused: tuple[Rejection, ...], budget: Budget | None) -> tuple[str, str]:
    if refused:
        return "rejected", refused[0].phase
    assert budget is not None
    if budget.weights_gib >= budget.before:
        return "oom.weights", "weights"
    if budget.rest <= 0 or budget.pools is None or budget.pools.tokens <= 0:
        return "oom.kv_pool", "kv_pool"
    if budget.pools.short is not None or (budget.pools.requests is not None and budget.pools.requests <= 0):
        return "oom.kv_pool", "kv_pool"
    left = budget.after - (budget.pools.kv_bytes + budget.pools.state_bytes) / GIB - budget.table
    if left < _LEAST_GIB:
        return "oom.graph_capture", "graph_capture"
    return "fits", "ready"


def _notes(
    facts: Facts, settings: Settings, resolved: Resolved, rules: Rules, env: Mapping[str, str]
) -> tuple[str, ...]:
    notes = [*facts.assumptions, *resolved.notes]
    if rules.note:
        notes.append(rules.note)
    if facts.box.reserved_mib is None and facts.box.sm is not None:
        notes.append(
            f"what the driver keeps of {facts.box.name} is not recorded: {reserve_mib(facts.box):.0f} MiB assumed"
        )
    if facts.box.size_only:
        notes.append(f"{facts.box.name} is only a size: a card of NVIDIA's without links is assumed")
    if resolved.context > facts.shape.context and not env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
        notes.append(
            f"the context of {resolved.context} is longer than the model's own {facts.shape.context}: what its rotary "
            "scaling does not cover is refused without SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
    if env.get("SGLANG_PP_LAYER_PARTITION"):
        notes.append("SGLANG_PP_LAYER_PARTITION is not followed: the engine's own partition is counted")
    return tuple(notes)


def _rounded(number: float | None, digits: int = 3) -> float | None:
    return round(number, digits) if number is not None else None


def _parts(budget: Budget, facts: Facts) -> dict[str, float]:
    parts = {name: _gib(value) for name, value in budget.weights.parts.items()}
    return parts | {"loading": round(_loading_gib(facts.quantization, budget.weights), 3)}


def _gib(bytes_: float) -> float:
    return round(bytes_ / GIB, 3)


def _prediction(
    facts: Facts, version: str | None, settings: Settings, rules: Rules, resolved: Resolved, budget: Budget | None
) -> Prediction:
    """The numbers, rounded as people read them; the verdict is not in yet."""
    layout = replace(resolved.layout, ep=resolved.ep)
    found = Prediction(
        engine="sglang",
        version=version,
        rules=rules.release,
        layout=layout,
        gpus_used=layout.gpus,
        verdict="rejected",
        phase="args",
        explanation="",
        mem_fraction_static=resolved.fraction,
        resolved=MappingProxyType(resolved.as_dict() | {"max_total_tokens": settings.max_tokens}),
    )
    if budget is None:
        return found
    pools = budget.pools
    return replace(
        found,
        avail_before_gib=round(budget.before, 3),
        weights_gib=round(budget.weights_gib, 3),
        avail_after_weights_gib=round(budget.after, 3) if budget.after > 0 else None,
        reserved_gib=round(budget.reserved, 3),
        rest_gib=round(budget.rest, 3),
        kv_cell_bytes=round(pools.cell, 2) if pools else None,
        kv_tokens=pools.tokens if pools else 0,
        kv_gib=_gib(pools.kv_bytes) if pools else None,
        state_gib=_gib(pools.state_bytes) if pools else None,
        req_to_token_gib=round(budget.table, 3),
        graph_gib=round(budget.graph, 3),
        margin_gib=round(budget.margin, 3) if budget.margin is not None else None,
        f_min=round(budget.f_min, 4),
        f_max=round(budget.f_max, 4),
        stages_gib=tuple(map(_gib, budget.weights.stages)),
        parts_gib=MappingProxyType(_parts(budget, facts)),
        bars=MappingProxyType(budget.bars.as_dict()),
    )
