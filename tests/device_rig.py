"""A machine with one H200, seen through the NVML stand-in, on which scripts/device-check runs without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from scripts.device_check.result import Device
from scripts.device_check.served import PORTS

from .conftest import own_ports

FakeRigs = Any
WORKLOAD = Path(__file__).with_name("device_workload.py")

_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "{rows}" ;;
*) echo "| NVIDIA-SMI 610.10   KMD Version: {driver}   CUDA UMD Version: {cuda} |" ;;
esac
"""


def install_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, rig: Any, **lies: str) -> None:
    """An nvidia-smi that prints what the stand-in's machine is, but for the lies."""
    gpu = rig.shared.gpu[0]
    told = {
        "name": gpu.name.decode(),
        "uuid": gpu.uuid.decode(),
        "memory": str(gpu.total >> 20),
        "driver": rig.shared.driver.decode(),
        "sm": f"{gpu.cc_major}.{gpu.cc_minor}",
        "bus": gpu.bus.decode(),
        "cuda": "13.0",
        **lies,
    }
    folder.mkdir(exist_ok=True)
    tool = folder / "nvidia-smi"
    row = ", ".join(told[name] for name in ("name", "uuid", "memory", "driver", "sm", "bus"))
    tool.write_text(_SMI.format(rows=row, driver=told["driver"], cuda=told["cuda"]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def smi() -> Any:
    """``install_smi``."""
    return install_smi


@pytest.fixture
def checked_rig(fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    found = fake_rig(n=1, card="h200")
    found.apply(monkeypatch)
    monkeypatch.setenv("DEVICE_CHECK_WORKLOAD", str(WORKLOAD))
    monkeypatch.setenv(PORTS, own_ports())
    install_smi(tmp_path / "bin", monkeypatch, found)
    return found


@pytest.fixture
def checked_device(checked_rig: Any, tmp_path: Path) -> Device:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return Device(checked_rig.uuid(0), "0", folder)
