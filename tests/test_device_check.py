"""The checks of scripts/device-check on the NVML stand-in: each holds, and notices what is wrong.

What only torch and a driver can do is not shown here: a stand-in (tests/device_workload.py) takes torch's place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.device_check import facts, leases, memory, served
from scripts.device_check.result import Device, Findings
from scripts.device_check.work import Worker, WorkFailed

pytest_plugins = ["tests.device_rig"]

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"memory": "1"}, "memory.total: NVML 143771, nvidia-smi 1"),
        ({"driver": "570.1"}, "driver_version: NVML 580.105.08, nvidia-smi 570.1"),
        ({"sm": "12.0"}, "compute_cap: NVML 9.0, nvidia-smi 12.0"),
        ({"bus": "00000000:FF:00.0"}, "pci.bus_id: NVML"),
        ({"cuda": "12.8"}, "cuda: NVML 13.0, nvidia-smi 12.8"),
        ({"uuid": "GPU-of-another"}, "uuid: NVML"),
    ],
)
def test_facts_that_nvidia_smi_does_not_share_are_told(
    checked_rig: Any,
    checked_device: Device,
    smi: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: dict[str, str],
    said: str,
) -> None:
    smi(tmp_path / "bin", monkeypatch, checked_rig, **lie)
    assert said in facts.facts(checked_device).said


def test_facts_agree_and_a_missing_nvidia_smi_is_said(
    checked_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = facts.facts(checked_device)
    assert (found.problems, found.figures["nvidia_smi"]["cuda"]) == ([], "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi is not installed" in facts.facts(checked_device).said


def test_costs_are_those_of_the_calls_and_slow_ones_are_told(checked_rig: Any) -> None:
    code = (
        "import json, sys; sys.path.insert(0, 'scripts'); from device_check import facts, result;"
        "from pathlib import Path; facts._CALLS_S = 0.1;"
        f"found = facts.costs(result.Device({checked_rig.uuid(0)!r}, '0', Path()));"
        "print(json.dumps([found.figures, found.said]))"
    )
    told = []
    for delay in (0, 20_000):
        checked_rig.shared.delay_us = delay
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        told.append(json.loads(done.stdout))
    checked_rig.shared.delay_us = 0
    (quick, said), (slow, warned) = told
    assert quick["us"]["memory v2"]["calls"] > 100
    assert "a reading of memory takes" in said
    assert slow["us"]["memory v2"]["median"] > 20_000
    assert "a sampler at 50 Hz is too fast" in warned


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        ("", "as torch sees it; a context takes 512 MiB"),
        ("total", "NVML total less reserved is -1024 MiB off torch's total"),
        ("unseen", "1024 MiB taken, and used memory grew by 0 MiB"),
    ],
)
def test_memory_is_held_against_what_torch_sees(
    checked_device: Device, monkeypatch: pytest.MonkeyPatch, lies: str, said: str
) -> None:
    monkeypatch.setenv("DEVICE_CHECK_LIES", lies)
    assert said in facts.memory(checked_device).said


def test_a_driver_with_the_old_numbers_only_does_not_pass(checked_rig: Any, checked_device: Device) -> None:
    checked_rig.shared.no_memory_v2 = 1
    assert "version 1 of NVML's numbers" in facts.memory(checked_device).said


def test_the_sampler_is_held_against_torchs_peak(checked_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found = memory.sampled(checked_device)
    assert found.problems == []
    assert found.figures["context_mib"] == 512
    assert found.figures["spikes_of_20_ms_seen"] >= 8
    monkeypatch.setenv("DEVICE_CHECK_LIES", "unseen")
    assert "spikes of 20 ms were seen" in memory.sampled(checked_device).said


def test_memory_that_does_not_return_is_told(checked_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.reclaim(checked_device).problems == []
    monkeypatch.setattr(memory, "_RECLAIM_S", 0.2)
    monkeypatch.setenv("DEVICE_CHECK_LIES", "sticky")
    assert "are still in use 0.2 s after kill -9" in memory.reclaim(checked_device).said


def test_an_outcome_that_is_not_the_expected_is_told(
    checked_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = memory.out_of_memory(checked_device)
    assert found.problems == []
    assert [one["outcome"] for one in found.figures.values()] == list(memory.EXPECTED.values())
    other = tmp_path / "other.py"
    other.write_text("print('ImportError: libfoo.so.1: cannot open shared object file')")
    monkeypatch.setenv("DEVICE_CHECK_WORKLOAD", str(other))
    assert len(memory.out_of_memory(checked_device).problems) == 3


def test_a_worker_that_dies_or_hangs_is_told_with_its_last_words(
    checked_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, said in (
        ("print('RuntimeError: no CUDA')", "ended: RuntimeError: no CUDA"),
        ("import time; time.sleep(60)", "said nothing for 0.5 s"),
    ):
        (tmp_path / "bad.py").write_text(code)
        monkeypatch.setenv("DEVICE_CHECK_WORKLOAD", str(tmp_path / "bad.py"))
        with pytest.raises(WorkFailed, match=said):
            Worker(checked_device.env, start_s=20.0 if "print" in code else 0.5)


def test_two_contenders_take_turns_and_the_heir_of_a_killed_one_gets_a_clean_gpu(checked_device: Device) -> None:
    found = leases.leases(checked_device)
    assert found.problems == []
    assert found.figures["leases"] == 4
    assert found.figures["heir_saw_mib_over_idle"] == 0
    assert found.figures["killed_with_gib"] > 100


def lease(
    at: float, until: float, used: int = 0, taken: int = 9 * GIB, leak: str | None = None
) -> list[dict[str, Any]]:
    return [
        {"event": "leased", "at": at, "used": used},
        {"event": "taken", "at": at + 0.1, "used": taken},
        {"event": "given_back", "at": until, "leak": leak},
    ]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lease(1.5, 3), "1 leases overlapped"),
        (lease(2.5, 3, used=3 * GIB), "a lease began with 3.0 GiB in use"),
        (lease(2.5, 3, taken=0), "a holder's allocation was not seen by NVML"),
        (lease(2.5, 3, leak="memory did not come back"), "not given back clean"),
        ([], "1 leases instead of"),
    ],
)
def test_leases_that_were_not_exclusive_or_not_clean_are_told(second: list[dict[str, Any]], said: str) -> None:
    found = Findings()
    leases.taken_turns(found, [lease(1, 2), second])
    assert said in found.said


def test_claims_that_do_not_hold_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_NEAR", -1.0)
    monkeypatch.setattr(served, "_WINDOW_S", 0.5)
    found = served.run_claims(tmp_path / "run", 0, "none", [], dict(os.environ))
    assert "test_a_server_and_its_rate: CONTRADICTED (worse)" in found.said
    assert "test_a_server_and_its_rate" in found.log


def test_a_run_that_never_began_is_told(tmp_path: Path) -> None:
    assert served.read_verdicts(tmp_path / "none.xml") == {}
    (tmp_path / "broken.xml").write_text("<testsuites")
    assert served.read_verdicts(tmp_path / "broken.xml") == {}
