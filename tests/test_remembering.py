"""Runs and the ledger: what is remembered, what flips, what fresh boots say, and a ledger that fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.ledger.store import open_ledger

from .sim_models import DENSE, write_model

Run = Any
RIG = "--gpuguard-rig=sim:rtx-pro-6000-server:2"
LEDGER = ".gpuguard/ledger.sqlite"

CLAIMS = """
@needs_sm120
@serves("sglang", DENSE, "--tp-size 2 --enable-flashinfer-allreduce-fusion")
@unsupported("flashinfer allreduce fusion", how="crashes", match="No supported CUDA")
@claim(id="fusion")
def test_fusion(): ...

@serves("sglang", DENSE, "--mem-fraction-static 0.8")
@fits
def test_fits(): ...

@serves("sglang", "absent")
@fits
def test_absent(): ...
"""


@pytest.fixture
def on(claims: Run, tmp_path: Path) -> Run:
    """Runs a file of claims on a simulated release of SGLang, called prod."""
    model = write_model(tmp_path / "dense", DENSE)

    def run(release: str, *args: str, source: str = CLAIMS, **more: Any) -> pytest.RunResult:
        stack = f"--gpuguard-stack=prod=sim:{release}"
        result: pytest.RunResult = claims(f"DENSE = {str(model)!r}\n{source}", RIG, stack, *args, stack="", **more)
        return result

    return run


def section(result: pytest.RunResult, name: str) -> str:
    """What stands under a heading of the terminal."""
    found = re.search(rf"=+ {name} =+\n(.*?)\n=+ ", result.stdout.str(), re.DOTALL)
    return found[1] if found else ""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_run_is_remembered_and_what_flips_is_told_first(on: Run, workers: tuple[str, ...]) -> None:
    first = on("sglang==0.5.7", *workers)
    assert section(first, "flips") == ""
    second = on("sglang==0.5.10", *workers)
    told = section(second, "flips")
    assert told.startswith("REHEARSED 1 claim flipped: 1 better\nBETTER fusion [prod] got better")
    assert "was REHEARSED HOLDS, unsupported.arch" in told
    assert "- sglang 0.5.7 -> 0.5.10" in told
    text = second.stdout.str()
    assert text.index("= flips =") < text.index("= claims =")
    with open_ledger(LEDGER) as ledger:
        new, old = ledger.runs()
        assert (old.kind, old.stacks, old.ended is not None) == ("rehearsed", ("prod",), True)
        found = {one.claim: one for one in ledger.records(new.id, evidence=True)}
        assert {name: one.verdict for name, one in found.items()} == {
            "fusion": "CONTRADICTED (better)",
            "test_claims.py::test_fits": "HOLDS",
            "test_claims.py::test_absent": "NOT_EVALUATED",
        }
        fits = found["test_claims.py::test_fits"]
        assert fits.components["sglang"] == "0.5.10"
        assert "torch" not in fits.components  # nobody said
        assert fits.cards == ("rtx-pro-6000-server",)
        assert fits.evidence["memory"]["weights_gib"] > 0
        assert ledger.before(new.id) != ()


def test_no_flip_without_a_change_and_none_without_a_ledger(on: Run) -> None:
    on("sglang==0.5.7")
    assert section(on("sglang==0.5.7"), "flips") == ""
    on("sglang==0.5.10", "--gpuguard-ledger=none")
    with open_ledger(LEDGER) as ledger:
        assert len(ledger.runs()) == 2


def test_a_run_without_claims_makes_no_ledger(on: Run) -> None:
    on("sglang==0.5.7", source="def test_plain(): ...\n")
    assert not Path(LEDGER).exists()


def test_the_ledger_may_be_elsewhere(on: Run, tmp_path: Path) -> None:
    on("sglang==0.5.7", f"--gpuguard-ledger=sqlite:///{tmp_path}/other.sqlite")
    on("sglang==0.5.7", ini="gpuguard_ledger = near.sqlite\n")
    assert not Path(LEDGER).exists()
    for file in (tmp_path / "other.sqlite", Path("near.sqlite")):
        with open_ledger(str(file)) as ledger:
            assert len(ledger.runs()) == 1


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_flip_is_confirmed_on_fresh_boots(on: Run, workers: tuple[str, ...]) -> None:
    on("sglang==0.5.7", *workers)
    on("sglang==0.5.10", "--gpuguard-confirm=2", *workers)
    with open_ledger(LEDGER) as ledger:
        found = {one.claim: one for one in ledger.records(ledger.run("last").id, evidence=True)}
    assert found["fusion"].verdict == "CONTRADICTED (better)"
    assert found["fusion"].evidence["confirmed"] == {
        "boots": 3,
        "agreed": 3,
        "verdicts": ["CONTRADICTED (better)"] * 3,
    }
    assert found["test_claims.py::test_fits"].evidence["confirmed"] is None
    assert len(list(Path(".gpuguard/logs").glob("*test_fusion*"))) == 4


FLAKY = """
from pathlib import Path

@serves("sglang", MODEL, CPU)
@works
def test_flaky(server):
    calls = Path("calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    assert len(calls.read_text()) != 2  # the first call of the second run
"""


def test_where_fresh_boots_disagree_nothing_is_decided_and_it_is_said_to_be_flaky(claims: Run) -> None:
    assert claims(FLAKY).ret == 0
    result = claims(FLAKY, "--gpuguard-confirm=1")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["INCONCLUSIVE *test_flaky *flaky: 2 boots came out as 1 × CONTRADICTED (worse) (*), 1 × HOLDS; *"]
    )
    assert section(result, "flips").startswith("1 claim flipped: 1 flaky\nFLAKY test_claims.py::test_flaky")
    assert claims(FLAKY, "--gpuguard-confirm=1").ret == 0
    assert Path("calls").read_text() == "xxxx"


UNDECIDED = """
@serves("sglang", MODEL, CPU)
@uses("flashmla")
def test_undecided(): ...
"""


def test_the_third_undecided_run_in_a_row_on_one_stack_fails(claims: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for state in "aabbbb":
        monkeypatch.setenv("SGLANG_STATE", state)  # a component of the stack
        results.append(claims(UNDECIDED))
    assert [one.ret for one in results] == [0, 0, 0, 0, 1, 1]
    results[4].stdout.fnmatch_lines(["*INCONCLUSIVE *; 3 runs in a row decided nothing on this stack"])
    results[5].stdout.fnmatch_lines(["*INCONCLUSIVE *; 4 runs in a row decided nothing on this stack"])
    with open_ledger(LEDGER) as ledger:
        past = [one for one in ledger.history("test_claims.py::test_undecided") if one.decides]
    assert ["in a row" in one.fact for one in past] == [False] * 4 + [True] * 2
    assert "1 inconclusive" in results[3].stdout.str()


def test_a_rehearsal_that_decides_nothing_may_be_repeated(on: Run) -> None:
    """Its stand-in only repeats the argument that it was given: no evidence, however often it is asked."""
    source = (
        '@serves("sglang", DENSE, "--attention-backend triton --mem-fraction-static 0.8")\n'
        '@uses("attention_backend=triton")\ndef test_asked(): ...\n'
    )
    for _ in range(4):
        result = on("sglang==0.5.9", source=source)
        result.stdout.fnmatch_lines(["REHEARSED INCONCLUSIVE *only repeats the argument*"])
        assert result.ret == 0
        assert "in a row" not in result.stdout.str()


def test_a_ledger_that_cannot_be_opened_sends_the_run_to_a_spool(on: Run) -> None:
    Path("broken.sqlite").write_text("this is no database, and long enough to be told from one that is empty")
    result = on("sglang==0.5.7", "--gpuguard-ledger=broken.sqlite")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpuguard: the ledger failed: *broken.sqlite*; this run is in *spool-*.jsonl*import*"])
    [spool] = Path(".gpuguard").glob("spool-*.jsonl")
    assert sum("test_fits" in line for line in spool.read_text().splitlines()) >= 1
    assert Path("broken.sqlite").read_text().startswith("this is no database")


def test_a_ledger_that_is_lost_in_mid_run_loses_nothing(on: Run) -> None:
    source = CLAIMS + (
        "\ndef test_lose():\n"
        "    import os, sqlite3\n"
        "    db = sqlite3.connect('.gpuguard/ledger.sqlite')\n"
        "    db.execute('drop table gpuguard_judgements'); db.commit()\n"
        "\n@serves('sglang', DENSE, '--mem-fraction-static 0.7')\n@fits\ndef test_later(): ...\n"
    )
    result = on("sglang==0.5.7", source=source)
    result.stdout.fnmatch_lines(["gpuguard: the ledger failed: *this run is in *"])
    [spool] = Path(".gpuguard").glob("spool-*.jsonl")
    text = spool.read_text()
    for name in ("fusion", "test_fits", "test_absent", "test_later"):
        assert f'"claim":"{name}' in text.replace('": "', '":"') or f"::{name}" in text


def test_a_claim_whose_worker_crashed_keeps_its_name_and_stack(claims: Run) -> None:
    source = """
import os
@serves("sglang", MODEL, CPU)
@fits
@claim(id="crashes")
def test_crashes(): os._exit(3)
"""
    claims(source, "-n", "1")
    with open_ledger(LEDGER) as ledger:
        [one] = ledger.records(ledger.run("last").id)
    assert (one.claim, one.stack, one.verdict) == ("crashes", "fake", "INFRA")


def test_of_several_workers_that_judge_a_claim_the_worst_is_remembered(claims: Run) -> None:
    source = """
import os, time
@fits
def test_it(sglang_server):
    sglang_server(MODEL, CPU)
    if os.environ["PYTEST_XDIST_WORKER"] == "gw1":
        time.sleep(6)  # it is the last to report
    else:
        raise AssertionError("here only")
"""
    claims(source, "-n", "2", "--dist=each")
    with open_ledger(LEDGER) as ledger:
        [one] = ledger.records(ledger.run("last").id)
    assert one.verdict == "CONTRADICTED (worse)"


SEVERAL = """
import os
@fits
def test_a(sglang_server):
    sglang_server(MODEL, CPU)
    assert "FAIL" not in os.environ

@fits
def test_b(sglang_server): sglang_server(MODEL, CPU)
"""


def test_no_claim_is_called_gone_that_was_not_asked_for(
    claims: Run, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester, fake_python: Path
) -> None:
    folder = pytester.mkdir("sub")
    claims(SEVERAL)
    Path("test_claims.py").rename(folder / "test_sub.py")
    claims("", "sub")
    monkeypatch.setenv("FAIL", "1")
    claims("", "sub")
    monkeypatch.delenv("FAIL")
    root = Path.cwd()
    monkeypatch.chdir(folder)
    stack = f"--gpuguard-stack=fake={fake_python}"
    for args in (["--lf"], ["test_sub.py::test_a"], ["-k", "test_a"]):
        one = pytester.runpytest_subprocess(stack, *args)
        assert "no longer in the suite" not in one.stdout.str()
        one.stdout.fnmatch_lines(["*1 passed*"])
    monkeypatch.chdir(root)
    text = (folder / "test_sub.py").read_text()
    (folder / "test_sub.py").write_text(text.replace("def test_b", "def test_other"))
    claims("", "sub").stdout.fnmatch_lines(["sub/test_sub.py::test_b: in the ledger and no longer in the suite"])


def test_without_the_database_library_the_run_goes_to_a_spool(on: Run, pytester: pytest.Pytester) -> None:
    """A checkout that runs in an environment it was not installed in."""
    pytester.makeconftest("import sys\nsys.modules['sqlalchemy'] = None\n")
    result = on("sglang==0.5.7", "--gpuguard-ledger=own.sqlite")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpuguard: the ledger failed: *without the Python package sqlalchemy*spool-*.jsonl*"])
    assert list(Path(".gpuguard").glob("spool-*.jsonl"))


def test_where_neither_ledger_nor_spool_can_be_written_it_is_said_also_when_quiet(on: Run) -> None:
    Path(".gpuguard").write_text("in the way")
    result = on("sglang==0.5.7", "-q", "--gpuguard-log-dir=logs")
    assert result.ret == 0
    [line] = [one for one in result.stdout.lines if one.startswith("gpuguard: this run is not remembered")]
    assert "cannot be made" in line
    assert "ledger import" not in line


def test_the_folder_of_the_ledger_is_ignored_by_git(on: Run) -> None:
    on(
        "sglang==0.5.7",
        "--gpuguard-log-dir=logs",
        source="@serves('sglang', 'absent')\n@fits\ndef test_absent(): ...\n",
    )
    assert Path(LEDGER).exists()
    assert Path(".gpuguard/.gitignore").read_text() == "*\n"


@pytest.mark.parametrize("confirm", ["0", "1"])
def test_a_claim_that_still_runs_under_its_old_name_flips(on: Run, confirm: str) -> None:
    on("sglang==0.5.7")
    with open_ledger(LEDGER) as ledger:
        ledger.alias("fusion", "allreduce.fusion")
    told = section(on("sglang==0.5.10", f"--gpuguard-confirm={confirm}"), "flips")
    assert "BETTER allreduce.fusion [prod]" in told
    with open_ledger(LEDGER) as ledger:
        records = ledger.records(ledger.run("last").id, evidence=True)
    [found] = [one for one in records if one.claim == "allreduce.fusion"]
    assert (found.evidence["confirmed"] is not None) is (confirm == "1")
    assert found.evidence["line"] > 1
