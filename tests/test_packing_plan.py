"""The planner alone: what is put together, what may start, and how long it takes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuguard.claims.gpuset import GpuChoice
from pytest_gpuguard.packing.plan import (
    Planned,
    Running,
    Start,
    Unit,
    Work,
    bound,
    choose,
    makespan,
    plan,
    simulate,
    units_of,
)
from pytest_gpuguard.packing.units import PLAIN_SECONDS, PLAIN_TESTS

BOX = tuple(f"GPU-{number}" for number in range(8))


def unit(*items: int, gpus: int = 1, seconds: float = 10.0, exclusive: bool = False, cpu_server: bool = False) -> Unit:
    return Unit(items or (0,), gpus, seconds, exclusive, cpu_server)


def length(planned: list[Planned]) -> float:
    return max((one.end for one in planned), default=0.0)


@st.composite
def many_units(draw: st.DrawFn, most: int = 24) -> list[Unit]:
    found = []
    for number in range(draw(st.integers(0, most))):
        seconds = draw(st.sampled_from([0.5, 1.0, 2.0, 3.5, 8.0, 30.0]))
        kind = draw(st.sampled_from(["gpu", "gpu", "gpu", "gpu", "gpu", "exclusive", "cpu", "plain", "some"]))
        gpus = draw(st.sampled_from([1, 1, 1, 2, 4, 8])) if kind in ("gpu", "exclusive", "some") else 0
        choice = None
        if kind == "plain" and draw(st.booleans()):
            seconds = 0.0
        if kind == "some":
            gpus = min(gpus, 4)
            choice = GpuChoice(BOX[4:] if draw(st.booleans()) else BOX[:4])
        found.append(Unit((number,), gpus, seconds, kind == "exclusive", kind == "cpu", choice))
    return found


@given(many_units(), st.sampled_from([0, 1, 2, 8]), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_every_unit_runs_once_within_what_there_is(units: list[Unit], count: int, workers: int) -> None:
    box = BOX[:count]
    planned = simulate(plan(units, box, workers), box, workers)
    assert sorted(one.unit.items for one in planned) == sorted(one.items for one in units)
    for one in planned:
        beside = [
            other
            for other in planned
            if other is not one and other.start <= one.start < other.end and one.end > one.start
        ]
        held = [uuid for other in (one, *beside) for uuid in other.uuids]
        assert len(held) == len(set(held)), "a GPU is held twice"
        assert set(held) <= set(box)
        assert len(beside) + 1 <= workers
        if one.unit.exclusive and box:
            assert all(other.unit.plain for other in beside), "an exclusive one is not alone"
            assert set(one.uuids) == set(box)
        else:
            assert len(one.uuids) == min(one.unit.gpus, count)
        if one.unit.cpu_server:
            assert not any(other.unit.cpu_server for other in beside)
        if one.unit.choice is not None and one.unit.choice.pick(box, one.unit.gpus):
            assert set(one.uuids) <= set(one.unit.choice.uuids)


@given(many_units())
@settings(max_examples=60, deadline=None)
def test_a_plan_is_no_worse_than_the_given_order_and_near_the_bound(units: list[Unit]) -> None:
    planned = makespan(units, BOX, 9)
    assert planned <= length(simulate(units, BOX, 9)) + 1e-9
    assert planned >= bound(units, 8, 9) - 1e-9
    if all(one.choice is None for one in units):
        assert planned <= 2 * bound(units, 8, 9) + 1e-9


@given(many_units())
@settings(max_examples=60, deadline=None)
def test_the_first_unit_that_waits_is_not_delayed_by_later_ones(units: list[Unit]) -> None:
    """By expected times it starts no later than if nothing came after it."""
    for count, waits in enumerate(units[:12]):
        if waits.plain or waits.cpu_server:
            continue
        alone = {one.unit.items: one.start for one in simulate(units[: count + 1], BOX, 99)}
        if any(start > 0 for items, start in alone.items() if items != waits.items):
            return  # another one waits before it
        if alone[waits.items] > 0:
            among = {one.unit.items: one.start for one in simulate(units, BOX, 99)}
            assert among[waits.items] <= alone[waits.items]
            return


def test_a_wide_unit_keeps_its_place_and_short_ones_fill_the_gap() -> None:
    running = [Running(unit(gpus=4, seconds=100), BOX[:4], started=0.0)]
    wide, long, short = unit(1, gpus=8), unit(2, seconds=500), unit(3, seconds=50)
    assert choose([wide, long, short], running, BOX[4:], now=0.0, workers=8) == [Start(short, BOX[4:5])]
    assert choose([wide, long, short], [], BOX, now=0.0, workers=8) == [Start(wide, BOX)]


def test_a_long_unit_starts_beside_the_gpus_that_a_waiting_one_will_take() -> None:
    busy = [Running(unit(gpus=2, seconds=100), BOX[:2], 0.0), Running(unit(gpus=3, seconds=900), BOX[2:5], 0.0)]
    waits, long = unit(1, gpus=4, seconds=10), unit(2, gpus=1, seconds=800)
    (start,) = choose([waits, long], busy, BOX[5:], now=0.0, workers=8)
    assert start.unit is long  # waits for GPUs 0 and 1 and two of the three that are free: one is left
    assert len(choose([waits, long, unit(3, seconds=800)], busy, BOX[5:], now=0.0, workers=8)) == 1


def test_a_unit_that_is_overdue_is_expected_to_go_on() -> None:
    late = Running(unit(seconds=10), BOX[:1], started=0.0)
    assert late.ends(now=4.0) == 10.0
    assert late.ends(now=40.0) == 50.0


def test_a_server_on_the_cpu_runs_beside_gpus_but_not_beside_another_or_an_exclusive_one() -> None:
    first, second, gpu = unit(0, gpus=0, cpu_server=True), unit(1, gpus=0, cpu_server=True), unit(2)
    assert [one.unit for one in choose([first, second, gpu], [], BOX, 0.0, 8)] == [first, gpu]
    exclusive = unit(3, gpus=2, exclusive=True)
    assert [one.unit for one in choose([exclusive, first, gpu], [], BOX, 0.0, 8)] == [exclusive]
    running = [Running(first, (), 0.0)]
    assert choose([exclusive, second, unit(4, seconds=60)], running, BOX, 0.0, 8) == []
    assert choose([exclusive, unit(4, seconds=5)], running, BOX, 0.0, 8)[0].unit.items == (4,)


def test_what_asks_for_more_than_there_is_starts_all_the_same() -> None:
    """It is the test that says what it lacks; a plan must not wait for ever."""
    assert choose([unit(gpus=16)], [], BOX[:2], 0.0, 1)[0].uuids == BOX[:2]
    foreign = Unit((0,), 2, 1.0, choice=GpuChoice(("GPU-x", "GPU-y")))
    assert choose([foreign], [], BOX[:2], 0.0, 1)[0].uuids == BOX[:2]
    assert choose([unit(gpus=1)], [], (), 0.0, 1)[0].uuids == ()


def test_tests_that_observe_one_server_are_one_unit_with_one_that_uses_it_last() -> None:
    def work(index: int, server: str | None, uses: bool = False) -> Work:
        return Work(index, f"test_a.py::test_{index}", 1, 100.0, server=server, uses=uses, boot_seconds=80.0)

    works = [work(0, "s", True), work(1, "s"), work(2, None), work(3, "t"), work(4, "s", True), work(5, "s")]
    assert [one.items for one in units_of(works)] == [(1, 5, 0), (2,), (3,), (4,)]
    assert units_of(works)[0].seconds == 140.0
    unknown = [Work(index, "test_a.py::t", 2, 100.0, server="s") for index in range(3)]
    assert units_of(unknown)[0].seconds == pytest.approx(140.0)


def test_tests_that_lease_nothing_go_together_by_module_and_not_too_many() -> None:
    def work(index: int, module: str, seconds: float = 0.1) -> Work:
        return Work(index, f"{module}.py::test_{index}", 0, seconds)

    works = [work(0, "a"), work(1, "a"), work(2, "b"), work(3, "b", PLAIN_SECONDS), work(4, "b", PLAIN_SECONDS)]
    assert [one.items for one in units_of(works)] == [(0, 1), (2,), (3,), (4,)]
    assert [one.items for one in units_of(works[:2], workers=2)] == [(0,), (1,)]
    some = units_of([work(index, "a", 0.5) for index in range(24)], workers=4)
    assert max(one.seconds for one in some) <= 24 * 0.5 / 4 / 4
    assert {len(one.items) for one in units_of([work(index, "a", 0.5) for index in range(64)], workers=4)} == {4}
    assert max(one.seconds for one in units_of([work(i, "a", 0.5) for i in range(2000)], workers=4)) <= PLAIN_SECONDS
    many = units_of([work(index, "a", 0.0) for index in range(2 * PLAIN_TESTS)])
    assert [len(one.items) for one in many] == [PLAIN_TESTS, PLAIN_TESTS]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, "s", "t"]), st.booleans()), max_size=20))
@settings(deadline=None)
def test_every_test_is_in_one_unit_and_no_server_boots_more_than_its_users_need(
    drawn: list[tuple[int, str | None, bool]],
) -> None:
    works = [
        Work(i, f"m.py::t{i}", gpus, 1.0, server=s if gpus else None, uses=u) for i, (gpus, s, u) in enumerate(drawn)
    ]
    units = units_of(works)
    assert sorted(item for one in units for item in one.items) == list(range(len(works)))
    for server in ("s", "t"):
        of = [work for work in works if work.server == server]
        boots = [one for one in units if any(works[item].server == server for item in one.items)]
        assert len(boots) == (max(1, sum(work.uses for work in of)) if of else 0)


def test_a_plan_of_five_hundred_units_is_soon_ready_and_the_same_again() -> None:
    units = [Unit((i,), (1, 1, 2, 4, 8)[i % 5], 2.0 + i * 7 % 11, i % 40 == 0) for i in range(500)]
    began = time.monotonic()
    order = plan(units, BOX, 8)
    assert time.monotonic() - began < 3  # a fifth of a second on an idle machine
    assert length(simulate(order, BOX, 8)) <= 1.15 * bound(units, 8, 8)
    few = units[:12]
    assert plan(few, BOX, 8, seed=3) == plan(few, BOX, 8, seed=3)
