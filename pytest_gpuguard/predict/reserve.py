"""What SGLang keeps free by default, and the fraction that follows from it, as each release computes them.

Pure; MiB as SGLang counts them. Sources: the [[fraction]] entries of ``facts/sglang_versions.toml``.
"""

from __future__ import annotations

from typing import Final

from .rules import Rules
from .settings import Settings
from .shape import Shape
from .values import Box

#: Prefill sizes that are captured, up to 512 tokens; above, the steps are in ``_captured``.
_CAPTURED: Final = (
    range(4, 33, 4),
    range(48, 257, 16),
    range(288, 513, 32),
)


def prefill_graphs(settings: Settings, shape: Shape, dp_attention: bool, box: Box, rules: Rules) -> bool:
    """Whether prefill graphs are captured: asked for in older releases, by default in newer ones."""
    if rules.fraction.get("prefill", "none") == "none" and "mla" not in rules.fraction:
        return False
    if rules.fraction.get("opt_in"):
        return bool(settings.prefill_graphs)
    if settings.prefill_graphs is not None:
        return settings.prefill_graphs
    incompatible = (
        box.sm is None
        or (dp_attention and not rules.since("0.5.19"))
        or settings.layout.pp > 1
        or settings.a2a is not None
        or shape.multimodal
        or (shape.indexer is not None and shape.latent is not None and not rules.since("0.5.19"))
        or shape.compressed is not None
        or (settings.runner in ("flashinfer_trtllm", "flashinfer_mxfp4") and not rules.since("0.5.14"))
        or settings.symmetric
        or settings.role is not None
        or (settings.graphs_off and rules.since("0.5.14"))
    )
    return not incompatible


def _captured(most: int) -> int:
    """How many prefill sizes are captured up to ``most`` tokens."""
    sizes = [*_CAPTURED, range(576, 1025, 64), range(1280, 4097, 256), range(4608, most + 1, 512)]
    return sum(size <= most for each in sizes for size in each)


def reserve_mib(
    settings: Settings,
    shape: Shape,
    box: Box,
    rules: Rules,
    chunk: int,
    graph_bs: int,
    dp_attention: bool,
    prefill: bool,
) -> float:
    """MiB that SGLang keeps free by its own rule, of 0.5.3 and later; before, by the card."""
    rule, layout = rules.fraction, settings.layout
    parallel, card = layout.tp * layout.pp, box.total_mib
    if rule["rule"] == "table":
        return card * (1 - _table_fraction(parallel, card, bool(rule.get("large")), settings.spec, rules))
    if rule["rule"] == "card":
        if card < 35 * 1024:
            reserve = (2.8 + parallel / 10) * 1024
        elif card < 90 * 1024:
            reserve = (9.5 + parallel / 2) * 1024
        else:
            reserve = (12 + parallel / 2) * 1024 if card < 160 * 1024 else 32 * 1024.0
        reserve += rule["spec"] if settings.spec else 0
        return reserve + (rule["dp_attention"] if dp_attention else 0)
    tokens = chunk if chunk > 0 else settings.prefill_tokens or 16384
    if rule.get("roles") and settings.role == "decode":
        tokens = (settings.max_requests or graph_bs) * (settings.draft_tokens or 1)
    reserve = 512 + max(tokens, 2048) * 1.5
    captures = not (rule.get("graphs_off") and settings.graphs_off) and not (
        rule.get("roles") and settings.role == "prefill"
    )
    reserve += graph_bs * 2 if captures else 0
    reserve += parallel / 8 * 1024
    if dp_attention:
        reserve += graph_bs * layout.dp * (4.5 if graph_bs > 300 else 3)
    late = 0.0
    if prefill:
        most = settings.prefill_graph_tokens or max(tokens, 0)
        most = min(most, settings.max_tokens) if settings.max_tokens and rules.since("0.5.10") else most
        how = rule.get("prefill")
        if how == "8*n":
            reserve += rule["mla"] if shape.latent is not None and "mla" in rule else 8 * _captured(most)
        elif how is not None:
            late = float(most // int(how.partition("/")[2]))
    if card > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    if settings.a2a == "deepep" and settings.role != "prefill":
        reserve += rule.get("deepep", 0)
    if settings.spec == "STANDALONE":
        reserve += rule.get("standalone", 0)
    elif settings.spec is not None and settings.spec != "NGRAM":
        reserve += rule.get("spec", 0)
    return reserve + late


def _table_fraction(parallel: int, card: float, large: bool, spec: str | None, rules: Rules) -> float:
    """The fractions by ranks of 0.4.2 to 0.4.7, and what larger cards get on top since 0.4.6."""
    steps = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87))
    fraction = next((value for least, value in steps if parallel >= least), 0.88)
    if not large:
        return fraction
    if card > 81920:
        fraction = 0.88
    if rules.since("0.4.7") and card > 180_000:
        return 0.79
    if card > 96 * 1024:
        kept = 1024 * (20 if spec and rules.since("0.4.7") else 18)
        return min(fraction + 48 * 1024 * (1 - fraction) / card, (card - kept) / card)
    return fraction * (0.95 if spec and rules.since("0.4.7") else 1)


def default_fraction(settings: Settings, shape: Shape, box: Box, rules: Rules, reserve: float) -> float:
    """The fraction of the card that is left when ``reserve`` MiB are kept, and less of it for a vision tower."""
    card = box.total_mib
    fraction = (card - reserve) / card
    if rules.fraction["rule"] != "table":
        fraction = round(fraction, 3)
    if not shape.multimodal or settings.language_only or (settings.role == "decode" and rules.since("0.5.17")):
        return fraction
    how = rules.fraction["vision"]
    if how == "0.90":
        return fraction * 0.90
    if how == "vit" and shape.vision_complexity is not None:
        ratio = shape.vision_complexity / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0)))
    return fraction
