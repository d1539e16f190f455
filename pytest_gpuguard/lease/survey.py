"""One look at the lock folder: who holds which GPUs, who waits for them in which order, and what else is taken.

It must not disturb anybody: nothing is written, removed or waited for, and the book of the queue is not opened.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..facts.lease import PortRange
from . import keeper
from .book import Book, Ticket
from .dirs import DEFAULTS, ENV
from .flocks import Holder, Locks, boot_id, lock_now
from .gpus import lock_name
from .ports import UNIT
from .quarantine import Quarantine, quarantined

_LOCK: Final = re.compile(r"(gpu|slot|ports)-(.+)\.lock")


@dataclass(frozen=True, slots=True)
class LeasedGpu:
    """One GPU. ``holder`` is None for a free one; a quarantine may lie on a GPU that is still held."""

    uuid: str
    holder: Holder | None = None
    quarantine: Quarantine | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody in the queue who wants ``wants`` GPUs of ``uuids``, holds ``holds`` and was passed ``passed`` times.

    ``asleep``: it has not been heard of for some seconds, so its process is stopped.
    """

    holder: Holder
    wants: int
    uuids: tuple[str, ...]
    holds: tuple[str, ...] = ()
    passed: int = 0
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """Something else that somebody has: a slot by its name, or ports."""

    what: str
    holder: Holder
    ports: PortRange | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """The production unit, as far as the lock folder tells.

    ``held``: runs need its GPUs. ``changing`` is who stops or starts it at this moment. ``stopped``: by the record of
    this boot of the machine it is down; ``by`` and ``at`` say who wrote that, and when. Stopped and not held means that
    nobody is left to start it before the next run.
    """

    held: bool
    stopped: bool
    changing: Holder | None = None
    by: str | None = None
    at: str | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """The lock folder at one moment. GPUs are those that a file of the folder names, or the caller."""

    folder: Path
    gpus: tuple[LeasedGpu, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    taken: tuple[Taken, ...] = ()
    production: Unit | None = None

    def gpu(self, uuid: str) -> LeasedGpu:
        """The GPU of this UUID; free when no file names it."""
        return next((one for one in self.gpus if one.uuid == uuid), LeasedGpu(uuid))


def chosen_folder() -> Path:
    """The folder that ``dirs.lock_dir`` would give, without making it: it need not be there, or be usable."""
    named = os.environ.get(ENV)
    if named:
        return Path(named).absolute()
    for candidate in map(Path, DEFAULTS[:-1]):
        if os.path.lexists(candidate) or os.access(candidate.parent, os.W_OK | os.X_OK):
            return candidate
    return Path(DEFAULTS[-1])


def survey(folder: Path, uuids: Iterable[str] = ()) -> Survey:
    """Who has what now, of these GPUs and of all that the folder knows. Nobody has anything where there is no folder.

    Files that are not ours, or that cannot be read, are passed over. Never raises OSError.
    """
    locks = Locks(directory=folder)
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return Survey(folder, tuple(LeasedGpu(uuid) for uuid in dict.fromkeys(uuids)))
    found: dict[str, list[str]] = {"gpu": [], "slot": [], "ports": []}
    for entry in entries:
        match = _LOCK.fullmatch(entry)
        if match is not None and not Book.owns(entry):
            found[match[1]].append(match[2])
    shut = quarantined(folder)
    gpus = dict.fromkeys([*uuids, *sorted({*found["gpu"], *shut})])
    return Survey(
        folder,
        tuple(LeasedGpu(uuid, _holder(locks, lock_name(uuid)), shut.get(uuid)) for uuid in gpus),
        _waiting(locks),
        (*_slots(locks, found["slot"]), *_ports(locks, found["ports"])),
        _production(locks) if f"{keeper.LOCK}.lock" in entries else None,
    )


def _holder(locks: Locks, name: str) -> Holder | None:
    """Who holds this lock, or None."""
    try:
        return next(iter(locks.holders([name])), None)
    except OSError:
        return None  # a file system without locks: nobody holds anything there


def _waiting(locks: Locks) -> tuple[Waiting, ...]:
    book = Book(locks)
    try:
        tickets: Sequence[Ticket] = book.peek()
    except OSError:
        return ()
    now = time.monotonic()
    return tuple(
        Waiting(
            one.holder,
            one.request.n,
            tuple(map(str, one.request.choice.uuids)),
            tuple(map(str, one.request.holds)),
            book.passed.get(one.request.number, 0),
            one.request.asleep(now),
        )
        for one in tickets
    )


def _slots(locks: Locks, names: Iterable[str]) -> list[Taken]:
    held = [(name, _holder(locks, f"slot-{name}")) for name in names]
    return [Taken(name, holder) for name, holder in held if holder is not None]


def _ports(locks: Locks, names: Iterable[str]) -> list[Taken]:
    """Blocks of ports: neighbours that one process took for one test are one."""
    blocks: list[Taken] = []
    for first in sorted(int(name) for name in names if re.fullmatch(r"\d{1,5}", name)):
        holder = _holder(locks, f"ports-{first}")
        if holder is None:
            continue
        ports = PortRange(first, UNIT)
        if blocks:
            before = blocks[-1]
            assert before.ports is not None
            if before.ports.base + before.ports.size == first and _same(before.holder, holder):
                ports = PortRange(before.ports.base, before.ports.size + UNIT)
                blocks.pop()
        blocks.append(Taken(f"ports {ports}", holder, ports))
    return blocks


def _same(one: Holder, other: Holder) -> bool:
    return one.pid is not None and (one.pid, one.start_time, one.test) == (other.pid, other.start_time, other.test)


def _production(locks: Locks) -> Unit:
    record: dict[str, Any] = locks.record(keeper.LOCK)
    units = record.get("vacated")
    stopped = record.get("boot") == boot_id() and isinstance(units, list) and bool(units)
    by, at = (record.get(key) if isinstance(record.get(key), str) else None for key in ("by", "at"))
    return Unit(_in_use(locks, keeper.LOCK), stopped, _holder(locks, keeper.DOOR), by, at)


def _in_use(locks: Locks, name: str) -> bool:
    """Whether anybody holds a lock that several may hold together."""
    try:
        fd = os.open(f"{locks.directory}/{name}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not lock_now(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
