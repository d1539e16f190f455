"""On several stacks a claim runs on the same GPUs, as long as they are free; where it does not, that is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pytest_gpuguard.claims.gpuset import GpuChoice
from pytest_gpuguard.same_gpus import SameGpus

from .test_several_stacks import REPORTS, reports

Run = Any
FakeRigs = Any

HOLDING = """
from pytest_gpuguard.lease.gpus import lease_gpus
from pytest_gpuguard.facts.nvml import query_rig

HELD = []

@pytest.fixture(autouse=True)
def others(request):
    {rule}
    while HELD:
        HELD.pop().release()
    if busy is not None:
        HELD.append(lease_gpus([query_rig().gpus[busy].uuid], 1))
    yield
    while HELD:
        HELD.pop().release()
"""

CLAIM = """
@needs_gpus(1)
@serves("sglang", MODEL)
@fits
def test_it(): ...
"""


@pytest.fixture
def two_stacks(
    claims: Run, fake_python: Path, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> Run:
    """Runs claims on two stacks and three GPUs of the stand-in, while ``busy`` says which one somebody else has."""
    rig = fake_rig(n=3)
    rig.apply(monkeypatch)
    pytester.makeconftest(REPORTS)

    def run(source: str, busy: str, *args: str) -> pytest.RunResult:
        # Two pythons: of one, the second stack's server would count as the first one's, and both stay up.
        stacks = [f"--gpuguard-stack=old={fake_python}", f"--gpuguard-stack=new={fake_python.parent}/../bin/python"]
        held = HOLDING.format(rule=f"old = '[old]' in request.node.nodeid; busy = {busy}")
        result: pytest.RunResult = claims(held + dedent(source), *stacks, *args, stack="")
        return result

    run.rig = rig  # type: ignore[attr-defined]
    return run


def ran_on(run: Run) -> dict[str, list[int]]:
    numbers = {run.rig.uuid(place): place for place in range(3)}
    return {one["stack"]: [numbers[uuid] for uuid in one["gpus"]] for one in reports()}


def test_a_claims_stacks_have_the_same_gpus_although_better_ones_are_free_again(two_stacks: Run) -> None:
    assert two_stacks(CLAIM, "2 if old else None").ret == 0  # the one that is on its own would be taken first
    assert ran_on(two_stacks) == {"old": [0], "new": [0]}
    assert [one["warnings"] for one in reports()] == [[], []]


def test_where_they_are_not_free_others_are_taken_and_that_is_told(two_stacks: Run) -> None:
    result = two_stacks(CLAIM, "None if old else 2")
    assert result.ret == 0
    assert ran_on(two_stacks) == {"old": [2], "new": [0]}
    assert [len(one["warnings"]) for one in reports()] == [0, 1]
    result.stdout.fnmatch_lines(["*warning: on GPU 0 (*), and not on GPU 2 (*) as on old"])


def test_a_test_that_only_leases_gpus_has_the_same_ones_too(two_stacks: Run) -> None:
    source = """
    @needs_gpus(1)
    @max_mem("5GiB", of="peak")
    def test_it(gpus, stack): ...
    """
    two_stacks(source, "2 if old else None")
    assert ran_on(two_stacks) == {"old": [0], "new": [0]}


def test_a_claim_that_joins_a_server_is_told_of_other_gpus_too(two_stacks: Run) -> None:
    both = CLAIM + CLAIM.replace("test_it", "test_too")
    assert two_stacks(both, "None if old else 2").ret == 0
    found = {(one["nodeid"].partition("::")[2], one["stack"]): len(one["warnings"]) for one in reports()}
    assert found == {
        ("test_it[old]", "old"): 0,
        ("test_too[old]", "old"): 0,
        ("test_it[new]", "new"): 1,
        ("test_too[new]", "new"): 1,
    }


def shown(uuids: Sequence[str]) -> str:
    return "+".join(uuids)


def test_what_the_first_stack_had_is_known_to_all_workers(tmp_path: Path) -> None:
    one, two = SameGpus(tmp_path), SameGpus(tmp_path)
    one.of("claim", "old", shown).took(["b", "c"])
    choice = GpuChoice(("a", "b", "c"))
    place = two.of("claim", "new", shown)
    assert place.preferring(choice, 2).pick("abc", 2) == ("b", "c")
    assert place.preferring(choice, 1) == choice  # another boot of it
    assert two.of("another", "new", shown).preferring(choice, 2) == choice
    place.took(["a", "c"])
    assert place.told == ("on a+c, and not on b+c as on old",)
    assert one.of("claim", "old", shown).preferring(choice, 2).kept == {"b", "c"}  # the first one's stay
    assert one.of("claim", "new", shown).told == ()


def test_other_gpus_on_the_same_stack_are_nothing_to_tell() -> None:
    run = SameGpus(None)
    run.of("claim", "old", shown).took(["a"])
    again = run.of("claim", "old", shown)
    again.took(["b"])
    assert again.told == ()


def test_servers_beside_each_other_have_each_the_place_of_its_like() -> None:
    run, choice = SameGpus(None), GpuChoice(("a", "b", "c"))
    first, second = run.of("claim", "old", shown), run.of("claim", "new", shown)
    first.took(["c"])
    first.took(["a"])
    for uuid in "ca":
        assert second.preferring(choice, 1).kept == {uuid}
        second.took([uuid])
    assert second.preferring(choice, 1).kept == frozenset()
    second.took(["b"])
    assert first.told == second.told == ()


def test_a_share_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    run = SameGpus(tmp_path / "gone")
    run.of("claim", "old", shown).took(["a"])
    assert run.of("claim", "new", shown).preferring(GpuChoice(("a", "b")), 1).kept == {"a"}
