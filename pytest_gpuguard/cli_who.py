"""``gpuguard who``: who has which GPU, who waits for one, and what is in quarantine, from the lock folder and NVML.

It must not disturb anybody who holds or waits: a quarantine lifted with ``--clear`` is all that it ever changes.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from .facts.gpu import Gpu, Rig
    from .facts.nvml import NvmlChild
    from .lease.flocks import Holder
    from .lease.quarantine import Quarantine
    from .lease.survey import Survey, Taken, Unit, Waiting

_GIB: Final = 1 << 30
#: A driver keeps some memory of an idle GPU; what is above this belongs to somebody.
_IDLE_GIB: Final = 1.0
#: For one question to NVML: shorter than a run's, because somebody sits before it.
_DEADLINE_S: Final = 5.0
_HOLDER: Final = ("user", "pid", "host", "test", "since")
_QUARANTINE: Final = ("outcome", "reason", "since", "user", "pid", "test")


@dataclass(frozen=True, slots=True)
class _Process:
    """Who has memory of a GPU, by NVML; ``used_gib`` is None where the driver does not say."""

    pid: int
    used_gib: float | None
    what: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """One GPU or MIG device, as NVML sees it. ``used_gib`` is None where memory is the host's too.

    ``whole`` is the GPU that it is a part of, whose lock is the one that is taken; ``parts``: it is cut into such.
    """

    index: int
    uuid: str
    name: str
    used_gib: float | None = None
    fault: str | None = None
    processes: tuple[_Process, ...] = ()
    parts: bool = False
    whole: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """One GPU, by the lock folder and by NVML; ``seen`` is None where NVML does not know it."""

    uuid: str
    holder: Holder | None
    quarantine: Quarantine | None
    seen: _Seen | None

    @property
    def state(self) -> str:
        """``leased`` comes first: a quarantine on a GPU that is held begins to matter when it is given back."""
        return "leased" if self.holder is not None else "free" if self.quarantine is None else "quarantine"

    @property
    def stray(self) -> bool:
        """Whether somebody uses it who never leased it."""
        seen = self.seen
        used = seen.used_gib if seen is not None and not seen.parts else None
        return self.holder is None and used is not None and used > _IDLE_GIB


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/leases.md.")
@click.option(
    "--clear",
    "clears",
    multiple=True,
    metavar="UUID",
    help="Lift the quarantine of this GPU: its UUID, the beginning of it, or its index. Repeatable.",
)
def who(as_json: bool, clears: tuple[str, ...]) -> None:
    """Show who has which GPU of this machine, who waits for one, and what is in quarantine.

    Exits 0. With --clear: 0 when the quarantine is lifted, 1 when a GPU was not in quarantine, 2 when there is no such
    GPU or its file cannot be written.
    """
    from .claims.account import printable
    from .facts.lease import UnsupportedPlatform, require_linux
    from .lease.mounts import findings
    from .lease.survey import chosen_folder, survey

    try:
        require_linux("showing who has which GPU")
    except UnsupportedPlatform as error:
        raise click.UsageError(str(error)) from None
    folder = chosen_folder()
    if clears:
        if as_json:
            raise click.UsageError("--json shows who has what, and --clear does not: give one of them")
        _clear(folder, clears)
        return
    seen, notes = _look()
    found = survey(folder, [one.uuid for one in seen])
    rows = _rows(found, seen)
    notes = [*_unusable(folder), *findings(folder), *notes]
    if as_json:
        click.echo(json.dumps(_data(found, rows, notes)))
    else:
        for line in _lines(found, rows, notes):
            click.echo(printable(line))


def _unusable(folder: Path) -> list[str]:
    """Why nobody can lock there, or that nobody has done so yet; nothing is made or changed."""
    from .lease.dirs import LockDirError, usable

    if not os.path.lexists(folder):
        return ["The lock folder is not there yet: nobody holds anything."]
    try:
        usable(folder)
    except LockDirError as error:
        return [str(error)]
    return []


def _look() -> tuple[list[_Seen], list[str]]:
    """All GPUs of the machine by NVML, each asked apart, and what is to be said about NVML itself."""
    from .facts.faults import HostFault
    from .facts.nvml import NvmlChild

    with NvmlChild(deadline_s=_DEADLINE_S) as child:
        try:
            rig = child.machine()
        except HostFault as fault:
            return [], [f"GPUs are told by the lock folder alone: {fault}"]
        if not rig.gpus:
            return [], [f"GPUs are told by the lock folder alone: {rig.reason}"]
        seen = [one for gpu in rig.gpus for one in _seen(child, gpu)]
    if not _in_order(rig):
        return seen, ["A GPU does not say where it sits, so the indices of the others may be too small by one."]
    return seen, []


def _in_order(rig: Rig) -> bool:
    """Whether indices are sure: they follow the bus ids, which a GPU that is lost or hangs may never have told."""
    return all(gpu.bus_id for gpu in rig.gpus)


def _seen(child: NvmlChild, gpu: Gpu) -> Iterator[_Seen]:
    """One GPU and its MIG devices."""
    fault, processes = (gpu.fault, ()) if gpu.fault is not None else _processes(child, gpu.uuid)
    used = _gib(None if gpu.unified else gpu.memory.used)
    yield _Seen(gpu.index, gpu.uuid, gpu.name, used, fault, processes, bool(gpu.mig_devices))
    for device in gpu.mig_devices:
        fault, processes = (gpu.fault, ()) if gpu.fault is not None else _processes(child, device.uuid)
        name, used = device.name or "MIG device", _gib(device.memory.used)
        yield _Seen(gpu.index, device.uuid, name, used, fault, processes, whole=gpu.uuid)


def _processes(child: NvmlChild, uuid: str) -> tuple[str | None, tuple[_Process, ...]]:
    """A fault, or who has memory there."""
    from .facts.faults import HostFault
    from .facts.holders import describe_pid

    try:
        reported = child.processes([uuid])[uuid]
    except HostFault as fault:
        return fault.cause, ()
    return None, tuple(_Process(pid, _gib(used), describe_pid(pid)) for pid, used in reported)


def _gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / _GIB, 3)


def _rows(found: Survey, seen: Sequence[_Seen]) -> list[_Row]:
    """NVML's GPUs in its order, then those that only the lock folder knows.

    Where NVML answers, a free one of those is only the file of a GPU that was here once.
    """
    known = {one.uuid: one for one in seen}
    rows = []
    for one in found.gpus:
        part = known.get(one.uuid)
        locked = found.gpu(part.whole) if part is not None and part.whole is not None else one
        rows.append(_Row(one.uuid, locked.holder, locked.quarantine, part))
    return [row for row in rows if row.seen is not None or row.state != "free" or not seen]


def _clear(folder: Path, clears: Sequence[str]) -> None:
    """Lift quarantines: nothing is done unless every name is understood."""
    from .claims.account import printable
    from .lease.dirs import LockDirError
    from .lease.quarantine import lift, quarantined

    shut = quarantined(folder)
    uuids = [text if text in shut else _meant(folder, text) for text in clears]
    missed = False
    for uuid in dict.fromkeys(uuids):
        try:
            lifted = lift(folder, uuid)
        except LockDirError as error:
            raise click.UsageError(str(error)) from None
        missed |= not lifted
        why = f": it was in quarantine because {shut[uuid].reason}" if uuid in shut else ""
        click.echo(printable(f"{uuid} is handed out again{why}" if lifted else f"{uuid} was not in quarantine"))
    if missed:
        raise SystemExit(1)


def _meant(folder: Path, text: str) -> str:
    """The UUID that is meant by it, by the beginning of it or by an index. Raises click.UsageError."""
    from .facts.faults import HostFault
    from .facts.gpu import Rig
    from .facts.nvml import NvmlChild
    from .lease.survey import survey

    with NvmlChild(deadline_s=_DEADLINE_S) as child:
        try:
            rig = child.machine()
        except HostFault as fault:
            rig = Rig(reason=str(fault))
    why = f" (NVML shows no GPU: {rig.reason})" if not rig.gpus else ""
    if text.isdecimal():
        if not _in_order(rig):
            raise click.UsageError(
                f"--clear {text}: a GPU does not say where it sits, so indices are not sure: give the UUID"
            )
        found = [gpu.uuid for gpu in rig.gpus if gpu.index == int(text)]
    else:
        uuids = [one for gpu in rig.gpus for one in (gpu.uuid, *(device.uuid for device in gpu.mig_devices))]
        known = [one.uuid for one in survey(folder, uuids).gpus]
        found = [text] if text in known else [uuid for uuid in known if text and uuid.startswith(text)]
    if len(found) > 1:
        raise click.UsageError(f"--clear {text}: several GPUs begin so: {', '.join(found)}")
    if not found:
        raise click.UsageError(f"--clear {text}: there is no such GPU{why}; gpuguard who shows those that there are")
    return found[0]


def _lines(found: Survey, rows: Sequence[_Row], notes: Sequence[str]) -> Iterator[str]:
    """The text for people."""
    folder = str(found.folder)
    yield f"lock folder: {folder}  containers: -v {shlex.quote(f'{folder}:{folder}')}"
    yield from notes
    for row in rows:
        yield from _row_lines(row)
    for number, one in enumerate(found.waiting, 1):
        yield _waiting_line(number, one)
    for taken in found.taken:
        yield f"{'' if taken.ports else 'slot '}{taken.what}: taken by {_told(taken.holder)}"
    if found.production is not None:
        yield f"production unit: {_unit(found.production)}"


def _row_lines(row: _Row) -> Iterator[str]:
    seen = row.seen
    label = f"GPU {seen.index} ({seen.name}, {row.uuid})" if seen is not None else f"GPU {row.uuid}"
    states = [f"leased by {_told(row.holder)}"] if row.holder is not None else []
    if row.quarantine is not None:
        states.append(f"in quarantine{_since(row.quarantine.since)}: {row.quarantine.reason}")
        if row.quarantine.test:
            states[-1] += f", noticed in {row.quarantine.test}"
    yield f"{label}: {'; '.join(states) or 'free'}"
    if seen is None:
        return
    if seen.fault is not None:
        yield f"  fault: {seen.fault}"
    if seen.used_gib is not None:
        yield f"  {seen.used_gib:.2f} GiB in use{', and nobody leased it' if row.stray else ''}"
    for process in seen.processes:
        size = f": {process.used_gib:.2f} GiB" if process.used_gib is not None else ""
        yield f"    {process.what}{size}"


def _waiting_line(number: int, one: Waiting) -> str:
    text = f"waiting {number}: {_told(one.holder)}: wants {one.wants} of {len(one.uuids)} GPUs"
    if one.holds:
        text += f", has {len(one.holds)}"
    if one.passed:
        text += f", passed {one.passed} {'time' if one.passed == 1 else 'times'}"
    return f"{text}, asleep (its process is stopped)" if one.asleep else text


def _told(holder: Holder) -> str:
    """User, pid, test and since, in the words of a lease that waits."""
    return str(replace(holder, wants=None)).partition(": held by ")[2]


def _since(moment: float | None) -> str:
    return "" if moment is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(moment))


def _unit(unit: Unit) -> str:
    if unit.stopped:
        text = "stopped" + (f" by {unit.by}" if unit.by else "") + (f" at {unit.at}" if unit.at else "")
        text += ", runs need its GPUs" if unit.held else ", and nobody is left to start it before the next run"
    else:
        text = "not recorded as stopped" + (", runs need its GPUs" if unit.held else "")
    return text if unit.changing is None else f"{text}; being stopped or started by {_told(unit.changing)}"


def _data(found: Survey, rows: Sequence[_Row], notes: Sequence[str]) -> dict[str, Any]:
    """The JSON object: sizes in GiB, times in epoch seconds, null for what is unknown."""
    return {
        "folder": str(found.folder),
        "notes": list(notes),
        "gpus": [_row_data(row) for row in rows],
        "waiting": [_waiting_data(one) for one in found.waiting],
        "taken": [_taken_data(one) for one in found.taken],
        "production": None if found.production is None else _unit_data(found.production),
    }


def _row_data(row: _Row) -> dict[str, Any]:
    seen, shut = row.seen, row.quarantine
    processes = seen.processes if seen is not None else ()
    return {
        "index": seen.index if seen is not None else None,
        "uuid": row.uuid,
        "name": seen.name if seen is not None else None,
        "state": row.state,
        "holder": None if row.holder is None else _holder_data(row.holder),
        "quarantine": None if shut is None else {name: getattr(shut, name) for name in _QUARANTINE},
        "used_gib": seen.used_gib if seen is not None else None,
        "fault": seen.fault if seen is not None else None,
        "processes": [{"pid": one.pid, "used_gib": one.used_gib, "what": one.what} for one in processes],
    }


def _holder_data(holder: Holder) -> dict[str, Any]:
    return {**{name: getattr(holder, name) for name in _HOLDER}, "lives": holder.lives}


def _waiting_data(one: Waiting) -> dict[str, Any]:
    wanted = {"wants": one.wants, "uuids": list(one.uuids), "holds": list(one.holds)}
    return {**_holder_data(one.holder), **wanted, "passed": one.passed, "asleep": one.asleep}


def _taken_data(one: Taken) -> dict[str, Any]:
    ports = None if one.ports is None else {"base": one.ports.base, "size": one.ports.size}
    return {"what": one.what, "holder": _holder_data(one.holder), "ports": ports}


def _unit_data(unit: Unit) -> dict[str, Any]:
    changing = None if unit.changing is None else _holder_data(unit.changing)
    return {"held": unit.held, "stopped": unit.stopped, "changing": changing, "by": unit.by, "at": unit.at}
