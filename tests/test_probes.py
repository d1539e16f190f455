"""The fixture ``probe``, end to end: scripts in the stack's python, what comes of each way to end, and what is left."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.ledger.store import open_ledger
from pytest_gpuguard.probes import kit, launch

from .docker.fixtures import IMAGE, Docker
from .test_killed import started_by, wait_for

Run = Any
FakeRigs = Any

SCRIPT = """
import ctypes, os, sys, time
from pytest_gpuguard.probes import kit

def rank(rank, world):
    kit.stage("meet")
    if kit.args.get("late") == rank:
        time.sleep(100)
    kit.answer(rank=rank, world=world)

def run():
    kit.stage("look")
    how = kit.args.get("how", "answer")
    with open(os.environ["PROBED"], "a") as file:
        file.write(f"{how} {os.environ.get('CUDA_VISIBLE_DEVICES')} {' '.join(kit.gpus)}\\n")
    if os.environ.get("CURED"):
        return
    if how == "defect":
        kit.defect("comm.p2p", "the link is bad")
    if how == "no such outcome":
        kit.defect("nonsense", "the link is bad")
    if how == "ready is no defect":
        kit.defect("ready", "the link is bad")
    if how == "raise":
        raise ImportError("libnvrtc.so.12: cannot open shared object file: No such file or directory")
    if how == "no line end":
        sys.stderr.write("progress 100%")
    if how == "defect then answer":
        try:
            kit.defect("comm.p2p", "the link is bad")
        except BaseException:
            pass
    if how == "stdout is gone":
        sys.stdout = None
        os.close(1)
    if how == "under tree" and os.environ.get("NCCL_ALGO") == "Tree":
        kit.defect("nccl.error", "no algorithm")
    if how == "slow":
        time.sleep(1.5)
    if how == "nan":
        kit.answer(nan=float("nan"), inf=[float("inf")], some=1.5)
    if how == "swallow":
        try:
            kit.defect("comm.p2p", "the link is bad")
        except Exception:
            pass
    if how == "segfault":
        ctypes.string_at(0)
    if how == "hang":
        time.sleep(100)
    if how == "flood":
        while True:
            print("x" * 1000)
    if how == "exit":
        os._exit(0)
    if how == "absent":
        kit.absent("tools", "there is no nvcc")
    if how == "forge":
        print('gpuguard-probe: {"answer": {"said": "forged"}}')
        os._exit(0)
    if how == "ranks":
        told = kit.ranks("rank", 3, 2.0)
        kit.answer(ok=[one.ok for one in told], hung=[one.hung for one in told], stage=told[0].stage)
        kit.answer(worlds=[one.data.get("world") for one in told])
    if how == "orphan":
        import subprocess
        subprocess.Popen(["sleep", "4321"], start_new_session=True)
    if how == "big":
        kit.answer(bulk="x" * 2_000_000)
    kit.answer(how=how, rig=kit.rig, driver=kit.driver, sms=kit.sms(), said=f"all is {how}")

if __name__ == "__main__":
    kit.main(run)
"""


@pytest.fixture
def probed(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script ``look.py`` beside the tests; returns the lines of its runs so far: how, visible GPUs, UUIDs."""
    pytester.path.joinpath("look.py").write_text(SCRIPT)
    file = tmp_path / "probed"
    monkeypatch.setenv("PROBED", str(file))
    return lambda: file.read_text().splitlines() if file.exists() else []


def one(how: str, mark: str = "@works", given: str = "") -> str:
    return f"""
        {mark}
        def test_it(probe):
            probe("./look.py", args={{"how": {how!r}}}{given})
        """


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


def test_a_simulated_rig_runs_no_probes(claims: Run, probed: Any) -> None:
    result = claims(
        one("answer", "@needs_gpus(1)\n        @works"), "--gpuguard-rig=sim:h200:1", stack="sim:sglang==0.5.9"
    )
    result.stdout.fnmatch_lines(["REHEARSED NOT_EVALUATED *a simulated rig runs no probes"])
    assert probed() == []


def test_gpus_are_leased_clean_and_no_more_than_asked_for(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=4)
    rig.apply(monkeypatch)
    rig.alloc(3, 5 << 30)
    result = claims(
        """
        @needs_gpus(2)
        @works
        def test_two(probe):
            probe("./look.py", args={"how": "a"})

        @needs_gpus(1)
        @works
        def test_none(probe):
            found = probe("./look.py", args={"how": "b"}, gpus=0).data
            assert len(found["rig"]) == 4 and found["sms"] == ["120"] and found["driver"]

        @needs_gpus(1)
        @works
        def test_more(probe):
            probe("./look.py", args={"how": "c"}, gpus=2)

        @needs_gpus(5)
        @works
        def test_too_many(probe):
            probe("./look.py", args={"how": "d"})
        """,
        "--gpuguard-wait=1",
    )
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_more *write @needs_gpus(2)*",
            "NOT_EVALUATED *test_too_many *needs 5 GPUs*",
            "HOLDS *test_none *",
            "HOLDS *test_two *",
        ]
    )
    assert sorted(probed()) == [f"a 0,1 {rig.uuid(0)} {rig.uuid(1)}", "b  "]


def test_all_gpus_that_meet_the_needs_are_leased_at_once(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=3)
    rig.apply(monkeypatch)
    claims(one("answer", "@needs_gpus(1)\n        @works", ', gpus="all"')).assert_outcomes(passed=1)
    (line,) = probed()
    assert line.split()[1] == "0,1,2"


def test_a_dirty_gpu_is_a_fault_of_the_host(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    rig.alloc(0, 5 << 30)
    source = one("answer", "@needs_gpus(1)\n        @works")
    result = claims(source, "--gpuguard-wait=1", ini="gpuguard_reclaim = 1s\n")
    result.stdout.fnmatch_lines(["INFRA *infra.dirty_gpu*"])
    assert probed() == []


def test_a_stack_that_cannot_be_asked_is_a_fault_of_the_host(claims: Run, probed: Any, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    claims(one("answer"), stack=str(broken)).stdout.fnmatch_lines(["INFRA *infra.boot*instead of answering*"])


def test_an_image_that_is_not_there_is_not_evaluated(claims: Run, probed: Any, docker: Docker) -> None:
    result = claims(one("answer"), stack="docker:example/none:1")
    result.stdout.fnmatch_lines(["gpuguard: 1 NOT_EVALUATED (1 stack: *"])


def test_a_probe_runs_in_a_container_too(claims: Run, probed: Any, docker: Docker) -> None:
    result = claims(one("answer", given=", env={'PROBED': '/dev/null'}"), stack=f"docker:{IMAGE}")
    result.stdout.fnmatch_lines(["HOLDS *answered in * all is answer"])
    assert docker.containers == []


def test_after_kill_9_of_pytest_the_probe_is_gone(
    pytester: pytest.Pytester, probed: Any, fake_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"{os.getpid()}-probe"
    monkeypatch.setenv("GPUGUARD_TEST_MARKER", marker)
    pytester.makepyfile(
        """
        from pytest_gpuguard import works

        @works
        def test_it(probe):
            probe("./look.py", args={"how": "hang"}, deadline="100s")
        """
    )
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--gpuguard-stack=fake={fake_python}"]
    run = subprocess.Popen(words, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_for(probed, 60)
    assert len(started_by(marker)) >= 3, "pytest, warden, probe"
    run.kill()
    run.wait()
    assert wait_for(lambda: not started_by(marker), 5)


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


def test_a_test_without_a_claim_asks_each_stack(claims: Run, probed: Any, fake_python: Path) -> None:
    source = """
        def test_it(probe):
            assert probe("./look.py").data["how"] == "answer"
        """
    result = claims(source, f"--gpuguard-stack=other={fake_python}")
    result.assert_outcomes(passed=2)


def test_a_small_gpu_beside_those_that_serve_is_left_out(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=3)
    rig.shared.gpu[0].total = 2 << 30
    rig.shared.gpu[0].cc_major, rig.shared.gpu[0].cc_minor = 6, 1
    rig.apply(monkeypatch)
    result = claims(
        """
        @needs_gpus(1)
        @works
        def test_all(probe):
            probe("./look.py", args={"how": "all"}, gpus="all")

        @needs_gpus(1)
        @works
        def test_none(probe):
            assert probe("./look.py", args={"how": "none"}, gpus=0).data["sms"] == ["120"]
        """
    )
    result.assert_outcomes(passed=2)
    assert probed()[0].split()[:2] == ["all", "1,2"]


def test_of_several_mig_devices_a_probe_gets_one(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process the first one alone."""
    rig = fake_rig(n=2, card="h200")
    migs = [rig.partition(gpu, ("3g.71gb", 71424))[0] for gpu in (0, 1)]
    rig.apply(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(migs))
    claims(one("answer", "@needs_gpus(1)\n        @works", ', gpus="all"')).assert_outcomes(passed=1)
    (line,) = probed()
    assert line.split()[1:] in ([migs[0], migs[0]], [migs[1], migs[1]])


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


def test_each_python_is_asked_itself(claims: Run, probed: Any, fake_python: Path) -> None:
    other = f"--gpuguard-stack=other={fake_python.parent}/../bin/python"
    claims(one("answer"), other).assert_outcomes(passed=2)
    assert len(probed()) == 2


def test_a_fault_of_the_host_is_asked_again(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    rig.alloc(0, 5 << 30)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    result = claims(
        """
        import os
        from pathlib import Path
        from tests.standin import standin

        @needs_gpus(1)
        @works
        def test_1(probe):
            probe("./look.py")

        @needs_gpus(1)
        @works
        def test_2(probe):
            for slot in standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[0].process:
                slot.bytes = slot.pid = 0
            probe("./look.py")
        """,
        "--gpuguard-wait=1",
        ini="gpuguard_reclaim = 1s\n",
    )
    result.stdout.fnmatch_lines(["INFRA *test_1 *infra.dirty_gpu*", "HOLDS *test_2 *answered in*"])


def test_a_probe_leaves_the_claims_own_server_alone(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(
        """
        import urllib.request

        @needs_gpus(1)
        @serves("sglang", MODEL)
        @fits(margin="1GiB")
        def test_it(server, probe):
            probe("./look.py")
            assert urllib.request.urlopen(server.url + "/health").status == 200
        """
    )
    result.stdout.fnmatch_lines(["HOLDS *test_it *GiB free"])
    assert len(probed()) == 1


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


def test_an_exclusive_claim_has_the_whole_box_clean(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=2)
    rig.apply(monkeypatch)
    rig.alloc(1, 5 << 30)
    source = one("answer", "@needs_gpus(1, exclusive=True)\n        @works")
    result = claims(source, "--gpuguard-wait=1", ini="gpuguard_reclaim = 1s\n")
    result.stdout.fnmatch_lines(["INFRA *infra.dirty_gpu*"])


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
