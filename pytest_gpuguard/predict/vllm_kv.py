"""How many tokens a budget holds in vLLM: blocks of one size, shared by groups of layers that keep unlike things.

Pure. The rules are those of vllm/v1/core/kv_cache_utils.py and vllm/v1/kv_cache_interface.py; a request holds blocks of
every group, so what a group with a window does not need, the others may have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .shape import Layer, Shape
from .vllm_rules import VllmRules

#: A key of the sparse indexer: fp8 elements, and a float32 scale for each 128 of them.
_INDEX_BLOCK: Final = 128
#: A token of the packed fp8 latent: 512 fp8 elements, four float32 scales, 64 rotated 16-bit elements; v4's is 584.
_PACKED: Final = (512 + 4 * 4 + 64 * 2, 584)
#: Pages of the compressed layout are rounded up to this.
_ALIGN: Final = 576
_COMPRESSED_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Request:
    """What blocks depend on beside the model: sizes in tokens, ranks, bytes of a cache element.

    ``batched`` is what one step schedules, which a window holds beside itself. ``drafted``: layers of a draft.
    ``checkpoints``: states that a request keeps; ``latent``: latent attention keeps the latent, not its heads.
    """

    tp: int
    dcp: int
    kv_dtype: str
    block: int
    batched: int
    drafted: int = 0
    spec_tokens: int = 0
    checkpoints: int = 1
    hybrid: bool = True
    latent: bool = True
    state_bytes: int | None = None
    sm: str | None = None

    @property
    def element(self) -> float:
        """Bytes of an element of the cache."""
        if "nvfp4" in self.kv_dtype:
            return 0.5 + 1 / 16
        return 1 if "fp8" in self.kv_dtype or "int8" in self.kv_dtype else 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks of one stage. ``full`` groups grow with a request; the others hold ``fixed`` blocks each at most.

    ``block_bytes`` is one block in every layer of a group; ``block`` the tokens in it; ``windows`` are (tokens a block,
    most tokens kept) of the groups with a window; ``states`` the blocks of state that a request keeps in its groups.
    """

    block_bytes: float
    block: int
    dcp: int = 1
    full: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    state_groups: int = 0
    states: int = 0

    @property
    def groups(self) -> int:
        """Groups that blocks are handed to, of any kind."""
        return self.full + len(self.windows) + self.state_groups

    def blocks_for(self, tokens: int) -> int:
        """Blocks that one request of so many tokens holds."""
        grown = math.ceil(math.ceil(tokens / self.dcp) / self.block) * self.full
        kept = sum(math.ceil(min(most, tokens) / size) + 1 for size, most in self.windows)
        return grown + kept + self.states

    def blocks_in(self, budget: float) -> int:
        """Blocks that a budget in bytes holds."""
        return max(0, int(budget // self.block_bytes)) if self.block_bytes else 0

    def tokens_in(self, blocks: int, context: int, rules: VllmRules) -> int:
        """Tokens as the release prints them ("GPU KV cache size")."""
        if rules.has("capacity"):
            return int(blocks / self.blocks_for(context) * context)
        return blocks // self.groups * self.block * self.dcp

    def longest(self, blocks: int, context: int) -> int:
        """The longest request that so many blocks hold, at most ``context``."""
        low, high = 0, context
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def plan_of(shape: Shape, layers: Sequence[Layer], request: Request, rules: VllmRules) -> Plan | None:
    """The plan of one stage; None where no layer keeps anything."""
    if shape.compressed is not None:
        return _compressed(shape, layers, request)
    full = [layer for layer in layers if layer.attention == "full"]
    window = [layer for layer in layers if layer.attention == "window"]
    states = sum(layer.attention == "linear" for layer in layers) if shape.linear is not None else 0
    if not full and not window:
        return None
    sizes = [_layer_bytes(shape, layer, request, rules) for layer in full]
    sizes += [sizes[-1] if sizes else _layer_bytes(shape, window[-1], request, rules)] * request.drafted
    narrow = [_layer_bytes(shape, layer, request, rules) for layer in window]
    if states and rules.has("linear groups"):
        return _with_states(shape, sizes + narrow, states, request)
    grouped = request.hybrid and rules.has("hybrid groups") and shape.window is not None
    if not narrow or not sizes or not grouped:
        # One kind of attention, or windows that are kept as if there were none.
        return Plan(sum(sizes + narrow) * request.block, request.block, request.dcp)
    return _windowed(sizes, narrow, shape.window or 0, request)


def _layer_bytes(shape: Shape, layer: Layer, request: Request, rules: VllmRules) -> float:
    """Bytes of one token in one layer."""
    element = request.element
    latent = shape.latent
    if latent is None:
        heads = shape.heads_of(layer)
        scales = 8 if "per_token_head" in request.kv_dtype else 0
        return max(1, heads.keys // request.tp) * ((heads.key_dim + heads.value_dim) * element + scales)
    if not request.latent:
        # Heads are kept as they are, padded to a size that the attention kernels have.
        padded = next((size for size in (64, 128, 256) if latent.nope + latent.rope <= size), latent.nope + latent.rope)
        return max(1, shape.heads // request.tp) * 2 * padded * element
    width = (latent.kv_rank + latent.rope) * element
    if shape.indexer is None:
        return width
    if element == 1 and not _plain_sparse(request.sm, rules):
        width = _PACKED[0] if (latent.kv_rank, latent.rope) == (512, 64) else width
    keys = shape.indexer.dim + shape.indexer.dim // _INDEX_BLOCK * 4
    return width + (keys if layer.indexer or not rules.has("shared indexers") else 0)


def _plain_sparse(sm: str | None, rules: VllmRules) -> bool:
    """Whether sparse attention over an fp8 cache reads plain fp8 (platforms/cuda.py: FlashInfer is preferred there)."""
    return sm in ("100", "103") and rules.has("plain sparse")


def _even(counts: Sequence[int]) -> int:
    """Layers in a group: as few as the rarest kind has, unless the kinds are nearly as many."""
    least, most = min(counts), max(counts)
    return most if most < least * 1.5 else least


def _windowed(full: Sequence[float], window: Sequence[float], kept: int, request: Request) -> Plan:
    each = _even((len(full), len(window)))
    page = max(full[0], window[0]) * request.block
    # A kind with smaller pages gets as many more tokens a block, so that all pages are of one size.
    wide_block = request.block * max(1, int(page // (full[0] * request.block)))
    narrow_block = request.block * max(1, int(page // (window[0] * request.block)))
    windows = ((narrow_block, kept - 1 + request.batched),) * math.ceil(len(window) / each)
    return Plan(page * each, wide_block, 1, math.ceil(len(full) / each), windows)


def _with_states(shape: Shape, sizes: Sequence[float], states: int, request: Request) -> Plan:
    """Attention beside linear attention: blocks are as large as a layer's state (platforms/interface.py)."""
    made = shape.linear
    assert made is not None
    kept_inputs = made.conv_width * (made.conv - 1 + request.spec_tokens) * 2
    state = (kept_inputs + made.state * (request.state_bytes or made.state_bytes)) / request.tp
    each = _even((len(sizes), states))
    block = max(request.block, request.block * math.ceil(state / (request.block * sizes[0])))
    groups = math.ceil(states / each)
    kept = groups * (request.checkpoints + request.spec_tokens)
    return Plan(sizes[0] * block * each, block, request.dcp, math.ceil(len(sizes) / each), (), groups, kept)


def _up(size: float) -> float:
    return math.ceil(size / _ALIGN) * _ALIGN


def _compressed(shape: Shape, layers: Sequence[Layer], request: Request) -> Plan | None:
    """Compressed pools beside a window, and the compressors' states, in the same blocks of 256 tokens."""
    indexer, block = shape.indexer, _COMPRESSED_BLOCK
    fours = sum(layer.ratio == 4 for layer in layers)
    many = sum(layer.ratio == 128 for layer in layers)
    keys = indexer.dim + indexer.dim // _INDEX_BLOCK * 4 if indexer is not None else 0
    pages = [
        _up(block / 4 * _PACKED[1]) if fours else 0,
        _up(block / 4 * keys) if fours else 0,
        _up(block / 128 * _PACKED[1]) if many else 0,
    ]
    tuples = max(fours, many)
    if not tuples:
        return None
    windows = ((64, (shape.window or 128) - 1 + request.batched),) * math.ceil(len(layers) / tuples)
    windows += ((4, 8 - 1 + request.batched),) * math.ceil(fours / tuples)
    windows += ((8, 128 - 1 + request.batched),) * math.ceil(many / tuples)
    return Plan(sum(pages) * tuples, block, request.dcp, 1, windows)
