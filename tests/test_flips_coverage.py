"""Which claims nobody looks at: gone, renamed, new, not evaluated, without an opinion, due for another look."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from pytest_gpuguard.ledger.coverage import Coverage, Overdue, Renamed, Unevaluated, coverage
from pytest_gpuguard.ledger.record import Record
from tests.laws import given, st

TODAY = date(2027, 3, 5)
CLAIMS = st.sets(st.sampled_from("abcde"))
ARGV = (
    "/opt/a/bin/python",
    "-m",
    "sglang.launch_server",
    "--model-path",
    "qwen3-8b",
    "--tp-size",
    "2",
    "--port",
    "3001",
)


def record(claim: str, verdict: str = "HOLDS", argv: Collection[str] = (), **values: Any) -> Record:
    name = claim.rpartition("::")[2]
    found = Record(
        "run-1", claim, "default", "fits()", verdict, "ready", "", 1.0, "verified", f"test_a.py::{name}",
        evidence={"argv": list(argv)},
    )  # fmt: skip
    return replace(found, **values)


def seen(
    collected: Collection[str] | None = None,
    now: Collection[Record] = (),
    evaluated: Mapping[str, tuple[float | None, int]] | None = None,
    aliases: Mapping[str, str] | None = None,
    rechecks: Mapping[str, str] | None = None,
    **more: Any,
) -> Coverage:
    return coverage(collected, list(now), evaluated or {}, aliases or {}, rechecks or {}, TODAY, **more)


def test_a_claim_that_is_not_collected_any_longer_has_vanished() -> None:
    assert seen({"a"}, evaluated={"a": (1.0, 0), "b": (1.0, 4)}).vanished == ("b",)


def test_a_run_of_part_of_the_suite_says_nothing_of_vanished_claims() -> None:
    found = seen(None, [record("a")], evaluated={"a": (1.0, 0), "b": (1.0, 4)})

    assert (found.complete, found.vanished, found.renamed) == (False, (), ())


def test_an_alias_is_not_gone_and_its_new_name_not_new() -> None:
    found = seen({"c"}, evaluated={"a": (1.0, 0)}, aliases={"a": "b", "b": "c"})

    assert (found.vanished, found.new) == ((), ())


def test_an_alias_of_a_claim_that_is_gone_too_is_gone() -> None:
    assert seen({"c"}, evaluated={"a": (1.0, 0)}, aliases={"a": "b"}).vanished == ("b",)


def test_aliases_in_a_circle_end() -> None:
    assert seen({"a"}, evaluated={"a": (1.0, 0)}, aliases={"a": "b", "b": "a"}).new == ("a",)


def test_a_claim_that_the_ledger_never_saw_is_new() -> None:
    assert seen({"a", "b"}, evaluated={"a": (1.0, 0)}).new == ("b",)


def test_what_was_only_rehearsed_is_new_to_the_verified() -> None:
    assert seen({"a"}, before=[record("a", kind="rehearsed")]).new == ("a",)
    assert seen({"a"}, before=[record("a")]).new == ()


def test_never_evaluated_stands_before_long_not_evaluated() -> None:
    found = seen({"a", "b", "c", "d"}, evaluated={"a": (1e9, 3), "b": (None, 1), "c": (1e9, 2), "d": (2e9, 9)})

    assert found.never_evaluated == (Unevaluated("b", None, 1), Unevaluated("d", 2e9, 9), Unevaluated("a", 1e9, 3))
    assert [str(one) for one in found.never_evaluated] == [
        "b: never evaluated, in 1 run",
        "d: not evaluated for 9 runs, last on 2033-05-18",
        "a: not evaluated for 3 runs, last on 2001-09-09",
    ]


def test_the_number_of_runs_is_the_callers() -> None:
    assert seen({"a"}, evaluated={"a": (1.0, 3)}, runs=4).never_evaluated == ()


def test_what_this_run_answers_is_evaluated() -> None:
    assert seen({"a"}, [record("a")], evaluated={"a": (None, 5)}).never_evaluated == ()


@pytest.mark.parametrize("values", [{"verdict": "INCONCLUSIVE"}, {"verdict": "INFRA"}, {"kind": "rehearsed"}], ids=str)
def test_neither_an_open_verdict_nor_a_rehearsal_answers(values: dict[str, str]) -> None:
    assert len(seen({"a"}, [record("a", **values)], evaluated={"a": (None, 5)}).never_evaluated) == 1


def test_a_rehearsed_ledger_is_answered_by_rehearsals() -> None:
    now = [record("a", kind="rehearsed")]

    assert seen({"a"}, now, evaluated={"a": (None, 5)}, kind="rehearsed").never_evaluated == ()


def test_what_was_evaluated_under_a_former_name_was_evaluated() -> None:
    evaluated = {"old": (1.0, 2), "new": (None, 2)}

    assert seen({"new"}, evaluated=evaluated, aliases={"old": "new"}).never_evaluated == ()


def test_a_vanished_claim_is_not_listed_as_unevaluated_too() -> None:
    assert seen({"a"}, evaluated={"b": (None, 5)}).never_evaluated == ()


def test_claims_without_an_opinion_on_this_stack_are_listed_once() -> None:
    now = [record("a", "UNSTATED"), record("a", "UNSTATED", stack="new"), record("b")]

    assert seen(None, now).unstated == ("a",)


def test_a_recheck_is_overdue_from_the_day_after_it() -> None:
    rechecks = {"a": "2027-03-01", "b": "2027-03-05", "c": "2027-03-04", "d": "2028-01-01"}

    assert seen(rechecks=rechecks).overdue == (
        Overdue("a", date(2027, 3, 1), 4),
        Overdue("c", date(2027, 3, 4), 1),
    )
    assert [str(one) for one in seen(rechecks=rechecks).overdue] == [
        "a: recheck was due on 2027-03-01, 4 days ago",
        "c: recheck was due on 2027-03-04, 1 day ago",
    ]


def test_a_recheck_that_is_no_date_says_how_to_write_one() -> None:
    with pytest.raises(ValueError, match="a: recheck='March' is not a date: write \"2027-03-01\""):
        seen(rechecks={"a": "March"})


# Renamed


def renamed(before: list[Record], now: list[Record], aliases: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    evaluated: dict[str, tuple[float | None, int]] = {one.claim: (1.0, 0) for one in before}
    found = seen({one.claim for one in now}, now, evaluated, aliases, before=before)
    return [(one.old, one.new) for one in found.renamed]


def test_the_same_expectation_on_the_same_server_is_perhaps_renamed() -> None:
    again = (*ARGV[:-1], "4711")

    assert renamed([record("f::test_old", argv=ARGV)], [record("f::test_new", argv=again)]) == [
        ("f::test_old", "f::test_new")
    ]


@pytest.mark.parametrize(
    "unlike",
    [{"expectation": "works()"}, {"evidence": {"argv": [*ARGV, "--enable-x"]}}, {"evidence": {}}],
    ids=["expectation", "flags", "not booted"],
)
def test_another_expectation_or_server_is_another_claim(unlike: dict[str, Any]) -> None:
    assert renamed([record("f::test_old", argv=ARGV)], [replace(record("f::test_new", argv=ARGV), **unlike)]) == []


def test_a_test_that_moved_and_did_not_boot_is_known_by_its_name() -> None:
    assert renamed([record("old.py::test_a", argv=ARGV)], [record("new.py::test_a", "NOT_EVALUATED")]) == [
        ("old.py::test_a", "new.py::test_a")
    ]


def test_a_name_does_not_make_two_servers_one() -> None:
    other = (*ARGV[:4], "another-model")

    assert renamed([record("old.py::test_a", argv=ARGV)], [record("new.py::test_a", argv=other)]) == []


def test_two_that_could_be_it_are_no_guess_unless_one_kept_its_name() -> None:
    now = [record("f::test_b", argv=ARGV), record("f::test_c", argv=ARGV)]

    assert renamed([record("f::test_a", argv=ARGV)], now) == []
    assert renamed([record("old::test_c", argv=ARGV)], now) == [("old::test_c", "f::test_c")]


def test_a_whole_suite_that_moved_is_paired() -> None:
    before = [record(f"old/test_a.py::test_{at}") for at in range(5000)]
    now = [record(f"new/test_a.py::test_{at}") for at in range(5000)]

    assert len(renamed(before, now)) == 5000


def test_an_alias_is_no_guess_any_more() -> None:
    assert renamed([record("f::a", argv=ARGV)], [record("f::b", argv=ARGV)], {"f::a": "f::b"}) == []


def test_a_guess_comes_with_its_command_safe_to_paste() -> None:
    text = str(Renamed("f.py::test_a[x y]", "$(reboot)\n"))

    assert text == "perhaps renamed: gpuguard ledger alias 'f.py::test_a[x y]' '$(reboot)\\n'"


def test_argv_of_another_shape_is_passed_over() -> None:
    assert renamed([record("f::a", evidence={"argv": 5})], [record("f::b", evidence={"argv": None})]) == []


@given(CLAIMS, CLAIMS, st.dictionaries(st.sampled_from("abcde"), st.sampled_from("abcde")))
def test_nothing_is_both_here_and_gone_or_both_new_and_known(
    collected: set[str], known: set[str], aliases: dict[str, str]
) -> None:
    found = seen(collected, evaluated={one: (None, 9) for one in known}, aliases=aliases)

    assert not set(found.vanished) & collected
    assert set(found.new) <= collected
    assert not set(found.new) & {one.claim for one in found.never_evaluated}
    assert len(set(found.vanished)) == len(found.vanished)


def test_an_empty_suite_and_an_empty_ledger_leave_nothing_unsaid() -> None:
    assert seen(set()) == Coverage(True)
