"""The file that remembers runs: no state of it harms one, and whole runs that write it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.packing.history import History
from pytest_gpuguard.packing.history_file import SCHEMA, LocalHistory, read_history, write_history

from .test_history import NOW, result, written

Run = Any
FakeRigs = Any


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".gpuguard" / "history.json"


# ------------------------------------------------------------------------------------------------------------- the file


BROKEN = [
    "",
    "{",
    "[]",
    "null",
    '{"schema": 1}',
    '{"schema": "new", "claims": []}',
    '{"schema": 1, "claims": {"x": {}}}',
    '{"schema": 1, "claims": {"x": {"verdict": "INFRA", "when": 1, "parts": {}, "unverified": {"runs": 0, "when": 0}, '
    '"boot_s": [], "rest_s": []}}}',
    '{"schema": 1, "claims": {"x": {"verdict": null, "unverified": {"runs": 0, "when": NaN}, "boot_s": [], '
    '"rest_s": [-1]}}}',
    *(
        '{"schema": 1, "claims": {"x": {"verdict": null, "boot_s": [], "rest_s": [], "unverified": '
        f'{{"runs": {runs}, "when": {when}}}}}}}}}'
        for runs, when in (("1e999", 0), (-1, 0), (0.5, 0), ("true", 0), (0, f"1{'0' * 400}"))
    ),
    "[" * 100_000,
    "\udce9",
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_put_aside_and_told(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    history = read_history(file)
    assert history.entries == {}
    assert history.problem is not None
    assert str(file) in history.problem
    said = write_history(file, [result()], {}, NOW)
    assert said is not None
    assert said.startswith("a new history was begun: ")
    assert said.endswith("it is kept as history.json.broken")
    assert "\n" not in said
    assert set(read_history(file).entries) == {"a.py::b"}
    assert (file.parent / "history.json.broken").read_bytes() == text.encode("utf-8", "surrogateescape")


def test_what_was_put_aside_before_stays(file: Path) -> None:
    file.parent.mkdir()
    for text, name in (("one", "broken"), ("two", "broken-2"), ("three", "broken-3")):
        file.write_text(text)
        said = write_history(file, [result()], {}, NOW)
        assert said is not None
        assert said.endswith(f"it is kept as history.json.{name}")
    kept = {one.name: one.read_text() for one in file.parent.glob("history.json.broken*")}
    assert kept == {"history.json.broken": "one", "history.json.broken-2": "two", "history.json.broken-3": "three"}


def test_a_file_of_a_newer_version_is_left_alone(file: Path) -> None:
    file.parent.mkdir()
    newer = json.dumps({"schema": SCHEMA + 1, "claims": "in another form"})
    file.write_text(newer)
    problem = read_history(file).problem
    assert problem is not None
    assert "a newer version wrote it (schema 2, this one knows 1)" in problem
    said = write_history(file, [result()], {}, NOW)
    assert said is not None
    assert said.startswith("this run is not remembered: ")
    assert file.read_text() == newer


def test_a_file_that_cannot_be_written_or_read_is_told(file: Path) -> None:
    file.parent.write_text("in the way")
    said = write_history(file, [result()], {}, NOW)
    assert said == f"this run is not remembered: {file}: File exists"
    file.parent.unlink()
    file.mkdir(parents=True)
    problem = read_history(file).problem
    assert problem == f"nothing is known of earlier runs: {file}: Is a directory"
    said = write_history(file, [result()], {}, NOW)
    assert said == f"this run is not remembered: {file}: Is a directory"


def test_a_lock_that_is_not_given_back_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr("pytest_gpuguard.packing.history_file._LOCK_S", 0.1)
    file.parent.mkdir()
    with FileLock(f"{file}.lock"):
        said = write_history(file, [result()], {}, NOW)
    assert said == f"this run is not remembered: {file}: another run holds its lock"


WRITER = """
import sys
from pathlib import Path
from pytest_gpuguard.packing.history_file import write_history
file, name, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("begun", flush=True)
for number in range(times):
    one = {"nodeid": f"{name}{number % 40}", "claim": f"{name}{number % 40}", "label": None, "verdict": "HOLDS",
           "parts": {"sglang": "x" * 500}, "seconds": {"boot": 1.0, "rest": 1.0}}
    problem = write_history(file, [one], {}, 1.8e9)
    assert problem is None, problem
"""


def test_runs_that_end_together_keep_what_the_other_one_wrote(file: Path) -> None:
    runs = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), name, "20"]) for name in "ab"]
    assert [run.wait(300) for run in runs] == [0, 0]
    assert set(read_history(file).entries) == {f"{name}{number}" for name in "ab" for number in range(20)}


def test_a_killed_writer_leaves_a_whole_file_and_no_lock(file: Path) -> None:
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file), "k", "100000"], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            until = time.monotonic() + 60
            while not file.exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.05)
            os.kill(writer.pid, signal.SIGKILL)
        history = read_history(file)
        assert history.problem is None
        assert history.entries
    assert "a.py::b" in written(file, result()).entries


def test_a_history_is_one() -> None:
    """The protocol that the ledger will have to meet."""
    known: History = LocalHistory()
    assert known.last("x") is None


# --------------------------------------------------------------------------------------------------------- whole runs


MIXED = """
    @serves("sglang", MODEL, CPU)
    def test_holds(): ...

    @serves("sglang", MODEL, CPU)
    @fits(kv_tokens=">=100")
    def test_joins(): ...

    @claim(id="no-pool")
    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
    @ooms("kv_pool")
    def test_named(): ...

    @serves("sglang", MODEL, CPU, "--context-length 8")
    def test_broken(no_such_fixture): ...

    @needs_sm120
    @serves("sglang", MODEL)
    def test_elsewhere(): ...
"""


def remembered(pytester: pytest.Pytester) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pytester.path / ".gpuguard" / "history.json").read_text())["claims"]
    return found


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_run_remembers_its_claims_once(claims: Run, pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    claims(MIXED, *workers)
    found = remembered(pytester)
    assert {name: one["verdict"] for name, one in found.items()} == {
        "test_claims.py::test_holds": "HOLDS",
        "test_claims.py::test_joins": "HOLDS",
        "no-pool": "HOLDS",
        "test_claims.py::test_broken": None,
    }
    assert found["test_claims.py::test_broken"]["unverified"]["runs"] == 1
    assert found["no-pool"]["parts"]["sglang"] == "0.5.23"
    assert "driver" not in found["no-pool"]["parts"], "no driver and no GPU concern a server on the CPU"
    for name in ("test_holds", "test_joins"):
        (boot,), (rest,) = (found[f"test_claims.py::{name}"][key] for key in ("boot_s", "rest_s"))
        assert 0.05 < boot < 60, "also of the one that joined: it is what its server takes"
        assert 0 <= rest < boot


def test_rehearsals_write_no_history(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_gpuguard import *

        @serves("sglang", "qwen3-0.6b")
        def test_it(): ...

        @needs_gpus(1)
        def test_gpus(rig): ...
        """
    )
    rehearsed = pytester.runpytest_subprocess(
        "--gpuguard-rig=sim:h200:1", "--gpuguard-budget=1h", "-p", "no:randomly", timeout=120
    )
    assert "REHEARSED" in rehearsed.stdout.str()
    assert not (pytester.path / ".gpuguard" / "history.json").exists()


def test_the_parts_of_a_claim_on_gpus_name_driver_and_gpus(
    claims: Run, pytester: pytest.Pytester, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    claims('@serves("sglang", MODEL)\ndef test_it(): ...').assert_outcomes(passed=1)
    parts = remembered(pytester)["test_claims.py::test_it"]["parts"]
    assert (parts["driver"], parts["gpus"]) == ("580.105.08", "NVIDIA RTX PRO 6000 Blackwell Server Edition")


ONE = '@serves("sglang", MODEL, CPU)\ndef test_it(): ...'


def test_no_state_of_the_file_harms_a_run(claims: Run, pytester: pytest.Pytester) -> None:
    folder = pytester.path / ".gpuguard"
    folder.mkdir()
    (folder / "history.json").write_text('{"schema": 1, "claims"')
    broken = claims(ONE, "--gpuguard-budget=1h")
    broken.assert_outcomes(passed=1)
    assert broken.ret == 0
    assert broken.stdout.str().count("history.json: it is no history") == 1, "told in one line"
    broken.stdout.fnmatch_lines(["gpuguard: a new history was begun: *it is kept as history.json.broken"])
    assert set(remembered(pytester)) == {"test_claims.py::test_it"}

    (folder / "history.json").write_text('{"schema": 99}')
    newer = claims(ONE)
    assert newer.ret == 0
    newer.stdout.fnmatch_lines(["gpuguard: this run is not remembered: *a newer version wrote it (schema 99*"])

    (folder / "history.json").unlink()
    (folder / "history.json").mkdir()
    unwritable = claims(ONE, "-n", "1", "--gpuguard-budget=1h")
    assert unwritable.ret == 0
    unwritable.assert_outcomes(passed=1)
    unwritable.stdout.fnmatch_lines(["gpuguard: this run is not remembered: *history.json: Is a directory"])
    assert "not remembered" not in claims(ONE, "-q").stdout.str()


def test_a_killed_run_leaves_the_history_as_it_was(claims: Run, pytester: pytest.Pytester) -> None:
    claims(ONE)
    before = (pytester.path / ".gpuguard" / "history.json").read_text()
    kills = "import os, signal\n" + ONE.replace("test_it(): ...", "test_it(): os.kill(os.getpid(), signal.SIGKILL)")
    assert claims(kills).ret == -signal.SIGKILL
    assert (pytester.path / ".gpuguard" / "history.json").read_text() == before


def test_a_run_without_verdicts_writes_no_history(claims: Run, pytester: pytest.Pytester) -> None:
    claims('@needs_sm120\n@serves("sglang", MODEL)\ndef test_elsewhere(): ...\ndef test_plain(): ...')
    assert not (pytester.path / ".gpuguard" / "history.json").exists()
