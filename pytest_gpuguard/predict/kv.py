"""How many tokens a budget holds: bytes a token, pools beside it, state of linear attention.

Pure. The rules are SGLang's (model_runner_kv_cache_mixin.py, pool_configurator.py, kv_cache_configurator.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .rules import Rules
from .settings import Settings
from .shape import Layer, Shape

GIB: Final = 1 << 30
#: A key of the sparse indexer: fp8 elements, and a float32 scale for each 128 of them.
_INDEX_BLOCK: Final = 128


@dataclass(frozen=True, slots=True)
class Pools:
    """What a budget becomes: ``cell`` bytes a token on one rank, ``tokens``, bytes of pools and of fixed state."""

    cell: float
    tokens: int
    kv_bytes: float
    state_bytes: float
    requests: int | None = None
    short: str | None = None


def element_bytes(kv_dtype: str) -> float:
    """Bytes of an element of the cache: fp8 1, 4-bit formats a half, everything else 2."""
    name = kv_dtype.lower()
    if "fp4" in name or "nvfp4" in name:
        return 0.5
    return 1 if "fp8" in name or "int8" in name else 2


def pools_of(
    shape: Shape,
    layers: Sequence[Layer],
    budget: float,
    attention: int,
    kv_dtype: str,
    settings: Settings,
    rules: Rules,
    *,
    page: int,
    context: int,
    chunk: int,
    requests: int | None,
    draft_layers: int,
    sm: str | None,
) -> Pools:
    """The pools of one pipeline stage. ``budget`` is in bytes; ``requests`` those of one attention replica."""
    element = element_bytes(kv_dtype)
    if shape.compressed is not None:
        return _compressed(shape, layers, budget, settings, rules, page, context, requests)
    state, slots = _state(shape, layers, budget, attention, settings, rules, requests)
    left = budget - state
    if shape.split_pools and "windowed" in rules.pools:
        return _windowed(shape, layers, left, attention, element, settings, rules, page, chunk, requests, draft_layers)
    cell = _cell(shape, layers, attention, element, rules, sm)
    counted = sum(layer.attention in ("full", "window") for layer in layers)
    if draft_layers and counted and "draft" in rules.pools:
        cell *= 1 + draft_layers / counted
    if not cell:
        return Pools(0, context if left > 0 else 0, 0.0, state, slots)
    tokens = _paged(left / cell, page)
    return Pools(cell, tokens, tokens * cell, state, slots, "state" if slots is not None and slots <= 0 else None)


def _paged(tokens: float, page: int) -> int:
    return max(0, math.floor(tokens + 1e-9)) // page * page


def _cell(shape: Shape, layers: Sequence[Layer], attention: int, element: float, rules: Rules, sm: str | None) -> float:
    kept = [layer for layer in layers if layer.attention in ("full", "window")]
    if shape.latent is not None:
        width = (shape.latent.kv_rank + shape.latent.rope) * element
        if element == 0.5:
            width += (shape.latent.kv_rank + shape.latent.rope) // 16
        indexed = 0.0
        if shape.indexer is not None:
            if element == 1 and "sparse_scales" in rules.pools and sm != "120":
                width = shape.latent.kv_rank * (1 + 4 / _INDEX_BLOCK) + shape.latent.rope * 2
            keys = shape.indexer.dim + shape.indexer.dim // _INDEX_BLOCK * 4
            own = sum(layer.indexer for layer in kept) if "sparse_shared" in rules.pools else len(kept)
            indexed = keys * own
        return width * len(kept) + indexed
    return sum(_heads_bytes(shape, layer, attention, element) for layer in kept)


def _heads_bytes(shape: Shape, layer: Layer, attention: int, element: float) -> float:
    heads = shape.heads_of(layer)
    width = max(1, heads.keys // attention) * (heads.key_dim + heads.value_dim)
    return width * element * (1 + (1 / 8 if element == 0.5 else 0))


def _windowed(
    shape: Shape,
    layers: Sequence[Layer],
    budget: float,
    attention: int,
    element: float,
    settings: Settings,
    rules: Rules,
    page: int,
    chunk: int,
    requests: int | None,
    draft_layers: int,
) -> Pools:
    full = [_heads_bytes(shape, layer, attention, element) for layer in layers if layer.attention == "full"]
    window = [_heads_bytes(shape, layer, attention, element) for layer in layers if layer.attention == "window"]
    drafted = draft_layers * (full[0] if full else 0.0) if "draft" in rules.pools else 0.0
    if not full:
        tokens = _paged(budget / (sum(window) + drafted), page)
        return Pools(sum(window), tokens, tokens * sum(window), 0.0)
    if settings.radix_off and requests and "window_cap" in rules.pools and settings.max_requests and chunk > 0:
        tail = (shape.window or 0) + (settings.draft_tokens or 1) + 2 * page
        held = tail * requests + 2 * chunk + page
        fixed = math.ceil(held / page) * page * sum(window)
        cell = sum(full) + drafted
        tokens = _paged((budget - fixed) / cell, page)
        return Pools(cell, tokens, tokens * cell + fixed, 0.0)
    ratio = settings.window_ratio if settings.window_ratio is not None else 0.8
    cell = sum(full) + drafted + ratio * sum(window)
    tokens = _paged(budget / cell, page)
    windowed = int(tokens * ratio) // page * page
    short = "window" if tokens and "window_floor" in rules.pools and windowed <= (shape.window or 0) + page else None
    return Pools(cell, tokens, tokens * cell, 0.0, None, short)


def _compressed(
    shape: Shape,
    layers: Sequence[Layer],
    budget: float,
    settings: Settings,
    rules: Rules,
    page: int,
    context: int,
    requests: int | None,
) -> Pools:
    made, indexer = shape.compressed, shape.indexer
    assert made is not None
    window = shape.window or 128
    row = (shape.head_dim - made.rope) + made.rope * 2 + 8
    key = indexer.dim + indexer.dim // _INDEX_BLOCK * 4 if indexer is not None else 0
    ratio = settings.window_ratio if settings.window_ratio is not None else 0.1
    fours = sum(layer.ratio == 4 for layer in layers)
    many = sum(layer.ratio == 128 for layer in layers)
    drafting = settings.spec is not None
    ring4, ring128 = (16, 256) if drafting else (8, 128)
    by_requests = "state_requests" in rules.pools
    state = 16 * shape.head_dim + (16 * indexer.dim if indexer is not None else 0)
    # The list of ratios has an entry for the draft layer too, and the engine counts it.
    total = len(layers) + (1 if len(layers) == len(shape.layers) and shape.draft_layers else 0)
    cell = (
        ratio * row * total
        + row * fours / 4
        + row * many / 128
        + key * fours / 4
        + ratio * ring4 / window * state * fours
    )
    if not by_requests:
        cell += ratio * ring128 / window * 8 * shape.head_dim * many
    if drafting:
        cell *= (total + 1) / total
    held = requests
    if held is None:
        guess = budget / cell / context * 512
        held = int(min(max(min(guess, 4096), 2048), budget / cell / 2)) if budget > 0 else 0
    rows = math.ceil(((held + 1) * ring128 + ring128 + 1) / 128) * 128
    fixed = rows * 8 * shape.head_dim * many if by_requests else 0.0
    tokens = _paged((budget - fixed) / cell, page)
    short = "window" if 0 < int(tokens * ratio) // page * page <= window + page else None
    return Pools(cell, tokens, tokens * cell, float(fixed), None, short)


def _state(
    shape: Shape,
    layers: Sequence[Layer],
    budget: float,
    attention: int,
    settings: Settings,
    rules: Rules,
    requests: int | None,
) -> tuple[float, int | None]:
    """Bytes of the linear-attention state, and its slots (None: there is none)."""
    made = shape.linear
    count = sum(layer.attention == "linear" for layer in layers)
    if made is None or not count:
        return 0.0, None
    state_bytes = made.state_bytes if settings.state_dtype is None else (2 if "16" in settings.state_dtype else 4)
    each = count / attention * (made.conv_width * (made.conv - 1) * 2 + made.state * state_bytes)
    padding = 1 if "state_slot" in rules.pools else 0
    share = settings.state_ratio if settings.state_ratio is not None else 0.9
    # The states that a verification keeps come out of the same part (five slots a request).
    drafts = settings.draft_tokens or 0 if settings.spec is not None and "draft" in rules.pools else 0
    kept = None
    if settings.state_slots is not None:
        slots = settings.state_slots // (settings.layout.dp if settings.layout.dp_attention else 1)
    elif settings.radix_off and requests is not None:
        slots = kept = requests
    else:
        part = budget * share / (1 + share)
        slots = int((part - each * (1 + drafts if drafts else padding)) // (each * (1 + drafts / 5)))
    if kept is None:
        kept = min(requests or slots // 5, slots // 5)
    drafted = each * (max(kept, 0) + 1) * drafts
    return (max(slots, 0) + padding) * each + drafted, slots
