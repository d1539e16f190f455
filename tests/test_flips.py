"""What is a flip, which way, and against what it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_gpuguard.claims.verdict import Verdict
from pytest_gpuguard.ledger.flips import (
    COUNTING,
    SORTS,
    Change,
    Flip,
    Sort,
    baseline,
    differences,
    flip_of,
    flips,
    index,
)
from pytest_gpuguard.ledger.record import KINDS, Record, Run
from tests.laws import given, st

HOLDS, WORSE, CHANGED, BETTER = (one.value for one in (Verdict.HOLDS, Verdict.WORSE, Verdict.CHANGED, Verdict.BETTER))
VERDICTS = [one.value for one in Verdict]

RUN = Run("run-5", 500.0, "box", "verified", "8 × NVIDIA H200", "1.0", stacks=("default",))
STACKS = replace(RUN, stacks=("old", "mid", "new"))


def record(
    run: int, verdict: str = HOLDS, outcome: str | None = None, stack: str = "default", **values: object
) -> Record:
    found = Record(
        f"run-{run}", "claim", stack, "fits()", verdict, outcome or ("ready" if verdict == HOLDS else "oom.weights"),
        "", run * 100.0, "verified", "test_a.py::test_fits", cards=("NVIDIA H200",), components={"torch": str(run)},
    )  # fmt: skip
    return replace(found, **values)  # type: ignore[arg-type]


def found(now: Sequence[Record], before: Sequence[Record], past: Sequence[Record] = (), run: Run = RUN) -> list[Flip]:
    return list(
        flips(run, now, before, lambda claims: {name: [one for one in past if one.claim == name] for name in claims})
    )


# What a flip is


@pytest.mark.parametrize(
    ("before", "now", "sort"),
    [
        ((HOLDS, "ready"), (HOLDS, "ready"), None),
        ((HOLDS, "unsupported.arch"), (HOLDS, "jit.compile"), None),
        ((HOLDS, "ready"), (WORSE, "oom.weights"), "worse"),
        ((HOLDS, "oom.weights"), (CHANGED, "oom.kv_pool"), "changed"),
        ((HOLDS, "oom.weights"), (BETTER, "ready"), "better"),
        ((WORSE, "oom.weights"), (HOLDS, "ready"), "recovered"),
        ((CHANGED, "oom.kv_pool"), (HOLDS, "oom.weights"), "recovered"),
        ((BETTER, "ready"), (HOLDS, "oom.weights"), "recovered"),
        ((WORSE, "oom.weights"), (WORSE, "oom.weights"), None),
        ((WORSE, "oom.weights"), (WORSE, "illegal_memory"), "changed"),
        ((CHANGED, "oom.kv_pool"), (CHANGED, "jit.compile"), "changed"),
        ((BETTER, "ready"), (BETTER, "ready"), None),
        ((CHANGED, "oom.kv_pool"), (BETTER, "ready"), "better"),
        ((BETTER, "ready"), (CHANGED, "oom.kv_pool"), "changed"),
        ((BETTER, "ready"), (WORSE, "ready"), "worse"),
    ],
)
def test_a_flip_is_named_by_what_it_became(before: tuple[str, str], now: tuple[str, str], sort: Sort | None) -> None:
    assert flip_of(record(1, *before), record(2, *now)) == sort


@pytest.mark.parametrize("verdict", sorted(set(VERDICTS) - COUNTING))
def test_a_verdict_that_leaves_it_open_never_flips(verdict: str) -> None:
    assert flip_of(record(1), record(2, verdict)) is None
    assert flip_of(record(1, verdict), record(2, WORSE)) is None


def test_nothing_flips_against_nothing() -> None:
    assert flip_of(None, record(2, WORSE)) is None


def test_a_rehearsal_never_flips_a_verification() -> None:
    assert flip_of(record(1), record(2, WORSE, kind="rehearsed")) is None
    assert flip_of(record(1, kind="rehearsed"), record(2, WORSE, kind="rehearsed")) == "worse"


@pytest.mark.parametrize(
    ("confirmed", "sort"),
    [
        ({"boots": 3, "agreed": 3}, "worse"),
        ({"boots": 3, "agreed": 2}, "flaky"),
        ({"boots": 1, "agreed": 0}, "flaky"),
        ({"boots": 3}, "worse"),
        ({"boots": "3", "agreed": "2"}, "worse"),
        (None, "worse"),
        ("no", "worse"),
    ],
)
def test_fresh_boots_that_disagree_make_it_flaky(confirmed: object, sort: Sort) -> None:
    assert flip_of(record(1), record(2, WORSE, evidence={"confirmed": confirmed})) == sort


def test_boots_that_disagree_flip_nothing_that_came_out_as_before() -> None:
    assert flip_of(record(1), record(2, evidence={"confirmed": {"boots": 3, "agreed": 2}})) is None


@given(st.sampled_from(VERDICTS), st.sampled_from(VERDICTS), st.sampled_from("ab"), st.sampled_from("ab"))
def test_a_flip_there_is_a_flip_back(first: str, second: str, one: str, other: str) -> None:
    there, back = (record(1, first, one), record(2, second, other)), (record(1, second, other), record(2, first, one))

    assert (flip_of(*there) is None) == (flip_of(*back) is None)


# Against what


def test_it_is_the_last_one_on_a_stack_of_the_same_name() -> None:
    before = index([record(1), record(3), record(2), record(4, stack="nightly")])

    assert baseline(record(5), before) == record(3)


def test_without_that_it_is_the_first_stack_of_the_same_run() -> None:
    now = [record(5, stack=name) for name in STACKS.stacks]

    assert baseline(now[2], index([record(4)]), index(now), "old") == now[0]


def test_a_stack_of_the_same_name_comes_before_the_first_stack_of_the_run() -> None:
    now = [record(5, stack=name) for name in STACKS.stacks]

    assert baseline(now[2], index([record(1, stack="new")]), index(now), "old") == record(1, stack="new")


def test_else_it_is_the_last_one_of_any_stack() -> None:
    before = index([record(1, stack="a"), record(4, stack="b"), record(3, stack="c")])

    assert baseline(record(5), before, index([record(5)]), "default") == record(4, stack="b")


def test_a_first_stack_that_says_nothing_is_passed_over() -> None:
    now = [record(5, "INFRA", stack="old"), record(5, stack="new")]

    assert baseline(now[1], index([record(4)]), index(now), "old") == record(4)


@pytest.mark.parametrize(
    "unlike",
    [
        {"claim": "another"},
        {"cards": ("NVIDIA L40S",)},
        {"cards": ()},
        {"kind": "rehearsed"},
        {"kind": "replayed"},
        {"decides": False},
        {"verdict": "INCONCLUSIVE"},
        {"verdict": "UNSTATED"},
        {"run": "run-5"},
    ],
    ids=str,
)
def test_it_is_never_of_another_claim_card_or_kind_nor_open_nor_of_this_run(unlike: dict[str, object]) -> None:
    assert baseline(record(5), index([replace(record(4), **unlike)])) is None  # type: ignore[arg-type]


@given(st.permutations([record(at % 3, stack=name) for at, name in enumerate(("a", "b", "default") * 3)]))
def test_the_order_of_what_was_before_does_not_matter(before: list[Record]) -> None:
    assert baseline(record(5), index(before)) == baseline(record(5), index(sorted(before, key=repr)))


@given(st.sampled_from(KINDS), st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(VERDICTS)), max_size=6))
def test_kinds_never_mix(kind: str, before: list[tuple[str, str]]) -> None:
    earlier = [record(at, verdict, kind=one) for at, (one, verdict) in enumerate(before)]

    for flip in found([record(9, WORSE, kind=kind)], earlier, earlier):
        assert flip.before.kind == flip.now.kind == kind


# The flips of a run


def test_the_worst_stand_first_and_of_those_the_fewest_changes() -> None:
    many = {"torch": "1", "driver": "1"}
    before = [record(1, one, claim=name, components=many) for name, one in
              (("a", HOLDS), ("b", WORSE), ("c", HOLDS), ("d", HOLDS), ("e", HOLDS), ("f", HOLDS))]  # fmt: skip
    flaky = {"confirmed": {"boots": 3, "agreed": 1}}
    now = [
        record(5, BETTER, "ready", claim="a", components={"torch": "2"}),
        record(5, HOLDS, claim="b", components={"torch": "2"}),
        record(5, WORSE, claim="c", evidence=flaky),
        record(5, CHANGED, claim="d"),
        record(5, WORSE, claim="e", components={"torch": "2", "driver": "2"}),
        record(5, WORSE, claim="f", components={"torch": "2", "driver": "1"}),
    ]

    seen = found(now, before)

    assert [(one.now.claim, one.sort) for one in seen] == [
        ("f", "worse"), ("e", "worse"), ("d", "changed"), ("c", "flaky"), ("a", "better"), ("b", "recovered"),
    ]  # fmt: skip
    assert list(dict.fromkeys(one.sort for one in seen)) == list(SORTS)


def test_only_what_decides_its_claim_flips() -> None:
    assert found([record(5, WORSE, decides=False)], [record(4)]) == []


def test_a_flip_says_what_changed() -> None:
    (flip,) = found([record(5, WORSE)], [record(4)])

    assert (flip.before, flip.now, flip.ranked, flip.held) == (record(4), record(5, WORSE), False, None)
    assert flip.components == {"torch": ("4", "5")}


def test_history_ranks_the_suspects_of_a_flip() -> None:
    old, new = {"torch": "2.9", "driver": "570"}, {"torch": "2.13", "driver": "580"}
    past = [record(3, components={**old, "driver": "580"}), record(4, components=old)]

    (flip,) = found([record(5, WORSE, components=new)], [record(4, components=old)], past)

    assert flip.ranked
    assert [(one.change.component, one.rank) for one in flip.suspects] == [("torch", 1), ("driver", 2)]


def test_other_stacks_of_the_same_run_rank_them_too() -> None:
    old, new = {"torch": "2.9", "driver": "570"}, {"torch": "2.13", "driver": "580"}
    now = [
        record(5, stack="old", components=old),
        record(5, stack="mid", components={**old, "driver": "580"}),
        record(5, WORSE, stack="new", components=new),
    ]

    (flip,) = found(now, [], run=STACKS)

    assert (flip.before, flip.suspects[0].change.component, flip.ranked) == (now[0], "torch", True)
    assert differences(STACKS, now) == (flip,)


def test_between_two_that_did_not_hold_it_is_told_what_changed_since_it_held() -> None:
    past = [record(1), record(2), record(3, WORSE, "oom.weights")]

    (flip,) = found([record(5, WORSE, "illegal_memory")], [past[2]], past)

    assert (flip.sort, flip.before, flip.held) == ("changed", past[2], past[1])
    assert flip.components == {"torch": ("2", "5")}


def test_what_held_after_the_failure_or_beside_it_is_not_what_it_held_with() -> None:
    failed = record(3, WORSE, "oom.weights")
    later, beside = record(4, stack="nightly"), record(5, stack="nightly")

    flip, recovered = found([record(5, WORSE, "illegal_memory"), beside], [failed], [record(1), failed, later])

    assert (flip.held, recovered.held) == (record(1), None)


def test_what_held_on_a_stack_of_the_same_name_comes_first() -> None:
    past = [record(1), record(2, stack="nightly"), record(3, WORSE)]

    (flip,) = found([record(5, WORSE, "illegal_memory")], past[2:], past)
    (other,) = found([record(5, WORSE, "illegal_memory")], past[2:], past[1:])

    assert (flip.held, other.held) == (past[0], past[1])


def test_a_recovery_is_told_from_the_failure_before_it() -> None:
    (flip,) = found([record(5)], [record(4, WORSE)], [record(1), record(4, WORSE)])

    assert (flip.sort, flip.held, flip.components) == ("recovered", None, {"torch": ("4", "5")})


def test_an_edited_claim_stands_first_among_what_changed() -> None:
    (flip,) = found([record(5, WORSE, expectation="fits(margin=9GiB)")], [record(4)])

    assert flip.suspects[0].change == Change("claim", "fits()", "fits(margin=9GiB)")


def test_another_expectation_of_the_same_claim_is_no_edit() -> None:
    past = [record(4), record(4, expectation="works()", decides=False)]
    now = [record(5, decides=False), record(5, WORSE, expectation="works()")]

    (flip,) = found(now, past[:1], past)

    assert list(flip.components) == ["torch"]


def test_a_suite_of_another_revision_is_a_component_like_others() -> None:
    before = record(4, components={"suite": "a7c0944"})

    (flip,) = found([record(5, WORSE, components={"suite": "b1d2e3f+"})], [before])

    assert flip.components == {"suite": ("a7c0944", "b1d2e3f+")}


def test_a_flip_on_the_very_same_stack_has_no_suspects() -> None:
    (flip,) = found([record(5, WORSE, components={"torch": "4"})], [record(4)])

    assert (flip.suspects, flip.ranked) == ((), False)


def test_records_under_a_claims_former_name_are_its_history() -> None:
    old, new = {"torch": "2.9", "driver": "570"}, {"torch": "2.13", "driver": "580"}
    past = [record(3, claim="former", components={**old, "driver": "580"})]

    (flip,) = flips(RUN, [record(5, WORSE, components=new)], [record(4, components=old)], lambda _: {"claim": past})

    assert flip.ranked


def test_histories_are_asked_for_once_and_only_of_claims_that_flipped() -> None:
    asked: list[list[str]] = []
    now = [record(5, WORSE, stack="old"), record(5, WORSE, stack="new"), record(5, claim="steady")]
    now += [record(5, WORSE, claim=f"claim {number}") for number in range(30)]
    before = [replace(one, run="run-4", when=4.0, verdict=HOLDS, outcome="ready") for one in now]

    def histories(claims: Sequence[str]) -> dict[str, list[Record]]:
        asked.append(sorted(claims))
        return {}

    assert len(flips(STACKS, now, before, histories)) == 32
    assert asked == [sorted(["claim", *(f"claim {number}" for number in range(30))])]


def test_when_all_claims_flip_not_all_histories_are_in_memory_at_once() -> None:
    asked: list[list[str]] = []
    now = [record(5, WORSE, claim=f"claim {number}") for number in range(1000)]
    before = [record(4, claim=one.claim) for one in now]

    def histories(claims: Sequence[str]) -> dict[str, list[Record]]:
        asked.append(list(claims))
        return {}

    assert len(flips(RUN, now, before, histories)) == 1000
    assert max(map(len, asked)) <= 200
    assert sorted(name for some in asked for name in some) == sorted(one.claim for one in now)


def test_an_empty_run_has_no_flips() -> None:
    assert found([], []) == []
    assert differences(replace(RUN, stacks=()), [record(5)]) == ()


# The stacks of one run


def test_each_other_stack_is_held_against_the_first() -> None:
    now = [record(5, WORSE, stack="new"), record(5, stack="old"), record(5, "INFRA", stack="mid")]

    (flip,) = differences(STACKS, now)

    assert (flip.sort, flip.before.stack, flip.now.stack) == ("worse", "old", "new")


def test_stacks_that_came_out_alike_do_not_differ() -> None:
    assert differences(STACKS, [record(5, WORSE, stack="new"), record(5, WORSE, stack="old")]) == ()


def test_other_cards_of_the_same_run_are_not_compared() -> None:
    now = [record(5, stack="old"), record(5, WORSE, stack="new", cards=("NVIDIA L40S",))]

    assert differences(STACKS, now) == ()
