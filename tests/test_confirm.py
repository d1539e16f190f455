"""Fresh boots before a flip is reported: the code that is run again, its time and server, and the budget."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard.ledger.store import open_ledger
from tests.measured import QUICK
from tests.standin.fixtures import FakeRigFactory

Run = Any
LEDGER = ".gpuguard/ledger.sqlite"

TWICE = """
import os, time, urllib.request
from pathlib import Path

def number():
    file = Path("calls-" + os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0])
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return len(file.read_text())

own = serves("sglang", MODEL, CPU)

@own
@works
@pytest.mark.timeout(4)
def test_slow(server):
    if number() > 1:
        time.sleep(2.2)  # twice that is more than the test's time
        raise AssertionError("slow and wrong")

@own
@works
@pytest.mark.timeout(2)
def test_hangs(server):
    calls = number()
    if calls > 2:
        time.sleep(600)
    assert calls == 1

@own
@works
def test_asks_late(request):
    url = request.getfixturevalue("server").url
    assert urllib.request.urlopen(url + "/health").status == 200
    assert number() == 1, "wrong"

@own
@works
def test_skips(server):
    if number() > 2:
        pytest.skip("not now")
    assert len(Path("calls-test_skips").read_text()) == 1
"""


def test_code_is_run_again_with_its_own_time_and_the_new_server_and_a_skip_is_no_disagreement(claims: Run) -> None:
    claims(TWICE)
    result = claims(TWICE, "--gpuguard-confirm=1")
    assert "ClaimTimeout" not in result.stdout.str()
    with open_ledger(LEDGER) as ledger:
        found = {one.claim.rpartition("::")[2]: one for one in ledger.records(ledger.run("last").id, evidence=True)}
    assert {one.verdict for one in found.values()} == {"CONTRADICTED (worse)"}
    told = {name: one.evidence["confirmed"] for name, one in found.items()}
    worse = "CONTRADICTED (worse)"
    assert told == {
        "test_slow": {"boots": 2, "agreed": 2, "verdicts": [worse] * 2},
        "test_hangs": {"boots": 1, "agreed": 1, "verdicts": [worse, "INFRA"]},
        "test_asks_late": {"boots": 2, "agreed": 2, "verdicts": [worse] * 2},
        "test_skips": {"boots": 1, "agreed": 1, "verdicts": [worse, "NOT_EVALUATED"]},
    }
    assert "wrong" in found["test_asks_late"].fact


def test_a_flip_is_not_confirmed_beyond_the_budget(claims: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import os, time
@serves("sglang", MODEL, CPU)
@fits
def test_slow():
    if "SLOW" in os.environ:
        time.sleep(3)
        raise AssertionError("slow")
"""
    claims(source)
    monkeypatch.setenv("SLOW", "1")
    claims(source, "--gpuguard-confirm=20", "--gpuguard-budget=60s")
    with open_ledger(LEDGER) as ledger:
        [one] = ledger.records(ledger.run("last").id, evidence=True)
    assert (one.verdict, one.evidence["confirmed"]) == ("CONTRADICTED (worse)", None)


def test_a_peak_on_leased_gpus_is_not_judged_again(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(QUICK)
    fake_rig(n=1).apply(monkeypatch)
    source = """
import os, time
from pathlib import Path
from tests.standin import standin

@needs_gpus(1)
@max_mem("20GiB", of="peak")
def test_peak(gpus):
    card = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[gpus[0].index]
    card.leaked = int(os.environ.get("GIB", "12")) << 30
    time.sleep(0.5)
    card.leaked = 0
"""
    claims(source)
    monkeypatch.setenv("GIB", "21")
    claims(source, "--gpuguard-confirm=1")
    with open_ledger(LEDGER) as ledger:
        last, first = (
            [(one.verdict, one.evidence["confirmed"]) for one in ledger.records(run.id, evidence=True)]
            for run in ledger.runs()
        )
    assert (first, last) == ([("HOLDS", None)], [("CONTRADICTED (worse)", None)])
