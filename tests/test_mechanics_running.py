"""How claims run under pytest's own switches, and what a reader sees of them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

Run = Any

MIXED = """
    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
    @ooms("kv_pool")
    def test_holds(): ...

    @needs_sm120
    @serves("sglang", MODEL)
    def test_elsewhere(): ...

    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "weights_oom"})
    @fits
    def test_contradicted(): ...

    @serves("sglang", MODEL, CPU, "--context-length 7")
    @fits
    def test_also_holds(): ...
"""


@pytest.fixture
def boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many servers were booted so far."""
    file = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(file))
    return lambda: len(file.read_text().splitlines()) if file.exists() else 0


def test_q_shows_failing_claims_and_counts_only(claims: Run) -> None:
    text = claims(MIXED, "-q").stdout.str()
    assert re.search(r"^CONTRADICTED \(worse\) +test_claims.py::test_contradicted +oom.weights", text, re.MULTILINE)
    assert "gpuguard: 1 CONTRADICTED (worse), 1 NOT_EVALUATED (1 gpus: needs SM120" in text
    assert "2 HOLDS" in text
    assert not re.search(r"^(HOLDS|NOT_EVALUATED|rig|stack|gpuguard: test_\w+:)", text, re.MULTILINE)
    assert "= claims =" not in text


def test_v_shows_verdict_and_fact_beside_each_test_and_phases_of_each_boot(claims: Run) -> None:
    """Phases are written past pytest's capture: they are shown while it runs, and not again under a failure."""
    result = claims(MIXED, "-v")
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "rig: no GPUs*",
            "stack fake: sglang 0.5.23*",
            "*test_holds *",
            "*HOLDS *oom.kv_pool*",
            "*test_elsewhere *NOT_EVALUATED needs SM120*",
            "*CONTRADICTED (worse) *oom.weights*",
        ]
    )
    phases = re.findall(r"^gpuguard: test_also_holds: (.+?), \d+s of 20m$", text, re.MULTILINE)
    assert len(phases) >= 2
    assert len(phases) == len(set(phases)), "one line per phase when it is piped"
    failures = text.partition("= FAILURES =")[2].partition("= claims =")[0]
    assert "oom.weights" in failures
    assert "Captured stdout" not in failures
    assert "gpuguard: test_" not in failures


def test_two_workers_give_one_header_one_summary_and_whole_junit(claims: Run, pytester: pytest.Pytester) -> None:
    result = claims(MIXED, "-n", "2", "--junitxml=out.xml")
    text = result.stdout.str()
    assert len(re.findall(r"^rig: ", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^stack fake: sglang 0.5.23", text, re.MULTILINE)) == 1
    assert text.count("= claims =") == 1
    found = set(
        re.findall(r"^([A-Z_]+(?: \(\w+\))?) +test_claims.py::(\w+)", text.partition("= claims =")[2], re.MULTILINE)
    )
    assert found == {
        ("HOLDS", "test_holds"),
        ("HOLDS", "test_also_holds"),
        ("NOT_EVALUATED", "test_elsewhere"),
        ("CONTRADICTED (worse)", "test_contradicted"),
    }
    verdicts = {
        case.get("name"): [one.get("value") for one in case.iter("property") if one.get("name") == "gpuguard_verdict"]
        for case in ET.parse(pytester.path / "out.xml").iter("testcase")
    }
    assert verdicts == {name: [verdict] for verdict, name in found}
    assert result.ret == 1


def test_x_boots_nothing_after_a_failure(claims: Run, boots: Any) -> None:
    source = """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        def test_a(): ...

        @serves("sglang", MODEL, CPU)
        def test_b(): ...

        @serves("sglang", MODEL, CPU, "--context-length 2")
        def test_c(): ...

        @serves("sglang", MODEL, CPU, "--context-length 3")
        def test_d(): ...
    """
    result = claims(source, "-x")
    assert boots() == 1
    result.stdout.fnmatch_lines(["gpuguard: 1 CONTRADICTED (worse)"])


def test_x_under_workers_keeps_what_is_on_deck_from_booting(
    claims: Run, boots: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker holds its next test already when another one fails: it must not boot a server for it."""
    monkeypatch.setenv("FAKE_SGLANG_DELAY", "0.4")
    source = """
        @fits
        def test_fails_at_once(): assert False

        @serves("sglang", MODEL, CPU, "--context-length 1")
        def test_b(): ...

        @serves("sglang", MODEL, CPU, "--context-length 2")
        def test_c(): ...

        @serves("sglang", MODEL, CPU, "--context-length 3")
        def test_d(): ...
    """
    result = claims(source, "-n", "2", "-x")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["CONTRADICTED (worse) *test_fails_at_once *"])
    assert boots() <= 1


def test_pdb_stops_on_contradicted_claims_and_on_no_other(claims: Run) -> None:
    held = claims(MIXED, "--pdb", "-k", "holds or elsewhere")
    assert held.ret == 0
    assert "entering PDB" not in held.stdout.str()
    stopped = claims(MIXED, "--pdb")
    assert stopped.stdout.str().count("entering PDB") == 1
    assert stopped.ret != 0


SUITE_GUARD = Path(__file__).parent.parent / "suites" / "conftest.py"


def test_suites_refuse_to_run_without_the_plugin(claims: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(SUITE_GUARD.read_text())
    pytester.makepyfile("def test_claim_with_an_empty_body(): ...")
    result = pytester.runpytest_subprocess("-p", "no:gpuguard")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*without the plugin they would pass unread*"])
    assert pytester.runpytest_subprocess().ret == 0


def test_verdicts_survive_random_order_and_lf_runs_what_failed(claims: Run) -> None:
    for args in ((), ("-p", "randomly", "-p", "no:cacheprovider")):
        result = claims(MIXED, *args)
        result.stdout.fnmatch_lines(
            ["CONTRADICTED (worse) *test_contradicted *", "HOLDS *test_also_holds *", "HOLDS *test_holds *"]
        )
    again = claims(MIXED, "--lf")
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["CONTRADICTED (worse) *test_contradicted *"])


@pytest.mark.parametrize("option", [(), ("-n", "2")])
def test_require_turns_a_run_red_that_evaluated_nothing(claims: Run, option: tuple[str, ...]) -> None:
    source = """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        def test_elsewhere(): ...
    """
    if not option:
        assert claims(source).ret == 0
        assert claims(source, "--gpuguard-require=models").ret == 0
    result = claims(source, "--gpuguard-require=gpus", *option)
    result.stdout.fnmatch_lines(
        ["FAILED --gpuguard-require=gpus: 1 claim was not evaluated: needs a GPU, this rig has no GPUs"]
    )
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_stack_and_models_can_be_named_by_a_conftest(claims: Run, pytester: pytest.Pytester, model: Path) -> None:
    pytester.makeconftest(
        f"""
        from pytest_gpuguard.facts.stackref import StackRef

        def pytest_gpuguard_stack(item):
            if item.name == "test_absent":
                return StackRef("nightly", "/no/such/python", build="make nightly-stack")

        def pytest_gpuguard_model(item, model):
            return {str(model)!r} if model == "my-model" else None
        """
    )
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        def test_absent(): ...

        @serves("sglang", "my-model", CPU)
        def test_named(): ...

        @serves("sglang", "your-model", CPU)
        def test_not_named(): ...
        """
    )
    result.stdout.fnmatch_lines(
        [
            "NOT_EVALUATED *test_absent *'nightly': /no/such/python does not exist; build it: make nightly-stack",
            "NOT_EVALUATED *test_not_named *'your-model' is not known here: *gpuguard_models*",
            "HOLDS *test_named *",
        ]
    )
    assert "2 NOT_EVALUATED (1 stack: " in result.stdout.str()


def test_the_whole_summary_also_counts_what_never_reached_the_judge(claims: Run) -> None:
    result = claims(
        """
        @pytest.mark.skip(reason="not on Mondays")
        @serves("sglang", MODEL, CPU)
        def test_skip_mark(): ...

        @pytest.fixture
        def breaks_later():
            yield
            raise RuntimeError("the fixture broke afterwards")

        @serves("sglang", MODEL, CPU)
        def test_teardown(breaks_later): ...
        """
    )
    result.assert_outcomes(passed=1, skipped=1, errors=1)
    result.stdout.fnmatch_lines(["NOT_EVALUATED *test_skip_mark *not on Mondays*", "HOLDS *test_teardown *"])
    assert result.ret == 1


def test_nothing_of_ours_runs_where_pytest_is_another_program(pytester: pytest.Pytester) -> None:
    """A run without claims has no header, no summary and no file of ours."""
    pytester.makepyfile("def test_plain(): ...")
    result = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    assert not re.search(r"rig:|stack |gpuguard: ", result.stdout.str())
    assert not (pytester.path / ".gpuguard").exists()
