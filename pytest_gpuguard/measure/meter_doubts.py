"""Why the figures of a window may be wrong although no request failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .load import LOWER_BOUND, Load
from .stream import Reply

#: From this share of one core on, a process of the meter may be what limits the rate.
BUSY: Final = 0.5
#: A process that wakes up this late on average, in seconds, is short of CPU.
LATE_S: Final = 0.02
#: A share of input tokens from the prefix cache that is no accident (a start token is always the same), and the tokens
#: of a prompt that may be found by accident.
_CACHED: Final = 0.05
_ACCIDENT: Final = 4


def doubts_of(load: Load, replies: Sequence[Reply], busy: float, late_s: float) -> tuple[str, ...]:
    """One line for each reason; ``busy`` is the share of a core that the busiest process used."""
    found = [*_counting(load, replies), *_input(load, replies)]
    if busy >= BUSY:
        found.append(f"the meter itself was {busy:.0%} busy: {LOWER_BOUND}")
    if late_s >= LATE_S:
        found.append(
            f"the meter's process woke up {late_s * 1000:.0f} ms late on average: the machine is short of CPU, "
            f"{LOWER_BOUND}"
        )
    return tuple(found)


def _counting(load: Load, replies: Sequence[Reply]) -> list[str]:
    total, found = len(replies), []
    missing = sum(reply.usage is None for reply in replies)
    if missing:
        found.append(f"usage missing in {missing} of {total} replies: one token per event was counted")
    unlike = [reply for reply in replies if reply.usage is not None and reply.usage != reply.tokens]
    if unlike:
        first = unlike[0]
        way = " (one per event)" if first.by_events else ""
        found.append(
            f"counted tokens differ from the server's usage in {len(unlike)} of {total} replies: "
            f"{first.tokens}{way} and {first.usage}"
        )
    counts = [reply.tokens if reply.usage is None else reply.usage for reply in replies]
    other = [count for count in counts if count != load.output_len]
    if other:
        found.append(
            f"{len(other)} of {total} replies had another number of tokens than asked: {_range(other)}, "
            f"not {load.output_len}"
        )
    return found


def _input(load: Load, replies: Sequence[Reply]) -> list[str]:
    found = []
    prompts = [reply.prompt for reply in replies if reply.prompt is not None and reply.prompt != load.input_len]
    if prompts:
        found.append(f"the server counts {_range(prompts)} input tokens, {load.input_len} were sent")
    hits = [reply.cached for reply in replies if reply.cached is not None]
    mean = sum(hits) / len(hits) if hits else None
    share = None if mean is None or load.input_len <= _ACCIDENT else mean / load.input_len
    if mean is not None and share is not None and not load.cached and mean > _ACCIDENT and share >= _CACHED:
        found.append(
            f"the prefix cache gave {share:.0%} of the input tokens although every prompt was to be new: "
            "give another seed"
        )
    if share is not None and load.cached and share < _CACHED:
        found.append("the server took no input tokens from its prefix cache, although all prompts share one prefix")
    return found


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"
