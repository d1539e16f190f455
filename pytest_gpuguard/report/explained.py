"""A log's explanation for people and programs: plain lines into a pipe, colours and a bar on a terminal, or JSON.

It shows what was read and computes nothing; every size is GiB and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..claims.account import printable, short
from ..claims.observation import LogReading, MemoryTable
from ..claims.outcome import READY, STARTING
from ..claims.resolved import Resolved
from ..diagnose.memory import margin_gib
from ..names import REHEARSED
from .payload import labelled

if TYPE_CHECKING:
    from rich.text import Text

#: The cells of the picture of the memory: usually, and at least.
_WIDTH: Final = 60
_LEAST: Final = 10


@dataclass(frozen=True, slots=True)
class Explained:
    """One log, and all that is to be said of it. ``note`` says how sure its outcome is, where that is not plain."""

    log: str
    reading: LogReading
    resolved: Resolved
    remedies: tuple[str, ...]
    note: str | None = None


def as_json(one: Explained) -> dict[str, Any]:
    """The object of ``gpuguard explain --json``: stable keys, unknown values null, sizes in GiB."""
    reading = one.reading
    decisive = reading.decisive
    return {
        "log": one.log,
        "engine": reading.engine,
        "engine_version": reading.engine_version,
        "outcome": reading.outcome,
        "phase": reading.phase,
        "decisive": {"line": decisive.line, "text": decisive.text} if decisive is not None else None,
        "why": reading.why,
        "note": one.note,
        "signature": reading.signature,
        "memory": reading.memory.as_dict() | {"margin_gib": margin_gib(reading.memory, reading.outcome == READY)},
        "fullest_rank": reading.fullest_rank,
        "ranks": [{"rank": name, **table.as_dict()} for name, table in reading.ranks],
        "remedies": list(one.remedies),
        "resolved": one.resolved.as_dict(),
        "consequences": list(reading.consequences),
        "lines": reading.lines,
        "boots": reading.boots,
        "label": label(one),
    }


def label(one: Explained) -> str | None:
    """REHEARSED for the log of a simulated boot, else nothing."""
    return REHEARSED if one.reading.simulated else None


def plain(one: Explained) -> str:
    """The explanation as lines of text, the first of which says it all."""
    return "\n".join(printable(text) for text, _ in _lines(one))


def print_rich(one: Explained) -> None:
    """Print to the terminal, with colours and a picture of the memory table."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for text, style in _lines(one):
        if style == "bar":
            picture = _picture(one.reading.memory, min(_WIDTH, console.width - 16))
            if picture is not None:
                console.print(picture)
        console.print(Text(printable(text), style="" if style == "bar" else style), soft_wrap=True)


def _lines(one: Explained) -> Iterator[tuple[str, str]]:
    """Lines with their style; the first line of the memory table has the style ``bar``."""
    reading = one.reading
    healthy = reading.outcome in (READY, STARTING)
    colour = "bold green" if healthy else "bold red"
    yield f"{one.log}: {labelled(label(one), _headline(reading))}", colour
    if reading.decisive is not None:
        yield f"  line {reading.decisive.line}: {short(reading.decisive.text.strip(), 300)}", "bold"
    if reading.why:
        yield f"  {reading.why}", ""
    if one.note:
        yield f"  {one.note}", ""
    style = "bar"
    for text in _memory(reading):
        yield text, style
        style = ""
    for text in one.remedies:
        yield f"  cure: {text}", "cyan"
    for setting in one.resolved.differences():
        yield f"  {setting.name}: {setting}", "yellow"
    if reading.consequences:
        yield f"  after it: {short(reading.consequences[0], 160)}" + _more(len(reading.consequences) - 1), "dim"


def _headline(reading: LogReading) -> str:
    engine = " ".join(filter(None, (reading.engine, reading.engine_version))) or "engine unknown"
    lines = f"{reading.lines:,} line{'s' if reading.lines != 1 else ''}"
    if reading.boots > 1:
        engine += f", the last of {reading.boots} boots in this log"
    if reading.outcome == READY:
        return f"ready ({engine}, {lines})"
    if reading.outcome == STARTING and reading.engine is None and reading.phase == "start":
        return f"starting: no failure in it, and nothing that an engine says as it starts ({lines})"
    if reading.outcome == STARTING:
        return f"starting: healthy so far, in phase {reading.phase} ({engine}, {lines})"
    return f"{reading.outcome} in phase {reading.phase} ({engine})"


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _memory(reading: LogReading) -> Iterator[str]:
    table = reading.memory
    rows = list(_rows(table, reading.outcome == READY))
    if not rows:
        return
    ranks = len(reading.ranks)
    whose = f" of {reading.fullest_rank}, the fullest of {ranks} ranks" if reading.fullest_rank and ranks > 1 else ""
    yield f"  memory{whose}, in GiB (which engines print as GB)"
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        yield f"    {name:<{width}}  {value:>10}"


def _rows(table: MemoryTable, ready: bool) -> Iterator[tuple[str, str]]:
    last = "margin (free at the end)" if ready else "last free memory printed"
    sizes: tuple[tuple[str, float | None], ...] = (
        ("card", table.total_gib),
        ("free before the weights", table.avail_before_gib),
        ("weights", table.weights_gib),
        ("left after the weights", table.avail_after_weights_gib),
        (_held(table), table.reserved_gib),
        ("for the KV pool", table.rest_gib),
        ("KV pool", table.kv_gib),
        ("graphs", table.graph_gib),
        (last, table.free_gib),
    )
    shown = [(name, size) for name, size in sizes if size is not None]
    if not any(name not in (last, "card", _held(table)) for name, _ in shown):
        return
    for name, size in shown:
        yield name, f"{size:.2f}"
    if table.kv_tokens is not None:
        yield "KV tokens", f"{table.kv_tokens:,}"
    if table.f_min is not None:
        yield "least fraction (1 - left/free)", f"{table.f_min:.4f}"


def _held(table: MemoryTable) -> str:
    fraction = table.mem_fraction_static
    return f"held back, free*(1 - {fraction:.4g})" if fraction is not None else "held back"


def _picture(table: MemoryTable, width: int) -> Text | None:
    """A bar of what was free before the weights, in so many cells: weights, KV pool, graphs, and the rest."""
    from rich.text import Text

    whole = table.avail_before_gib
    if whole is None or not 0 < whole < math.inf or table.weights_gib is None or width < _LEAST:
        return None
    parts = [
        ("weights", table.weights_gib, "blue"),
        ("KV", table.kv_gib, "green"),
        ("graphs", table.graph_gib, "magenta"),
    ]
    bar = Text("  ")
    legend = Text("  ")
    used = 0
    for name, size, colour in parts:
        if size is None or not size > 0:
            continue
        cells = min(max(1, round(min(size / whole, 1) * width)), width - used)
        bar.append("█" * cells, colour)
        legend.append("■ ", colour)
        legend.append(f"{name}  ")
        used += cells
    held = 0
    if table.rest_gib is not None and table.rest_gib < 0 and table.reserved_gib is not None:
        held = min(width - used, round(min(table.reserved_gib / whole, 1) * width))
    bar.append("░" * (width - used - held), "dim")
    bar.append("▒" * held, "red")
    legend.append("░ free", "dim")
    if held:
        legend.append("  ▒ held back by the fraction", "red")
    bar.append(f" {whole:.1f} GiB")
    return Text("\n").join([bar, legend])
