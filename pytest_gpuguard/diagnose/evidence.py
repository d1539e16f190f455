"""What kernel, driver and counters say about a failed boot, weighed against what its log says.

Pure. It must never name a cause for a boot that came up, never overrule a failure that the log explains, except by a
fault of a GPU that was leased to this boot, and never take somebody else's OOM kill for one of this boot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..claims.outcome import READY, STARTING, UNDECIDED
from .kernel_lines import APPLICATION, CONSEQUENCE, HANDLED, HARDWARE, Kill, Xid, kernel_lines_of, pci_address, xid_kind
from .redact import redact

if TYPE_CHECKING:
    from ..facts.kernel import Evidence

__all__ = ["GUESSES", "Weighed", "kernel_lines_of", "weigh"]

#: What a GPU that dealt with its own fault may explain: failures that do not carry their cause in themselves.
_SYMPTOMS: Final = UNDECIDED | {
    "illegal_memory",
    "hang.timeout",
    "infra.deadline",
    "nccl.error",
    "nccl.timeout",
    "comm.p2p",
    "comm.deepep",
    "numerics",
}
#: SGLang guesses at the OOM killer from a rank's exit code -9; anybody's SIGKILL looks the same.
GUESSES: Final = frozenset({"sglang.rank_died"})
#: Names that servers' processes have in kernel messages (15 characters: "VLLM::EngineCor", "sglang::schedul").
_SERVER: Final = re.compile(r"(?:python|pt_main_thread|sglang|sgl_|vllm|ray)", re.IGNORECASE)
_MOST: Final = 3


@dataclass(frozen=True, slots=True)
class Weighed:
    """The outcome after all evidence. ``note`` is the sentence about it, or what was said before if nothing is new."""

    outcome: str
    note: str | None


@dataclass(frozen=True, slots=True)
class _Fault:
    """A fault of a leased GPU: ``mild`` when the GPU dealt with it itself."""

    words: str
    mild: bool


@dataclass(frozen=True, slots=True)
class _Strike:
    """Why the OOM killer may have struck this boot. ``sure``: its process is known, or its own cgroup counted it."""

    words: str
    sure: bool


def weigh(
    outcome: str,
    evidence: Evidence,
    *,
    explained: bool,
    signature: str | None = None,
    note: str | None = None,
    killed: bool = False,
    weak: bool = False,
) -> Weighed:
    """The outcome of a boot that the log calls ``outcome``.

    ``explained``: the log itself shows the failure (not its mere end, and not a deadline of ours); ``signature`` is the
    one that read it, ``note`` what is said about it so far. ``killed``: SIGKILL ended the main process or a rank, and
    the log does not say why: only then do kills that may be anybody's count. ``weak``: the log's failure decides only
    because the log ended with it, which a kill of this boot's own process explains better.
    """
    if outcome in (READY, STARTING):
        return Weighed(outcome, note)
    found = kernel_lines_of(evidence.lines)
    leased = _Leased(evidence, found.uuids)
    faults, asides = _gpu_words(evidence, found.xids, leased)
    mine, others = _kills(evidence, found.kills)
    asides += [f"the OOM killer ended {_named(kill)}, which is not of this boot" for kill in others[:_MOST]]
    grave = [fault for fault in faults if not fault.mild]
    if grave or (faults and outcome in _SYMPTOMS):
        chosen = (grave or faults)[0]
        before = f"the log alone says {outcome}" if explained and outcome not in {HARDWARE, *UNDECIDED} else note
        return Weighed(HARDWARE, _sentence([chosen.words, before, *asides]))
    asides = [f"{fault.words}; the GPU dealt with it itself" for fault in faults] + asides
    guessed = signature in GUESSES and outcome == "oom.host"
    strike = _struck(evidence, mine, others)
    if guessed and strike is None:
        known = evidence.host_kills is not None or evidence.cgroup_kills
        doubt = "and the kernel's OOM killer did not strike" if known else "by whom is not known: it happened"
        said = f"a rank was killed by SIGKILL, {doubt} during this boot"
        return Weighed("indeterminate.peer_died", _sentence([said, *asides]))
    if strike is not None:
        hung = outcome == "hang.timeout" and not explained and bool(mine) and not evidence.pids_differ
        if strike.sure and (outcome in UNDECIDED or outcome == "oom.host" or hung or weak):
            before = f"the log alone says {outcome}" if weak and outcome not in {"oom.host", *UNDECIDED} else None
            return Weighed("oom.host", _sentence([strike.words, before, *asides]))
        if guessed or (killed and outcome in UNDECIDED):
            return Weighed("oom.host", _sentence([strike.words, "a process of this boot ended by SIGKILL", *asides]))
        asides.append(strike.words if strike.sure else f"{strike.words}, which may have been anybody's process")
    return Weighed(outcome, _sentence([note, *asides]))


class _Leased:
    """Which leased GPU a message is about."""

    def __init__(self, evidence: Evidence, told: Mapping[tuple[int, int, int], str]) -> None:
        self._by_bus: dict[tuple[int, int, int], str] = {}
        for uuid, bus in evidence.gpus.items():
            address = pci_address(bus)
            if address is not None:
                self._by_bus[address] = uuid
        # The driver prints both before a GPU's first Xid.
        self._by_bus.update({bus: uuid for bus, uuid in told.items() if uuid in evidence.gpus})

    def uuid(self, xid: Xid) -> str | None:
        """Its UUID; None for a GPU that is not leased, or is not known to be."""
        return self._by_bus.get(xid.bus)


def _gpu_words(evidence: Evidence, xids: Iterable[Xid], leased: _Leased) -> tuple[list[_Fault], list[str]]:
    """Faults of leased GPUs, and what else is worth telling about GPUs."""
    faults: list[_Fault] = []
    asides: list[str] = []
    told: set[tuple[str, int]] = set()
    strange: set[str] = set()
    for xid in xids:
        uuid = leased.uuid(xid)
        if uuid is None:
            if len(strange) < _MOST and (
                aside := f"{_called(xid)} on a GPU that is not leased to this boot: {xid.text}"
            ):
                strange.add(aside)
            continue
        if (uuid, xid.number) in told:
            continue
        told.add((uuid, xid.number))
        words = f"{_called(xid)} on {uuid}: {xid.text}"
        if xid.kind in (HARDWARE, HANDLED):
            faults.append(_Fault(f"the driver logged {words}", xid.kind == HANDLED))
        elif xid.kind != CONSEQUENCE:
            asides.append(f"the driver logged {words}")
    for event in evidence.events:
        if event.uuid not in evidence.gpus or (event.uuid, event.number) in told:
            continue
        told.add((event.uuid, event.number))
        if event.kind == "ecc":
            faults.append(_Fault(f"NVML reported a double-bit ECC error on {event.uuid}", False))
        elif event.kind == "lost":
            faults.append(_Fault(f"NVML reported {event.uuid} as lost", False))
        else:
            kind, meaning = xid_kind(event.number)
            words = f"NVML reported Xid {event.number}{_meant(kind, meaning)} on {event.uuid}"
            if kind in (HARDWARE, HANDLED):
                faults.append(_Fault(words, kind == HANDLED))
            elif kind != CONSEQUENCE:
                asides.append(words)
    return faults, asides[:_MOST] + sorted(strange)


def _called(xid: Xid) -> str:
    return f"Xid {xid.number}{_meant(xid.kind, xid.meaning)}"


def _meant(kind: str, meaning: str) -> str:
    usual = ", usually the application's" if kind == APPLICATION else ""
    return f" ({meaning}{usual})" if meaning else ""


def _kills(evidence: Evidence, kills: Iterable[Kill]) -> tuple[list[Kill], list[Kill]]:
    """The OOM kills of this boot's processes, and everybody else's.

    In a container the kernel's pids are the host's: the name must do, unless our cgroups counted no kill.
    """
    counted = not evidence.cgroup_kills or any(counter.grown for counter in evidence.cgroup_kills)
    mine: list[Kill] = []
    others: list[Kill] = []
    for kill in kills:
        by_name = counted and _SERVER.match(kill.name) is not None
        ours = by_name if evidence.pids_differ else kill.pid in evidence.pids
        (mine if ours else others).append(kill)
    return mine, others


def _struck(evidence: Evidence, mine: list[Kill], others: list[Kill]) -> _Strike | None:
    """Why the OOM killer is known to have struck this boot, or may have; None when it did not.

    A name, the host's counter, and that of a cgroup which the server shares with others may be about anybody.
    """
    own = [counter for counter in evidence.cgroup_kills if not counter.shared]
    if mine:
        how = "by its name: kernel messages name the host's pids" if evidence.pids_differ else "of this boot"
        sure = not evidence.pids_differ or any(counter.grown for counter in own)
        return _Strike(f"the kernel's OOM killer ended {_named(mine[0])} ({how}): {mine[0].text}", sure)
    # The cgroups count the host's kills too. Counters do not say who was killed: kills that the kernel's messages give
    # to others are taken off.
    wide = [counter for counter in evidence.cgroup_kills if counter.shared]
    if not evidence.cgroup_kills and evidence.host_kills is not None:
        wide = [evidence.host_kills]
    for counter in (*own, *wide):
        if counter.grown > len(others):
            words = f"oom_kill {counter.before} -> {counter.now} in {counter.where}"
            return _Strike(f"the kernel's OOM killer struck during this boot ({words})", counter in own)
    return None


def _named(kill: Kill) -> str:
    return f"process {kill.pid} ({kill.name})"


def _sentence(parts: Iterable[str | None]) -> str | None:
    said = [part for part in parts if part]
    return redact("; ".join(said)) if said else None
