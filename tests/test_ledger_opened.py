"""A ledger that is locked, hidden, or of another version: it is told, waited for once, and left as it is."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpuguard.cli import main
from pytest_gpuguard.ledger import file as ledger_file
from pytest_gpuguard.ledger import store as ledger_store
from pytest_gpuguard.ledger.file import FileAnswers, answers
from pytest_gpuguard.ledger.store import LedgerError, open_ledger

from . import ledger_schema_1
from .ledger_values import a_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with open_ledger(str(tmp_path / "l.db")) as store:
        for number in range(3):
            store.begin(a_run(number))
    return tmp_path / "l.db"


def test_a_ledger_that_is_locked_is_waited_for_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_S", 30)
    monkeypatch.setattr(ledger_store, "open_ledger", lambda url, make: "who waits")
    with answers(str(file)) as quick:
        assert isinstance(quick, FileAnswers)
        with quick._reading() as ask:
            assert ask("PRAGMA busy_timeout") == [(30_000,)]
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("PRAGMA journal_mode=delete")
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        assert answers(str(file)) == "who waits"  # type: ignore[comparison-overlap]
        assert time.monotonic() - began < 15
    other.close()


def test_what_may_not_be_made_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    for path in (tmp_path / "l.db", tmp_path / "no folder" / "l.db"):
        with pytest.raises(LedgerError, match="there is no ledger"):
            answers(str(path), make=False)
    (tmp_path / "empty.db").touch()
    with pytest.raises(LedgerError, match="is no ledger yet: a run of pytest makes one"):
        open_ledger(str(tmp_path / "empty.db"), make=False)
    ledger_schema_1.make(f"sqlite:///{tmp_path / 'old.db'}")
    before = (tmp_path / "old.db").read_bytes()
    with pytest.raises(LedgerError, match="of version 1, older; nothing in it was changed"):
        answers(str(tmp_path / "old.db"), make=False)
    assert (tmp_path / "old.db").read_bytes() == before
    assert (tmp_path / "empty.db").stat().st_size == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["empty.db", "old.db"]


def test_another_journal_stays_where_nothing_may_be_made(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA journal_mode=delete")
    connection.close()
    before = file.read_bytes()
    with answers(str(file), make=False) as ledger:
        assert len(ledger.runs()) == 3
    assert file.read_bytes() == before


HIDDEN = """
import encodings.idna, os, sys
from click.testing import CliRunner
from pytest_gpuguard import cli_history
from pytest_gpuguard.claims import account
from pytest_gpuguard.ledger import errors, file
from pytest_gpuguard.cli import main
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
os.chdir("/")
done = CliRunner().invoke(main, ["matrix", "--ledger", sys.argv[1]])
print(done.exit_code, done.output, done.exception)
"""


def test_a_ledger_that_cannot_be_looked_for_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x" * 5000, f"sqlite:///{'x' * 5000}"):
        done = CliRunner().invoke(main, ["matrix", "--ledger", name])
        assert (done.exit_code, type(done.exception)) == (2, SystemExit)
        assert "cannot be looked for (File name too long)" in done.output
    assert CliRunner().invoke(main, ["matrix", "--ledger", "~nobody-is-called-this/l.db"]).exit_code == 2
    base = Path("/tmp") / f"gpuguard-hidden-{os.getpid()}"
    base.mkdir(mode=0o700)
    try:
        (base / "in").mkdir()
        base.chmod(0o000)
        command = [sys.executable, "-c", HIDDEN, str(base / "in" / "l.db")]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert found.stdout.startswith(f"2 Error: the ledger {base}/in/l.db cannot be looked for (Permission denied)")
        assert "Traceback" not in found.stdout + found.stderr
    finally:
        base.chmod(0o700)
        shutil.rmtree(base)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 200 + "/" + "x" * 5000])
def test_a_ledger_whose_name_is_too_long_is_refused_by_all_that_open_one(name: str, tmp_path: Path) -> None:
    for opening in (answers, open_ledger):
        for make in (True, False):
            with pytest.raises(LedgerError):
                opening(str(tmp_path / name), make)
