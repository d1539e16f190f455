"""vLLM's memory budget: the weights of each stage, the profile peak, and the blocks that the rest holds.

Pure. KV cache = total x gpu_memory_utilization - weights - profile peak - memory outside of torch (- estimated graphs);
vllm/v1/worker/gpu_worker.py, and worker/worker.py before 0.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .facts import Facts
from .free_memory import available_before_gib
from .quant import FULL
from .vllm_kv import Plan, Request, plan_of
from .vllm_layout import Resolved, sharding_of
from .vllm_profile import Run, captured_gib, estimated_graphs_gib, outside_gib, peak_gib
from .vllm_rules import VllmRules
from .vllm_settings import VllmSettings
from .weights import GIB, Weights, draft_bytes, weights_of


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: GiB of weights and peak, the budget that is left for its blocks, and those blocks."""

    weights: float
    peak: float
    rest: float
    plan: Plan | None
    blocks: int

    @property
    def block_gib(self) -> float:
        """GiB of one block; 0 where the stage keeps nothing."""
        return self.plan.block_bytes / GIB if self.plan is not None else 0.0


@dataclass(frozen=True, slots=True)
class VllmBudget:
    """The numbers of one configuration, in GiB. ``tight`` is the stage that holds the fewest blocks."""

    weights: Weights
    stages: tuple[float, ...]
    draft: float
    before: float
    held: float
    outside: float
    estimated: float
    captured: float
    tight: Stage
    needed: float
    longest: int

    @property
    def pool(self) -> float:
        """GiB of the blocks."""
        return self.tight.blocks * self.tight.block_gib


def budget_of(facts: Facts, settings: VllmSettings, resolved: Resolved, rules: VllmRules) -> VllmBudget:
    """Count everything."""
    known, layout = facts.measured, resolved.layout
    sharding = sharding_of(facts, settings, resolved, rules)
    weights = weights_of(facts.shape, facts.quantization, sharding)
    draft = 0.0
    if resolved.drafted:
        draft = known.get("draft_gib", draft_bytes(facts.shape, facts.quantization, sharding) / GIB)
    before = known.get("avail_before_gib", available_before_gib(facts.box, layout.gpus))
    sizes = _stage_sizes(facts, settings, resolved, rules, weights, sharding.partition, draft, before)
    run = Run(layout.tp, layout.dp, resolved.expert_tensor, resolved.batched, resolved.seqs, layout.tp * layout.pp)
    outside = outside_gib(facts, run, rules)
    deepest = max(sharding.partition)
    estimated = 0.0
    if rules.has("graphs counted") and facts.box.sm is not None:
        estimated = estimated_graphs_gib(deepest, resolved.graphs, bool(facts.shape.experts))
        estimated = known.get("graph_gib", estimated)
    captured = known.get("graph_gib", captured_gib(deepest, resolved.graphs))
    stages: list[Stage] = []
    start = 0
    for index, count in enumerate(sharding.partition):
        layers = facts.shape.layers[start : start + count]
        start += count
        last = index == len(sharding.partition) - 1
        peak = peak_gib(facts, run, rules, last)
        rest = facts.box.torch_gib * resolved.utilization - sizes[index] - peak - outside - estimated
        if settings.kv_bytes is not None:
            rest = settings.kv_bytes / GIB
        request = _request(facts, settings, resolved, drafted=resolved.drafted if last else 0)
        plan = plan_of(facts.shape, layers, request, rules)
        if plan is not None and "kv_cell_bytes" in known:
            plan = Plan(known["kv_cell_bytes"] * plan.block, plan.block, settings.dcp)
        blocks = plan.blocks_in(rest * GIB) if plan is not None else 0
        stages.append(Stage(sizes[index], peak, rest, plan, settings.blocks or blocks))
    tight = _tightest(stages)
    needed, longest = 0.0, resolved.context
    if tight.plan is not None:
        needed = tight.plan.blocks_for(1 if resolved.open_context else resolved.context) * tight.block_gib
        longest = tight.plan.longest(tight.blocks, resolved.context)
    return VllmBudget(
        weights,
        tuple(sizes),
        draft,
        before,
        max(sizes),
        outside,
        estimated,
        captured,
        tight,
        needed,
        longest,
    )


def _stage_sizes(
    facts: Facts,
    settings: VllmSettings,
    resolved: Resolved,
    rules: VllmRules,
    weights: Weights,
    partition: Sequence[int],
    draft: float,
    before: float,
) -> list[float]:
    """GiB of weights on a rank of each stage. A measured size is that of the fullest."""
    extra = _older_copies(facts, resolved, rules)
    stages = [stage + extra * count for stage, count in zip(weights.stages, partition, strict=True)]
    if facts.shape.latent is not None and not rules.has("last head"):
        stages = [stage + _head_bytes(facts, resolved.layout.tp) for stage in stages[:-1]] + stages[-1:]
    sizes = [max(stage / GIB - settings.offload_gib, 0.0) for stage in stages]
    sizes[-1] += draft
    held = facts.measured.get("weights_gib")
    if held is None and "avail_after_weights_gib" in facts.measured:
        held = max(before - facts.measured["avail_after_weights_gib"], 0.0)
    if held is None:
        return sizes
    return [held if size == max(sizes) else min(size, held) for size in sizes]


def _tightest(stages: Sequence[Stage]) -> Stage:
    """The stage that decides: one that is left nothing, else the one with the fewest blocks."""
    short = [stage for stage in stages if stage.rest <= 0]
    keeping = [stage for stage in stages if stage.plan is not None]
    if short or not keeping:
        return min(short or stages, key=lambda one: one.rest)
    return min(keeping, key=lambda one: one.blocks)


def _request(facts: Facts, settings: VllmSettings, resolved: Resolved, drafted: int) -> Request:
    state = settings.state_dtype
    return Request(
        tp=resolved.layout.tp,
        dcp=settings.dcp,
        kv_dtype=resolved.kv_dtype,
        block=resolved.block,
        batched=resolved.batched,
        drafted=drafted,
        spec_tokens=settings.draft_tokens,
        checkpoints=2 if settings.prefix_caching else 1,
        hybrid=not settings.hybrid_off,
        latent=resolved.latent,
        state_bytes=None if state in (None, "auto") else 4 if "32" in str(state) else 2,
        sm=facts.box.sm,
    )


def _head_bytes(facts: Facts, tp: int) -> float:
    shape = facts.shape
    rows = math.ceil(shape.vocab / (64 * tp)) * 64
    return float(rows * shape.hidden * shape.dtype_bytes)


def _older_copies(facts: Facts, resolved: Resolved, rules: VllmRules) -> float:
    """Bytes a layer of the products of projections that vLLM 0.7 kept (attention/backends/mla/utils.py)."""
    latent, shape = facts.shape.latent, facts.shape
    if latent is None or not resolved.latent or rules.has("latent cache always"):
        return 0.0
    linear = facts.quantization.linear
    element = shape.dtype_bytes if linear is FULL else linear.bits / 8
    heads, inputs = shape.heads / resolved.layout.tp, latent.q_rank or shape.hidden
    products = heads * latent.kv_rank * (inputs + shape.hidden) * element
    return products + heads * latent.rope * inputs * shape.dtype_bytes
