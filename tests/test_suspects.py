"""Which change a verdict follows: what history separates is ranked, and nothing else ever is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.suspects import Case, measured, planted
from pytest_gpuguard.ledger.record import Kind, Record
from pytest_gpuguard.ledger.suspects import Suspect, rank
from tests.laws import given, st

OLD = {"driver": "570.86", "torch": "2.9.1", "sglang": "0.5.9"}
NEW = {"driver": "580.82", "torch": "2.13.0", "sglang": "0.5.23"}


def record(run: int, components: Mapping[str, str | None], failed: bool = False, kind: Kind = "verified") -> Record:
    verdict, outcome = ("CONTRADICTED (worse)", "oom.weights") if failed else ("HOLDS", "ready")
    return Record(
        f"run-{run}", "claim", "default", "fits()", verdict, outcome, "", float(run), kind, "test_a.py::test_fits",
        cards=("NVIDIA H200",), components=components,
    )  # fmt: skip


BEFORE, NOW = record(8, OLD), record(9, NEW, failed=True)


def ranks(*history: Record, before: Record = BEFORE, now: Record = NOW) -> dict[str, int]:
    suspects, ranked = rank(before, now, history)
    found = {one.change.component: one.rank for one in suspects}
    assert ranked == (len(set(found.values())) > 1)
    return found


def suspect(component: str, *history: Record) -> Suspect:
    return next(one for one in rank(BEFORE, NOW, history)[0] if one.change.component == component)


def test_one_pair_of_runs_is_a_list() -> None:
    assert ranks() == {"driver": 1, "torch": 1, "sglang": 1}


def test_a_driver_that_it_held_with_already_is_ranked_last() -> None:
    assert ranks(record(1, {**OLD, "driver": "580.82"})) == {"torch": 1, "sglang": 1, "driver": 3}


def test_a_torch_that_it_failed_with_beside_the_old_rest_is_ranked_first() -> None:
    assert ranks(record(1, {**OLD, "torch": "2.13.0"}, failed=True)) == {"torch": 1, "driver": 2, "sglang": 2}


def test_what_speaks_for_and_against_names_values_and_run() -> None:
    history = [record(1, {**OLD, "driver": "580.82"})]

    assert suspect("driver", *history).contra == ("held with driver 580.82 on sglang 0.5.9 (run run-1)",)
    assert suspect("torch", *history).pro == ("held with torch 2.9.1 as before, with driver 580.82 as now (run run-1)",)
    assert suspect("torch", *history).contra == ()


def test_a_failure_with_the_old_value_speaks_against_it() -> None:
    history = [record(1, {**NEW, "driver": "570.86"}, failed=True)]

    assert suspect("driver", *history).contra == ("oom.weights with driver 570.86 on sglang 0.5.23 (run run-1)",)


def test_many_trials_stay_few_lines_with_the_newest_run() -> None:
    nightly = [record(at, {**OLD, "driver": "580.82"}) for at in range(5)]
    others = [record(at, {**OLD, "driver": "580.82", "sglang": f"0.5.{at}"}) for at in range(5, 8)]

    assert suspect("driver", *nightly).contra == (
        "held with driver 580.82 on sglang 0.5.9 (run run-4, and 4 more like it)",
    )
    assert suspect("driver", *nightly, *others).contra[3:] == ("and 5 others",)


def test_components_that_always_changed_together_are_not_ordered() -> None:
    history = [record(at, OLD) for at in range(4)] + [record(at, NEW, failed=True) for at in range(4, 8)]

    assert ranks(*history) == {"driver": 1, "torch": 1, "sglang": 1}
    assert suspect("driver", *history).pro == ()


def test_a_third_version_says_nothing_of_the_two() -> None:
    assert set(ranks(record(1, {**OLD, "torch": "2.11.0"})).values()) == {1}


def test_a_third_version_that_did_both_speaks_against_its_component() -> None:
    history = [record(1, {**OLD, "torch": "2.11.0"}), record(2, {**NEW, "torch": "2.11.0"}, failed=True)]

    assert ranks(*history) == {"driver": 1, "sglang": 1, "torch": 3}


def test_what_nobody_noted_speaks_neither_for_nor_against() -> None:
    assert ranks(record(1, {"sglang": "0.5.9", "driver": "580.82"}))["torch"] == 1
    assert set(ranks(record(1, {"sglang": "0.5.9"}), record(2, {})).values()) == {1}


def test_a_package_that_a_complete_list_leaves_out_was_absent() -> None:
    before, now = (
        record(8, {"packages": "d1"}),
        record(9, {"packages": "d2", "package apex": "0.1", "nvcc": "13"}, True),
    )
    before = replace(before, components={**before.components, "nvcc": "12"})

    found = ranks(record(1, {"packages": "d1", "nvcc": "13"}), before=before, now=now)

    assert found == {"package apex": 1, "nvcc": 2}


def test_a_failure_without_a_new_package_acquits_it() -> None:
    before, now = (
        record(8, {"packages": "d1", "nvcc": "12"}),
        record(9, {"packages": "d2", "package apex": "1", "nvcc": "13"}, True),
    )
    trial = record(1, {"packages": "d1", "nvcc": "13"}, failed=True)

    suspects, _ = rank(before, now, [trial])

    assert [(one.change.component, one.rank) for one in suspects] == [("nvcc", 1), ("package apex", 2)]
    assert suspects[1].contra == ("oom.weights without package apex (run run-1)",)


def test_a_line_names_the_engine_unless_it_is_the_suspect_itself() -> None:
    history = [record(1, {**OLD, "sglang": "0.5.23"})]

    assert suspect("sglang", *history).contra == ("held with sglang 0.5.23 on torch 2.9.1 (run run-1)",)


@pytest.mark.parametrize(
    "unlike",
    [
        {"kind": "rehearsed"},
        {"cards": ("NVIDIA L40S",)},
        {"claim": "another"},
        {"decides": False},
        {"verdict": "INFRA"},
        {"verdict": "CHANGED"},
        {"expectation": "works()"},
        {"when": 99.0},
        {"evidence": {"confirmed": {"boots": 3, "agreed": 2}}},
    ],
    ids=str,
)
def test_other_claims_cards_kinds_and_times_and_open_verdicts_are_no_trials(unlike: dict[str, object]) -> None:
    trial = record(1, {**OLD, "driver": "580.82"})

    assert set(ranks(trial).values()) != {1}
    assert set(ranks(replace(trial, **unlike)).values()) == {1}  # type: ignore[arg-type]


def test_any_stack_is_a_trial_also_in_the_same_run() -> None:
    beside = replace(record(9, {**OLD, "driver": "580.82"}), stack="new", when=9.5)

    assert ranks(beside)["driver"] == 3


def test_a_record_that_is_given_twice_is_one_trial() -> None:
    trial = record(1, {**OLD, "driver": "580.82"})

    assert suspect("driver", trial, trial).contra == suspect("driver", trial).contra


def test_one_flaky_trial_does_not_hide_the_culprit() -> None:
    held = [record(at, {**OLD, other: NEW[other]}) for at, other in enumerate(("driver", "sglang"))]
    failed = [record(at, {**OLD, "torch": "2.13.0"}, failed=True) for at in (3, 4)]
    flaky = record(5, OLD, failed=True)

    assert ranks(*held, *failed, flaky)["torch"] == 1


def test_a_long_history_excuses_more_flaky_trials() -> None:
    acquits, flaky = record(1, {**OLD, "driver": "580.82"}), [record(at, OLD, failed=True) for at in (2, 3)]
    usual = [replace(record(4, OLD), run=f"usual-{at}") for at in range(10)]

    assert set(ranks(acquits, *flaky).values()) == {1}
    assert ranks(acquits, *flaky, *usual) == {"torch": 1, "sglang": 1, "driver": 3}


def test_nothing_is_ranked_where_every_candidate_is_contradicted_again_and_again() -> None:
    both = [record(at, OLD, failed=bool(at % 2)) for at in range(7)]
    history = [*both, record(7, {**OLD, "driver": "580.82"})]

    assert set(ranks(*history).values()) == {1}
    assert suspect("torch", *history).contra != ()


def test_an_edited_claim_is_a_candidate_too_and_stands_first() -> None:
    now = replace(NOW, expectation="fits(margin=9GiB)")

    suspects, ranked = rank(BEFORE, now, ())

    assert str(suspects[0].change) == "claim fits() → fits(margin=9GiB)"
    assert not ranked


def test_an_old_stack_that_fails_the_edited_claim_convicts_the_edit() -> None:
    now = replace(NOW, expectation="fits(margin=9GiB)")
    trial = replace(record(1, OLD, failed=True), expectation="fits(margin=9GiB)")

    assert ranks(trial, now=now)["claim"] == 1
    assert ranks(trial, now=now)["driver"] == 2


def test_another_of_a_claims_expectations_is_no_edit() -> None:
    judgements = {"judgements": [{"expectation": "fits()"}, {"expectation": "works()"}]}
    before, now = replace(BEFORE, evidence=judgements), replace(NOW, expectation="works()", evidence=judgements)
    beside = [replace(BEFORE, expectation="works()", decides=False), replace(now, expectation="fits()", decides=False)]

    assert "claim" not in ranks(before=before, now=now)
    assert "claim" not in ranks(*beside, now=replace(now, evidence={}))


def test_evidence_of_another_shape_is_passed_over() -> None:
    for evidence in ({"judgements": 5, "confirmed": []}, {"judgements": [5, {}], "confirmed": {"boots": "3"}}):
        assert set(ranks(record(1, OLD), before=replace(BEFORE, evidence=evidence)).values()) == {1}


def test_nothing_changed_is_no_suspect() -> None:
    assert rank(BEFORE, replace(NOW, components=OLD), [record(1, OLD, failed=True)]) == ((), False)


def test_seventy_candidates_over_two_hundred_trials_are_ranked_with_few_lines() -> None:
    names = [f"package p{at}" for at in range(70)]
    old, new = dict.fromkeys(names, "1"), dict.fromkeys(names, "2")
    rng = random.Random(1)
    history = []
    for at in range(200):
        components = {name: rng.choice("12") for name in names}
        history.append(record(at, components, failed=components["package p7"] == "2"))

    suspects, ranked = rank(record(998, old), record(999, new, failed=True), history)

    assert ranked
    assert [one.change.component for one in suspects if one.rank == 1] == ["package p7"]
    assert max(len(one.contra) for one in suspects) <= 4


def test_hostile_names_and_values_stay_on_one_line() -> None:
    now = record(9, {"env A\n<script>": "\x1b[2J", "torch": "2"}, failed=True)
    before = record(8, {"env A\n<script>": "a\nb", "torch": "1"})
    trial = replace(record(1, {"env A\n<script>": "\x1b[2J", "torch": "1", "sglang": "\n"}), run="r\x1b[31m")

    lines = [line for one in rank(before, now, [trial])[0] for line in (*one.pro, *one.contra)]

    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


# Planted histories; benchmarks/suspects.py has the table


@pytest.mark.parametrize(("components", "runs"), [(3, 10), (5, 12), (8, 14)])
def test_the_planted_culprit_ranks_first_in_19_of_20(components: int, runs: int) -> None:
    assert measured(Case(components, runs, 0.0), 150, seed=1).first >= 0.95


@pytest.mark.parametrize(("components", "runs"), [(3, 14), (5, 16), (8, 20)])
def test_it_does_so_with_one_flaky_trial_in_twenty_too(components: int, runs: int) -> None:
    assert measured(Case(components, runs, 0.05), 150, seed=1).first >= 0.95


@pytest.mark.parametrize("runs", [0, 1, 2, 4, 8, 20])
def test_without_flaky_trials_the_culprit_never_ranks_behind(runs: int) -> None:
    assert measured(Case(5, runs, 0.0), 100, seed=2).behind == 0
    assert measured(Case(5, runs, 0.0, usual=True), 100, seed=2).behind == 0


@given(st.integers(0, 10**6), st.integers(3, 8), st.integers(0, 8), st.sampled_from([0.0, 0.3]), st.randoms())
def test_the_order_of_a_history_does_not_matter(
    seed: int, components: int, runs: int, flaky: float, shuffle: random.Random
) -> None:
    found = planted(Case(components, runs, flaky), random.Random(seed))
    earlier = [replace(one, when=1.0) for one in found.earlier]
    shuffled = list(earlier)
    shuffle.shuffle(shuffled)

    assert rank(found.before, found.now, earlier) == rank(found.before, found.now, shuffled)


@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(0, 12))
def test_equal_components_share_a_rank_in_every_history(seed: int, components: int, runs: int) -> None:
    """Each has a twin that has its value always: nothing separates the two."""
    found = planted(Case(components, runs, 0.1), random.Random(seed))

    def twins(one: Record) -> Record:
        return replace(one, components={**one.components, **{f"package {k}": v for k, v in one.components.items()}})

    suspects, _ = rank(twins(found.before), twins(found.now), [twins(one) for one in found.earlier])
    place = {one.change.component: one.rank for one in suspects}

    assert all(place[name] == place[f"package {name}"] for name in found.now.components)


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 12), st.sampled_from([0.0, 0.5]))
def test_ranks_begin_with_one_and_are_told_apart_only_by_evidence(
    seed: int, components: int, runs: int, flaky: float
) -> None:
    found = planted(Case(components, runs, flaky), random.Random(seed))

    suspects, ranked = rank(found.before, found.now, found.earlier)

    assert suspects[0].rank == 1
    assert ranked == (suspects[-1].rank > 1)
    assert not ranked or suspects[-1].contra


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 10))
def test_a_flip_back_has_the_same_suspects_in_the_same_order(seed: int, components: int, runs: int) -> None:
    found = planted(Case(components, runs, 0.1), random.Random(seed))
    before = replace(found.now, when=found.before.when)
    now = replace(found.before, when=found.now.when)

    there, back = rank(found.before, found.now, found.earlier)[0], rank(before, now, found.earlier)[0]

    assert [(one.change.component, one.rank) for one in there] == [(one.change.component, one.rank) for one in back]
