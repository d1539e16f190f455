"""Takes samples until they decide: rates of one server, or ratios of two, under one stopping rule.

It knows neither servers nor clocks of its own; whoever takes a sample says whether it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ..claims.series import Series
from ..claims.stats import MOST, Standing, decide, ratio_samples

if TYPE_CHECKING:
    from .load import Window

#: So many samples may be rejected, or fail, before no more are taken.
MOST_REJECTED: Final = 10
MOST_FAILED: Final = 3

Bounds = tuple["float | None", "float | None"]


@dataclass(frozen=True, slots=True)
class Taken:
    """One window of load: its rate in tok/s, or why it does not count."""

    rate: float
    window: Window
    rejected: str | None = None
    doubts: tuple[str, ...] = ()


def taken(window: Window, per: str, rejected: str | None = None, doubts: tuple[str, ...] = ()) -> Taken:
    """A window as a sample of the rate that is asked for."""
    rate = window.output_toks if per == "total" else window.request_toks
    return Taken(rate, window, rejected, (*window.doubts, *doubts))


class Gathering:
    """The samples so far, for at most ``limit_s`` seconds. ``known`` ones of the same server and load count too."""

    def __init__(
        self,
        bounds: Bounds,
        limit_s: float,
        known: Series | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds = bounds
        self._limit_s = limit_s
        self._clock = clock
        self._began = clock()
        self._paused = 0.0
        self._windows: list[Window] = []
        self._doubts: dict[str, None] = {}
        self.series = known if known is not None else Series()

    def add(self, one: Taken) -> None:
        """A sample of a rate."""
        if self._counts(one):
            self._put(one.rate)

    def add_block(self, ours: Sequence[Taken], others: Sequence[Taken]) -> None:
        """An A B B A block of a comparison: two samples of each. One that does not count spoils the block."""
        block = [*ours[:1], *others, *ours[1:]]
        if all([self._counts(one, other=one in others) for one in block]):
            names = ["a", *("b" for _ in others), *("a" for _ in ours[1:])]
            for ratio in ratio_samples([(name, one.rate) for name, one in zip(names, block, strict=True)]):
                self._put(ratio)

    def doubt(self, text: str) -> None:
        """Something to know about the figures."""
        self._doubts[text] = None

    def spent(self, seconds: float) -> None:
        """Time that does not count: boots between the samples."""
        self._paused += seconds

    @property
    def left_s(self) -> float:
        """The time that is left, in seconds; 0 when it is over."""
        return max(0.0, self._limit_s - (self._clock() - self._began - self._paused))

    @property
    def over(self) -> bool:
        """Whether further samples would change nothing, or there is no time for them."""
        series = self.series
        if series.ours is not None or len(series.failed) >= MOST_FAILED or len(series.rejected) >= MOST_REJECTED:
            return True
        if len(series.samples) >= MOST or not self.left_s:
            return True
        return decide(series.samples, *self._bounds).standing is not Standing.OPEN

    def result(self) -> Series:
        """The series, with its latencies and doubts."""
        found: dict[str, float] = dict(self.series.latencies)
        for name in ("ttft", "itl", "e2e"):
            spreads = [getattr(window, f"{name}_s") for window in self._windows]
            values = [one.median for one in spreads if one is not None]
            if values:
                found[name] = median(values)
        doubts = dict.fromkeys([*self.series.doubts, *self._doubts])
        return replace(self.series, latencies=MappingProxyType(found), doubts=tuple(doubts))

    def _put(self, number: float) -> None:
        self.series = replace(self.series, samples=(*self.series.samples, number))

    def _counts(self, one: Taken, other: bool = False) -> bool:
        series, window = self.series, one.window
        if window.ours and not self.left_s:
            self.doubt("the time given was over before a sample was complete")
        elif window.ours:
            self.series = replace(series, ours=window.failed)
        elif window.failed is not None:
            self.series = replace(series, failed=(*series.failed, window.failed))
        elif one.rejected is not None:
            self.series = replace(series, rejected=(*series.rejected, one.rejected))
        elif not (isfinite(one.rate) and one.rate > 0):
            self.series = replace(series, failed=(*series.failed, "no token came"))
        else:
            self._windows.append(window)
            self._doubts |= dict.fromkeys(one.doubts)
            if window.understated:
                ours, others = series.understated or not other, series.others_understated or other
                self.series = replace(self.series, understated=ours, others_understated=others)
            return True
        return False
