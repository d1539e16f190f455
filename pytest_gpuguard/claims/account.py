"""How one boot is told in few lines: the line that decides, its memory, what would cure it.

Sizes are GiB, whatever the engine calls them. It decides nothing, and leaves out what nobody measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from unicodedata import category

if TYPE_CHECKING:
    from .observation import MemoryTable, Observation

#: A failed claim is told in twelve lines: its verdict, and these.
LINES: Final = 11
_CURES: Final = 3
_DIFFERENCES: Final = 2


def details(observation: Observation) -> tuple[str, ...]:
    """What a person must see to act, eleven lines at most: the line, why, memory, cures, the log and its end."""
    lines = []
    if observation.decisive is not None:
        text = short(observation.decisive.text.strip(), 300)
        lines.append(f"line {observation.decisive.line}: {text}" if observation.decisive.line else text)
    why = f"{observation.why} " if observation.why else ""
    lines.append(f"{why}(phase reached: {observation.phase})" if why else f"phase reached: {observation.phase}")
    if observation.note:
        lines.append(observation.note)
    if not observation.ready:
        lines += memory_lines(observation.memory, observation.fullest_rank)
    lines += [f"cure: {text}" for text in observation.remedies[:_CURES]]
    log = [f"log: {observation.log}"] if observation.log else []
    room = LINES - len(lines) - len(log)
    said = [line for line in observation.tail if line.strip()]
    tail = said[-room:] if room > 0 else []
    return (*lines, *log, *(f"| {short(line, 200)}" for line in tail))


def with_differences(observation: Observation, lines: tuple[str, ...]) -> tuple[str, ...]:
    """The lines, led by what runs otherwise than asked, and still not too many."""
    said = differences(observation)[:_DIFFERENCES]
    return (*said, *lines)[:LINES] if said else lines


def differences(observation: Observation) -> tuple[str, ...]:
    """What runs otherwise than asked, a line each: ``attention_backend: asked trtllm_mla, runs triton (…)``."""
    return tuple(f"{one.name}: {one}" for one in observation.resolved.differences())


def memory_lines(table: MemoryTable, rank: str | None = None) -> list[str]:
    """The memory table in one or two lines; none where nothing was measured."""
    name = f"memory of {rank}, the fullest rank" if rank else "memory"
    sizes = [
        (table.avail_before_gib, "free before the weights"),
        (table.weights_gib, "weights"),
        (table.avail_after_weights_gib, "left"),
    ]
    first = [f"{size:.2f} {what}" for size, what in sizes if size is not None]
    second = []
    if table.reserved_gib is not None and table.mem_fraction_static is not None:
        second.append(f"{table.reserved_gib:.2f} held back at --mem-fraction-static {table.mem_fraction_static:g}")
    if table.rest_gib is not None and table.rest_gib <= 0:
        second.append(f"short by {-table.rest_gib:.2f}")
        if table.f_min is not None:
            second.append(f"the least fraction is {table.f_min:.4f}")
    elif table.kv_gib is not None:
        tokens = f" ({table.kv_tokens:,} tokens)" if table.kv_tokens is not None else ""
        second.append(f"{table.kv_gib:.2f} KV pool{tokens}")
    elif table.rest_gib is not None:
        second.append(f"{table.rest_gib:.2f} for the KV pool")
    if table.graph_gib is not None:
        second.append(f"{table.graph_gib:.2f} graphs")
    if table.free_gib is not None and table.kv_gib is not None and table.kv_gib > 0:
        second.append(f"{table.free_gib:.2f} free at the end")
    lines = [f"{name} (GiB): {', '.join(first)}"] if first else []
    if second:
        lines.append(("  " if first else f"{name} (GiB): ") + ", ".join(second))
    return lines


def short(text: str, limit: int = 160) -> str:
    """Cut to ``limit`` characters, with an ellipsis; one line that does nothing to a terminal."""
    text = printable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str) -> str:
    """The text with what a terminal would act on, such as escape sequences and line ends, spelled out."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else " " if _blank(one) else repr(one)[1:-1] for one in text)


def _blank(character: str) -> bool:
    return character == "\t" or category(character) == "Zs"
