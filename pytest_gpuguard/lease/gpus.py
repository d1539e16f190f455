"""The local GPU lease: all of the wanted GPUs or none, one flock per UUID, first come first served.

It must never hold a GPU while it waits for another one (that deadlocks), never let small requests starve a big one, and
never depend on what a dead or stopped process left behind: only locks decide, and they end with their holder.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ..claims.gpuset import GpuChoice
from .book import Book, Ticket
from .dirs import LockDirError
from .fifo import Request, Turn, deadlocked, turns
from .flocks import (
    NOTIFY_S,
    POLL_S,
    HeldLocks,
    Holder,
    LeaseDeadlock,
    LeaseTimeout,
    Locks,
    OnWait,
    boot_id,
    read_record,
    write_record,
)
from .keeper import same_file
from .notice import Notice

#: Even who does not want to wait waits so long: what ended just now may take some milliseconds to let go.
PATIENCE_S: Final = 0.5
#: A waiter looks at least so often, and says with each look that it is still there.
_LOOK_S: Final = 1.0
#: A file is said to be closed a moment before its lock ends.
_DOUBT_S: Final = 0.01
_NEW: Final = 1 << 62
_OURS: weakref.WeakSet[GpuLease] = weakref.WeakSet()


class GpuLease(HeldLocks):
    """GPUs reserved on this host, in the caller's order of preference.

    ``previous`` is what each lock file told of the lease before this one: its key ``ended`` is missing when that one
    was never given back in order.
    """

    def __init__(self, locks: Mapping[str, int], files: Mapping[str, Path], previous: Mapping[str, Mapping[str, Any]]):
        super().__init__(locks.values())
        self.uuids = tuple(locks)
        self.previous = dict(previous)
        self._locks = dict(locks)
        self._files = dict(files)
        self._owner = os.getpid()
        _OURS.add(self)

    @property
    def intact(self) -> bool:
        """Whether the locks still keep others out: not when somebody has removed the lock folder or its files."""
        return not self.released and all(same_file(fd, self._files[uuid]) for uuid, fd in self._locks.items())

    def end(self, how: str) -> None:
        """Give the GPUs back in order; ``how`` is "clean", "unused" or "dirty", for whoever has them next.

        The record still tells who had them: what they started may hold the locks for longer.
        """
        if not self.released:
            for fd in self._locks.values():
                write_record(fd, {**read_record(fd), "ended": how, "at": time.time(), "boot": boot_id()})
        self.release()

    def give_back(self) -> None:
        """Let go of GPUs that were not used: the next one is told what we were told of the lease before ours."""
        if not self.released:
            for uuid, fd in self._locks.items():
                write_record(fd, self.previous.get(uuid, {}))
        self.release()

    @property
    def directory(self) -> Path | None:
        """The lock folder."""
        return next((file.parent for file in self._files.values()), None)

    @property
    def held_here(self) -> bool:
        """Whether this very process holds them."""
        return not self.released and self._owner == os.getpid()


def lease_gpus(
    candidates: GpuChoice | Sequence[str],
    n: int,
    wait_s: float = 0.0,
    on_wait: OnWait | None = None,
    *,
    test: str = "",
    directory: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> GpuLease:
    """Reserve ``n`` of the candidate GPUs, the best set that is free, waiting at most ``wait_s`` seconds.

    Waiters are served in their order; a request that cannot be served yet may be passed a few times by smaller ones
    (``fifo.turns``). ``on_wait(holders, waited_s)`` is called at the first wait and every 30 s; holders with
    ``wants`` wait before us. ``check()`` is called before each look, about once a second: what it raises ends the
    wait, and nothing is held. Whether the GPUs are *clean* is another question: see ``cleanroom``. Raises LeaseTimeout,
    which names the holders; LeaseDeadlock when waiting could never end; ValueError when no set of candidates would do;
    LockDirError; UnsupportedPlatform.
    """
    choice = candidates if isinstance(candidates, GpuChoice) else GpuChoice(tuple(dict.fromkeys(candidates)))
    if n < 1 or choice.pick(choice.uuids, n) is None:
        raise ValueError(f"{n} of {len(choice.uuids)} candidate GPUs cannot be leased")
    waiter = _Waiter(Locks(test, directory), choice, n)
    try:
        return waiter.wait(max(wait_s, PATIENCE_S), on_wait, check)
    finally:
        waiter.close()


@lru_cache(1024)
def lock_name(uuid: str) -> str:
    """The name of a GPU's lock; its file is ``<name>.lock``."""
    return "gpu-" + re.sub(r"[^A-Za-z0-9._-]", "_", uuid)


def _is_gpu(file: str) -> bool:
    """Whether a file of the lock folder is the lock of a GPU."""
    return file.startswith(lock_name("")) and file.endswith(".lock") and not Book.owns(file)


class _Waiter:
    """One request for GPUs, from the first look to the lease.

    Only the first of the queue hears of every lock that ends: it takes what it wants, and calls those whose turn it is
    with it. The others hear of that call, and of the one before them leaving the queue.
    """

    def __init__(self, locks: Locks, choice: GpuChoice, n: int) -> None:
        self._locks = locks
        self._choice = choice
        self._n = n
        self._names = {uuid: lock_name(uuid) for uuid in choice.uuids}
        self._record = locks.signature()
        self._book = Book(locks)
        self._ticket: Ticket | None = None
        self._notice: Notice | None = None
        self._ahead: tuple[Ticket, ...] = ()
        self._doubt = False
        self._since = time.monotonic()
        self._holds = tuple(uuid for lease in list(_OURS) if lease.held_here for uuid in lease.uuids)

    def wait(self, wait_s: float, on_wait: OnWait | None, check: Callable[[], None]) -> GpuLease:
        """Look, wait, look again."""
        began = time.monotonic()
        next_notice = 0.0
        while True:
            check()
            lease = self._answer() or self._look()
            if lease is not None:
                return lease
            waited = time.monotonic() - began
            if waited >= wait_s:
                raise LeaseTimeout(self._what, self._in_the_way(), waited)
            if on_wait is not None and waited >= next_notice:
                on_wait(self._in_the_way(), waited)
                next_notice = waited + NOTIFY_S
            self._sleep(min(_DOUBT_S if self._doubt else _LOOK_S, max(0.001, wait_s - waited)))

    def close(self) -> None:
        """Leave the queue."""
        if self._ticket is not None:
            self._leave()
            try:
                with self._book:
                    now = time.monotonic()
                    others = self._book.tickets()
                    waiting = {one.request.number: one for one in others if not one.called}
                    queue = [one.request for one in waiting.values()]
                    self._call(waiting, turns(queue, self._free(others), self._book.passed, now), now)
            except (LockDirError, OSError):
                pass  # they look by themselves before long
        if self._notice is not None:
            self._notice.close()
        self._book.close()

    @property
    def _what(self) -> str:
        return f"{self._n} GPU(s) of {', '.join(self._choice.uuids)}"

    def _answer(self) -> GpuLease | None:
        """The lease, if we were called to take it."""
        uuids = self._ticket.answer(time.monotonic()) if self._ticket is not None else ()
        if len(uuids) != self._n or self._choice.pick(uuids, self._n) is None:
            return None
        lease = self._take(uuids)
        if lease is not None:
            self._leave()
        return lease

    def _look(self) -> GpuLease | None:
        """The lease, if it is our turn and enough is free; else a place in the queue."""
        with self._book:
            now = time.monotonic()
            told = self._notice.drain() if self._notice is not None else frozenset()
            self._doubt = False
            number = self._ticket.request.number if self._ticket is not None else _NEW
            others = [one for one in self._book.tickets() if one.request.number != number]
            me = Request(number, self._n, self._choice, now, self._holds, self._since)
            free, lease = self._try(me, others)
            if lease is not None:
                return lease
            circle = deadlocked(me, [one.request for one in others])
            if circle and max(one.number for one in circle) == number:
                raise LeaseDeadlock(self._what, self._in_the_way())
            if self._ticket is None:
                self._ticket = self._book.queue_up(me)
                me = self._ticket.request
            else:
                self._ticket.beat(now)
            if self._listen(now):  # something may have ended before we began to watch
                free, lease = self._try(me, self._book.tickets())
            self._doubt |= not set(filter(_is_gpu, told)) <= {f"{lock_name(uuid)}.lock" for uuid in free}
        return lease

    def _try(self, me: Request, tickets: Sequence[Ticket]) -> tuple[set[str], GpuLease | None]:
        """What is free for those who wait, and the lease if it is our turn; the others whose turn it is are called."""
        others = {one.request.number: one for one in tickets if one.request.number != me.number}
        waiting = {number: one for number, one in others.items() if not one.called}
        free = self._free(others.values())
        queue = sorted([me, *(one.request for one in waiting.values())], key=lambda one: one.number)
        found = turns(queue, free, self._book.passed, me.beat)
        mine = found.pop(me.number, None)
        lease = self._take(mine.take) if mine is not None else None
        if mine is not None and lease is not None:
            self._leave()
            found[me.number] = mine
        self._doubt |= mine is not None and lease is None
        self._call(waiting, found, me.beat)
        self._ahead = tuple(one for number, one in waiting.items() if number < me.number and number not in found)
        return free, lease

    def _call(self, waiting: Mapping[int, Ticket], found: Mapping[int, Turn], now: float) -> None:
        """Call those of the others whose turn it is."""
        self._book.note_passed([number for turn in found.values() for number in turn.passes])
        for number, turn in found.items():
            if number in waiting:
                waiting[number].call(turn.take, now)

    def _leave(self) -> None:
        if self._ticket is not None:
            self._ticket.tear()
            self._ticket = None

    def _listen(self, now: float) -> bool:
        """Watch what may make it our turn; True when we have to look again, as we are the first of the queue now."""
        assert self._ticket is not None
        if self._notice is None:
            self._notice = Notice(self._locks.directory, POLL_S)
        before = [one for one in self._ahead if not one.request.asleep(now)][-1:]
        files = [one.file for one in (self._ticket, *before)]
        begins = self._notice.follow(files, None if before else _is_gpu)
        # who left before we watched is not told of
        self._doubt |= any(self._locks.is_free(one.name) for one in before)
        return begins

    def _sleep(self, seconds: float) -> None:
        """Until there is a reason to look. That the one before us is served is none, unless we are the first then."""
        assert self._notice is not None
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            told = self._notice.wait(max(0.0, until - now))
            before = {one.file: one for one in self._ahead}
            if not told <= before.keys() or not told:
                return
            self._notice.drain()
            if any(self._locks.is_free(before[file].name) and os.path.exists(before[file].path) for file in told):
                return  # it was killed: who is served takes the file along
            there = set(self._book.numbers())
            self._ahead = tuple(one for one in self._ahead if one.request.number in there)
            if self._listen(now) or self._doubt:
                return

    def _free(self, others: Collection[Ticket]) -> set[str]:
        """The free ones of all GPUs that somebody waits for; what others were called to take is theirs."""
        wanted = {*self._names, *(uuid for one in others for uuid in one.request.choice.uuids)}
        kept = {uuid for one in others for uuid in one.called}
        return {uuid for uuid in wanted - kept if self._locks.is_free(lock_name(uuid))}

    def _take(self, uuids: Sequence[str]) -> GpuLease | None:
        got: dict[str, int] = {}
        previous: dict[str, Mapping[str, Any]] = {}
        try:
            for uuid in uuids:
                taken = self._locks.take(self._names[uuid], self._record)
                if taken is None:  # somebody who does not keep to the queue was faster
                    break
                got[uuid], previous[uuid] = taken
        except BaseException:
            HeldLocks(got.values()).release()
            raise
        if len(got) < len(uuids):
            HeldLocks(got.values()).release()
            return None
        files = {uuid: self._locks.directory / f"{self._names[uuid]}.lock" for uuid in uuids}
        return GpuLease(got, files, previous)

    def _in_the_way(self) -> Sequence[Holder]:
        return (*self._locks.holders(self._names.values()), *(one.holder for one in self._ahead))
