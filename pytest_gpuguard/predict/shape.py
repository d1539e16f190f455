"""What a model is made of, in numbers, whatever its fields are called: layers, heads, experts, latents, windows.

Frozen values; ``reading.py`` makes them from a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. ``attention`` is "full", "window", "linear" or "none"; ``ratio`` its KV compression (0: none).

    ``indexer``: it has a sparse-attention indexer of its own.
    """

    attention: str = "full"
    moe: bool = False
    dense: bool = True
    indexer: bool = False
    ratio: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (MLA): ranks and head sizes; ``q_rank`` 0 means no query latent."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Compressed:
    """Attention with one shared KV head and compressed pools beside a window: ranks and groups of its projections."""

    q_rank: int
    rope: int
    groups: int
    out_rank: int
    streams: int


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear attention or a state-space mixer: what its layers project to, convolve and keep.

    ``projections`` are names and rows of the matrices from the hidden size; ``out`` is the width that the output
    projection reads; ``conv_width`` values are convolved over ``conv`` positions; ``state`` elements are kept a
    request, of ``state_bytes`` each. ``low_rank_gate``: its gates are made by two small matrices each.
    """

    projections: tuple[tuple[str, int], ...]
    out: int
    conv_width: int
    conv: int
    state: int
    state_bytes: int
    low_rank_gate: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one kind of layer: queries, keys and values, and the widths of a key and of a value."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Indexer:
    """The indexer of sparse attention."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower. ``gated``: its MLP has three matrices; ``whole_mlp``: every rank holds all of them.

    ``split_projector``: what leads into the language model is split over the ranks.
    """

    layers: int
    hidden: int
    inner: int
    out: int
    merge: int
    gated: bool
    whole_mlp: bool
    split_projector: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in numbers. ``dtype_bytes`` is the size of an unquantized element.

    ``whole_embedding``: every rank holds the embedding whole; ``layer_embedding``: elements of one beside it.
    """

    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    full: Heads
    window_heads: Heads
    inner: int
    tied: bool
    dtype_bytes: int
    context: int
    rotary_elements: float
    whole_embedding: bool = False
    layer_embedding: int = 0
    query_gate: bool = False
    shared_key_value: bool = False
    gated: bool = True
    bias: bool = False
    experts: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    router_bytes: int = 2
    expert_dtype: str | None = None
    latent: Latent | None = None
    compressed: Compressed | None = None
    linear: Linear | None = None
    indexer: Indexer | None = None
    window: int | None = None
    split_pools: bool = False
    draft_layers: int = 0
    vision: Vision | None = None
    vision_complexity: float | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """Query heads of a layer with full attention."""
        return self.full.queries

    @property
    def head_dim(self) -> int:
        """The width of a key of a layer with full attention."""
        return self.full.key_dim

    def heads_of(self, layer: Layer) -> Heads:
        """The heads of a layer, by its kind of attention."""
        return self.window_heads if layer.attention == "window" else self.full

    @property
    def multimodal(self) -> bool:
        """Whether the checkpoint has a vision tower."""
        return self.vision_complexity is not None

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(layer.attention in ("full", "window") for layer in self.layers)
