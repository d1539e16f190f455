"""What must be true of rig and stack before a claim may be evaluated, and the one-line reason when it is not.

Needs are judged on facts that somebody else gathered. SM numbers are families, not an order: SM120 is not "more" than
SM100, so a need names the ones that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from .architectures import SM_ARCHITECTURES
from .errors import ClaimError
from .gpuset import GpuChoice
from .links import gpu_choice
from .units import GIB, parse_bytes
from .window import satisfies

LINKS: Final = ("nvlink", "pcie", "pix")
_ABSENT: Final[Mapping[str, str]] = {
    "driver": "this rig has no NVIDIA driver",
    "cuda": "this stack's torch has no CUDA",
    "package": "this stack has none",
}
#: How an unmet need ends when there is no version at all: of a simulated stack that means that nobody said.
NOT_NAMED: Final = frozenset(_ABSENT.values())


class MemoryFacts(Protocol):
    """A GPU's memory as the driver reports it."""

    @property
    def total(self) -> int | None:
        """NVML total in bytes, reserved memory included; None where the driver reports none."""
        ...


class GpuFacts(Protocol):
    """The facts of one GPU that a need looks at."""

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        ...

    @property
    def sm(self) -> str:
        """Its compute capability without the dot, such as ``"120"``."""
        ...

    @property
    def memory(self) -> MemoryFacts:
        """Its memory."""
        ...


class RigFacts(Protocol):
    """The facts of one machine's GPUs that needs look at. ``topology`` and ``nvlink`` are keyed by pairs of UUIDs."""

    @property
    def usable(self) -> Sequence[GpuFacts]:
        """The GPUs without a fault."""
        ...

    @property
    def driver(self) -> str | None:
        """The driver's version."""
        ...

    @property
    def topology(self) -> Mapping[tuple[str, str], str]:
        """``PIX`` … ``SYS`` between two GPUs."""
        ...

    @property
    def nvlink(self) -> Mapping[tuple[str, str], int]:
        """How many NVLinks join two GPUs."""
        ...


class StackFacts(Protocol):
    """The facts of a software stack that needs look at."""

    @property
    def torch_cuda(self) -> str | None:
        """The CUDA that the stack's torch was built for, None for a CPU build."""
        ...

    def package(self, name: str) -> str | None:
        """The installed version of a distribution, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Unmet:
    """One need that this rig or stack does not meet. ``kind`` is what the summary counts by."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Needs:
    """All needs of one claim, merged from its marks. An empty tuple means no such need.

    ``sms`` and ``archs`` are alternatives; ``gpus`` is a least count; ``vram_text`` is as written, ``vram_bytes`` in
    bytes. ``versions`` holds (subject, name, range) with subject ``driver``, ``cuda`` or ``package``.
    """

    sms: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    gpus: int = 0
    vram_text: str | None = None
    vram_bytes: int = 0
    link: str | None = None
    exclusive: bool = False
    versions: tuple[tuple[str, str, str], ...] = ()

    def merge(self, other: Needs) -> Needs:
        """Both sets of needs at once. Raises ClaimError when no GPU could meet both."""
        if self.sms and other.sms and not set(self.sms) & set(other.sms):
            mine, theirs = _sm_names(self.sms), _sm_names(other.sms)
            raise ClaimError(f'needs {mine} and needs {theirs}: no GPU is both; write needs_sm("…", "…") for either')
        if self.archs and other.archs and not set(self.archs) & set(other.archs):
            raise ClaimError(f"needs {' or '.join(self.archs)} and needs {' or '.join(other.archs)}: no GPU is both")
        if self.link and other.link and self.link != other.link:
            raise ClaimError(f"needs link={self.link!r} and link={other.link!r}: name one")
        larger = self if self.vram_bytes >= other.vram_bytes else other

        def both(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(one for one in a if one in b) if a and b else a or b

        sms, archs = both(self.sms, other.sms), both(self.archs, other.archs)
        if sms and archs and not {SM_ARCHITECTURES.get(sm) for sm in sms} & set(archs):
            raise ClaimError(f"needs {_sm_names(sms)} and needs {' or '.join(archs)}: no GPU is both")
        return Needs(
            sms=sms,
            archs=archs,
            gpus=max(self.gpus, other.gpus),
            vram_text=larger.vram_text,
            vram_bytes=larger.vram_bytes,
            link=self.link or other.link,
            exclusive=self.exclusive or other.exclusive,
            versions=tuple(dict.fromkeys((*self.versions, *other.versions))),
        )

    @property
    def any_gpu(self) -> bool:
        """Whether a GPU is needed at all."""
        return bool(self.sms or self.archs or self.gpus or self.vram_bytes or self.link)


@dataclass(frozen=True, slots=True)
class Selection:
    """GPUs that meet a claim's needs, of which ``choice`` picks a set, or the reasons why there are none."""

    choice: GpuChoice = field(default=GpuChoice(()))
    unmet: tuple[Unmet, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """Every GPU that may be in such a set, in the order of preference."""
        return self.choice.uuids


def vram_needs(vram: str | None) -> Needs:
    """``"96GB"`` → total ≥ 96·10⁹ bytes, which every card sold as 96 GB meets; ``"GiB"`` is exact. May raise."""
    if vram is None:
        return Needs()
    try:
        return Needs(vram_text=vram, vram_bytes=parse_bytes(vram))
    except ValueError as error:
        raise ClaimError(f"vram={error}") from error


def check_needs(
    needs: Needs, rig: RigFacts | None, stack: StackFacts | None, arch_of: Callable[[str], str]
) -> tuple[Unmet, ...]:
    """Every need that is not met, GPUs first. ``arch_of`` maps an SM such as ``"120"`` to its architecture's name."""
    unmet = list(select_gpus(needs, max(needs.gpus, 1), rig, arch_of).unmet) if needs.any_gpu else []
    for subject, name, spec in needs.versions:
        if subject == "driver":
            found = rig.driver if rig is not None else None
        elif subject == "cuda":
            found = stack.torch_cuda if stack is not None else None
        else:
            found = stack.package(name) if stack is not None else None
        if spec == "" and found is not None:
            continue
        if found is None or not satisfies(found, spec):
            has = _has(subject, name, found)
            unmet.append(Unmet(subject, f"needs {f'{_subject(subject, name)} {spec}'.strip()}, {has}"))
    return tuple(unmet)


def select_gpus(needs: Needs, count: int, rig: RigFacts | None, arch_of: Callable[[str], str]) -> Selection:
    """The GPUs of this rig of which ``count`` meet the needs, in the rig's order.

    A GPU that is split by MIG is none of them unless the caller named a MIG device of it; then it does for one alone.
    """
    gpus = list(rig.usable) if rig is not None else []
    asked = [gpu for gpu in gpus if not _split(gpu) or getattr(gpu, "mig_asked", False)]
    if gpus and not asked:
        return Selection(unmet=(Unmet("gpus", f"needs {_wanted(needs)}, this rig's GPUs are all split by MIG"),))
    gpus = asked
    if rig is None or not gpus:
        wanted = _wanted(replace(needs, gpus=max(needs.gpus, count)))
        return Selection(unmet=(Unmet("gpus", f"needs {wanted}, this rig has no GPUs"),))
    if needs.sms:
        right = [gpu for gpu in gpus if gpu.sm in needs.sms]
        if not right:
            return Selection(unmet=(Unmet("sm", f"needs {_sm_names(needs.sms)}, this rig has {count_sms(gpus)}"),))
        gpus = right
    if needs.archs:
        right = [gpu for gpu in gpus if arch_of(gpu.sm) in needs.archs]
        if not right:
            names = " or ".join(needs.archs)
            return Selection(unmet=(Unmet("arch", f"needs {names}, this rig has {count_sms(gpus)}"),))
        gpus = right
    whole = [gpu for gpu in gpus if not _split(gpu)]
    if count > 1 and len(whole) < len(gpus):
        if len(whole) < count:
            has = f"{len(whole)} and MIG devices" if whole else "MIG devices"
            text = f"needs {count} GPUs{_of_kind(needs)}, this rig has {has}: CUDA gives a process one MIG device only"
            return Selection(unmet=(Unmet("gpus", text),))
        gpus = whole
    if len(gpus) < count:
        text = f"needs {count} GPUs{_of_kind(needs)}, this rig has {len(gpus)}"
        return Selection(unmet=(Unmet("gpus", text),))
    if needs.vram_bytes:
        right = [gpu for gpu in gpus if gpu.memory.total is not None and gpu.memory.total >= needs.vram_bytes]
        if len(right) < count:
            sizes = sorted({_size(gpu, needs.vram_text) for gpu in gpus})
            text = f"needs {count}× {needs.vram_text}, this rig has {len(gpus)}× {' / '.join(sizes)}"
            return Selection(unmet=(Unmet("vram", text),))
        gpus = right
    choice = gpu_choice(gpus, needs.link, count, rig)
    if not choice.uuids:
        wanted = f"{count} GPUs" if count > 1 else "a GPU"
        return Selection(unmet=(Unmet("link", f"needs {wanted} joined by {needs.link}, this rig has none such"),))
    return Selection(choice)


def count_sms(gpus: Sequence[GpuFacts]) -> str:
    """``8× SM90`` or ``4× SM90 and 2× SM120``; a simulated card of a size alone is ``8× unknown SM``."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.sm] = counts.get(gpu.sm, 0) + 1
    return " and ".join(f"{count}× {f'SM{sm}' if sm else 'unknown SM'}" for sm, count in counts.items())


def _split(gpu: GpuFacts) -> bool:
    return bool(getattr(gpu, "mig", None))


def _size(gpu: GpuFacts, asked: str | None) -> str:
    """In the unit that was asked for: an H100 has 85.5 GB, and still is no 80 GiB."""
    total = gpu.memory.total
    if not total:
        return "unknown memory"
    return f"{total / GIB:.1f} GiB" if "i" in (asked or "").lower() else f"{total / 1e9:.1f} GB"


def _sm_names(sms: Sequence[str]) -> str:
    return " or ".join(f"SM{sm}" for sm in sms)


def _of_kind(needs: Needs) -> str:
    kinds = [_sm_names(needs.sms)] if needs.sms else []
    kinds += [" or ".join(needs.archs)] if needs.archs else []
    return f" of {', '.join(kinds)}" if kinds else ""


def _wanted(needs: Needs) -> str:
    if needs.gpus > 1:
        size = f" with {needs.vram_text}" if needs.vram_text else ""
        return f"{needs.gpus} GPUs{_of_kind(needs)}{size}"
    if needs.sms or needs.archs:
        return _of_kind(needs).removeprefix(" of ")
    return f"a GPU with {needs.vram_text}" if needs.vram_text else "a GPU"


def _subject(subject: str, name: str) -> str:
    return {"driver": "driver", "cuda": "CUDA"}.get(subject, name)


def _has(subject: str, name: str, found: str | None) -> str:
    if found is None:
        return _ABSENT.get(subject, _ABSENT["package"])
    if subject == "driver":
        return f"this rig has {found}"
    return f"this stack's torch has CUDA {found}" if subject == "cuda" else f"this stack has {found}"
