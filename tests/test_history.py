"""What is remembered of a run, what never is, and that no state of the file harms a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.claim import About, Claim
from pytest_gpuguard.claims.expect import Fits
from pytest_gpuguard.claims.judgement import Verdict
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.observation import Observation
from pytest_gpuguard.facts.gpu import Gpu, Rig
from pytest_gpuguard.facts.stack import Stack
from pytest_gpuguard.packing.history import (
    Attempts,
    History,
    Seconds,
    Seen,
    Stopwatch,
    changed_parts,
    expected_of,
    key_of,
    parts_of,
    span,
)
from pytest_gpuguard.packing.history_file import SCHEMA, LocalHistory, read_history, write_history

Run = Any
FakeRigs = Any

NOW = 1_800_000_000.0


def result(verdict: str = "HOLDS", boot: float | None = 60.0, rest: float = 5.0, **more: Any) -> dict[str, Any]:
    """A payload, as far as the history looks at it."""
    found: dict[str, Any] = {
        "nodeid": "a.py::b",
        "claim": "a.py::b",
        "label": None,
        "verdict": verdict,
        "parts": {"sglang": "0.5.23"},
        "seconds": {"boot": boot, "rest": rest},
    }
    return {**found, **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".gpuguard" / "history.json"


def written(file: Path, *results: dict[str, Any], now: float = NOW, stops: dict[str, float] | None = None) -> Any:
    """The history after one more run."""
    assert write_history(file, results, stops or {}, now) is None
    return read_history(file)


# --------------------------------------------------------------------------------------------------- what is remembered


def test_nothing_is_known_before_the_first_run(file: Path) -> None:
    history = read_history(file)
    assert (history.last("x"), history.attempts("x"), history.expected_seconds("x")) == (None, Attempts(), None)
    assert history.problem is None


@pytest.mark.parametrize("verdict", ["HOLDS", "CONTRADICTED (worse)", "CONTRADICTED (better)", "CHANGED"])
def test_verdicts_that_say_something_are_remembered_with_their_stack(file: Path, verdict: str) -> None:
    history = written(file, result(verdict))
    assert history.last("a.py::b") == Seen(verdict, NOW, {"sglang": "0.5.23"})
    assert history.expected_seconds("a.py::b") == Seconds(60.0, 5.0)
    assert (file.parent / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("verdict", ["INFRA", "INCONCLUSIVE", "UNSTATED"])
def test_no_other_verdict_counts_as_verified(file: Path, verdict: str) -> None:
    written(file, result())
    history = written(file, result(verdict, parts=None), now=NOW + 1)
    assert history.last("a.py::b") == Seen("HOLDS", NOW, {"sglang": "0.5.23"})
    assert history.attempts("a.py::b") == Attempts(1, NOW + 1)
    assert written(file, result(verdict, parts=None), now=NOW + 2).attempts("a.py::b") == Attempts(2, NOW + 2)
    assert written(file, result(), now=NOW + 3).attempts("a.py::b") == Attempts()


def test_what_was_not_evaluated_leaves_no_trace(file: Path) -> None:
    assert write_history(file, [result("NOT_EVALUATED", boot=None)], {}, NOW) is None
    assert not file.parent.exists()


def test_a_skip_in_the_body_after_a_boot_is_an_attempt(file: Path) -> None:
    assert written(file, result("NOT_EVALUATED")).attempts("a.py::b") == Attempts(1, NOW)


@pytest.mark.parametrize("verdict", [verdict.value for verdict in Verdict])
def test_rehearsed_results_are_never_remembered(file: Path, verdict: str) -> None:
    assert write_history(file, [result(verdict, label="REHEARSED")], {}, NOW) is None
    assert not file.exists()


def test_expected_seconds_are_the_median_of_the_last_five_runs_boots_and_rest_apart(file: Path) -> None:
    for boot, rest in ((1000, 1000), (60, 5), (70, 6), (80, 7), (90, 8), (500, 100)):
        history = written(file, result(boot=boot, rest=rest))
    assert history.expected_seconds("a.py::b") == Seconds(80, 7)


def test_a_fault_of_the_host_says_nothing_of_how_long_a_claim_takes(file: Path) -> None:
    assert written(file, result("INFRA", boot=1800)).expected_seconds("a.py::b") is None


def test_the_stop_of_a_server_belongs_to_its_boot(file: Path) -> None:
    history = written(file, result(), stops={"a.py::b": 30.0, "other": 7.0})
    assert history.expected_seconds("a.py::b") == Seconds(90.0, 5.0)
    nothing_booted = result(boot=None, nodeid="c", claim="c")
    assert written(file, nothing_booted, stops={"c": 2.0}).expected_seconds("c") == Seconds(None, 7.0)


def test_parameters_of_one_claim_id_are_claims_of_their_own(file: Path) -> None:
    assert key_of("a.py::b[1]", "a.py::b[1]") == "a.py::b[1]"
    assert key_of("ep8", "a.py::b") == "ep8"
    assert key_of("ep8", "dir[x]/a.py::b") == "ep8"
    assert key_of("ep8", "a.py::b[x::y[0]]") == "ep8[x::y[0]]"
    history = written(file, result(nodeid="a.py::b[1]", claim="ep8"))
    assert history.last("ep8[1]") is not None
    assert history.last("ep8[2]") is None


def test_tests_without_a_claim_have_times_and_no_verdict(file: Path) -> None:
    assert write_history(file, [], {}, NOW, {"a.py::gpus": 12.0}) is None
    assert write_history(file, [], {}, NOW + 9, {"a.py::gpus": 14.0}) is None
    history = read_history(file)
    assert history.last("a.py::gpus") is None
    assert history.attempts("a.py::gpus") == Attempts(0, NOW + 9)
    assert history.expected_seconds("a.py::gpus") == Seconds(None, 13.0)


def test_what_nobody_has_run_for_more_than_a_year_is_forgotten(file: Path) -> None:
    written(file, result(nodeid="old", claim="old"))
    history = written(file, result(), now=NOW + 401 * 86400)
    assert set(history.entries) == {"a.py::b"}


# ------------------------------------------------------------------------------------------------------ times and parts


def test_a_claim_takes_what_was_measured_else_what_it_says_else_the_default(file: Path) -> None:
    unknown = Claim(Needs(), None, (Fits(),))
    said = replace(unknown, about=About(minutes=12))
    history = written(file, result(boot=100.0, rest=20.0))
    assert str(expected_of(unknown, "other", history)) == "5 min, by default"
    assert str(expected_of(unknown, "other", history, plain=True)) == "10 s, by default"
    assert str(expected_of(said, "other", history)) == "12 min, as claim(minutes=…) says"
    assert expected_of(said, "other").beside_boot == pytest.approx(144), "a fifth, where only the whole is known"
    measured = expected_of(said, "a.py::b", history)
    assert str(measured) == "2 min, as measured before"
    assert (measured.seconds, measured.boot_seconds, measured.beside_boot) == (120, 100, 20)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.826, "0.826 s"), (45, "45 s"), (90, "1.5 min"), (300, "5 min"), (1446, "24.1 min"), (12600, "3.5 h")],
)
def test_times_are_said_in_the_unit_that_fits(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_the_watch_takes_boots_and_waiting_off_the_rest() -> None:
    watch = Stopwatch()
    watch.boot(lambda: time.sleep(0.3))
    with pytest.raises(ZeroDivisionError):
        watch.boot(lambda: 1 / 0)
    time.sleep(0.05)
    joined = [Observation("sglang", "ready", "ready", elapsed_s=42.0), Observation("sglang", "bad.args", "args")]
    found = watch.seconds(joined)
    assert found["boot"] == 42.0
    assert found["rest"] is not None
    assert 0.04 <= found["rest"] < 0.29
    assert watch.seconds([])["boot"] is None


def stack(**packages: str) -> Stack:
    return Stack("any name", "/any/python", {"python": {"version": "3.12.1"}, "packages": packages})


def test_parts_name_what_a_verdict_was_true_on() -> None:
    rig = Rig(tuple(Gpu(i, f"GPU-{i}", name, "") for i, name in enumerate(("H200", "H200", "L4"))), driver="580.1")
    parts = parts_of(stack(sglang="0.5.23", idna="3"), rig)
    assert (parts["driver"], parts["gpus"], parts["python"]) == ("580.1", "H200, L4", "3.12.1")
    assert (parts["sglang"], parts["vllm"], parts["torch_cuda"]) == ("0.5.23", None, None)
    assert parts_of(replace(stack(sglang="0.5.23", idna="3"), name="new", python="/x"), rig) == parts
    assert set(parts_of(None, rig)) == {"driver", "gpus"}
    assert "driver" not in parts_of(stack(), None)
    assert parts_of(None, None) == {}


def test_changes_are_named_and_other_packages_only_when_nothing_else_changed() -> None:
    old = parts_of(stack(sglang="0.5.22", idna="3"), None)
    assert changed_parts(old, parts_of(stack(sglang="0.5.23", idna="3"), None)) == ("sglang 0.5.22 → 0.5.23",)
    assert changed_parts(old, parts_of(stack(sglang="0.5.22", idna="4"), None)) == ("other packages",)
    gone = changed_parts(old, parts_of(stack(idna="3", vllm="1.0"), None))
    assert gone == ("sglang 0.5.22 → none", "vllm none → 1.0")
    assert changed_parts(old, old) == ()
    assert changed_parts({"sglang": "1"}, {"sglang": "1", "a part of a later version": "2"}) == ()


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


def test_a_run_without_verdicts_writes_no_file(claims: Run, pytester: pytest.Pytester) -> None:
    claims('@needs_sm120\n@serves("sglang", MODEL)\ndef test_elsewhere(): ...\ndef test_plain(): ...')
    assert not (pytester.path / ".gpuguard").exists()
