"""When a run is stopped nothing more begins: not what waits for a lease, nor what a crashed worker made room for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.gpuset import GpuChoice
from pytest_gpuguard.lease.flocks import HeldLocks, Locks
from pytest_gpuguard.lease.gpus import lease_gpus, lock_name
from pytest_gpuguard.lease.slots import lease_slot
from pytest_gpuguard.xdist import STOPPED

from .test_packing import NOTE

Run = Any
FakeRigs = Any


# --------------------------------------------------------------------------------------------------- waits for a lease

#: The first test fails once the other one has begun to wait for what somebody else holds.
WAITS = (
    NOTE
    + """
    @pytest.fixture
    def begun(): note("waits")

    @fits
    def test_a_fails():
        until = time.monotonic() + 60
        while not os.path.exists(os.environ["EVENTS"]) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)
        assert False
"""
)
DECLARED = """
    @needs_gpus(1)
    @serves("sglang", MODEL)
    def test_b_waits(begun): note("never")
"""
ON_CPU = """
    @serves("sglang", MODEL, CPU)
    def test_b_waits(begun): note("never")
"""
IN_BODY = """
    @needs_gpus(1)
    def test_b_waits(begun, sglang_server):
        sglang_server(MODEL)
        note("never")
"""
GPUS = """
    @needs_gpus(1)
    def test_b_waits(begun, gpus): note("never")
"""


@pytest.mark.parametrize("switches", [("-n", "2"), ("--gpuguard-pack", "-n", "2")], ids=["xdist", "packed"])
@pytest.mark.parametrize("source", [DECLARED, ON_CPU, IN_BODY, GPUS], ids=["declared", "cpu", "in body", "gpus"])
def test_what_waits_for_a_lease_is_not_begun_after_x(
    claims: Run,
    fake_rig: FakeRigs,
    monkeypatch: pytest.MonkeyPatch,
    boots: Any,
    events: Any,
    source: str,
    switches: tuple[str, ...],
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    gpu, slot = lease_gpus(GpuChoice((rig.uuid(0),)), 1), lease_slot()
    try:
        result = claims(WAITS + source, *switches, "-x", "-rs", "--gpuguard-wait=100s")
    finally:
        gpu.release()
        slot.release()
    assert events() == ["waits"]
    assert not boots()
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines([f"*test_claims.py:*: {STOPPED}"])


def test_a_check_ends_the_wait_and_nothing_is_held(tmp_path: Path) -> None:
    class Stopped(Exception): ...

    def check() -> None:
        if time.monotonic() > began + 0.3:
            raise Stopped

    other = Locks("another test", tmp_path).attempt(lock_name("GPU-1"))
    assert other is not None
    with HeldLocks([other]), lease_slot(directory=tmp_path):
        began = time.monotonic()
        with pytest.raises(Stopped):
            lease_gpus(["GPU-1", "GPU-2"], 2, 60.0, directory=tmp_path, check=check)
        began = time.monotonic()
        with pytest.raises(Stopped):
            lease_slot(wait_s=60.0, directory=tmp_path, check=check)
        assert time.monotonic() - began < 30
    lease_gpus(["GPU-1", "GPU-2"], 2, directory=tmp_path).release()
    lease_slot(directory=tmp_path).release()


def test_a_stop_that_comes_with_the_lease_keeps_the_server_from_being_booted(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester, boots: Any
) -> None:
    """The last look is right before the boot."""
    fake_rig(n=1).apply(monkeypatch)
    pytester.makeconftest(
        """
        import pytest
        from pytest_gpuguard.lease import cleanroom
        from pytest_gpuguard.xdist import STOP, worker_share

        had = cleanroom.hand_out

        @pytest.fixture(autouse=True)
        def stopped(pytestconfig, monkeypatch):
            def hand_out(*given, **named):
                lease = had(*given, **named)
                (worker_share(pytestconfig) / STOP).touch()
                return lease
            monkeypatch.setattr(cleanroom, "hand_out", hand_out)
        """
    )
    result = claims('@needs_gpus(1)\n@serves("sglang", MODEL)\ndef test_it(): ...', "-n", "1", "-rs")
    result.stdout.fnmatch_lines([f"*test_claims.py:*: {STOPPED}"])
    assert not boots()


# -------------------------------------------------------------------------------------------------------------- crashes

CRASHES = (
    NOTE
    + """
    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 1")
    @claim(minutes=9)
    def test_a_crashes():
        time.sleep(1)
        os._exit(3)

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 2")
    @claim(minutes=1)
    def test_b(): note("b")

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 3")
    @claim(minutes=1)
    def test_c(): note("c")
"""
)


@pytest.mark.parametrize("switch", ["-x", "--maxfail=1"])
def test_a_crash_ends_the_run_after_x_before_its_gpus_are_given_on(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any, events: Any, switch: str
) -> None:
    """Two workers and one GPU: the other worker is idle, and must not get it."""
    fake_rig(n=1).apply(monkeypatch)
    result = claims(CRASHES, "--gpuguard-pack", "-n", "2", switch)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert len(boots()) == 1
    assert not events()
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    assert "stopped elsewhere" not in result.stdout.str()


def test_a_crash_without_x_is_one_failure_and_the_others_run(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, events: Any
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    result = claims(CRASHES, "--gpuguard-pack", "-n", "2", "--maxfail=2")
    result.assert_outcomes(passed=2, errors=1)
    assert sorted(events()) == ["b", "c"]


# --------------------------------------------------------------------------------------------------------- small tests


def test_minutes_are_known_also_where_nothing_leases(claims: Run, events: Any) -> None:
    """Else claims that take long would be one unit of half a second each."""
    source = """
    @pytest.mark.parametrize("number", range(4))
    @fits
    @claim(minutes=5)
    def test_it(number):
        note(os.environ["PYTEST_XDIST_WORKER"])
        time.sleep(0.5)
    """
    claims(NOTE + source, "--gpuguard-pack", "-n", "2")
    assert len(set(events())) == 2


def test_plain_tests_are_spread_over_the_workers(claims: Run, events: Any) -> None:
    source = """
    @pytest.mark.parametrize("number", range(24))
    def test_it(number):
        note(os.environ["PYTEST_XDIST_WORKER"])
        time.sleep(0.1)
    """
    result = claims(NOTE + source, "--gpuguard-pack", "-n", "3")
    result.assert_outcomes(passed=24)
    assert all(events().count(f"gw{number}") >= 4 for number in range(3))
