"""What one judgement is, and the words for the facts that it rests on. Decides nothing and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from .account import details, differences, short, with_differences
from .outcome import STARTING

if TYPE_CHECKING:
    from .observation import Observation

__all__ = [
    "NOT_RUN",
    "Body",
    "Judgement",
    "Verdict",
    "decisive",
    "details",
    "differences",
    "ready",
    "short",
    "with_differences",
    "worst",
]


class Verdict(str, Enum):
    """What became of an expectation. Order of definition is from worst to best."""

    INFRA = "INFRA"
    WORSE = "CONTRADICTED (worse)"
    CHANGED = "CHANGED"
    BETTER = "CONTRADICTED (better)"
    INCONCLUSIVE = "INCONCLUSIVE"
    UNSTATED = "UNSTATED"
    NOT_EVALUATED = "NOT_EVALUATED"
    HOLDS = "HOLDS"

    @property
    def severity(self) -> int:
        """0 is the worst."""
        return list(Verdict).index(self)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Body:
    """What the test's own code did after the server was ready. ``error`` is one line; ``kind`` says whose it is.

    ``kind``: ``passed``, ``assertion`` (contradicts a positive claim), ``skip``, ``error`` (the test's own fault),
    ``timeout`` (a deadline of ours or the user's passed in it), ``not_run``.
    """

    kind: str = "not_run"
    error: str | None = None
    #: For ``skip``: what it is counted by.
    reason: str = "skip"


NOT_RUN: Final = Body()


@dataclass(frozen=True, slots=True)
class Judgement:
    """One expectation's verdict. ``fact`` is the decisive fact in one line; ``details`` is for a person who must act.

    ``reason`` is the kind of an unmet need, for counting, when the verdict is NOT_EVALUATED. ``warning`` is what a
    person should know although it changes no verdict.
    """

    expectation: str
    verdict: Verdict
    outcome: str
    fact: str
    details: tuple[str, ...] = ()
    reason: str | None = None
    warning: str | None = None
    #: What it is about, where several judgements of a claim may have one label.
    subject: str | None = None


def worst(judgements: Sequence[Judgement]) -> Judgement:
    """The judgement that decides the test."""
    return min(judgements, key=lambda judgement: judgement.verdict.severity)


def ready(observation: Observation) -> str:
    """``ready in 42 s``; of a probe, ``answered in 2 s: 8 GPUs``."""
    from .observation import PROBE  # what only names verdicts does without observations

    if observation.engine == PROBE:
        said = f": {short(observation.note)}" if observation.note else ""
        return f"answered in {observation.elapsed_s or 0.0:.0f} s{said}"
    return "ready" + (f" in {observation.elapsed_s:.0f} s" if observation.elapsed_s is not None else "")


def decisive(observation: Observation) -> str:
    """Outcome and the line that decides it, in one line."""
    said = observation.decisive.text.strip() if observation.decisive else observation.note or observation.why
    if not said and observation.outcome == STARTING:
        said = f"healthy so far, the log ends in phase {observation.phase}"
    if not said:
        said = observation.tail[-1].strip() if observation.tail else "the log is empty"
    return f"{observation.outcome}: {short(said)}"
