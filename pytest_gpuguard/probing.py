"""Small scripts in the stack's own python, on leased GPUs, with a deadline; each leaves an observation like a boot.

A script is never believed because it ended well: only its answer counts. Whatever becomes of it, nothing of it stays.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from .claims.gpuset import GpuChoice
from .claims.needs import select_gpus
from .claims.observation import PROBE, Decisive, Observation
from .claims.outcome import HOST_FAULTS, OUTCOMES, READY, STARTING, UNDECIDED, UNKNOWN
from .containers.image import PYTHON as IMAGE_PYTHON
from .diagnose.evidence import weigh
from .engines.base import BootSpec
from .engines.process import CommandNotStarted, LogNotWritable
from .evaluate import BootFailed, Evaluation
from .facts.faults import HostFault
from .facts.gpu import arch_of
from .facts.lease import Lease, PortRange
from .facts.stack import Stack, StackError
from .probes.launch import ORDER, ProbeError, Script, command, find_script, order
from .reserve import LeaseFailed, if_alone
from .run_stacks import StackAbsent

if TYPE_CHECKING:
    from .engines.log import LogReader
    from .engines.process import ServerProcess
    from .facts.gpu import Gpu, Rig

#: A probe that prints more than this (bytes) is ended.
MOST_PRINTED: Final = 16 * 1024 * 1024
#: What is kept of an answer in reports and the ledger, in characters of JSON.
MOST_ANSWERED: Final = 64 * 1024
#: Variables that say which GPUs are leased, and ours.
LEASES: Final = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", ORDER})
_POLL_S: Final = 0.02
_LEAVE_S: Final = 5.0
_TAIL_LINES: Final = 40
_MARK: Final = b"gpuguard-probe"
#: Who may take long over a kernel that nobody has compiled here yet.
_COMPILERS: Final = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "ninja", "fatbinary", "nvlink", "cc1"})


class ProbeFailed(BootFailed):
    """What the probe looks at is broken. ``observation`` says how; the judge has it already."""


class ProbeAbsent(Exception):
    """It cannot be decided here. ``kind`` is what it is counted by."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: a script with its arguments. ``gpus`` None stands for all that meet the claim's needs."""

    script: Script
    args: str = "{}"
    gpus: int | None = 0
    deadline_s: float = 60.0
    env: tuple[tuple[str, str], ...] = ()
    contrast: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe answered: ``data`` is what its script said, ``seconds`` what it took, ``log`` its whole output."""

    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    log: str | None = None


class _Ended(NamedTuple):
    """How one run of a script ended: what it answered, or why it could not be decided, or the failure."""

    observation: Observation
    absent: tuple[str, str] | None = None


def probe(evaluation: Evaluation, asked: Asked, on_wait: Callable[[str], None] | None = None) -> ProbeResult:
    """Run a script for a claim, or take what an equal question was answered in this run.

    Raises ProbeFailed, ProbeAbsent, ProbeError. The observation is recorded in every case but that of ProbeAbsent.
    """
    evaluation.asked_env += [dict(asked.env), dict(asked.contrast)]
    try:
        ended = _ask(evaluation, asked, on_wait)
    except StackAbsent as error:
        raise ProbeAbsent(error.kind, str(error)) from None
    except StackError as error:
        ended = _Ended(_without(asked, "infra.boot", str(error)))
    except (LeaseFailed, HostFault) as error:
        ended = _Ended(_without(asked, error.outcome, str(error)))
    except LogNotWritable as error:
        ended = _Ended(_without(asked, "infra.boot", f"{error.filename}: {error.strerror} (--gpuguard-log-dir)"))
    except (OSError, CommandNotStarted) as error:
        ended = _Ended(_without(asked, "infra.boot", f"the probe could not be started: {error}"))
    if ended.absent is not None:
        raise ProbeAbsent(*ended.absent)
    observation = ended.observation
    evaluation.observed(observation)
    if not observation.ready:
        raise ProbeFailed(observation)
    return ProbeResult(observation.found, observation.elapsed_s or 0.0, observation.log)


def _ask(evaluation: Evaluation, asked: Asked, on_wait: Callable[[str], None] | None) -> _Ended:
    session = evaluation.session
    stack = evaluation.stack
    choice, wanted = _choice(evaluation, asked)
    key = (stack.python, asked.script, asked.args, asked.env, choice.uuids if wanted else (), wanted)
    known = None if evaluation.anew else session.probed.get(key)
    if isinstance(known, _Ended):
        return known
    with _leased(evaluation, choice, wanted, on_wait) as runs:
        if evaluation.place is not None:
            evaluation.place.took(runs.lease.uuids)
        ended = _run(evaluation, asked, stack, runs, asked.env)
        outcome = ended.observation.outcome
        if asked.contrast and outcome != READY and ended.absent is None and outcome not in HOST_FAULTS:
            other = _run(evaluation, asked, stack, runs, (*asked.env, *asked.contrast))
            ended = ended._replace(observation=_contrasted(ended.observation, asked.contrast, other.observation))
    if ended.observation.outcome not in HOST_FAULTS:  # a fault of the moment is nobody else's evidence
        session.probed[key] = ended
    return ended


def _choice(evaluation: Evaluation, asked: Asked) -> tuple[GpuChoice, int]:
    if asked.gpus == 0:
        return GpuChoice(()), 0
    if asked.gpus is not None:
        return evaluation.gpus_for(asked.gpus), asked.gpus
    needs, rig = evaluation.claim.needs, evaluation.session.rig
    least = max(needs.gpus, 1)
    for count in range(len(rig.leasable), least, -1):
        more = select_gpus(needs, count, rig, arch_of)  # for that many: of MIG devices a process gets one
        choice = more.choice.without(minor(rig))
        if not more.unmet and choice.pick(choice.uuids, count) is not None:
            return choice, count
    return select_gpus(needs, least, rig, arch_of).choice, least


def minor(rig: Rig) -> tuple[str, ...]:
    """GPUs beside those that serve: with less than a quarter of the largest one's memory, such as one for a display."""
    sizes = {gpu.uuid: gpu.memory.total for gpu in rig.usable}
    most = max((size for size in sizes.values() if size is not None), default=0)
    return tuple(uuid for uuid, size in sizes.items() if size is not None and 4 * size < most)


@contextmanager
def _leased(
    evaluation: Evaluation, choice: GpuChoice, wanted: int, on_wait: Callable[[str], None] | None
) -> Iterator[_Runs]:
    """The GPUs of one question, clean before and after."""
    session, test = evaluation.session, evaluation.test
    if not wanted:
        yield _Runs(Lease((), (), PortRange(0, 0), socket.gethostname(), test))
        return
    session.pool.make_room()
    spec = BootSpec(PROBE, evaluation.ref.name, evaluation.stack.python, "", gpus=wanted)
    held: list[Any] = []
    used = True
    try:
        lease = session.reservations.take(spec, test, choice, held, on_wait)
        runs = _Runs(lease, (*(fd for one in held for fd in one.fds), *session.production_fds))
        yield runs
        leak = session.reservations.give_back(held, runs, "after the probe")
        if leak is not None:
            session.pool.leaked(leak)
    except LeaseFailed:
        used = False
        raise
    finally:
        session.reservations.let_go(held, used)


@dataclass(frozen=True, slots=True)
class _Runs:
    """What the runs of one question use: GPUs, the descriptors of their locks, and the processes seen so far."""

    lease: Lease
    fds: tuple[int, ...] = ()
    processes: dict[int, int] = field(default_factory=dict)


def _run(
    evaluation: Evaluation,
    asked: Asked,
    stack: Stack,
    runs: _Runs,
    env: Sequence[tuple[str, str]],
) -> _Ended:
    """One run of the script from its start to its end."""
    session, lease, fds = evaluation.session, runs.lease, runs.fds
    container = session.container(stack)
    python = stack.python if container is None else IMAGE_PYTHON
    nonce = uuid4().hex
    beside = minor(session.rig)
    gpus = [session.rig.gpu(uuid) for uuid in lease.uuids]
    gpus = gpus or [gpu for gpu in session.rig.usable if gpu.uuid not in beside]
    told = order(
        json.loads(asked.args),
        [gpu.device for gpu in gpus] if lease.uuids else [],
        [_facts(gpu) for gpu in gpus],
        session.rig.driver,
        session.rig.cuda,
        nonce,
    )
    words = command(python, asked.script)
    spec = BootSpec(PROBE, evaluation.ref.name, python, "", env=tuple(env), gpus=len(lease.uuids), container=container)
    given = {**session.jit_environment(spec), **_environment(python, lease), **dict(env), ORDER: told}
    log = session.pool.new_log(f"probe-{asked.script.name}")
    kernel = session.pool.kernel_watch(lease.uuids)
    kernel.start()
    began = time.monotonic()
    process: ServerProcess | None = None
    try:
        if container is not None:
            from .engines.container import ContainerServer

            process = ContainerServer.boot(spec, lease, words, given, log, fds, _LEAVE_S)
        else:
            from .engines.process import ServerProcess

            whole = {**os.environ, **given}
            whole.pop("PYTEST_CURRENT_TEST", None)
            process = ServerProcess.start(words, whole, None, log, pass_fds=fds)
        watched = _Watched(process, log, nonce, _reader(evaluation, lease))
        outcome, note = watched.wait(began + asked.deadline_s, asked.deadline_s)
        took = time.monotonic() - began
        fault = process.fault
    finally:
        if process is not None:
            process.stop(0.5)
            runs.processes.update(process.processes())
        evidence = kernel.collect(process.seen() if process is not None else ())
        kernel.close()
    if watched.answer is not None and "absent" in watched.answer:
        kind, said = watched.answer["absent"]
        return _Ended(_without(asked, UNKNOWN, str(said)), (str(kind), str(said)))
    if fault is not None and watched.answer is None:
        outcome, note = fault
    found = dict((watched.answer or {}).get("answer") or {})
    reading = watched.reader.closed()
    explained = watched.answer is None and reading.outcome == outcome
    defect = (watched.answer or {}).get("defect")
    if outcome != READY:
        weighed = weigh(
            outcome,
            evidence,
            explained=explained or defect is not None,
            signature=reading.signature,
            note=note,
            killed=outcome in UNDECIDED and watched.killed,
            weak=explained and reading.weak,
        )
        outcome, note = weighed.outcome, weighed.note
    decisive = reading.decisive if explained and reading.outcome == outcome else None
    if defect is not None and outcome == defect[0]:
        decisive = Decisive(watched.answered_at, str(defect[1]))
    said = found.get("said")
    observation = Observation(
        engine=PROBE,
        outcome=outcome,
        phase="ready" if outcome == READY else "init",
        decisive=decisive,
        why=reading.why if explained and reading.outcome == outcome else None,
        note=str(said) if outcome == READY and said else note,
        log=str(log),
        tail=watched.reader.tail(_TAIL_LINES),
        argv=(asked.script.name, *([asked.args] if asked.args != "{}" else [])),
        gpus=lease.uuids,
        cards=session.cards(lease.uuids),
        elapsed_s=took,
        found=_bounded(found),
    )
    return _Ended(if_alone(observation, []))


class _Watched:
    """The output of one run, read as it comes."""

    def __init__(self, process: ServerProcess, log: Path, nonce: str, reader: LogReader) -> None:
        self.reader = reader
        #: What the script said at its end; None when it never came to that.
        self.answer: dict[str, Any] | None = None
        self.answered_at = 0
        self.stage = "start"
        self.killed = False
        self._process = process
        self._log = log
        self._mark = _MARK + b"-" + nonce.encode() + b": "
        self._rest = b""
        self._lines = 0
        self._size = 0

    def wait(self, until: float, limit_s: float) -> tuple[str, str | None]:
        """Outcome and note once it has answered, ended, printed too much, or its time is over."""
        with self._log.open("rb") as file:
            while True:
                ended = self._process.poll()
                data = file.read(1 << 20)
                self._take(data)
                if self.answer is not None:
                    return self._answered()
                if self._size > MOST_PRINTED:
                    return UNKNOWN, f"it printed more than {MOST_PRINTED >> 20} MiB, and was ended{self._where()}"
                if data:
                    continue
                if ended is not None:
                    return self._died(ended.code, ended.lost)
                if time.monotonic() >= until:
                    return self._late(limit_s)
                time.sleep(_POLL_S)

    def _take(self, data: bytes) -> None:
        self._size += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MOST_ANSWERED * 4 :]
        for line in lines:
            self._lines += 1
            if line.startswith(self._mark):
                try:
                    told = json.loads(line[len(self._mark) :])
                except ValueError:
                    continue
                self.answer, self.answered_at = told, self._lines
            elif line.startswith(_MARK + b": stage "):
                self.stage = line[len(_MARK + b": stage ") :].decode("utf-8", "replace")[:200]
                self.reader.feed(b"\n")  # so that line numbers are the log's
            else:
                self.reader.feed(line + b"\n")

    def _answered(self) -> tuple[str, str | None]:
        assert self.answer is not None
        defect = self.answer.get("defect")
        if defect is None:
            return READY, None
        outcome = str(defect[0])
        return (outcome, None) if outcome in OUTCOMES - {READY, STARTING} else (UNKNOWN, f"{outcome}: {defect[1]}")

    def _died(self, code: int | None, lost: bool) -> tuple[str, str | None]:
        if lost:
            return "infra.lost", "the probe's warden was killed, and took it along"
        reading = self.reader.closed()
        if reading.outcome not in (READY, STARTING, UNKNOWN):
            return reading.outcome, None
        self.killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        how = f"was ended by {_signal(-code)}" if code is not None and code < 0 else f"ended with status {code}"
        return UNKNOWN, f"it {how} without an answer{self._where()}"

    def _late(self, limit_s: float) -> tuple[str, str | None]:
        compilers = _compilers_of(self._process)
        said = f"it did not end within {limit_s:g} s{self._where()}"
        if compilers:
            return "infra.deadline", f"{said}: {', '.join(compilers)} still at work, so the kernel caches were cold"
        return "hang.timeout", said

    def _where(self) -> str:
        return f", in stage {self.stage!r}"


def _contrasted(broken: Observation, env: Sequence[tuple[str, str]], other: Observation) -> Observation:
    """The failure, with what became of it under other variables."""
    how = " ".join(f"{name}={value}" for name, value in env)
    said = f"with {how} it passes" if other.ready else f"with {how} too it fails ({other.outcome})"
    if broken.decisive is not None:
        broken = replace(broken, decisive=replace(broken.decisive, text=f"{broken.decisive.text} ({said})"))
    else:
        broken = replace(broken, note=f"{broken.note} ({said})" if broken.note else said)
    return replace(broken, remedies=(f"{how}: the probe passes with it",)) if other.ready else broken


def _facts(gpu: Gpu) -> dict[str, Any]:
    """What a script is told of a GPU."""
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "sm": gpu.sm,
        "pci": gpu.bus_id,
        "memory_total_bytes": gpu.memory.total,
        "pcie_gen": gpu.pcie_gen,
        "pcie_width_max": gpu.pcie_width_max,
        "nvlinks": gpu.nvlinks,
        "numa": gpu.numa,
    }


def _environment(python: str, lease: Lease) -> dict[str, str]:
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # As in an activated environment: JIT builds call ninja and nvcc by name.
    env["PATH"] = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])
    if lease.cuda_visible_devices:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = lease.cuda_visible_devices
    return env


def _reader(evaluation: Evaluation, lease: Lease) -> LogReader:
    from .diagnose.signatures import read_signature_files
    from .engines.log import LogReader

    session = evaluation.session
    capabilities = (session.rig.gpu(uuid).compute_capability for uuid in lease.uuids)
    majors = sorted({one[0] for one in capabilities if one is not None})
    return LogReader(None, None, majors, read_signature_files(session.config.signatures))


def _compilers_of(process: ServerProcess) -> list[str]:
    found = set()
    for pid in process.pids():
        try:
            found.add(Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue  # gone meanwhile
    return sorted(found & _COMPILERS)


def _bounded(found: dict[str, Any]) -> Mapping[str, Any]:
    if len(json.dumps(found, default=str)) > MOST_ANSWERED:
        return MappingProxyType({"said": str(found.get("said", ""))[:1000], "cut": True})
    return MappingProxyType(found)


def _without(asked: Asked, outcome: str, note: str) -> Observation:
    return Observation(engine=PROBE, outcome=outcome, phase="start", note=note, argv=(asked.script.name,))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_asked(
    script: str | Path,
    folder: Path,
    *,
    args: Mapping[str, Any] | None = None,
    gpus: int | str | None = None,
    deadline: str | float = "60s",
    env: Mapping[str, str] | None = None,
    contrast: Mapping[str, str] | None = None,
    needed: int = 0,
) -> Asked:
    """A question in a user's words. Raises TypeError for what is no question; ``needed`` is what @needs_gpus says."""
    from .claims.units import parse_duration

    try:
        found = find_script(script, folder)
        seconds = parse_duration(deadline)
        text = json.dumps(dict(args or {}), sort_keys=True)
    except (ProbeError, ValueError, TypeError) as error:
        raise TypeError(f"probe: {error}") from None
    wanted = needed if gpus is None else gpus
    if wanted != "all" and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0):
        raise TypeError(f'probe: gpus={gpus!r}: write a number, "all", or leave it to @needs_gpus')
    if wanted and not needed:
        raise TypeError("probe: it is to lease GPUs: add @needs_gpus(n) to the test, so that it is not run without")
    if isinstance(wanted, int) and wanted > needed:
        raise TypeError(f"probe: gpus={wanted} are more than the test needs: write @needs_gpus({wanted})")
    return Asked(
        found,
        text,
        None if isinstance(wanted, str) else wanted,
        seconds,
        _variables("env", env),
        _variables("contrast", contrast),
    )


def _variables(what: str, given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
            raise TypeError(f"probe: {what} has {name!r}: {value!r}, and variables are texts")
        if name in LEASES:
            raise TypeError(f"probe: {what} sets {name}, which belongs to the lease")
    return tuple(sorted((given or {}).items()))
