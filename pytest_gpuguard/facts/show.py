"""Rig and stacks for people: rich tables on a terminal, the same rows as plain text into a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpuguard.claims.units import GIB

from .gpu import Gpu, Rig
from .stack import Stack


@dataclass(frozen=True, slots=True)
class Sheet:
    """A titled table; without ``columns`` its rows are (label, value) pairs."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()


def sheets(rig: Rig, stacks: Sequence[Stack]) -> Iterator[Sheet]:
    """What is to be shown of a rig and its stacks, in order."""
    yield Sheet(f"rig: {rig.describe()}", [_gpu_row(gpu) for gpu in rig.gpus], _GPU_COLUMNS if rig.gpus else ())
    if rig.faults:
        rows = [row for fault in rig.faults for row in ((fault.outcome, fault.cause), ("cure", fault.cure))]
        yield Sheet("host fault", rows)
    if len(rig.gpus) > 1 and (rig.topology or rig.nvlink):
        header = ["", *(str(gpu.index) for gpu in rig.gpus)]
        yield Sheet("links", [[str(gpu.index), *_links(rig, gpu)] for gpu in rig.gpus], header)
    for stack in stacks:
        yield Sheet(f"stack {stack.name}: {stack.describe()}", list(_stack_rows(stack)))


def plain(sheet: Sheet) -> str:
    """The sheet as lines of text with aligned columns."""
    table = [list(sheet.columns), *sheet.rows] if sheet.columns else list(sheet.rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))] if table else []
    lines = [sheet.title]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"


def print_rich(shown: Sequence[Sheet]) -> None:
    """Print to the terminal, with colours as far as it has them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for sheet in shown:
        table = Table(title=Text(sheet.title), title_justify="left", show_header=bool(sheet.columns))
        for number, column in enumerate(sheet.columns or ("", "")):
            table.add_column(Text(column), overflow="fold", style="bold" if number == 0 else "")
        for row in sheet.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table if sheet.rows else Text(sheet.title))


_GPU_COLUMNS = ("#", "uuid", "bus", "SM", "memory", "used", "numa", "pcie", "nvlinks", "power", "MIG", "ECC", "fault")


def _gpu_row(gpu: Gpu) -> list[str]:
    memory = gpu.memory
    pcie = f"gen{gpu.pcie_gen} x{gpu.pcie_width}" if gpu.pcie_gen and gpu.pcie_width else "–"
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        pcie += f" of x{gpu.pcie_width_max}"
    return [
        str(gpu.index),
        gpu.uuid,
        gpu.bus_id or "–",
        gpu.sm or "–",
        _gib(memory.total) + (" unified" if gpu.unified else ""),
        _gib(memory.used),
        _text(gpu.numa),
        pcie,
        str(gpu.nvlinks),
        f"{gpu.power_limit_w:.0f} W" if gpu.power_limit_w else "–",
        _switch(gpu.mig),
        _switch(gpu.ecc),
        gpu.fault or "",
    ]


def _links(rig: Rig, gpu: Gpu) -> Iterator[str]:
    """One row of the matrix that nvidia-smi calls topo -m: NVLinks where there are any, else the PCIe level."""
    for other in rig.gpus:
        pair = gpu.uuid, other.uuid
        if pair[0] == pair[1]:
            yield "X"
        elif rig.nvlink.get(pair):
            yield f"NV{rig.nvlink[pair]}"
        else:
            yield rig.topology.get(pair, "–")


def _stack_rows(stack: Stack) -> Iterator[tuple[str, str]]:
    yield "python", stack.python
    fingerprint = stack.fingerprint()
    for label, value in fingerprint.items():
        if isinstance(value, str) and label != "python":
            yield label.replace("_", " "), value
    missing = (stack.facts.get("nvcc") or {}).get("missing")
    if missing:
        yield "nvcc", f"none: CUDA_HOME names {missing}, which is not there"
    states = fingerprint["jit_caches"]
    yield "JIT caches", ", ".join(f"{name} {state}" for name, state in states.items()) or "–"
    for name, value in fingerprint["environment"].items():
        yield name, "".join(one if one.isprintable() else repr(one)[1:-1] for one in value)
    yield "packages", f"{len(stack.packages)} distributions (all in --json)"


def _gib(value: int | None) -> str:
    return "–" if value is None else f"{value / GIB:.1f} GiB"


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _switch(value: bool | None) -> str:
    return {True: "on", False: "off", None: "–"}[value]
