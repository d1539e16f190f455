"""The checks of scripts/device-check on the NVML stand-in: each holds, and notices what is wrong.

What only torch and a driver can do is not shown here: a stand-in (tests/device_workload.py) takes torch's place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_gpuguard.facts.faults import HostFault
from pytest_gpuguard.facts.nvml import NvmlChild
from scripts.device_check import contender, facts, leases, main, memory, served, work
from scripts.device_check.result import Device, Findings
from scripts.device_check.work import Worker, WorkFailed

from .conftest import own_ports

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
        ("free", "free memory differs by -1024 MiB from torch's"),
        ("context", "a context takes 0 MiB, which cannot be"),
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
    assert found.figures["spikes_seen"] >= 8
    assert found.figures["torch_reserved_gib"] == 8.0, "a large card is not asked for more than it frees in 20 ms"
    assert found.headline.endswith("of 10 spikes of at most 20 ms seen")
    monkeypatch.setenv("DEVICE_CHECK_LIES", "unseen")
    assert "spikes of at most 20 ms were seen" in memory.sampled(checked_device).said
    monkeypatch.setenv("DEVICE_CHECK_LIES", "peak,slow")
    found = memory.sampled(checked_device)
    assert found.problems == ["the sampled peak is -1024 MiB off torch's reserve and the context"]
    assert found.headline.endswith("of 10 spikes of at most 137 ms seen")


def test_memory_that_does_not_return_is_told(checked_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.reclaim(checked_device).problems == []
    monkeypatch.setattr(memory, "_RECLAIM_S", 0.2)
    monkeypatch.setenv("DEVICE_CHECK_LIES", "unseen")
    assert "1 GiB: only 0.5 GiB were taken" in memory.reclaim(checked_device).said
    monkeypatch.setenv("DEVICE_CHECK_LIES", "sticky")
    found = memory.reclaim(checked_device)
    assert found.problems == ["1 GiB: 1536 MiB are still in use 0.2 s after kill -9"]
    assert list(found.figures) == ["1 GiB"], "one wait is all that there is time for"


def test_the_waits_of_a_check_fit_into_its_deadline_so_that_it_says_itself_what_is_wrong() -> None:
    limits = {name: deadline_s for name, (_, _, deadline_s) in main.CHECKS.items()}
    assert limits["out-of-memory"] - 10 >= 3 * memory._OOM_S
    assert limits["reclaim"] - 30 >= memory._RECLAIM_S + work.SETTLE_S
    assert 90.0 < leases._TURNS_S < limits["leases"], "a contender waits 90 s for its lease"
    assert limits["command-server"] > served._RUN_S


@pytest.mark.parametrize("check", [facts.memory, memory.sampled, memory.reclaim])
def test_what_the_check_before_left_is_waited_for_and_is_never_a_baseline(
    check: Callable[[Device], Findings], checked_rig: Any, checked_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_rig.leak(0, 20 * GIB)
    threading.Timer(1.0, checked_rig.leak, (0, 0)).start()
    assert check(checked_device).problems == []
    monkeypatch.setattr(work.settled, "__defaults__", (0.2,))
    checked_rig.leak(0, 20 * GIB)
    assert check(checked_device).problems == ["20.0 GiB were in use before this check began, 0.2 s long"]


def test_processes_that_nvml_does_not_list_are_no_problem_of_memory(
    checked_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(child: NvmlChild, uuids: Sequence[str]) -> Any:
        raise HostFault("infra.device", "NVML lists no processes", "Look elsewhere.")

    monkeypatch.setattr(NvmlChild, "processes", refused)
    found = facts.memory(checked_device)
    assert found.problems == []
    assert (found.figures["processes_listed"], found.figures["why"]) == (
        None,
        "NVML lists no processes. Look elsewhere.",
    )


def test_the_users_settings_of_the_allocator_are_not_those_that_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING"]
    for name in theirs:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs")
    env = Device("GPU-1", "1", Path()).env
    assert not set(theirs) & set(env)
    assert (env["CUDA_VISIBLE_DEVICES"], env["LD_LIBRARY_PATH"]) == ("1", "/theirs")


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
    other.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(memory, "_OOM_S", 0.2)
    assert memory.out_of_memory(checked_device).problems[0] == "load: memory did not run out within 0.2 s"


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


def test_the_worker_of_a_holder_has_its_lock_as_well(checked_device: Device) -> None:
    locks = checked_device.scratch / "held"
    locks.mkdir()
    one = leases.Contender(checked_device, locks, 1, GIB, 60.0)
    try:
        assert one.wait_for("taken", 30.0) is not None, one.text
        (worker,) = (each for each in psutil.Process(one.process.pid).children() if each.cmdline()[-1] == "obey")
        held = [link.readlink() for link in Path(f"/proc/{worker.pid}/fd").iterdir()]
        assert [file for file in held if locks in file.parents], held
    finally:
        one.close()


def test_a_lease_ends_before_its_lock_is_given_away_so_that_the_next_cannot_seem_to_overlap(
    checked_device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(lease: Any, room: Any, what: str, **more: Any) -> None:
        lease.release()
        time.sleep(0.5)

    monkeypatch.setattr(contender, "die_with_parent", lambda: None)
    monkeypatch.setattr(contender, "take_back", slow)
    contender.main([checked_device.uuid, checked_device.visible, "1", str(GIB), "0"])
    at = {one["event"]: one["at"] for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert at["ending"] <= at["given_back"] < time.monotonic() - 0.45


class _Scripted:
    """A contender that says what it is told to."""

    def __init__(self, **events: dict[str, Any]) -> None:
        self._events, self.text = events, ""
        self.events = [events["early"]] if "early" in events else []
        self.process = self

    def wait_for(self, event: str) -> dict[str, Any] | None:
        return self._events.get(event)

    def send_signal(self, number: int) -> None: ...

    def finish(self) -> bool:
        return "unwell" not in self._events

    def close(self) -> None: ...


TAKEN: dict[str, Any] = {"taken": {"used": 99 * GIB}}
LEASED: dict[str, Any] = {"leased": {"used": 0, "at": 0.0}}


@pytest.mark.parametrize(
    ("holder", "heir", "said"),
    [
        (TAKEN, LEASED, []),
        ({}, LEASED, ["the holder to be killed did not take its memory"]),
        (TAKEN, {}, ["the heir never had the GPU"]),
        (TAKEN, {**LEASED, "early": {}}, ["the heir had the GPU while it was held"]),
        (TAKEN, {"leased": {"used": 3 * GIB, "at": 0.0}}, ["the heir was given a GPU with 3.0 GiB in use"]),
        (TAKEN, {**LEASED, "unwell": {}}, ["the heir did not end well"]),
    ],
)
def test_an_heir_that_is_early_or_gets_a_gpu_that_is_not_clean_is_told(
    checked_device: Device, monkeypatch: pytest.MonkeyPatch, holder: Any, heir: Any, said: list[str]
) -> None:
    both = iter((_Scripted(**holder), _Scripted(**heir)))
    monkeypatch.setattr(leases, "Contender", lambda *given: next(both))
    monkeypatch.setattr(leases, "_WAIT_S", 0.0)
    found = Findings(figures={"leases": 4})
    leases._killed(found, checked_device, checked_device.scratch)
    assert found.problems == said


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
    found = served.run_claims(tmp_path / "run", 0, "none", [], {**os.environ, served.PORTS: own_ports()})
    assert f"gpuguard_ports = {own_ports()}\n" in (tmp_path / "run" / "pytest.ini").read_text()
    assert "test_a_server_and_its_rate: CONTRADICTED (worse)" in found.said
    assert "test_a_server_and_its_rate" in found.log


def test_a_run_that_never_began_is_told(tmp_path: Path) -> None:
    assert served.read_verdicts(tmp_path / "none.xml") == {}
    (tmp_path / "broken.xml").write_text("<testsuites")
    assert served.read_verdicts(tmp_path / "broken.xml") == {}
