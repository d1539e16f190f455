"""What earlier runs on this machine verified, on which stack, and how long it took; and what this run notes of it.

It must never take a rehearsal for a verification, nor ask for a fact by itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from .plan import BESIDE_BOOT

if TYPE_CHECKING:
    from ..claims.claim import Claim
    from ..claims.observation import Observation
    from ..claims.series import Baseline
    from ..facts.gpu import Rig
    from ..facts.stack import Stack

T = TypeVar("T")

#: What a claim takes of which nobody knows, in seconds; and one that neither boots nor leases anything.
DEFAULT_S: Final = 300.0
DEFAULT_PLAIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The last verdict that said something about a claim. ``when`` is that run's end (epoch), ``parts`` its stack."""

    verdict: str
    when: float
    parts: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often in a row, since it was last verified, a claim was run without any verdict on it, and when last."""

    number: int = 0
    when: float = 0.0


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long a claim took, the median of the last runs: its boots with their stop (None: it had none), the rest."""

    boot: float | None
    rest: float


class History(Protocol):
    """What is known of claims from before, by the name that ``key_of`` gives them."""

    def last(self, claim_id: str) -> Seen | None:
        """The last verdict that counts; None when there was none yet."""

    def attempts(self, claim_id: str) -> Attempts:
        """The runs since then that could not verify it."""

    def expected_seconds(self, claim_id: str) -> Seconds | None:
        """How long it takes; None when nobody has measured it."""

    def baseline(self, claim_id: str, subject: str, cards: Sequence[str]) -> Baseline | None:
        """The highest rate of a load that was surely reached on such cards; None when none was verified yet."""


@dataclass(frozen=True, slots=True)
class Expected:
    """How long a test is expected to take with its boot, in seconds; ``boot_seconds`` is None when nobody knows.

    ``source`` is how that is known, in words.
    """

    seconds: float
    boot_seconds: float | None
    source: str

    @property
    def beside_boot(self) -> float:
        """What it takes when its server is up already."""
        if self.boot_seconds is None:
            return self.seconds * BESIDE_BOOT
        return max(self.seconds - self.boot_seconds, 0.0)

    def __str__(self) -> str:
        """``5 min, by default``."""
        return f"{span(self.seconds)}, {self.source}"


def key_of(claim_id: str, nodeid: str) -> str:
    """The name of a claim here: its id; with the parameters of its test, which may be many under one id."""
    parameters = nodeid.partition("::")[2].partition("[")[2]
    return f"{claim_id}[{parameters}" if parameters and claim_id != nodeid else claim_id


def expected_of(
    claim: Claim,
    nodeid: str,
    history: History | None = None,
    plain: bool = False,
    shared: Callable[[], Seconds | None] = lambda: None,
) -> Expected:
    """How long a claim takes: as measured before, else as ``claim(minutes=…)`` says, else by default.

    ``plain``: it neither boots nor leases anything. ``shared`` is asked what the ledger knows where ``history``, which
    is this machine's own, knows nothing.
    """
    known = history.expected_seconds(key_of(claim.about.id or nodeid, nodeid)) if history is not None else None
    source = "as measured before"
    if known is None:
        known, source = shared(), "as in the ledger"
    if known is not None:
        return Expected((known.boot or 0.0) + known.rest, known.boot or 0.0, source)
    if claim.about.minutes is not None:
        return Expected(claim.about.minutes * 60, None, "as claim(minutes=…) says")
    return Expected(DEFAULT_PLAIN_S if plain else DEFAULT_S, None, "by default")


def span(seconds: float) -> str:
    """``45 s``, ``5 min``, ``24.1 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    amount, unit = (seconds / 60, "min") if seconds < 7200 else (seconds / 3600, "h")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


# ------------------------------------------------------------------------------------------------------ what is noted


class Stopwatch:
    """Times one test: all of it, and apart from that the boots that it waited for (leases included)."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._boots = 0.0

    def boot(self, work: Callable[[], T]) -> T:
        """Do the work of a boot."""
        before = time.monotonic()
        try:
            return work()
        finally:
            self._boots += time.monotonic() - before

    def seconds(self, observations: Iterable[Observation]) -> dict[str, float | None]:
        """``boot``: what its servers took to come up, whoever waited for that; ``rest``: the test without boots."""
        boots = [one.elapsed_s for one in observations if one.elapsed_s is not None]
        rest = time.monotonic() - self._started - self._boots
        return {"boot": round(sum(boots), 2) if boots else None, "rest": round(max(rest, 0.0), 2)}


def parts_of(stack: Stack | None, rig: Rig | None) -> dict[str, str | None]:
    """What a verdict was true on, in short. Give no rig for a claim that GPUs and driver do not concern."""
    from ..facts.stack import NAMED_PACKAGES

    parts: dict[str, str | None] = {}
    if rig is not None:
        parts["driver"] = rig.driver
        parts["gpus"] = ", ".join(sorted({gpu.name for gpu in rig.usable})) or None
    if stack is not None:
        found = stack.fingerprint()
        parts |= {name: found[name] for name in ("python", "torch", "torch_cuda", *NAMED_PACKAGES)}
        everything = json.dumps(found["packages"], sort_keys=True)
        parts["packages"] = hashlib.sha256(everything.encode()).hexdigest()[:12]
    return parts


def changed_parts(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> tuple[str, ...]:
    """What differs, such as ``sglang 0.5.22 → 0.5.23``. A part that only one of the two knows of is no change."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    named = [name for name in changed if name != "packages"]
    if changed and not named:
        return ("other packages",)
    return tuple(f"{name} {before[name] or 'none'} → {now[name] or 'none'}" for name in named)
