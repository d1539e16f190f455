"""The servers of one run: leases taken, booted, shared among claims that only observe, stopped, checked for leaks.

A server is kept for as long as a claim that is still to come declares the same one; it never outlives the run.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .claims.gpuset import GpuChoice
from .claims.observation import Observation
from .claims.outcome import HOST_FAULTS
from .engines.base import BootSpec, Engine
from .engines.boot import Boot, Limits, Progress
from .facts.kernel import KernelWatch
from .facts.lease import Lease
from .files import make_own_folder
from .reserve import LeaseFailed, if_alone

if TYPE_CHECKING:
    from .claims.answers import Answers
    from .measure.sampler import Sampler
    from .session import Session


@dataclass(slots=True)
class LiveBoot:
    """One boot and what it holds. ``touched`` once a test's own code has used the server."""

    spec: BootSpec
    observation: Observation
    boot: Boot | None = None
    touched: bool = False
    shared: bool = True
    held: list[Any] = field(default_factory=list)
    sampler: Sampler | None = None
    #: When its boot began (monotonic), and what it answered, by the files that were asked for.
    began: float = field(default_factory=time.monotonic)
    answers: dict[tuple[str | None, ...], Answers] = field(default_factory=dict)
    #: Numbers its loads: each has prompts of its own, which the prefix cache does not know yet.
    loads: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def served(self) -> str:
        """The model's name as requests must give it."""
        info = self.boot.facts.info if self.boot is not None and self.boot.facts is not None else {}
        named = info.get("served_model_name")
        return named if isinstance(named, str) and named else self.spec.model

    @property
    def broken(self) -> bool:
        """Whether a server that came up has failed or answers badly: there is nothing to measure of it."""
        answers = self.observation.answers
        bad = answers is not None and answers.ok is False
        return bad or not self.observation.ready or self.boot is None or not self.boot.alive

    @property
    def usable(self) -> bool:
        """Whether another claim may be judged by it: a server that is up, or one that failed to come up."""
        return not self.observation.ready or (self.boot is not None and self.boot.alive)


def _marking(
    sampler: Sampler | None, on_progress: Callable[[Progress], None] | None
) -> Callable[[Progress], None] | None:
    """Tells the sampler too which phase the boot is in."""
    if sampler is None:
        return on_progress
    phases = [""]

    def told(progress: Progress) -> None:
        if progress.phase != phases[0]:
            phases[0] = progress.phase
            sampler.mark(progress.phase)
        if on_progress is not None:
            on_progress(progress)

    return told


def _never_started(error: BaseException) -> bool:
    """Whether this says that there was no server at all."""
    from .engines.process import CommandNotStarted, LogNotWritable

    return isinstance(error, (CommandNotStarted, LogNotWritable))


def _ignore_in_git(log_dir: Path) -> None:
    if log_dir.parent.name == ".gpuguard":
        try:
            make_own_folder(log_dir.parent)
        except OSError:
            pass  # whether the log can be written is told by the boot


class BootPool:
    """Boots servers and keeps them while they are wanted."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._live: list[LiveBoot] = []
        self._wanted: Counter[Hashable] = Counter()
        self._keys: dict[BootSpec, Hashable] = {}
        self._leaks: list[str] = []
        self._number = count(1)

    # ------------------------------------------------------------------------------------------------------ sharing

    def expect(self, keys: Iterable[Hashable]) -> None:
        """Tell which declarations are still to come in this run; counted after deselection."""
        self._wanted = Counter(keys)

    def find(self, spec: BootSpec, candidates: Sequence[str]) -> LiveBoot | None:
        """A boot of an equal declaration that no test's code has touched: up and alive, or failed.

        It must have run on GPUs that the asking claim would take too: equal servers may need different cards.
        """
        for live in self._live:
            same = live.spec == spec and set(live.observation.gpus) <= set(candidates)
            judged = live.observation.outcome not in HOST_FAULTS  # a fault of the moment is nobody else's evidence
            if same and judged and live.shared and not live.touched and live.usable:
                return live
        return None

    def settle(self, done: Hashable | None, following: Hashable | None) -> list[str]:
        """After a test: stop what nobody will use. ``following`` is the next test's declaration, if it has one.

        Returns the leaks of the boots that ended, one line each.
        """
        if done is not None:
            self._wanted[done] -= 1
        leaks, self._leaks = self._leaks, []
        for live in list(self._live):
            key = self._keys.get(live.spec)
            keep = live.shared and not live.touched and self._wanted[key] > 0 and following == key and live.usable
            if not keep or not live.observation.ready:
                self.stop(live, keep=keep)
        leaks += self._leaks
        self._leaks = []
        return leaks

    def close(self) -> list[str]:
        """Stop everything; returns the leaks."""
        self._wanted.clear()
        return self.settle(None, None)

    # --------------------------------------------------------------------------------------------------------- boot

    def boot(
        self,
        spec: BootSpec,
        engine: Engine,
        test: str,
        choice: GpuChoice,
        *,
        key: Hashable = None,
        shared: bool = True,
        version: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
        keep: Sequence[LiveBoot] = (),
        wait_s: float | None = None,
    ) -> LiveBoot:
        """Take a lease, boot, watch. Idle servers of this run are stopped first: they may hold what is needed.

        Those in ``keep`` are not idle: the test that asks uses them.

        Raises LeaseFailed, OSError; whatever is raised, nothing is held or left running.
        """
        self.make_room(keep)
        held: list[Any] = []
        boot: Boot | None = None
        sampler: Sampler | None = None
        try:
            if not spec.gpus:
                self._refuse_second_cpu_server()
            lease = self._session.reservations.take(spec, test, choice, held, on_wait, wait_s)
            sampler = self._session.sampler(lease.uuids, lambda: boot.processes if boot is not None else {})
            boot = self._make(spec, engine, lease, held, version, _marking(sampler, on_progress), test)
            observation = replace(if_alone(boot.run(), held), cards=self._session.cards(lease.uuids))
        except BaseException as error:
            if boot is not None:
                boot.stop()
            if sampler is not None:
                sampler.stop()
            self._session.reservations.let_go(held, used=boot is not None and not _never_started(error))
            raise
        live = LiveBoot(spec, observation, boot, shared=shared, held=held, sampler=sampler)
        self._live.append(live)
        self._keys[spec] = key
        return live  # one that failed is taken down after it was judged: nobody waits for that

    def make_room(self, keep: Sequence[LiveBoot] = ()) -> None:
        """Stop the servers that nobody uses right now: they may hold what is needed."""
        for live in list(self._live):
            if live not in keep or live.boot is None or not live.boot.alive or not live.observation.ready:
                self.stop(live, keep=live in keep)

    def leaked(self, leak: str) -> None:
        """Tell at the end of the test what did not come back."""
        self._leaks.append(leak)

    def stop(self, live: LiveBoot, keep: bool = False) -> None:
        """End a server and give its lease back once its GPUs are clean again. ``keep`` keeps its observation.

        What goes wrong is remembered as a leak: the other servers must be stopped all the same.
        """
        if live.boot is not None:
            boot, live.boot = live.boot, None
            live.observation = if_alone(live.observation, live.held)
            sampler, live.sampler = live.sampler, None
            try:
                if sampler is not None:
                    sampler.stop()
                boot.stop()
                leak = self._session.reservations.give_back(live.held, boot, f"after {live.spec.model} stopped")
            except Exception as error:
                leak = f"{live.spec.model} could not be stopped cleanly: {error}"
            finally:
                for one in live.held:
                    one.release()
                live.held = []
            if leak is not None:
                live.observation = replace(live.observation, leak=leak)
                self._leaks.append(leak)
        if not keep and live in self._live:
            self._live.remove(live)

    def _make(
        self,
        spec: BootSpec,
        engine: Engine,
        lease: Lease,
        held: Sequence[Any],
        version: str | None,
        on_progress: Callable[[Progress], None] | None,
        test: str,
    ) -> Boot:
        config = self._session.config
        return Boot(
            spec,
            engine,
            lease,
            self.new_log(test.rpartition("::")[2] or "server"),
            Limits(config.stall_s, config.grace_s),
            version=version,
            majors=self._majors(lease.uuids),
            fds=[*(fd for one in held for fd in one.fds), *(self._session.production_fds if lease.uuids else ())],
            on_progress=on_progress,
            used_bytes=(lambda: self._used(lease.uuids)) if lease.uuids else None,
            kernel=self.kernel_watch(lease.uuids),
            extra_env=self._session.jit_environment(spec),
        )

    def new_log(self, name: str) -> Path:
        """Where the next server or probe writes; never an older one's file."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80]
        moment = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(self._number)}"
        _ignore_in_git(self._session.config.log_dir)
        return self._session.config.log_dir / f"{moment}-{name}.log"

    def kernel_watch(self, uuids: Sequence[str]) -> KernelWatch:
        """Watches what kernel and driver say of these GPUs."""
        from .facts.xid_watch import XidWatch

        if self._session.simulated:
            return KernelWatch()  # this machine's driver knows nothing of these GPUs
        buses = {uuid: self._session.rig.gpu(uuid).bus_id for uuid in uuids}
        return KernelWatch(buses, events=XidWatch(uuids) if uuids else None)

    def _refuse_second_cpu_server(self) -> None:
        """Our own process has the slot already: waiting for itself would take until the wait is over."""
        for live in self._live:
            if not live.spec.gpus and live.boot is not None and live.boot.alive:
                raise LeaseFailed(
                    "infra.lease",
                    f"{live.spec.model} is up on the CPU in this test already, and one server at a time may be: "
                    f"call stop() on the first one",
                )

    def _majors(self, uuids: Sequence[str]) -> tuple[int, ...]:
        found = (self._session.rig.gpu(uuid).compute_capability for uuid in uuids)
        return tuple(sorted({one[0] for one in found if one is not None}))

    def _used(self, uuids: Sequence[str]) -> int:
        devices = [self._session.rig.gpu(uuid).device for uuid in uuids]
        return sum(memory.used or 0 for memory in self._session.devices.memory(devices).values())
