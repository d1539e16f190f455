"""A packed run and pytest's own switches; crashes, and ends before their time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .test_packing import MIXED, NOTE, PACK

Run = Any
FakeRigs = Any


# --------------------------------------------------------------------------------------------------- pytest's switches

FAILS = (
    NOTE
    + """
    @fits
    def test_a_fails():
        time.sleep(0.5)
        assert False

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 1")
    def test_b(): ...

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 2")
    @claim(minutes=10)
    def test_c(): time.sleep(6)

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 2")
    def test_c_again(): note("never")

    @needs_gpus(2)
    @serves("sglang", MODEL, "--context-length 4", layout="TP2")
    @claim(minutes=0.1)
    def test_d(): ...
"""
)


@pytest.mark.parametrize("switch", ["-x", "--maxfail=1"])
def test_after_x_nothing_more_is_booted_nor_begun(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any, events: Any, switch: str
) -> None:
    """What is left of a unit in flight is not begun; nor are units that were not sent."""
    fake_rig(n=2).apply(monkeypatch)
    result = claims(FAILS, *PACK, "3", switch)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    assert len(boots()) <= 2
    assert not events()
    assert not re.search(r"test_c_again|test_d", result.stdout.str())


def test_k_lf_and_co_do_what_they_always_do(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = """
        @needs_gpus(1)
        @serves("sglang", MODEL, "--context-length 1")
        def test_good(): ...

        @needs_gpus(1)
        @serves("sglang", MODEL, "--context-length 2", env={"FAKE_SGLANG": "kv_pool"})
        def test_bad(): ...

        @needs_gpus(2)
        @serves("sglang", MODEL, layout="TP2")
        def test_other(): ...
    """
    listed = claims(source, *PACK, "auto", "--co", "-q")
    assert "rig:" not in listed.stdout.str()
    assert [line for line in listed.outlines if "::" in line] == [
        f"test_claims.py::test_{name}" for name in ("good", "bad", "other")
    ]
    assert not boots()
    claims(source, *PACK, "2", "-k", "good or bad").assert_outcomes(passed=1, failed=1)
    again = claims(source, *PACK, "2", "--lf")
    again.assert_outcomes(failed=1)
    assert len(boots()) == 3


def test_other_distributions_stepwise_and_pdb_are_refused(claims: Run) -> None:
    source = "def test_plain(): ..."
    for given in (("--dist", "loadfile"), ("--dist", "load"), ("-d",)):
        result = claims(source, *PACK, "2", *given)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --gpuguard-pack distributes the tests by itself: leave out {given[0]}*"])
    result = claims(source, *PACK, "2", "--stepwise")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --stepwise goes on from a place in the order of the tests*"])
    assert claims(source, "--gpuguard-pack", "--stepwise").ret == 0
    result = claims(source, *PACK, "2", "--pdb")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--pdb is incompatible with distributing tests*"])
    assert claims(source, *PACK, "auto", "--pdb").ret == 0
    for workers in (("0",), ("auto", "--pdb"), ("logical", "--pdb")):  # no workers: nothing is distributed
        result = claims(source, *PACK, *workers, "--dist", "loadfile", "--stepwise")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["packing: claims run one after the other*"])


def test_without_workers_or_without_xdist_claims_run_one_after_the_other(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any
) -> None:
    fake_rig(n=4).apply(monkeypatch)
    result = claims(MIXED, "--gpuguard-pack")
    result.assert_outcomes(passed=9, skipped=1)
    result.stdout.fnmatch_lines(["packing: claims run one after the other*; add -n auto to use all GPUs at once"])
    assert len(boots()) == 5
    result = claims("def test_plain(): ...", "--gpuguard-pack", "-p", "no:xdist")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["packing: pytest-xdist is not installed: claims run one after the other*"])


def test_fixtures_are_torn_down_where_pytest_tears_them_down(claims: Run, events: Any) -> None:
    """Module fixtures at the end of their unit, session fixtures at the end of the worker; errors there are errors."""
    result = claims(
        NOTE
        + """
    @pytest.fixture(scope="session")
    def whole():
        note("session up")
        yield
        note("session down")
        raise RuntimeError("the session fixture broke")

    @pytest.fixture(scope="module")
    def module():
        note("module up")
        yield
        note("module down")

    def test_a(whole, module): note("a")

    def test_b(whole, module): note("b")
    """,
        *PACK,
        "1",
        "-v",
    )
    assert events() == ["session up", "module up", "a", "b", "module down", "session down"]
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_b*", "E *RuntimeError: the session fixture broke"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_errors_at_collection_end_the_run_as_under_xdist(claims: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_broken="import nothing_of_this_name")
    source = "def test_plain(): ..."
    ours, theirs = claims(source, *PACK, "2"), claims(source, "-n", "2")
    assert ours.ret == theirs.ret
    assert ours.parseoutcomes() == theirs.parseoutcomes()
    assert ours.parseoutcomes()["errors"] == 1


def test_workers_that_collect_something_else_fail_the_run(claims: Run) -> None:
    result = claims(
        """
        import os

        @pytest.mark.parametrize("worker", [os.environ.get("PYTEST_XDIST_WORKER")])
        def test_plain(worker): ...
        """,
        *PACK,
        "2",
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*Different tests were collected between gw* and gw*"])


# -------------------------------------------------------------------------------------------------------------- crashes

CRASHES = (
    NOTE
    + """
    CRASH = {"sglang": MODEL}

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 1")
    def test_a(): note("a")

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 1")
    def test_b_crashes(): os._exit(3)

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 1")
    def test_c(): note("c")

    @needs_gpus(2)
    @serves("sglang", MODEL, layout="TP2")
    def test_d(): note("d")
"""
)


def test_a_crashed_worker_is_replaced_and_the_rest_of_its_unit_runs_elsewhere(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any, events: Any
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(CRASHES, *PACK, "1", "-v")
    result.assert_outcomes(passed=3, errors=1)
    assert sorted(events()) == ["a", "c", "d"]
    assert len(boots()) == 3
    result.stdout.fnmatch_lines(
        ["worker 'gw0' crashed while running 'test_claims.py::test_b_crashes'", "INFRA *test_b_crashes *crashed*"]
    )


def test_without_restarts_a_crash_ends_the_run(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, events: Any
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(CRASHES, *PACK, "1", "--max-worker-restart=0")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*worker gw0 crashed and worker restarting disabled*"])
    assert "c" not in events()


def test_a_replacement_that_collects_something_else_is_not_used_and_the_run_ends(claims: Run, events: Any) -> None:
    result = claims(
        NOTE
        + """
    FIRST = os.environ.get("PYTEST_XDIST_WORKER") in (None, "gw0")

    @pytest.mark.parametrize("one", [1, 2] if FIRST else [1])
    def test_plain(one):
        note(one)
        os._exit(3)
    """,
        *PACK,
        "1",
    )
    assert events() == ["1"]
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*Different tests were collected*"])


def test_pytest_exit_in_a_worker_stops_the_others(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, events: Any
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(FAILS.replace("assert False", 'pytest.exit("enough")'), *PACK, "3")
    assert result.ret != 0
    assert not events()


def test_an_interrupted_run_boots_nothing_more_and_leaves_nothing(
    claims: Run,
    fake_rig: FakeRigs,
    fake_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytester: pytest.Pytester,
    boots: Any,
    events: Any,
) -> None:
    """Ctrl-C reaches the controller alone here: the workers must not go on with what they were sent."""
    fake_rig(n=2).apply(monkeypatch)
    source = (
        NOTE
        + """
    @pytest.mark.parametrize("number", range(6))
    @needs_gpus(1)
    @serves("sglang", MODEL)
    def test_long(number):
        note("began")
        time.sleep(3)
    """
    )
    claims(source, "--co")  # writes the file and the ini
    command = [sys.executable, "-m", "pytest", *PACK, "2", f"--gpuguard-stack=fake={fake_python}"]
    with subprocess.Popen(
        command,
        cwd=pytester.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as process:
        deadline = time.monotonic() + 120
        while not events() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert len(boots()) == 1
    assert len(events()) <= 2
    (pid,) = (int(line.split()[0]) for line in boots())
    deadline = time.monotonic() + 50
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")
