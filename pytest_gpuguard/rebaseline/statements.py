"""What a claim should state instead, after what was observed. It must never state a failure that nobody understood."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..claims.expect import Expectation, Ignores, Unsupported, Uses
from ..claims.observation import Observation
from ..claims.outcome import READY, STACK_FAILURES, UNDECIDED
from ..claims.verdict import CRASHES, CRASHES_IF_MATCHED, REJECTIONS
from .values import Refusal

#: Of the words of a line that make a pattern: at least, and at most.
_WORDS: Final = (2, 9)
_LONGEST: Final = 80
_PREFIX: Final = re.compile(r"^\s*(?:\[[^\]]*\]\s*|\(\w[^)]*\)\s*|[A-Z]+\s+\d\d-\d\d\s\S+\s+)+")
_SPECIAL: Final = re.compile(r"([\\.^$*+?{}\[\]|()])")


@dataclass(frozen=True, slots=True)
class Statement:
    """An expectation as source text: its name, its arguments, its window."""

    name: str
    arguments: tuple[str, ...] = ()
    when: str | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """All arguments, the window last."""
        return (*self.arguments, *((f"when={literal(self.when)}",) if self.when is not None else ()))

    def text(self, spelled: str | None = None) -> str:
        """``fits(when="sglang>=0.5.9")``, or how the file spells the name."""
        return (spelled or self.name) + (f"({', '.join(self.given)})" if self.given else "")


def literal(text: str) -> str:
    """A string as source text, in double quotes where it may."""
    if not text.isprintable() or '"' in text:
        return repr(text)
    if "\\" not in text:
        return f'"{text}"'
    return f'r"{text}"' if not text.endswith("\\") else repr(text)


def instead(old: Expectation | None, outcome: str, observation: Observation) -> Statement:
    """What holds of this observation in place of ``old``, which does not. Raises Refusal."""
    if outcome == READY:
        if isinstance(old, Uses):
            return Statement("unsupported", (literal(old.feature), 'how="falls_back"'))
        if isinstance(old, Ignores):
            return Statement("uses", (literal(old.flag),))
        if isinstance(old, Unsupported) and not old.negative:
            return Statement("uses", (literal(old.what),))
        return Statement("fits")
    if outcome in UNDECIDED or outcome not in STACK_FAILURES:
        raise Refusal(f"it came out as {outcome}, which says nothing that a claim could state")
    if outcome.startswith("oom."):
        return Statement("ooms", (literal(outcome.removeprefix("oom.")),))
    line = observation.decisive.text if observation.decisive is not None else ""
    if isinstance(old, Unsupported):
        found = _unsupported(old, outcome, line)
        if found is not None:
            return found
    return Statement("fails", (literal(outcome), *_match(words_of(line))))


def _unsupported(old: Unsupported, outcome: str, line: str) -> Statement | None:
    """The same feature, refused or crashing in another way; None where this failure is about something else."""
    match = old.match if old.match is not None and re.search(old.match, line) else words_of(line)
    how: str | None
    if outcome in REJECTIONS and outcome in CRASHES:
        how = old.how if old.match == match else None  # refused or crashed: the outcome does not tell
    elif outcome in REJECTIONS:
        how = "rejected"
    elif outcome in CRASHES or (outcome in CRASHES_IF_MATCHED and match is not None):
        how = "crashes"
    else:
        return None
    wanted = old.match is not None or outcome in CRASHES_IF_MATCHED
    silent = how is None or (old.how is None and outcome not in CRASHES_IF_MATCHED)
    given = [] if silent else [f"how={literal(str(how))}"]
    return Statement("unsupported", (literal(old.what), *given, *(_match(match) if wanted else ())))


def _match(pattern: str | None) -> tuple[str, ...]:
    return (f"match={literal(pattern)}",) if pattern is not None else ()


def words_of(line: str) -> str | None:
    """A pattern for the longest run of words of a log line that another boot would print too; None without one.

    Numbers, addresses, paths and times differ from boot to boot.
    """
    runs: list[list[str]] = [[]]
    for word in _PREFIX.sub("", line[:1000]).split(" "):
        if _varies(word):
            runs.append([])
        else:
            runs[-1].append(word)
    best = max((run[: _WORDS[1]] for run in runs), key=_weight)
    while best and len(" ".join(best)) > _LONGEST:
        best = best[:-1]
    text = " ".join(best)
    if len(best) < _WORDS[0] and len(text) < 12:
        return None
    return _SPECIAL.sub(r"\\\1", text)


def _varies(word: str) -> bool:
    """Whether a word may be another one next time. ``SM90`` stays, ``0x7f``, ``12.3``, ``/tmp/a`` do not."""
    if not word or not word.isprintable() or "/" in word or "***" in word or "=" in word:
        return True
    return re.search(r"^\W*\d|0x[0-9a-fA-F]|\d{4}|[0-9a-f]{8}", word) is not None


def _weight(run: Sequence[str]) -> int:
    return sum(map(len, run))
