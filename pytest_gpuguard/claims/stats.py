"""From a few noisy rates to a decision: below, inside or above what is claimed, or still open.

It assumes as little as small samples allow: any scale of noise, autocorrelation up to about 0.6, one sample in five
disturbed. It never decides on fewer than LEAST samples, and never knows what the rates are of.

Each piece is there for a kind of noise, and ``benchmarks/calibration.py`` measures what it is worth:

- Logarithms: noise of a rate is a share of it, and a ratio's interval does not depend on which one is the divisor.
- Trimmed mean with winsorised variance (Yuen, Biometrika 61, 1974): a tick of the host slows one sample by a third.
- Variance inflated by lag-1 correlation, and degrees of freedom taken from the number of independent samples that the
  series is worth (Bayley and Hammersley, JRSS Suppl. 8, 1946). The estimate is corrected for its bias (Kendall,
  Biometrika 41, 1954), but says so little of a short series that less than RHO is never believed.
- The same level at every look (Pocock, Biometrika 64, 1977): whoever asks after each sample has many chances to err.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Final

#: Samples before anything can be decided. Fewer, if correlated, agree by chance too often.
LEAST: Final = 7
#: Samples after which what is open stays so: INCONCLUSIVE. Further ones are not looked at.
MOST: Final = 36
#: What an interval holds over all the looks at it together: it misses the true rate on either side in at most 2 %.
CONFIDENCE: Final = 0.96
#: Chance of an error on one side at one look, so that all looks together keep CONFIDENCE at autocorrelation RHO.
_AT_ONE_LOOK: Final = 0.009
#: Autocorrelation at lag 1 that is assumed at least, and at most.
RHO: Final = 0.6
_RHO_MOST: Final = 0.9
#: Share of the samples that is trimmed at either end.
_TRIM: Final = 0.2
#: Least half-width of an interval, a share of the rate: a clock and a client are not better than this.
RESOLUTION: Final = 0.005
#: Degrees of freedom are rounded down to these steps, so that few quantiles are ever computed.
_STEPS: Final = 20


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true rate is, in the unit of the samples. ``center`` is their trimmed mean (of logarithms)."""

    center: float
    low: float
    high: float
    n: int
    confidence: float


class Standing(str, Enum):
    """Where an interval lies against what is claimed. Not wholly on one side of a bound is OPEN."""

    BELOW = "below"
    INSIDE = "inside"
    ABOVE = "above"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the samples say so far. ``interval`` is None while there are too few of them."""

    standing: Standing
    interval: Interval | None


def decide(samples: Sequence[float], low: float | None, high: float | None) -> Decision:
    """How the true rate stands to ``low`` … ``high`` (same unit; None is no bound), samples in the order taken.

    May be asked after every further sample, and stopped at the first answer that is not OPEN: the chance of an error
    is meant for all looks together. After MOST samples the answer does not change any more.

    :raises ValueError: no bound, bounds that are no numbers or in the wrong order, or a sample that is no rate.
    """
    if low is None and high is None:
        raise ValueError("nothing to decide: neither a lower nor an upper bound")
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if not all(math.isfinite(bound) for bound in (low, high) if bound is not None) or least > most:
        raise ValueError(f"bounds {low} and {high} are not two finite numbers in order")
    _check(samples)
    found = _interval(samples[:MOST])
    return Decision(Standing.OPEN if found is None else _standing(found, least, most), found)


def interval(samples: Sequence[float]) -> Interval | None:
    """Where the true rate is, from samples in the order they were taken; None of fewer than LEAST.

    :raises ValueError: a sample that is not finite and positive.
    """
    _check(samples)
    return _interval(samples)


def ratio_samples(blocks: Sequence[tuple[str, float]]) -> tuple[float, ...]:
    """Ratios a/b of an interleaved series (A B B A A B B A …) of ``("a" | "b", rate)``, in the order they got complete.

    Every rate is paired with the oldest one of the other side that has no partner yet, and every pair with the oldest
    that was taken in the other order; each two pairs give one ratio, their geometric mean. A linear drift is against
    the one pair and for the other, and so cancels, as does whatever favours the second. It is one ratio of each A B B A
    (and two of A A B B B B A A); a rate or pair without its partner, and so all of A B A B, gives none.

    :raises ValueError: a side that is neither "a" nor "b", or a rate that is not finite and positive.
    """
    _check([rate for _, rate in blocks])
    rates: dict[str, deque[float]] = {"a": deque(), "b": deque()}
    pairs: dict[str, deque[float]] = {"a": deque(), "b": deque()}  # logarithms of a/b, by the side that came second
    ratios = []
    for side, rate in blocks:
        if side not in rates:
            raise ValueError(f'side {side!r} is neither "a" nor "b"')
        other = "b" if side == "a" else "a"
        if not rates[other]:
            rates[side].append(rate)
            continue
        first = rates[other].popleft()
        log = math.log(rate / first) if side == "a" else math.log(first / rate)
        if pairs[other]:
            ratios.append(math.exp((log + pairs[other].popleft()) / 2))
        else:
            pairs[side].append(log)
    return tuple(ratios)


@lru_cache(maxsize=1024)
def student_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t, for a probability of 0.5 … 0.999 and 2 … 100 degrees of freedom, whole or not.

    With t = √ν tan θ the density is a power of a cosine, which Simpson's rule integrates to five digits and more.
    """
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(45):
        angle = (low + high) / 2
        step = angle / 64
        ends = 1 + math.cos(angle) ** (freedom - 1)
        inner = math.fsum((4 if i % 2 else 2) * math.cos(i * step) ** (freedom - 1) for i in range(1, 64))
        if 0.5 + constant * (ends + inner) * step / 3 < probability:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def _interval(samples: Sequence[float]) -> Interval | None:
    n = len(samples)
    if n < LEAST:
        return None
    logs = [math.log(sample) for sample in samples]
    ordered = sorted(logs)
    cut = int(_TRIM * n)
    kept = n - 2 * cut
    center = math.fsum(ordered[cut : n - cut]) / kept
    winsorised = [min(max(log, ordered[cut]), ordered[n - cut - 1]) for log in logs]
    mean = math.fsum(winsorised) / n
    deviations = [log - mean for log in winsorised]
    squares = math.fsum(one * one for one in deviations)
    inflation = _inflation(_correlation(deviations, squares), n)
    half = 0.0
    if squares > 0:
        freedom = max(n / inflation - 1, 2.0)
        error = math.sqrt(squares / (kept * (kept - 1)) * inflation)
        half = error * student_quantile(1 - _AT_ONE_LOOK, math.floor(freedom * _STEPS) / _STEPS)
    half = max(half, RESOLUTION)
    return Interval(math.exp(center), math.exp(center - half), math.exp(center + half), n, CONFIDENCE)


def _standing(found: Interval, least: float, most: float) -> Standing:
    if found.high < least:
        return Standing.BELOW
    if found.low > most:
        return Standing.ABOVE
    return Standing.INSIDE if found.low >= least and found.high <= most else Standing.OPEN


def _correlation(deviations: Sequence[float], squares: float) -> float:
    """Autocorrelation at lag 1. About an estimated mean it comes out (1 + 3ρ)/n too low, which is taken back."""
    if squares <= 0:
        return RHO
    n = len(deviations)
    found = math.fsum(one * other for one, other in pairwise(deviations)) / squares
    return min(max((found + 1 / n) / (1 - 3 / n), RHO), _RHO_MOST)


def _inflation(rho: float, n: int) -> float:
    """How many times the variance of a mean of n is that of independent samples with the same sample variance.

    Two parts: the sum over all lags ρ^k, and the sample variance being too low because neighbours resemble each other.
    """
    mean = (1 + rho) / (1 - rho) - 2 * rho * (1 - rho**n) / (n * (1 - rho) ** 2)
    return mean / max((n - mean) / (n - 1), 0.1)


def _check(samples: Sequence[float]) -> None:
    for sample in samples:
        if not (math.isfinite(sample) and sample > 0):
            raise ValueError(f"{sample!r} is not a rate: finite and above zero")
