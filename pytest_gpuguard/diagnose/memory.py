"""The memory table of one boot: from what each rank logged, and from ``/server_info`` of every release's shape.

All sizes are GiB (SGLang prints GiB and calls it GB). A number that nobody printed is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..claims.observation import MemoryTable

#: More ranks than any server has: what a hostile log may make us remember.
MAX_RANKS: Final = 1024

#: Beyond any number of GiB or tokens.
_BEYOND: Final = 1 << 60

#: Settings that are secrets; they never leave ``from_server_info``.
_SECRET: Final = ("api_key", "token_secret", "password", "secret", "ssl_keyfile")


@dataclass(slots=True)
class RankMemory:
    """What one rank printed about its GPU, in GiB; ``kv_tokens`` and ``max_total`` count tokens.

    ``avail_after`` and ``weights`` are of everything loaded before the KV pool (0.5.15+ loads a draft model there too;
    a draft loaded after the pool does not count). ``avail`` is the last free memory that the rank printed.
    """

    avail_before: float | None = None
    avail_after: float | None = None
    weights: float | None = None
    kv_tokens: int | None = None
    kv: float | None = None
    graph: float | None = None
    avail: float | None = None
    max_total: int | None = None
    total: float | None = None
    utilization: float | None = None
    pool_done: bool = False

    def take(self, value: str, number: float) -> None:
        """Store one number under its value's name (``spellings.VALUES``)."""
        before_pool = not self.pool_done and self.kv_tokens is None
        if value == "avail_before":
            self.avail_before = number if self.avail_before is None else self.avail_before
        elif value == "avail_after":
            self.avail_after = number if before_pool else self.avail_after
        elif value == "weights":
            self.weights = (self.weights or 0.0) + number if before_pool else self.weights
        elif value == "kv":
            self.kv = (self.kv or 0.0) + number
        elif value == "graph":
            self.graph = (self.graph or 0.0) + number
        elif value == "kv_tokens":
            self.kv_tokens = max(self.kv_tokens or 0, int(number))
        elif value == "max_total":
            self.max_total = int(number)
        elif value == "total":
            self.total = number
        elif value == "utilization":
            self.utilization = number
        if value in ("avail", "avail_before", "avail_after"):
            self.avail = number


@dataclass(slots=True)
class RankStore:
    """All ranks of one log, and what the log says about the fraction."""

    ranks: dict[str, RankMemory] = field(default_factory=dict)
    fraction: float | None = None
    f_min: float | None = None
    utilization: float | None = None

    def rank(self, name: str) -> RankMemory:
        """The memory of a rank by its log prefix ("TP0", "DP1 TP4", "" when there is one rank)."""
        found = self.ranks.get(name)
        if found is None:
            found = RankMemory()
            if len(self.ranks) < MAX_RANKS:
                self.ranks[name] = found
        return found

    def fullest(self) -> str | None:
        """The rank with the least memory left after the weights, or None when no rank printed it."""
        known = [(rank.avail_after, name) for name, rank in self.ranks.items() if rank.avail_after is not None]
        if known:
            return min(known)[1]
        known = [(rank.avail_before, name) for name, rank in self.ranks.items() if rank.avail_before is not None]
        return min(known)[1] if known else None

    def table(self) -> MemoryTable:
        """The table of the fullest rank; tokens and free memory are the least over all ranks."""
        name = self.fullest()
        rank = self.ranks[name] if name is not None else RankMemory()
        every = list(self.ranks.values())
        tokens = _least(r.max_total for r in every) or _least(r.kv_tokens for r in every)
        return complete(
            MemoryTable(
                avail_before_gib=rank.avail_before,
                avail_after_weights_gib=rank.avail_after,
                # Where no rank printed its free memory (vLLM), the one with the most weights is the fullest.
                weights_gib=rank.weights if name is not None else _most(r.weights for r in every),
                mem_fraction_static=self.fraction,
                f_min=self.f_min,
                kv_tokens=int(tokens) if tokens is not None else None,
                kv_gib=rank.kv if rank.kv is not None else _most(r.kv for r in every),
                graph_gib=rank.graph if rank.graph is not None else _most(r.graph for r in every),
                free_gib=_least(r.avail for r in every),
                total_gib=_least(r.total for r in every),
                gpu_memory_utilization=self.utilization
                if self.utilization is not None
                else _least(r.utilization for r in every),
            )
        )

    def each(self, most: int = 64) -> tuple[tuple[str, MemoryTable], ...]:
        """The table of every rank that printed memory, in the order of the log."""
        rows = []
        for name, rank in self.ranks.items():
            tokens = rank.max_total if rank.max_total is not None else rank.kv_tokens
            row = MemoryTable(
                avail_before_gib=rank.avail_before,
                avail_after_weights_gib=rank.avail_after,
                weights_gib=rank.weights,
                mem_fraction_static=self.fraction,
                kv_tokens=tokens,
                kv_gib=rank.kv,
                graph_gib=rank.graph,
                free_gib=rank.avail,
            )
            if any(number is not None for number in (rank.avail_before, rank.avail_after, rank.weights, rank.kv)):
                rows.append((name, complete(row)))
            if len(rows) == most:
                break
        return tuple(rows)


def complete(table: MemoryTable) -> MemoryTable:
    """Fill in what follows from the measured numbers.

    ``reserved`` = before·(1−f), ``rest`` = after − reserved, ``f_min`` = 1 − after/before (all GiB; SGLang's own rule).
    A computed number never replaces a printed one, except that weights missing from the log are before − after.
    """
    before, after, fraction = table.avail_before_gib, table.avail_after_weights_gib, table.mem_fraction_static
    weights, reserved, rest, f_min = table.weights_gib, table.reserved_gib, table.rest_gib, table.f_min
    if weights is None and before is not None and after is not None:
        weights = before - after
    if before is not None and fraction is not None:
        reserved = before * (1 - fraction)
        if after is not None:
            rest = after - reserved
    if f_min is None and before is not None and after is not None and before > 0:
        f_min = max(0.0, 1 - after / before)
    return replace(
        table,
        weights_gib=_rounded(weights),
        reserved_gib=_rounded(reserved),
        rest_gib=_rounded(rest),
        f_min=_rounded(f_min),
        kv_gib=_rounded(table.kv_gib),
        graph_gib=_rounded(table.graph_gib),
    )


def possible(table: MemoryTable) -> MemoryTable:
    """The table without what no boot can have: no numbers (NaN), endless ones, fractions that are none.

    What is only unlikely stays: it is judged where it is used.
    """
    values = table.as_dict()
    for name, value in values.items():
        if _number(value) is None:
            values[name] = None
    for name in ("mem_fraction_static", "gpu_memory_utilization"):
        value = values[name]
        if value is not None and not 0 < value <= 1:
            values[name] = None
    if values["f_min"] is not None and values["f_min"] < 0:
        values["f_min"] = None
    return MemoryTable(**values)  # type: ignore[arg-type]


def margin_gib(table: MemoryTable, ready: bool) -> float | None:
    """GiB to spare: the least free memory over the ranks of a server that is ready; below 0, what the pool lacked.

    None where nothing was left to measure.
    """
    if ready:
        return table.free_gib
    return table.rest_gib if table.rest_gib is not None and table.rest_gib <= 0 else None


def from_server_info(info: Mapping[str, Any]) -> tuple[MemoryTable, dict[str, Any]]:
    """``/server_info`` (or ``/get_server_info``) → memory table and resolved settings, whatever the release.

    ``memory_usage`` is absent in 0.4.6; has ``cuda_graph`` in 0.4.10, ``graph`` as a number to 0.5.16 and as a dict by
    kind of graph since 0.5.18. It is of rank 0 of each DP group, so the largest group counts. Settings hold scalars
    and lists only, no secrets; ``version`` is among them. Unreadable parts are left out, nothing is raised.
    """
    states = [state for state in _list(info.get("internal_states")) if isinstance(state, Mapping)]
    usages = [usage for state in states if isinstance(usage := state.get("memory_usage"), Mapping)]
    scheduler = info.get("scheduler_info")
    scheduler = scheduler if isinstance(scheduler, Mapping) else {}
    tokens = _number(scheduler.get("max_total_num_tokens", info.get("max_total_num_tokens")))
    if tokens is None:
        tokens = _least(_number(usage.get("token_capacity")) for usage in usages)
    settings: dict[str, Any] = {}
    for key, value in info.items():
        if key in ("internal_states", "scheduler_info") or any(word in str(key) for word in _SECRET):
            continue
        if value is None or isinstance(value, (str, int, float, bool)):
            settings[str(key)] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(item, (str, int, float, bool)) for item in value):
            settings[str(key)] = list(value)
    for key in ("max_total_num_tokens", "max_req_input_len"):
        if key not in settings and isinstance(scheduler.get(key), int):
            settings[key] = scheduler[key]
    table = MemoryTable(
        weights_gib=_most(_number(usage.get("weight")) for usage in usages),
        mem_fraction_static=_number(info.get("mem_fraction_static")),
        kv_tokens=int(tokens) if tokens is not None else None,
        kv_gib=_most(_number(usage.get("kvcache")) for usage in usages),
        graph_gib=_most(_graph(usage) for usage in usages),
        free_gib=_least(_number(usage.get("startup_available")) for usage in usages),
    )
    return complete(table), settings


def merge_tables(log: MemoryTable, info: MemoryTable) -> MemoryTable:
    """One table of two sources: the server's resolved fraction and token count, else the log (it has every rank)."""
    values = log.as_dict()
    for key, value in info.as_dict().items():
        if value is not None and (values[key] is None or key in ("mem_fraction_static", "kv_tokens")):
            values[key] = value
    fresh = {key: values[key] for key in values if key not in ("reserved_gib", "rest_gib")}
    return complete(MemoryTable(**fresh))  # type: ignore[arg-type]


def _graph(usage: Mapping[str, Any]) -> float | None:
    value = usage.get("graph", usage.get("cuda_graph"))
    if isinstance(value, Mapping):
        numbers = [number for item in value.values() if (number := _number(item)) is not None]
        return sum(numbers) if numbers else None
    return _number(value)


def _number(value: object) -> float | None:
    """A number that can be one of memory: JSON may hold NaN and Infinity too."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -_BEYOND < value < _BEYOND:
        return None
    return float(value)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _least(numbers: Iterable[float | None]) -> float | None:
    return min((number for number in numbers if number is not None), default=None)


def _most(numbers: Iterable[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)
