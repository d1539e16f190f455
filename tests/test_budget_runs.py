"""Whole runs with a budget of time: what is evaluated, what is left out, and what is said of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import HERE

Run = Any
FakeRigs = Any


FOUR = """
    @claim(minutes=5)
    @serves("sglang", MODEL, CPU, "--context-length 1")
    def test_alpha(): ...

    @claim(minutes=5)
    @serves("sglang", MODEL, CPU, "--context-length 2")
    def test_beta(): ...

    @serves("sglang", MODEL, CPU, "--context-length 3")
    def test_gamma(): ...

    @serves("sglang", MODEL, CPU, "--context-length 4")
    def test_delta(): ...

    @needs_sm120
    @serves("sglang", MODEL, "--context-length 5")
    def test_elsewhere(): ...

    def test_plain(): ...
"""
NO_BUDGET_FOR = re.compile(r"^NOT_EVALUATED +test_claims\.py::(\w+) +out of budget: (.*)$", re.MULTILINE)


def verdicts(result: pytest.RunResult) -> dict[str, str]:
    """Test → verdict, from the section at the end."""
    text = result.stdout.str().partition("= claims =")[2]
    return {name: verdict for verdict, name in re.findall(r"^([A-Z_]+) +test_claims\.py::(\w+)", text, re.MULTILINE)}


def left_out(result: pytest.RunResult) -> dict[str, str]:
    return dict(NO_BUDGET_FOR.findall(result.stdout.str()))


def remember(pytester: pytest.Pytester, seconds: float) -> None:
    """As if every claim that is remembered had taken so long, without any boot."""
    file = pytester.path / ".gpuguard" / "history.json"
    data = json.loads(file.read_text())
    for one in data["claims"].values():
        one["boot_s"], one["rest_s"] = [], [seconds]
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_second_run_evaluates_what_the_first_had_no_time_for(
    claims: Run, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    first = claims(FOUR, "--gpuguard-budget=11m", *workers)
    assert first.ret == 0
    first.assert_outcomes(passed=3, skipped=3)
    assert left_out(first) == {
        "test_gamma": "expected 5 min, by default; never evaluated",
        "test_delta": "expected 5 min, by default; never evaluated",
    }
    first.stdout.fnmatch_lines(
        [
            "NOT_EVALUATED *test_elsewhere *needs SM120*",
            "gpuguard: 3 NOT_EVALUATED (*2 budget: out of budget*), 2 HOLDS",
            "budget 11m: 2 of 4 claims evaluated, 10 min expected, * s taken; left out: 2 never evaluated",
        ]
    )
    remember(pytester, 290)
    second = claims(FOUR, "--gpuguard-budget=11m", *workers)
    assert second.ret == 0
    out = left_out(second)
    assert set(out) == {"test_alpha", "test_beta"}
    assert re.fullmatch(r"expected 4.8 min, as measured before; HOLDS on this very stack .+", out["test_alpha"])
    second.stdout.fnmatch_lines(["budget 11m: 2 of 4 claims *; left out: 2 verified on this very stack"])


@pytest.fixture
def newer_stack(tmp_path: Path) -> str:
    """The stand-in stack of a later release."""
    packages = tmp_path / "packages"
    shutil.copytree(HERE / "fake_stack", packages, ignore=shutil.ignore_patterns("__pycache__"))
    (old,) = packages.glob("sglang-*.dist-info")
    new = old.rename(packages / "sglang-0.5.24.dist-info")
    (new / "METADATA").write_text((new / "METADATA").read_text().replace("0.5.23", "0.5.24"))
    folder = tmp_path / "newer"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return str(folder / "bin" / "python")


def test_claims_whose_stack_has_changed_go_before_those_that_hold_on_it(
    claims: Run, pytester: pytest.Pytester, newer_stack: str
) -> None:
    claims(FOUR, "-k", "test_gamma or test_delta")
    claims(FOUR, "-k", "test_alpha or test_beta", stack=newer_stack)
    remember(pytester, 290)
    result = claims(FOUR, "--gpuguard-budget=11m", stack=newer_stack)
    assert set(left_out(result)) == {"test_alpha", "test_beta"}
    again = claims(FOUR, "--gpuguard-budget=2m", stack=newer_stack)
    assert set(left_out(again)) == {"test_alpha", "test_beta", "test_gamma", "test_delta"}
    remember(pytester, 290)
    back = claims(FOUR, "--gpuguard-budget=11m", "-n", "2")
    assert set(left_out(back)) == {"test_delta", "test_gamma"}
    assert "HOLDS within the last hours, before sglang 0.5.24 → 0.5.23" in left_out(back)["test_delta"]
    back.stdout.fnmatch_lines(["budget 11m: 2 of 4 claims *; left out: 2 verified on another stack"])


def test_a_budget_too_small_evaluates_nothing_and_never_fails_a_run(claims: Run) -> None:
    result = claims(FOUR, "--gpuguard-budget=90s")
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=5)
    assert len(left_out(result)) == 4
    assert "no claim fits into 1.5 min, the cheapest needs 5 min" in left_out(result)["test_alpha"]
    result.stdout.fnmatch_lines(["budget 1m30s: 0 of 4 claims evaluated, 0 s expected, *; left out: 4 never evaluated"])
    quiet = claims(FOUR, "--gpuguard-budget=90s", "-q").stdout.str()
    assert "budget 1m30s" not in quiet
    assert "5 NOT_EVALUATED" in quiet
    refused = claims(FOUR, "--gpuguard-budget=90s", "--gpuguard-require=budget")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR


def test_deselection_comes_first_and_collect_only_selects_nothing(claims: Run, pytester: pytest.Pytester) -> None:
    result = claims(FOUR, "--gpuguard-budget=11m", "-k", "test_gamma or test_delta or plain")
    assert verdicts(result) == {"test_gamma": "HOLDS", "test_delta": "HOLDS"}
    result.stdout.fnmatch_lines(["budget 11m: 2 of 2 claims evaluated, 10 min expected, * taken"])
    collected = claims(FOUR, "--gpuguard-budget=11m", "--collect-only", "-v")
    assert "budget" not in collected.stdout.str().partition("collected")[2]
    plain = claims("def test_plain(): ...", "--gpuguard-budget=11m", name="test_other")
    assert plain.ret == 0


RUNS_LATE = """
    @claim(minutes=0.01)
    @serves("sglang", MODEL, CPU, "--context-length 7")
    def test_alpha(): ...

    @claim(minutes=1)
    @serves("sglang", MODEL, CPU)
    def test_beta(): ...

    @claim(minutes=1)
    @serves("sglang", MODEL, CPU)
    @fits(kv_tokens=">=100")
    def test_gamma(): ...
"""
#: As if a minute had gone by since the selection.
BEGAN_EARLIER = """
    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session):
        session.config.pluginmanager.get_plugin("gpuguard-budget")._began -= 60
"""
#: As if the run had begun seven minutes earlier, of which workers know from the controller only.
SLOW_START = """
    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(session):
        budget = session.config.pluginmanager.get_plugin("gpuguard-budget")
        if not hasattr(session.config, "workerinput"):
            budget._began -= 7 * 60
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_the_clock_leaves_out_what_was_chosen_when_the_time_is_gone(
    claims: Run, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(BEGAN_EARLIER)
    result = claims(RUNS_LATE, "--gpuguard-budget=80s", *workers)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=2)
    assert set(left_out(result)) == {"test_beta", "test_gamma"}
    for said in left_out(result).values():
        assert re.fullmatch(r"[\d.]+ s left, needs 60 s", said)
    result.stdout.fnmatch_lines(
        ["budget 1m20s: 1 of 3 claims evaluated, 73 s expected, * taken; left out: 2 never evaluated"]
    )


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_what_was_spent_before_the_selection_is_not_given_out_again(
    claims: Run, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    """A twentieth of the budget may go by unnoticed."""
    pytester.makeconftest(SLOW_START)
    result = claims(FOUR, "--gpuguard-budget=13m", *workers)
    assert len(left_out(result)) == 3
    result.stdout.fnmatch_lines(["budget 13m: 1 of 4 claims evaluated, 5 min expected, *"])
    none = claims(FOUR, "--gpuguard-budget=9m", "-k", "beta", *workers)
    assert re.search(
        r"no claim fits into the [\d.]+ (s|min) that are left of 9 min, the cheapest needs 5 min", none.stdout.str()
    )


def test_a_server_that_is_up_already_is_joined_when_only_its_boot_would_not_fit(claims: Run) -> None:
    source = """
        @claim(minutes=1)
        @serves("sglang", MODEL, CPU)
        def test_beta(pytestconfig):
            pytestconfig.pluginmanager.get_plugin("gpuguard-budget")._began -= 30  # so long it took

        @claim(minutes=1)
        @serves("sglang", MODEL, CPU)
        @fits(kv_tokens=">=100")
        def test_gamma(): ...
    """
    result = claims(source, "--gpuguard-budget=72s")
    assert left_out(result) == {}
    result.assert_outcomes(passed=2)


def test_tests_that_lease_count_and_learn_their_times(
    claims: Run, pytester: pytest.Pytester, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = """
        @needs_gpus(1)
        def test_gpus(gpus): ...

        @needs_gpus(1)
        def test_gated(rig): ...

        def test_own(sglang_server):
            sglang_server(MODEL, CPU)
    """
    first = claims(source, "--gpuguard-budget=6m")
    assert first.ret == 0
    first.assert_outcomes(passed=2, skipped=1)
    assert left_out(first) == {"test_own": "expected 5 min, by default; a test without a claim"}
    first.stdout.fnmatch_lines(["budget 6m: 1 of 2 claims evaluated, *; left out: 1 without a claim"])
    second = claims(source, "--gpuguard-budget=6m")
    second.assert_outcomes(passed=3)
    second.stdout.fnmatch_lines(["budget 6m: 2 of 2 claims evaluated, 5 min expected, * taken"])
    data = json.loads((pytester.path / ".gpuguard" / "history.json").read_text())["claims"]
    assert {name.partition("::")[2]: (one["verdict"], len(one["rest_s"])) for name, one in data.items()} == {
        "test_gpus": (None, 2),
        "test_own": (None, 1),
    }


def test_a_fault_of_the_host_is_told_and_no_budget_hides_it(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=2)
    rig.mismatch()
    rig.apply(monkeypatch)
    result = claims('@needs_gpus(1)\n@serves("sglang", MODEL)\ndef test_it(): ...', "--gpuguard-budget=1s")
    result.stdout.fnmatch_lines(["INFRA *test_it *driver.mismatch*"])
    assert result.ret == 1


def test_claims_side_by_side_on_gpus_share_a_budget(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = FOUR.replace("CPU, ", "")
    assert len(left_out(claims(source, "--gpuguard-budget=6m", "--collect-only"))) == 0
    two = claims(source, "--gpuguard-budget=6m", "-n", "2", "-k", "not elsewhere")
    assert len(left_out(two)) == 2
    two.stdout.fnmatch_lines(["budget 6m: 2 of 4 claims evaluated, 5 min expected, *"])


def test_a_packed_run_plans_what_the_budget_has_chosen(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = FOUR.replace("CPU, ", "")
    packed = claims(source, "--gpuguard-budget=6m", "--gpuguard-pack", "-n", "2", "-k", "not elsewhere")
    assert packed.ret == 0
    packed.assert_outcomes(passed=3, skipped=2)
    assert len(left_out(packed)) == 2
    packed.stdout.fnmatch_lines(["packing: 2 tests in 2 leases on 2 GPUs *about 5 min expected", "budget 6m: 2 of 4 *"])


@pytest.mark.parametrize("text", ["0", "0s", "-5", "soon", "", "25 apples", "nan", "inf"])
def test_a_budget_that_is_no_time_is_a_usage_error(pytester: pytest.Pytester, text: str) -> None:
    from pytest_gpuguard.options import read_config

    with pytest.raises(pytest.UsageError, match="--gpuguard-budget"):
        read_config(pytester.parseconfig(f"--gpuguard-budget={text}"))


def test_a_budget_is_given_by_option_or_ini(pytester: pytest.Pytester) -> None:
    from pytest_gpuguard.options import read_config

    assert read_config(pytester.parseconfig()).budget_s is None
    pytester.makeini("[pytest]\ngpuguard_budget = 2h\n")
    assert read_config(pytester.parseconfig()).budget_s == 7200
    for text, seconds in (("25m", 1500), ("90s", 90), ("90", 90)):
        assert read_config(pytester.parseconfig(f"--gpuguard-budget={text}")).budget_s == seconds
