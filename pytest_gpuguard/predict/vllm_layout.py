"""What vLLM makes of its flags: defaults that depend on the card, the layout that really runs, refusals.

Pure. Each rule is of the release that is asked for (``vllm_rules.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..claims.layout import Layout
from .facts import Facts
from .values import Rejection
from .vllm_profile import captured_sizes
from .vllm_rules import VllmRules
from .vllm_settings import VllmSettings
from .weights import Sharding

#: Cards from here on have larger defaults (engine/arg_utils.py), in GiB.
_LARGE_GIB: Final = 70
_LARGEST_GIB: Final = 160
#: Context above which vLLM before 0.8 chunks prefills by itself (engine/arg_utils.py).
_LONG: Final = 32768
#: Backends of the expert all-to-all with which shared experts are not split (config/parallel.py).
_SEQUENCE: Final = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "mori", "nixl_ep")
#: Drafts without a model.
_NO_DRAFT: Final = ("ngram", "ngram_gpu", "suffix", "[ngram]")


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings that really apply."""

    layout: Layout
    utilization: float
    context: int
    open_context: bool
    batched: int
    seqs: int
    kv_dtype: str
    block: int
    latent: bool
    drafted: int
    graphs: int
    expert_tensor: int

    def as_dict(self) -> dict[str, Any]:
        """The settings by the names of vLLM's own arguments."""
        return {
            "tensor_parallel_size": self.layout.tp,
            "pipeline_parallel_size": self.layout.pp,
            "data_parallel_size": self.layout.dp,
            "enable_expert_parallel": self.layout.ep > 1,
            "gpu_memory_utilization": self.utilization,
            "max_model_len": self.context,
            "max_num_batched_tokens": self.batched,
            "max_num_seqs": self.seqs,
            "kv_cache_dtype": self.kv_dtype,
            "block_size": self.block,
            "cuda_graphs": self.graphs,
        }


def resolve(settings: VllmSettings, facts: Facts, rules: VllmRules) -> Resolved:
    """Apply the release's defaults."""
    layout, shape = settings.layout, facts.shape
    asked = settings.context if settings.context is not None and settings.context > 0 else None
    context = asked or derived_context(facts)
    seqs, batched = _batch(settings, facts, rules, context)
    latent = _keeps_latent(facts, rules)
    drafted = 0 if settings.spec is None or settings.spec in _NO_DRAFT else 1
    sizes: list[int] = []
    graphs = 0
    if not settings.eager:
        sizes = captured_sizes(seqs, batched, settings.draft_tokens, settings.capture_max, settings.capture_sizes)
        # Each size once in pieces, and once as a whole as far as decoding goes.
        graphs = len(sizes) + sum(size <= seqs * (1 + settings.draft_tokens) for size in sizes)
    ranks = layout.tp * layout.dp
    return Resolved(
        layout,
        settings.utilization or (0.92 if rules.has("utilization 0.92") else 0.9),
        context,
        settings.context == -1,
        batched,
        seqs,
        _kv_dtype(settings, facts, rules),
        settings.block or _block(facts, rules, latent),
        latent,
        drafted,
        graphs,
        1 if settings.expert_parallel else ranks if shape.experts else layout.tp,
    )


def derived_context(facts: Facts) -> int:
    """The longest context that the configuration allows (config/model.py, _get_and_verify_max_len)."""
    scaling = facts.config.text.get("rope_scaling") or facts.config.text.get("rope_parameters") or {}
    if isinstance(scaling, Mapping) and "yarn" in str(scaling.get("rope_type") or scaling.get("type")):
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        if isinstance(original, (int, float)) and isinstance(factor, (int, float)):
            return max(int(original * factor), 1)
    return facts.shape.context


def _batch(settings: VllmSettings, facts: Facts, rules: VllmRules, context: int) -> tuple[int, int]:
    """Requests and tokens of one step."""
    if not rules.has("v1"):
        chunked = settings.chunked
        if chunked is None:
            plain = settings.spec is None and not settings.lora and not facts.shape.multimodal
            chunked = context > _LONG and plain and facts.shape.window is None and facts.box.sm is not None
        batched = settings.batched
        if batched is None:
            batched = (512 if rules.release.startswith("0.6.4") else 2048) if chunked else max(context, 2048)
            batched = max(batched, 5120) if facts.shape.multimodal else batched
        return settings.seqs or 256, batched
    total = facts.box.torch_gib
    a100 = "a100" in facts.box.name.lower() and rules.has("not a100")
    large = total >= _LARGE_GIB and not a100
    if rules.has("three bands"):
        large = total >= _LARGEST_GIB or (large and facts.box.sm != "121")
    batched = settings.batched
    seqs = settings.seqs or (1024 if large else 256)
    if batched is None:
        batched = 16384 if total >= _LARGEST_GIB and rules.has("three bands") else 8192 if large else 2048
        batched = max(batched, context) if settings.chunked is False else batched
        batched = min(batched, seqs * context)
    return min(seqs, batched) if settings.seqs is None else seqs, batched


def _keeps_latent(facts: Facts, rules: VllmRules) -> bool:
    """Whether latent attention keeps the latent: at first only unquantized and fp8 checkpoints did."""
    if facts.shape.latent is None or not rules.has("latent cache"):
        return False
    quantization = facts.quantization
    return rules.has("latent cache always") or quantization.method is None or quantization.linear.bits == 8


def _kv_dtype(settings: VllmSettings, facts: Facts, rules: VllmRules) -> str:
    if settings.kv_dtype != "auto":
        return settings.kv_dtype
    sparse = facts.shape.latent is not None and facts.shape.indexer is not None
    if facts.shape.compressed is not None or (sparse and rules.release == "0.11.0"):
        return "fp8"
    return "fp8" if facts.cache_fp8 and rules.has("checkpoint cache") else "auto"


def _block(facts: Facts, rules: VllmRules, latent: bool) -> int:
    """Tokens in a block: 16, or what the attention of latent models has kernels for (platforms/cuda.py)."""
    new, ten = rules.has("utilization 0.92"), facts.box.sm in ("100", "103")
    if latent and facts.shape.indexer is not None:
        return 32 if new and ten else 64
    if latent and ten:
        return 32 if new else 64
    return 64 if latent and facts.box.sm == "90" and rules.has("v1") and not new else 16


def partition(layers: int, stages: int, rules: VllmRules) -> tuple[int, ...]:
    """Layers of each stage: what is left over goes to the last but one and those before; long ago to the last."""
    base, left = divmod(layers, stages)
    parts = [base] * stages
    if not rules.has("balanced stages"):
        parts[-1] += left
    elif left:
        for back in range(2, left + 2):
            parts[-back] += 1
    return tuple(parts)


def sharding_of(facts: Facts, settings: VllmSettings, resolved: Resolved, rules: VllmRules) -> Sharding:
    """Over how many ranks each part of the weights is split: experts over tp x dp, everything else over tp."""
    layout = resolved.layout
    tp = layout.tp
    whole = settings.expert_parallel and tp > 1 and layout.dp > 1 and settings.a2a in _SEQUENCE
    return Sharding(
        attention=tp,
        expert_parallel=layout.ep,
        expert_tensor=resolved.expert_tensor,
        dense=tp,
        shared=1 if whole and rules.has("sequence parallel experts") else tp,
        embedding=tp,
        head=tp,
        vision=tp,
        partition=partition(len(facts.shape.layers), layout.pp, rules),
        absorbed=resolved.latent,
        rotary_element=2,
        redundant_experts=settings.redundant,
        every_indexer=not rules.has("shared indexers"),
        expert_pad={"mxfp4": _mxfp4_pad(facts.box.sm, rules)},
    )


def _mxfp4_pad(sm: str | None, rules: VllmRules) -> tuple[int, int]:
    """What rows and columns of mxfp4 experts are rounded up to: by the kernels of the card (quantization/mxfp4.py)."""
    if sm is None or sm in ("100", "103"):
        return (256, 256)
    return (64, 1) if sm == "90" and rules.has("triton mxfp4") else (128, 256)


def rejections(
    facts: Facts, settings: VllmSettings, resolved: Resolved, rules: VllmRules, before: float
) -> Iterator[Rejection]:
    """What the engine refuses, in the order in which it is met."""
    layout, shape, tp = resolved.layout, facts.shape, resolved.layout.tp
    config, parallel = "vllm/config (ModelConfig)", "vllm/config (ParallelConfig)"
    longest = derived_context(facts)
    sparse = shape.latent is not None and shape.indexer is not None
    if (sparse and not rules.has("sparse latent")) or (shape.compressed is not None and not rules.has("compressed")):
        text = "Model architectures are not supported for now: this release has no attention of this kind"
        yield Rejection(text, "args", "vllm/model_executor/models/registry.py")
    if resolved.context > longest and not settings.overrides:
        text = f"User-specified max_model_len ({resolved.context}) is greater than the derived max_model_len"
        yield Rejection(f"{text} (max_position_embeddings={longest})", "args", config)
    if settings.chunked is False and settings.batched is not None and settings.batched < resolved.context:
        text = f"max_num_batched_tokens ({settings.batched}) is smaller than max_model_len ({resolved.context})"
        yield Rejection(text, "args", "vllm/config (SchedulerConfig)")
    if shape.heads % tp:
        text = f"Total number of attention heads ({shape.heads}) must be divisible by tensor parallel size ({tp})"
        yield Rejection(text, "args", config)
    if settings.expert_parallel and not shape.experts:
        text = "Number of experts in the model must be greater than 0 when expert parallelism is enabled"
        yield Rejection(text, "args", config)
    if tp % settings.dcp:
        yield Rejection(f"tp_size={tp} must be divisible by dcp_size={settings.dcp}", "args", parallel)
    elif settings.dcp > 1 and not resolved.latent and tp <= shape.full.keys:
        text = f"tensor parallel size {tp} must be greater than total num kv heads {shape.full.keys} when enable "
        yield Rejection(f"{text}decode context parallel for GQA/MQA", "args", config)
    if layout.gpus > facts.box.count:
        text = f"World size ({layout.gpus}) is larger than the number of available GPUs ({facts.box.count})"
        yield Rejection(f"{text} in this node", "args", parallel)
    requested = facts.box.torch_gib * resolved.utilization
    if requested > before and rules.has("asks for free") and settings.kv_bytes is None:
        text = (
            f"Free memory on device ({before:.2f}/{facts.box.torch_gib:.2f} GiB) on startup is less than "
            f"desired GPU memory utilization ({resolved.utilization:g}, {requested:.2f} GiB)"
        )
        yield Rejection(text, "init", "vllm/v1/worker")
    yield from _uneven(facts, resolved)


def _uneven(facts: Facts, resolved: Resolved) -> Iterator[Rejection]:
    """Sizes that do not divide while the model is built."""
    shape, tp = facts.shape, resolved.layout.tp
    if shape.heads % tp:
        return
    kv = shape.full.keys
    if shape.latent is None and shape.compressed is None and (kv % tp if kv >= tp else tp % kv):
        yield Rejection(f"{kv} KV heads do not split over TP{tp} (AssertionError)", "weights", "vllm/model_executor")
    if any(layer.dense for layer in shape.layers) and shape.inner % tp:
        yield Rejection(f"{shape.inner} is not divisible by {tp}", "weights", "vllm/distributed/utils.py")
    over = resolved.expert_tensor
    if not shape.experts or over == 1:
        return
    if shape.expert_inner % over:
        yield Rejection(f"{shape.expert_inner} is not divisible by {over}", "weights", "vllm/distributed/utils.py")
        return
    block = facts.quantization.block
    part = shape.expert_inner // over
    if block is not None and facts.quantization.expert.bits == 8 and part % block[0]:
        text = (
            f"The output_size of gate's and up's weight = {part} is not divisible by weight quantization "
            f"block_n = {block[0]}."
        )
        yield Rejection(text, "weights", "vllm/model_executor/layers/quantization/fp8.py")
