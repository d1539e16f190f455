"""Pass over what a log repeats by the million: lines like one that was judged and said nothing.

It must never change what a log means: two lines are alike only where no digit could make a difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from .data import has_digit
from .signature import Signature, SignatureSet
from .spellings import load_spellings

_SHAPES: Final = 8192
_DIGITS: Final = b"0123456789"
_ZEROS: Final = bytes.maketrans(_DIGITS, b"0" * len(_DIGITS))
#: Words of lines whose numbers are remembered.
_NUMBERS: Final = (b"vLLM API server version", b"fraction", b"gpu_memory_utilization")
#: A line that may be remembered by its shape; a record of JSON may not, since its digits decide whether it is one.
_ORDINARY: Final = re.compile(rb"[^\x00-\x1f\x7f{][^\x00-\x1f\x7f]{0,4000}\r?\n")


class Skim:
    """The shapes of lines, each digit a zero, that have said nothing since the log last said something."""

    def __init__(self, signatures: SignatureSet, by_digits: Iterable[str] = ()) -> None:
        """``by_digits``: what else lines hold whose digits tell what they mean."""
        self._calm: set[bytes] = set()
        self._state: object = None
        self._telling = tuple({*_telling(signatures), *filter(None, map(_bare, by_digits))})

    def over(self, data: bytes, start: int) -> tuple[int, int]:
        """Where the first line begins that must be judged, and how many were passed over.

        ``data[start:]`` must begin a line.
        """
        calm, count = self._calm, 0
        find = data.find
        while calm:
            end = find(b"\n", start) + 1
            if not end or data[start:end].translate(_ZEROS) not in calm:
                break
            count += 1
            start = end
        return start, count

    def judged(self, raw: bytes, state: object, settled: bool) -> None:
        """A line was judged and left the reader in this ``state``; b"" for what is no whole line.

        If it changed nothing it is remembered by its shape; if it did, all shapes are forgotten. ``settled``: nothing
        is open that one more line like it could change, whichever rank prints it.
        """
        if state != self._state:
            self._state = state
            self._calm.clear()
        elif settled and _ORDINARY.fullmatch(raw) is not None:
            bare = raw.translate(None, _DIGITS)
            if any(literal in bare for literal in self._telling):
                return
            if len(self._calm) >= _SHAPES:
                self._calm.clear()
            self._calm.add(raw.translate(_ZEROS))


@lru_cache(maxsize=32)
def _telling(signatures: SignatureSet) -> tuple[bytes, ...]:
    """The literals of lines whose digits tell what they mean, without their digits."""
    rules = load_spellings().rules
    literals = [literal for one in signatures.all() if _by_digits(one) for literal in one.any]
    words = [text for rule in rules for text in (rule.literal, rule.starts)]
    words += [*signatures.deaths, *signatures.stops, *signatures.ready, *signatures.dumps, *signatures.mild]
    literals += [word for word in words if has_digit(word)]
    return tuple(dict.fromkeys((*_NUMBERS, *filter(None, map(_bare, literals)))))


def _by_digits(signature: Signature) -> bool:
    pattern = signature.pattern.pattern if signature.pattern is not None else ""
    return has_digit(*signature.any, *signature.exclude, pattern)


def _bare(text: str) -> bytes:
    return text.encode().translate(None, _DIGITS)
