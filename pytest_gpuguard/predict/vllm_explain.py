"""What an engineer would write beside vLLM's numbers: which GPUs, what fills them, what is missing, what would cure it.

Pure text from a finished prediction; it decides nothing.
"""

from __future__ import annotations

from .facts import Facts
from .values import Prediction


def explanation_of(found: Prediction, facts: Facts, needed_gib: float, longest: int) -> str:
    """Some sentences about one prediction. ``needed_gib`` is the cache of one request of max_model_len."""
    parts = [_layout(found, facts)]
    if found.verdict == "rejected":
        first = found.rejections[0]
        when = {"args": "before anything is loaded", "init": "when the ranks start"}.get(
            first.phase, "while the model is built"
        )
        parts.append(f"The engine refuses it {when}: {first.text.rstrip('.')}.")
        return " ".join(parts)
    parts += [_weights(found), _budget(found, facts)]
    if found.verdict == "oom.weights":
        short = (found.weights_gib or 0.0) - (found.avail_before_gib or 0.0)
        parts.append(f"That does not fit at any utilization: loading ends out of memory, {short:.1f} GiB short.")
    elif found.verdict == "oom.runtime":
        parts.append("Weights and the profile run's peak are more than the card has: profiling ends out of memory.")
        parts.append("A smaller --max-num-batched-tokens or --max-num-seqs makes the peak smaller.")
    elif found.verdict == "oom.kv_pool":
        parts.append(_short(found, needed_gib, longest))
    else:
        parts.append(f"That is {found.kv_tokens or 0:,} tokens, at {found.kv_cell_bytes or 0:,.0f} bytes a token.")
        if found.verdict == "oom.graph_capture":
            parts.append("Outside of the budget too little is left for CUDA graphs: capture ends out of memory.")
    if found.verdict in ("oom.kv_pool", "fits") and abs(found.rest_gib or 0.0) < found.bars.get("rest_gib", 0.0):
        parts.append("It is closer than the error of these numbers: only a boot tells.")
    return " ".join(part for part in parts if part)


def _layout(found: Prediction, facts: Facts) -> str:
    layout, shape = found.layout, facts.shape
    text = f"{layout} uses {found.gpus_used} of {facts.box.count} GPUs"
    if layout.ep > 1 and shape.experts:
        text += f": whole experts, {-(-shape.experts // layout.ep)} of {shape.experts} a rank"
    elif layout.dp > 1 and shape.experts:
        text += f": {layout.dp} attention replicas, each expert split over all {layout.tp * layout.dp} ranks"
    elif layout.dp > 1:
        text += f": {layout.dp} replicas of their own"
    return text + "."


def _weights(found: Prediction) -> str:
    parts = sorted(found.parts_gib.items(), key=lambda one: -one[1])
    named = ", ".join(f"{name} {size:.1f}" for name, size in parts[:3] if size >= 0.05)
    stages = f" (stages {', '.join(f'{one:.1f}' for one in found.stages_gib)})" if len(found.stages_gib) > 1 else ""
    return f"A rank holds {found.weights_gib:.1f} GiB of weights ({named}){stages}."


def _budget(found: Prediction, facts: Facts) -> str:
    made = found.resolved
    share = found.mem_fraction_static or 0.0
    graphs = f", {made['estimated_graphs_gib']:.1f} expected for graphs" if made["estimated_graphs_gib"] else ""
    return (
        f"gpu-memory-utilization {share:g} of {facts.box.torch_gib:.1f} GiB is {share * facts.box.torch_gib:.1f}; "
        f"beside the weights go {made['profile_peak_gib']:.1f} for the profile run's peak and "
        f"{made['outside_torch_gib']:.1f} outside of torch{graphs}: {found.rest_gib:.1f} GiB for the KV cache."
    )


def _short(found: Prediction, needed_gib: float, longest: int) -> str:
    low, high = found.f_min or 0.0, found.f_max or 0.0
    rest = found.rest_gib or 0.0
    if rest <= 0:
        text = "No available memory for the cache blocks."
    else:
        context = found.resolved["max_model_len"]
        text = (
            f"One request of max_model_len {context:,} needs {needed_gib:.2f} GiB, which is larger than the available "
            f"KV cache memory; the longest that fits is {longest:,} tokens."
        )
    if low >= 1:
        return f"{text} No utilization cures it."
    if low > high:
        return f"{text} It would take a utilization of {low:.3f}, and only {high:.3f} of the card is free."
    return f"{text} A utilization of {low:.3f} or more would do (at most {high:.3f} of the card is free)."
