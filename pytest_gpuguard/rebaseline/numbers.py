"""New numbers for a claim, from what was measured: rounded to the safe side, to two or three digits. Pure.

It must never propose a number that the measurement itself would contradict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from typing import Any, Final

from ..claims.expect import Compare, Expectation, ExpectToks, Fits, MaxMem, normal_card
from ..claims.observation import Observation
from ..claims.rates import DRIFT
from ..claims.stats import MOST, Interval, interval
from ..claims.units import Comparison, parse_gib
from .evidence import series_of

#: Two digits do where they give away no more than this.
_GENEROUS: Final = 0.02
#: A floor is beaten by far where the lower end of the interval is this much above it.
FAR: Final = 0.10


@dataclass(frozen=True, slots=True)
class Number:
    """An argument's new value, as source text. ``card``: only that entry of a dictionary."""

    argument: str
    text: str
    card: str | None = None


def rounded(value: float, direction: str) -> Decimal:
    """``down`` or ``up``: two significant digits, three where two would give away more than 2 %; ``near``: three."""
    way = {"down": ROUND_FLOOR, "up": ROUND_CEILING, "near": ROUND_HALF_EVEN}[direction]
    exact = Decimal(repr(float(value)))
    if not exact:
        return exact
    for digits in (2, 3) if direction != "near" else (3,):
        found = exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding=way)
        if digits == 3 or abs(found - exact) <= abs(exact) * Decimal(str(_GENEROUS)):
            break
    return found


def plain(value: Decimal) -> str:
    """Without an exponent, and without zeros that say nothing."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def measured(evidence: Mapping[str, Any], subject: str) -> Interval | None:
    """The interval of the rate that a report's payload has under this subject; None of too few samples."""
    return interval(series_of(evidence, subject).samples[:MOST])


def drifted(evidence: Mapping[str, Any], expectation: Expectation) -> bool:
    """Whether this rate is surely lower than what was verified first, as the judge's warning means it."""
    if not isinstance(expectation, ExpectToks):
        return False
    found, baseline = measured(evidence, expectation.subject), series_of(evidence, expectation.subject).baseline
    return found is not None and baseline is not None and found.high < baseline.rate * (1 - DRIFT)


def beaten(evidence: Mapping[str, Any], expectation: Expectation, cards: tuple[str, ...]) -> bool:
    """Whether a floor is so far below what was measured that it guards little."""
    here = expectation.on(cards) if isinstance(expectation, ExpectToks) else None
    found = measured(evidence, expectation.subject)
    return here is not None and here.minimum is not None and found is not None and found.low > here.minimum * (1 + FAR)


def numbers_for(expectation: Expectation, observation: Observation, evidence: Mapping[str, Any]) -> list[Number]:
    """The numbers that this observation asks for; none where it does not say, or where they are right already."""
    if isinstance(expectation, ExpectToks):
        return _rate(expectation, observation, evidence)
    if isinstance(expectation, Compare):
        found = measured(evidence, expectation.subject)
        if found is None or expectation.ratio is None:
            return []
        return [Number("ratio", f'"{_bound(expectation.ratio, found.low, found.high)}"')]
    if isinstance(expectation, MaxMem):
        used = _used(expectation, observation)
        if used is None or used <= expectation.limit_gib:
            return []
        new = rounded(used, "up")
        if parse_gib(f"{plain(new)}GiB") < used:  # sizes are whole bytes, and this one lies in between
            new = rounded(math.nextafter(float(new), math.inf), "up")
        return [Number("limit", f'"{plain(new)}GiB"')]
    return _fits(expectation, observation) if isinstance(expectation, Fits) else []


def _rate(expectation: ExpectToks, observation: Observation, evidence: Mapping[str, Any]) -> list[Number]:
    found = measured(evidence, expectation.subject)
    here = expectation.on(observation.cards)
    if found is None or here is None:
        return []
    floor = here.minimum is not None
    new = rounded(found.low, "down") if floor else rounded(found.center, "near")
    if math.isclose(float(new), (here.minimum if floor else here.about) or 0.0):
        return []
    card = None
    if expectation.cards:
        kinds = {normal_card(one) for one in observation.cards}
        if len(kinds) != 1:
            return []  # which of them set the pace is not known
        card = kinds.pop()
    return [Number("min" if floor else "about", plain(new), card)]


def _fits(expectation: Fits, observation: Observation) -> list[Number]:
    found = []
    tokens, bound = observation.memory.kv_tokens, expectation.kv_tokens
    if bound is not None and tokens is not None and not bound.holds(tokens):
        found.append(Number("kv_tokens", f'"{_bound(bound, tokens, tokens)}"'))
    free = observation.free_gib
    if expectation.margin_gib is not None and free is not None and free < expectation.margin_gib and free > 0.01:
        new = rounded(free - 0.005, "down")  # it was printed with two places
        found.append(Number("margin", f'"{plain(new)}GiB"'))
    return found


def _bound(bound: Comparison, low: float, high: float) -> str:
    """The bound in its direction, as near as it may be to what lies between ``low`` and ``high``."""
    if bound.op == "==":
        return f"=={plain(Decimal(repr(low)))}"
    way, value = ("down", low) if bound.op.startswith(">") else ("up", high)
    new = rounded(value, way)
    if new == Decimal(repr(float(value))) and len(bound.op) == 1:  # it must be beyond the number itself
        step = Decimal(1).scaleb(new.adjusted() - 2)
        new += step if way == "up" else -step
    return f"{bound.op}{plain(new)}"


def _used(expectation: MaxMem, observation: Observation) -> float | None:
    memory = observation.memory
    if expectation.of == "peak":
        return observation.peak.gib if observation.peak is not None else None
    if expectation.of == "static":
        both = memory.weights_gib, memory.kv_gib
        return both[0] + both[1] if both[0] is not None and both[1] is not None else None
    return memory.weights_gib if expectation.of == "weights" else memory.graph_gib
