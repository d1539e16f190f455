"""Export, import and merging: nothing is lost, twice is once, and no order matters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from pytest_gpuguard.ledger import lines
from pytest_gpuguard.ledger.spool import Spool
from pytest_gpuguard.ledger.store import LedgerError, Store, open_ledger

from .ledger_values import a_record, a_run, told
from .postgres import started_postgres as started_postgres
from .postgres import url_of_each_database as url_of_each_database


def in_file(path: Path) -> Store:
    return open_ledger(str(path))


def take(store: Store, *texts: str) -> list[lines.Imported]:
    return [lines.import_lines(store, text.splitlines()) for text in texts]


def two_ledgers(tmp_path: Path) -> list[str]:
    """Exports that share a run, disagree on a judgement of it, on its evidence and on a name, and have one each."""
    texts = []
    for number, other in enumerate(("left", "right")):
        with in_file(tmp_path / f"{other}.db") as store:
            store.begin(a_run(0) if number else replace(a_run(0), ended=1e9 + 99))
            store.begin(a_run(1 + number))
            later = 1e9 + 100 + number
            store.add([a_record(0, "both", fact=other, when=later, evidence={"of": other}, cards=(other,))])
            store.add([a_record(0, "tie", fact=other, when=5.0, evidence={"of": other})])
            store.add([a_record(0, "bare", fact=other, when=later, evidence={} if number else {"of": other})])
            store.add([a_record(1 + number, other, stack=other)])
            store.alias("a", other)
            store.amend(["machine"], lambda name, note: {"local": True})
            texts.append(told(store))
    return texts


def test_an_export_makes_the_same_ledger_on_each_database(url: str, tmp_path: Path) -> None:
    with open_ledger(url) as store:
        store.begin(a_run(0))
        store.begin(replace(a_run(1), ended=1e9 + 4000, suite=None))
        store.add([a_record(0, "a", evidence={"k": ["v"]}), a_record(1, "É\u2028\n"), a_record(1, "a", reason="gpus")])
        store.alias("a", "b")
        text = told(store)
    with in_file(tmp_path / "copy.db") as copy:
        assert take(copy, text) == [lines.Imported(2, 3, [])]
        assert told(copy) == text
        assert copy.aliases() == {"a": "b"}


def test_notes_of_a_machine_are_not_exported(tmp_path: Path) -> None:
    assert all("machine" not in text and "local" not in text for text in two_ledgers(tmp_path))


def test_twice_is_once(url: str, tmp_path: Path) -> None:
    text, _ = two_ledgers(tmp_path)
    with open_ledger(url) as store:
        first, again = take(store, text, text)
        assert first == again == lines.Imported(2, 4, [])
        assert told(store) == text


def test_merging_either_way_round_gives_the_same(url: str, tmp_path: Path) -> None:
    left, right = two_ledgers(tmp_path)
    with open_ledger(url) as one, in_file(tmp_path / "two.db") as two:
        take(one, left, right)
        take(two, right, left, right)
        assert told(one) == told(two)
        records = {record.claim: record for record in one.records("run-000", evidence=True)}
        assert (records["both"].fact, records["both"].evidence) == ("right", {"of": "right"})
        assert (records["bare"].fact, records["bare"].evidence) == ("right", {"of": "left"})
        assert one.run("run-000").ended == 1e9 + 99
        assert one.aliases() == {"a": "right"}


def test_lines_in_any_order_give_the_same(tmp_path: Path) -> None:
    text = two_ledgers(tmp_path)[0].splitlines()
    with in_file(tmp_path / "one.db") as one, in_file(tmp_path / "two.db") as two:
        lines.import_lines(one, text)
        assert lines.import_lines(two, reversed(text)).problems == []
        assert told(one) == told(two)


BROKEN: Sequence[tuple[str | bytes, str]] = (
    ('{"record": {"run"', "no JSON"),
    ("[" * 100_000, "no JSON"),
    ("[]", "one object with one key"),
    ('{"run": {}, "record": {}}', "one object with one key"),
    ('{"verdict": {}}', "'verdict' is not known"),
    ('{"record": {"run": "r"}}', "lacks 'kind'"),
    ('{"record": 5}', "cannot be read"),
    ('{"run": null}', "cannot be read"),
    ('{"evidence": {"run": "r", "claim": "c", "stack": "s", "when": NaN, "evidence": {}}}', "not a number"),
    ('{"alias": {"old": "a", "new": "b", "since": 1e999}}', "not a number"),
    ('{"finish": {"run": "nobody", "ended": 5}}', "nothing else is known"),
    ('{"finish": {"run": "r", "ended": 1' + "0" * 400 + "}}", "cannot be read"),
    (b"\xff\xfe{}", "no JSON"),
)


def test_broken_lines_are_told_by_number_and_the_others_taken(url: str) -> None:
    good = [
        lines.run_line(a_run(0)), *lines.record_lines([a_record(0)]),
        lines.run_line(a_run(1)), *lines.record_lines([a_record(1)]),
    ]  # fmt: skip
    broken = [line for line, _ in BROKEN]
    with open_ledger(url) as store:
        done = lines.import_lines(store, [*good[:2], *broken, "", *good[2:]])
        assert (done.runs, done.records) == (2, 2)
        assert [number for number, _ in done.problems] == list(range(3, 3 + len(BROKEN)))
        for (_, said), (_, expected) in zip(done.problems, BROKEN, strict=True):
            assert expected in said
            assert len(said) < 300
        assert store.count() == (2, 2)


def test_one_wrong_value_does_not_cost_its_neighbours(tmp_path: Path) -> None:
    records = [a_record(0, name) for name in "abc"]
    text = list(lines.record_lines(records))
    for key, value in (("components", []), ("cards", 5), ("kind", "guessed"), ("when", "soon"), ("run", "x" * 300)):
        data = json.loads(text[1])
        data["record"][key] = value
        with in_file(tmp_path / f"{key}.db") as store:
            done = lines.import_lines(store, [lines.run_line(a_run(0)), text[0], json.dumps(data), text[2]])
            assert [number for number, _ in done.problems] == [3]
            assert store.count() == (1, 2)


def test_records_without_their_run_bring_one_that_is_made_up_and_said(url: str) -> None:
    text = list(lines.record_lines([a_record(0, "a", when=50.0, stack="x"), a_record(0, "b", when=40.0, stack="y")]))
    with open_ledger(url) as store:
        for some in (text[:1], text[1:]):
            done = lines.import_lines(store, some)
            assert (done.runs, done.records) == (1, 1)
            assert done.problems == [(1, "run 'run-000' has no line of its own: it is made up from its records")]
        run = store.run("last")
        assert (run.id, run.started, run.stacks, run.host) == ("run-000", 40.0, ("x", "y"), "unknown")
        assert lines.import_lines(store, [lines.run_line(a_run(0))]).problems == []
        assert store.run("last") == a_run(0)
        assert lines.import_lines(store, text).problems == []
        assert store.run("last") == a_run(0)


def test_lines_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    with in_file(tmp_path / "l.db") as store:
        with pytest.raises(LedgerError, match="format 2; this pytest-gpuguard reads format 1: install a newer one"):
            lines.import_lines(store, ['{"format": 2}', lines.run_line(a_run(0))])
        assert store.count() == (0, 0)


def test_chosen_runs_are_exported(tmp_path: Path) -> None:
    with in_file(tmp_path / "l.db") as store:
        for number in range(3):
            store.begin(a_run(number))
            store.add([a_record(number)])
        out = StringIO()
        assert lines.export(store, out, ["last", "run-000", "last"]) == (2, 2)
        assert [json.loads(line)["run"]["id"] for line in out.getvalue().splitlines() if '"run":{' in line] == [
            "run-000",
            "run-002",
        ]
        with pytest.raises(LedgerError, match="no run 'nope'"):
            lines.export(store, StringIO(), ["nope"])


def test_an_empty_ledger_is_a_header_and_nothing_imports_as_nothing(url: str) -> None:
    with open_ledger(url) as store:
        assert told(store) == '{"format":1}\n'
        assert take(store, "", '{"format":1}\n') == [lines.Imported(0, 0, [])] * 2


def test_a_spool_is_taken_by_import_beside_what_reached_the_ledger(url: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "new" / "spool.jsonl")
    with open_ledger(url) as store:
        store.begin(a_run(0))
        store.add([a_record(0, "a")])
        spool.begin(a_run(0))
        spool.add([a_record(0, "a"), a_record(0, "b", evidence={"k": 1})])
        spool.finish("run-000", 1e9 + 500)
        for _ in range(2):
            assert lines.import_lines(store, spool.path.open("rb")) == lines.Imported(1, 2, [])
        assert store.run("last").ended == 1e9 + 500
        assert [one.evidence for one in store.records("run-000", evidence=True)] == [{}, {"k": 1}]


def test_a_spool_goes_on_after_a_write_that_was_cut_off(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.jsonl")
    spool.begin(a_run(0))
    with spool.path.open("a") as file:
        file.write('{"record": {"run": "run-0')
    Spool(spool.path).add([a_record(0)])
    with in_file(tmp_path / "l.db") as store:
        done = lines.import_lines(store, spool.path.open("rb"))
        assert (done.runs, done.records, [number for number, _ in done.problems]) == (1, 1, [3])


def test_a_spool_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "spool.jsonl", Path("/dev/full")):
        with pytest.raises(LedgerError, match=r"the spool .* cannot be written \(.*\): make room there"):
            Spool(path).begin(a_run(0))
