"""What the planner is told of the tests: written by one worker, where the marks are, and read by the controller.

It must never boot anything, and never make a run fail: what is wrong with a test is told where the test runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from ..claims.gpuset import GpuChoice
from ..claims.needs import select_gpus
from ..collect import CLAIM, GATE, uses_server
from ..facts.gpu import arch_of
from ..files import asked_once, read_json
from .plan import Work

if TYPE_CHECKING:
    from ..evaluate import Evaluation
    from ..run import Runner

#: The file in the shared folder.
TESTS: Final = "tests.json"
#: What a test without our marks is expected to take.
PLAIN_TEST_SECONDS: Final = 0.5

_LEASES: Final = frozenset({"gpus", "gpuguard_gpus"})
_BOOTS: Final = frozenset({"sglang_server", "gpuguard_sglang_server", "command_server", "gpuguard_command_server"})


def leases(item: pytest.Item) -> bool:
    """Whether a test takes GPUs or boots a server, as far as its marks and fixtures tell."""
    claim = item.stash.get(CLAIM, None)
    declared = claim is not None and claim.serves is not None
    names = getattr(item, "fixturenames", ())
    probes = "gpuguard_probe" in names and claim is not None and claim.needs.any_gpu
    return declared or probes or not (_LEASES | _BOOTS).isdisjoint(names)


def is_known(item: pytest.Item) -> bool:
    """Whether anything is known of a test that a plan can use."""
    return CLAIM in item.stash or GATE in item.stash or leases(item)


def work_of(runner: Runner, index: int, item: pytest.Item) -> Work:
    """One test as the planner sees it. A test that is not evaluated here takes no GPU and no time."""
    if not is_known(item):
        return Work(index, item.nodeid, 0, PLAIN_TEST_SECONDS)
    if not _runs(runner, item):
        return Work(index, item.nodeid, 0, 0.0)
    evaluation = runner.evaluation(item)
    expected = runner.memory.expected(item)
    if not leases(item):
        return Work(index, item.nodeid, 0, expected.seconds)
    claim, serves = evaluation.claim, evaluation.claim.serves
    if serves is not None and serves.on_cpu:
        gpus, exclusive = 0, False
    else:
        gpus, exclusive = max(claim.gpus, serves.gpus if serves is not None else 1), claim.needs.exclusive
    choice = select_gpus(claim.needs, gpus, runner.session.rig, arch_of).choice if gpus else None
    return Work(
        index,
        item.nodeid,
        gpus,
        expected.seconds,
        exclusive,
        cpu_server=serves is not None and serves.on_cpu,
        server=None if serves is None else _server(evaluation, choice, exclusive),
        uses=uses_server(item),
        choice=choice if choice is not None and choice.uuids else None,
        boot_seconds=expected.boot_seconds,
    )


def is_skipped(item: pytest.Item) -> bool:
    """Whether a mark skips a test, by pytest's own evaluation; also when a mark cannot be evaluated, which fails it."""
    from _pytest.skipping import evaluate_skip_marks

    try:
        return evaluate_skip_marks(item) is not None
    except (pytest.fail.Exception, TypeError):
        return True


def _runs(runner: Runner, item: pytest.Item) -> bool:
    """Whether a test will be evaluated here."""
    if is_skipped(item):
        return False
    budget = runner.memory.budget
    if budget is not None and budget.left_out(item.nodeid) is not None:
        return False
    return not runner.evaluation(item).unmet()


def _server(evaluation: Evaluation, choice: GpuChoice | None, exclusive: bool) -> str:
    """Equal for tests that the pool of boots lets share one: declared alike, on the same stack and GPUs."""
    serves = evaluation.claim.serves
    assert serves is not None
    rest = (sorted(serves.measured.items()), exclusive, choice.uuids if choice else ())
    return hashlib.sha256(repr((evaluation.share_key(), rest)).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------------- file


def write_works(folder: Path, runner: Runner, items: Sequence[pytest.Item]) -> None:
    """Describe the tests, unless another worker has done so: needs ask rig and stacks, once is enough."""
    budget = runner.memory.budget

    def ask() -> list[dict[str, Any]]:
        found = []
        for index, item in enumerate(items):
            try:
                work = work_of(runner, index, item)
            except Exception:  # hooks of a conftest, hosts with faults: the test itself will tell
                work = Work(index, item.nodeid, 0, PLAIN_TEST_SECONDS)
            found.append(to_dict(work if budget is None else replace(work, urgency=budget.urgency(item.nodeid))))
        return found

    asked_once(folder / TESTS, ask)


def read_works(folder: Path, collection: Sequence[str]) -> list[Work]:
    """The tests of this collection. Those of which nothing was told lease nothing."""
    told: dict[int, Work] = {}
    choices: dict[str, GpuChoice] = {}
    for one in read_json(folder / TESTS, ()):
        work = from_dict(one, choices)
        told[work.index] = work
    plain = [Work(index, nodeid, 0, PLAIN_TEST_SECONDS) for index, nodeid in enumerate(collection)]
    return [told[one.index] if one.index in told and told[one.index].nodeid == one.nodeid else one for one in plain]


def to_dict(work: Work) -> dict[str, Any]:
    """JSON-able form of what is not a default."""
    data = {
        "index": work.index,
        "nodeid": work.nodeid,
        "gpus": work.gpus,
        "seconds": work.seconds,
        "exclusive": work.exclusive,
        "cpu_server": work.cpu_server,
        "server": work.server,
        "uses": work.uses,
        "choice": work.choice.to_dict() if work.choice is not None else None,
        "boot_seconds": work.boot_seconds,
        "urgency": work.urgency,
    }
    return {key: value for key, value in data.items() if value is not None and value is not False}


def from_dict(data: dict[str, Any], choices: dict[str, GpuChoice]) -> Work:
    """The test that ``to_dict`` wrote. Equal choices become one object, kept in ``choices``."""
    given = data.pop("choice", None)
    if given is not None:
        key = json.dumps(given, sort_keys=True)
        given = choices.setdefault(key, GpuChoice.from_dict(given))
    return Work(**data, choice=given)
