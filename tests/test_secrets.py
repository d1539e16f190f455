"""Secrets of environments, flags and names: nothing that we keep or say of a claim holds one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.ledger.store import open_ledger

Run = Any
LEDGER = ".gpuguard/ledger.sqlite"


def section(result: pytest.RunResult, name: str) -> str:
    """What stands under a heading of the terminal."""
    found = re.search(rf"=+ {name} =+\n(.*?)\n=+ ", result.stdout.str(), re.DOTALL)
    return found[1] if found else ""


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


def test_what_we_say_of_a_claim_tells_no_secret_of_any_form(claims: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {
        "PGPASSWORD": "without-underscore-1",
        "AWS_SECRET_ACCESS_KEY": "/begins-like-a-path-2",
        "A_TOKEN": "in-a-parameter-3",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    source = """
import os
told = " ".join(os.environ[name] for name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY"))

@serves("sglang", MODEL, CPU, "--api-key=with-equals-4")
@fits
@pytest.mark.parametrize("n", ["in-a-parameter-3"])
def test_skips(n, request):
    pytest.skip(told + " with-equals-4")

@fits
def test_own(sglang_server):
    sglang_server(MODEL, CPU, "--api-key of-its-own-5")
    raise AssertionError(told + " of-its-own-5")
"""
    result = claims(source, "--junitxml=junit.xml", "-rs")
    result.stdout.fnmatch_lines(["*1 CONTRADICTED (worse), 1 NOT_EVALUATED*"])
    with open_ledger(LEDGER) as ledger:
        kept = json.dumps([one.to_dict() for one in ledger.records(ledger.run("last").id, evidence=True)])
        kept += json.dumps(ledger.notes())
    shown = result.stdout.str()
    section_of_ours = shown.partition("Captured gpuguard call")[2]  # what stands above is the test's own exception
    [skipped] = re.findall(r"<skipped .*?</skipped>", Path("junit.xml").read_text(), re.DOTALL)
    for secret in [*planted.values(), "with-equals-4", "of-its-own-5"]:
        assert secret not in kept
        assert secret not in section_of_ours
        assert secret not in skipped.replace("in-a-parameter-3", "")
    assert "test_skips[***]" in kept
