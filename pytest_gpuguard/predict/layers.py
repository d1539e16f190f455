"""What each decoder layer is: its attention, its experts, its indexer, by the fields that a configuration has for it.

Pure. Structure alone decides: no architecture or model is known by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .config import Config, whole
from .shape import Compressed, Indexer, Layer, Linear

_WINDOW: Final = ("sliding_attention", "local_attention", "chunked_attention")
_LINEAR: Final = ("linear_attention", "recurrent", "mamba", "mamba2")


def layers_of(
    config: Config,
    count: int,
    experts: int,
    linear: Linear | None,
    indexer: Indexer | None,
    compressed: Compressed | None,
    notes: list[str],
) -> tuple[Layer, ...]:
    """The layers of a model of ``count`` layers; what had to be assumed is added to ``notes``."""
    attention = _attention_kinds(config, count, linear, notes)
    moe = _moe_layers(config, count) if experts else [False] * count
    both = bool(config.text.get("enable_moe_block", False))
    alone = _mixers_alone(config.text, count)
    told = config.text.get("compress_ratios") if compressed is not None else None
    ratios = [whole(ratio) or 0 for ratio in told] if isinstance(told, Sequence) else []
    ratios += [0] * (count - len(ratios))
    shared = _shared_indexers(config.text, count)
    return tuple(
        Layer(
            attention=attention[index],
            moe=moe[index] if alone is None else alone[index] == "E",
            dense=both or not moe[index] if alone is None else alone[index] == "-",
            indexer=indexer is not None and not shared[index] and (compressed is None or ratios[index] == 4),
            ratio=ratios[index],
        )
        for index in range(count)
    )


def _mixers_alone(text: Mapping[str, Any], count: int) -> str | None:
    """A letter a layer where each layer is one mixer alone: M state space, * attention, - MLP, E experts."""
    pattern = text.get("hybrid_override_pattern")
    return pattern if isinstance(pattern, str) and len(pattern) >= count else None


def _attention_kinds(config: Config, count: int, linear: Linear | None, notes: list[str]) -> list[str]:
    text = config.text
    types = text.get("layer_types") or text.get("layers_block_type")
    pattern = _mixers_alone(text, count)
    told = text.get("linear_attn_config")
    kept = told.get("full_attn_layers") if isinstance(told, Mapping) else None
    if isinstance(types, Sequence) and not isinstance(types, str) and len(types) >= count:
        kinds = []
        for kind in types[:count]:
            kinds.append("window" if kind in _WINDOW else "linear" if kind in _LINEAR else "full")
    elif isinstance(kept, Sequence) and kept:  # counted from 1
        kinds = ["full" if index + 1 in kept else "linear" for index in range(count)]
    elif pattern is not None:
        kinds = [{"*": "full", "M": "linear"}.get(letter, "none") for letter in pattern[:count]]
    elif linear is not None and (every := config.number("full_attention_interval")):
        kinds = ["full" if (index + 1) % every == 0 else "linear" for index in range(count)]
    else:
        kinds = ["full"] * count
    if "linear" in kinds and linear is None:
        notes.append("the layers without attention are of a kind whose state and weights are not known here: left out")
    return kinds


def _moe_layers(config: Config, count: int) -> list[bool]:
    text = config.text
    types = text.get("mlp_layer_types")
    if isinstance(types, Sequence) and len(types) >= count:
        return ["dense" not in str(kind) for kind in types[:count]]
    explicit = text.get("moe_layers")
    if isinstance(explicit, Sequence) and explicit:
        return [index in explicit for index in range(count)]
    first = config.number("first_k_dense_replace", "moe_layer_start_index") or 0
    every = config.number("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    listed = text.get("mlp_only_layers")
    dense = [whole(index) for index in listed] if isinstance(listed, Sequence) else []
    # This field counts from layer 0; the others put the sparse layer last in its group.
    if "moe_layer_freq" in text:
        return [index >= first and index % every == 0 for index in range(count)]
    return [index >= first and (index + 1) % every == 0 and index not in dense for index in range(count)]


def _shared_indexers(text: Mapping[str, Any], count: int) -> list[bool]:
    """Layers that reuse the indexer result of the layer before (sglang/srt/configs/model_config.py)."""
    types = text.get("indexer_types")
    if isinstance(types, Sequence) and types:
        return [index < len(types) and types[index] == "shared" for index in range(count)]
    pattern = text.get("index_topk_pattern")
    if pattern:
        return [index < len(pattern) and pattern[index] == "S" for index in range(count)]
    every, offset = whole(text.get("index_topk_freq")) or 1, whole(text.get("index_skip_topk_offset"))
    start = 2 if offset is None else offset
    return [every > 1 and max(index - start + 1, 0) % every != 0 for index in range(count)]
