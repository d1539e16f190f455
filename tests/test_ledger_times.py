"""A budget plans by the times of a ledger that others wrote, where this machine has none of its own."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuguard.claims.claim import Claim
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.facts.faults import HostFault
from pytest_gpuguard.ledger.store import open_ledger
from pytest_gpuguard.packing.history import Seconds, expected_of
from pytest_gpuguard.packing.ledger_times import STOP_S, Times, Took, expected, read_times, times_in, write_times
from pytest_gpuguard.packing.memory import Memory

from . import ledger_schema_1
from .ledger_values import a_record, a_run
from .postgres import started_postgres as started_postgres
from .postgres import url_of_each_database as url_of_each_database
from .test_ledger_migration import do, driver, shape

Run = Any


def took(run: int, seconds: Any, **changed: Any) -> Any:
    return a_record(run, changed.pop("claim", "a claim"), evidence={"seconds": seconds, "log": "x" * 300}, **changed)


BAD: list[Any] = [None, [], {"boot": "x", "rest": 1}, {}, {"boot": 1.0, "rest": True}, {"boot": 1.0, "rest": -1}]
BAD += [
    {"boot": None, "rest": 1e9},
    {"boot": 1e9, "rest": 1.0},
    {"boot": 10**400, "rest": 1.0},
    {"boot": 1.0, "rest": 10**400},
]


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
        ("new", ("a card",), Seconds(400.0 + STOP_S, 3.5)),
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


def test_a_plan_neither_makes_a_ledger_nor_moves_one_forward(url: str) -> None:
    if url.startswith("sqlite"):
        Path(url[10:]).touch()
    assert times_in(url) == {}
    assert shape(url) == {}
    ledger_schema_1.make(driver(url))
    before = shape(url)
    assert times_in(url) == {}
    assert shape(url) == before
    assert do(url, "SELECT value FROM gpuguard_meta") == [("1",)]


def test_a_plan_holds_no_other_evidence_than_the_times(tmp_path: Path) -> None:
    url = str(tmp_path / "l.db")
    with open_ledger(url) as ledger:
        ledger.begin(a_run(0))
        wide = [random.Random(at).randbytes(20_000).hex() for at in range(150)]
        ledger.add(
            [a_record(0, f"c{at}", evidence={"seconds": {"rest": at}, "log": log}) for at, log in enumerate(wide)]
        )
    tracemalloc.start()
    try:
        assert len(times_in(url)) == 150
        assert tracemalloc.get_traced_memory()[1] < 5e6  # all of it is 6 MB as text, and half of that in the rows
    finally:
        tracemalloc.stop()


class OnCards:
    """What a run knows of its tests is asked of this run: on a rig of these cards, or a broken one."""

    def __init__(self, times: Times, cards: tuple[str, ...] | None, claim_id: str | None, simulated: bool) -> None:
        about = SimpleNamespace(id=claim_id)
        self.session, self._times, self._cards = self, times, cards
        self._evaluation = SimpleNamespace(claim=SimpleNamespace(about=about), ref=SimpleNamespace(name="new"))
        self.simulated = simulated

    @property
    def rig(self) -> Any:
        if self._cards is None:
            raise HostFault("infra.device", "no driver", "install one")
        return SimpleNamespace(usable=[SimpleNamespace(uuid=one) for one in self._cards])

    def cards(self, uuids: Sequence[str]) -> tuple[str, ...]:
        return tuple(one.partition("-")[0] for one in uuids)

    def times(self) -> Times:
        return self._times

    def evaluation(self, item: pytest.Item) -> Any:
        return self._evaluation


def shared(
    item: pytest.Item, times: Times, cards: tuple[str, ...] | None = (), id: str | None = None, simulated: bool = False
) -> Seconds | None:
    runner: Any = OnCards(times, cards, id, simulated)
    return Memory(runner)._shared(item)


@pytest.mark.parametrize("number", [7])
def test_a_claims_times_are_those_of_its_name_on_the_cards_that_are_here(
    request: pytest.FixtureRequest, number: int
) -> None:
    item = request.node
    ours, other = Seconds(60.0, 5.0), Seconds(1.0, 1.0)
    on_cards, on_none = Took("new", ("h200",), 1.0, ours), Took("new", (), 0.5, other)
    assert shared(item, {item.nodeid: [on_cards]}, ("h200-0", "h200-1")) == ours
    assert shared(item, {item.nodeid: [on_cards]}, ("b200-0",)) is None
    assert shared(item, {item.nodeid: [on_cards]}, None) is None
    assert shared(item, {item.nodeid: [on_cards, on_none]}, None) == other
    assert shared(item, {"named[7]": [on_none], item.nodeid: [on_cards]}, ("h200-0",), "named") == other
    assert shared(item, {item.nodeid: [on_cards]}, ("h200-0",), "named") is None


def test_a_rehearsal_does_not_plan_by_what_was_measured_on_real_cards(request: pytest.FixtureRequest) -> None:
    known = {request.node.nodeid: [Took("new", (), 1.0, Seconds(600.0, 60.0))]}
    assert shared(request.node, known) == Seconds(600.0, 60.0)
    assert shared(request.node, known, simulated=True) is None


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
