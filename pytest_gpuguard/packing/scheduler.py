"""The packing scheduler of pytest-xdist: every decision is made at the last moment, by ``plan.choose``.

Each worker has a placeholder on deck; to start a unit, its tests and another placeholder are sent. It must never send a
unit to a worker that is busy, and never start one after the run was stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..files import read_json, write_json
from .plan import Running, Unit, Work, choose, plan, units_of

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

#: Reads what a worker told of the tests of this collection.
WorksOf = Callable[[Sequence[str]], list[Work]]
#: Tells a worker the GPUs that it is meant to take for its next unit.
Assign = Callable[[str, Sequence[str]], None]
#: Says once what will be run: the tests, the order of their units, the GPUs, the workers.
Announce = Callable[[Sequence[Work], Sequence[Unit], Sequence[str], int], None]


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker: ``ready`` once it has collected the same tests and has its placeholder."""

    node: WorkerController
    ready: bool = False
    running: Running | None = None
    left: list[int] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return self.ready and self.running is None and not self.node.shutting_down


class PackedScheduling:
    """xdist's ``Scheduling``: which worker runs what, and when."""

    def __init__(
        self, config: pytest.Config, works_of: WorksOf, gpus_of: Callable[[], list[str]], assign: Assign, say: Announce
    ) -> None:
        from xdist.workermanage import parse_tx_spec_config

        self._config = config
        self._works_of, self._gpus_of, self._assign, self._say = works_of, gpus_of, assign, say
        self._expected = len(parse_tx_spec_config(config))
        self._workers: dict[WorkerController, _Worker] = {}
        self._collections: dict[WorkerController, list[str]] = {}
        self._collection: list[str] | None = None
        self._works: list[Work] = []
        self._gpus: list[str] = []
        self._pending: list[Unit] = []
        self._hopeless = False

    # ------------------------------------------------------------------------------------------------ xdist's protocol

    @property
    def nodes(self) -> list[WorkerController]:
        """Every worker."""
        return list(self._workers)

    @property
    def collection_is_completed(self) -> bool:
        """Whether all workers that the run begins with have collected."""
        return len(self._collections) >= self._expected

    @property
    def tests_finished(self) -> bool:
        """Whether nothing is left to be run, or nobody who could run it."""
        return self.collection_is_completed and (self._hopeless or not self.has_pending)

    @property
    def has_pending(self) -> bool:
        """Whether tests are still to be run, or running."""
        return bool(self._pending) or any(one.running is not None for one in self._workers.values())

    def add_node(self, node: WorkerController) -> None:
        """Take a worker that has started."""
        assert node not in self._workers
        self._workers[node] = _Worker(node)

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Take what a worker has collected; one that replaces another must have collected the same."""
        first = next(iter(self._collections.items()), None)
        if self._collection is not None and first is not None and not self._same(first, (node, collection)):
            # No test may be sent to it. Where nobody else is left, the run is over: it fails by this report.
            node.shutdown()
            self._hopeless = not any(one.ready for one in self._workers.values())
            return
        self._collections[node] = list(collection)

    def schedule(self) -> None:
        """Plan, when all have collected; later on, take in a worker that replaces another."""
        if self._collection is None:
            first, *others = self._collections.items()
            if not all([self._same(first, other) for other in others]):  # a report for each that differs
                self._hopeless = True
                return
            self._collection = first[1]
            self._works = self._works_of(self._collection)
            if any(not work.plain for work in self._works):
                self._gpus = self._gpus_of()
            workers = len(self._workers)
            self._pending = plan(units_of(self._works, workers), self._gpus, workers)
            if self._pending:
                self._say(self._works, self._pending, self._gpus, workers)
        if not self._collection:
            return
        for node, worker in self._workers.items():
            if not worker.ready and node in self._collections and not node.shutting_down:
                worker.ready = self._send(worker, ())
        self._dispatch()

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """A test has ended: with the last one of its unit the worker is idle, and its GPUs are free."""
        worker = self._workers[node]
        if item_index in worker.left:
            worker.left.remove(item_index)
            if not worker.left:
                worker.running = None
                self._dispatch()

    def mark_test_pending(self, item: str) -> None:
        """Run a test again, which a plug-in may want after a crash."""
        assert self._collection is not None
        index = self._collection.index(item)
        self._pending = units_of([self._works[index]]) + self._pending
        self._dispatch()

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        """Only for schedulers that steal."""
        raise NotImplementedError

    def remove_node(self, node: WorkerController) -> str | None:
        """A worker has ended. Returns the test that it crashed in; the others of its unit are run elsewhere."""
        # Nothing is started yet: that the test has failed is reported only now, and may end the run (``-x``). The
        # worker in its place starts what waits, and so does the next one that is done.
        worker = self._workers.pop(node)
        if worker.running is None:
            return None
        assert self._collection is not None
        crashed, *rest = worker.left
        if rest:
            self._pending.insert(0, replace(worker.running.unit, items=tuple(rest)))
        return self._collection[crashed]

    # -------------------------------------------------------------------------------------------------------- our own

    def _dispatch(self) -> None:
        """Start what may start now."""
        if any(one.ready and one.node.shutting_down for one in self._workers.values()):
            return  # the run is ending, or one has crashed and will be removed in a moment: then it goes on
        idle = [one for one in self._workers.values() if one.idle]
        running = [one.running for one in self._workers.values() if one.running is not None]
        taken = {uuid for one in running for uuid in one.uuids}
        free = [uuid for uuid in self._gpus if uuid not in taken]
        now = time.monotonic()
        for start, worker in zip(choose(self._pending, running, free, now, len(idle)), idle, strict=False):
            self._assign(worker.node.gateway.id, start.uuids)
            if self._send(worker, start.unit.items):
                self._pending = [unit for unit in self._pending if unit is not start.unit]
                worker.running, worker.left = Running(start.unit, start.uuids, now), list(start.unit.items)
            else:
                worker.ready = False  # it is gone, which we shall be told in a moment

    def _send(self, worker: _Worker, items: Sequence[int]) -> bool:
        """The tests, and a placeholder behind them. The placeholder before them ends, and so the first one starts."""
        assert self._collection is not None
        try:
            worker.node.send_runtest_some([*items, len(self._collection)])
        except OSError:
            return False
        return True

    def _same(self, one: tuple[Any, Sequence[str]], other: tuple[Any, Sequence[str]]) -> bool:
        """Whether two workers have collected the same; if not, the difference is reported as a collection error."""
        from xdist.report import report_collection_diff

        (first, collected), (second, also) = one, other
        said = report_collection_diff(collected, also, first.gateway.id, second.gateway.id)
        if said:
            report = pytest.CollectReport(nodeid=second.gateway.id, outcome="failed", longrepr=said, result=[])
            self._config.hook.pytest_collectreport(report=report)
        return not said


def assign(share: Path, worker: str, uuids: Sequence[str]) -> None:
    """The controller's side: the GPUs that a worker is meant to take for what it is sent next."""
    write_json(share / f"assigned-{worker}.json", list(uuids))


def assigned(share: Path) -> tuple[str, ...]:
    """The worker's side: the GPUs to prefer for the next lease; empty where nothing was assigned. Locks decide."""
    return tuple(read_json(share / f"assigned-{os.environ.get('PYTEST_XDIST_WORKER')}.json", ()))
