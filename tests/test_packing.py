"""A packed run from end to end: which claims run side by side, on which boots, and what pytest's own switches do."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.packing import FEW, GPUS, compare
from pytest_gpuguard.packing.scheduler import assign, assigned
from tests.conftest import own_ports
from tests.needs import need, need_tool

Run = Any
FakeRigs = Any

PACK = ("--gpuguard-pack", "-n")


NOTE = """
    import os, time

    def note(*words):
        with open(os.environ["EVENTS"], "a") as file:
            file.write(" ".join(map(str, words)) + "\\n")

"""

MIXED = """
    @needs_gpus(2)
    @serves("sglang", MODEL, layout="TP2")
    def test_shares_1(): ...

    @needs_gpus(1)
    @serves("sglang", MODEL)
    def test_one(): ...

    @needs_gpus(2)
    @serves("sglang", MODEL, layout="TP2")
    @fits(kv_tokens=">=1")
    def test_shares_2(): ...

    @needs_gpus(2, exclusive=True)
    @serves("sglang", MODEL, "--context-length 5", layout="TP2")
    def test_alone(): ...

    @needs_gpus(4)
    @serves("sglang", MODEL, layout="TP4")
    def test_all(): ...

    @needs_gpus(2)
    @serves("sglang", MODEL, layout="TP2")
    def test_uses(server): ...

    @needs_gpus(16)
    @serves("sglang", MODEL, layout="TP16")
    def test_too_big(): ...

    @needs_gpus(1)
    def test_gpus(gpus): assert len(gpus) == 1

    def test_plain(): ...

    @serves("sglang", MODEL, CPU)
    def test_cpu(): ...
"""


def test_claims_run_side_by_side_and_equal_servers_boot_once(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any
) -> None:
    fake_rig(n=4).apply(monkeypatch)
    result = claims(MIXED, *PACK, "auto")
    result.assert_outcomes(passed=9, skipped=1)
    result.stdout.fnmatch_lines(
        ["4 workers [[]10 items[]]", "packing: 8 tests in 6 leases on 4 GPUs by 4 workers: about * min expected"]
    )
    assert len(boots()) == 5, "TP2 once for three claims, TP1, exclusive, TP4, CPU"
    assert "gpuguard-placeholder" not in result.stdout.str() + result.stderr.str()


def test_no_claim_waits_for_a_lease_and_the_gpus_are_full(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, events: Any
) -> None:
    """Bodies that hold GPUs: never more than there are, and an exclusive one alone."""
    fake_rig(n=4).apply(monkeypatch)
    result = claims(
        NOTE
        + """
    @pytest.mark.parametrize("number", range(6))
    @needs_gpus(1)
    def test_small(gpus, number):
        note("start 1", time.monotonic()); time.sleep(1); note("end 1", time.monotonic())

    @needs_gpus(2)
    def test_two(gpus):
        note("start 2", time.monotonic()); time.sleep(1); note("end 2", time.monotonic())

    @needs_gpus(4)
    def test_four(gpus):
        note("start 4", time.monotonic()); time.sleep(1); note("end 4", time.monotonic())
    """,
        *PACK,
        "auto",
        "-v",
    )
    result.assert_outcomes(passed=8)
    used = most = 0
    for what, count, _ in sorted((line.split() for line in events()), key=lambda words: float(words[2])):
        used += int(count) if what == "start" else -int(count)
        most = max(most, used)
    assert most == 4
    assert "waiting for" not in result.stdout.str()


def test_auto_is_the_number_of_the_rigs_gpus_simulated_ones_too(
    claims: Run, fake_rig: FakeRigs, monkeypatch: Any
) -> None:
    source = """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        def test_one(): ...
    """
    result = claims(source, *PACK, "auto", "--gpuguard-rig", "sim:rtx-pro-6000-server:3", stack="")
    result.stdout.fnmatch_lines(["created: 3/3 workers", "packing: 1 test in 1 lease *expected on a real rig"])
    assert claims(source, *PACK, "2").stdout.str().count("created: 2/2 workers") == 1
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "1")
    assert "created: 1/1 worker" in claims(source, *PACK, "auto").stdout.str()
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS")
    result = claims(source, *PACK, "auto")
    result.assert_outcomes(skipped=1)
    assert "created: 1/1 worker" in result.stdout.str(), "no GPUs: one worker"


def test_a_run_without_claims_is_packed_as_well(claims: Run, pytester: pytest.Pytester) -> None:
    result = claims(
        """
        @pytest.mark.parametrize("number", range(130))
        def test_plain(number): assert number != 77
        """,
        *PACK,
        "3",
        "-p",
        "no:cacheprovider",
    )
    result.assert_outcomes(passed=129, failed=1)
    assert not re.search(r"rig:|stack |packing: ", result.stdout.str())
    pytester.makepyfile(test_claims="")
    assert pytester.runpytest_subprocess(*PACK, "2").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_worker_is_told_its_gpus_before_it_is_sent_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    assert assigned(tmp_path) == ()
    assign(tmp_path, "gw0", ["GPU-9"])
    assert assigned(tmp_path) == ()
    assign(tmp_path, "gw1", ["GPU-1", "GPU-2"])
    assert assigned(tmp_path) == ("GPU-1", "GPU-2")


def test_a_packed_run_is_near_what_no_run_can_beat(tmp_path: Path) -> None:
    """The benchmark's short form; on an idle machine it is within a third of the bound."""
    need(sys.platform == "linux", "the NVML stand-in needs Linux")
    need_tool("gcc")
    (sample,) = compare(FEW, ["packed"], tmp_path, own_ports())
    assert sample.boots == sample.servers
    assert sample.most == GPUS, "the exclusive one holds the whole box"
    assert sample.makespan <= 4 * sample.bound
