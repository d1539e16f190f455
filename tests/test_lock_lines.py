"""The header tells where GPUs are locked, who may not see that, and what is in quarantine: only where it matters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.quarantine import put
from pytest_gpuguard.report.header import lock_lines
from tests.standin.fixtures import FakeRig, FakeRigFactory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks are for Linux only")

ON_GPUS = """
@needs_gpus(2)
@serves("sglang", MODEL)
def test_gpus(): ...
"""
ON_CPU = """
@serves("sglang", MODEL, CPU)
def test_cpu(): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "locks"
    path.mkdir()
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(path))
    return path


@pytest.fixture
def fake(fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch) -> FakeRig:
    rig = fake_rig(3)
    rig.apply(monkeypatch)
    return rig


def told(result: Any) -> list[str]:
    return [line for line in result.outlines if line.startswith("locks: ") or "in quarantine" in line]


@pytest.mark.parametrize("workers", [(), ("-n2",)])
def test_a_run_that_leases_gpus_tells_the_folder_once_and_what_is_in_quarantine(
    claims: Any, fake: FakeRig, folder: Path, workers: tuple[str, ...]
) -> None:
    if workers:
        pytest.importorskip("xdist")
    put(Locks("a.py::b", folder), fake.uuid(0), "infra.dirty_gpu", "40 GiB did not come back")
    result = claims(ON_GPUS + ON_CPU, *workers)
    lines = told(result)
    assert [line for line in lines if f"locks: {folder} (all who use these GPUs must see" in line] == lines[:1]
    assert sum(line.startswith(f"{fake.uuid(0)} is in quarantine since") for line in lines) == 1
    assert "40 GiB did not come back, noticed in a.py::b (gpuguard who --clear lifts it)" in lines[-1]
    assert result.ret == 0


def test_runs_that_lease_no_gpu_do_not_tell_it(claims: Any, fake: FakeRig) -> None:
    assert told(claims(ON_CPU)) == []
    assert told(claims(ON_GPUS, "-q")) == []
    assert told(claims(ON_GPUS, "--collect-only")) == []


def test_machines_without_gpus_and_simulated_ones_do_not_tell_it(
    claims: Any, fake: FakeRig, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(claims(ON_GPUS, "--gpuguard-rig", "sim:h200:2", stack="")) == []
    monkeypatch.delenv("GPUGUARD_FAKE_RIG")
    result = claims(ON_GPUS)
    result.stdout.fnmatch_lines(["rig: no GPUs*"])
    assert told(result) == []


def test_a_folder_that_cannot_be_used_is_told_and_not_raised(
    claims: Any, fake: FakeRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "link").symlink_to(folder)
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(folder / "link"))
    (line,) = told(claims(ON_GPUS))
    assert "is a symbolic link" in line


def test_lines_are_not_longer_than_people_read_and_do_nothing_to_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("a" * 60)
    deep.mkdir()
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(deep))
    put(Locks("", deep), "GPU-1", "hardware", "\x1b[31mred " * 100)
    first, *_, last = lock_lines()
    assert first.count(str(deep)) == 1
    assert "mount it at the same path" in first
    assert r"\x1b[31mred" in last
    assert "\x1b" not in last
    assert len(last) < 300
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", "/dev/shm")
    assert lock_lines()[0] == (
        "locks: /dev/shm (all who use these GPUs must see this folder; containers: -v /dev/shm:/dev/shm)"
    )
