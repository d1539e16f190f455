"""What is remembered of a run, what never is, and that no state of the file harms a run."""

from __future__ import annotations

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
    Seconds,
    Seen,
    Stopwatch,
    changed_parts,
    expected_of,
    key_of,
    parts_of,
    span,
)
from pytest_gpuguard.packing.history_file import read_history, write_history
from pytest_gpuguard.xdist import STOPPED

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


def test_what_a_budget_chose_and_skipped_itself_is_an_attempt_unless_the_run_was_stopped(file: Path) -> None:
    """Else it would take the budget of every run for ever."""
    skipped = result("NOT_EVALUATED", boot=None, reason="skip", fact="skipped in setup: no dataset")
    assert write_history(file, [skipped], {}, NOW, chosen={"other"}) is None
    assert not file.exists()
    stopped = {**skipped, "fact": f"skipped in setup: {STOPPED}"}
    left_out = {**skipped, "reason": "budget", "fact": "out of budget: 1 s left"}
    assert write_history(file, [stopped, left_out], {}, NOW, chosen={"a.py::b"}) is None
    assert not file.exists()
    assert write_history(file, [skipped], {}, NOW, chosen={"a.py::b"}) is None
    assert read_history(file).attempts("a.py::b") == Attempts(1, NOW)
    assert write_history(file, [{**skipped, "label": "REHEARSED"}], {}, NOW + 1, chosen={"a.py::b"}) is None
    assert read_history(file).attempts("a.py::b") == Attempts(1, NOW)
    assert write_history(file, [], {}, NOW, {"gpus": None}) is None
    assert read_history(file).attempts("gpus") == Attempts(0, NOW)
    assert read_history(file).expected_seconds("gpus") is None


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
