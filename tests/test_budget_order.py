"""When estimates are short: the most valuable claims run first, and what others leave is not lost."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pytest_gpuguard.packing.budget import CHANGED, NEW, SAME, LeftOut, Selected, Selection, by_value, has_room
from pytest_gpuguard.packing.plan import Unit, plan
from pytest_gpuguard.packing.units import Work, units_of

from .test_budget_runs import left_out, remember

Run = Any


def share(rank: int, seconds: float = 10.0, boot: float = 8.0, server: str | None = None) -> Selected:
    return Selected(seconds, seconds - boot, (NEW, CHANGED, SAME)[rank], (rank, 0.0), server)


# ---------------------------------------------------------------------------------------------------------------- order


def in_order(names: str, servers: str, chosen: dict[str, int], out: dict[str, int]) -> str:
    """One letter for each test and for its server; ranks of those that were chosen, and of those that were not."""
    selection = Selection(
        {name: share(rank) for name, rank in chosen.items()},
        {name: LeftOut("", share(rank)) for name, rank in out.items()},
    )
    places = by_value(names, [None if one == "-" else one for one in servers], selection)
    assert sorted(places) == list(range(len(names)))
    return "".join(names[place] for place in places)


def test_the_best_of_each_server_decides_who_goes_first() -> None:
    assert in_order("abcd", "xxyz", {"a": 2, "b": 0, "c": 0, "d": 1}, {}) == "abcd"
    assert in_order("abcd", "xxyz", {"a": 2, "b": 1, "c": 0, "d": 1}, {}) == "cabd"
    assert in_order("abcd", "----", {"a": 2, "b": 1, "c": 0, "d": 0}, {}) == "cdba"


def test_what_was_left_out_comes_last_and_others_stay_where_they_are() -> None:
    assert in_order("paqbrc", "------", {"a": 2, "c": 0}, {"b": 0}) == "pcqarb"
    assert in_order("abcdp", "xxyy-", {"a": 2, "c": 1}, {"b": 1, "d": 0}) == "cadbp"
    assert in_order("aubp", "xxx-", {"a": 1, "b": 0}, {}) == "aubp", "one whose needs are not met, among equals"
    assert in_order("pq", "--", {}, {}) == "pq"


def test_a_plan_starts_the_more_urgent_first_whatever_it_costs() -> None:
    units = [Unit((0,), 4, 100.0, urgency=2), Unit((1,), 1, 5.0, urgency=1), Unit((2,), 1, 1.0), Unit((3,), 1, 9.0)]
    order = plan(units, ("a", "b", "c", "d"), 2)
    assert [one.urgency for one in order] == [0, 0, 1, 2]
    many = [Unit((i,), (1, 2, 4)[i % 3], 1.0 + i * 7 % 11, urgency=i % 2) for i in range(30)]
    assert [one.urgency for one in plan(many, ("a", "b", "c", "d"), 4)] == [0] * 15 + [1] * 15


def test_a_unit_is_as_urgent_as_its_most_urgent_test() -> None:
    works = [Work(0, "a", 1, 5.0, server="s", urgency=2), Work(1, "b", 1, 5.0, server="s", urgency=0)]
    plain = [Work(2, "m::c", 0, 1.0, urgency=1), Work(3, "m::d", 0, 1.0, urgency=1), Work(4, "m::e", 0, 1.0, urgency=3)]
    assert [(one.items, one.urgency) for one in units_of(works + plain)] == [((0, 1), 0), ((2, 3), 1), ((4,), 3)]


# ----------------------------------------------------------------------------------------------------------------- room


def test_what_is_worth_more_has_the_first_claim_on_what_is_left_if_it_fits() -> None:
    new, same = share(0, 100.0), share(2, 20.0)
    assert has_room(same, [new], 120.0)
    assert not has_room(same, [new], 119.0)
    assert has_room(same, [new], 99.0), "it will not be begun anyway"
    assert not has_room(same, [share(1, 30.0), new], 149.0)
    assert not has_room(same, [share(1, 30.0), new], 99.0 - 50.0)
    assert has_room(same, [share(1, 30.0), new], 99.0)


def test_tests_on_one_server_need_its_boot_once() -> None:
    first, second = share(0, 100.0, 80.0, "s"), share(2, 90.0, 80.0, "s")
    assert has_room(second, [first], 110.0)
    assert not has_room(second, [first], 109.0)
    assert has_room(second, [first], 30.0, up="s")
    assert not has_room(second, [first], 29.0, up="s")


# ----------------------------------------------------------------------------------------------------------- whole runs

#: Each of the first ones takes a minute more than it is known to take.
LATE = """
    @pytest.mark.parametrize("n", range(3))
    @serves("sglang", MODEL, CPU)
    def test_known(n, pytestconfig):
        budget = pytestconfig.pluginmanager.get_plugin("gpuguard-budget")
        if budget is not None:
            budget._began -= 60

    @claim(minutes=1)
    @serves("sglang", MODEL, CPU, "--context-length 2")
    def test_never_evaluated(): ...
"""


def test_the_most_valuable_runs_first_when_estimates_are_short(claims: Run) -> None:
    claims(LATE, "-k", "known").assert_outcomes(passed=3)
    result = claims(LATE, "--gpuguard-budget=100s", "-v")
    ran = re.findall(r"::(test_\w+)\S* +HOLDS", result.stdout.str().partition("= claims =")[0])
    assert ran[0] == "test_never_evaluated"
    assert "test_never_evaluated" not in left_out(result)


def test_one_of_less_value_on_the_same_server_waits_for_what_is_worth_more(
    claims: Run, pytester: pytest.Pytester
) -> None:
    """The first two are one server's, and go first for the sake of the first; the second has nothing to lose."""
    source = """
        @claim(minutes=10)
        @serves("sglang", MODEL, CPU)
        def test_a_new(pytestconfig):
            pytestconfig.pluginmanager.get_plugin("gpuguard-budget")._began -= 750

        @serves("sglang", MODEL, CPU)
        @fits(kv_tokens=">=100")
        def test_b_known(): ...

        @claim(minutes=10)
        @serves("sglang", MODEL, CPU, "--context-length 2")
        def test_c_new(): ...
    """
    claims(source, "-k", "known").assert_outcomes(passed=1)
    remember(pytester, 100.0)
    result = claims(source, "--gpuguard-budget=1350s")
    assert set(left_out(result)) == {"test_b_known"}
    assert re.fullmatch(
        r"[\d.]+ min left, needs 1.7 min, and what is worth more is still to come", left_out(result)["test_b_known"]
    )


def test_what_was_not_selected_gets_the_time_of_what_was_refused(
    claims: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import os

        @serves("sglang", MODEL, CPU, "--context-length 3")
        def test_known_long(): ...

        @serves("sglang", MODEL, CPU, "--context-length 4")
        def test_known_short(): ...

        @claim(minutes=1)
        @serves("sglang", MODEL, CPU, "--context-length 1")
        def test_late(pytestconfig):
            pytestconfig.pluginmanager.get_plugin("gpuguard-budget")._began -= float(os.environ["LATE"])

        @claim(minutes=10)
        @serves("sglang", MODEL, CPU, "--context-length 2")
        def test_new(): ...
    """
    monkeypatch.setenv("LATE", "450")
    claims(source, "-k", "known").assert_outcomes(passed=2)
    remember(pytester, 100.0)
    file = pytester.path / ".gpuguard" / "history.json"
    data = json.loads(file.read_text())
    data["claims"]["test_claims.py::test_known_long"]["rest_s"] = [500.0]
    before = json.dumps(data)
    file.write_text(before)
    args = ("--gpuguard-budget=12m", "--gpuguard-ledger=none")  # the ledger would remember what this file must not
    late = claims(source, *args)
    assert set(left_out(late)) == {"test_known_long", "test_new"}
    assert re.fullmatch(r"[\d.]+ min left, needs 10 min", left_out(late)["test_new"])
    late.stdout.fnmatch_lines(["budget 12m: 2 of 4 claims evaluated, 11 min expected, *"])
    file.write_text(before)
    monkeypatch.setenv("LATE", "0")
    in_time = claims(source, *args)
    assert set(left_out(in_time)) == {"test_known_long", "test_known_short"}, "nothing was refused"
