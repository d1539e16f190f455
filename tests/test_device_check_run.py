"""Whole runs of scripts/device-check on the NVML stand-in: what it needs, what it refuses, and how it ends.

What only torch and a driver can do is not shown here: a stand-in (tests/device_workload.py) takes torch's place.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.facts.nvml import query_rig
from scripts.device_check import main
from scripts.device_check.result import Device, Findings, Result

from .test_killed import started_by, wait_for

pytest_plugins = ["tests.device_rig"]

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "device-check"
GIB = 1 << 30

#: What a machine with torch may well lack, and what is not to be needed.
_ABSENT = "click rich sqlalchemy pytest_timeout xdist jinja2 leather psycopg hypothesis".split()  # noqa: SIM905
_ABSENT += ["tomli"] if sys.version_info >= (3, 11) else []


def lacking(folder: Path, names: list[str]) -> dict[str, str]:
    """An environment in which no python can import these, not even one that is started by another."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {names!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(out: Path, env: dict[str, str] | None = None, limit_s: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(out)], capture_output=True, text=True, timeout=limit_s, env=env, check=False
    )


def test_a_whole_run_needs_no_installation_and_none_of_the_modules_that_a_torch_machine_lacks(
    checked_rig: Any, tmp_path: Path
) -> None:
    env = lacking(tmp_path / "absent", _ABSENT)
    probe = [sys.executable, "-c", "import sqlalchemy"]
    assert subprocess.run(probe, env=env, capture_output=True, check=False).returncode != 0, "nothing is blocked"
    done = run(tmp_path / "out", env)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "out" / main.LOG).read_text()
    report = json.loads((tmp_path / "out" / main.REPORT).read_text())
    assert [one["name"] for one in report["checks"]] == list(main.CHECKS)
    assert (report["ok"], report["card"], report["sm"], report["driver"]) == (True, "NVIDIA H200", "90", "580.105.08")
    for one in report["checks"]:
        assert set(one) == {"name", "ok", "seconds", "said", "figures"}
        assert one["ok"]
        assert one["figures"]
        assert f"ok   {one['name']}" in done.stdout
    rates = report["checks"][-1]["figures"]["toks"]
    assert [row["concurrency"] for row in rates] == [1, 8]
    assert sorted(os.listdir(tmp_path / "out")) == [main.REPORT, main.LOG]


def test_a_run_of_which_one_check_does_not_hold_says_which_and_exits_with_1(checked_rig: Any, tmp_path: Path) -> None:
    done = run(tmp_path / "out", {**os.environ, "DEVICE_CHECK_LIES": "total"})
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / main.REPORT).read_text())
    assert report["ok"] is False
    assert [one["name"] for one in report["checks"] if not one["ok"]] == ["memory"]
    assert "FAIL memory " in done.stdout
    assert "7 of 8 checks hold" in done.stdout


def test_it_is_executable_and_begins_with_a_python() -> None:
    assert SCRIPT.stat().st_mode & stat.S_IXUSR
    assert SCRIPT.read_text().startswith("#!/usr/bin/env python3\n")


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / main.REPORT).write_text('{"ok": true, "checks": []}')
    done = run(tmp_path / "out")
    why = "nothing was checked: no GPUs (no NVIDIA driver)"
    assert (done.returncode, done.stdout) == (2, f"device-check: {why}\n")
    assert json.loads((tmp_path / "out" / main.REPORT).read_text()) == {"ok": False, "why": why, "checks": []}


def test_a_run_that_is_stopped_before_its_first_check_leaves_no_report_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> Any:
        assert not (tmp_path / main.REPORT).exists(), "whoever kills the run finds no report of another either"
        raise KeyboardInterrupt

    monkeypatch.setattr("signal.signal", lambda *given: None)
    monkeypatch.setattr(main, "idle_gpu", stopped)
    (tmp_path / main.REPORT).write_text('{"ok": true, "checks": []}')
    assert main.main([str(tmp_path)], str(SCRIPT)) == 1
    report = json.loads((tmp_path / main.REPORT).read_text())
    assert (report["ok"], report["checks"]) == (False, [])
    assert "before the first check" in report["why"]


def test_the_time_of_a_run_begins_before_a_gpu_is_looked_for_and_bounds_every_check(
    checked_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def check(script: str, name: str, gpu: Any, scratch: Path, deadline_s: float) -> tuple[Result, str]:
        given.append(deadline_s)
        return Result(name, True, 0.0, "as it should be"), ""

    @contextmanager
    def slow() -> Iterator[tuple[Any, Any]]:
        time.sleep(1.5)
        rig = query_rig()
        yield rig, rig.gpus[0]

    monkeypatch.setattr("signal.signal", lambda *given: None)
    monkeypatch.setattr(main, "run_check", check)
    monkeypatch.setattr(main, "idle_gpu", slow)
    monkeypatch.setattr(main, "TOTAL_S", 50.0)
    assert main.main([str(tmp_path)], str(SCRIPT)) == 0
    assert len(given) == len(main.CHECKS)
    assert all(30 < one <= 48.5 for one in given), given
    monkeypatch.setattr(main, "TOTAL_S", 1000.0)
    assert main.main([str(tmp_path)], str(SCRIPT)) == 0
    assert given[len(main.CHECKS) :] == [deadline_s for _, _, deadline_s in main.CHECKS.values()]


def test_a_gpu_whose_memory_is_the_hosts_is_refused(checked_rig: Any) -> None:
    checked_rig.shared.gpu[0].memory_unsupported = 1
    with pytest.raises(main.NoGpu, match="unified memory: NVML tells nothing of it"), main.idle_gpu():
        pass


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path / "file" / "out")
    assert done.returncode == 2
    assert "give a folder that can be written to" in done.stderr


def test_a_python_that_lacks_what_is_needed_is_told(checked_rig: Any, tmp_path: Path) -> None:
    done = run(tmp_path / "out", lacking(tmp_path / "absent", ["packaging", "httpx"]))
    assert (done.returncode, done.stderr) == (2, "")
    assert "lacks httpx, packaging: run this with a python that has torch, pytest, httpx" in done.stdout


def test_a_torch_that_sees_no_gpu_is_told(checked_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEVICE_CHECK_WORKLOAD")
    for name in ("torch", "transformers"):
        (tmp_path / "fake" / name).mkdir(parents=True)
    (tmp_path / "fake" / "torch" / "__init__.py").write_text(
        "__version__ = '2.13.0+cpu'\n"
        "class version: cuda = None\n"
        "class cuda: is_available = staticmethod(lambda: False)\n"
    )
    done = run(tmp_path / "out", {**os.environ, "PYTHONPATH": str(tmp_path / "fake")})
    assert done.returncode == 2
    assert "torch 2.13.0+cpu (CUDA None) sees no CUDA device, and NVML sees NVIDIA H200" in done.stdout


def test_a_gpu_that_others_use_is_left_alone(checked_rig: Any, tmp_path: Path) -> None:
    holder = checked_rig.hold(0, 20 * GIB)
    began = time.monotonic()
    done = run(tmp_path / "out")
    assert done.returncode == 2
    assert "what others run is not disturbed" in done.stdout
    assert str(holder.pid) in done.stdout
    assert holder.poll() is None
    assert time.monotonic() - began < 40


# -------------------------------------------------------------------------------------------------------- each deadline


def test_a_check_that_hangs_or_dies_stops_no_other_and_leaves_nothing(
    checked_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"device-check-{time.time_ns()}"
    monkeypatch.setenv("GPUGUARD_TEST_MARKER", marker)
    script = tmp_path / "script.py"
    gpu = query_rig().gpus[0]
    script.write_text(
        "import subprocess, sys, time\nsubprocess.Popen(['sleep', '60'])\nprint('so far', flush=True)\ntime.sleep(60)"
    )
    result, log = main.run_check(str(script), "facts", gpu, tmp_path / "one", 5.0)
    assert (result.ok, result.said) == (False, "it did not end within 5 s")
    assert "so far" in log
    script.write_text("import sys\nprint('Segmentation fault')\nsys.exit(139)")
    result, _ = main.run_check(str(script), "facts", gpu, tmp_path / "two", 20.0)
    assert (result.ok, result.said) == (False, "it ended with 139: Segmentation fault")
    result, _ = main.run_check(str(script), "facts", gpu, tmp_path / "three", 1.0)
    assert result.said.startswith("no time was left")
    monkeypatch.delenv("GPUGUARD_TEST_MARKER")
    assert wait_for(lambda: not started_by(marker), 5)


def test_an_exception_in_a_check_is_a_check_that_does_not_hold(
    checked_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: Device) -> Findings:
        raise KeyError("what was not expected")

    monkeypatch.setattr("scripts.device_check.facts.facts", broken)
    monkeypatch.setattr("scripts.device_check.workload.die_with_parent", lambda: None)
    assert main._one("facts", checked_device) == 0
    told = json.loads((checked_device.scratch / "result.json").read_text())
    assert (told["ok"], told["said"]) == (False, "KeyError: 'what was not expected'")
    assert "Traceback" in told["log"]


@pytest.mark.parametrize(("how", "status"), [("kill", -9), ("terminate", 1)])
def test_nothing_outlives_a_run_that_is_ended(
    checked_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, status: int
) -> None:
    marker = f"device-check-{time.time_ns()}"
    monkeypatch.setenv("GPUGUARD_TEST_MARKER", marker)
    with (tmp_path / "said").open("w") as said:
        running = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path / "out")], stdout=said)
    monkeypatch.delenv("GPUGUARD_TEST_MARKER")
    try:
        assert wait_for(lambda: "sampler" in (tmp_path / "said").read_text(), 60)
        assert wait_for(lambda: len(started_by(marker)) >= 3, 10), "the run, its check, and what that started"
        getattr(running, how)()
        assert running.wait(30) == status
        assert wait_for(lambda: not started_by(marker), 5), started_by(marker)
        report = json.loads((tmp_path / "out" / main.REPORT).read_text())
        assert (report["ok"], report["checks"][-1]["name"]) == (False, "sampler")
    finally:
        for process in started_by(marker):
            process.kill()
