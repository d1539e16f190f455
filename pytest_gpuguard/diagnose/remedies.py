"""What would cure a boot that ran out of memory, computed from its own numbers; all sizes in GiB.

It must never advise what the numbers contradict: where a window is empty it says so, and where a number is missing it
says less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..claims.observation import LogReading, MemoryTable
from . import remedies_vllm
from .allocation import Allocation, allocation, size
from .memory import possible
from .setup import Setup, setup_of
from .slack import LEAST_CHUNK, LEAST_GRAPH, STEP, Window, above, below, defaults, down, up, window
from .tokens import MOST_TOKENS, alone, cell_gib, tokens_at

__all__ = ["Setup", "remedies", "setup_of"]

#: Free memory that a process needs beside the weights to get anywhere at all (its CUDA context is not in this).
_HARDLY_GIB: Final = 1.0
#: More missing before the weights than this share of the card, and than this, is somebody else's.
_FOREIGN_SHARE: Final = 0.1
_FOREIGN_GIB: Final = 4.0
#: A bar that has come less far says little about the whole.
_TELLING: Final = 0.1
#: Weights may take so much of the room on a larger number of GPUs, to leave some for the KV pool.
_COMFORT: Final = 0.85


def remedies(reading: LogReading, setup: Setup) -> tuple[str, ...]:
    """What would cure this boot, the best first; empty where the numbers say nothing.

    Nothing is raised for any numbers; those that no boot can have count as unknown.
    """
    clipped = reading.clipped
    if clipped is not None and not all(abs(one) < MOST_TOKENS for one in clipped):
        clipped = None
    reading, setup = replace(reading, memory=possible(reading.memory), clipped=clipped), setup.possible()
    text = reading.decisive.text if reading.decisive is not None else ""
    known = allocation(text)
    outcome = reading.outcome
    found: list[str] = []
    if outcome == "oom.weights":
        found = _weights(reading, known, setup)
    elif outcome == "oom.kv_pool" and reading.engine == "vllm":
        found = remedies_vllm.pool(reading, text, known, setup.gpu_memory_utilization)
    elif outcome == "oom.kv_pool" and known.tried_gib is None:
        found = _pool(reading, setup)
    elif outcome in ("oom.kv_pool", "oom.graph_capture", "oom.runtime"):
        found = _later(reading, known, setup)
    elif outcome == "ready" and reading.clipped is not None:
        found = _clipped(reading.memory, reading.clipped, setup)
    elif outcome == "infra.dirty_gpu":
        found = remedies_vllm.not_free(text)
    if reading.cure is not None:
        found.append(reading.cure)
    return tuple(found)


# --------------------------------------------------------------------------------------------------------- the KV pool


def _settings(setup: Setup, before: float) -> tuple[int, int, int, int]:
    chunk, graph_bs = defaults(before, setup.tp or 1)
    return (
        setup.chunked_prefill_size or chunk,
        setup.cuda_graph_max_bs or graph_bs,
        setup.gpus or 1,
        setup.attention_replicas,
    )


def _pool(reading: LogReading, setup: Setup) -> list[str]:
    """The weights leave no room for the pool, or too little."""
    memory = reading.memory
    before, f_min, fraction = memory.avail_before_gib, memory.f_min, memory.mem_fraction_static
    if f_min is None:
        return []
    if before is None or before <= 0:
        return _at_least(f_min, fraction)
    chunk, graph_bs, gpus, replicas = _settings(setup, before)
    usual = window(before, f_min, chunk, graph_bs, gpus, replicas)
    better = usual.over(fraction)
    if not better.empty:
        return [_between(better, reading, before, f_min)]
    weights = f_min * before
    more = _more_gpus(weights, before, setup)
    least = window(before, f_min, LEAST_CHUNK, LEAST_GRAPH, gpus, replicas, floor=False)
    better = least.over(fraction)
    if not better.empty:
        return [_with_less(better, usual, before, chunk, graph_bs, setup), *more]
    rest = before - weights
    if rest < _HARDLY_GIB:
        first = f"no fraction works: the weights take {weights:.2f} of the {before:.2f} GiB that were free"
    elif least.empty:
        first = (
            f"hardly any fraction works: beside the weights ({weights:.2f} GiB) only {rest:.2f} of {before:.2f} GiB "
            f"are left, and SGLang itself keeps at least {least.slack_gib:.1f} GiB for graphs and activations"
        )
    else:
        first = (
            f"a higher --mem-fraction-static would leave less than the {least.slack_gib:.1f} GiB that SGLang itself "
            f"keeps for graphs and activations"
        )
    return [first, *more]


def _at_least(f_min: float, fraction: float | None) -> list[str]:
    """All that is known without the free memory before the weights."""
    if up(f_min + STEP) >= 1:
        return [f"no --mem-fraction-static works: the weights alone take {f_min:.2%} of what was free"]
    least = max(up(f_min + STEP), above(fraction) if fraction is not None else 0.0)
    if least >= 1:
        return []
    return [f"--mem-fraction-static of at least {least:.2f} (the least that holds the weights is {f_min:.4f})"]


def _between(better: Window, reading: LogReading, before: float, f_min: float) -> str:
    middle = better.middle
    pool = (middle - f_min) * before
    tokens = tokens_at(reading, middle)
    gives = f"a KV pool of {pool:.1f} GiB" if pool >= 0.1 else f"a KV pool of {size(pool)}"
    gives += f" ({tokens:,} tokens)" if tokens is not None else ""
    which = f"{better}, which gives {gives}" if better.low == better.high else f"{better}: {middle:.2f} gives {gives}"
    return (
        f"--mem-fraction-static {which} (above, less than the {better.slack_gib:.1f} GiB that SGLang itself keeps for "
        f"graphs and activations would be left)"
    )


def _with_less(better: Window, usual: Window, before: float, chunk: int, graph_bs: int, setup: Setup) -> str:
    """The window that a smaller chunk and fewer captured requests open; only what can shrink is named."""
    left = f"at {better.low:.2f} {before * (1 - better.low):.1f} GiB are left for graphs and activations"
    smaller = ["--chunked-prefill-size"] if chunk > LEAST_CHUNK else []
    smaller += [setup.graph_flag] if graph_bs > LEAST_GRAPH else []
    if not smaller:
        return (
            f"--mem-fraction-static {better}: {left}, less than the {usual.slack_gib:.1f} GiB that SGLang itself keeps"
        )
    return (
        f"--mem-fraction-static {better}, together with a smaller {' and '.join(smaller)}: {left}, and SGLang itself "
        f"keeps {usual.slack_gib:.1f} GiB at {chunk} and {graph_bs}, {better.slack_gib:.1f} GiB at {LEAST_CHUNK} and "
        f"{LEAST_GRAPH}"
    )


def _clipped(memory: MemoryTable, clipped: tuple[int, int], setup: Setup) -> list[str]:
    """A healthy server with fewer tokens than were asked for."""
    asked, granted = clipped
    before, f_min, fraction = memory.avail_before_gib, memory.f_min, memory.mem_fraction_static
    cell = cell_gib(memory)
    if before is None or before <= 0 or f_min is None or cell is None or asked <= granted or not alone(memory):
        return []
    said = f"{asked:,} tokens were asked, {granted:,} granted"
    needed = up(f_min + asked * cell / before)
    if needed >= 1:
        return [f"{said}: they would take {asked * cell:.1f} of the {(1 - f_min) * before:.1f} GiB beside the weights"]
    if fraction is not None and needed <= fraction:
        return []  # something else takes the room that the fraction gives
    usual = window(before, f_min, *_settings(setup, before))
    if needed <= usual.high + 1e-9:
        return [f"{said}: --mem-fraction-static {needed:.2f} holds them"]
    return [
        f"{said}; they would need --mem-fraction-static {needed:.2f}, which leaves less than the "
        f"{usual.slack_gib:.1f} GiB that SGLang itself keeps for graphs and activations"
    ]


# --------------------------------------------------------------------------------------------------------- the weights


def _weights(reading: LogReading, known: Allocation, setup: Setup) -> list[str]:
    found: list[str] = []
    before, total = _before_of_the_loading(reading), known.total_gib
    if before is not None and total is not None:
        foreign = total - before
        if foreign > max(_FOREIGN_GIB, total * _FOREIGN_SHARE):
            found.append(
                f"only {before:.2f} of {total:.2f} GiB were free before the weights: something else holds "
                f"{foreign:.1f} GiB of this GPU"
            )
    room = before if before is not None else total
    if not found:
        found += _more_gpus(_need(setup.loaded, room, known), room, setup)
    if setup.ep > 1 and setup.tp is not None and setup.engine == "sglang":
        found.append(
            f"--ep-size {setup.ep} adds no GPU: it divides the same {setup.tp} of --tp-size, and the experts take as "
            f"much of each at any --ep-size"
        )
    return found


def _before_of_the_loading(reading: LogReading) -> float | None:
    """What the fullest of the ranks that were still loading had: one of them ran out of memory."""
    loading = [
        table.avail_before_gib
        for _, table in reading.ranks
        if table.avail_before_gib is not None and table.avail_after_weights_gib is None
    ]
    return min(loading, default=reading.memory.avail_before_gib)


def _need(loaded: float | None, room: float | None, known: Allocation) -> float | None:
    """GiB of each GPU that all weights need at present; None where the bar, or torch, says too little.

    Weights that would have fitted by this count did not run out of memory for their size: then it says nothing.
    """
    if loaded is None or not _TELLING <= loaded < 1 or room is None or known.free_gib is None:
        return None
    need = (room - known.free_gib) / loaded
    return need if need > room else None


def _more_gpus(need: float | None, room: float | None, setup: Setup) -> list[str]:
    """More GPUs for the weights: with the number that is needed, if ``need`` (GiB per GPU at present) is known."""
    if setup.tp is None or setup.gpus is None:
        return []
    used = setup.gpus * setup.replicas
    about = f"; the weights need about {need:.0f} GiB of each now" if need is not None else ""
    if setup.leased > used and setup.leased % used == 0:
        times = setup.leased // used
        said = f"{used} GPU{' is' if used == 1 else 's are'} used, {setup.leased} are leased"
        then = f", about {need / times:.0f} GiB of each then" if need is not None else ""
        if need is None or room is None or need / times < room:
            return [f"{said}{_tp(': ', setup, times)}{about}{then}"]
        return [f"{said}, and even those do not hold the weights{about}"]
    if need is None or room is None:
        return []
    enough = next((times for times in (2, 4, 8, 16) if need / times < room * _COMFORT), None)
    if enough is None:
        return []
    then = f" (about {need / enough:.0f} GiB of each then)"
    return [f"{setup.gpus * enough} GPUs would hold the weights{_tp(': ', setup, enough)}{then}{about}"]


def _tp(lead: str, setup: Setup, times: int) -> str:
    if setup.tp_flag is None or setup.tp is None:
        return ""
    return f"{lead}{setup.tp_flag} {setup.tp * times}"


# ------------------------------------------------------------------------------------------------- after the KV pool


def _later(reading: LogReading, known: Allocation, setup: Setup) -> list[str]:
    """Torch's allocator ran out of memory for the pool itself, in graph capture, warm-up or serving."""
    names = {"oom.kv_pool": "the KV pool", "oom.graph_capture": "graph capture"}
    short = known.short_gib
    missing = f"{names.get(reading.outcome, 'the forward pass')} was short by at least {size(short)}" if short else ""
    if reading.signature == "sglang.batch_oom":
        return _full_pool(reading, setup)
    if reading.engine == "vllm":
        return remedies_vllm.later(reading, missing)
    found: list[str] = []
    last: list[str] = []
    if reading.outcome == "oom.graph_capture" and setup.cuda_graph_max_bs == 1:
        last.append("--disable-cuda-graph")  # there is no smaller graph
    elif reading.outcome == "oom.graph_capture":
        half = (setup.cuda_graph_max_bs or 0) // 2
        found.append(f"{setup.graph_flag} {half}" if half else f"a smaller {setup.graph_flag}")
    elif reading.outcome == "oom.runtime" and (chunk := setup.chunked_prefill_size or 0) > LEAST_CHUNK:
        found.append(f"--chunked-prefill-size {max(chunk // 2, LEAST_CHUNK)}")
    found += [*_lower(reading, short, setup), *last]
    if not found:
        return [missing] if missing else []
    return [f"{missing}: {found[0]}" if missing else found[0], *(f"or {one}" for one in found[1:])]


def _lower(reading: LogReading, short: float | None, setup: Setup) -> list[str]:
    """The fractions that free so much and still give a pool."""
    memory = reading.memory
    before, fraction, f_min = memory.avail_before_gib, memory.mem_fraction_static, memory.f_min
    if before is None or before <= 0 or fraction is None or short is None or _limited(memory, setup):
        return []
    high = min(down(fraction - short / before), below(fraction))
    if f_min is None:
        return [f"--mem-fraction-static of at most {high:.2f}"] if high > 0 else []
    lower, pool = Window(up(f_min + STEP), high), (fraction - f_min) * before
    if lower.empty:
        return [f"a lower --mem-fraction-static does not help: the KV pool has only {size(pool)}"] if pool > 0 else []
    tokens = tokens_at(reading, high)
    gives = f" ({high:.2f} gives {tokens:,} tokens)" if tokens is not None else ""
    return [f"--mem-fraction-static {lower}{gives}"]


def _full_pool(reading: LogReading, setup: Setup) -> list[str]:
    memory = reading.memory
    tokens = f" of {memory.kv_tokens:,} tokens" if memory.kv_tokens is not None else ""
    found = [f"the KV pool{tokens} was full: a smaller --max-running-requests"]
    before, f_min, fraction = memory.avail_before_gib, memory.f_min, memory.mem_fraction_static
    if before is None or before <= 0 or f_min is None or fraction is None or _limited(memory, setup):
        return found
    usual = window(before, f_min, *_settings(setup, before))
    if usual.high > max(fraction + 0.005, f_min + STEP):
        more = tokens_at(reading, usual.high)
        gives = f", which gives {more:,} tokens" if more is not None else ""
        found.append(f"or --mem-fraction-static up to {usual.high:.2f}{gives}")
    return found


# ---------------------------------------------------------------------------------------------------------- arithmetic


def _limited(memory: MemoryTable, setup: Setup) -> bool:
    """Whether the user's own limit, not the fraction, decides the size of the pool."""
    limit, tokens = setup.max_total_tokens, memory.kv_tokens
    return (
        limit is not None
        and tokens is not None
        and tokens <= limit
        and (memory.rest_gib or 0.0) > 1.05 * (memory.kv_gib or 0.0)
    )
