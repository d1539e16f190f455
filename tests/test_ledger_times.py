"""A budget plans by the times of a ledger that others wrote, where this machine has none of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.claim import Claim
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.ledger.store import open_ledger
from pytest_gpuguard.packing.history import Seconds, expected_of
from pytest_gpuguard.packing.ledger_times import Took, expected, read_times, times_in, write_times

from .ledger_values import a_record, a_run
from .postgres import started_postgres as started_postgres
from .postgres import url_of_each_database as url_of_each_database

Run = Any


def took(run: int, seconds: Any, **changed: Any) -> Any:
    return a_record(run, changed.pop("claim", "a claim"), evidence={"seconds": seconds, "log": "x" * 300}, **changed)


BAD: list[Any] = [None, [], {"boot": "x", "rest": 1}, {}, {"boot": 1.0, "rest": True}, {"boot": 1.0, "rest": -1}]


def test_what_claims_took_when_they_were_last_verified_is_read(url: str, tmp_path: Path) -> None:
    with open_ledger(url) as ledger:
        for number in range(4):
            ledger.begin(a_run(number))
        ledger.begin(a_run(5, kind="rehearsed"))
        ledger.add(
            [
                took(0, {"boot": 900.0, "rest": 9.0}),
                took(1, {"boot": 400.0, "rest": 3.5}, claim="old name"),
                took(2, {"boot": 1.0, "rest": 1.0}, verdict="INFRA"),
                took(3, {"boot": None, "rest": 2}, stack="old", cards=("b", "a")),
                took(5, {"boot": 0.1, "rest": 0.1}, kind="rehearsed"),
                *(took(1, bad, claim=f"bad {at}") for at, bad in enumerate(BAD)),
            ]
        )
        ledger.alias("old name", "a claim")
    found = times_in(url)
    assert found.keys() == {"a claim", "old name"}
    assert found["old name"] == found["a claim"]
    assert {(one.stack, one.cards, one.seconds) for one in found["a claim"]} == {
        ("new", ("a card",), Seconds(400.0, 3.5)),
        ("old", ("b", "a"), Seconds(None, 2)),
    }
    write_times(found, tmp_path)
    assert read_times(tmp_path) == found


def test_the_same_stack_goes_before_others_and_other_cards_say_nothing() -> None:
    known = [
        Took("old", ("h200",), 3.0, Seconds(30.0, 3.0)),
        Took("new", ("h200",), 2.0, Seconds(20.0, 2.0)),
        Took("mid", ("b200", "h200"), 9.0, Seconds(90.0, 9.0)),
    ]
    assert expected(known, "new", ["h200"]) == Seconds(20.0, 2.0)
    assert expected(known, "another", ["h200"]) == Seconds(30.0, 3.0)
    assert expected(known, "another", ["h200", "b200"]) == Seconds(90.0, 9.0)
    assert expected(known, "new", ["l40s"]) is None
    assert expected(known, "new", []) is None
    assert expected([], "new", ["h200"]) is None


def test_nothing_is_known_of_a_ledger_that_is_not_there_or_cannot_be_read_and_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "broken.db").write_text("this is no database, and long enough to be told from one that is empty")
    for url in (None, str(tmp_path / "l.db"), f"sqlite:///{tmp_path}/l.db", str(tmp_path / "broken.db"), "mysql://x/y"):
        assert times_in(url) == {}
    assert [one.name for one in tmp_path.iterdir()] == ["broken.db"]
    assert read_times(tmp_path) == {}


def test_the_ledger_is_asked_only_where_this_machine_knows_nothing() -> None:
    claim = Claim(Needs(), None, ())

    class Known:
        def expected_seconds(self, claim_id: str) -> Seconds | None:
            return Seconds(10.0, 1.0)

    def never() -> Seconds:
        raise AssertionError

    assert str(expected_of(claim, "a.py::b", Known(), shared=never)) == "11 s, as measured before"  # type: ignore[arg-type]
    found = expected_of(claim, "a.py::b", shared=lambda: Seconds(60.0, 10.0))
    assert (str(found), found.beside_boot) == ("70 s, as in the ledger", 10.0)
    assert str(expected_of(claim, "a.py::b")) == "5 min, by default"


CLAIMS = """
@serves("sglang", MODEL, CPU)
@works
def test_it(): ...
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_budget_knows_a_claims_times_from_the_ledger(claims: Run, workers: tuple[str, ...]) -> None:
    budget = "--gpuguard-budget=2m"
    claims(CLAIMS, budget).stdout.fnmatch_lines(["*0 of 1 claim evaluated*"])  # five minutes, by default
    assert claims(CLAIMS).ret == 0
    Path(".gpuguard/history.json").unlink()
    claims(CLAIMS, budget, *workers).stdout.fnmatch_lines(["budget 2m: 1 of 1 claim evaluated, * s expected, * taken"])
    Path(".gpuguard/history.json").unlink()
    claims(CLAIMS, budget, "--gpuguard-ledger=none", *workers).stdout.fnmatch_lines(["*0 of 1 claim evaluated*"])
