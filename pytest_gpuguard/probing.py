"""Small scripts in the stack's own python, on leased GPUs, with a deadline; each leaves an observation like a boot.

A script is never believed because it ended well: only its answer counts. Whatever becomes of it, nothing of it stays.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from .claims.gpuset import GpuChoice
from .claims.needs import select_gpus
from .claims.observation import PROBE, Decisive, Observation
from .claims.outcome import HOST_FAULTS, READY, UNDECIDED, UNKNOWN
from .containers.image import PYTHON as IMAGE_PYTHON
from .diagnose.evidence import weigh
from .engines.base import BootSpec
from .engines.process import CommandNotStarted, LogNotWritable
from .evaluate import BootFailed, Evaluation
from .facts.faults import HostFault
from .facts.gpu import arch_of
from .facts.lease import Lease, PortRange
from .facts.stack import Stack, StackError
from .probe_asked import Asked, ProbeResult
from .probe_watch import Watched
from .probes.launch import ORDER, command, order
from .reserve import LeaseFailed, if_alone
from .run_stacks import StackAbsent

if TYPE_CHECKING:
    from .engines.log import LogReader
    from .engines.process import ServerProcess
    from .facts.gpu import Gpu, Rig

#: What is kept of an answer in reports and the ledger, in characters of JSON.
MOST_ANSWERED: Final = 64 * 1024
_LEAVE_S: Final = 5.0
#: What starting a container may take, with its GPUs; it counts for nobody's deadline.
_CONTAINER_S: Final = 30.0
_TAIL_LINES: Final = 40


class ProbeFailed(BootFailed):
    """What the probe looks at is broken. ``observation`` says how; the judge has it already."""


class ProbeAbsent(Exception):
    """It cannot be decided here. ``kind`` is what it is counted by."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


class _Ended(NamedTuple):
    """How one run of a script ended: what it answered, or why it could not be decided, or the failure."""

    observation: Observation
    absent: tuple[str, str] | None = None
    found: Mapping[str, Any] = MappingProxyType({})


def probe(evaluation: Evaluation, asked: Asked, on_wait: Callable[[str], None] | None = None) -> ProbeResult:
    """Run a script for a claim, or take what an equal question was answered in this run.

    Raises ProbeFailed, ProbeAbsent, ProbeError. The observation is recorded in every case but that of ProbeAbsent.
    """
    evaluation.asked_texts += asked.texts()
    try:
        ended = _ask(evaluation, asked, on_wait)
    except StackAbsent as error:
        raise ProbeAbsent(error.kind, str(error)) from None
    except StackError as error:
        ended = _Ended(_without(asked, "infra.boot", str(error)))
    except (LeaseFailed, HostFault) as error:
        own = (
            " (this test's own server has GPUs too: ask for fewer, or gpus=0)"
            if evaluation.live and asked.gpus != 0
            else ""
        )
        ended = _Ended(_without(asked, error.outcome, f"{error}{own}"))
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
    # A copy: another claim may be given the same answer.
    return ProbeResult(deepcopy(dict(ended.found)), observation.elapsed_s or 0.0, observation.log)


def _ask(evaluation: Evaluation, asked: Asked, on_wait: Callable[[str], None] | None) -> _Ended:
    session = evaluation.session
    stack = evaluation.stack
    choice, wanted = _choice(evaluation, asked)
    surroundings = frozenset((name, one) for name, one in os.environ.items() if name != "PYTEST_CURRENT_TEST")
    exclusive = evaluation.claim.needs.exclusive
    key = (stack.python, asked.script, asked.args, asked.env, surroundings, choice.uuids, wanted, exclusive)
    limits = (asked.deadline_s, asked.contrast)  # a failure is that of its deadline, and told with its contrast
    for one in (key, (key, limits)):
        known = None if evaluation.anew else session.probed.get(one)
        if isinstance(known, _Ended):
            return known
    with _leased(evaluation, choice, wanted, on_wait) as runs:
        if evaluation.place is not None:
            evaluation.place.took(runs.lease.uuids)
        ended = _run(evaluation, asked, stack, runs, asked.env)
        outcome = ended.observation.outcome
        if asked.contrast and outcome != READY and ended.absent is None and outcome not in HOST_FAULTS:
            other = _run(evaluation, asked, stack, runs, (*asked.env, *asked.contrast))
            ended = ended._replace(observation=_contrasted(ended.observation, asked.contrast, other))
    outcome = ended.observation.outcome
    if outcome not in HOST_FAULTS:  # a fault of the moment is nobody else's evidence
        session.probed[key if outcome == READY or ended.absent is not None else (key, limits)] = ended
    return ended


def _choice(evaluation: Evaluation, asked: Asked) -> tuple[GpuChoice, int]:
    if asked.gpus == 0:
        return GpuChoice(()), 0
    rig = evaluation.session.rig
    if asked.gpus is not None:
        return _serving(evaluation.gpus_for(asked.gpus), asked.gpus, rig), asked.gpus
    needs = evaluation.claim.needs
    least = max(needs.gpus, 1)
    for count in range(len(rig.leasable), least, -1):
        more = select_gpus(needs, count, rig, arch_of)  # for that many: of MIG devices a process gets one
        choice = more.choice.without(minor(rig))
        if not more.unmet and choice.pick(choice.uuids, count) is not None:
            return choice, count
    return _serving(select_gpus(needs, least, rig, arch_of).choice, least, rig), least


def _serving(choice: GpuChoice, count: int, rig: Rig) -> GpuChoice:
    """The choice without GPUs that only drive a display, where enough others are left."""
    rest = choice.without(minor(rig))
    return rest if rest.pick(rest.uuids, count) is not None else choice


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
    session.pool.make_room(evaluation.live)
    exclusive = evaluation.claim.needs.exclusive
    spec = BootSpec(PROBE, evaluation.ref.name, evaluation.stack.python, "", gpus=wanted, exclusive=exclusive)
    held: list[Any] = []
    used = True
    try:
        lease = session.reservations.take(spec, test, choice, held, on_wait)
        runs = _Runs(lease, (*(fd for one in held for fd in one.fds), *session.production_fds), held)
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
    held: Sequence[Any] = ()
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
    watched = Watched(log, nonce, _reader(evaluation, lease))
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
        more = _CONTAINER_S if container is not None else 0.0
        outcome, note = watched.wait(process, began + asked.deadline_s + more, asked.deadline_s)
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
    found = _finite((watched.answer or {}).get("answer") or {})
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
    return _Ended(if_alone(observation, runs.held), found=found)


def _contrasted(broken: Observation, env: Sequence[tuple[str, str]], ended: _Ended) -> Observation:
    """The failure, with what became of it under other variables."""
    how = " ".join(f"{name}={value}" for name, value in env)
    other = ended.observation
    said = f"with {how} it passes" if other.ready else f"with {how} too it fails ({other.outcome})"
    if ended.absent is not None or other.outcome in HOST_FAULTS:
        said = f"with {how} it could not be decided: {other.note or other.outcome}"
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
    # Without a lease there are none: those of the machine may be somebody else's.
    env["CUDA_VISIBLE_DEVICES"] = lease.cuda_visible_devices
    if lease.cuda_visible_devices:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return env


def _reader(evaluation: Evaluation, lease: Lease) -> LogReader:
    from .diagnose.signatures import read_signature_files
    from .engines.log import LogReader

    session = evaluation.session
    capabilities = (session.rig.gpu(uuid).compute_capability for uuid in lease.uuids)
    majors = sorted({one[0] for one in capabilities if one is not None})
    return LogReader(None, None, majors, read_signature_files(session.config.signatures))


def _finite(value: Any) -> Any:
    """JSON data as every reader of JSON takes it: infinite and undefined numbers as their words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def _bounded(found: dict[str, Any]) -> Mapping[str, Any]:
    if len(json.dumps(found, default=str)) > MOST_ANSWERED:
        return MappingProxyType({"said": str(found.get("said", ""))[:1000], "cut": True})
    return MappingProxyType(found)


def _without(asked: Asked, outcome: str, note: str) -> Observation:
    return Observation(engine=PROBE, outcome=outcome, phase="start", note=note, argv=(asked.script.name,))
