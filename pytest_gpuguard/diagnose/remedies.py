"""What would cure a boot that ran out of memory, computed from its own numbers; all sizes in GiB.

It must never advise what the numbers contradict: where a window is empty it says so, and where a number is missing it
says less.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from ..claims.observation import LogReading, MemoryTable
from ..claims.resolved import Resolved

#: Just above the least fraction the pool is a few MiB, which serves nobody: a window begins this much higher.
_STEP: Final = 0.002
#: Free memory that a process needs beside the weights to get anywhere at all (its CUDA context is not in this).
_HARDLY_GIB: Final = 1.0
#: More missing before the weights than this share of the card, and than this, is somebody else's.
_FOREIGN_SHARE: Final = 0.1
_FOREIGN_GIB: Final = 4.0
#: A bar that has come less far says little about the whole.
_TELLING: Final = 0.1

_SIZE: Final = r"(\d{1,9}(?:\.\d{1,6})?) (KiB|MiB|GiB)"
_TRIED: Final = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL: Final = re.compile(rf"total capac\w{{0,3}}ty of {_SIZE}|{_SIZE} total capacity")
_FREE: Final = re.compile(rf"of which {_SIZE} is free|{_SIZE} free")
_UNIT: Final = {"KiB": 1 / (1 << 20), "MiB": 1 / 1024, "GiB": 1.0}
_NEEDED: Final = re.compile(
    r"\((\d{1,6}(?:\.\d{1,6})?) ?Gi?B KV cache is needed"
    r".{0,80}available KV cache memory \((-?\d{1,6}(?:\.\d{1,6})?) ?G"
)
_LENGTH: Final = re.compile(
    r"estimated maximum model length is (\d{1,9})|tokens that can be stored in KV cache \((\d{1,9})\)"
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What torch says of a refused allocation, in GiB: what was asked, what was free, what the card has."""

    tried_gib: float | None = None
    free_gib: float | None = None
    total_gib: float | None = None

    @property
    def short_gib(self) -> float | None:
        """At least so much was missing."""
        if self.tried_gib is None or self.free_gib is None or self.tried_gib <= self.free_gib:
            return None
        return self.tried_gib - self.free_gib


def allocation(text: str) -> Allocation:
    """The numbers in torch's report of a full GPU, old or new spelling; empty when the text is none."""
    return Allocation(_size(_TRIED, text), _size(_FREE, text), _size(_TOTAL, text))


@dataclass(frozen=True, slots=True)
class Setup:
    """What the arithmetic needs beside the memory table. ``leased``: GPUs that the boot could have used.

    ``loaded`` is the share of the checkpoint that was loaded when the boot ended, 0 to 1. ``graph_flag`` is how the
    release spells the largest captured batch size.
    """

    engine: str | None = None
    tp: int | None = None
    pp: int = 1
    ep: int = 1
    chunked_prefill_size: int | None = None
    cuda_graph_max_bs: int | None = None
    graph_flag: str = "--cuda-graph-max-bs"
    leased: int = 0
    loaded: float | None = None

    @property
    def gpus(self) -> int | None:
        """GPUs that hold one copy of the model."""
        return self.tp * self.pp if self.tp is not None else None


def setup_of(resolved: Resolved, reading: LogReading, leased: int = 0) -> Setup:
    """The setup of a boot, from what is known to have run, or at least was asked."""

    def number(name: str) -> int | None:
        found = resolved.setting(name)
        text = found.runs if found.runs is not None else found.asked
        return int(text) if text is not None and text.isdecimal() else None

    ranks = [int(match[1]) for name, _ in reading.ranks if (match := re.search(r"\bTP(\d{1,4})", name))]
    keys = dict(reading.evidence.dump)
    new_names = any(key in keys for key in ("cuda_graph_config", "cuda_graph_max_bs_decode"))
    return Setup(
        engine=reading.engine,
        tp=number("tp_size") or (max(ranks) + 1 if ranks else None),
        pp=number("pp_size") or 1,
        ep=number("ep_size") or 1,
        chunked_prefill_size=number("chunked_prefill_size"),
        cuda_graph_max_bs=number("cuda_graph_max_bs"),
        graph_flag="--cuda-graph-max-bs-decode" if new_names else "--cuda-graph-max-bs",
        leased=leased,
        loaded=reading.loaded,
    )


def remedies(reading: LogReading, setup: Setup) -> tuple[str, ...]:
    """What would cure this boot, the best first; empty where the numbers say nothing."""
    text = reading.decisive.text if reading.decisive is not None else ""
    known = allocation(text)
    outcome = reading.outcome
    found: list[str] = []
    if outcome == "oom.weights":
        found = _weights(reading.memory, known, setup)
    elif outcome == "oom.kv_pool":
        found = _vllm_pool(reading, text, known) if reading.engine == "vllm" else _pool(reading.memory, setup)
    elif outcome in ("oom.graph_capture", "oom.runtime"):
        found = _later(reading, text, known, setup)
    elif outcome == "ready" and reading.clipped is not None:
        found = _clipped(reading.memory, reading.clipped, setup)
    if reading.cure is not None:
        found.append(reading.cure)
    return tuple(found)


# ---------------------------------------------------------------------------------------------------------- the slack


def own_reserve_gib(chunk: int, graph_bs: int, gpus: int) -> float:
    """What SGLang itself keeps free for graphs and activations, in GiB.

    512 MiB + 1.5 MiB a token of a prefill chunk + 2 MiB a captured request + 1 GiB a group of eight GPUs
    (sglang/srt/server_args.py, 0.5.3 and later).
    """
    return (512 + max(chunk, 2048) * 1.5 + graph_bs * 2 + gpus / 8 * 1024) / 1024


def _defaults(card_gib: float, tp: int) -> tuple[int, int]:
    """SGLang's default chunk and largest captured batch size for a card (0.5.3 to 0.5.20)."""
    rows: tuple[tuple[float, int, int, int], ...] = (
        (20, 2048, 8, 8),
        (35, 2048, 24, 80),
        (60, 4096, 32, 160),
        (160, 8192, 256, 512),
        (math.inf, 16384, 512, 512),
    )
    _, chunk, few, many = next(row for row in rows if card_gib < row[0])
    return chunk, few if tp < 4 else many


def _range(window: _Window) -> str:
    if window.low == window.high:
        return f"{window.low:.2f}"
    return f"between {window.low:.2f} and {window.high:.2f}"


@dataclass(frozen=True, slots=True)
class _Window:
    """Fractions that work: ``low`` gives the pool some room, ``high`` leaves ``slack`` GiB for everything else."""

    low: float
    high: float
    slack_gib: float

    @property
    def empty(self) -> bool:
        return self.low > self.high + 1e-9

    @property
    def middle(self) -> float:
        return math.floor((self.low + self.high) / 2 * 100 + 0.5) / 100


def _window(before: float, f_min: float, chunk: int, graph_bs: int, gpus: int, least: bool = False) -> _Window:
    slack = own_reserve_gib(chunk, graph_bs, gpus)
    if before > 60 and not least:
        slack = max(slack, 10.0)
    return _Window(_up(f_min + _STEP), _down(1 - slack / before), slack)


def _settings(setup: Setup, before: float) -> tuple[int, int, int]:
    chunk, graph_bs = _defaults(before, setup.tp or 1)
    return setup.chunked_prefill_size or chunk, setup.cuda_graph_max_bs or graph_bs, setup.gpus or 1


# ---------------------------------------------------------------------------------------------------------- by outcome


def _pool(memory: MemoryTable, setup: Setup) -> list[str]:
    before, f_min, fraction = memory.avail_before_gib, memory.f_min, memory.mem_fraction_static
    if f_min is None:
        return []
    if before is None:
        at_least = _up(f_min + _STEP)
        return [f"--mem-fraction-static of at least {at_least:.2f} (the least that holds the weights is {f_min:.4f})"]
    chunk, graph_bs, gpus = _settings(setup, before)
    window = _window(before, f_min, chunk, graph_bs, gpus)
    weights = f_min * before
    if not window.empty and (fraction is None or window.high > fraction):
        low = max(window.low, _up(fraction + 0.001)) if fraction is not None else window.low
        return [_between(_Window(low, window.high, window.slack_gib), memory, before, f_min)]
    least = _window(before, f_min, 2048, 8, gpus, least=True)
    if not least.empty:
        left = before * (1 - least.low)
        return [
            f"--mem-fraction-static {_range(least)}, together with a smaller "
            f"--chunked-prefill-size and {setup.graph_flag}: at {least.low:.2f} {left:.1f} GiB are left for graphs and "
            f"activations, and SGLang itself keeps {window.slack_gib:.1f} GiB at {chunk} and {graph_bs}, "
            f"{least.slack_gib:.1f} GiB at 2048 and 8",
            *_more_gpus(weights, before, setup),
        ]
    rest = before - weights
    if rest < _HARDLY_GIB:
        first = f"no fraction works: the weights take {weights:.2f} of the {before:.2f} GiB that were free"
    else:
        first = (
            f"hardly any fraction works: beside the weights ({weights:.2f} GiB) only {rest:.2f} of {before:.2f} GiB "
            f"are left, and SGLang itself keeps at least {least.slack_gib:.1f} GiB for graphs and activations"
        )
    return [first, *_more_gpus(weights, before, setup)]


def _between(window: _Window, memory: MemoryTable, before: float, f_min: float) -> str:
    middle = min(max(window.middle, window.low), window.high)
    pool = (middle - f_min) * before
    tokens = _tokens(memory, pool)
    gives = f"{tokens:,} tokens" if tokens is not None else f"a KV pool of {pool:.1f} GiB"
    which = f"between {window.low:.2f} and {window.high:.2f}: {middle:.2f} gives {gives}"
    if window.low == window.high:
        which = f"{middle:.2f}, which gives {gives}"
    return (
        f"--mem-fraction-static {which} (above, less than the {window.slack_gib:.1f} GiB that SGLang itself keeps for "
        f"graphs and activations would be left)"
    )


def _weights(memory: MemoryTable, known: Allocation, setup: Setup) -> list[str]:
    found: list[str] = []
    before, total = memory.avail_before_gib, known.total_gib
    if before is not None and total is not None:
        foreign = total - before
        if foreign > max(_FOREIGN_GIB, total * _FOREIGN_SHARE):
            found.append(
                f"only {before:.2f} of {total:.2f} GiB were free before the weights: something else holds "
                f"{foreign:.1f} GiB of this GPU"
            )
    room = before if before is not None else total
    need = None
    if setup.loaded is not None and _TELLING <= setup.loaded < 1 and room is not None and known.free_gib is not None:
        need = (room - known.free_gib) / setup.loaded
    if not found:
        found += _more_gpus(need, room, setup)
    if setup.ep > 1 and setup.tp is not None and setup.engine == "sglang":
        found.append(
            f"--ep-size {setup.ep} adds no GPU: it divides the same {setup.tp} of --tp-size, and the experts take as "
            f"much of each at any --ep-size"
        )
    return found


def _more_gpus(need: float | None, room: float | None, setup: Setup) -> list[str]:
    """More GPUs for the weights: with the number that is needed, if ``need`` (GiB per GPU at present) is known."""
    if setup.tp is None or setup.gpus is None:
        return []
    used = setup.gpus
    about = f"; the weights need about {need:.0f} GiB of each now" if need is not None else ""
    if setup.leased > used and setup.leased % used == 0:
        times = setup.leased // used
        then = f", about {need / times:.0f} GiB of each then" if need is not None else ""
        if need is None or room is None or need / times < room:
            return [f"{used} GPUs are used, {setup.leased} are leased: --tp-size {setup.tp * times}{about}{then}"]
        return [f"{used} GPUs are used, {setup.leased} are leased, and even those do not hold the weights{about}"]
    if need is None or room is None:
        return []
    enough = next((times for times in (2, 4, 8, 16) if need / times < room * 0.85), None)
    if enough is None:
        return []
    then = f"about {need / enough:.0f} GiB of each then"
    return [f"{used * enough} GPUs would hold the weights: --tp-size {setup.tp * enough} ({then}){about}"]


def _later(reading: LogReading, text: str, known: Allocation, setup: Setup) -> list[str]:
    """Memory ran out after the pool was there: in graph capture, warm-up or serving."""
    memory, short = reading.memory, known.short_gib
    what = "graph capture" if reading.outcome == "oom.graph_capture" else "the forward pass"
    missing = f"{what} was short by {'at least ' if short is not None else ''}{_gib(short)}" if short else ""
    if reading.signature == "sglang.batch_oom":
        return _full_pool(memory, setup)
    if reading.engine == "vllm":
        return _vllm_later(reading, missing)
    found: list[str] = []
    before, fraction = memory.avail_before_gib, memory.mem_fraction_static
    if reading.outcome == "oom.graph_capture" and setup.cuda_graph_max_bs is not None and setup.cuda_graph_max_bs > 1:
        smaller = 1 << ((setup.cuda_graph_max_bs - 1).bit_length() - 1)
        found.append(f"{setup.graph_flag} {smaller}")
    elif reading.outcome == "oom.graph_capture":
        found.append(f"a smaller {setup.graph_flag}")
    elif setup.chunked_prefill_size is not None and setup.chunked_prefill_size > 2048:
        found.append(f"--chunked-prefill-size {setup.chunked_prefill_size // 2}")
    if before is not None and fraction is not None and short is not None:
        high, low = _down(fraction - short / before), _up((memory.f_min or 0.0) + _STEP)
        if memory.f_min is not None and low > high:
            found.append(f"a lower --mem-fraction-static does not help: below {low:.2f} there is no KV pool")
        elif memory.f_min is not None:
            tokens = _tokens(memory, (high - memory.f_min) * before)
            gives = f" ({high:.2f} gives {tokens:,} tokens)" if tokens is not None else ""
            found.append(f"--mem-fraction-static between {low:.2f} and {high:.2f}{gives}")
        elif high > 0:
            found.append(f"--mem-fraction-static of at most {high:.2f}")
    if not found:
        return [missing] if missing else []
    return [f"{missing}: {found[0]}" if missing else found[0], *(f"or {one}" for one in found[1:])]


def _full_pool(memory: MemoryTable, setup: Setup) -> list[str]:
    tokens = f" of {memory.kv_tokens:,} tokens" if memory.kv_tokens is not None else ""
    found = [f"the KV pool{tokens} was full: a smaller --max-running-requests"]
    before, f_min, fraction = memory.avail_before_gib, memory.f_min, memory.mem_fraction_static
    if before is not None and f_min is not None and fraction is not None:
        window = _window(before, f_min, *_settings(setup, before))
        if window.high > fraction + 0.005:
            more = _tokens(memory, (window.high - f_min) * before)
            gives = f", which gives {more:,} tokens" if more is not None else ""
            found.append(f"or --mem-fraction-static up to {window.high:.2f}{gives}")
    return found


def _clipped(memory: MemoryTable, clipped: tuple[int, int], setup: Setup) -> list[str]:
    asked, granted = clipped
    before, f_min = memory.avail_before_gib, memory.f_min
    cell = _cell(memory)
    if before is None or f_min is None or cell is None or asked <= granted:
        return []
    needed = _up(f_min + asked * cell / before)
    window = _window(before, f_min, *_settings(setup, before))
    if needed <= window.high + 1e-9:
        return [f"{asked:,} tokens were asked, {granted:,} granted: --mem-fraction-static {needed:.2f} holds them"]
    return [
        f"{asked:,} tokens were asked, {granted:,} granted; they would need --mem-fraction-static {needed:.2f}, which "
        f"leaves less than the {window.slack_gib:.1f} GiB that SGLang itself keeps for graphs and activations"
    ]


def _vllm_pool(reading: LogReading, text: str, known: Allocation) -> list[str]:
    found: list[str] = []
    match = _LENGTH.search(text)
    if match is not None and int(match[1] or match[2]) > 0:
        found.append(f"--max-model-len {match[1] or match[2]} or less")
    needed = _NEEDED.search(text)
    available = reading.memory.kv_gib
    short = float(needed[1]) - float(needed[2]) if needed is not None else None
    if short is None and available is not None and available < 0:
        short = -available
    if short is not None and short > 0:
        found.append(_utilization(reading.memory, short))
    return [found[0], *(f"or {one}" for one in found[1:])] if found else []


def _utilization(memory: MemoryTable, more_gib: float) -> str:
    """What ``--gpu-memory-utilization`` would have to be for so much more KV cache."""
    current, total = memory.gpu_memory_utilization, memory.total_gib
    if current is None or total is None:
        return f"a higher --gpu-memory-utilization: {_gib(more_gib)} are missing"
    least = _up(current + more_gib / total)
    if least >= 0.99:
        return f"no --gpu-memory-utilization helps: {_gib(more_gib)} more than at {current:.2f} exceeds the card"
    return f"--gpu-memory-utilization of at least {least:.2f} ({_gib(more_gib)} are missing at {current:.2f})"


def _vllm_later(reading: LogReading, missing: str) -> list[str]:
    cures = ["a lower --gpu-memory-utilization"]
    if reading.outcome == "oom.graph_capture":
        cures = ["a smaller --max-num-seqs or fewer --cuda-graph-sizes", "a lower --gpu-memory-utilization"]
    return [f"{missing}: {cures[0]}" if missing else cures[0], *(f"or {one}" for one in cures[1:])]


# ---------------------------------------------------------------------------------------------------------- arithmetic


def _cell(memory: MemoryTable) -> float | None:
    """GiB of KV cache a token takes, of one rank."""
    if not memory.kv_gib or not memory.kv_tokens or memory.kv_gib <= 0:
        return None
    return memory.kv_gib / memory.kv_tokens


def _tokens(memory: MemoryTable, pool_gib: float) -> int | None:
    cell = _cell(memory)
    return int(pool_gib / cell) if cell is not None and pool_gib > 0 else None


def _size(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = (part for part in match.groups() if part is not None)
    return float(number) * _UNIT[unit]


def _gib(size: float | None) -> str:
    assert size is not None
    return f"{size * 1024:.0f} MiB" if size < 0.1 else f"{size:.1f} GiB"


def _up(fraction: float) -> float:
    return math.ceil(fraction * 100 - 1e-6) / 100


def _down(fraction: float) -> float:
    return math.floor(fraction * 100 + 1e-6) / 100
