"""What a boot needs of this host, reserved: clean GPUs, or the one slot for a CPU server, and ports.

Whatever cannot be had is a fault of the host and says nothing about a claim; nothing stays held when it fails.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from .claims.gpuset import GpuChoice
from .claims.observation import Observation
from .engines.base import BootSpec
from .facts.lease import Lease, PortRange, UnsupportedPlatform

if TYPE_CHECKING:
    from .lease.gpus import GpuLease
    from .session import Session


class LeaseFailed(RuntimeError):
    """GPUs, ports or the server slot could not be had, or a GPU is not clean. ``outcome`` is the host fault."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class UserOfGpus(Protocol):
    """Whoever had a lease: what it was, and every process that was seen using it (pid → when it started)."""

    @property
    def lease(self) -> Lease:
        """The lease."""
        ...

    @property
    def processes(self) -> Mapping[int, int]:
        """Its processes."""
        ...


def _in_the_way(error: Exception) -> str:
    """What kept a lease from being had, in one line: who first, because lines get cut at their end."""
    who = "; ".join(map(str, getattr(error, "holders", ())))
    said = re.sub(r"\s*\n\s*", " ", str(error))
    return f"{who}: {said}" if who else said


def if_alone(observation: Observation, held: Sequence[Any]) -> Observation:
    """What is to be judged: a failure, or a speed, on GPUs that others may have used too says nothing.

    That is so when the locks among ``held`` were removed under us.
    """
    if observation.outcome == "infra.lease" or all(getattr(one, "intact", True) for one in held):
        return observation
    note = (
        f"the lock folder or its files were removed during the boot, so that others may have used the same GPUs "
        f"(what the boot itself showed: {observation.outcome})"
    )
    return replace(observation, outcome="infra.lease", note=note, decisive=None, why=None, remedies=())


class Reservations:
    """Takes leases for the boots of one run and gives them back."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def take(
        self,
        spec: BootSpec,
        test: str,
        choice: GpuChoice,
        held: list[Any],
        on_wait: Callable[[str], None] | None,
        wait_s: float | None = None,
    ) -> Lease:
        """What one boot may use; the handles are added to ``held`` as they are had. Raises LeaseFailed.

        ``wait_s`` in place of the configured wait: who holds GPUs already must not wait for more.
        """
        from .lease.dirs import LockDirError
        from .lease.flocks import LeaseTimeout
        from .lease.ports import PortsExhausted, lease_ports
        from .lease.slots import lease_slot

        config = self._session.config
        patience = config.wait_s if wait_s is None else wait_s

        def waiting(holders: Sequence[Any], seconds: float) -> None:
            if on_wait is not None:
                on_wait(f"waiting for {', '.join(map(str, holders)) or 'a lease'} since {seconds:.0f} s")

        try:
            uuids: tuple[str, ...] = ()
            if spec.gpus:
                gpus = self._hand_out(choice, spec.gpus, spec.exclusive, test, waiting, patience)
                held.append(gpus)
                uuids = choice.pick(gpus.uuids, spec.gpus) or ()
            else:
                held.append(lease_slot(wait_s=patience, on_wait=waiting, test=test, check=self._session.check))
            first, last = config.ports
            ports = lease_ports(first, last, test=test)
            held.append(ports)
        except (LeaseTimeout, PortsExhausted, LockDirError, UnsupportedPlatform) as error:
            raise LeaseFailed("infra.lease", _in_the_way(error)) from error
        self._session.check()
        devices = [self._session.rig.gpu(uuid) for uuid in uuids]
        return Lease(
            uuids,
            tuple(gpu.index for gpu in devices),
            PortRange(ports.base, ports.size),
            socket.gethostname(),
            test,
            visible=tuple(gpu.device for gpu in devices) if any(gpu.mig_asked for gpu in devices) else (),
        )

    def _hand_out(
        self,
        choice: GpuChoice,
        count: int,
        exclusive: bool,
        test: str,
        on_wait: Callable[[Sequence[Any], float], None] | None,
        wait_s: float,
    ) -> GpuLease:
        """Clean GPUs: ``count`` of the choice, or the whole box. Raises LeaseFailed, LeaseTimeout, LockDirError."""
        from .lease.cleanroom import NotClean, hand_out
        from .lease.dirs import lock_dir
        from .lease.production import ProductionError
        from .lease.quarantine import quarantined

        session = self._session
        wanted = choice.preferring(session.assigned())
        if exclusive:  # the whole box, so that nobody else's traffic is measured
            shut = quarantined(session.gpu_locks or lock_dir())  # those nobody can use anyway
            left = choice.without(shut)
            if left.pick(left.uuids, count) is not None:
                rest = (gpu.uuid for gpu in session.rig.leasable if gpu.uuid not in shut)
                everything = dict.fromkeys([*left.uuids, *rest])
                wanted, count = GpuChoice(tuple(everything)), len(everything)
        try:
            return hand_out(
                wanted,
                count,
                session.clean_room,
                wait_s,
                on_wait,
                test=test,
                directory=session.gpu_locks,
                before_look=session.vacate,
                check=session.check,
            )
        except NotClean as error:
            raise LeaseFailed(error.outcome, str(error)) from error
        except ProductionError as error:
            raise LeaseFailed("infra.lease", str(error)) from error

    @contextmanager
    def gpus(self, choice: GpuChoice, count: int, exclusive: bool, test: str) -> Iterator[tuple[str, ...]]:
        """GPUs without a server, clean before and after. Raises LeaseFailed."""
        from .lease.cleanroom import take_back
        from .lease.dirs import LockDirError
        from .lease.flocks import LeaseTimeout
        from .lease.warden import read_proc

        try:
            gpus = self._hand_out(choice, count, exclusive, test, None, self._session.config.wait_s)
        except (LeaseTimeout, LockDirError, UnsupportedPlatform) as error:
            raise LeaseFailed("infra.lease", _in_the_way(error)) from error
        with gpus:
            yield choice.pick(gpus.uuids, count) or ()
            alone = gpus.intact
            try:
                me = read_proc(os.getpid())
                ours = {me.pid: me.start} if me is not None else {}
                rig = [gpu.uuid for gpu in self._session.rig.leasable]
                leak = take_back(gpus, self._session.clean_room, "after the test", test=test, ours=ours, others=rig)
            except LockDirError as error:
                leak = str(error)
        if not alone:
            raise LeaseFailed("infra.lease", "the lock folder was removed in the test: others may have used its GPUs")
        if leak is not None:
            raise LeaseFailed("infra.dirty_gpu", leak)

    @staticmethod
    def let_go(held: Sequence[Any], used: bool) -> None:
        """End leases whose boot came to nothing. ``used``: a server may have been started on their GPUs.

        Then the next one is not told that they were given back, and waits for their memory.
        """
        from .lease.gpus import GpuLease

        for one in held:
            if isinstance(one, GpuLease) and not used:
                one.give_back()
            one.release()

    def give_back(self, held: Sequence[Any], boot: UserOfGpus, what: str) -> str | None:
        """Give the GPUs of a boot that has ended back, once they are clean; what did not come back, in one line."""
        from .lease.cleanroom import take_back
        from .lease.gpus import GpuLease

        room, others = self._session.clean_room, [gpu.uuid for gpu in self._session.rig.leasable]
        leaks = [
            take_back(one, room, what, test=boot.lease.test, ours=boot.processes, others=others)
            for one in held
            if isinstance(one, GpuLease)
        ]
        return next((leak for leak in leaks if leak is not None), None)
