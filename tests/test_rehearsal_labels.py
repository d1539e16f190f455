"""REHEARSED where no claim carries it: tests without one, the stand-in's own log, and the counts of a rehearsal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .boot_logs import READY
from .gpuguard_command import called
from .sim_models import DENSE, write_model
from .test_rehearsal import RIG, outcomes

Run = Any
Capture = pytest.CaptureFixture[str]

PLAIN = """
    def test_boots(sglang_server):
        assert sglang_server(DENSE, "--mem-fraction-static 0.8").generate("x", max_new_tokens=4)

    def test_looks(rig):
        assert not rig.gpus

    @needs_gpus(2)
    def test_gated(): ...

    @pytest.fixture
    def server():
        return "the test's own"

    def test_has_nothing_to_do_with_it(server): ...
"""


@pytest.fixture
def rehearse(claims: Run, tmp_path: Path) -> Run:
    dense = write_model(tmp_path / "dense", DENSE)

    def run(source: str, *args: str, **more: Any) -> pytest.RunResult:
        import textwrap

        source = f"DENSE = {str(dense)!r}\n" + textwrap.dedent(source)
        result: pytest.RunResult = claims(source, RIG, *args, stack="", **more)
        return result

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_test_without_a_claim_that_asks_a_simulated_rig_is_no_plain_pass(
    rehearse: Run, workers: tuple[str, ...], pytester: pytest.Pytester
) -> None:
    result = rehearse(PLAIN, "--junitxml=a.xml", "-rA", *workers)
    lines = ["*REHEARSED FAILED *test_looks*", "*1 failed, 1 passed, 2 rehearsed*"]
    if not workers:
        lines.insert(0, "REHEARSED: sim:rtx-pro-6000-server:8 is simulated: *")
    result.stdout.fnmatch_lines(lines)
    assert re.findall(r"PASSED .*::(\w+)", result.stdout.str()) == ["test_has_nothing_to_do_with_it"]
    labels = {name: told.get("label") for name, told in outcomes(pytester.path / "a.xml").items()}
    assert labels == dict.fromkeys(("test_boots", "test_looks", "test_gated"), "REHEARSED") | {
        "test_has_nothing_to_do_with_it": None
    }


def test_a_run_that_asks_no_simulated_rig_is_not_said_to_be_a_rehearsal(rehearse: Run) -> None:
    assert "REHEARSED" not in rehearse("def test_plain(): ...").stdout.str()


def test_the_log_of_a_simulated_boot_is_never_explained_or_judged_as_a_real_one(
    rehearse: Run, pytester: pytest.Pytester, capsys: Capture
) -> None:
    rehearse("@serves('sglang', DENSE)\n@fits\ndef test_it(): ...", "--gpuguard-log-dir=logs")
    (log,) = (pytester.path / "logs").glob("*.log")
    assert called(capsys, "explain", str(log)).out.startswith(f"{log}: REHEARSED ")
    assert json.loads(called(capsys, "explain", "--json", str(log)).out)["label"] == "REHEARSED"
    assert called(capsys, "judge", str(log), "--expect", "fits").out.startswith("REHEARSED ")
    assert json.loads(called(capsys, "judge", str(log), "--expect", "fits", "--json").out)["label"] == "REHEARSED"


def test_what_a_prompt_says_makes_no_log_a_rehearsal(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "real.log"
    log.write_text(f"{READY}gpuguard-sim: this text is simulated\n")
    assert "REHEARSED" not in called(capsys, "explain", str(log)).out


def test_what_is_one_claims_own_is_not_in_the_counts(rehearse: Run) -> None:
    result = rehearse(
        """
        @serves("sglang", DENSE)
        @expect_toks(min=5, concurrency=1, input_len=16, output_len=16)
        def test_one(): ...

        @serves("sglang", DENSE, "--mem-fraction-static 0.7")
        @expect_toks(min=5, concurrency=1, input_len=16, output_len=16)
        def test_other(): ...
        """
    )
    counted = "gpuguard: REHEARSED: 2 NOT_EVALUATED (2 simulated: a simulated rig has no speed)"
    assert counted in result.stdout.str()
