"""The weights that one rank holds, walked layer by layer and stage by stage.

What is sharded by what follows SGLang (sglang/srt/layers, sglang/srt/models): experts by the whole tensor-parallel
group whatever ep is, latent projections not at all, attention by its own group, embeddings by the vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from .quant import FP8_EXPERTS_4BIT, FULL, Quantization, Scheme, up
from .shape import Layer, Shape

GIB: Final = 1 << 30
#: Vocabulary rows are padded to this, by every engine.
_VOCAB: Final = 64


@dataclass(frozen=True, slots=True)
class Sharding:
    """Over how many ranks each part is split. ``expert_pad``: rows and columns of experts are rounded up to these;
    ``rotary_tables``: copies of the cosine and sine table, in another form each.

    ``every_indexer``: layers that reuse an indexer's result still hold one; ``fp4_scale_bytes``: kept for each scale of
    4-bit experts in an fp8 checkpoint.
    """

    attention: int = 1
    expert_parallel: int = 1
    expert_tensor: int = 1
    dense: int = 1
    shared: int = 1
    embedding: int = 1
    head: int = 1
    vision: int = 1
    partition: tuple[int, ...] = ()
    absorbed: bool = True
    rotary_element: int = 4
    rotary_tables: int = 1
    redundant_experts: int = 0
    every_indexer: bool = False
    fp4_scale_bytes: float = 1
    expert_pad: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights of each pipeline stage, and the parts of the fullest one."""

    stages: tuple[float, ...]
    parts: Mapping[str, float]

    @property
    def fullest(self) -> float:
        """Bytes on a rank of the fullest stage."""
        return max(self.stages)


def weights_of(shape: Shape, quantization: Quantization, sharding: Sharding) -> Weights:
    """Walk the model. ``sharding.partition`` gives the layers of each stage."""
    partition = sharding.partition or (len(shape.layers),)
    walk = _Walk(shape, quantization, sharding)
    stages: list[dict[str, float]] = []
    start = 0
    for stage, count in enumerate(partition):
        parts: dict[str, float] = defaultdict(float)
        for index in range(start, start + count):
            for name, size in walk.layer(index).items():
                parts[name] += size
        start += count
        if stage == 0:
            parts["embedding"] += walk.embedding()
            parts["vision"] += walk.vision()
        if stage == len(partition) - 1:
            parts["head"] += walk.head(len(partition) > 1)
        parts["rotary"] += shape.rotary_elements * sharding.rotary_element * sharding.rotary_tables
        stages.append(parts)
    totals = [sum(parts.values()) for parts in stages]
    fullest = stages[totals.index(max(totals))]
    return Weights(tuple(totals), {name: value for name, value in fullest.items() if value})


def draft_bytes(shape: Shape, quantization: Quantization, sharding: Sharding) -> float:
    """Bytes of one layer of a draft that the checkpoint brings (MTP): a layer like the last, and its projection."""
    walk = _Walk(shape, quantization, sharding)
    return sum(walk.layer(len(shape.layers) - 1).values()) + 2 * shape.hidden * shape.hidden * shape.dtype_bytes


class _Walk:
    """Sizes of the parts of one model on one rank."""

    def __init__(self, shape: Shape, quantization: Quantization, sharding: Sharding) -> None:
        self.shape = shape
        self.quant = quantization
        self.over = sharding
        self._plain = Scheme("plain", 8 * shape.dtype_bytes)

    def _bytes(self, name: str, rows: float, columns: float, expert: bool = False) -> float:
        scheme = self.quant.of(name, expert)
        return (self._plain if scheme is FULL else scheme).bytes(rows, columns)

    def _full(self, rows: float, columns: float) -> float:
        return rows * columns * self.shape.dtype_bytes

    def layer(self, index: int) -> dict[str, float]:
        """The parts of a layer, in bytes."""
        layer, name = self.shape.layers[index], f"layers.{index}"
        parts: dict[str, float] = defaultdict(float)
        parts["norms"] += self._full(2, self.shape.hidden)
        if layer.attention == "linear":
            parts["linear attention"] += sum(self._linear(f"{name}.linear_attn"))
        elif layer.attention != "none":
            parts["attention"] += sum(self._attention(layer, f"{name}.self_attn"))
            if layer.indexer or (self.over.every_indexer and self.shape.latent and self.shape.indexer):
                parts["indexer"] += sum(self._indexer(layer, f"{name}.self_attn.indexer"))
        if self.shape.compressed is not None and self.shape.compressed.streams:
            streams = self.shape.compressed.streams  # two mixers a layer, float32
            parts["streams"] += 2 * (2 + streams) * streams * streams * self.shape.hidden * 4
        if layer.moe:
            parts["router"] += self.shape.experts * self.shape.hidden * self.shape.router_bytes
            parts["experts"] += self._experts(f"{name}.mlp.experts.0")
            if self.shape.shared_inner:
                parts["shared experts"] += self._mlp(
                    f"{name}.mlp.shared_experts", self.shape.shared_inner, self.over.shared
                )
        if layer.dense and self.shape.inner:
            parts["dense MLP"] += self._mlp(f"{name}.mlp", self.shape.inner, self.over.dense)
        return parts

    def _attention(self, layer: Layer, name: str) -> Iterator[float]:
        shape, hidden, over = self.shape, self.shape.hidden, self.over.attention
        if shape.compressed is not None:
            yield from self._compressed(layer, name)
        elif shape.latent is not None:
            yield from self._latent(name)
        else:
            heads = shape.heads_of(layer)
            queries = heads.queries / over
            keys = max(1.0, heads.keys / over)
            gate = 2 if shape.query_gate else 1
            yield self._bytes(f"{name}.q_proj", queries * heads.key_dim * gate, hidden)
            yield self._bytes(f"{name}.k_proj", keys * heads.key_dim, hidden)
            if not (shape.shared_key_value and layer.attention == "full"):
                yield self._bytes(f"{name}.v_proj", keys * heads.value_dim, hidden)
            yield self._bytes(f"{name}.o_proj", hidden, queries * heads.value_dim)
            if shape.bias:
                yield self._full(1, queries * heads.key_dim + keys * (heads.key_dim + heads.value_dim) + hidden)

    def _latent(self, name: str) -> Iterator[float]:
        shape, hidden, over = self.shape, self.shape.hidden, self.over.attention
        latent = shape.latent
        assert latent is not None
        heads = shape.heads / over
        query = heads * (latent.nope + latent.rope)
        if latent.q_rank:
            yield self._bytes(f"{name}.q_a_proj", latent.q_rank, hidden)
            yield self._bytes(f"{name}.q_b_proj", query, latent.q_rank)
        else:
            yield self._bytes(f"{name}.q_proj", query, hidden)
        yield self._bytes(f"{name}.kv_a_proj_with_mqa", latent.kv_rank + latent.rope, hidden)
        expanded = heads * (latent.nope + latent.value)
        yield self._bytes(f"{name}.kv_b_proj", expanded, latent.kv_rank)
        if self.over.absorbed:  # the two halves of kv_b in 16 bits stay beside it
            yield self._full(expanded, latent.kv_rank)
        yield self._bytes(f"{name}.o_proj", hidden, heads * latent.value)

    def _compressed(self, layer: Layer, name: str) -> Iterator[float]:
        shape, hidden, over = self.shape, self.shape.hidden, self.over.attention
        made = shape.compressed
        assert made is not None
        width = shape.heads * shape.head_dim
        yield self._bytes(f"{name}.wq_a", made.q_rank, hidden)
        yield self._bytes(f"{name}.wq_b", width / over, made.q_rank)
        yield self._bytes(f"{name}.wkv", shape.head_dim, hidden)
        # The first output projection is kept in 16 bits by default.
        yield self._full(made.groups * made.out_rank / over, width / made.groups)
        yield self._bytes(f"{name}.wo_b", hidden, made.groups * made.out_rank / over)
        if layer.ratio:
            yield self._compressor(shape.head_dim, layer.ratio)

    def _compressor(self, dim: int, ratio: int) -> float:
        fold = 2 if ratio == 4 else 1
        return self._full(2 * fold * dim, self.shape.hidden) + ratio * fold * dim * 4

    def _indexer(self, layer: Layer, name: str) -> Iterator[float]:
        indexer, shape = self.shape.indexer, self.shape
        assert indexer is not None
        rank = shape.latent.q_rank if shape.latent else shape.compressed.q_rank if shape.compressed else shape.hidden
        yield self._bytes(f"{name}.wq_b", indexer.heads * indexer.dim, rank or shape.hidden)
        yield self._full(indexer.heads, shape.hidden)
        if shape.compressed is not None:
            yield self._compressor(indexer.dim, layer.ratio)
        else:
            yield self._bytes(f"{name}.wk", indexer.dim, shape.hidden)

    def _linear(self, name: str) -> Iterator[float]:
        made, hidden, over = self.shape.linear, self.shape.hidden, self.over.attention
        if made is None:
            return
        for projection, rows in made.projections:
            yield self._bytes(f"{name}.{projection}", rows / over, hidden)
        yield self._full(made.conv_width / over, made.conv)
        yield self._bytes(f"{name}.out_proj", hidden, made.out / over)

    def _experts(self, name: str) -> float:
        shape, over = self.shape, self.over
        held = math.ceil((shape.experts + over.redundant_experts) / over.expert_parallel)
        scheme = self.quant.of(f"{name}.up_proj", expert=True)
        pad_inner, pad_hidden = over.expert_pad.get(scheme.name, (1, 1))
        inner = up(shape.expert_inner / over.expert_tensor, pad_inner)
        hidden = up(shape.hidden, pad_hidden)
        if scheme is FULL:
            scheme = self._plain
        elif scheme is FP8_EXPERTS_4BIT:
            scheme = replace(scheme, scale_bytes=over.fp4_scale_bytes)
        rows = inner * (2 if shape.gated else 1)
        return held * (scheme.bytes(rows, hidden) + scheme.bytes(hidden, inner))

    def _mlp(self, name: str, inner: int, over: int) -> float:
        part = inner / over
        up = self._bytes(f"{name}.up_proj", part, self.shape.hidden)
        gate = self._bytes(f"{name}.gate_proj", part, self.shape.hidden) if self.shape.gated else 0.0
        return up + gate + self._bytes(f"{name}.down_proj", self.shape.hidden, part)

    def _vocabulary(self, over: int) -> float:
        return up(self.shape.vocab, _VOCAB * over) / over

    def embedding(self) -> float:
        """The embedding table, and that of the layers where they have inputs of their own: whole on every rank."""
        own = self._full(self._vocabulary(self.over.embedding), self.shape.hidden)
        return own + self._full(1, self.shape.layer_embedding)

    def head(self, other_stage: bool) -> float:
        """The output layer: nothing where it is the embedding on the same stage."""
        if self.shape.tied and not other_stage:
            return 0.0
        scheme = self._plain if self.quant.head is FULL else self.quant.head
        return scheme.bytes(self._vocabulary(self.over.head), self.shape.hidden)

    def vision(self) -> float:
        """The vision tower and its projector, in the model's own dtype."""
        tower = self.shape.vision
        if tower is None:
            return 0.0
        attention = 4 * tower.hidden * tower.hidden
        mlp = float((3 if tower.gated else 2) * tower.hidden * tower.inner)
        merged = tower.hidden * tower.merge * tower.merge
        projector = float(merged * merged + merged * tower.out)
        projector /= self.over.vision if tower.split_projector else 1
        mlp /= 1 if tower.whole_mlp else self.over.vision
        return self._full(1, tower.layers * (attention / self.over.vision + mlp) + projector)
