"""Xid events of leased GPUs, through the real pynvml on the NVML stand-in, and what happens when NVML is ill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpuguard.facts.kernel import KernelWatch, Paths
from pytest_gpuguard.facts.nvml import NvmlChild
from pytest_gpuguard.facts.xid_watch import GpuEvent, XidWatch
from tests.standin.fixtures import FakeRig, FakeRigFactory


def until(true: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def watch(rig: FakeRig, *gpus: int) -> XidWatch:
    made = XidWatch([rig.uuid(gpu) for gpu in gpus], rig.environ())
    made.start()
    assert made.registered.wait(20)
    return made


def known(events: tuple[GpuEvent, ...]) -> list[tuple[str, str, int]]:
    return [(event.uuid, event.kind, event.number) for event in events]


def test_events_of_leased_gpus_are_told_with_uuid_number_and_time(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(4)
    rig.xid(1, 31)  # before the window
    listening = watch(rig, 1, 2)
    before = time.time()
    rig.xid(0, 79)  # not leased
    rig.xid(1, 79)
    until(listening.events)
    rig.double_bit(2)
    until(lambda: len(listening.events()) >= 2)
    assert known(listening.events()) == [(rig.uuid(1), "xid", 79), (rig.uuid(2), "ecc", 0)]
    assert before <= listening.events()[0].at <= time.time()
    assert listening.denied() == ()
    listening.close()


def test_a_gpu_that_is_lost_is_told_with_its_last_xid(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    listening = watch(rig, 0, 1)
    rig.xid(1, 79)
    rig.lose(1)
    until(lambda: len(listening.events()) >= 2)
    assert known(listening.events()) == [(rig.uuid(1), "xid", 79), (rig.uuid(1), "lost", 0)]
    listening.close()


def test_a_gpu_without_events_is_a_reason_and_the_others_are_watched(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    rig.no_events(0)
    rig.shared.gpu[0].ecc = 0
    listening = watch(rig, 0, 1)
    assert [(one.what, one.why) for one in listening.denied()] == [("NVML events", f"{rig.uuid(0)}: not supported")]
    rig.xid(1, 48)
    until(listening.events)
    listening.close()
    with NvmlChild(rig.environ()) as nvml:
        assert nvml.xid_events([rig.uuid(0), rig.uuid(1)]) == {rig.uuid(0): False, rig.uuid(1): True}


def test_a_broken_driver_is_a_reason_and_no_error(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    rig.mismatch()
    listening = watch(rig, 0)
    assert [one.why for one in listening.denied()] == [f"{rig.uuid(0)}: NVMLError_LibRmVersionMismatch"]
    listening.close()


def test_a_driver_that_hangs_keeps_nobody_waiting(fake_rig: FakeRigFactory, tmp_path: Path) -> None:
    rig = fake_rig(1)
    rig.hang(0)
    events = XidWatch([rig.uuid(0)], rig.environ())
    kernel = KernelWatch({rig.uuid(0): ""}, paths=Paths(tmp_path, tmp_path, tmp_path, ()), events=events)
    began = time.monotonic()
    kernel.start()
    assert kernel.collect().events == ()
    pid = events.pid
    kernel.close()
    assert time.monotonic() - began < 2  # some hundredths of a second; the hang lasts for ever
    assert pid is not None
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_child_that_is_killed_is_no_error(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    listening = watch(rig, 0)
    assert listening.pid is not None
    os.kill(listening.pid, signal.SIGKILL)
    assert listening.events(0.05) == ()
    listening.close()
    listening.close()


def test_without_gpus_there_is_no_child() -> None:
    listening = XidWatch([])
    listening.start()
    assert listening.pid is None
    assert (listening.events(), listening.denied()) == ((), ())


def test_without_pynvml_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpuguard.facts.nvml.binding_folder", lambda: None)
    listening = XidWatch(["GPU-1"])
    listening.start()
    assert [one.why for one in listening.denied()] == ["GPU-1: the Python package nvidia-ml-py is missing"]
