"""A ledger is made once, moves forward whole or not at all, and one of a newer version is left alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, inspect, text

from pytest_gpuguard.ledger import migrate, schema
from pytest_gpuguard.ledger.store import LedgerError, open_ledger

from . import ledger_schema_1
from .ledger_values import a_record
from .postgres import started_postgres as started_postgres
from .postgres import url_of_each_database as url_of_each_database


def driver(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


def shape(url: str) -> dict[str, Any]:
    """Every table with its columns, keys and indices, as the database knows them."""
    engine = create_engine(driver(url))
    look = inspect(engine)
    found = {
        name: (
            [(one["name"], str(one["type"]), one["nullable"], one["default"]) for one in look.get_columns(name)],
            look.get_pk_constraint(name)["constrained_columns"],
            sorted((str(one["name"]), str(one["column_names"])) for one in look.get_indexes(name)),
        )
        for name in look.get_table_names()
    }
    engine.dispose()
    return found


def do(url: str, statement: str) -> list[Any]:
    engine = create_engine(driver(url))
    with engine.begin() as connection:
        done = connection.execute(text(statement))
        found = list(done) if done.returns_rows else []
    engine.dispose()
    return found


@pytest.fixture
def other_url(url: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if url.startswith("sqlite"):
        return f"sqlite:///{tmp_path / 'other.db'}"
    made: str = request.getfixturevalue("postgres").database()
    return made


def test_an_old_ledger_moves_forward_with_all_that_is_in_it(url: str, other_url: str) -> None:
    ledger_schema_1.make(driver(url))
    with open_ledger(url) as store:
        (record,) = store.history("a claim")
        assert (record.fact, record.hearsay, record.components) == ("as it was", False, {"torch": "2.9.0"})
        store.add([a_record(0, hearsay=True)])  # numbers go on where they were
        assert {one.hearsay for one in store.records("run-000")} == {False, True}
        store.amend(["a"], lambda name, note: {})
    open_ledger(other_url).close()
    assert shape(url) == shape(other_url)


def test_a_migration_that_fails_leaves_the_ledger_as_it_was(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger_schema_1.make(driver(url))
    before = shape(url)

    def fails(connection: Connection) -> None:
        migrate._to_2(connection)
        connection.execute(text("SELECT * FROM no_such_table"))

    monkeypatch.setattr(migrate, "STEPS", {1: fails})
    with pytest.raises(LedgerError):
        open_ledger(url)
    assert shape(url) == before
    assert do(url, "SELECT value FROM gpuguard_meta") == [("1",)]
    monkeypatch.undo()
    with open_ledger(url) as store:
        assert len(store.history("a claim")) == 1


def test_there_is_a_step_from_every_version() -> None:
    assert sorted(migrate.STEPS) == list(range(1, schema.VERSION))


def test_a_newer_ledger_is_refused_and_not_touched(url: str) -> None:
    open_ledger(url).close()
    do(url, "UPDATE gpuguard_meta SET value = '99'")
    do(url, "DROP TABLE gpuguard_notes")
    before = Path(url[10:]).read_bytes() if url.startswith("sqlite") else b""
    with pytest.raises(LedgerError, match=r"ledger of version 99, made by a newer .* knows versions up to 2\. Install"):
        open_ledger(url)
    assert do(url, "SELECT value FROM gpuguard_meta") == [("99",)]
    assert "gpuguard_notes" not in shape(url)
    assert not before or Path(url[10:]).read_bytes() == before


@pytest.mark.parametrize("value", ["0", "-1", "two", ""])
def test_a_version_that_is_none_is_refused(url: str, value: str) -> None:
    open_ledger(url).close()
    do(url, f"UPDATE gpuguard_meta SET value = '{value}'")
    with pytest.raises(LedgerError, match="does not say what version of a ledger it is"):
        open_ledger(url)


@pytest.mark.parametrize("old", [False, True])
def test_processes_that_make_or_migrate_at_once_all_succeed(url: str, old: bool) -> None:
    if old:
        ledger_schema_1.make(driver(url))
    script = textwrap.dedent(
        """
        import os, sys
        from pytest_gpuguard.ledger.store import open_ledger
        from tests.ledger_values import a_run
        readers = []
        begin, go = os.pipe()
        for number in range(6):
            child = os.fork()
            if not child:
                os.close(go)
                os.read(begin, 1)  # all at once: the pipe ends
                with open_ledger(sys.argv[1]) as store:
                    store.begin(a_run(number))
                os._exit(0)
        os.close(go)
        sys.exit(sum(os.waitstatus_to_exitcode(os.wait()[1]) != 0 for _ in range(6)))
        """
    )
    done = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, "")
    with open_ledger(url) as store:
        assert {f"run-{number:03d}" for number in range(6)} <= {run.id for run in store.runs()}
        assert len(store.history("a claim")) == old
