"""What SGLang makes of its flags: the defaults that depend on the card, the layout that really runs, refusals.

Pure. Each rule is of the release that is asked for (``rules.py``); MiB where SGLang counts MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ..claims.layout import Layout
from .prefill import prefill_graphs, runs_prefill_graphs
from .reserve import default_fraction, reserve_mib
from .rules import Rules
from .settings import Settings
from .shape import Shape
from .values import Box, PredictError
from .weights import Sharding

#: What compressed attention gets where nobody asks (sglang/srt/arg_groups).
_COMPRESSED_REQUESTS: Final = 256


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings that really apply. ``reserve_mib`` is what the default fraction keeps free."""

    layout: Layout
    ep: int
    fraction: float
    chunk: int
    fraction_chunk: int
    graph_bs: int
    graphs: bool
    prefill_graphs: bool
    kv_dtype: str
    page: int
    context: int
    requests: int | None
    dp_attention: bool
    draft_layers: int
    reserve_mib: float
    default_fraction: float
    notes: tuple[str, ...] = ()

    @property
    def attention_tp(self) -> int:
        """Ranks over which attention is split."""
        return self.layout.tp // (self.layout.dp if self.dp_attention else 1)

    def as_dict(self) -> dict[str, Any]:
        """The settings by the names of SGLang's own arguments."""
        return {
            "tp_size": self.layout.tp,
            "pp_size": self.layout.pp,
            "dp_size": self.layout.dp,
            "ep_size": self.ep,
            "enable_dp_attention": self.dp_attention,
            "mem_fraction_static": self.fraction,
            "chunked_prefill_size": self.chunk,
            "cuda_graph_max_bs": self.graph_bs,
            "disable_cuda_graph": not self.graphs,
            "kv_cache_dtype": self.kv_dtype,
            "page_size": self.page,
            "context_length": self.context,
            "max_running_requests": self.requests,
        }


def resolve(settings: Settings, shape: Shape, cache_fp8: bool, box: Box, rules: Rules) -> Resolved:
    """Apply the release's rules. ``cache_fp8``: the checkpoint brings scales for an fp8 cache."""
    layout, notes = settings.layout, []
    dp_attention = layout.dp_attention and layout.dp > 1
    band = rules.band(box.total_mib)
    chunk = settings.chunk if settings.chunk is not None else band.chunk
    graph_bs = settings.graph_bs or (band.few if layout.tp < 4 else band.many)
    if settings.graph_bs is None and settings.max_requests and rules.since("0.5.22"):
        graph_bs = min(graph_bs, settings.max_requests)
    if settings.graph_bs is None and not rules.since("0.5.3") and box.total_mib >= 35840:
        notes.append(
            "how many requests are captured by default is the runner's own choice in this release: 160 assumed"
        )
    kept = rules.since("0.5.11") and not rules.since("0.5.14")  # a prefill server captured them too in these
    graphs = not settings.decode_graphs_off and (settings.role != "prefill" or kept)
    prefill = prefill_graphs(settings, shape, dp_attention, box, rules)
    if shape.multimodal and settings.fraction is None and settings.prefill_graphs is None and rules.since("0.5.16"):
        does = "is" if prefill else "is not"
        notes.append(
            f"whether prefill is captured goes by a list of multimodal models: by its structure this one {does}"
        )
    draft = _draft_layers(settings, shape, notes)
    reserve = reserve_mib(settings, shape, box, rules, chunk, graph_bs, dp_attention, prefill)
    default = default_fraction(settings, shape, box, rules, reserve)
    fraction = settings.fraction if settings.fraction is not None else default
    context = settings.context or shape.context
    if _aiter(settings, shape, box) and context > 8192:
        fraction *= 0.85
        notes.append("attention runs on aiter, which takes 0.85 of the fraction for contexts above 8192")
    fraction_chunk = chunk
    if dp_attention and chunk > 0:
        chunk //= layout.dp
    kv_dtype, page = _cache(settings, shape, cache_fp8, box, rules)
    ep = layout.ep
    backend = rules.all_to_all.get(settings.a2a or "")
    if backend is not None and backend.known and ep != layout.tp:
        if ep > 1:
            notes.append(f"--moe-a2a-backend {settings.a2a} sets ep to tp: EP{layout.tp} runs, not EP{ep}")
        ep = layout.tp
    replicas = layout.dp if dp_attention else 1
    asked = settings.max_requests or (_COMPRESSED_REQUESTS if shape.compressed is not None else None)
    requests = asked // replicas if asked else None
    if settings.spec and requests is None:
        requests = (48 if rules.since("0.4.6") else 32) // replicas or 1
    return Resolved(
        layout,
        ep,
        fraction,
        chunk,
        fraction_chunk,
        graph_bs,
        graphs,
        runs_prefill_graphs(settings, prefill, rules),
        kv_dtype,
        page,
        context,
        requests,
        dp_attention,
        draft,
        reserve,
        default,
        tuple(notes),
    )


def _aiter(settings: Settings, shape: Shape, box: Box) -> bool:
    """Whether attention runs on AMD's own kernels (sglang/srt/server_args.py: the default there, but for latents)."""
    if not box.amd:
        return False
    if settings.attention is not None:
        return settings.attention == "aiter"
    return shape.latent is None or shape.heads // settings.layout.tp in (16, 128)


def _draft_layers(settings: Settings, shape: Shape, notes: list[str]) -> int:
    if settings.spec is None or settings.spec == "NGRAM":
        return 0
    if settings.draft_model is not None:
        notes.append("the draft is a model of its own: one layer like the target's is assumed for it")
        return 1
    if not shape.draft_layers:
        notes.append("the checkpoint tells of no draft layer: one is assumed")
    return 1


def _cache(settings: Settings, shape: Shape, cache_fp8: bool, box: Box, rules: Rules) -> tuple[str, int]:
    """The cache's dtype and page."""
    dtype, page = settings.kv_dtype, settings.page or 1
    sparse = shape.indexer is not None and shape.latent is not None
    blackwell = box.sm is not None and int(box.sm) >= 100
    if shape.compressed is not None:  # the engine sets its page whatever is asked for
        return ("fp8_e4m3" if dtype == "auto" else dtype), 256
    if settings.page is None and _paged_by_kernel(settings, shape, box, rules):
        page = 64
    if sparse:
        page = settings.page or 64
        if dtype == "auto":
            dtype = "fp8_e4m3" if blackwell and rules.since("0.5.6") else "bfloat16"
    elif dtype == "auto":
        dtype = "fp8_e4m3" if cache_fp8 else "bfloat16"
    return dtype, page


def _paged_by_kernel(settings: Settings, shape: Shape, box: Box, rules: Rules) -> bool:
    """Whether attention runs on TensorRT-LLM's kernels, which have pages of 64: the default of SM100 since 0.5.6."""
    if settings.attention is not None:
        return settings.attention.startswith("trtllm_")
    return box.sm in ("100", "103") and shape.linear is None and rules.since("0.5.6")


def sharding_of(resolved: Resolved, settings: Settings, shape: Shape, box: Box, rules: Rules) -> Sharding:
    """Over how many ranks each part of the weights is split."""
    tp = resolved.layout.tp
    backend = rules.all_to_all.get(settings.a2a or "")
    gathered = (
        settings.runner == "flashinfer_cutlass"
        and resolved.dp_attention
        and resolved.ep == resolved.layout.dp
        and (settings.quantization or "") == "modelopt_fp4"
    )
    whole = (backend is not None and backend.whole) or gathered
    blackwell = box.sm in ("100", "103")
    return Sharding(
        attention=resolved.attention_tp,
        expert_parallel=resolved.ep,
        expert_tensor=max(1, tp // resolved.ep),
        dense=1 if settings.dense_tp == 1 else tp,
        shared=1 if whole else tp,
        embedding=_embedding(resolved, shape, rules),
        head=resolved.attention_tp if settings.dp_head else tp,
        vision=tp,
        partition=partition(len(shape.layers), resolved.layout.pp),
        absorbed=True,
        redundant_experts=settings.redundant,
        expert_pad={"mxfp4": (256, 256) if blackwell else (64, 1)},
        rotary_tables=2 if shape.compressed is not None and rules.since("0.5.15") else 1,
        every_indexer="sparse_shared" not in rules.pools,
        fp4_scale_bytes=5 if _marlin(settings, box, rules) else 1,
    )


def _embedding(resolved: Resolved, shape: Shape, rules: Rules) -> int:
    """Ranks that share the embedding: those of one attention replica since 0.5.8; before, every rank had all of it."""
    if shape.whole_embedding:
        return 1
    if not resolved.dp_attention:
        return resolved.layout.tp
    replicated = not rules.since("0.5.8") or (shape.linear is not None and shape.multimodal)
    return 1 if replicated else resolved.attention_tp


def _marlin(settings: Settings, box: Box, rules: Rules) -> bool:
    """Whether 4-bit experts of an fp8 checkpoint run on Marlin: it keeps the float32 scales beside its own bytes.

    The default for SM90 until a kernel of its own came (quantization/mxfp4_marlin_moe.py, fp8.py).
    """
    return settings.runner == "marlin" or (settings.runner == "auto" and box.sm == "90" and not rules.since("0.5.19"))


def partition(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: the last ones get one more each (sglang/srt/distributed/utils.py)."""
    base, rest = divmod(layers, stages)
    return tuple(base + (stage >= stages - rest) for stage in range(stages))


def check_card(box: Box) -> Box:
    """The same box, or PredictError for one that cannot be."""
    if box.count < 1:
        raise PredictError(f"{box.name} has no GPUs: nothing can be predicted for it")
    if not box.total_mib > 0:
        raise PredictError(f"{box.name} has {box.total_mib} MiB: a card has memory")
    return box
