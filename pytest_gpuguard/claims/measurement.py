"""What the GPUs did meanwhile, as frozen values: peaks of memory, and conditions under which a sample was taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SAMPLED: Final = "sampled"
ACCOUNTING: Final = "accounting"
#: How a line of ``Conditions.slowed`` names the software power cap, which a busy serving card may well be at.
POWER_LIMIT: Final = "power limit"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory in use on any one GPU above its baseline, in GiB. ``source`` is "sampled" or "accounting".

    A sampled peak is a lower bound: a spike shorter than ``interval_s`` (seconds) may have been missed. The driver's
    accounting knows the exact peak of a process. ``samples`` counts sweeps over all GPUs, ``gaps`` the moments when no
    sweep was made for over two intervals. ``phases`` are (log phase, peak in GiB within it), always sampled.
    ``missing`` are GPUs that could not be sampled, or not to the end.
    """

    gib: float
    uuid: str
    source: str = SAMPLED
    interval_s: float = 0.02
    samples: int = 0
    gaps: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = "driver accounting"
        if self.source != ACCOUNTING:
            gaps = f" with {self.gaps} gap{'s' * (self.gaps > 1)}" if self.gaps else ""
            how = f"sampled every {self.interval_s * 1000:.3g} ms{gaps}, at least"
        if self.missing:
            how += f"; without {', '.join(self.missing)}"
        return f"{self.gib:.2f} GiB ({how})"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the GPUs did between two moments, one line each.

    ``slowed`` says what held the clocks down, or that they fell; ``foreign`` names processes of others that used a
    GPU; ``unknown`` what could not be asked, or not be told apart; ``silent`` GPUs that did not answer at all.
    """

    slowed: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
