"""What rates were surely reached before, by load and cards: what a slow decay is seen against.

Pure. It must never take for a baseline what was not verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .judgement import Verdict
from .series import Baseline
from .stats import interval


def on_cards(subject: str, cards: Sequence[str]) -> str:
    """The name of a baseline: a load on kinds of cards."""
    return f"{subject} on {', '.join(sorted(set(cards))) or 'no GPU'}"


def raised(
    known: Mapping[str, Baseline], rates: Mapping[str, Any], cards: Sequence[str], when: float
) -> dict[str, Baseline]:
    """What was known, with what a payload's ``rates`` verified for the first time, or surely faster than before."""
    found = dict(known)
    for subject, data in rates.items():
        reached = interval(data["samples"]) if data.get("verdict") == Verdict.HOLDS.value else None
        name = on_cards(subject, cards)
        if reached is not None and (name not in found or reached.low > found[name].rate):
            found[name] = Baseline(round(reached.center, 4), when)
    return found
