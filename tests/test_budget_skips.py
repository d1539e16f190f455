"""Tests that skip themselves: they take no share of a budget for ever, and none of a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

Run = Any
FakeRigs = Any

MARKED = """
    @pytest.mark.skipif(True, reason="not on this host")
    @claim(minutes=60)
    @needs_gpus(2, exclusive=True)
    @serves("sglang", MODEL, layout="TP2")
    def test_marked(): ...

    @pytest.mark.skipif("sys.version_info > (3,)", reason="not on this python")
    @claim(minutes=60)
    @serves("sglang", MODEL, CPU, "--context-length 3")
    def test_marked_by_words(): ...

    @pytest.mark.skipif("no_such_name", reason="never")
    @claim(minutes=60)
    @serves("sglang", MODEL, CPU, "--context-length 4")
    def test_broken_mark(): ...

    @pytest.mark.skipif(False, reason="never")
    @claim(minutes=1)
    @serves("sglang", MODEL, CPU)
    def test_real(): ...
"""


def test_a_skipif_mark_takes_nothing_of_a_budget(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(MARKED, "--gpuguard-budget=2m", "-v")
    result.assert_outcomes(passed=1, skipped=2, errors=1)
    result.stdout.fnmatch_lines(["budget 2m: 1 of 1 claim evaluated, 60 s expected, *"])


def test_a_skipif_mark_counts_as_nothing_in_a_plan(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(MARKED, "--gpuguard-pack", "-n", "2")
    result.assert_outcomes(passed=1, skipped=2, errors=1)
    result.stdout.fnmatch_lines(["packing: 1 test in 1 lease on 2 GPUs by 2 workers: about 60 s expected"])


SKIPS = """
    @pytest.fixture
    def dataset():
        pytest.skip("no dataset on this host")

    @serves("sglang", MODEL, CPU, "--context-length 1")
    def test_a_skips(dataset): ...

    @needs_gpus(1)
    def test_b_skips(gpus, dataset): ...

    @serves("sglang", MODEL, CPU, "--context-length 2")
    def test_c_real(): ...
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_what_skips_itself_in_a_fixture_waits_for_its_turn_after_three_runs(
    claims: Run,
    fake_rig: FakeRigs,
    monkeypatch: pytest.MonkeyPatch,
    pytester: pytest.Pytester,
    workers: tuple[str, ...],
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    file = pytester.path / ".gpuguard" / "history.json"
    for number in range(3):
        result = claims(SKIPS, "--gpuguard-budget=6m", *workers, "-k", "not test_b")
        result.stdout.fnmatch_lines(["budget 6m: 0 of 2 claims evaluated, *; left out: 1 never evaluated"])
        (one,) = json.loads(file.read_text())["claims"].values()
        assert one["unverified"]["runs"] == number + 1
    result = claims(SKIPS, "--gpuguard-budget=6m", *workers, "-k", "not test_b")
    result.stdout.fnmatch_lines(["*left out: 1 that earlier runs could not verify"])
    result.assert_outcomes(passed=1, skipped=1)


def test_a_test_without_a_claim_that_skips_itself_waits_for_its_turn(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    claims(SKIPS, "--gpuguard-budget=6m", "-k", "test_b").assert_outcomes(skipped=1)
    data = json.loads((pytester.path / ".gpuguard" / "history.json").read_text())["claims"]
    assert data["test_claims.py::test_b_skips"]["unverified"]["when"] > 0
    assert data["test_claims.py::test_b_skips"]["rest_s"] == []
