"""The clean room: GPUs are handed out clean, and looked at again when they come back.

A GPU that we had leased and that does not come back, does not answer, is lost, or is busy without a process goes into
quarantine. What a stranger uses is never touched: another GPU is taken, or the claim ends with the stranger's name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ..claims.gpuset import GpuChoice
from ..facts.faults import HARDWARE
from .clean import CleanRoom, Dirt
from .flocks import LeaseTimeout, Locks, OnWait, boot_id
from .gpus import GpuLease, lease_gpus
from .quarantine import Quarantine, put, quarantined

DIRTY: Final = "infra.dirty_gpu"


class NotClean(RuntimeError):
    """No clean GPUs can be had. ``outcome`` is the host fault; the message names bytes, processes and quarantines."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def hand_out(
    choice: GpuChoice,
    n: int,
    room: CleanRoom,
    wait_s: float,
    on_wait: OnWait | None = None,
    *,
    test: str = "",
    directory: Path | None = None,
    before_look: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> GpuLease:
    """``n`` clean GPUs, the best set that can be had within ``wait_s`` seconds and the driver's time to reclaim memory.

    ``before_look`` is called once the GPUs are ours, before their memory is looked at; ``check`` is for the wait, see
    ``lease_gpus``. Raises NotClean, LeaseTimeout, LockDirError, ValueError for more GPUs than there are, HostFault when
    NVML does not work at all, and whatever ``before_look`` or ``check`` raises; then nothing is held.
    """
    locks = Locks(test, directory)
    until = time.monotonic() + wait_s
    avoided: dict[str, str] = {}
    if choice.pick(choice.uuids, n) is None:
        raise ValueError(f"{n} of {len(choice.uuids)} candidate GPUs cannot be leased")
    while True:
        shut = quarantined(locks.directory)
        left = choice.without({*shut, *avoided})
        if left.pick(left.uuids, n) is None:
            raise _none_left(choice, n, shut, avoided)
        try:
            lease = lease_gpus(left, n, until - time.monotonic(), on_wait, test=test, directory=directory, check=check)
        except LeaseTimeout as error:
            if avoided:
                error.args = (f"{error} Not taken: {'; '.join(avoided.values())}.",)
            raise
        try:
            before_look()
            found = _inspect(lease, left, n, room)
        except BaseException:
            lease.give_back()
            raise
        if not found and not set(lease.uuids) & set(quarantined(locks.directory)):
            return lease
        try:
            for one, ours in found:
                avoided[one.uuid] = str(one)
                if ours:
                    outcome, reason = _reason(one)
                    put(locks, one.uuid, outcome, reason)
        finally:
            lease.give_back()


def take_back(
    lease: GpuLease,
    room: CleanRoom,
    what: str,
    *,
    test: str = "",
    ours: Mapping[int, int] = MappingProxyType({}),
    others: Sequence[str] = (),
) -> str | None:
    """Give GPUs back once they are clean again; what did not come back, in one line, or None.

    ``ours`` are the processes that used them by this lease (pid → start time): memory that only they have (or that
    nobody has) is a leak of ``what``, and its GPU goes into quarantine. ``others`` are the GPUs of this rig, one of
    which is looked at when none of ours answers. Raises LockDirError, and HostFault when NVML does not work at all;
    the lease is over in any case.
    """
    try:
        dirt = room.wait(lease.uuids)
        _blame_the_host(dirt, lease, others, room)
        for one in dirt:
            if one.fault is not None or not one.strangers(ours):
                outcome, reason = _reason(one)
                put(Locks(test, lease.directory), one.uuid, outcome, f"{what}: {reason}")
    except BaseException:
        lease.release()
        raise
    lease.end("dirty" if dirt else "clean")
    if not dirt:
        return None
    told = "; ".join(f"{one}{' (somebody else uses it now)' if _theirs(one, ours) else ''}" for one in dirt)
    return f"{what}, memory did not come back: {told}"


def _theirs(one: Dirt, ours: Mapping[int, int]) -> bool:
    return one.fault is None and bool(one.processes) and one.strangers(ours)


def _inspect(lease: GpuLease, left: GpuChoice, n: int, room: CleanRoom) -> list[tuple[Dirt, bool]]:
    """The GPUs of this lease that are not clean, and whether each is to be kept from everybody.

    It waits for the driver where there is hope: after a lease that was never given back in order, where nobody is seen
    to hold the memory, and where there is no other GPU to take instead.
    """
    dirt = room.look(lease.uuids)
    rest = left.without([one.uuid for one in dirt])
    others = rest.pick(rest.uuids, n) is not None
    if others or not all(one.hangs for one in dirt):
        _blame_the_host(dirt, lease, left.uuids, room)
    now, later = [], []
    for one in dirt:
        if one.fault is not None and (others or not one.hangs):
            now.append((one, True))
        elif one.fault is None and others and one.strangers() and not _abandoned(lease, one.uuid):
            now.append((one, False))
        else:
            later.append(one.uuid)
    if now:
        return now  # other GPUs are taken instead, and whoever gets these next waits for them
    found = room.wait(later)
    _blame_the_host(found, lease, left.uuids, room)
    return [(one, one.fault is not None or not one.strangers(doubt=not _abandoned(lease, one.uuid))) for one in found]


def _blame_the_host(dirt: Sequence[Dirt], lease: GpuLease, all_of_them: Sequence[str], room: CleanRoom) -> None:
    """When no GPU answers, of several, NVML itself is broken, and none of them is to blame: raises the fault."""
    faults = [one.fault for one in dirt if one.fault is not None]
    if len(faults) < len(lease.uuids):
        return
    another = [uuid for uuid in all_of_them if uuid not in lease.uuids][:1]
    silent = any(one.fault for one in room.look(another)) if another else len(faults) > 1
    if silent:
        raise faults[0]


def _abandoned(lease: GpuLease, uuid: str) -> bool:
    """Whether the lease before this one was never given back in order: its holder was killed."""
    before = lease.previous.get(uuid, {})
    return bool(before) and "ended" not in before and before.get("boot") in (None, boot_id())


def _reason(one: Dirt) -> tuple[str, str]:
    if one.fault is not None:
        return one.fault.outcome if one.fault.outcome == HARDWARE else HARDWARE, one.fault.cause
    return DIRTY, str(one).removeprefix(f"{one.uuid} has ")


def _none_left(choice: GpuChoice, n: int, shut: dict[str, Quarantine], avoided: dict[str, str]) -> NotClean:
    mine = [shut[uuid] for uuid in choice.uuids if uuid in shut]
    told: Sequence[str] = [*avoided.values(), *(str(one) for one in mine if one.uuid not in avoided)]
    outcome = mine[0].outcome if mine and set(avoided) <= set(shut) else DIRTY
    lifts = "; `gpuguard who --clear UUID` lifts a quarantine" if mine else ""
    wanted = f"{n} of {len(choice.uuids)} GPUs wanted"
    return NotClean(outcome, f"not clean before the boot: {'; '.join(told)} ({wanted}{lifts})")
