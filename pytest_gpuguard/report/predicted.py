"""A prediction for people: the verdict, why, and the numbers with their error bars; and a search as a table.

It shows what was computed and computes nothing; every size is GiB and says so.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from ..predict.search import Found, Ranked
from ..predict.values import Box, Prediction

Lines = Iterator[tuple[str, str]]

#: Rows of a search that are shown; programs get all of them.
_ROWS: Final = 24
_NUMBERS: Final[tuple[tuple[str, str, str], ...]] = (
    ("free before the weights", "avail_before_gib", "GiB"),
    ("weights", "weights_gib", "GiB"),
    ("left after the weights", "avail_after_weights_gib", "GiB"),
    ("held back", "reserved_gib", "GiB"),
    ("for the KV pool", "rest_gib", "GiB"),
    ("KV pool", "kv_gib", "GiB"),
    ("state of linear attention", "state_gib", "GiB"),
    ("cache of a token", "kv_cell_bytes", "bytes"),
    ("KV tokens", "kv_tokens", "tokens"),
    ("table of requests", "req_to_token_gib", "GiB"),
    ("graphs", "graph_gib", "GiB"),
    ("margin (free when ready)", "margin_gib", "GiB"),
    ("mem-fraction-static", "mem_fraction_static", ""),
    ("least fraction", "f_min", ""),
    ("largest fraction by its own rule", "f_max", ""),
)
_UTILIZATION: Final = "gpu-memory-utilization"
#: What is left out where it is 0: not every model and boot has it.
_SOMETIMES: Final = frozenset({"state_gib", "req_to_token_gib", "graph_gib"})


def prediction_lines(one: Prediction, box: Box, width: int = 100) -> Lines:
    """Lines with their colour; the first says it all. ``width`` is for running text, in characters."""
    yield f"{one.verdict}: {_headline(one)}", "green" if one.fits else "red"
    yield f"  {_stack(one)} on {_rig(box)}", "dim"
    yield from ((f"  {line}", "") for line in textwrap.wrap(one.explanation, width - 2, break_on_hyphens=False))
    yield from _table(one)
    if len(one.stages_gib) > 1:
        yield from _wrapped("weights of the stages (GiB)", ", ".join(f"{part:.2f}" for part in one.stages_gib), width)
    parts = sorted(one.parts_gib.items(), key=lambda part: -part[1])
    if parts:
        text = ", ".join(f"{name} {size:.2f}" for name, size in parts if size >= 0.005)
        yield from _wrapped("parts of the weights (GiB)", text, width)
    for note in one.assumptions:
        yield from _wrapped("assumed", note, width, "yellow")
    for rejection in one.rejections:
        source = f" ({rejection.source})" if rejection.source else ""
        yield from _wrapped("refused", f"phase {rejection.phase}: {rejection.text}{source}", width, "yellow")


def search_lines(found: Found, engine: str, box: Box, width: int = 100) -> Lines:
    """The layouts that fit as a table, and why the others do not."""
    tried = len(found.layouts) + len(found.refused)
    count = len(found.layouts)
    headline = f"{count} of {tried} layouts fit"
    if found.layouts:
        best = found.layouts[0]
        headline += f"; the most KV tokens: {best.prediction.layout}, {best.box_tokens:,}"
    yield headline, "green" if count else "red"
    yield f"  {engine} on {_rig(box)}", "dim"
    if found.layouts:
        yield from _ranking(found.layouts)
        yield from ((f"  {line}", "dim") for line in textwrap.wrap(_LEGEND, width - 2, break_on_hyphens=False))
        for note in dict.fromkeys(note for one in found.layouts for note in one.prediction.assumptions):
            yield from _wrapped("assumed", note, width, "yellow")
    if found.refused:
        yield f"{len(found.refused)} cannot boot:", ""
    for verdict, reason, names in found.reasons():
        yield from _wrapped(f"{len(names):>3} {verdict}", f"{reason} ({', '.join(names)})", width)


_LEGEND: Final = (
    "Weights and rest are GiB on the fullest rank. Under dp-attention (DPn) each of n replicas has its own KV pool: "
    "box tokens = n x those of one replica, and one request can be no longer than one replica holds. "
    "* uses fewer GPUs than there are. ? is closer than the error of these numbers: only a boot tells."
)


def _ranking(layouts: Sequence[Ranked]) -> Lines:
    shown = layouts[:_ROWS]
    name = max(len("layout"), *(len(str(one.prediction.layout)) for one in shown))
    columns = f"{'GPUs':>5}  {'weights':>8}  {'rest':>7}  {'KV tokens of the box':>20}  {'a replica':>12}  verdict"
    yield f"  {'layout':<{name}}  {columns}", "bold"
    for one in shown:
        held = one.prediction
        replica = f"{one.replicas} x {one.kv_tokens:,}" if one.replicas > 1 else ""
        sizes = f"{held.weights_gib or 0:>8.2f}  {held.rest_gib or 0:>7.2f}  {one.box_tokens:>20,}  {replica:>12}"
        gpus = f"{held.gpus_used}{' ' if one.whole else '*'}"
        yield f"  {held.layout!s:<{name}}  {gpus:>5}  {sizes}  {held.verdict}{'?' if one.close else ''}", ""
    if len(layouts) > _ROWS:
        yield f"  and {len(layouts) - _ROWS} more (--json has them all)", "dim"


def _headline(one: Prediction) -> str:
    gpus = f"{one.layout} on {one.gpus_used} GPU{'s' if one.gpus_used != 1 else ''}"
    if not one.fits:
        return f"{gpus}, in phase {one.phase}"
    return f"{gpus}, {one.kv_tokens or 0:,} KV tokens"


def _stack(one: Prediction) -> str:
    version = one.version or one.rules
    rules = f", by the rules of {one.rules}" if one.version is not None and one.rules != one.version else ""
    return f"{one.engine} {version}{rules}"


def _rig(box: Box) -> str:
    return f"{box.count}x {box.name}"


def _table(one: Prediction) -> Lines:
    rows = []
    for name, key, unit in _NUMBERS:
        value = getattr(one, key)
        if value is None or (key in _SOMETIMES and not value) or (one.verdict == "rejected" and key == "kv_tokens"):
            continue
        around = one.bars.get(key)
        called = _UTILIZATION if one.engine == "vllm" and key == "mem_fraction_static" else name
        rows.append((called, _number(value, unit), _number(around, unit) if around else "", unit))
    if not rows:
        return
    first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
    title = f"{'per GPU of the fullest rank':<{first + 2}}"
    yield f"  {title}  {'':>{second}}  {'±' if third else '':>{third}}".rstrip(), "bold"
    for name, number, bar, unit in rows:
        yield f"    {name:<{first}}  {number:>{second}}  {bar:>{third}}  {unit}".rstrip(), ""


def _number(value: float, unit: str) -> str:
    if unit in ("tokens", "bytes"):
        return f"{value:,.0f}"
    return f"{value:.2f}" if unit else f"{value:.12g}"


def _wrapped(title: str, text: str, width: int, colour: str = "") -> Lines:
    lines = textwrap.wrap(f"{title}: {text}", width - 2, subsequent_indent="    ", break_on_hyphens=False)
    yield from ((f"  {line}", colour) for line in lines)
