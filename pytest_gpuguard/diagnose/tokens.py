"""How many tokens a KV pool holds, and would hold at another fraction; sizes in GiB.

It must never promise tokens that do not follow from the pool that was printed.
"""

from __future__ import annotations

from typing import Final

from ..claims.observation import LogReading, MemoryTable

#: There are fewer tokens than this in any pool.
MOST_TOKENS: Final = 1 << 60
#: A token takes at least a byte.
_LEAST_CELL_GIB: Final = 1 / (1 << 30)
#: Further from what the fraction gives, something else than the KV cache is in the pool, such as a model's states.
_ALONE_SHARE: Final = 0.05
_ALONE_GIB: Final = 0.02


def cell_gib(memory: MemoryTable) -> float | None:
    """GiB of KV cache a token takes, of one rank."""
    return _each(memory.kv_gib, memory.kv_tokens)


def _each(gib: float | None, tokens: int | None) -> float | None:
    """GiB a token; None where no token can take so little or so much."""
    if gib is None or not tokens:
        return None
    cell = gib / tokens
    return cell if _LEAST_CELL_GIB <= cell <= 1 else None


def alone(memory: MemoryTable) -> bool:
    """Whether the KV cache has all that the fraction gives: then more of it is more tokens, and less fewer."""
    rest, pool = memory.rest_gib, memory.kv_gib
    return rest is None or pool is None or abs(rest - pool) <= _ALONE_SHARE * pool + _ALONE_GIB


def tokens_at(reading: LogReading, fraction: float) -> int | None:
    """How many tokens there are at another fraction: by the pool that there is, or how many too few a failed one had.

    None where that does not follow from them.
    """
    memory = reading.memory
    before, now, rest = memory.avail_before_gib, memory.mem_fraction_static, memory.rest_gib
    if before is None or now is None or rest is None:
        return None
    present, cell = memory.kv_tokens, cell_gib(memory)
    if cell is None and rest < 0 and reading.clipped is not None and reading.clipped[1] < 0:
        present = reading.clipped[1]
        cell = _each(rest, present)
    elif not alone(memory):
        return None
    if cell is None or present is None:
        return None
    tokens = int(present + (fraction - now) * before / cell)
    return tokens if tokens > 0 else None
