"""One run as one self-contained page that works offline, without JavaScript, on a phone, in the light and in the dark.

It must never run or draw what a log says: every text is escaped, and the page's policy admits no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from html import escape
from importlib.resources import files
from typing import Any, Final

from ..claims.stats import CONFIDENCE
from . import curves
from .curves import MissingExtra, need
from .flips import tally
from .words import plain

__all__ = ["MissingExtra", "html"]

#: Rows of a measured history, the newest, and changes that are told beside a chart.
_ROWS: Final = 6
_TOLD: Final = 8
_SHOWN: Final = {
    "avail_before_gib": "free before the weights",
    "total_gib": "the card",
    "weights_gib": "weights",
    "avail_after_weights_gib": "free after the weights",
    "reserved_gib": "held back",
    "rest_gib": "left for the KV pool",
    "kv_gib": "KV pool",
    "graph_gib": "graphs",
    "free_gib": "free at the end",
}


def html(document: Mapping[str, Any]) -> str:
    """The page of a document that ``document()`` made.

    :raises MissingExtra: the extra ``report`` is not installed.
    """
    return str(_template().render(**_context(document)))


def _context(document: Mapping[str, Any]) -> dict[str, Any]:
    markup = need("markupsafe").Markup
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    anchors = {_named(one): f"c{i}" for i, one in enumerate(document["claims"], 1)}
    return {
        **{name: document[name] for name in ("run", "label", "notice", "counts", "claims", "differences", "stacks")},
        "side_by_side": document["side_by_side"],
        "flips_found": document["flips"],
        "headline": _headline(document),
        "parts": _parts(document["stacks"]),
        "covered": [(kind, lines) for kind, lines in document["coverage"].items() if lines],
        "anchor_of": lambda flip: anchors.get(_named(flip)),
        "style": markup(_asset("style.css")),
        "script": markup(script),
        "script_hash": digest,
        "confidence": f"{CONFIDENCE:.0%}".rstrip("%"),
    }


def _named(one: Mapping[str, Any]) -> tuple[str, str, str]:
    return (one["claim"], one["stack"], one["nodeid"])


def _headline(document: Mapping[str, Any]) -> str:
    claims, flips = document["counts"]["claims"], document["flips"]
    said = f"{claims} claim{'s' if claims != 1 else ''}"
    return (
        f"{len(flips)} of {said} flipped: {tally(one['sort'] for one in flips)}" if flips else f"{said}, none flipped"
    )


def _parts(stacks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of components, those that differ first."""
    rows = []
    for name in sorted({name for one in stacks for name in one["components"]}):
        values = [_component(one["components"], name) for one in stacks]
        rows.append({"name": name, "cells": values, "differs": len(set(values) - {"?"}) > 1})
    return sorted(rows, key=lambda row: not row["differs"])


def _component(components: Mapping[str, str | None], name: str) -> str:
    value = components.get(name)
    return value if value is not None else ("absent" if name in components else "?")


@lru_cache(maxsize=1)
def _template() -> Any:
    jinja2 = need("jinja2")
    markup = need("markupsafe").Markup

    def final(value: Any) -> Any:
        # Whoever made the document: nothing that acts on a screen, and nothing without an end, gets into the page.
        if type(value) is str and (len(value) > 4000 or not value.isprintable()):
            return plain(value)
        return "" if value is None else value

    environment = jinja2.Environment(
        autoescape=True,
        finalize=final,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_asset),
    )
    environment.filters |= {
        "css": lambda verdict: "".join(_class(verdict)),
        "cut": lambda text, limit: plain(text, limit),
        "span": _span,
        "figure": lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}",
        "command": lambda argv: shlex.join(argv),
        "memory": partial(_memory, markup),
        "history": partial(_history, markup),
    }
    return environment.get_template("report.html.j2")


def _class(verdict: str) -> Iterable[str]:
    """``CONTRADICTED (worse)`` → ``worse``: letters and underscores only."""
    return (one for one in verdict.removeprefix("CONTRADICTED") if one.isascii() and (one.isalpha() or one == "_"))


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _memory(markup: Any, claim: Mapping[str, Any]) -> Any:
    """The boot's memory: a chart of its phases, and the table of what the engine measured."""
    sizes = {said: claim["memory"].get(name) for name, said in _SHOWN.items()}
    rows = [(said, f"{gib:.2f}") for said, gib in sizes.items() if gib is not None]
    phases = claim["peak_phases"]
    tokens = claim["memory"].get("kv_tokens")
    if tokens is not None:
        rows.append(("KV pool, tokens", f"{tokens:,.0f}"))
    if not rows and not phases:
        return ""
    parts = ["<div><h4>GPU memory, GiB</h4>"]
    if phases:
        limit = claim["memory"].get("total_gib") or claim["memory"].get("avail_before_gib")
        parts.append(curves.memory(phases, limit, "GPU memory in use at most, by phase of the boot"))
        there = f"; dashed: {limit:.1f} there at the start" if limit else ""
        parts.append(f'<p class="small">most in use in each phase of the boot{there}</p>')
    parts += [f"<table><tbody>{''.join(_row(said, figure) for said, figure in rows)}</tbody></table></div>"]
    return markup("".join(parts))


def _row(first: str, *figures: str, last: str = "") -> str:
    numbers = "".join(f'<td class="n">{_safe(one)}</td>' for one in figures)
    return f"<tr><td>{_safe(first)}</td>{numbers}{f'<td>{_safe(last)}</td>' if last else ''}</tr>"


def _history(markup: Any, claim: Mapping[str, Any]) -> Any:
    """A chart for each load that was measured more than once, what its vertical lines are, and the last figures."""
    parts = []
    for load, one in claim["history"].items():
        points = one["points"]
        if len(points) < 2:
            continue
        older = f", {one['left_out']} older ones left out" if one["left_out"] else ""
        parts.append(f'<div><h4>rate over {len(points)} runs{older}</h4><p class="small mono">{_safe(load)}</p>')
        parts.append(curves.trend(points, f"rate of {load} over {len(points)} runs"))
        marks = curves.marks(points)
        if marks:
            told = "".join(f'<li value="{number}">{_safe(_changes(points[i]))}</li>' for number, i in marks[-_TOLD:])
            parts.append(f'<p class="small">Lines: what changed before that run.</p><ol class="small">{told}</ol>')
        rows = [
            _row(
                (point["when"] or "?")[:10],
                f"{point['center']:.4g}",
                f"{point['low']:g}–{point['high']:g}" if point["low"] is not None else f"{point['n']} samples",
                last=point["verdict"],
            )
            for point in points[: -_ROWS - 1 : -1]
        ]
        parts.append(f"<table><tbody>{''.join(rows)}</tbody></table></div>")
    return markup("".join(parts))


def _changes(point: Mapping[str, Any]) -> str:
    """``2026-01-30 driver 570.86 → 580.65; …``, the shortest three."""
    changed = point["changes"]
    said = "; ".join(f"{one['component']} {_there(one['before'])} → {_there(one['now'])}" for one in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{(point['when'] or '?')[:10]} {said}{more}"


def _safe(text: str) -> str:
    return escape(plain(text))


def _there(value: str | None) -> str:
    return "absent" if value is None else value


@lru_cache(maxsize=8)
def _asset(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")
