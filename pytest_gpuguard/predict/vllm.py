"""What would happen if vLLM served a model: the numbers, the verdict, and the explanation. As ``budget.py`` for SGLang.

Pure, and no model is known by name. What cannot be known from the configuration is a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from ..claims.layout import Layout
from .bars import GUESS, bars_of
from .facts import Facts
from .quant import FP8, Quantization
from .values import Prediction, Rejection
from .vllm_budget import VllmBudget, budget_of
from .vllm_explain import explanation_of
from .vllm_layout import Resolved, rejections, resolve
from .vllm_rules import VllmRules, vllm_rules_for
from .vllm_settings import VllmSettings, vllm_settings_of
from .weights import GIB

#: How well the profile peak is known: a third of it (eight boots).
_PEAK_SHARE: Final = 1 / 3


def predict_vllm(facts: Facts, version: str | None, flags: Sequence[str], layout: Layout | None) -> Prediction:
    """The prediction for vLLM. Raises PredictError."""
    rules = vllm_rules_for(version)
    settings = vllm_settings_of(flags, layout)
    facts = _as_loaded(facts, settings)
    resolved = resolve(settings, facts, rules)
    budget = budget_of(facts, settings, resolved, rules)
    refused = tuple(rejections(facts, settings, resolved, rules, budget.before))
    verdict, phase = _verdict(refused, resolved, budget)
    found = _prediction(facts, version, resolved, rules, budget)
    notes = tuple(_notes(facts, settings, resolved, rules))
    found = replace(found, verdict=verdict, phase=phase, rejections=refused, assumptions=notes)
    return replace(found, explanation=explanation_of(found, facts, budget.needed, budget.longest))


def _as_loaded(facts: Facts, settings: VllmSettings) -> Facts:
    """The model as these flags load it."""
    shape = facts.shape
    if settings.language_only:
        shape = replace(shape, vision=None, vision_complexity=None)
    if settings.float32:
        shape = replace(shape, dtype_bytes=4)
    quantization = facts.quantization
    if settings.quantization == "fp8" and quantization.method is None:
        # Linear layers are quantized while they are loaded, one scale for each (quantization/fp8.py).
        quantization = Quantization(FP8, FP8, method="fp8")
    return replace(facts, shape=shape, quantization=quantization)


def _verdict(refused: tuple[Rejection, ...], resolved: Resolved, budget: VllmBudget) -> tuple[str, str]:
    if refused:
        return "rejected", refused[0].phase
    if budget.held >= budget.before:
        return "oom.weights", "weights"
    tight = budget.tight
    if tight.weights + tight.peak + budget.outside > budget.before:
        return "oom.runtime", "runtime"
    if tight.rest <= 0 or (tight.plan is not None and (tight.blocks <= 0 or budget.needed > budget.pool)):
        return "oom.kv_pool", "kv_pool"
    if budget.before - tight.weights - budget.outside - budget.pool < budget.captured:
        return "oom.graph_capture", "graph_capture"
    return "fits", "ready"


def _notes(facts: Facts, settings: VllmSettings, resolved: Resolved, rules: VllmRules) -> Iterator[str]:
    yield from facts.assumptions
    yield from settings.notes
    if rules.note:
        yield rules.note
    if settings.quantization and not facts.quantization.method:
        yield f"--quantization {settings.quantization}: weights are taken as they are in the checkpoint"
    if settings.lora:
        yield "LoRA adapters and their buffers are not counted"
    if settings.overrides:
        yield "--hf-overrides and --rope-scaling are not followed: config.json is read as it is"
    if facts.shape.multimodal:
        yield "the profile run's images are not counted"
    if settings.draft_model:
        yield "the draft is a model of its own: one layer like the target's is assumed for it"
    if rules.has("graphs counted") and resolved.graphs and "graph_gib" not in facts.measured:
        yield (
            "vLLM keeps its own estimate of graphs out of the KV cache, which has been between 0.2 and 119 GiB; "
            "the log tells it ('Estimated CUDA graph memory'): give it as graph_gib"
        )


def _prediction(
    facts: Facts, version: str | None, resolved: Resolved, rules: VllmRules, budget: VllmBudget
) -> Prediction:
    """The numbers, rounded as people read them; the verdict is not in yet."""
    tight, total = budget.tight, facts.box.torch_gib
    plan = tight.plan
    rest = tight.rest
    cell = plan.block_bytes * plan.groups / plan.block if plan is not None else None
    if plan is not None and plan.groups > 1:
        cell = plan.blocks_for(resolved.context) * plan.block_bytes / resolved.context
    tokens = plan.tokens_in(tight.blocks, resolved.context, rules) if plan is not None else 0
    taken = tight.peak + budget.outside + budget.estimated
    after = budget.before - tight.weights
    margin = budget.before - tight.weights - tight.peak - budget.outside - budget.pool - budget.captured
    parts = {name: size / GIB for name, size in budget.weights.parts.items()}
    if budget.draft:
        parts["draft"] = budget.draft
    f_max = budget.before / total if rules.has("asks for free") else (budget.before - budget.captured) / total
    return Prediction(
        engine="vllm",
        version=version,
        rules=rules.release,
        layout=resolved.layout,
        gpus_used=resolved.layout.gpus,
        verdict="rejected",
        phase="args",
        explanation="",
        mem_fraction_static=resolved.utilization,
        avail_before_gib=round(budget.before, 3),
        weights_gib=round(budget.held, 3),
        avail_after_weights_gib=round(after, 3) if after > 0 else None,
        reserved_gib=round(after - rest, 3),
        rest_gib=round(rest, 3),
        kv_cell_bytes=round(cell, 2) if cell is not None else None,
        kv_tokens=tokens if rest > 0 else 0,
        kv_gib=round(budget.pool, 3) if rest > 0 else None,
        graph_gib=round(budget.captured, 3),
        margin_gib=round(max(margin, 0.0), 3) if rest > 0 else None,
        f_min=round((tight.weights + taken + budget.needed) / total, 4),
        f_max=round(f_max, 4),
        stages_gib=tuple(round(stage, 3) for stage in budget.stages),
        parts_gib=MappingProxyType({name: round(size, 3) for name, size in parts.items()}),
        resolved=MappingProxyType(
            resolved.as_dict()
            | {
                "profile_peak_gib": round(tight.peak, 3),
                "outside_torch_gib": round(budget.outside, 3),
                "estimated_graphs_gib": round(budget.estimated, 3),
                "longest_request": budget.longest,
            }
        ),
        bars=MappingProxyType(_bars(facts, resolved, budget, cell or 0.0)),
    )


def _bars(facts: Facts, resolved: Resolved, budget: VllmBudget, cell: float) -> dict[str, float]:
    known = facts.measured
    found = bars_of(
        weights=budget.held,
        ranks=resolved.layout.gpus,
        linked=facts.box.nvlink,
        fraction=0.0,  # the card's total is what counts, and that is known
        cell=cell,
        graph=budget.captured,
        understood=facts.understood,
        weights_known="weights_gib" in known or "avail_after_weights_gib" in known,
        before_known="avail_before_gib" in known,
        before=budget.before,
        graph_known="graph_gib" in known,
    )
    graphs = 0.0 if "graph_gib" in known else budget.estimated
    rest = found.rest + budget.tight.peak * _PEAK_SHARE + budget.outside * GUESS + graphs
    tokens = rest * GIB / cell if cell else 0.0
    share = rest / facts.box.torch_gib
    return replace(found, rest=rest, tokens=tokens, reserved=rest, margin=rest + found.graph, f_min=share).as_dict()
