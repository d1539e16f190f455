"""The one error of a claim that is written wrongly. Says what is wrong and what would be right; knows no pytest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClaimError(ValueError):
    """A claim's declaration cannot be understood: shown at collection with file and line."""


def suggest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'kv_tokens'?"``, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
