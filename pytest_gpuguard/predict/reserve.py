"""What SGLang keeps free by default, and the fraction that follows from it, as each release computes them.

Pure; MiB as SGLang counts them. Sources: the [[fraction]] entries of ``facts/sglang_versions.toml``.
"""

from __future__ import annotations

from .prefill import captured, counted
from .rules import Rules
from .settings import Settings
from .shape import Shape
from .values import Box


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
    decodes = not (rule.get("roles") and settings.role == "prefill")
    captures = decodes and not (rule.get("graphs_off") and settings.decode_graphs_off)
    reserve += graph_bs * 2 if captures else 0
    reserve += parallel / 8 * 1024
    if dp_attention and decodes:
        reserve += graph_bs * layout.dp * (4.5 if graph_bs > 300 else 3)
    late = 0.0
    if prefill:
        most = counted(settings, shape, rules, chunk)
        how = rule.get("prefill")
        if how == "8*n":
            latent = shape.latent is not None and "mla" in rule
            reserve += rule["mla"] if latent else 8 * captured(settings, rules, most)
            reserve += rule.get("deepep_prefill", 0) if settings.a2a == "deepep" and rules.since("0.5.17") else 0
        elif how is not None:
            late = float(most // int(how.partition("/")[2]))
    if card > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    if settings.a2a == "deepep" and captures:
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
