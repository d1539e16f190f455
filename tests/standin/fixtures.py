"""The ``fake_rig`` factory: a machine with as many GPUs of a card as a test asks for, seen through the real pynvml."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.facts.catalogue import cards
from tests.needs import need, need_tool

from . import standin

FakeRigFactory = Callable[..., "FakeRig"]


class FakeRig:
    """One stand-in machine. ``env`` is what a process needs to see it; ``shared`` is the mapped file itself.

    GPUs are named here by their NVML index. Changes act at once, also on processes that have NVML open.
    """

    def __init__(self, path: Path, library: Path) -> None:
        self.path = path
        self.shared: Any = standin.open_rig(path)
        search = os.pathsep.join([str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        self.env = {"LD_LIBRARY_PATH": search, "GPUGUARD_FAKE_RIG": str(path)}
        self._holders: list[subprocess.Popen[bytes]] = []

    def environ(self, **changes: str) -> dict[str, str]:
        """A whole environment that shows this rig, without the caller's CUDA_VISIBLE_DEVICES."""
        ours = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        return {**ours, **self.env, **changes}

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Show this rig to every process that the test starts from now on."""
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for key, value in self.env.items():
            monkeypatch.setenv(key, value)

    def uuid(self, gpu: int) -> str:
        """The UUID of a GPU."""
        return str(self.shared.gpu[gpu].uuid.decode())

    def alloc(self, gpu: int, nbytes: int, pid: int | None = None, sticky: bool = False) -> None:
        """``pid`` (default: this process) takes memory; it is free again when that process dies, unless sticky."""
        pid = pid or os.getpid()
        slots = self.shared.gpu[gpu].process
        slot = next((one for one in slots if one.pid == pid), None) or next(one for one in slots if one.pid == 0)
        slot.start, slot.sticky = standin.start_time(pid), sticky
        slot.bytes += nbytes
        slot.pid = pid

    def free(self, gpu: int, pid: int | None = None) -> None:
        """``pid`` gives back all it holds on the GPU."""
        for slot in self.shared.gpu[gpu].process:
            if slot.pid == (pid or os.getpid()):
                slot.pid = slot.bytes = slot.sticky = 0

    def hold(self, gpu: int, nbytes: int) -> subprocess.Popen[bytes]:
        """Start a process that holds memory until it is killed; killed at the end of the test in any case."""
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        self._holders.append(process)
        self.alloc(gpu, nbytes, process.pid)
        return process

    def leak(self, gpu: int, nbytes: int) -> None:
        """Memory that no process owns, as after a context that the driver did not clear."""
        self.shared.gpu[gpu].leaked = nbytes

    def account(self, gpu: int, pid: int, peak: int, start: float | None = None) -> None:
        """Accounting mode is on, and has this peak in bytes of a process begun at ``start`` (epoch; default: now)."""
        self.shared.gpu[gpu].accounting = 1
        slot = next(one for one in self.shared.gpu[gpu].account if one.pid in (0, pid))
        slot.peak, slot.start_us, slot.pid = peak, int((time.time() if start is None else start) * 1e6), pid

    def lose(self, gpu: int) -> None:
        """The GPU falls off the bus."""
        self.shared.gpu[gpu].lost = 1

    def hang(self, gpu: int) -> None:
        """Every call about the GPU hangs from now on."""
        self.shared.gpu[gpu].hang = 1

    def busy(self, gpu: int, sm_mhz: int, *, reasons: int = 0, utilization: int = 98) -> None:
        """The GPU works at this SM clock; ``reasons`` are nvml.h's nvmlClocksEventReason bits."""
        target = self.shared.gpu[gpu]
        target.sm_mhz, target.throttle_reasons, target.utilization = sm_mhz, reasons, utilization

    def xid(self, gpu: int, number: int) -> None:
        """The driver reports an Xid, and NVML its event."""
        self.shared.gpu[gpu].xid = number
        self.shared.gpu[gpu].xids += 1

    def double_bit(self, gpu: int) -> None:
        """NVML reports a double-bit ECC error."""
        self.shared.gpu[gpu].double_bits += 1

    def no_events(self, gpu: int) -> None:
        """NVML does not report Xid events of this GPU."""
        self.shared.gpu[gpu].no_events = 1

    def heal(self) -> None:
        """No GPU is lost or hangs, and the library works."""
        for gpu in self.shared.gpu:
            gpu.lost = gpu.hang = 0
        self.shared.init_result = self.shared.init_hang = self.shared.crash = self.shared.delay_us = 0

    def mismatch(self) -> None:
        """The driver in the kernel has another version than the library (18)."""
        self.shared.init_result = 18

    def put_at(self, gpu: int, bus: str) -> None:
        """Move a GPU to another PCI bus id, such as "00000000:C1:00.0"."""
        self.shared.gpu[gpu].bus = bus.encode()

    def link(self, links: int, peers: dict[int, list[str]] | None = None) -> None:
        """All GPUs get active NVLinks to switches; ``peers`` gives a GPU the bus ids at its links' other ends."""
        for index in range(self.shared.count):
            gpu = self.shared.gpu[index]
            gpu.links = links
            for number, bus in enumerate((peers or {}).get(index, [])):
                gpu.link_peer[number].value = bus.encode()

    def partition(self, gpu: int, *slices: tuple[str, int]) -> list[str]:
        """Turn MIG on, with (name, MiB) for each device; returns their UUIDs."""
        target = self.shared.gpu[gpu]
        target.mig, target.mig_count = 1, len(slices)
        for position, (name, mib) in enumerate(slices):
            device = target.mig_device[position]
            device.uuid = b"MIG-%08x-0000-5000-8000-%012d" % (0xB0000000 + position * 0x1000000, gpu)
            device.name, device.total = name.encode(), mib * standin.MIB
        return [target.mig_device[position].uuid.decode() for position in range(len(slices))]

    def close(self) -> None:
        """Let hanging calls go on, and end the processes that hold memory."""
        self.heal()
        for process in self._holders:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in libnvidia-ml.so.1, built once a session."""
    need(sys.platform == "linux", "the NVML stand-in needs Linux")
    return standin.build(tmp_path_factory.mktemp("nvml"), need_tool("gcc"))


@pytest.fixture
def fake_rig(nvml_library: Path, tmp_path: Path) -> Iterator[FakeRigFactory]:
    """A factory: ``fake_rig(n=8, card="rtx-pro-6000-server", driver="580.105.08")`` → FakeRig, all GPUs idle."""
    made: list[FakeRig] = []

    def make(
        n: int = 8, card: str = "rtx-pro-6000-server", driver: str = "580.105.08", cuda: int = 13000, links: int = 0
    ) -> FakeRig:
        rig = FakeRig(tmp_path / f"rig{len(made)}.bin", nvml_library)
        recorded = cards()[card]
        assert recorded.sm is not None
        for index in range(n):
            standin.fill_gpu(
                rig.shared.gpu[index],
                index,
                name=recorded.name,
                sm=recorded.sm,
                total_mib=recorded.total_mib,
                reserved_mib=recorded.reserved_mib or 0,
            )
            for other in range(n):
                level = (
                    0 if index == other else 10 if index // 2 == other // 2 else 40 if index // 4 == other // 4 else 50
                )
                rig.shared.topology[index][other] = level
        rig.shared.count, rig.shared.driver, rig.shared.cuda = n, driver.encode(), cuda
        if links:
            rig.link(links)
        rig.shared.magic = standin.MAGIC
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()
