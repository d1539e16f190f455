"""What vLLM takes out of its budget beside weights: the peak of a profile run, memory outside of torch, graphs.

Pure. The peak is counted from the tensors that live together in vLLM's profile run (v1/worker/gpu_model_runner.py);
memory outside of torch is measured on boots, where logs let it be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .facts import Facts
from .free_memory import CONTEXT_GIB, available_before_gib
from .vllm_rules import VllmRules

GIB: Final = 1 << 30
#: Bytes for each logit while the sampler is warmed up: 16-bit logits and their float32 copy, and (sorting) values,
#: 64-bit indices and scratch, 39 in all on two boots; (in Triton) probabilities and
#: noise; (since runner v2) the copy alone.
_SORTED: Final = 39
_TRITON: Final = 14
_GUMBEL: Final = 8
#: Outside of torch on one rank, and on each of several: before 0.8 (0.20 and 0.25 on 16 and 2 small cards), and since
#: (1.05 on eight): buffers of communicators and of the all-reduce.
_ALONE_GIB: Final = 0.35
_AMONG_GIB: Final = (0.25, 1.05)
#: The engine extrapolates from two captures: nearly nothing for dense models (its floor of 1 MiB a graph), and far more
#: than graphs take with experts (5 GiB for 78 layers on eight boots, however many graphs; elsewhere up to 119).
_GRAPH_FLOOR_MIB: Final = 1.0
_FIRST_GRAPH_MIB: Final = 100.0
_EXPERT_LAYER_MIB: Final = 64.0
#: What graphs really take, for each layer and graph (1.2 GiB for 30 graphs of 78 layers, 2.3 for 84).
_CAPTURED_MIB: Final = 0.35


@dataclass(frozen=True, slots=True)
class Run:
    """The sizes that a profile run depends on, in tokens and requests."""

    tp: int
    dp: int
    expert_tensor: int
    batched: int
    seqs: int
    ranks: int


def peak_gib(facts: Facts, run: Run, rules: VllmRules, last_stage: bool) -> float:
    """The peak of activations: the widest layer over all scheduled tokens, or the sampler over all requests."""
    shape = facts.shape
    element = shape.dtype_bytes
    wide = 0.0
    if any(layer.moe for layer in shape.layers):
        chosen = facts.config.number("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts") or 1
        part = shape.expert_inner / run.expert_tensor
        # Tokens of all data-parallel ranks come together at the experts.
        wide = chosen * (max(2 * part, shape.hidden) + part) * run.dp
    if any(layer.dense for layer in shape.layers):
        wide = max(wide, 3 * shape.inner / run.tp)
    layers = run.batched * (3 * shape.hidden + wide) * element
    if not last_stage:
        return layers / GIB
    each = _GUMBEL if rules.has("runner v2") else _TRITON if rules.has("triton sampler") else _SORTED
    sampler = min(run.seqs, run.batched) * shape.vocab * each + run.batched * shape.hidden * element
    return max(layers, sampler) / GIB


def outside_gib(facts: Facts, run: Run, rules: VllmRules) -> float:
    """Memory that the engine's processes hold outside of torch and that counts as theirs."""
    found = _AMONG_GIB[rules.has("v1")] if run.ranks > 1 else _ALONE_GIB
    if rules.has("v1") and not rules.has("snapshot"):
        found += CONTEXT_GIB
    if not rules.has("nccl before"):
        found += available_before_gib(facts.box, 1) - available_before_gib(facts.box, run.ranks)
    return found


def captured_sizes(seqs: int, batched: int, spec_tokens: int, most: int | None, given: Sequence[int]) -> list[int]:
    """The batch sizes that are captured (config/vllm.py, vllm 0.20)."""
    if given:
        return sorted({size for size in given if size <= batched})
    most = min(most or min(seqs * (1 + spec_tokens) * 2, 512), batched)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most]


def estimated_graphs_gib(layers: int, graphs: int, experts: bool) -> float:
    """What the engine expects graphs to take, and keeps out of the KV cache."""
    if not graphs:
        return 0.0
    rest = _EXPERT_LAYER_MIB * layers if experts else _GRAPH_FLOOR_MIB * graphs
    return (_FIRST_GRAPH_MIB + rest) / 1024


def captured_gib(layers: int, graphs: int) -> float:
    """What graphs really take."""
    return (_FIRST_GRAPH_MIB + _CAPTURED_MIB * layers * graphs) / 1024 if graphs else 0.0
