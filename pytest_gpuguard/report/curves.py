"""Charts as inline SVG: the GPU memory of a boot by phase, and tok/s over runs with what changed between them.

It must never need JavaScript or a network, nor name a colour: the page's style does, so that light and dark both work.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from html import escape
from typing import Any, Final
from xml.etree.ElementTree import Element, SubElement, tostring

from .words import plain

#: User units of a chart: small enough that its text can be read on a phone.
WIDTH: Final = 480
HEIGHT: Final = 190
#: Vertical lines that get a number; more of them would be a hatching.
MARKS: Final = 12
#: Dates along an axis.
_DATES: Final = 4
#: Larger numbers, and smaller differences, are no rates or sizes that anybody measured.
_LARGEST: Final = 1e9


class MissingExtra(RuntimeError):
    """A package of the extra ``report`` is not installed; the text names the cure."""


def need(name: str) -> Any:
    """A package of the extra ``report``.

    :raises MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the HTML report needs the package {error.name or name}, which is not installed: "
            f"pip install 'pytest-gpuguard[report]'"
        ) from error


class _Scale:
    """What leather asks of a scale. Its own count in decimals and search ticks anew each time: ten times as slow."""

    def __init__(self, low: float, high: float, ticks: Sequence[float]) -> None:
        self.low, self.high, self._ticks = low, high, list(ticks)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def project(self, value: float, start: float, end: float) -> float:
        return round(start + (value - self.low) / (self.high - self.low) * (end - start), 1)

    def ticks(self) -> list[float]:
        return self._ticks

    def format_tick(self, value: float, i: int, count: int) -> str:
        return f"{value:g}"


class _Shape:
    """What leather asks of a shape: everything within the axes is drawn by one function."""

    def __init__(self, draw: Callable[[Element, _Plane], None]) -> None:
        self._draw = draw

    def validate_series(self, series: Any) -> None:
        """Nothing to object to."""

    def to_svg(
        self, width: float, height: float, x_scale: _Scale, y_scale: _Scale, series: Any, palette: Any
    ) -> Element:
        group = Element("g")
        self._draw(group, _Plane(float(width), float(height), x_scale, y_scale))
        return group


class _Plane:
    """Where a point of the data lies in the drawing."""

    def __init__(self, width: float, height: float, x: _Scale, y: _Scale) -> None:
        self.width, self.height, self._x, self._y = width, height, x, y

    def x(self, value: float) -> float:
        return self._x.project(value, 0, self.width)

    def y(self, value: float) -> float:
        return self._y.project(value, self.height, 0)


def memory(phases: Mapping[str, float], limit: float | None, name: str) -> str:
    """The most memory in use in each phase, GiB, in their order; ``limit`` is what there was, as a line."""
    values = list(phases.values())
    top = max([*values, limit or 0.0, 1e-3])
    low, high, ticks = _nice(0.0, top)

    def draw(group: Element, plane: _Plane) -> None:
        wide = plane.width / len(values)
        for i, gib in enumerate(values):
            x, y = i * wide + wide * 0.12, plane.y(gib)
            SubElement(group, "rect", {"class": "bar", **_box(x, y, wide * 0.76, plane.height - y)})
        if limit is not None:
            level = _short(plane.y(limit))
            ends = {"x1": "0", "x2": _short(plane.width), "y1": level, "y2": level}
            SubElement(group, "line", {"class": "limit", **ends})
        for i, gib in enumerate(values):
            at = {"x": _short(i * wide + wide / 2), "y": _short(plane.y(gib) - 4)}
            SubElement(group, "text", {"class": "figure", **at}).text = f"{gib:.1f}"

    short = [plain(one.replace("_", " "), 40) for one in phases]
    middles = [i + 0.5 for i in range(len(values))]
    return _chart(
        _Scale(0, len(values), middles),
        _Scale(low, high, ticks),
        draw,
        lambda value, i, count: _cut(short[i], 96 // count),
        name,
    )


def trend(points: Sequence[Mapping[str, Any]], name: str) -> str:
    """A load's rate over runs, evenly spaced, with intervals; numbered lines where the stack changed before a run."""
    ends = [one[key] for one in points for key in ("low", "center", "high") if one[key] is not None]
    low, high, ticks = _nice(min(ends), max(ends), 0.08)
    last = len(points) - 1
    step = max(1, math.ceil(len(points) / _DATES))
    shown = list(range(0, len(points), step))

    def draw(group: Element, plane: _Plane) -> None:
        for number, i in marks(points):
            x = _short(plane.x(i - 0.5))
            SubElement(group, "line", {"class": "change", "x1": x, "x2": x, "y1": "0", "y2": _short(plane.height)})
            label = SubElement(group, "text", {"class": "mark", "x": x, "y": "-4"})
            label.text = str(number)
        at = [f"{plane.x(i):g} {plane.y(one['center']):g}" for i, one in enumerate(points)]
        bars = [
            f"M{plane.x(i):g} {plane.y(one['low']):g}V{plane.y(one['high']):g}"
            for i, one in enumerate(points)
            if one["low"] is not None
        ]
        for css, path in (("interval", "".join(bars)), ("line", "M" + "L".join(at)), ("dots", f"M{'h0M'.join(at)}h0")):
            if path:
                SubElement(group, "path", {"class": css, "d": path})

    days = [(one["when"] or "")[2 if len(points) > 1 else 0 : 10] for one in points]
    return _chart(
        _Scale(-0.7, last + 0.7, shown),
        _Scale(low, high, ticks),
        draw,
        lambda value, i, count: days[int(value)],
        name,
    )


def marks(points: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Number and index of the points before which the stack changed, the newest MARKS of them."""
    changed = [i for i, one in enumerate(points) if one["changes"]][-MARKS:]
    return [(number, i) for number, i in enumerate(changed, 1)]


def _chart(
    x: _Scale,
    y: _Scale,
    draw: Callable[[Element, _Plane], None],
    said: Callable[[float, int, int], str],
    name: str,
) -> str:
    leather = need("leather")
    chart = leather.Chart()
    chart.set_x_scale(x)
    chart.set_y_scale(y)
    chart.add_x_axis(tick_formatter=said)
    # Only its corners: leather's look at the data is a check that everything is within the scales.
    chart.add_series(leather.Series([(x.low, y.low), (x.high, y.high)]), _Shape(draw))
    group = chart.to_svg_group(WIDTH, HEIGHT)
    group.remove(group[0])  # its background
    theme = leather.theme
    text: str = tostring(group, encoding="unicode")
    text = text.replace(f' font-family="{theme.tick_font_family}" font-size="{theme.tick_font_size}"', "")
    for colour in (theme.label_color, theme.tick_color, theme.zero_color):
        text = text.replace(f' fill="{colour}"', "").replace(f' stroke="{colour}" stroke-width="1"', "")
    return (
        f'<svg class="chart" viewBox="0 10 {WIDTH} {HEIGHT - 26}" role="img" aria-label="{escape(plain(name))}">'
        f"{text}</svg>"
    )


def _nice(low: float, high: float, margin: float = 0.0) -> tuple[float, float, tuple[float, ...]]:
    """Ends and ticks of an axis that holds both."""
    if high - low < abs(high) * 0.02:  # else noise of a thousandth would fill the chart
        low, high = min(low, high * 0.97), max(high, low * 1.03)
    width = high - low
    places = 1 - math.floor(math.log10(width)) if width > 0 else 2
    if not -300 < places < 300:
        return low, high, (low, high)
    found_low = math.floor((low - width * margin) * 10**places) / 10**places
    found_high = math.ceil((high + width * (margin or 0.12)) * 10**places) / 10**places
    ticks = _ticks(round(found_low, max(places, 0)), round(found_high, max(places, 0)))
    return min(found_low, ticks[0]), max(found_high, ticks[-1]), ticks


@lru_cache(maxsize=4096)
def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers between the ends, as leather finds them; the ends alone where its decimals do not reach."""
    if max(abs(low), abs(high)) > _LARGEST or high - low < 1 / _LARGEST:
        return low, high
    linear = need("leather").Linear(low, high)
    found = tuple(float(one) for one in linear.ticks())
    return tuple(one for one in found if low <= one <= high) or (low, high)


def _box(x: float, y: float, width: float, height: float) -> dict[str, str]:
    return {"x": _short(x), "y": _short(y), "width": _short(width), "height": _short(max(height, 0))}


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 1)] + "…"
