"""Runs and the ledger: what is remembered, what flips, what fresh boots say, and a ledger that fails."""

from __future__ import annotations

import json
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
    assert told.startswith("1 claim flipped: 1 better\nBETTER fusion [prod] got better")
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
    assert "1 inconclusive" in results[3].stdout.str()


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


def test_no_secret_reaches_ledger_terminal_or_junit(claims: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {
        "HF_TOKEN": "hf_" + "Zq7" * 10,
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYabc",
        "MY_API_KEY": "plain-looking-value-1234",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    source = f"""
import os

@serves("sglang", MODEL, CPU, "--api-key sk-abcdefghijklmnopqrstu", env={{"DB_PASSWORD": "correct-horse-battery"}})
@fits
def test_tells_secrets(server):
    print(*({sorted(planted)!r}))
    raise AssertionError("saw " + os.environ["AWS_SECRET_ACCESS_KEY"] + " and correct-horse-battery and "
                         "postgresql://user:hunter2secret@host/db " + os.environ["MY_API_KEY"])
"""
    result = claims(source, "--junitxml=junit.xml")
    assert result.ret == 1
    secrets = [*planted.values(), "sk-abcdefghijklmnopqrstu", "correct-horse-battery", "hunter2secret"]
    database = b"".join(file.read_bytes() for file in Path(".gpuguard").glob("ledger.sqlite*"))
    with open_ledger(LEDGER) as ledger:
        told = json.dumps([one.to_dict() for one in ledger.records(ledger.run("last").id, evidence=True)])
    assert "test_tells_secrets" in told
    junit = re.findall(r"<property [^>]*>", Path("junit.xml").read_text())
    claims = section(result, "claims")
    for secret in secrets:
        assert secret not in told
        assert secret.encode() not in database
        assert not [one for one in junit if secret in one]
        assert secret not in claims
