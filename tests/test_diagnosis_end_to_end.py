"""Diagnosis in a run of pytest: what a failed claim says of its server, and signatures of the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .boot_logs import FAILED, FULL, arguments, dies, loading, tp

Run = Any
FakeRigs = Any

CLAIM = """
    @serves("sglang", MODEL, {flags})
    @{expectation}
    def test_it(): ...
"""


@pytest.fixture
def prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every server that is booted prints this and dies."""

    def say(text: str) -> None:
        path = tmp_path / "the log of a server"
        path.write_text(text)
        monkeypatch.setenv("FAKE_SGLANG", "log")
        monkeypatch.setenv("FAKE_SGLANG_LOG", str(path))

    return say


def told(result: pytest.RunResult) -> list[str]:
    """The lines that pytest prints of the one claim that failed."""
    text = result.stdout.str()
    found = re.search(r"^_+ test_it _+\n(.*?)^(?:=|_)+ ", text, re.MULTILINE | re.DOTALL)
    assert found, text
    return found[1].splitlines()


def test_a_failed_claim_is_told_in_twelve_lines_with_line_memory_and_cure(claims: Run, prints: Any) -> None:
    prints(FAILED)
    lines = told(claims(CLAIM.format(flags="CPU, '--tp-size 8'", expectation="fits")))
    assert len(lines) <= 12
    assert lines[0].startswith("CONTRADICTED (worse): fits: oom.kv_pool: RuntimeError: Not enough memory.")
    assert lines[1].startswith("  line 21: RuntimeError: Not enough memory.")
    assert (
        lines[2]
        == "  the weights leave no room for the KV pool under this --mem-fraction-static (phase reached: kv_pool)"
    )
    text = "\n".join(lines)
    assert "  memory of TP0, the fullest rank (GiB): 94.00 free before the weights, 77.70 weights, 16.30 left\n" in text
    assert "short by 4.50, the least fraction is 0.8266\n" in text
    assert "  cure: --mem-fraction-static between 0.83 and 0.85: 0.84 gives a KV pool of 1.3 GiB" in text
    assert "  log: " in text
    assert "| " in lines[-1]


def test_the_same_is_in_the_report_for_programs(claims: Run, prints: Any, pytester: pytest.Pytester) -> None:
    prints(FAILED)
    pytester.makeconftest(
        """
        import json, pathlib
        def pytest_runtest_logreport(report):
            data = getattr(report, "gpuguard", None)
            if data is not None and report.when == "call":
                pathlib.Path("report.json").write_text(json.dumps(data))
        """
    )
    claims(CLAIM.format(flags="CPU, '--tp-size 8'", expectation="fits"))
    data = json.loads((pytester.path / "report.json").read_text())
    assert data["outcome"] == "oom.kv_pool"
    assert data["memory"]["f_min"] == pytest.approx(0.8266)
    assert data["remedies"][0].startswith("--mem-fraction-static between 0.83 and 0.85")


def test_gpus_that_are_leased_and_not_used_are_told(
    claims: Run, prints: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EP subdivides TP: four of the eight GPUs would have to hold all weights."""
    fake_rig(8).apply(monkeypatch)
    bar = "Loading safetensors checkpoint shards:  67% Completed | 43/64 [00:40<00:20,  1.60it/s]\n"
    prints(
        arguments(tp_size=4, ep_size=2)
        + loading(tp(4), 94.0)
        + bar
        + dies(FULL.format("672.00 MiB.", "136.94 MiB"), " TP2")
    )
    flags = "'--tp-size 4 --ep-size 2'"
    lines = told(claims("    @needs_gpus(8)" + CLAIM.format(flags=flags, expectation="fits")))
    assert len(lines) <= 12
    cures = [line for line in lines if line.startswith("  cure: ")]
    assert cures[0].startswith(
        "  cure: 4 GPUs are used, 8 are leased: --tp-size 8; the weights need about 140 GiB of each"
    )
    assert cures[1].startswith("  cure: --ep-size 2 adds no GPU")
    result = claims("    @needs_gpus(8)" + CLAIM.format(flags=flags, expectation='ooms("weights")'))
    result.stdout.fnmatch_lines(["HOLDS *test_it *oom.weights*"])


def test_what_a_log_prints_does_nothing_to_the_terminal(claims: Run, prints: Any) -> None:
    prints(loading(tp(2), 94.0) + dies("ValueError: \x1b]0;title\x07 of it") + "\x9b31m and \x08 more\n")
    result = claims(CLAIM.format(flags="CPU", expectation="fits"))
    assert not set("\x1b\x07\x08\x9b") & set(result.stdout.str())
    assert r"ValueError: \x1b]0;title\x07 of it" in "\n".join(told(result))


OWN = """[[signature]]
id = "acme.twelve"
outcome = "unsupported.arch"
any = ["KeyError: 12"]
why = "the kernels of this build do not know the card"
cure = "build them with SM120"
"""

TWO_CLAIMS = """
    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "keyerror"})
    @fails("unsupported.arch")
    def test_holds(): ...

    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "keyerror"})
    @fits
    def test_it(): ...
"""


@pytest.mark.parametrize("how", ["option", "ini"])
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_boot_is_read_with_the_user_s_signatures_too(
    claims: Run, pytester: pytest.Pytester, how: str, workers: tuple[str, ...]
) -> None:
    (pytester.path / "ci").mkdir()
    (pytester.path / "ci" / "own.toml").write_text(OWN)
    options = ("--gpuguard-signatures", "ci/own.toml") if how == "option" else ()
    ini = "gpuguard_signatures = ci/own.toml" if how == "ini" else ""
    result = claims(TWO_CLAIMS, *options, *workers, ini=ini)
    result.stdout.fnmatch_lines(
        ["CONTRADICTED (worse) *test_it *unsupported.arch: KeyError: 12", "HOLDS *test_holds *"]
    )
    text = "\n".join(told(result))
    assert "  the kernels of this build do not know the card (phase reached: weights)\n" in text
    assert "  cure: build them with SM120\n" in text
    without = claims(TWO_CLAIMS, *workers)
    without.stdout.fnmatch_lines(["*unknown: KeyError: 12"])


@pytest.mark.parametrize("how", ["option", "ini"])
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_signature_file_that_is_wrong_ends_the_run_before_anything_is_collected(
    claims: Run, pytester: pytest.Pytester, how: str, workers: tuple[str, ...]
) -> None:
    own = pytester.path / "own.toml"
    own.write_text(OWN.replace("unsupported.arch", "unsupported.arhc"))
    options = ("--gpuguard-signatures", "own.toml") if how == "option" else ()
    ini = "gpuguard_signatures = own.toml" if how == "ini" else ""
    result = claims(TWO_CLAIMS, *options, *workers, ini=ini)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = result.stderr.str()
    assert f"--gpuguard-signatures: {own}:3: signature acme.twelve: 'unsupported.arhc' is not an outcome" in message
    assert "did you mean 'unsupported.arch'?" in message
    assert "Traceback" not in message
    assert "collected" not in result.stdout.str()
    own.unlink()
    result = claims(TWO_CLAIMS, *options, *workers, ini=ini)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"{own}: No such file or directory" in result.stderr.str()
