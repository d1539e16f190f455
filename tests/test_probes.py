"""The fixture ``probe``, end to end: each way to end and its verdict, answers that are shared, and what is kept."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.ledger.store import open_ledger
from pytest_gpuguard.probes import kit, launch

from .probed import SCRIPT, one
from .test_killed import started_by

Run = Any
FakeRigs = Any


def test_an_answer_holds_and_its_words_are_told(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @works
        def test_it(probe):
            found = probe("./look.py", args={"how": "answer"})
            assert found.data["how"] == "answer"
            assert found.seconds > 0
            assert "stage look" in open(found.log).read()
        """
    )
    result.stdout.fnmatch_lines(["HOLDS *test_it *answered in ? s: all is answer"])
    assert result.ret == 0
    assert len(probed()) == 1


@pytest.mark.parametrize(
    ("how", "verdict", "said"),
    [
        ("defect", "CONTRADICTED (worse)", "comm.p2p: the link is bad"),
        ("defect then answer", "CONTRADICTED (worse)", "comm.p2p: the link is bad"),
        ("swallow", "CONTRADICTED (worse)", "comm.p2p: the link is bad"),
        ("no such outcome", "CONTRADICTED (worse)", "unknown: *nonsense: the link is bad"),
        ("ready is no defect", "CONTRADICTED (worse)", "unknown: *ready: the link is bad"),
        ("raise", "CONTRADICTED (worse)", "import.abi: ImportError: libnvrtc.so.12*"),
        ("segfault", "CONTRADICTED (worse)", "unknown: Fatal Python error: Segmentation fault"),
        ("exit", "CONTRADICTED (worse)", "unknown: it ended with status 0 without an answer, in stage 'look'"),
        ("forge", "CONTRADICTED (worse)", "unknown: it ended with status 0 without an answer, in stage 'look'"),
        ("flood", "CONTRADICTED (worse)", "unknown: it printed more than 16 MiB, and was ended, in stage 'look'"),
        ("absent", "NOT_EVALUATED", "*there is no nvcc"),
    ],
)
def test_every_end_has_a_verdict_with_its_reason(claims: Run, probed: Any, how: str, verdict: str, said: str) -> None:
    result = claims(one(how))
    text = result.stdout.str()
    (line,) = [line for line in text.splitlines() if line.startswith(verdict) and "test_claims.py::test_it" in line][:1]
    assert fnmatch.fnmatch(line, f"{verdict.replace('(', '[(]').replace(')', '[)]')} *{said}"), line
    assert result.ret == (0 if verdict == "NOT_EVALUATED" else 1)


def test_what_is_absent_is_counted_by_its_kind(claims: Run, probed: Any) -> None:
    claims(one("absent")).stdout.fnmatch_lines(["gpuguard: 1 NOT_EVALUATED (1 tools: there is no nvcc)"])


def test_a_deadline_that_passes_is_a_hang_and_says_where(claims: Run, probed: Any) -> None:
    began = time.monotonic()
    result = claims(one("hang", given=', deadline="1s"'))
    result.stdout.fnmatch_lines(["CONTRADICTED (worse) *hang.timeout: it did not end within 1 s, in stage 'look'"])
    assert time.monotonic() - began < 30


def test_a_deadline_that_a_compiler_needed_is_no_hang(claims: Run, probed: Any, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.symlink_to("/bin/sleep")
    script = f"""
import subprocess
from pytest_gpuguard.probes import kit


def run():
    kit.stage("compile")
    subprocess.run([{str(compiler)!r}, "100"])

if __name__ == "__main__":
    kit.main(run)
"""
    result = claims(
        f"""
        from pathlib import Path

        @works
        def test_it(probe, tmp_path):
            script = tmp_path / "cold.py"
            script.write_text({script!r})
            probe(script, deadline="2s")
        """
    )
    result.stdout.fnmatch_lines(
        ["INFRA *infra.deadline: it did not end within 2 s, in stage 'compile': nvcc still at*"]
    )


def test_negative_claims_hold_for_the_claimed_reason_only(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @fails("import.abi")
        def test_as_claimed(probe):
            probe("./look.py", args={"how": "raise"})

        @fails("import.abi")
        def test_other(probe):
            probe("./look.py", args={"how": "defect"})

        @fails("import.abi")
        def test_cured(probe):
            probe("./look.py")

        @unsupported("the link", how="crashes", match="link is bad")
        def test_matched(probe):
            probe("./look.py", args={"how": "defect"})
        """
    )
    result.stdout.fnmatch_lines(
        [
            "CHANGED *test_other *",
            "CONTRADICTED (better) *test_cured *answered in * against the claim that it fails with import.abi",
            "HOLDS *test_as_claimed *",
            "HOLDS *test_matched *",
        ]
    )


def test_an_assertion_on_the_answer_contradicts(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @works
        def test_it(probe):
            assert probe("./look.py").data["how"] == "otherwise"
        """
    )
    result.stdout.fnmatch_lines(["CONTRADICTED (worse) *answered in * but assert 'answer' == 'otherwise'*"])


def test_a_failure_that_the_body_swallows_is_judged_all_the_same(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @works
        def test_it(probe):
            try:
                probe("./look.py", args={"how": "defect"})
            except Exception:
                pass
        """
    )
    result.stdout.fnmatch_lines(["CONTRADICTED (worse) *comm.p2p: the link is bad"])


def test_equal_questions_of_a_run_are_asked_once(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @works
        def test_one(probe):
            probe("./look.py")

        @works
        def test_two(probe):
            probe("./look.py", args={})

        @works
        def test_three(probe):
            probe("./look.py", args={"other": 1})

        @works
        def test_four(probe):
            probe("./look.py", env={"OTHER": "1"})
        """
    )
    result.assert_outcomes(passed=4)
    assert len(probed()) == 3


def test_a_confirmation_asks_anew(claims: Run, probed: Any) -> None:
    claims(one("answer"), "--gpuguard-ledger=l.sqlite").assert_outcomes(passed=1)
    source = (
        one("answer").replace('"answer"', "'answer'").replace("probe(", "import os; os.environ.pop('X', 0); probe(")
    )
    changed = source.replace("'answer'}", "'defect'}")
    result = claims(changed, "--gpuguard-ledger=l.sqlite", "--gpuguard-confirm=2")
    result.assert_outcomes(failed=1)
    assert [line.split()[0] for line in probed()] == ["answer", "defect", "defect", "defect"]


def test_a_contrast_says_what_becomes_of_a_failure(claims: Run, probed: Any) -> None:
    result = claims(one("defect", given=', contrast={"CURED": "1"}'), "-rA")
    result.stdout.fnmatch_lines(
        [
            "*CONTRADICTED (worse)*comm.p2p: the link is bad (with CURED=1 it passes)",
            "*cure: CURED=1: the probe passes*",
        ]
    )
    result = claims(one("defect", given=', contrast={"NO_CURE": "1"}'))
    result.stdout.fnmatch_lines(["CONTRADICTED (worse)*the link is bad (with NO_CURE=1 too it fails (comm.p2p))"])
    assert len(probed()) == 4
    claims(one("answer", given=', contrast={"NO_CURE": "1"}')).assert_outcomes(passed=1)
    assert len(probed()) == 5


def test_ranks_answer_and_a_late_one_is_told_and_killed(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @works
        def test_all(probe):
            found = probe("./look.py", args={"how": "ranks"}).data
            assert found["ok"] == [True, True, True] and found["worlds"] == [3, 3, 3] and found["stage"] == "meet"

        @works
        def test_late(probe):
            found = probe("./look.py", args={"how": "ranks", "late": 1}).data
            assert found["ok"] == [True, False, True] and found["hung"] == [False, True, False]
        """
    )
    result.assert_outcomes(passed=2)


def test_nothing_that_a_probe_started_stays(claims: Run, probed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = f"{os.getpid()}-orphan"
    monkeypatch.setenv("GPUGUARD_TEST_MARKER", marker)
    claims(one("orphan")).assert_outcomes(passed=1)
    assert len(probed()) == 1
    assert not started_by(marker)


def test_an_answer_is_kept_with_the_verdict_and_a_long_one_is_cut(claims: Run, probed: Any) -> None:
    claims(one("answer"), "--gpuguard-ledger=l.sqlite").assert_outcomes(passed=1)
    source = """
        @works
        def test_it(probe):
            assert len(probe("./look.py", args={"how": "big"}).data["bulk"]) == 2_000_000
        """
    claims(source, "--gpuguard-ledger=l.sqlite").assert_outcomes(passed=1)
    with open_ledger("l.sqlite") as store:
        first, second = [record.evidence["found"] for record in store.history("test_claims.py::test_it", evidence=True)]
    assert first["how"] == "answer"
    assert second == {"said": "all is big", "cut": True}


def test_a_secret_that_a_probe_was_given_is_not_told(claims: Run, probed: Any) -> None:
    source = """
        KEY = "planted-" + "key-1234"

        @works
        def test_it(probe):
            assert probe("./look.py", env={"MY_API_KEY": KEY}, args={"how": "key"}).data["how"] == ""
        """
    Path("look.py").write_text(SCRIPT.replace('f"all is {how}"', "os.environ['MY_API_KEY']"))
    claims(source, "--gpuguard-ledger=l.sqlite", "--junitxml=j.xml").assert_outcomes(failed=1)
    with open_ledger("l.sqlite") as store:
        (record,) = store.history("test_claims.py::test_it", evidence=True)
    assert "answered in" in record.evidence["fact"]
    assert "planted-key-1234" not in str(record)
    assert "planted-key-1234" not in Path("j.xml").read_text()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('probe("nope")', "*there is no probe 'nope': shipped are *"),
        ('probe("./gone.py")', "*cannot be read*No such file*"),
        ('probe("./look.py", deadline="soon")', "*'soon' is not a duration*"),
        ('probe("./look.py", args={"x": {1, 2}})', "*not JSON serializable*"),
        ('probe("./look.py", gpus=1)', "*add @needs_gpus(n)*"),
        ('probe("./look.py", gpus="some")', "*write a number*"),
        ('probe("./look.py", env={"A": 1})', "*variables are texts*"),
        ('probe("./look.py", env={"CUDA_VISIBLE_DEVICES": "0"})', "*belongs to the lease*"),
        ('probe("./look.py", wrong=1)', "*wrong*"),
    ],
)
def test_a_wrong_question_is_the_tests_own_fault(claims: Run, probed: Any, call: str, said: str) -> None:
    result = claims(f"@works\ndef test_it(probe):\n    {call}\n")
    result.stdout.fnmatch_lines([f"INFRA *the test itself failed: TypeError: {said}"])


def test_a_script_that_is_too_long_is_refused() -> None:
    with pytest.raises(launch.ProbeError, match="too long"):
        launch.command("python", launch.Script("x", "#" * launch.MOST_TEXT))


def test_a_probe_runs_in_the_call_phase_only(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @pytest.fixture
        def early(probe):
            probe("./look.py")

        @works
        def test_it(early): ...
        """
    )
    result.stdout.fnmatch_lines(["INFRA *call it in the test's body*"])
    assert probed() == []


def test_every_shipped_script_reads_as_one_and_is_named() -> None:
    for name in launch.shipped():
        script = launch.find_script(name, None)
        assert len(launch.command("python", script)[2]) < launch.MOST_TEXT
        compile(script.text, name, "exec")
        assert re.search(r"\bkit\.main\(", script.text), name


def test_a_tool_that_does_not_end_is_killed_and_its_output_is_bounded() -> None:
    code, text = kit.run_tool(["sh", "-c", "yes | head -c 1000000; cat; sleep 100"], 2.0, input="the end")
    assert code is None
    assert len(text) < kit.OUTPUT_LIMIT * 1.1
    assert text.endswith("the end")
    assert "bytes left out" in text
    assert kit.run_tool(["sh", "-c", "echo $X; exit 3"], 10.0, env={"X": "1"}) == (3, "1\n")
    with pytest.raises(FileNotFoundError):
        kit.run_tool(["no-such-tool"], 1.0)


def test_a_verdict_is_kept_with_the_stack_that_it_was_true_on(claims: Run, probed: Any) -> None:
    claims(one("answer"), "--gpuguard-ledger=l.sqlite").assert_outcomes(passed=1)
    with open_ledger("l.sqlite") as store:
        (record,) = store.history("test_claims.py::test_it")
    assert record.components["sglang"] == "0.5.23"
    assert "packages" in record.components


@pytest.mark.parametrize("how", ["no line end", "stdout is gone"])
def test_an_answer_is_heard_whatever_else_was_printed(claims: Run, probed: Any, how: str) -> None:
    claims(one(how)).stdout.fnmatch_lines([f"HOLDS *answered in * all is {how}"])


def test_numbers_that_json_does_not_know_are_words(claims: Run, probed: Any) -> None:
    claims(one("nan"), "--gpuguard-ledger=l.sqlite").assert_outcomes(passed=1)
    with open_ledger("l.sqlite") as store:
        (record,) = store.history("test_claims.py::test_it", evidence=True)
    found = record.evidence["found"]
    assert (found["nan"], found["inf"], found["some"]) == ("nan", ["inf"], 1.5)


def test_what_was_answered_elsewhere_is_no_answer_here(claims: Run, probed: Any) -> None:
    """Other variables, another deadline, a contrast; and an answer that somebody has changed."""
    result = claims(
        """
        @works
        def test_1_plain(probe):
            found = probe("./look.py", args={"how": "under tree"}).data
            found["rig"].append("mine")

        @works
        def test_2_copied(probe):
            assert probe("./look.py", args={"how": "under tree"}).data["rig"] == []

        @works
        def test_3_tree(probe, monkeypatch):
            monkeypatch.setenv("NCCL_ALGO", "Tree")
            probe("./look.py", args={"how": "under tree"})

        @works
        def test_4_short(probe):
            probe("./look.py", args={"how": "slow"}, deadline="1s")

        @works
        def test_5_long(probe):
            probe("./look.py", args={"how": "slow"}, deadline="60s")

        @works
        def test_6_without(probe):
            probe("./look.py", args={"how": "defect"})

        @works
        def test_7_with_contrast(probe):
            probe("./look.py", args={"how": "defect"}, contrast={"CURED": "1"})
        """
    )
    result.stdout.fnmatch_lines(
        [
            "CONTRADICTED (worse) *test_3_tree *nccl.error: no algorithm",
            "CONTRADICTED (worse) *test_4_short *hang.timeout*",
            "CONTRADICTED (worse) *test_6_without *comm.p2p: the link is bad",
            "CONTRADICTED (worse) *test_7_with_contrast *(with CURED=1 it passes)",
            "HOLDS *test_1_plain *",
            "HOLDS *test_2_copied *",
            "HOLDS *test_5_long *",
        ]
    )


def test_a_server_is_what_is_claimed_and_a_probe_alone_fits_nothing(claims: Run, probed: Any) -> None:
    result = claims(
        """
        @fits
        def test_fits(probe):
            probe("./look.py")

        @works(accuracy=">0.5", questions="q.jsonl")
        def test_accurate(probe):
            probe("./look.py")
        """
    )
    result.stdout.fnmatch_lines(
        ["INCONCLUSIVE *test_accurate *a probe serves nothing*", "INCONCLUSIVE *test_fits *a probe serves nothing*"]
    )


def test_a_secret_in_the_arguments_is_not_told(claims: Run, probed: Any) -> None:
    source = """
        KEY = "planted-" + "key-5678"

        @works
        def test_it(probe):
            probe("./look.py", args={"how": "key", "hub": {"api_key": KEY}})
        """
    Path("look.py").write_text(SCRIPT.replace('f"all is {how}"', "kit.args['hub']['api_key']"))
    result = claims(source, "--gpuguard-ledger=l.sqlite", "--junitxml=j.xml")
    result.assert_outcomes(passed=1)
    with open_ledger("l.sqlite") as store:
        (record,) = store.history("test_claims.py::test_it", evidence=True)
    for text in (str(record), Path("j.xml").read_text(), result.stdout.str()):
        assert "planted-key-5678" not in text
