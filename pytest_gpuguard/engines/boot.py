"""One boot: start the server under its warden, watch log, process, memory and HTTP, and say what happened.

It reads and never judges. A boot is decided by its log, its phase, HTTP and the process together; whatever happens,
``stop`` leaves nothing behind.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ..claims.errors import ClaimError
from ..claims.layout import flag_value, layout_from_flags
from ..claims.observation import LogReading, MemoryTable, Observation
from ..claims.outcome import HOST_FAULTS, PHASES, READY, STARTING, UNDECIDED, UNKNOWN
from ..diagnose.evidence import weigh
from ..diagnose.memory import from_server_info, merge_tables
from ..diagnose.redact import without_secrets
from ..diagnose.remedies import remedies, setup_of
from ..diagnose.resolved import off_gpus, resolve
from ..facts.kernel import KernelWatch
from .base import BootSpec, Engine, ServerFacts
from .watching import Asking, MemoryWatch

if TYPE_CHECKING:
    from ..claims.resolved import Resolved
    from ..facts.lease import Lease
    from .process import ExitInfo, ServerProcess, StopReport

POLL_S: Final = 0.03
#: After a decisive line, wait for so much quiet, at most so long: with several ranks another one may name the cause.
QUIET_S: Final = 0.15
QUIET_ALONE_S: Final = 0.03
SETTLE_S: Final = 0.3
_FOREIGN_PORT_S: Final = 10.0
#: How long the end of a container that has ended may take to be told.
_ENDING_S: Final = 10.0
_TAIL_LINES: Final = 40
#: Ended by SIGKILL: as the kernel tells it, and as a shell that wraps the command does.
_SIGKILLED: Final = (-9, 137)
_RANK_KILLED: Final = re.compile(r"\bexit ?code:? -9\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a boot is, for a person: phase, shards loaded of all, seconds since the start, and its time-out."""

    phase: str
    done: int | None
    total: int | None
    elapsed_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines of a boot, in seconds."""

    stall_s: float
    grace_s: float


class Boot:
    """A server from its start to its stop. ``used_bytes`` reads the memory of the leased GPUs, if there are any.

    ``kernel`` watches kernel and driver meanwhile; without one, the kernel is watched and no GPU.
    """

    def __init__(
        self,
        spec: BootSpec,
        engine: Engine,
        lease: Lease,
        log: Path,
        limits: Limits,
        *,
        version: str | None = None,
        majors: Sequence[int] = (),
        fds: Sequence[int] = (),
        on_progress: Callable[[Progress], None] | None = None,
        used_bytes: Callable[[], int] | None = None,
        kernel: KernelWatch | None = None,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.lease = lease
        self.log = log
        self.port = engine.port(spec, lease.ports)
        self.url = _url(spec.flags, self.port)
        self.argv = tuple(engine.command(spec, lease.ports))
        self.facts: ServerFacts | None = None
        self._engine = engine
        self._limits = limits
        self._version = version
        self._fds = tuple(fds)
        self._extra_env = dict(extra_env or {})
        self._on_progress = on_progress or (lambda progress: None)
        self._used_bytes = used_bytes
        self._reader = engine.reader(version, majors)
        self._process: ServerProcess | None = None
        self._file: Any = None
        self._started = 0.0
        self._ready_after: float | None = None
        self._last_line = 0.0
        self._memory: MemoryWatch | None = None
        self._kernel = kernel or KernelWatch()
        self._furthest = PHASES[0]
        self._quiet_s = QUIET_S if _has_ranks(spec.flags) else QUIET_ALONE_S
        self._exit: ExitInfo | None = None
        self._had: Mapping[int, int] = {}
        self._stopping = threading.RLock()

    # ------------------------------------------------------------------------------------------------------- start

    def run(self) -> Observation:
        """Start the server and watch it until it is ready, has failed, or a deadline has passed.

        Raises OSError or CommandNotStarted when it cannot be started at all. On any exception it is stopped already.
        """
        self._started = self._last_line = time.monotonic()
        try:
            self._kernel.start()
            if self.spec.container is not None and not _is_free(self.port):
                return self._observe("port.in_use", f"somebody listens on port {self.port} already")
            self._process = self._start()
            self._file = self.log.open("rb")
            self._memory = MemoryWatch(self._process, self._used_bytes, self._kernel)
            return self._watch()
        except BaseException:
            self.stop()
            raise
        finally:
            if self._memory is not None:
                self._memory.end()

    def _start(self) -> ServerProcess:
        from .process import ServerProcess

        asked = {**self._extra_env, **self._engine.environment(self.spec, self.lease)}
        if self.spec.container is not None:
            from .container import ContainerServer

            given = (self.spec, self.lease, self.argv, asked, self.log, self._fds, self._limits.grace_s)
            return ContainerServer.boot(*given)
        env = {**os.environ, **asked}
        env.pop("PYTEST_CURRENT_TEST", None)
        return ServerProcess.start(list(self.argv), env, None, self.log, pass_fds=self._fds)

    def _watch(self) -> Observation:
        ready_since: float | None = None
        fatal_since: float | None = None
        asking: Asking | None = None
        shown: tuple[Any, ...] = ()
        while True:
            now = time.monotonic()
            grown = self._read()
            reading = self._reader.reading()
            if self._exited():
                return self._dead()
            if reading.fatal:
                fatal_since = fatal_since if fatal_since is not None else now
                quiet = now - self._last_line >= self._quiet_s and not self._reader.in_traceback
                if quiet or now - fatal_since >= SETTLE_S:
                    return self._observe(reading.outcome)
            elif reading.ready_line:
                ready_since = ready_since if ready_since is not None else now
                if asking is None:
                    asking = Asking(self._engine, self.url, self.spec)
                elif asking.done:
                    observation = self._check_ready(asking.facts, now - ready_since)
                    if observation is not None:
                        return observation
                    asking = None
            late = self._deadline(now) if fatal_since is None else None
            if late is not None:
                return late
            progress = self._progress(now)
            if (progress.phase, progress.done, int(progress.elapsed_s)) != shown:
                shown = (progress.phase, progress.done, int(progress.elapsed_s))
                self._on_progress(progress)
            if not grown:
                time.sleep(POLL_S)

    def _check_ready(self, facts: ServerFacts | None, waited: float) -> Observation | None:
        """Ready is the line, the answer, our process on the port, and our model; None while that is still open."""
        assert self._process is not None
        if facts is None or not facts.healthy:
            return None
        if facts.listens and not self._process.owns_port(self.port):
            if waited < _FOREIGN_PORT_S:
                return None
            note = f"port {self.port} answers, but no process of this boot listens on it"
            return self._observe("port.in_use", note)
        if facts.model is not None and not _same_model(facts.model, self.spec.model):
            note = f"the server on port {self.port} serves {facts.model}, not {self.spec.model}"
            return self._observe("port.in_use", note)
        self.facts = facts
        self._ready_after = time.monotonic() - self._started
        self._reader.become_ready()
        return self._observe(READY)

    def _deadline(self, now: float) -> Observation | None:
        elapsed = now - self._started
        changed = self._memory.changed if self._memory is not None else 0.0
        silent = max(0.0, now - max(self._last_line, changed))
        if silent >= self._limits.stall_s:
            unheard = self._process.unheard() if self._process is not None else None
            if unheard is not None:
                return self._observe(*unheard)
            note = f"no log line and flat memory for {silent:.0f} s, with the process alive"
            return self._observe("hang.timeout", note)
        if elapsed >= self.spec.boot_timeout_s:
            note = (
                f"boot_timeout of {self.spec.boot_timeout_s:g} s passed in phase {self._reader.reading().phase}; "
                f"the last sign of life was {silent:.0f} s ago"
            )
            return self._observe("infra.deadline", note)
        return None

    def _progress(self, now: float) -> Progress:
        bar = self._reader.progress
        # Ranks do not reach a phase together; for a person the furthest one counts.
        phase = self._furthest = max(self._furthest, self._reader.phase, key=PHASES.index)
        if bar.phase != phase:
            return Progress(phase, None, None, now - self._started, self.spec.boot_timeout_s)
        return Progress(phase, bar.done, bar.total, now - self._started, self.spec.boot_timeout_s)

    # ------------------------------------------------------------------------------------------------------ observe

    def observe_again(self, patient: bool = False) -> Observation:
        """What there is to say now, after the test used the server: it may have died since it was ready.

        ``patient`` when the test ended with an exception: a client sees the connection break before anybody sees the
        process gone.
        """
        if self._process is None:
            return self._observe(self._reader.reading().outcome)
        settle = time.monotonic() + SETTLE_S
        while True:
            self._read()
            if self._exited():
                self._read()
                return self._dead()
            if self._process.ending and time.monotonic() < settle + _ENDING_S:
                time.sleep(POLL_S)
                continue
            reading = self._reader.reading()
            if not reading.fatal and (not patient or time.monotonic() >= settle):
                return self._observe(READY)
            if time.monotonic() >= settle:
                return self._observe(reading.outcome)
            time.sleep(POLL_S)

    @property
    def processes(self) -> Mapping[int, int]:
        """The processes that were ever part of this boot: pid → start time, which tells one from a later one."""
        return self._process.processes() if self._process is not None else self._had

    @property
    def silent_s(self) -> float:
        """How long its log has not grown, in seconds."""
        while self._read():
            pass
        return time.monotonic() - self._last_line

    @property
    def eager_decodes(self) -> int:
        """How many decode steps its log tells so far that ran without CUDA graphs."""
        while self._read():
            pass
        return self._reader.eager_decodes

    @property
    def alive(self) -> bool:
        """Whether the server's main process lives."""
        return self._process is not None and not self._exited() and not self._process.ending

    def _exited(self) -> bool:
        if self._exit is None and self._process is not None:
            self._exit = self._process.poll()
        return self._exit is not None

    def _dead(self) -> Observation:
        """The main process has ended: by its log if that says why, else unknown. Its exit code is told, not judged."""
        assert self._exit is not None
        while self._read():
            pass
        reading = self._reader.closed()
        outcome, note = reading.outcome, f"the process ended (exit code {self._exit.code})"
        fault = self._process.fault if self._process is not None else None
        if fault is not None and (fault[0] == "infra.boot" or outcome in (READY, STARTING, *UNDECIDED)):
            return self._observe(*fault) if outcome not in HOST_FAULTS else self._observe(outcome, fault[1])
        if outcome in (READY, STARTING):
            if self._exit.lost:
                return self._observe("infra.lost", "the server's warden was killed, and took the server along")
            outcome = UNKNOWN
            note += ", and nothing in its log says why"
        return self._observe(outcome, note)

    def _read(self) -> bool:
        """Feed what the log has grown by. True when it had grown."""
        if self._file is None:
            return False
        data = self._file.read(1 << 20)
        if not data:
            return False
        self._last_line = time.monotonic()
        self._reader.feed(data)
        return True

    def _observe(self, outcome: str, note: str | None = None) -> Observation:
        reading = self._reader.reading()
        outcome, note = self._weighed(outcome, note, reading)
        info = self.facts.info if self.facts is not None else None
        resolved = resolve(self.spec.engine, self.spec.flags, reading.evidence, info, dict(self.spec.env))
        outcome, note = off_gpus(outcome, note, resolved, len(self.lease.uuids))
        memory, settings = self._numbers(reading)
        words = flag_value(self.spec.flags, ("--max-total-tokens",))
        requested = int(words) if words is not None and words.isdigit() else None
        decided = outcome not in (READY, "infra.deadline")
        return Observation(
            engine=self.spec.engine,
            engine_version=self._version or reading.engine_version,
            outcome=outcome,
            phase=reading.phase,
            decisive=reading.decisive if decided and reading.outcome == outcome else None,
            why=reading.why if reading.outcome == outcome else None,
            note=note,
            memory=memory,
            settings=MappingProxyType(dict(settings)),
            requested_tokens=reading.clipped[0] if reading.clipped is not None else requested,
            log=str(self.log),
            tail=tuple(self._reader.tail(_TAIL_LINES)),
            argv=without_secrets(self.argv),
            was_ready=self._ready_after is not None,
            gpus=self.lease.uuids,
            elapsed_s=self._ready_after if self._ready_after is not None else time.monotonic() - self._started,
            resolved=resolved,
            remedies=self._remedies(outcome, reading, resolved),
            fullest_rank=reading.fullest_rank,
        )

    def _remedies(self, outcome: str, reading: LogReading, resolved: Resolved) -> tuple[str, ...]:
        """What would cure this boot, where the log explains its outcome."""
        if outcome != reading.outcome:
            return ()
        return remedies(reading, setup_of(resolved, reading, len(self.lease.uuids)))

    def _weighed(self, outcome: str, note: str | None, reading: LogReading) -> tuple[str, str | None]:
        """A failure weighed against what kernel and driver say: outcome and note. Nothing is asked when it is ready."""
        if outcome == READY:
            return outcome, note
        evidence = self._kernel.collect(self._process.seen() if self._process is not None else ())
        explained = reading.outcome == outcome
        weighed = weigh(
            outcome,
            evidence,
            explained=explained,
            signature=reading.signature,
            note=note,
            killed=self._killed(outcome, reading),
            weak=explained and reading.weak,
        )
        return weighed.outcome, weighed.note

    def _killed(self, outcome: str, reading: LogReading) -> bool:
        """Whether SIGKILL ended the main process or a rank, and nothing in the log says why.

        SGLang kills itself with SIGKILL after any exception of a scheduler: where one was printed, or a child asked
        for the end itself (SIGQUIT), that is no sign of somebody else's. What we end ourselves is not meant either.
        """
        if outcome not in UNDECIDED or self._process is None:
            return False
        said = reading.decisive.text if reading.decisive is not None and not reading.weak else ""
        if outcome == UNKNOWN and said:
            return False
        if any(_RANK_KILLED.search(text) for text in (said, *reading.consequences)):
            return True
        return self._exit is not None and self._exit.code in _SIGKILLED and "sigquit" not in said.lower()

    def _numbers(self, reading: LogReading) -> tuple[MemoryTable, Mapping[str, Any]]:
        if self.facts is None or not self.facts.info:
            return reading.memory, {}
        table, settings = from_server_info(dict(self.facts.info))
        return merge_tables(reading.memory, table), settings

    # --------------------------------------------------------------------------------------------------------- stop

    def stop(self) -> StopReport | None:
        """TERM, grace, KILL of everything the server started. Safe to call twice; None when nothing was running."""
        with self._stopping:  # a test that is given up is stopped from another thread
            process, self._process = self._process, None
            if self._file is not None:
                self._file.close()
                self._file = None
            self._kernel.close()
            if process is None:
                return None
            try:
                return process.stop(self._limits.grace_s)
            finally:
                self._had = process.processes()


def _url(flags: Sequence[str], port: int) -> str:
    """Where the server is asked: on loopback where it listens on every address."""
    host = flag_value(flags, ("--host",)) or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if flag_value(flags, ("--ssl-certfile",)) else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _has_ranks(flags: Sequence[str]) -> bool:
    """Whether more than one rank may print; the words of any command may mean something else by the same flags."""
    try:
        sizes = layout_from_flags(flags)
    except ClaimError:
        return True
    return sizes.tp * sizes.pp * sizes.dp > 1


def _is_free(port: int) -> bool:
    from ..lease.ports import is_free

    return is_free(port)


def _same_model(served: str, declared: str) -> bool:
    return served == declared or os.path.realpath(served) == os.path.realpath(declared)
