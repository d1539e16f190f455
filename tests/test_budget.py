"""Which claims a budget of time evaluates, that it is kept, and what is said of the others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuguard.packing.budget import (
    CHANGED,
    NEW,
    PATIENCE,
    SAME,
    STUCK,
    TEST,
    Candidate,
    Selection,
    Value,
    estimate,
    select,
    value_of,
)
from pytest_gpuguard.packing.history import Attempts, Expected, Seen
from pytest_gpuguard.packing.plan import Work, bound, units_of

Run = Any
FakeRigs = Any

GPUS = tuple(f"GPU-{number}" for number in range(8))
DAY = 86400.0
NOW = 2_000_000_000.0


def candidate(
    name: str,
    seconds: float = 300.0,
    kind: str = NEW,
    *,
    gpus: int = 1,
    boot: float | None = None,
    since: float = 0.0,
    server: str | None = None,
    uses: bool = False,
    exclusive: bool = False,
    cpu_server: bool = False,
) -> Candidate:
    index = int(re.sub(r"\D", "", name) or ord(name[0]))
    work = Work(index, name, gpus, seconds, exclusive, cpu_server, server, uses, None, boot)
    return Candidate(work, Expected(seconds, boot, "by default"), Value(kind, kind, since))


def chosen(candidates: list[Candidate], budget_s: float, gpus: tuple[str, ...] = GPUS, workers: int = 1) -> list[str]:
    return sorted(select(candidates, budget_s, gpus, workers).chosen)


# ---------------------------------------------------------------------------------------------------------------- value


def test_never_evaluated_then_changed_then_the_rest_by_how_long_ago() -> None:
    parts = {"sglang": "0.5.23"}
    same = Seen("HOLDS", NOW - 3 * DAY, parts)
    values = {
        "new": value_of(None, Attempts(), parts, NOW),
        "tried": value_of(None, Attempts(PATIENCE - 1, NOW), parts, NOW),
        "changed": value_of(Seen("CHANGED", NOW, {"sglang": "0.5.22"}), Attempts(), parts, NOW),
        "older": value_of(replace(same, when=NOW - 9 * DAY), Attempts(), parts, NOW),
        "same": value_of(same, Attempts(), parts, NOW),
        "same, tried since": value_of(same, Attempts(1, NOW - DAY), parts, NOW),
    }
    assert sorted(values, key=lambda name: (values[name].rank, name)) == [
        "new",
        "tried",
        "changed",
        "older",
        "same",
        "same, tried since",
    ]
    assert values["changed"].why == "CHANGED within the last hours, before sglang 0.5.22 → 0.5.23"
    assert values["older"].why == "HOLDS on this very stack 9 days ago"
    assert values["new"].why == "never evaluated"


def test_a_claim_that_three_runs_could_not_verify_waits_its_turn() -> None:
    """Else one broken claim would take the budget of every run."""
    stuck = Attempts(PATIENCE, NOW - 2 * DAY)
    for seen in (None, Seen("HOLDS", NOW - 9 * DAY, {"sglang": "0.5.22"})):
        value = value_of(seen, stuck, {"sglang": "0.5.23"}, NOW)
        assert value.kind == STUCK
        assert value.rank == value_of(Seen("HOLDS", NOW - 2 * DAY, {}), Attempts(), {}, NOW).rank
        assert value.why == "run 3 times without a verdict that counts, last 2 days ago"


def test_a_test_without_a_claim_is_worth_no_more_than_a_claim_that_holds() -> None:
    ran = value_of(None, Attempts(0, NOW - DAY), {}, NOW, is_claim=False)
    assert (ran.kind, ran.rank) == (TEST, value_of(Seen("HOLDS", NOW - DAY, {}), Attempts(), {}, NOW).rank)


# ------------------------------------------------------------------------------------------------------------ selection


def test_value_goes_before_cheapness_and_cheapness_decides_within_a_class() -> None:
    some = [
        candidate("a", 100, SAME, since=2),
        candidate("b", 500, CHANGED),
        candidate("c", 400, NEW),
        candidate("d", 200, NEW),
        candidate("e", 100, SAME, since=1),
    ]
    assert chosen(some, 200) == ["d"]
    assert chosen(some, 600) == ["c", "d"]
    assert chosen(some, 700) == ["c", "d", "e"], "what does not fit is passed over, and the older one is worth more"
    assert chosen(some, 1200) == ["b", "c", "d", "e"]
    assert chosen(some, 1300) == ["a", "b", "c", "d", "e"]


def test_a_claim_that_joins_a_chosen_server_costs_its_own_part_only() -> None:
    some = [
        candidate("a", 300, server="s", boot=280),
        candidate("b", 310, server="s", boot=280),
        candidate("c", 100),
    ]
    assert chosen(some, 430) == ["a", "b", "c"]
    assert chosen(some, 429) == ["a", "c"]
    assert chosen([replace(one, expected=replace(one.expected)) for one in some[:2]], 330) == ["a", "b"]


def test_a_second_test_whose_code_uses_the_server_boots_its_own() -> None:
    some = [candidate(name, 300, server="s", boot=280, uses=True) for name in ("a", "b")]
    assert chosen(some, 599) == ["a"]
    assert chosen(some, 600) == ["a", "b"]
    assert chosen([*some[:1], candidate("c", 310, server="s", boot=280)], 330) == ["a", "c"]


def test_what_was_too_dear_alone_is_taken_once_its_server_is_up_anyway() -> None:
    dear = candidate("a", 600, NEW, server="s", boot=570)
    cheap = candidate("b", 500, SAME, server="s", boot=480)
    assert chosen([dear, cheap], 520) == ["b"]
    assert chosen([dear, cheap, candidate("c", 100, NEW)], 550) == ["c"], "nothing fits beside it"
    # Both together take the longer one's boot: 600 + 20 seconds. With equal boots the dear one fits in.
    dear = candidate("a", 560, NEW, server="s", boot=480)
    assert chosen([dear, cheap], 579) == ["a"]
    assert chosen([dear, cheap], 580) == ["a", "b"]


def test_gpus_side_by_side_count_once_and_workers_limit_them() -> None:
    ones = [candidate(f"t{number}", 300) for number in range(8)]
    assert len(chosen(ones, 300, workers=8)) == 8
    assert len(chosen(ones, 300, workers=4)) == 4
    assert len(chosen(ones, 300, workers=1)) == 1
    assert len(chosen(ones, 300, gpus=GPUS[:2], workers=8)) == 2
    wide = [candidate("t8", 300, gpus=8), candidate("t9", 300, exclusive=True)]
    assert len(chosen([*ones, *wide], 900, workers=8)) == 10
    assert len(chosen([*ones, *wide], 899, workers=8)) == 9
    servers = [candidate(f"t{number}", 300, gpus=0, cpu_server=True) for number in range(4)]
    assert len(chosen(servers, 600, workers=4)) == 2, "one server on the CPU at a time"


def test_a_budget_too_small_for_any_says_what_the_cheapest_needs() -> None:
    selection = select([candidate("a", 300), candidate("b", 240), candidate("c", 600)], 60, GPUS)
    assert selection.chosen == {}
    assert selection.expected_s == 0
    assert selection.left_out["a"].fact == (
        "out of budget: expected 5 min, by default; never evaluated; no claim fits into 60 s, the cheapest needs 4 min"
    )


def test_only_what_is_left_is_given_out() -> None:
    some = [candidate("a", 300), candidate("b", 240, SAME)]
    assert sorted(select(some, 600, GPUS, left_s=600).chosen) == ["a", "b"]
    assert sorted(select(some, 600, GPUS, left_s=630).chosen) == ["a", "b"]
    assert sorted(select(some, 600, GPUS, left_s=500).chosen) == ["a"]
    none = select(some, 600, GPUS, left_s=100)
    assert not none.chosen
    assert none.left_out["a"].fact.endswith(
        "no claim fits into the 1.7 min that are left of 10 min, the cheapest needs 4 min"
    )
    assert not select(some, 600, GPUS, left_s=-5).chosen


def test_no_candidates_are_no_problem() -> None:
    assert select([], 60, ()) == Selection()


def test_a_selection_travels_as_json() -> None:
    selection = select([candidate("a", 300), candidate("b", 300, SAME, boot=200, server="s", uses=True)], 400, GPUS)
    assert Selection.from_dict(json.loads(json.dumps(selection.to_dict()))) == selection
    assert (len(selection.chosen), len(selection.left_out)) == (1, 1)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for number in range(draw(st.integers(0, 12))):
        seconds = draw(st.integers(1, 900))
        server = draw(st.sampled_from([None, None, "s1", "s2", "s3"]))
        gpus = {"s1": 1, "s2": 2, "s3": 0}.get(server or "", draw(st.integers(0, 9)))
        found.append(
            candidate(
                f"t{number}",
                float(seconds),
                draw(st.sampled_from([NEW, CHANGED, SAME, STUCK, TEST])),
                gpus=gpus,
                boot=draw(st.none() | st.integers(0, seconds).map(float)),
                since=float(draw(st.integers(0, 3))),
                server=server,
                uses=server is not None and draw(st.booleans()),
                exclusive=server is None and gpus > 0 and draw(st.booleans()),
                cpu_server=server == "s3",
            )
        )
    return found


@settings(max_examples=150, deadline=None)
@given(candidates(), st.integers(1, 3000), st.integers(0, 8), st.integers(1, 8), st.randoms())
def test_a_selection_fits_is_the_same_every_time_and_leaves_no_single_one_out_that_would_go_first(
    some: list[Candidate], budget_s: int, gpus: int, workers: int, chance: Any
) -> None:
    rig = GPUS[:gpus]
    selection = select(some, float(budget_s), rig, workers)
    taken = [one for one in some if one.work.nodeid in selection.chosen]
    assert {*selection.chosen, *selection.left_out} == {one.work.nodeid for one in some}
    assert not set(selection.chosen) & set(selection.left_out)
    length = estimate([one.work for one in taken], rig, workers, budget_s)
    assert length == selection.expected_s
    assert length <= budget_s
    assert bound(units_of([one.work for one in taken]), gpus, workers) <= budget_s + 1e-6
    shuffled = list(some)
    chance.shuffle(shuffled)
    assert select(shuffled, float(budget_s), rig, workers) == selection
    if some:
        first = min(some, key=lambda one: (one.value.rank, one.expected.seconds, one.work.nodeid))
        fits = estimate([first.work], rig, workers, budget_s) is not None
        assert (first.work.nodeid in selection.chosen) or not fits
    for one in some:  # alone on the rig, a more valuable one that fits is not passed over for nothing
        if not selection.chosen:
            assert estimate([one.work], rig, workers, budget_s) is None


@settings(max_examples=100, deadline=None)
@given(candidates(), st.integers(1, 3000))
def test_without_workers_side_by_side_nothing_that_is_left_out_would_still_fit(
    some: list[Candidate], budget_s: int
) -> None:
    selection = select(some, float(budget_s), GPUS, 1)
    taken = [one.work for one in some if one.work.nodeid in selection.chosen]
    for one in some:
        if one.work.nodeid in selection.left_out:
            assert estimate([*taken, one.work], GPUS, 1, budget_s) is None
