"""Commands that only read a file do so without SQLAlchemy, and are answered as by it; many histories are one query."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.ledger import reading, rows
from pytest_gpuguard.ledger.answers import Answers
from pytest_gpuguard.ledger.file import FileAnswers, answers
from pytest_gpuguard.ledger.record import Record
from pytest_gpuguard.ledger.store import LedgerError, Store, open_ledger

from . import ledger_schema_1
from .ledger_values import a_record, a_run
from .postgres import started_postgres as started_postgres
from .postgres import url_of_each_database as url_of_each_database

RECORDS = [
    a_record(0, "a", evidence={"argv": ["x" * 900], "n": None}),
    a_record(1, "a", "INCONCLUSIVE", evidence={"confirmed": {"boots": 2, "agreed": 1}, "log": "long"}),
    a_record(2, "a", "CHANGED", cards=("b", "a"), components={"torch": None}),
    a_record(0, "b", decides=False, hearsay=True, reason="gpus"),
    a_record(1, "b's \x1b[31m ✓ % :name", stack="old", kind="rehearsed"),
    a_record(2, "b", "NOT_EVALUATED", expectation="works()"),
    *(a_record(1, f"claim {number}") for number in range(600)),  # more than fit into one list of names
]

QUESTIONS: dict[str, Callable[[Answers], object]] = {
    "runs": lambda it: (it.runs(), it.runs("rehearsed"), it.runs(limit=1), it.run("last~1"), it.run("run-002")),
    "records": lambda it: (it.records("run-001"), it.records("run-001", evidence=True), it.records("nope")),
    "raw": lambda it: it.raw("run-001"),
    "history": lambda it: (it.history("b"), it.history("now a", evidence=True), it.history("a", limit=2)),
    "histories": lambda it: it.histories(["a", "b", "nope", "claim 599"]),
    "before": lambda it: it.before("run-002"),
    "latest": lambda it: (it.latest(), it.latest("rehearsed")),
    "latest with": lambda it: (
        it.latest_with("argv"),
        it.latest_with("nothing"),
        it.latest_with("seconds", "rehearsed"),
    ),
    "evaluated": lambda it: (it.evaluated(), it.evaluated("rehearsed")),
    "names": lambda it: (it.aliases(), it.renamings()),
    "notes": lambda it: it.notes(),
    "count": lambda it: (it.count(), it.url),
}


def fill(url: str, records: list[Record] = RECORDS) -> None:
    with open_ledger(url) as store:
        for number in range(3):
            store.begin(a_run(number))
        store.add(records)
        store.alias("a", "now a")
        store.amend(["it"], lambda name, note: {"of": name})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    fill(str(tmp_path / "l.db"))
    return tmp_path / "l.db"


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_file_is_answered_for_as_by_the_store(file: Path, question: str) -> None:
    with answers(f"sqlite:///{file}") as quick, open_ledger(str(file)) as store:
        assert isinstance(quick, FileAnswers)
        assert QUESTIONS[question](quick) == QUESTIONS[question](store)
        assert [one for one in quick.records("run-000") if type(one.hearsay) is not bool] == []


def test_what_the_commands_that_read_a_file_import(file: Path) -> None:
    program = """
        import sys
        from pytest_gpuguard.cli import main
        main([*sys.argv[1:]], standalone_mode=False)
        heavy = ("sqlalchemy", "pytest", "rich", "httpx", "pynvml", "subprocess", "pytest_gpuguard.claims.claim",
                 "pytest_gpuguard.claims.observation", "pytest_gpuguard.cli_who")
        print([one for one in heavy if one in sys.modules])
    """
    for words in (("history", "now a"), ("diff", "run-000"), ("matrix",)):
        command = [sys.executable, "-c", textwrap.dedent(program), *words, "--ledger", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "[]", words


def test_a_file_of_an_older_version_is_moved_forward_first(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    ledger_schema_1.make(url)
    with answers(url) as ledger:
        assert isinstance(ledger, Store)
        assert [one.fact for one in ledger.history("a claim")] == ["as it was"]
    with answers(url) as ledger:
        assert isinstance(ledger, FileAnswers)
        assert [one.fact for one in ledger.history("a claim")] == ["as it was"]


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE gpuguard_meta SET value = '99'", "version 99, made by a newer"),
        ("DELETE FROM gpuguard_meta", "does not say what version"),
        ("DROP TABLE gpuguard_meta", "is a database, but no ledger"),
    ],
)
def test_what_is_no_ledger_of_this_version_is_told_as_by_the_store(file: Path, statement: str, says: str) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(LedgerError, match=says):
        answers(str(file))


@pytest.mark.parametrize("content", [b"", b"this is no database, and long enough to be told from one"])
def test_a_file_that_is_no_database_is_the_stores_to_tell_or_to_make(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "l.db").write_bytes(content)
    if content:
        with pytest.raises(LedgerError, match="no SQLite database"):
            answers(str(tmp_path / "l.db"))
        return
    with answers(str(tmp_path / "l.db")) as ledger:
        assert isinstance(ledger, Store)


def test_another_journal_is_mended_by_the_store(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA journal_mode=delete")
    connection.close()
    with answers(str(file)) as ledger:
        assert isinstance(ledger, Store)
    with answers(str(file)) as ledger:
        assert isinstance(ledger, FileAnswers)


def test_a_damaged_file_is_told(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8192:-4096] = os.urandom(len(data) - 12288)
    file.write_bytes(data)
    with pytest.raises(LedgerError, match=r"l\.db is damaged: restore it from a copy"), answers(str(file)) as ledger:
        QUESTIONS["latest"](ledger)


def test_rows_that_do_not_fit_are_told(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("DELETE FROM gpuguard_fingerprints")
    connection.close()
    with answers(str(file)) as ledger, pytest.raises(LedgerError, match="the ledger is damaged: the fingerprint"):
        ledger.history("now a")


def test_a_writer_is_neither_held_up_nor_missed(file: Path) -> None:
    with answers(str(file)) as ledger, open_ledger(str(file)) as store:
        assert isinstance(ledger, FileAnswers)
        with ledger._reading() as ask:
            assert len(ask("SELECT id FROM gpuguard_runs")) == 3
            store.begin(a_run(3))
            assert len(ask("SELECT id FROM gpuguard_runs")) == 3  # as when it began to read
        assert len(ledger.runs()) == 4
        with pytest.raises(LedgerError, match="cannot be read or written"), ledger._reading() as ask:
            ask("SELECT nothing FROM nowhere")
        assert len(ledger.runs()) == 4


@pytest.mark.parametrize("mode", [0o444, 0o666])  # writable it may be: SQLite's files beside it may not
def test_a_file_that_may_only_be_read_is_read_and_nothing_is_put_beside_it(mode: int) -> None:
    base = Path("/tmp") / f"gpuguard-answers-{os.getpid()}"  # pytest's own folders are closed to others
    base.mkdir()
    try:
        fill(str(base / "l.db"))
        (base / "l.db").chmod(mode)
        base.chmod(0o555)
        head = "import os, sys\nfrom pytest_gpuguard.ledger.file import answers\n"
        head += "import sqlalchemy\nos.setgid(65534); os.setuid(65534)\n" if os.geteuid() == 0 else ""
        script = (
            "with answers(sys.argv[1]) as it: print(len(it.history('now a')), os.listdir(os.path.dirname(sys.argv[1])))"
        )
        command = [sys.executable, "-c", head + script, str(base / "l.db")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("3 ['l.db']\n", "")
    finally:
        base.chmod(0o755)
        shutil.rmtree(base)


def test_many_histories_are_those_of_one_claim_after_the_other(url: str) -> None:
    fill(url)
    asked = ["a", "now a", "b", "nope", *(f"claim {number}" for number in range(600))]
    with open_ledger(url) as store:
        for evidence in (False, True):
            one_by_one = {claim: store.history(claim, evidence=evidence) for claim in asked[:10]}
            assert {
                claim: found for claim, found in store.histories(asked, evidence).items() if claim in one_by_one
            } == (one_by_one)
        assert store.histories([]) == {}


def test_many_histories_are_one_query_of_judgements(file: Path) -> None:
    asked: list[str] = []
    with answers(str(file)) as ledger:
        assert isinstance(ledger, FileAnswers)
        ledger._connection.set_trace_callback(asked.append)
        found = ledger.histories([f"claim {number}" for number in range(600)])
    assert sum(map(len, found.values())) == 600
    assert sum("FROM gpuguard_judgements" in one for one in asked) == 1


def test_a_claim_that_is_renamed_while_histories_are_read_is_still_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reading.of_claims
    with open_ledger(url) as store, open_ledger(url) as other:
        for number in range(2):
            store.begin(a_run(number))
        store.add([a_record(0, "oldest"), a_record(1, "a")])
        store.alias("oldest", "a")

        def renamed_meanwhile(*given: Any) -> reading.Query:
            other.alias("a", "b")
            return real(*given)

        monkeypatch.setattr(reading, "of_claims", renamed_meanwhile)
        found = store.histories(["a"])
        assert [(one.run, one.claim) for one in found["a"]] == [("run-000", "a"), ("run-001", "a")]
        monkeypatch.undo()
        assert [one.claim for one in store.histories(["a"])["a"]] == ["b", "b"]


def test_judgements_of_one_moment_are_in_one_order_on_every_database(url: str) -> None:
    records = [
        a_record(0, name, stack=f"stack {number}", expectation=f"works({number})", nodeid=f"{name}[{number}]")
        for number in range(12)
        for name in ("a", "b")
    ]
    with open_ledger(url) as store:
        store.begin(a_run(0))
        store.add(records)
        for limit in (None, 3):
            keys = sorted(rows.key_of(one) for one in records if one.claim == "a")
            assert [rows.key_of(one) for one in store.history("a", limit)] == keys[-limit if limit else None :]


def test_records_of_two_claims_that_became_one_are_in_one_order(tmp_path: Path) -> None:
    def told(names: Iterable[str]) -> list[str]:
        url = str(tmp_path / "".join(names))
        with open_ledger(url) as store:
            store.begin(a_run(0))
            store.add([a_record(0, name, nodeid=f"{name}[new]") for name in names])
            for name in "bcd":
                store.alias(name, "a")
            return [one.nodeid for one in store.records("run-000")]

    assert told("abcd") == told("dbca") == told("cdab") == ["a[new]", "b[new]", "c[new]", "d[new]"]


def test_of_the_evidence_only_the_part_that_is_asked_for_is_kept(url: str) -> None:
    fill(url)
    with open_ledger(url) as store:
        store.add(
            [a_record(2, "b", evidence={"seconds": [1], "log": "x"}), a_record(2, "old c", evidence={"seconds": 2})]
        )
        store.alias("old c", "c")
        found = {one.claim: one.evidence for one in store.latest_with("seconds")}
        assert [found[name] for name in ("b", "c", "now a", "claim 1")] == [
            {"seconds": [1]},
            {"seconds": 2},
            {},
            {},
        ]
        assert [replace(one, evidence={}) for one in store.latest_with("seconds")] == list(store.latest())
