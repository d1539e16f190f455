"""What a boot needs of this host, reserved: clean GPUs, or the one slot for a CPU server, and ports.

Whatever cannot be had is a fault of the host and says nothing about a claim; nothing stays held when it fails.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .claims.gpuset import GpuChoice
from .claims.observation import Observation
from .engines.base import BootSpec
from .facts.lease import Lease, PortRange, UnsupportedPlatform

if TYPE_CHECKING:
    from .engines.boot import Boot
    from .lease.gpus import GpuLease
    from .session import Session


class LeaseFailed(RuntimeError):
    """GPUs, ports or the server slot could not be had, or a GPU is not clean. ``outcome`` is the host fault."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def _in_the_way(error: Exception) -> str:
    """What kept a lease from being had, in one line: who first, because lines get cut at their end."""
    who = "; ".join(map(str, getattr(error, "holders", ())))
    said = re.sub(r"\s*\n\s*", " ", str(error))
    return f"{who}: {said}" if who else said


def if_alone(observation: Observation, held: Sequence[Any]) -> Observation:
    """What is to be judged: a failure on GPUs that others may have used too says nothing.

    That is so when the locks among ``held`` were removed under us.
    """
    if observation.ready or all(getattr(one, "intact", True) for one in held):
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
    ) -> Lease:
        """What one boot may use; the handles are added to ``held`` as they are had. Raises LeaseFailed."""
        from .lease.dirs import LockDirError
        from .lease.flocks import LeaseTimeout
        from .lease.ports import PortsExhausted, lease_ports
        from .lease.slots import lease_slot

        config = self._session.config

        def waiting(holders: Sequence[Any], seconds: float) -> None:
            if on_wait is not None:
                on_wait(f"waiting for {', '.join(map(str, holders)) or 'a lease'} since {seconds:.0f} s")

        try:
            uuids: tuple[str, ...] = ()
            if spec.gpus:
                gpus = self._hand_out(choice, spec.gpus, spec.exclusive, test, waiting)
                held.append(gpus)
                uuids = choice.pick(gpus.uuids, spec.gpus) or ()
            else:
                held.append(lease_slot(wait_s=config.wait_s, on_wait=waiting, test=test))
            first, last = config.ports
            ports = lease_ports(first, last, test=test)
            held.append(ports)
        except (LeaseTimeout, PortsExhausted, LockDirError, UnsupportedPlatform) as error:
            raise LeaseFailed("infra.lease", _in_the_way(error)) from error
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
        on_wait: Callable[[Sequence[Any], float], None] | None = None,
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
                session.config.wait_s,
                on_wait,
                test=test,
                directory=session.gpu_locks,
                before_look=session.vacate,
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
            gpus = self._hand_out(choice, count, exclusive, test)
        except (LeaseTimeout, LockDirError, UnsupportedPlatform) as error:
            raise LeaseFailed("infra.lease", _in_the_way(error)) from error
        with gpus:
            yield choice.pick(gpus.uuids, count) or ()
            try:
                me = read_proc(os.getpid())
                ours = {me.pid: me.start} if me is not None else {}
                leak = take_back(gpus, self._session.clean_room, "after the test", test=test, ours=ours)
            except LockDirError as error:
                leak = str(error)
        if leak is not None:
            raise LeaseFailed("infra.dirty_gpu", leak)

    def give_back(self, held: Sequence[Any], boot: Boot, what: str) -> str | None:
        """Give the GPUs of a boot that has ended back, once they are clean; what did not come back, in one line."""
        from .lease.cleanroom import take_back
        from .lease.gpus import GpuLease

        room = self._session.clean_room
        leaks = [
            take_back(one, room, what, test=boot.lease.test, ours=boot.processes)
            for one in held
            if isinstance(one, GpuLease)
        ]
        return next((leak for leak in leaks if leak is not None), None)
