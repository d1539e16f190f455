"""What an engineer would write beside the numbers: which GPUs, what fills them, what is missing, what would cure it.

Pure text from a finished prediction; it decides nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .facts import Facts
from .values import Prediction

if TYPE_CHECKING:
    from .budget import Budget

#: Just above the least fraction the pool is a few MiB, which serves nobody.
_STEP = 0.002


def explanation_of(found: Prediction, facts: Facts, budget: Budget | None) -> str:
    """Some sentences about one prediction."""
    parts = [_layout(found, facts)]
    if found.verdict == "rejected":
        first = found.rejections[0]
        when = {"args": "before anything is loaded", "init": "when the ranks start"}.get(
            first.phase, "while the model is built"
        )
        parts.append(f"The engine refuses it {when}: {first.text}.")
        layout = found.layout
        if layout.tp % layout.ep:
            parts.append(
                f"In SGLang EP subdivides TP: for {layout.tp * layout.ep} GPUs write TP{layout.tp * layout.ep} "
                f"EP{layout.ep}."
            )
        return " ".join(part for part in parts if part)
    assert budget is not None
    parts.append(_weights(found))
    parts.append(_free(found, facts))
    if found.verdict == "oom.weights":
        parts.append(
            f"That does not fit at any fraction: loading ends out of memory, {budget.weights_gib - budget.before:.1f} "
            "GiB short on every rank."
        )
        parts.append(_wider(found, facts))
    elif found.verdict == "oom.kv_pool":
        parts += [_held_back(found), _window(found) if budget.rest <= 0 else _too_little(found, budget)]
    else:
        parts += [_held_back(found), _tokens(found, facts)]
        if found.verdict == "oom.graph_capture":
            parts.append("Nothing is left then for graphs and activations: capture ends out of memory.")
        elif found.f_max is not None and budget.resolved.fraction > max(found.f_max, budget.resolved.default_fraction):
            parts.append(
                f"The engine's own rule would stop at {found.f_max:.3f}: above it, graphs and long prefills may run "
                "out of memory."
            )
    close = _close(found, budget)
    return " ".join(part for part in [*parts, close] if part)


def _layout(found: Prediction, facts: Facts) -> str:
    layout, shape = found.layout, facts.shape
    text = f"{layout} uses {found.gpus_used} of {facts.box.count} GPUs"
    if found.gpus_used > facts.box.count:
        return ""  # the refusal says it
    if layout.ep > 1 and shape.experts and not layout.tp % layout.ep:
        text += (
            f": EP subdivides TP and adds none. Each rank holds {shape.experts // layout.ep} of {shape.experts} "
            f"experts"
            + (f", 1/{layout.moe_tp} of each" if layout.moe_tp > 1 else "")
            + f", which is 1/{layout.tp} of their weights whatever EP is"
        )
    elif layout.dp > 1 and not layout.dp_attention:
        text += f": {layout.dp} replicas of their own"
    return text + "."


def _weights(found: Prediction) -> str:
    parts = sorted(found.parts_gib.items(), key=lambda one: -one[1])
    named = ", ".join(f"{name} {size:.1f}" for name, size in parts[:3] if size >= 0.05)
    stages = f" (stages {', '.join(f'{one:.1f}' for one in found.stages_gib)})" if len(found.stages_gib) > 1 else ""
    total = sum(found.parts_gib.values())
    if found.weights_gib is not None and abs(total - found.weights_gib) > 0.01:
        return f"A rank holds {found.weights_gib:.1f} GiB as measured; the weights alone are {total:.1f}{stages}."
    return f"A rank holds {found.weights_gib:.1f} GiB of weights ({named}){stages}."


def _free(found: Prediction, facts: Facts) -> str:
    return f"{found.avail_before_gib:.1f} of the card's {facts.box.torch_gib:.1f} GiB are free before them."


def _held_back(found: Prediction) -> str:
    after, rest = found.avail_after_weights_gib or 0.0, found.rest_gib or 0.0
    return (
        f"Afterwards {after:.1f} are left, of which mem-fraction-static {found.mem_fraction_static:g} holds back "
        f"{found.reserved_gib:.1f}: "
        + (f"{rest:.1f} GiB for the KV pool." if rest > 0 else f"{-rest:.1f} GiB are missing for any KV pool.")
    )


def _window(found: Prediction) -> str:
    low, high = found.f_min or 0.0, found.f_max or 0.0
    if low >= 1:
        return "No fraction cures it."
    text = f"The pool begins above a fraction of {low:.3f}"
    first, last = math.ceil((low + _STEP) * 100 - 1e-6) / 100, math.floor(high * 100 + 1e-6) / 100
    if first <= last:
        return f"{text}; {first:.2f} to {last:.2f} also leaves what the engine itself keeps for graphs and activations."
    return (
        f"{text}, and above {high:.3f} it eats what the engine itself keeps for graphs and activations: the window is "
        "empty. Fewer captured requests, a smaller prefill chunk, or more GPUs open it."
    )


def _too_little(found: Prediction, budget: Budget) -> str:
    """Why a budget above 0 holds no pool."""
    asked, page = found.resolved.get("max_total_tokens"), found.resolved.get("page_size") or 1
    pools = budget.pools
    if pools is not None and pools.short == "window":
        return (
            "Of that the windowed layers get too little: not one window and a page. A larger --swa-full-tokens-ratio, "
            "or more memory, cures it."
        )
    if pools is not None and (pools.short == "state" or (pools.requests is not None and pools.requests <= 0)):
        return "It holds the state of not one request: a larger --mamba-full-memory-ratio, or more memory, cures it."
    if asked is not None and asked < page:
        return f"--max-total-tokens {asked} is less than one page of {page} tokens: nothing is left of it."
    return f"It holds not one page of {page} tokens."


def _tokens(found: Prediction, facts: Facts) -> str:
    shape = facts.shape
    kind = "latent, the same on every rank" if shape.latent is not None or shape.compressed is not None else "a rank"
    state = f", beside {found.state_gib:.1f} GiB of state" if found.state_gib and found.state_gib >= 0.05 else ""
    return f"At {found.kv_cell_bytes or 0:,.0f} bytes a token ({kind}) that is {found.kv_tokens or 0:,} tokens{state}."


def _wider(found: Prediction, facts: Facts) -> str:
    total, room = (found.weights_gib or 0.0) * found.layout.tp, (found.avail_before_gib or 0.0)
    if not found.parts_gib:
        return ""
    need = found.layout.tp
    while need < 4096 and total / need >= room * 0.97:
        need *= 2
    if need <= found.layout.tp:
        return ""
    there = "this rig has them" if need * found.layout.pp <= facts.box.count else f"this rig has {facts.box.count}"
    return f"TP{need} would hold about {total / need:.0f} GiB a rank ({there})."


def _close(found: Prediction, budget: Budget) -> str:
    bars = budget.bars
    if found.verdict == "oom.weights" and budget.weights_gib - budget.before < bars.weights + bars.before:
        return "It is closer than the error of these numbers: only a boot tells."
    if found.verdict in ("oom.kv_pool", "fits") and abs(budget.rest) < bars.rest:
        return "It is closer than the error of these numbers: only a boot tells."
    return ""
