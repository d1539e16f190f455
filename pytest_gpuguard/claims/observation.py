"""What happened to one boot, as frozen values: the only thing that a judge looks at.

Every size is in GiB, also where the engine prints "GB"; times are in seconds. Unknown numbers are None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final

from .answers import Answers
from .measurement import Peak
from .outcome import READY
from .resolved import LogEvidence, Resolved
from .series import Series

#: The engine of an observation of a test that leased GPUs and booted no server: it bears on their peak only.
NO_SERVER: Final = "none"
#: The engine of an observation of a script that was run in the stack's python: ready is then that it answered.
PROBE: Final = "probe"


@dataclass(frozen=True, slots=True)
class Decisive:
    """The line that decides the outcome. ``line`` counts from 1 in the merged log; 0 is a check before any boot."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Memory of the fullest rank, phase by phase, in GiB as the engine measured it.

    ``reserved_gib`` is what the fraction holds back, avail_before·(1−f); ``rest_gib`` = avail_after_weights −
    reserved; ``f_min`` = 1 − avail_after_weights/avail_before (sglang/srt/model_executor/model_runner.py).
    ``kv_tokens`` is max_total_num_tokens; ``free_gib`` the last free memory that was printed, the least over all ranks.
    ``total_gib`` and ``gpu_memory_utilization`` are the card, and the share of it that vLLM was given.
    """

    avail_before_gib: float | None = None
    avail_after_weights_gib: float | None = None
    weights_gib: float | None = None
    mem_fraction_static: float | None = None
    reserved_gib: float | None = None
    rest_gib: float | None = None
    f_min: float | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    graph_gib: float | None = None
    free_gib: float | None = None
    total_gib: float | None = None
    gpu_memory_utilization: float | None = None

    def as_dict(self) -> dict[str, float | int | None]:
        """The table with stable keys, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LogReading:
    """What one engine's log alone says: the result of ``diagnose.classify`` over a log, whole or so far.

    ``fatal`` is True when the outcome is a failure that the engine does not come back from. ``consequences`` are
    later failures that follow from the decisive one. ``clipped`` is (tokens asked for, tokens granted) when the engine
    cut ``--max-total-tokens`` to what fits. ``fullest_rank`` is the rank that ``memory`` describes ("TP3"; "" when the
    log names no ranks, None when no rank printed its memory). ``evidence`` is what it shows of what really runs.
    """

    outcome: str
    phase: str
    engine: str | None = None
    engine_version: str | None = None
    decisive: Decisive | None = None
    signature: str | None = None
    why: str | None = None
    fatal: bool = False
    consequences: tuple[str, ...] = ()
    memory: MemoryTable = field(default_factory=MemoryTable)
    ready_line: bool = False
    lines: int = 0
    clipped: tuple[int, int] | None = None
    fullest_rank: str | None = None
    #: The outcome is a failure only because the log ends with it: nothing in it says that it ended the engine.
    weak: bool = False
    #: How many boots the log holds, one after the other; all else is of the last.
    boots: int = 1
    #: What each rank printed, by its name, the first 64 of them.
    ranks: tuple[tuple[str, MemoryTable], ...] = ()
    #: The share of the checkpoint that was loaded at the end, if a bar was drawn and the weights were not all there.
    loaded: float | None = None
    #: What a person can do about this failure, where that is always the same.
    cure: str | None = None
    #: The log is that of a simulated boot: it shows what a suite does, and not what is true.
    simulated: bool = False
    evidence: LogEvidence = field(default_factory=LogEvidence)


@dataclass(frozen=True, slots=True)
class Observation:
    """What one boot did: outcome, phase reached, the line that decides, memory, resolved settings, samples.

    ``settings`` are the server's own resolved arguments (from its server_info, else empty); ``resolved`` is what was
    asked of it against what runs. ``series`` holds
    what was measured after ready, by the expectation's subject; ``others`` the other servers of comparisons, likewise.
    ``answers`` are those to the works probe, ``free_gib`` the least free memory of its GPUs after it (NVML), ``peak``
    the most that was seen in use. ``cards`` are the names of its GPUs. ``tail`` are the last log lines, without
    secrets. ``note`` is a sentence of ours about how the outcome was reached, e.g. a deadline.
    """

    engine: str
    outcome: str
    phase: str
    engine_version: str | None = None
    decisive: Decisive | None = None
    why: str | None = None
    note: str | None = None
    memory: MemoryTable = field(default_factory=MemoryTable)
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    series: Mapping[str, Series] = field(default_factory=lambda: MappingProxyType({}))
    others: Mapping[str, Observation] = field(default_factory=lambda: MappingProxyType({}))
    answers: Answers | None = None
    peak: Peak | None = None
    free_gib: float | None = None
    cards: tuple[str, ...] = ()
    #: Other processes that used its GPUs meanwhile: who, and how much.
    strangers: tuple[str, ...] = ()
    requested_tokens: int | None = None
    log: str | None = None
    tail: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    elapsed_s: float | None = None
    leak: str | None = None
    #: The server was up once: what fails after that may be what the test did to it.
    was_ready: bool = False
    #: What would cure it, computed from its own numbers.
    remedies: tuple[str, ...] = ()
    #: The rank that ``memory`` describes, as the log names it ("" for the only one).
    fullest_rank: str | None = None
    resolved: Resolved = field(default_factory=Resolved)
    #: What a probe answered, as JSON data.
    found: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def ready(self) -> bool:
        """Whether the server came up and stayed up for as long as it was watched."""
        return self.outcome == READY
