"""What SGLang refuses, in its own words and in the order in which it meets it.

Pure. Divisibility, the limits of expert kernels, GPUs that are not there; hardware gates are not memory and not here.
"""

from __future__ import annotations

from collections.abc import Iterator

from .quant import Quantization
from .rules import Rules
from .settings import Settings
from .sglang import Resolved
from .shape import Shape
from .values import Box, Rejection


def rejections(
    resolved: Resolved, settings: Settings, shape: Shape, quantization: Quantization, box: Box, rules: Rules
) -> Iterator[Rejection]:
    """What the engine refuses, in the order in which it is met."""
    layout, ep, tp = resolved.layout, resolved.ep, resolved.layout.tp
    args = "sglang/srt/server_args.py"
    if tp % ep:
        yield Rejection(f"tp_size {tp} must be divisible by ep_size {ep}", "args", args)
        return
    if resolved.dp_attention and tp % layout.dp:
        yield Rejection(f"tp_size {tp} must be divisible by dp_size {layout.dp}", "args", args)
        return
    yield from _all_to_all(resolved, settings, rules)
    if settings.runner == "flashinfer_cutlass" and ep not in (1, tp) and rules.since("0.5.3"):
        text = "The expert parallel size must be 1 or the same as the tensor parallel size"
        yield Rejection(text, "args", f"{args} _handle_moe_kernel_config")
    if settings.runner == "cutlass" and ep > 1 and quantization.block and rules.since("0.5.3"):
        yield Rejection("FP8 Cutlass MoE is only supported with ep_size == 1", "args", args)
    if layout.gpus > box.count:
        text = f"{layout} needs {layout.gpus} GPUs and the rig has {box.count}: CUDA error: invalid device ordinal"
        yield Rejection(text, "init", "torch.cuda.set_device")
    if layout.pp > len(shape.layers):
        yield Rejection(f"{layout.pp} stages for {len(shape.layers)} layers", "init")
    attention = resolved.attention_tp
    if shape.heads % attention:
        yield Rejection(f"{shape.heads} attention heads are not divisible by attention TP{attention}", "weights")
    elif shape.latent is None and shape.compressed is None and _uneven(shape.full.keys, attention):
        yield Rejection(f"{shape.full.keys} KV heads do not split over attention TP{attention}", "weights")
    if not shape.experts:
        if ep > 1:
            yield Rejection(f"EP{ep} for a model without experts", "weights")
        if shape.inner % tp:
            yield Rejection(f"intermediate size {shape.inner} is not divisible by TP{tp}", "weights")
        return
    if (shape.experts + settings.redundant) % ep:
        yield Rejection(f"{shape.experts} experts are not divisible by EP{ep}", "weights", "fused_moe_triton/layer.py")
    yield from _expert_blocks(shape, quantization, tp // ep)


def _all_to_all(resolved: Resolved, settings: Settings, rules: Rules) -> Iterator[Rejection]:
    backend = rules.all_to_all.get(settings.a2a or "")
    if backend is None:
        return
    if not backend.known:
        text = f"argument --moe-a2a-backend: invalid choice: '{backend.name}' (sglang knows it since {backend.since})"
        yield Rejection(text, "args", "sglang/srt/server_args.py")
        return
    if backend.replicas and resolved.attention_tp > 1:
        text = (
            f"{backend.name.capitalize()} MoE A2A is only supported with dp_size == tp_size and --enable-dp-attention"
        )
        yield Rejection(text, "args", "sglang/srt/server_args.py; arg_groups/moe_hook.py")
    if backend.runners and settings.runner not in backend.runners:
        text = (
            f"MoE A2A backend {backend.name} is only supported with {' or '.join(backend.runners)} moe runner backend"
        )
        yield Rejection(text, "args", "sglang/srt/server_args.py _handle_a2a_moe")


def _uneven(heads: int, over: int) -> bool:
    return bool(heads % over if heads >= over else over % heads)


def _expert_blocks(shape: Shape, quantization: Quantization, over: int) -> Iterator[Rejection]:
    if shape.expert_inner % over:
        text = f"moe_intermediate_size {shape.expert_inner} must be divisible by moe_tp_size ({over})"
        yield Rejection(text, "args" if quantization.block else "weights", "server_args.py; fused_moe_triton/layer.py")
        return
    if quantization.block is None or quantization.expert.bits != 8:
        return
    part, rows = shape.expert_inner // over, quantization.block[0]
    if part % rows:
        text = (
            f"The output_size of gate's and up's weight = {part} is not divisible by weight quantization "
            f"block_n = {rows}."
        )
        yield Rejection(text, "weights", "sglang/srt/layers/quantization/fp8.py")
