"""Claims and time: pytest-timeout counts a test's own code only, and every deadline ends as the verdict that it is."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

Run = Any


@pytest.fixture
def booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pids of all servers that were booted so far."""
    file = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(file))
    return lambda: [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def gone(pids: list[int], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_a_global_timeout_does_not_count_a_slow_boot(claims: Run) -> None:
    """Two boots of a second each and measurements, against a limit of 0.8 s for what is the test's own."""
    result = claims(
        """
        SLOW = {"FAKE_SGLANG_DELAY": "0.4"}

        @serves("sglang", MODEL, CPU, env=SLOW)
        def test_declared(server):
            assert server.generate("x", 1) == "alpha"

        def test_own(sglang_server):
            assert sglang_server(MODEL, CPU, env=SLOW).generate("x", 1) == "alpha"
        """,
        ini="timeout = 0.8",
    )
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_a_body_that_hangs_in_a_request_is_infra_and_the_next_claim_runs(claims: Run, booted: Any, method: str) -> None:
    started = time.monotonic()
    result = claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "blocks"})
        def test_blocked_request(server):
            server.generate("x")

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "blocks"})
        @ooms("kv_pool")
        def test_swallows_what_it_can(server):
            try:
                server.generate("x")
            except Exception:
                pass

        @serves("sglang", MODEL, CPU)
        def test_next_one_is_not_touched(server):
            assert server.generate("x", 1) == "alpha"
        """,
        ini=f"timeout = 1\ntimeout_method = {method}",
    )
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_blocked_request *time-out in the test: the test's time-out of 1 s passed*",
            "INFRA *test_swallows_what_it_can *time-out of 1 s passed*",
            "HOLDS *test_next_one_is_not_touched *",
        ]
    )
    result.stdout.fnmatch_lines(["*fired up and ready to roll*"])
    assert time.monotonic() - started < 40
    assert gone(booted(), 0)


def test_a_body_that_sleeps_is_infra_by_signal(claims: Run, booted: Any) -> None:
    result = claims(
        """
        import time

        @serves("sglang", MODEL, CPU)
        def test_sleeps(server):
            time.sleep(60)

        @serves("sglang", MODEL, CPU)
        @ooms
        def test_sleeps_and_swallows(server):
            try:
                time.sleep(60)
            except Exception:
                pass
        """,
        ini="timeout = 1\ntimeout_method = signal",
    )
    result.stdout.fnmatch_lines(["INFRA *test_sleeps *1 s passed*", "INFRA *test_sleeps_and_swallows *1 s passed*"])
    assert gone(booted(), 0)


def test_a_thread_cannot_wake_a_sleeper_so_the_process_ends_and_says_why(claims: Run, booted: Any) -> None:
    result = claims(
        """
        import time

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "proof"})
        def test_sleeps(server):
            time.sleep(60)
        """,
        ini="timeout = 1\ntimeout_method = thread\ngpuguard_grace = 1s",
    )
    assert result.ret == 1
    result.stderr.fnmatch_lines(
        [
            "gpuguard: INFRA (infra.deadline): the test's time-out of 1 s passed (boots are not counted)",
            "log: *.log",
            "| *fired up and ready to roll!",
            "*in test_sleeps",
        ]
    )
    assert booted()
    assert gone(booted(), 5)


def test_a_deadline_of_ours_is_infra_and_a_stall_is_the_engines(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "chatty"}, boot_timeout="2s")
        @fails("hang.timeout")
        def test_still_talking(): ...

        HANGS = {"FAKE_SGLANG": "hang"}

        @serves("sglang", MODEL, CPU, env=HANGS)
        def test_fits(): ...

        @serves("sglang", MODEL, CPU, env=HANGS)
        @fails("hang.timeout")
        def test_as_claimed(): ...

        @serves("sglang", MODEL, CPU, env=HANGS)
        @ooms("weights")
        def test_claims_another_failure(): ...
        """,
        ini="gpuguard_stall_timeout = 2s",
    )
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_still_talking *boot_timeout of 2 s passed in phase weights*",
            "CONTRADICTED (worse) *test_fits *hang.timeout*no log line and flat memory for 2 s*",
            "HOLDS *test_as_claimed *hang.timeout*",
        ]
    )
    assert re.search(r"^(CHANGED|INCONCLUSIVE) +\S+test_claims_another_failure", result.stdout.str(), re.MULTILINE)


def test_without_pytest_timeout_claims_run_and_with_it_other_tests_time_out_as_ever(claims: Run) -> None:
    source = """
        import time

        @serves("sglang", MODEL, CPU)
        def test_claim(server):
            assert server.generate("x", 1) == "alpha"

        @pytest.mark.timeout(0.5)
        def test_ordinary():
            time.sleep(SLEEP)
    """
    without = claims(source.replace("SLEEP", "0.6"), "-p", "no:timeout", "-W", "ignore")
    without.assert_outcomes(passed=2)
    result = claims(source.replace("SLEEP", "20"))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Failed: Timeout (>0.5s) from pytest-timeout.*"])


def test_the_limit_of_a_mark_and_of_fixtures_counts_and_expiry_in_setup_is_infra(claims: Run) -> None:
    result = claims(
        """
        import time

        @pytest.fixture
        def slow():
            time.sleep(30)

        @pytest.mark.timeout(1)
        @serves("sglang", MODEL, CPU)
        def test_slow_fixture(slow): ...

        @pytest.mark.timeout(1, func_only=True)
        @serves("sglang", MODEL, CPU)
        def test_func_only(server):
            time.sleep(30)
        """
    )
    result.stdout.fnmatch_lines(["INFRA *test_func_only *1 s passed*", "INFRA *test_slow_fixture *1 s passed*"])
