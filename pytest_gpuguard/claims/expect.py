"""What a claim expects, as frozen values: one class per expectation, each of which can say itself in one line.

An expectation never measures anything. ``when`` is the window of stacks for which it is stated; None means all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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

    @property
    def unmeasured(self) -> str | None:
        """Why this expectation cannot be measured by this version, or None."""
        return None


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

    @property
    def label(self) -> str:
        """``works(full)``."""
        return f"works({self.level})"

    @property
    def unmeasured(self) -> str | None:
        """No probe of answers yet."""
        return "not measured yet"


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

    @property
    def unmeasured(self) -> str | None:
        """The peak is not sampled yet."""
        return "not measured yet" if self.of == "peak" else None


@dataclass(frozen=True, slots=True)
class ExpectToks(Expectation):
    """Output tokens per second at a load shape: a floor (``minimum``) or a reference with a tolerance (``about``)."""

    kind = "expect_toks"
    minimum: float | None = None
    about: float | None = None
    tolerance: float = 0.05
    concurrency: int = 1
    input_len: int = 128
    output_len: int = 64
    per: str = "total"

    @property
    def label(self) -> str:
        """``expect_toks(min=60, concurrency=1)``, and the lengths where they are not the usual ones."""
        size = f"min={self.minimum:g}" if self.minimum is not None else f"about={self.about:g}±{self.tolerance:.0%}"
        parts = [size, f"concurrency={self.concurrency}"]
        for name, usual in (("input_len", 128), ("output_len", 64), ("per", "total")):
            value = getattr(self, name)
            parts += [f"{name}={value}"] if value != usual else []
        return f"expect_toks({', '.join(parts)})"

    @property
    def subject(self) -> str:
        """The load shape; samples of tok/s are kept under it."""
        return f"expect_toks({self.concurrency}, {self.input_len}, {self.output_len}, {self.per})"

    @property
    def unmeasured(self) -> str | None:
        """No reference with a tolerance yet: only a floor is measured."""
        return "not measured yet" if self.minimum is None else None


@dataclass(frozen=True, slots=True)
class Compare(Expectation):
    """One server against another one, as a ratio of output tokens per second."""

    kind = "compare"
    other: Serves | None = None
    ratio: Comparison | None = None

    @property
    def label(self) -> str:
        """``compare(ratio>2)``."""
        return f"compare(ratio{self.ratio})"

    @property
    def unmeasured(self) -> str | None:
        """One server per claim so far."""
        return "not measured yet"
