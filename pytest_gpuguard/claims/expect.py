"""What a claim expects, as frozen values: one class per expectation, each of which can say itself in one line.

An expectation never measures anything. ``when`` is the window of stacks for which it is stated; None means all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from .units import Comparison
from .window import Window

if TYPE_CHECKING:
    from .claim import Serves


@dataclass(frozen=True, slots=True)
class Expectation:
    """What should be observed."""

    kind: ClassVar[str] = "expectation"
    when: Window | None = field(default=None, kw_only=True)

    @property
    def negative(self) -> bool:
        """Whether it holds when the boot fails, and then for the claimed reason only."""
        return False

    @property
    def label(self) -> str:
        """How the claim's author would write it, without the window; the key of a judgement within its claim."""
        return self.kind

    @property
    def subject(self) -> str:
        """What two expectations of a kind must share to be about the same thing."""
        return self.kind


@dataclass(frozen=True, slots=True)
class Fits(Expectation):
    """The server comes up; optionally with so much memory left (GiB) or so many KV tokens."""

    kind = "fits"
    margin_gib: float | None = None
    kv_tokens: Comparison | None = None

    @property
    def label(self) -> str:
        """``fits(margin=2GiB, kv_tokens>=262144)``."""
        parts = [f"margin={self.margin_gib:g}GiB"] if self.margin_gib is not None else []
        parts += [f"kv_tokens{self.kv_tokens}"] if self.kv_tokens is not None else []
        return f"fits({', '.join(parts)})" if parts else "fits"


@dataclass(frozen=True, slots=True)
class Works(Expectation):
    """The server answers sensibly once it is ready."""

    kind = "works"
    level: str = "short"
    accuracy: Comparison | None = None
    questions: str | None = None
    reference: str | None = None

    @property
    def label(self) -> str:
        """``works(full)``."""
        return f"works({self.level})"


@dataclass(frozen=True, slots=True)
class Ooms(Expectation):
    """Memory runs out in one of these phases."""

    kind = "ooms"
    phases: tuple[str, ...] = ()

    @property
    def negative(self) -> bool:
        """A failed boot is what is claimed."""
        return True

    @property
    def label(self) -> str:
        """``ooms(weights)``."""
        return f"ooms({', '.join(self.phases)})" if self.phases else "ooms"


@dataclass(frozen=True, slots=True)
class Unsupported(Expectation):
    """The stack refuses a feature, crashes on it, or silently runs without it (``how``)."""

    kind = "unsupported"
    what: str = ""
    how: str | None = None
    match: str | None = None

    @property
    def negative(self) -> bool:
        """A failed boot is what is claimed, except where the server comes up without the feature."""
        return self.how != "falls_back"

    @property
    def label(self) -> str:
        """``unsupported(flashinfer allreduce fusion)``."""
        return f"unsupported({self.what})"

    @property
    def subject(self) -> str:
        """The feature."""
        return self.label


@dataclass(frozen=True, slots=True)
class Fails(Expectation):
    """The boot fails with this outcome."""

    kind = "fails"
    outcome: str = ""
    match: str | None = None

    @property
    def negative(self) -> bool:
        """A failed boot is what is claimed."""
        return True

    @property
    def label(self) -> str:
        """``fails(hang.timeout)``."""
        return f"fails({self.outcome})"


@dataclass(frozen=True, slots=True)
class Uses(Expectation):
    """The running server shows positive evidence of a feature."""

    kind = "uses"
    feature: str = ""

    @property
    def label(self) -> str:
        """``uses(custom_allreduce)``."""
        return f"uses({self.feature})"

    @property
    def subject(self) -> str:
        """The feature."""
        return self.label


@dataclass(frozen=True, slots=True)
class Ignores(Expectation):
    """The running server shows positive evidence that a flag had no effect."""

    kind = "ignores"
    flag: str = ""

    @property
    def label(self) -> str:
        """``ignores(--enable-x)``."""
        return f"ignores({self.flag})"

    @property
    def subject(self) -> str:
        """The flag."""
        return self.label


@dataclass(frozen=True, slots=True)
class MaxMem(Expectation):
    """At most so many GiB per GPU, of what the engine reports for ``of``."""

    kind = "max_mem"
    limit_gib: float = 0.0
    of: str = "static"

    @property
    def label(self) -> str:
        """``max_mem(75GiB, of=weights)``."""
        return f"max_mem({self.limit_gib:g}GiB, of={self.of})"

    @property
    def subject(self) -> str:
        """Which memory."""
        return f"max_mem({self.of})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated(Expectation):
    """A rate under a load shape: lengths in tokens, ``limit_s`` for all of its samples, in seconds.

    ``per``: the rate of all requests together ("total"), or of one of them ("request").
    """

    concurrency: int = 1
    input_len: int = 128
    output_len: int = 64
    per: str = "total"
    limit_s: float = 300.0

    @property
    def shape(self) -> str:
        """``concurrency=8, input_len=1024``: the load, without what is usual."""
        parts = [f"concurrency={self.concurrency}"]
        for name, usual in (("input_len", 128), ("output_len", 64), ("per", "total")):
            value = getattr(self, name)
            parts += [f"{name}={value}"] if value != usual else []
        return ", ".join(parts)

    @property
    def subject(self) -> str:
        """The load shape; samples are kept under it."""
        return f"{self.kind}({self.concurrency}, {self.input_len}, {self.output_len}, {self.per})"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The claimed range of the true rate or ratio; None where it has no end."""
        return None, None


@dataclass(frozen=True, slots=True)
class ExpectToks(Rated):
    """Output tokens per second at a load shape: a floor (``minimum``) or a reference with a tolerance (``about``).

    ``cards`` are references by card, in place of the one number: ``by`` says whether they are floors.
    """

    kind = "expect_toks"
    minimum: float | None = None
    about: float | None = None
    tolerance: float = 0.05
    cards: tuple[tuple[str, float], ...] = ()
    by: str = "min"

    @property
    def label(self) -> str:
        """``expect_toks(min=60, concurrency=1)``, and the lengths where they are not the usual ones."""
        if self.cards:
            size = f"{self.by} by card" + (f"±{self.tolerance:.0%}" if self.by == "about" else "")
        elif self.minimum is not None:
            size = f"min={self.minimum:g}"
        else:
            size = f"about={self.about:g}±{self.tolerance:.0%}"
        return f"expect_toks({size}, {self.shape})"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The floor, or the reference and its tolerance to both sides, in tok/s."""
        if self.about is not None:
            return self.about * (1 - self.tolerance), self.about * (1 + self.tolerance)
        return self.minimum, None

    def on(self, cards: Collection[str]) -> ExpectToks | None:
        """The expectation on these cards, by their slugs or names; None when it has no reference for one of them.

        Where several are there, the least reference counts: the slowest card sets the pace.
        """
        if not self.cards:
            return self
        known = {normal_card(name): number for name, number in self.cards}
        found = {known.get(normal_card(card)) for card in cards}
        numbers = [one for one in found if one is not None]
        if not numbers or len(numbers) < len(found):
            return None
        minimum, about = (min(numbers), None) if self.by == "min" else (None, min(numbers))
        return replace(self, minimum=minimum, about=about, cards=())


@dataclass(frozen=True, slots=True)
class Compare(Rated):
    """One server against another one under the same load, as a ratio of output tokens per second.

    ``together``: both may be up at once, on GPUs of their own.
    """

    kind = "compare"
    other: Serves | None = None
    ratio: Comparison | None = None
    together: bool = True

    @property
    def label(self) -> str:
        """``compare(ratio>2, concurrency=1)``."""
        return f"compare(ratio{self.ratio}, {self.shape})"

    @property
    def subject(self) -> str:
        """The load shape and the other server: a claim may be compared with several."""
        shape = f"{self.concurrency}, {self.input_len}, {self.output_len}, {self.per}"
        if self.other is None:
            return f"compare({shape})"
        # Environment and wrapper make another server too; they may hold secrets, and are not spelled out.
        digest = hashlib.sha256(repr(self.other.identity).encode()).hexdigest()[:8]
        way = "" if self.together else ", in turn"
        return f"compare({shape}{way}; {self.other.describe()}; {digest})"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The claimed range of the ratio."""
        assert self.ratio is not None
        return (self.ratio.value, None) if self.ratio.op.startswith(">") else (None, self.ratio.value)


def normal_card(name: str) -> str:
    """``NVIDIA H200`` and ``h200`` are one card."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").removeprefix("nvidia-")
