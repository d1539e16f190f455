"""Whose log it is, and of which release: decided by what the lines themselves show, not by the first of them."""

from __future__ import annotations

import re
from typing import Final

from .lines import Peeled

_VLLM_VERSION: Final = re.compile(r"vLLM API server version (\d[\w.+]{0,40})")
#: What only one engine's frames and command line hold, for a log without its prefix.
_TELLTALES: Final = (
    ("sglang/srt/", "sglang"),
    ("launch_server.py", "sglang"),
    ("/vllm/v1/", "vllm"),
    ("/vllm/engine/", "vllm"),
)
#: So many more lines of one engine than of others settle whose log it is: the first may be of a package it imports.
_LEAD: Final = 3


class Whose:
    """Takes every line; ``engine`` is what was told, or what most lines say so far, None as long as none does."""

    def __init__(self, engine: str | None, version: str | None) -> None:
        self.engine = engine
        self.version = version
        self._voting = engine is None
        self._votes: dict[str, int] = {}

    @property
    def revision(self) -> int:
        """Counts what was learnt."""
        return sum(self._votes.values())

    @property
    def one_by_one(self) -> bool:
        """Whether all ranks of this engine print their phases, so that the last line tells where the boot is."""
        return self.engine in (None, "sglang")

    def line(self, peeled: Peeled) -> None:
        """Take a line."""
        if self._voting:
            body = peeled.body
            name = peeled.engine or next((name for mark, name in _TELLTALES if mark in body), None)
            if name is not None:
                self._vote(name)
        if self.version is None and "vLLM API server version" in peeled.body:
            match = _VLLM_VERSION.search(peeled.body)
            self.version = match[1] if match is not None else None

    def _vote(self, name: str) -> None:
        """A line is an engine's: the one with most of them wrote the log; of equals, the first."""
        votes = self._votes
        votes[name] = votes.get(name, 0) + 1
        self.engine = max(votes, key=lambda one: votes[one])
        self._voting = 2 * votes[self.engine] - sum(votes.values()) < _LEAD
