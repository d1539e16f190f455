"""``gpuguard rebaseline`` on a real ledger: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_gpuguard.cli_rebaseline import rebaseline
from pytest_gpuguard.ledger.record import Kind, Record, Run
from pytest_gpuguard.ledger.store import open_ledger
from pytest_gpuguard.rebaseline import patch, propose
from tests.rebaselines import FILE, OLD, failed, git, judged, put, ready

TEXT = 'from pytest_gpuguard import ooms\n\n\n@ooms("kv_pool")\ndef test_it(): ...\n'
OOM = failed("oom.kv_pool")
CLAIM = f"{FILE}::test_it"


def keep(root: Path, run: str, started: float, records: list[Record], kind: Kind = "verified") -> None:
    """A run and its records in the ledger of ``root``."""
    (root / ".gpuguard").mkdir(exist_ok=True)
    with open_ledger(str(root / ".gpuguard" / "ledger.sqlite")) as store:
        store.begin(Run(run, started, "host", kind, "2 x H200", "0.1", stacks=("new",)))
        store.add([replace(one, run=run, when=started, kind=kind) for one in records])
        store.finish(run, started + 1)


def called(*words: str | Path) -> Result:
    """The command, standard output and error apart."""
    return CliRunner().invoke(rebaseline, [str(one) for one in words])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A suite whose claim held in run 1 and fits in run 2, with another release."""
    put(tmp_path, TEXT)
    keep(tmp_path, "20260101-000000-aaaa", 1.0, judged(TEXT, OOM, OLD))
    keep(tmp_path, "20260102-000000-bbbb", 2.0, judged(TEXT, ready()))
    return tmp_path


def test_the_patch_on_standard_output_applies_and_nothing_else_is_changed(root: Path) -> None:
    done = called("--root", root)
    assert done.exit_code == 0
    assert (root / FILE).read_text() == TEXT
    assert "tests/test_a.py:4: tests/test_a.py::test_it: CONTRADICTED (better): ready in 42 s" in done.stderr
    assert "it changed with sglang 0.5.8 → 0.5.9: nothing else that is recorded changed" in done.stderr
    git(root, "init", "-q")
    assert git(root, "apply", "-", data=done.stdout.encode()).returncode == 0
    assert (root / FILE).read_text() == TEXT.replace("import ooms", "import fits, ooms").replace(
        '@ooms("kv_pool")', '@ooms("kv_pool", when="sglang<0.5.9")\n@fits(when="sglang>=0.5.9")'
    )
    again = called("--root", root)
    assert (again.exit_code, again.stdout) == (0, "")
    assert "nothing to propose after run 20260102-000000-bbbb" in again.stderr


def test_the_patch_goes_into_a_file_and_json_to_standard_output(root: Path) -> None:
    done = called(CLAIM, "--root", root, "-o", root / "a.patch", "--json")
    data = json.loads(done.stdout)
    assert (root / "a.patch").read_text() == data["patch"]
    assert (data["run"], data["kind"], data["refused"]) == ("20260102-000000-bbbb", "verified", [])
    (one,) = data["proposals"]
    assert set(one) == {"claim", "stack", "file", "line", "before", "after", "why", "notes"}
    assert (one["claim"], one["file"], one["line"]) == (CLAIM, FILE, 4)
    assert (one["before"], one["after"].split("\n")[1]) == ('@ooms("kv_pool")', '@fits(when="sglang>=0.5.9")')


def test_a_run_in_which_all_held_has_nothing_to_propose(root: Path) -> None:
    done = called("--root", root, "--run", "20260101")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "nothing to propose" in done.stderr


def test_a_rehearsal_is_taken_only_when_named_and_says_so(root: Path) -> None:
    keep(root, "20260103-000000-cccc", 3.0, judged(TEXT, failed("oom.weights")), "rehearsed")
    assert "fits" in called("--root", root).stdout
    done = called("--root", root, "--run", "last")
    assert "run 20260103-000000-cccc is rehearsed: it shows what a suite does, not what is true" in done.stderr
    assert '+@ooms("weights")' in done.stdout


def test_a_claim_is_known_by_its_old_name_too(root: Path) -> None:
    with open_ledger(str(root / ".gpuguard" / "ledger.sqlite")) as store:
        store.alias("old name", CLAIM)
    assert "fits" in called("old name", "--root", root).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tests/test_a.py::test_if"], "did you mean 'tests/test_a.py::test_it'?"),
        (["--run", "1999"], "has no run '1999'"),
        (["--ledger", "/nowhere/l.sqlite"], "there is no ledger at /nowhere/l.sqlite"),
        (["--ledger", "mysql://host/x"], "mysql"),
        (["--ledger", "sqlite:////nowhere/l.sqlite"], "there is no ledger at"),
        (["-o", "/nowhere/a.patch"], "/nowhere/a.patch cannot be written"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(root: Path, words: list[str], said: str) -> None:
    done = called("--root", root, *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_folder_without_a_ledger_is_told_and_gets_none(tmp_path: Path) -> None:
    done = called("--root", tmp_path)
    assert done.exit_code == 2
    assert "run claims first" in done.stderr
    assert os.listdir(tmp_path) == []


def test_hostile_words_of_a_log_act_on_no_terminal(root: Path) -> None:
    keep(root, "20260104-000000-dddd", 4.0, judged(TEXT, failed("jit.smem", '\x1b[2J out of\x07 "a" \'; import os #')))
    done = called("--root", root)
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "\x07" not in done.output
    assert '+@fails("jit.smem"' in done.stdout


def test_five_hundred_claims_of_one_file_take_seconds(tmp_path: Path) -> None:
    text = "from pytest_gpuguard import ooms\n"
    text += "".join(f'\n\n@ooms("kv_pool")\ndef test_{n}():\n    """Why."""\n' for n in range(500))
    put(tmp_path, text)
    one = judged(text, ready(), test="test_0")[0]
    records = [replace(one, claim=f"{FILE}::test_{n}", nodeid=f"{FILE}::test_{n}") for n in range(500)]
    began = time.monotonic()
    proposals, told = propose(records, [], tmp_path)
    found = patch(proposals)
    assert not told
    assert found.count("\n+@fits\n") == 500
    assert time.monotonic() - began < 20
