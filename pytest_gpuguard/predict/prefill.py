"""Whether SGLang captures prefill in graphs, and for how many sizes: its default reserve depends on both.

Pure; the conditions are each release's own (server_args.py; arg_groups/cuda_graph_hook.py since 0.5.19).
"""

from __future__ import annotations

from typing import Final

from .rules import Rules
from .settings import Settings
from .shape import Shape
from .values import Box

#: Sizes that are captured, up to 512 tokens; above, the steps are in ``captured``.
_CAPTURED: Final = (
    range(4, 33, 4),
    range(48, 257, 16),
    range(288, 513, 32),
)
#: All-to-all backends under which prefill is captured since 0.5.17.
_CAPTURED_A2A: Final = ("deepep", "megamoe", "flashinfer")
#: DeepEP's sizes are rounded up to 8 before the chunk is known: those up to 2048 tokens, four of which fall together.
_DEEPEP_TOKENS: Final = 2048
_DEEPEP_FEWER: Final = 4


def prefill_graphs(settings: Settings, shape: Shape, dp_attention: bool, box: Box, rules: Rules) -> bool:
    """Whether the reserve counts prefill graphs: when asked for in older releases, by default in newer ones."""
    if rules.fraction.get("prefill", "none") == "none" and "mla" not in rules.fraction:
        return False
    if rules.fraction.get("opt_in"):
        return settings.prefill_opted_in and settings.prefill_graphs is not False
    if rules.fraction.get("roles") and settings.role == "decode":
        return False
    if settings.prefill_graphs is not None:
        return settings.prefill_graphs
    if box.amd or shape.compressed is not None or (settings.graphs_off and rules.since("0.5.14")):
        return False
    compiled_tower = shape.multimodal and shape.latent is not None and rules.since("0.5.16")
    if not rules.since("0.5.15") or (compiled_tower and not rules.since("0.5.18")):
        return _compiled(settings, shape, dp_attention, rules)
    return _in_segments(settings, shape, dp_attention, rules)


def runs_prefill_graphs(settings: Settings, reserved: bool, rules: Rules) -> bool:
    """Whether they are captured in the end: some expert kernels end it after the reserve was made."""
    return reserved and not (settings.runner in ("flashinfer_trtllm", "flashinfer_mxfp4") and not rules.since("0.5.14"))


def _compiled(settings: Settings, shape: Shape, dp_attention: bool, rules: Rules) -> bool:
    """Compiled prefill graphs (0.5.10 to 0.5.14, and a tower on latent attention until 0.5.17)."""
    sparse = shape.indexer is not None and shape.latent is not None
    return not (
        dp_attention
        or settings.layout.pp > 1
        or settings.a2a is not None
        or (shape.multimodal and not rules.since("0.5.16"))
        or (sparse and not rules.since("0.5.14"))
        or (settings.spec is not None and not rules.since("0.5.11"))
        or settings.symmetric
        or settings.role is not None
    )


def _in_segments(settings: Settings, shape: Shape, dp_attention: bool, rules: Rules) -> bool:
    """Prefill graphs in segments (since 0.5.15).

    Towers are a list of model classes there. By structure: those on latent or on linear attention are on it.
    """
    latent, linear = shape.latent is not None, shape.linear is not None
    a2a_refused = settings.a2a not in _CAPTURED_A2A if rules.since("0.5.17") else True
    return not (
        (settings.layout.pp > 1 and rules.since("0.5.19"))
        or (latent and not rules.since("0.5.17" if shape.indexer is not None else "0.5.18"))
        or (dp_attention and not rules.since("0.5.17"))
        or (settings.a2a is not None and a2a_refused)
        or (settings.role is not None and not rules.since("0.5.16"))
        or (shape.multimodal and not ((latent or linear) and rules.since("0.5.16")))
        or (shape.linear is not None and shape.linear.low_rank_gate and rules.since("0.5.20"))
    )


def counted(settings: Settings, shape: Shape, rules: Rules, chunk: int) -> int:
    """The most tokens that are captured at once: as asked for, else the chunk (none where prefill is not chunked)."""
    if settings.prefill_graph_tokens is not None:
        return settings.prefill_graph_tokens
    most = max(chunk, 0)
    if not rules.since("0.5.7"):
        most = 4096
    elif shape.latent is not None and rules.since("0.5.8"):
        most = 2048
    return min(most, settings.max_tokens) if settings.max_tokens and rules.since("0.5.10") else most


def captured(settings: Settings, rules: Rules, most: int) -> int:
    """How many sizes are captured up to ``most`` tokens."""
    aligned = settings.a2a == "deepep" and rules.since("0.5.17")
    if aligned:
        most = settings.prefill_graph_tokens or _DEEPEP_TOKENS
    sizes = [*_CAPTURED, range(576, 1025, 64), range(1280, 4097, 256), range(4608, most + 1, 512)]
    return sum(size <= most for each in sizes for size in each) - (_DEEPEP_FEWER if aligned else 0)
