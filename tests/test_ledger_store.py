"""The ledger keeps what it is given, on each kind of database, and finds it again."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.ledger.record import Record
from pytest_gpuguard.ledger.rows import pack, unpack
from pytest_gpuguard.ledger.spool import Spool
from pytest_gpuguard.ledger.store import LedgerError, Store, open_ledger

from .ledger_values import a_record, a_run, told
from .postgres import started_postgres as started_postgres
from .postgres import url_of_each_database as url_of_each_database

HOSTILE = "<script>\x1b[31m'; DROP TABLE gpuguard_runs; -- \ud800 \x00 \u202e ✓" + "x" * 9000


def filled(url: str, *records: Record, runs: int = 3) -> Store:
    store = open_ledger(url)
    for number in range(runs):
        store.begin(a_run(number))
    store.add(records)
    return store


def test_what_was_added_is_there_after_reopening(url: str) -> None:
    record = a_record(
        1, hearsay=True, decides=False, reason="gpus", cards=("b", "a"), evidence={"argv": ["x" * 900], "n": None}
    )
    with filled(url, record) as store:
        store.finish("run-001", 1e9 + 7200.5)
    with open_ledger(url) as store:
        assert store.records("run-001", evidence=True) == (record,)
        assert store.records("run-001")[0].evidence == {}
        assert store.run("run-001") == a_run(1, ended=1e9 + 7200.5)


def test_the_same_judgement_again_replaces(url: str) -> None:
    first = a_record(1, verdict="HOLDS", evidence={"try": 1})
    second = a_record(1, verdict="CHANGED", cards=("other",), evidence={"try": 2})
    with filled(url, first, second, second) as store:
        store.add([second])
        assert store.records("run-001", evidence=True) == (second,)


def test_expectations_and_stacks_are_judged_apart(url: str) -> None:
    apart = [a_record(1, stack=stack, expectation=text) for stack in ("a", "b") for text in ("fits()", "works()")]
    with filled(url, *apart) as store:
        assert list(store.records("run-001")) == apart


def test_nothing_of_an_add_that_fails_stays(url: str) -> None:
    with filled(url) as store:
        with pytest.raises(LedgerError, match="begin it first"):
            store.add([a_record(1), a_record("never-begun")])
        with pytest.raises(LedgerError, match="not a number"):
            store.add([a_record(1), a_record(2, when=float("nan"))])
        assert store.count() == (3, 0)


def test_adding_nothing_is_nothing(url: str) -> None:
    with filled(url) as store:
        store.add([])
        assert store.count() == (3, 0)
        assert store.latest() == store.before("run-000") == store.records("nope") == store.history("nope") == ()


def test_hostile_text_is_kept_and_found(url: str) -> None:
    record = a_record(
        0, HOSTILE, expectation=HOSTILE, fact=HOSTILE, nodeid=HOSTILE, components={HOSTILE: HOSTILE},
        evidence={HOSTILE: [HOSTILE, float("nan")]}, stack=HOSTILE,
    )  # fmt: skip
    with filled(url, record) as store:
        (found,) = store.history(HOSTILE, evidence=True)
        assert found.fact == HOSTILE.replace("\ud800", "\ufffd").replace("\x00", "\ufffd")
        assert found.components == {HOSTILE: HOSTILE}
        assert found.evidence == {HOSTILE: [HOSTILE, None]}
        store.alias(HOSTILE, HOSTILE + "2")
        assert store.history(HOSTILE + "2") == store.history(HOSTILE)
        store.amend([HOSTILE], lambda name, note: {name: HOSTILE})
        (note,) = store.notes().values()
        assert list(note.values()) == [HOSTILE]


def test_runs_are_told_newest_first_and_by_kind(url: str) -> None:
    with filled(url) as store:
        store.begin(a_run(9, kind="rehearsed"))
        assert [run.id for run in store.runs()] == ["run-009", "run-002", "run-001", "run-000"]
        assert [run.id for run in store.runs("verified", limit=2)] == ["run-002", "run-001"]
        assert store.runs("replayed") == ()


@pytest.mark.parametrize(
    ("name", "found"), [("last", "run-002"), ("last~2", "run-000"), ("run-001", "run-001"), ("run-00", None)]
)
def test_a_run_is_named_by_id_by_its_beginning_or_by_its_age(url: str, name: str, found: str | None) -> None:
    with filled(url) as store:
        if found is None:
            with pytest.raises(LedgerError, match=r"3 runs begin with 'run-00' \(run-002, run-001"):
                store.run(name)
        else:
            assert store.run(name).id == found


def test_a_whole_id_wins_over_longer_ones(tmp_path: Path) -> None:
    with filled(str(tmp_path / "l.db"), runs=0) as store:
        for name in ("a", "ab", "abc_"):
            store.begin(replace(a_run(1), id=name))
        assert store.run("ab").id == "ab"
        assert store.run("abc").id == "abc_"
        for none in ("", "%", "_", "last~3", "ABC", "b"):
            with pytest.raises(LedgerError):
                store.run(none)


def test_history_is_oldest_first_with_every_stack_card_and_kind(url: str) -> None:
    records = [
        a_record(0, stack="b", cards=()),
        a_record(1, verdict="INFRA", decides=False),
        a_record(2, kind="rehearsed", verdict="CHANGED"),
    ]
    with filled(url, *reversed(records), a_record(1, "another")) as store:
        assert store.history(records[0].claim) == tuple(records)
        assert store.history(records[0].claim, limit=2) == tuple(records[1:])


def test_history_follows_renamed_claims(url: str) -> None:
    with filled(url, a_record(0, "a"), a_record(1, "b"), a_record(2, "c"), a_record(2, "other")) as store:
        store.alias("a", "b")
        store.alias("b", "c")
        assert [one.run for one in store.history("c")] == ["run-000", "run-001", "run-002"]
        assert {one.claim for one in store.history("a")} == {"c"}
        assert store.aliases() == {"a": "c", "b": "c"}
        assert [one.claim for one in store.before("run-002")] == ["c"]
        assert {one.claim: one.run for one in store.latest()} == {"c": "run-002", "other": "run-002"}


def test_a_claim_that_is_moved_back_has_its_first_name_again(url: str) -> None:
    with filled(url, a_record(0, "a"), a_record(1, "b")) as store:
        store.alias("a", "b")
        store.alias("b", "a")
        assert store.aliases() == {"b": "a"}
        store.alias("b", "b")
        assert store.aliases() == {}
        assert [one.run for one in store.history("b")] == ["run-001"]


def test_before_takes_the_last_judgement_that_counts_of_earlier_runs(url: str) -> None:
    known = a_record(0, verdict="CONTRADICTED (worse)")
    noise = [
        a_record(1, verdict="INFRA"),
        a_record(1, verdict="INCONCLUSIVE", expectation="works()"),
        a_record(1, verdict="HOLDS", expectation="uses()", decides=False),
        a_record(2, verdict="HOLDS"),
    ]
    with filled(url, known, *noise) as store:
        assert store.before("run-002") == (known,)
        assert store.before("run-001") == (known,)
        assert store.before("run-000") == ()
        assert store.latest() == (noise[-1],)
        with pytest.raises(LedgerError, match="no run 'run-9'"):
            store.before("run-9")


def test_before_keeps_cards_stacks_and_kinds_apart(url: str) -> None:
    apart = [
        a_record(0), a_record(1, cards=("b",)), a_record(0, stack="old"), a_record(0, "another"),
    ]  # fmt: skip
    rehearsed = a_record(8, kind="rehearsed")
    with filled(url, *apart) as store:
        store.begin(a_run(8, kind="rehearsed"))
        store.begin(a_run(9))
        store.add([rehearsed])
        found = store.before("run-009")
        assert len(found) == 5
        assert all(one in found for one in (*apart, rehearsed))
        assert len(store.latest()) == 4
        assert store.latest("rehearsed") == (rehearsed,)


def test_a_run_that_began_later_than_was_said_moves_its_judgements(url: str) -> None:
    with filled(url, a_record(0), a_record(1)) as store:
        store.begin(replace(a_run(0), started=1e9 + 5400.0))
        assert [one.run for one in store.history("tests/a.py::test_it")] == ["run-001", "run-000"]
        assert [one.run for one in store.before("run-002")] == ["run-000"]


def test_evaluated_counts_the_runs_that_passed_a_claim_over(url: str) -> None:
    records = [
        a_record(0, "seen once"), a_record(0, "always"), a_record(1, "always"), a_record(2, "always"),
        a_record(2, "never", verdict="NOT_EVALUATED"), a_record(2, "seen once", verdict="INFRA"),
    ]  # fmt: skip
    with filled(url, *records, runs=5) as store:  # nothing was judged in the last two
        assert store.evaluated() == {
            "seen once": (records[0].when, 2),
            "always": (records[3].when, 0),
            "never": (None, 3),
        }
        assert store.evaluated("rehearsed") == {}


def test_notes_are_changed_together_or_not_at_all(url: str) -> None:
    with open_ledger(url) as store:
        store.amend(["a", "b", "a"], lambda name, note: {"of": name, "was": note})
        assert store.notes() == {"a": {"of": "a", "was": None}, "b": {"of": "b", "was": None}}
        store.amend(["a", "c"], lambda name, note: None)
        assert store.notes() == {"b": {"of": "b", "was": None}}

        def stumble(name: str, note: object) -> dict[str, Any]:
            if name == "z":
                raise KeyError(name)
            return {"changed": True}

        with pytest.raises(KeyError):
            store.amend(["b", "z"], stumble)
        assert store.notes() == {"b": {"of": "b", "was": None}}


def test_evidence_is_compressed_where_that_pays() -> None:
    for payload in ({}, {"a": 1}, {"log": "the same line again\n" * 500}):
        assert unpack(pack(payload)) == payload
    assert len(pack({"log": "the same line again\n" * 500})) < 200
    assert pack({"a": 1}) == b'{"a":1}'


def test_the_database_is_imported_only_with_the_store() -> None:
    code = (
        "import sys; import pytest_gpuguard.plugin; from pytest_gpuguard.ledger import record, flips, errors, names, "
        "lines, spool; assert not [one for one in sys.modules if one.split('.')[0] in ('sqlalchemy', 'psycopg')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_equal_ledgers_are_told_alike(url: str, tmp_path: Path) -> None:
    records = [a_record(number, name, evidence={"b": 1, "a": 2}) for number in range(3) for name in ("x", "É", "Z")]
    with filled(url, *records) as store, filled(str(tmp_path / "other.db"), *reversed(records)) as other:
        assert told(store) == told(other)
        assert told(store).count('"record"') == 9


def test_fresh_boots_that_disagreed_are_known_without_the_evidence(url: str) -> None:
    confirmed = {"boots": 3, "agreed": 1}
    flaky = a_record(1, "flaky", "INCONCLUSIVE", evidence={"title": "a", "confirmed": confirmed})
    undecided = a_record(1, "undecided", "INCONCLUSIVE", evidence={"title": "b", "confirmed": None})
    held = a_record(1, "held", evidence={"title": "c"})
    with filled(url, flaky, undecided, held) as store:
        store.alias("flaky", "renamed")
        told = {one.claim: one.evidence for one in store.records("run-001")}
        assert told == {"renamed": {"confirmed": confirmed}, "undecided": {"confirmed": None}, "held": {}}
        [one] = [one for one in store.records("run-001", evidence=True) if one.claim == "renamed"]
        assert one.evidence == flaky.evidence


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM gpuguard_fingerprints", "the fingerprint [0-9a-f]{32} of a verdict is missing"),
        ("UPDATE gpuguard_fingerprints SET components = '{'", "fingerprint [0-9a-f]{32} cannot be read"),
        ("UPDATE gpuguard_fingerprints SET components = '[1]'", "fingerprint [0-9a-f]{32} cannot be read"),
        ("UPDATE gpuguard_subjects SET cards = 'x'", "cards cannot be read"),
        ("UPDATE gpuguard_evidence SET data = x'00ff'", "evidence cannot be read"),
        ("UPDATE gpuguard_runs SET kind = 'seen'", "a run cannot be read .*'seen' is no kind of run"),
        ("UPDATE gpuguard_runs SET stacks = ''", "a run cannot be read"),
        ("UPDATE gpuguard_notes SET data = '3'", "note 'n' cannot be read"),
    ],
)
def test_rows_that_do_not_fit_are_an_error_of_the_ledger(tmp_path: Path, statement: str, says: str) -> None:
    file = tmp_path / "l.db"
    with filled(str(file), a_record(1, evidence={"a": 1})) as store:
        store.amend(["n"], lambda name, note: {"a": 1})
    with sqlite3.connect(file) as connection:
        connection.execute(statement)
    connection.close()
    with open_ledger(str(file)) as store, pytest.raises(LedgerError, match=f"the ledger is damaged: .*{says}.*Restore"):
        _ = store.runs(), store.notes(), store.records("run-001", evidence=True)


def test_a_claim_that_another_writer_brings_in_between_is_counted(tmp_path: Path) -> None:
    with filled(str(tmp_path / "l.db"), a_record(1)) as store:
        newest = store._reader.newest
        brought = a_record(2, "brought")
        store._reader.newest = lambda *args: [*newest(*args), brought]  # type: ignore[method-assign]
        assert store.evaluated()["brought"] == (brought.when, 0)


def test_the_folder_of_our_own_is_kept_out_of_commits(tmp_path: Path) -> None:
    open_ledger(str(tmp_path / ".gpuguard" / "ledger.sqlite")).close()
    assert (tmp_path / ".gpuguard" / ".gitignore").read_text() == "*\n"
    Spool(tmp_path / "b" / ".gpuguard" / "spool.jsonl").begin(a_run(1))
    assert (tmp_path / "b" / ".gpuguard" / ".gitignore").exists()
    open_ledger(str(tmp_path / "mine" / "ledger.sqlite")).close()
    assert not (tmp_path / "mine" / ".gitignore").exists()
