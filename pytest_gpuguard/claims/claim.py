"""A claim: needs, a server to boot, expectations, and who said so. Built from parsed marks; pure values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from .errors import ClaimError
from .expect import Expectation, Fits
from .layout import Layout, flag_value, resolve
from .needs import Needs
from .window import VersionOf

ENGINES: Final = ("sglang", "vllm")


@dataclass(frozen=True, slots=True)
class Serves:
    """The server that a claim boots. ``flags`` are shell words, already split; ``boot_timeout_s`` in seconds."""

    engine: str
    model: str
    flags: tuple[str, ...] = ()
    layout: Layout | None = None
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    wrapper: tuple[str, ...] = ()
    boot_timeout_s: float = 1200.0
    portable: bool = False
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def resolved_layout(self) -> Layout:
        """Declared layout and flags together."""
        return resolve(self.layout, self.flags)

    @property
    def on_cpu(self) -> bool:
        """Whether the flags ask for ``--device cpu``: such a boot takes no GPU."""
        return flag_value(self.flags, ("--device",)) == "cpu"

    @property
    def gpus(self) -> int:
        """GPUs that the server will really use."""
        return 0 if self.on_cpu else self.resolved_layout.gpus

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for servers that are declared alike; how long they may take to boot makes no difference."""
        env = tuple(sorted(self.env.items()))
        return (self.engine, self.model, self.flags, str(self.layout), env, self.wrapper)

    def describe(self) -> str:
        """One line as a person would type it."""
        words = shlex.join([self.model, *self.flags])
        return f"{self.engine} {words}" + (f" [{self.layout}]" if self.layout else "")


@dataclass(frozen=True, slots=True)
class About:
    """Who says so, and what else is known of the claim. ``minutes`` is the expected run time."""

    title: str | None = None
    id: str | None = None
    source: str | None = None
    recheck: str | None = None
    minutes: float | None = None
    status: str | None = None

    @property
    def hearsay(self) -> bool:
        """Reported, never red."""
        return self.status == "hearsay"


@dataclass(frozen=True, slots=True)
class Claim:
    """What one test claims."""

    needs: Needs
    serves: Serves | None
    expectations: tuple[Expectation, ...]
    about: About = About()

    def stated(self, version_of: VersionOf) -> list[Expectation]:
        """The expectations whose window matches this stack."""
        return [one for one in self.expectations if one.when is None or one.when.matches(version_of)]

    @property
    def gpus(self) -> int:
        """GPUs to lease: the most that needs, layout or flags ask for; none for a server on the CPU."""
        if self.serves is not None and self.serves.on_cpu:
            return 0
        used = self.serves.gpus if self.serves is not None else 0
        return max(self.needs.gpus, used, 1 if self.needs.any_gpu else 0)


def build_claim(
    needs: Sequence[Needs],
    serves: Serves | None,
    expectations: Sequence[Expectation],
    about: About | None = None,
) -> Claim | None:
    """One claim from its parsed marks, or None when they only gate an ordinary test. Raises ClaimError.

    A test that declares a server and nothing else expects that it comes up: ``fits()``.
    """
    merged = Needs()
    for one in needs:
        merged = merged.merge(one)
    if serves is not None and not expectations:
        expectations = (Fits(),)
    if not expectations:
        if about is not None:
            raise ClaimError("claim(…) without an expectation: add fits(), ooms(…), unsupported(…) or another")
        return None
    check_windows(expectations)
    return Claim(merged, serves, tuple(expectations), about or About())


def check_windows(expectations: Sequence[Expectation]) -> None:
    """Refuse two expectations that would both be stated on one stack and are about the same or the opposite thing."""
    for position, first in enumerate(expectations):
        for second in expectations[position + 1 :]:
            same = first.kind == second.kind and first.subject == second.subject
            opposite = first.negative != second.negative
            both_negative = first.negative and second.negative
            if not (same or opposite or both_negative):
                continue
            if first.when is not None and second.when is not None and not first.when.overlaps(second.when):
                continue
            kinds = "the same" if same else "the opposite" if opposite else "two failures"
            raise ClaimError(
                f"{_stated(first)} and {_stated(second)} overlap and state {kinds}: "
                f'give each a window that ends where the other begins, such as when="sglang<0.6" and when="sglang>=0.6"'
            )


def _stated(expectation: Expectation) -> str:
    return f"{expectation.label} " + (f"when {expectation.when}" if expectation.when else "at all times")
