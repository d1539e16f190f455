"""The stand-in's log: the lines of a release, by its main process and its ranks, with their prefixes.

It writes to stderr as SGLang does, and puts its own words after ``gpuguard-sim:``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..claims.layout import Layout
from .effects import NO_RULE, OWN
from .release import Release


@dataclass(frozen=True, slots=True)
class Rank:
    """One scheduler process: its place in each kind of parallelism, and the ordinal of its GPU within the boot's."""

    gpu: int
    dp: int
    pp: int
    tp: int
    ep: int


def ranks_of(layout: Layout) -> tuple[Rank, ...]:
    """Every rank of a layout, in the order of their GPUs (sglang/srt/managers: replicas, then stages, then tp)."""
    replicas = 1 if layout.dp_attention else layout.dp
    found = []
    for replica in range(replicas):
        for stage in range(layout.pp):
            for tp in range(layout.tp):
                dp = tp // max(layout.attention_tp, 1) if layout.dp_attention else replica
                ep = tp // max(layout.moe_tp, 1)
                found.append(Rank((replica * layout.pp + stage) * layout.tp + tp, dp, stage, tp, ep))
    return tuple(found)


class Log:
    """Writes what main process and ranks print. ``ranks`` are those of the layout."""

    def __init__(self, release: Release, layout: Layout, ranks: Sequence[Rank]) -> None:
        self._release = release
        self._layout = layout
        self.ranks = tuple(ranks)

    def say(self, name: str, values: Mapping[Rank, Mapping[str, Any]] | None = None, **same: Any) -> None:
        """One line of the table, by everybody who prints it; nothing where this release has no such line.

        ``values`` are a rank's own, ``same`` are everybody's.
        """
        line = self._release.lines.get(name)
        if line is None:
            return
        for rank in self._by(line.by):
            own = dict(values.get(rank, {})) if values is not None and rank is not None else {}
            self.line(line.text.format(**(same | own)), rank)

    def text(self, name: str, **values: Any) -> str:
        """The text of a line, to be put into another one; "" where this release has none."""
        line = self._release.lines.get(name)
        return line.text.format(**values) if line is not None else ""

    def by(self, who: str, text: str, values: Mapping[Rank, Mapping[str, Any]] | None = None, **same: Any) -> None:
        """A line that is no entry of the table, such as a gate's, by main, first or each."""
        for rank in self._by(who):
            own = dict(values.get(rank, {})) if values is not None and rank is not None else {}
            self.line(text.format(**(same | own)), rank)

    def line(self, message: str, rank: Rank | None = None) -> None:
        """One message with its prefix."""
        self._write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{self._prefix(rank)}] {message}\n")

    def raw(self, text: str) -> None:
        """Text as it is: tracebacks and argparse's words."""
        self._write(text if text.endswith("\n") else text + "\n")

    def own(self, text: str) -> None:
        """A line of the stand-in's own."""
        self._write(f"{OWN}{text}\n")

    def no_rule(self, what: str) -> None:
        """Say that a setting has no rule; whoever reads it judges nothing by this boot."""
        self._write(f"{NO_RULE}{' '.join(what.split())}\n")

    def _by(self, who: str) -> tuple[Rank | None, ...]:
        return {"main": (None,), "first": self.ranks[:1]}.get(who, self.ranks)

    def _prefix(self, rank: Rank | None) -> str:
        if rank is None:
            return ""
        layout = self._layout
        shown = {"DP": layout.dp > 1, "PP": layout.pp > 1, "TP": layout.tp > 1, "EP": layout.ep > 1}
        if self._release.ranks_always:
            shown |= {"TP": True, "EP": False}
        numbers = {"DP": rank.dp, "PP": rank.pp, "TP": rank.tp, "EP": rank.ep}
        return "".join(f" {name}{numbers[name]}" for name in self._release.prefix if shown[name])

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
