"""What a server that says it is ready really answered, one check after another, and what may be concluded from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

#: Of a 95 % interval.
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was asked of a server. ``ok`` is None where it could not be checked, for the reason in ``fact``.

    ``outcome`` says what kind of failure it is when not ``ok``: ``numerics`` when the answer itself is nonsense;
    ``unknown`` or ``hang.timeout`` when there was none, where log and process tell the cause.
    """

    name: str
    ok: bool | None
    fact: str
    outcome: str = "ready"


@dataclass(frozen=True, slots=True)
class Answers:
    """All checks of one server; ``correct`` of ``total`` questions were answered, where any were asked."""

    level: str
    checks: tuple[Check, ...]
    correct: int | None = None
    total: int | None = None
    #: Whether what was answered meant anything: not with dummy weights.
    judged: bool = True

    @property
    def ok(self) -> bool | None:
        """False when a check failed, None when one could not be made (or there is none), else True."""
        if self.first_bad is not None:
            return False
        return None if not self.checks or any(check.ok is None for check in self.checks) else True

    @property
    def first_bad(self) -> Check | None:
        """The first check that failed."""
        return next((check for check in self.checks if check.ok is False), None)

    @property
    def first_open(self) -> Check | None:
        """The first check that could not be made."""
        return next((check for check in self.checks if check.ok is None), None)

    @property
    def accuracy(self) -> float | None:
        """Share of the questions that was answered correctly, 0 to 1; None when none was asked."""
        return self.correct / self.total if self.correct is not None and self.total else None

    @property
    def accuracy_interval(self) -> tuple[float, float] | None:
        """95 % Wilson interval of the accuracy."""
        return wilson(self.correct, self.total) if self.correct is not None and self.total else None


def wilson(correct: int, total: int) -> tuple[float, float]:
    """95 % Wilson score interval of a share, 0 to 1: honest also for few questions and for none or all correct."""
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"{correct} of {total} is no share")
    share, scale = correct / total, 1 + _Z**2 / total
    middle = (share + _Z**2 / (2 * total)) / scale
    half = _Z / scale * sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    return (max(0.0, middle - half) if correct else 0.0), (min(1.0, middle + half) if correct < total else 1.0)
