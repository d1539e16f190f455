"""The numbers of a configuration, read from whatever its fields are called.

Structure alone decides: no architecture or model is known by name. What is not understood is an assumption, said aloud.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .config import Config, finite, whole
from .layers import layers_of
from .shape import Compressed, Heads, Indexer, Latent, Layer, Linear, Shape, Vision
from .values import PredictError

#: Activations whose MLP has two matrices; every other one is gated and has three.
_UNGATED: Final = frozenset(("relu", "relu2", "gelu_new", "gelu_fast", "squared_relu"))


def shape_of(config: Config) -> Shape:
    """The numbers of a configuration. Raises PredictError for fields that are missing or impossible."""
    text = config.text
    hidden = config.needed("hidden_size", "n_embd", "d_model", "dim")
    count = config.needed("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = config.needed("num_attention_heads", "n_head", "n_heads", "num_heads")
    if count > 10_000:
        raise PredictError(f"{config.source}: num_hidden_layers is {count}: no model has so many layers")
    notes: list[str] = []
    head_dim = config.number("head_dim", "attention_head_dim") or hidden // heads
    experts = config.number("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts") or 0
    inner = config.number("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    expert_inner = config.number("moe_intermediate_size", "expert_ffn_hidden_size") or 0
    if experts and not expert_inner:
        expert_inner = config.needed("intermediate_size")
    if inner is None:
        inner = 0 if experts else 4 * hidden
        if not experts:
            notes.append(f"intermediate_size is not told: 4 x hidden_size = {inner} assumed")
    latent = _latent(config, head_dim)
    compressed = _compressed(config)
    linear = _linear(config, hidden)
    indexer = _indexer(config)
    layers = layers_of(config, count, experts, linear, indexer, compressed, notes)
    act = str(text.get("hidden_act") or text.get("hidden_activation") or "silu")
    shared = config.number("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if shared is None:
        # A dense width of its own is told by models whose experts have a shared one beside them and do not say so.
        beside = 1 if "intermediate_size_mlp" in text and experts else 0
        shared = (config.number("n_shared_experts", "num_shared_experts") or beside) * expert_inner
    window = config.number("sliding_window", "window_size", "attention_chunk_size")
    vision = _vision(config, hidden)
    full, windowed = _heads(config, heads, head_dim)
    return Shape(
        hidden=hidden,
        vocab=config.needed("vocab_size"),
        layers=layers,
        full=full,
        window_heads=windowed,
        inner=inner,
        tied=bool(text.get("tie_word_embeddings", False)),
        dtype_bytes=_dtype_bytes(text, notes),
        context=config.number("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length") or 2048,
        rotary_elements=_rotary_elements(config, latent, compressed, full, windowed),
        whole_embedding=_whole_embedding(text),
        layer_embedding=_layer_embedding(config, count),
        query_gate=bool(text.get("attn_output_gate", "linear_num_value_heads" in text)),
        shared_key_value=bool(text.get("attention_k_eq_v", False)),
        gated=act not in _UNGATED,
        bias=bool(text.get("attention_bias") or text.get("qkv_bias")),
        experts=experts,
        expert_inner=expert_inner,
        shared_inner=shared if experts else 0,
        router_bytes=4 if "32" in str(text.get("moe_router_dtype", "")) else 2,
        expert_dtype=text.get("expert_dtype"),
        latent=latent,
        compressed=compressed,
        linear=linear,
        indexer=indexer,
        window=window,
        split_pools=_split_pools(text, layers, window),
        draft_layers=config.number("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules") or 0,
        vision=vision,
        vision_complexity=_complexity(config.vision),
        assumptions=tuple(notes),
    )


def _latent(config: Config, head_dim: int) -> Latent | None:
    rank = config.number("kv_lora_rank")
    if not rank:
        return None
    nope = config.number("qk_nope_head_dim") or head_dim
    return Latent(
        config.number("q_lora_rank") or 0,
        rank,
        nope,
        config.number("qk_rope_head_dim") or 0,
        config.number("v_head_dim") or nope,
    )


def _compressed(config: Config) -> Compressed | None:
    if not isinstance(config.text.get("compress_ratios"), Sequence):
        return None
    return Compressed(
        config.needed("q_lora_rank"),
        config.number("qk_rope_head_dim") or 0,
        config.number("o_groups") or 1,
        config.needed("o_lora_rank"),
        config.number("hc_mult") or 0,
    )


def _heads(config: Config, heads: int, head_dim: int) -> tuple[Heads, Heads]:
    """The heads of full and of windowed layers; either may be the one that a config names apart."""
    keys = (
        config.number("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_attention_groups") or heads
    )
    base = Heads(heads, keys, head_dim, config.number("v_head_dim") or head_dim)
    wide = config.number("global_head_dim")
    full = base
    if wide or config.number("num_global_key_value_heads"):
        wide = wide or head_dim
        full = Heads(heads, config.number("num_global_key_value_heads") or keys, wide, wide)
    narrow = config.number("swa_head_dim") or base.key_dim
    return full, Heads(
        config.number("swa_num_attention_heads") or heads,
        config.number("swa_num_key_value_heads") or keys,
        narrow,
        config.number("swa_v_head_dim") or (base.value_dim if narrow == base.key_dim else narrow),
    )


def _linear(config: Config, hidden: int) -> Linear | None:
    if values := config.number("linear_num_value_heads"):
        return _gated(config, values)
    if heads := config.number("mamba_num_heads", "mamba_n_heads"):
        return _state_space(config, heads, hidden)
    told = config.text.get("linear_attn_config")
    if isinstance(told, Mapping) and (heads := whole(told.get("num_heads"))) and (dim := whole(told.get("head_dim"))):
        width = heads * dim
        names = (("q_proj", width), ("k_proj", width), ("v_proj", width), ("f_a_proj", dim), ("g_a_proj", dim))
        conv = whole(told.get("short_conv_kernel_size")) or 4
        return Linear((*names, ("b_proj", heads)), width, 3 * width, conv, heads * dim * dim, 4, low_rank_gate=True)
    return None


def _gated(config: Config, value_heads: int) -> Linear:
    key_dim, value_dim = config.needed("linear_key_head_dim"), config.needed("linear_value_head_dim")
    keys, values = config.needed("linear_num_key_heads") * key_dim, value_heads * value_dim
    return Linear(
        (
            ("in_proj_qkv", 2 * keys + values),
            ("in_proj_z", values),
            ("in_proj_a", value_heads),
            ("in_proj_b", value_heads),
        ),
        values,
        2 * keys + values,
        config.number("linear_conv_kernel_dim") or 4,
        value_heads * value_dim * key_dim,
        _state_bytes(config),
    )


def _state_space(config: Config, heads: int, hidden: int) -> Linear:
    dim = config.number("mamba_head_dim", "mamba_d_head") or 2 * hidden // heads
    state = config.number("ssm_state_size", "mamba_d_state", "mamba_state_size") or 128
    groups = config.number("n_groups", "mamba_n_groups", "mamba_ngroups") or 1
    inner = heads * dim
    conv = config.number("conv_kernel", "mamba_d_conv") or 4
    width = inner + 2 * groups * state
    return Linear((("in_proj", inner + width + heads),), inner, width, conv, inner * state, _state_bytes(config))


def _state_bytes(config: Config) -> int:
    return 2 if "16" in str(config.text.get("mamba_ssm_dtype") or config.text.get("mamba_ssm_cache_dtype")) else 4


def _indexer(config: Config) -> Indexer | None:
    dim, heads = config.number("index_head_dim"), config.number("index_n_heads")
    return Indexer(heads, dim) if dim and heads else None


def _split_pools(text: Mapping[str, Any], layers: Sequence[Layer], window: int | None) -> bool:
    """Whether the engine keeps a pool of its own for the windowed layers.

    SGLang does so for a list of model classes; those outside of it that have windows scale their queries.
    """
    kinds = {layer.attention for layer in layers}
    return bool(window) and {"full", "window"} <= kinds and "query_pre_attn_scalar" not in text


def _dtype_bytes(text: Mapping[str, Any], notes: list[str]) -> int:
    name = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    if "32" in name:
        notes.append("the checkpoint is float32: loaded as 16 bits, as engines do")
    return 2


def _whole_embedding(text: Mapping[str, Any]) -> bool:
    """Whether the embedding is scaled and is no parallel layer: in models with such inputs or local rotary bases."""
    return "hidden_size_per_layer_input" in text or "rope_local_base_freq" in text


def _layer_embedding(config: Config, count: int) -> int:
    """Elements of a second embedding, from which every layer takes an input of its own."""
    width = config.number("hidden_size_per_layer_input") or 0
    return width * count * (config.number("vocab_size_per_layer_input") or config.needed("vocab_size")) if width else 0


def _rotary_elements(
    config: Config, latent: Latent | None, compressed: Compressed | None, full: Heads, windowed: Heads
) -> float:
    """Elements of the cosine and sine tables: one row a position, one column a rotated dimension."""
    text = config.text
    rows = config.number("max_position_embeddings", "n_positions") or 2048
    scaling = text.get("rope_scaling") or {}
    if isinstance(scaling, Mapping) and "yarn" in str(scaling.get("type") or scaling.get("rope_type")):
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        stretched = (finite(original) or 0.0) * (finite(factor) or 0.0)
        rows = int(stretched) if 0 < stretched <= 10**9 else rows
    rope = text.get("rope_parameters")
    by_kind = isinstance(rope, Mapping) and any(isinstance(one, Mapping) for one in rope.values())
    if by_kind or "rope_local_base_freq" in text:  # a table for the windowed layers and one for the others
        return float(rows * (full.key_dim + windowed.key_dim))
    part = finite(text.get("partial_rotary_factor"))
    part = part or (finite(rope.get("partial_rotary_factor")) if isinstance(rope, Mapping) else None) or 1.0
    if compressed is not None:  # one table for compressed layers, one for the others
        return float(2 * rows * compressed.rope)
    columns = config.number("rotary_dim") or (latent.rope if latent is not None else full.key_dim * part)
    return float(rows * columns)


def _complexity(vision: Mapping[str, Any] | None) -> float | None:
    """Layers x width^2 of a vision tower as SGLang reads them: by these names, with these defaults."""
    if vision is None:
        return None
    layers = vision.get("num_hidden_layers", vision.get("vt_num_hidden_layers", vision.get("num_layers", 24)))
    hidden = vision.get("hidden_size", vision.get("vt_hidden_size", 1024))
    counted, width = finite(layers), finite(hidden)
    return counted * width**2 if counted is not None and width is not None else None


def _vision(config: Config, text_hidden: int) -> Vision | None:
    vision = config.vision
    if vision is None:
        return None

    def first(*names: str) -> int:
        for name in names:
            value = finite(vision.get(name))
            if value is not None and value > 0:
                return int(value)
        return 0

    hidden = first("hidden_size", "vt_hidden_size", "embed_dim", "width")
    layers = first("depth", "num_hidden_layers", "vt_num_hidden_layers", "layers", "num_layers")
    if not hidden or not layers:
        return None
    merge = vision.get("merge_kernel_size") or vision.get("spatial_merge_size") or 1
    side = merge[0] if isinstance(merge, Sequence) and merge else merge
    return Vision(
        layers,
        hidden,
        first("intermediate_size", "vt_intermediate_size", "mlp_dim") or 4 * hidden,
        first("out_hidden_size", "text_hidden_size") or text_hidden,
        int(finite(side) or 1),
        str(vision.get("hidden_act", "gelu")) in ("silu", "swiglu"),
        "vt_hidden_size" in vision,
        "spatial_merge_size" in vision,
    )
