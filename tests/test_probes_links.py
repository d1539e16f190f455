"""The probes of links: copies that arrive changed or never, PCIe below its best under load, and what sysfs shows."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.probes import iommu, p2p

from .link_stack import ask, left
from .test_probes_collectives import broken, real, stack

__all__ = ["broken", "real", "stack"]

BARE = "flags\t\t: fpu vme\n"
GUEST = "flags\t\t: fpu vme hypervisor\n"


class Sysfs:
    """A machine's /sys and /proc, as far as links go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "sys" / "bus" / "pci" / "devices"
        self.devices.mkdir(parents=True)
        (root / "proc").mkdir()
        self.cpuinfo(BARE)

    def cpuinfo(self, text: str) -> None:
        (self.root / "proc" / "cpuinfo").write_text(text)

    def put(self, *way: str, now: str = "2.5 GT/s PCIe", most: str = "32.0 GT/s PCIe", lanes: str = "16") -> Path:
        """A device at the end of a way of bridges, each with its link."""
        folder = self.root / "sys" / "devices" / "pci0000:00"
        for one in way:
            folder = folder / one
            if not folder.exists():
                folder.mkdir(parents=True)
                (self.devices / one).symlink_to(folder)
                self.link(folder, now, most, lanes)
        return folder

    @staticmethod
    def link(folder: Path, now: str, most: str, lanes: str, widest: str = "16") -> None:
        for name, text in (
            ("current_link_speed", now),
            ("max_link_speed", most),
            ("current_link_width", lanes),
            ("max_link_width", widest),
        ):
            (folder / name).write_text(text + "\n")

    def group(self, device: Path, number: int, kind: str) -> None:
        folder = self.root / "sys" / "kernel" / "iommu_groups" / str(number)
        (folder / "devices" / device.name).mkdir(parents=True)
        (folder / "type").write_text(kind + "\n")
        (device / "iommu_group").symlink_to(folder)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "machine")


def config(kind: int, control: int | None, readable: int = 4096) -> bytes:
    """A bridge's configuration space: the Express capability with its port type, and ACS with its control register."""
    space = bytearray(4096)
    space[0x06] = 0x10
    space[0x34] = 0x40
    space[0x40:0x43] = bytes([0x05, 0x60, 0])  # MSI first
    space[0x60:0x63] = bytes([0x10, 0, kind << 4])
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x1 << 16 | 0x150 << 20)  # error reporting, then ACS
    if control is not None:
        struct.pack_into("<IHH", space, 0x150, 0x000D | 0x1 << 16, 0x1F, control)
    return bytes(space[:readable])


# ----------------------------------------------------------------------------------------------------------- copies


def test_copies_are_compared_and_timed_in_every_direction(stack: Path, broken: Any) -> None:
    told = ask(stack, "p2p", gpus=3, check="copies")
    assert told.answer["pairs"] == 6
    assert told.answer["access"][0] == [None, True, True]
    assert told.answer["gb_per_s"][1][1] is None
    assert told.said.startswith("P2P access in 6 of 6 directions; copies whole, ")
    broken("no_p2p")
    assert ask(stack, "p2p", gpus=2).said.startswith("P2P access in 0 of 2 directions; copies whole, ")


@pytest.mark.parametrize("how", ["corrupt", "lost"])
def test_a_copy_that_arrives_changed_or_not_at_all_is_a_defect_of_p2p(stack: Path, broken: Any, how: str) -> None:
    broken(how)
    told = ask(stack, "p2p", gpus=2)
    assert told.defect is not None
    assert told.defect[0] == "comm.p2p"
    assert told.defect[1].startswith(
        f"a copy from GPU 0 to GPU 1 arrived with {16 << 20} wrong bytes of {16 << 20} (2 of 2 directions)"
    )


def test_a_copy_that_hangs_is_told_by_its_pair_and_leaves_nothing(stack: Path, broken: Any, tmp_path: Path) -> None:
    broken("hang_copy")
    began = time.monotonic()
    told = ask(stack, "p2p", gpus=2, limit_s=1)
    assert told.defect == ("hang.timeout", "copies: it did not return from 'copy from GPU 0 to GPU 1'")
    assert time.monotonic() - began < 15
    assert left(str(tmp_path)) == []


def test_copies_want_two_gpus_and_a_torch_with_cuda(stack: Path, fake_python: Path, broken: Any) -> None:
    told = ask(stack, "p2p", gpus=1)
    assert told.absent is not None
    assert told.absent[0] == "gpus"
    assert ask(fake_python, "p2p", gpus=2).absent == ("package", "this stack has no torch")
    broken("no_cuda")
    assert ask(stack, "p2p", gpus=2).absent == ("cuda", "this stack's torch 2.9.0+cu130 has no CUDA")


@pytest.mark.real_server
@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", ["copies", "links"])
def test_real_copies_are_compared_and_timed(real: Path, check: str) -> None:
    told = ask(real, "p2p", check=check, devices=["cpu", "cpu"])
    assert "GB/s" in told.said


@pytest.mark.real_server
@pytest.mark.timeout(180)
def test_a_real_torch_answers_for_all_parts_in_one_process(real: Path) -> None:
    told = ask(real, "p2p", all=True, devices=["cpu", "cpu"])
    assert told.answer["holds"] == ["torch", "copies", "links"]


# ------------------------------------------------------------------------------------------------- torch, and shared


def test_one_process_answers_for_torch_copies_and_links(stack: Path) -> None:
    told = ask(stack, "p2p", gpus=2, all=True)
    assert told.answer["holds"] == ["torch", "copies", "links"]
    assert told.said.startswith("2 GPU(s) compute with torch 2.9.0+cu130 (CUDA 13.0); P2P access in 2 of 2 directions;")
    assert [len(told.answer["links"]["links"]), told.answer["copies"]["pairs"]] == [2, 2]


def test_one_gpu_has_torch_and_a_link(stack: Path) -> None:
    assert ask(stack, "p2p", gpus=1, all=True).answer["holds"] == ["torch", "links"]


@pytest.mark.parametrize(
    ("how", "holds"),
    [
        ("corrupt", ["torch", "links"]),
        ("hang_copy", ["torch", "links"]),
        ("wrong_products", ["copies", "links"]),
        ("crash_compute", ["copies", "links"]),
        ("crash_compute hang_copy", ["links"]),
        ("no_cuda", []),
    ],
)
def test_a_part_that_is_broken_takes_no_other_along(stack: Path, broken: Any, how: str, holds: list[str]) -> None:
    broken(*how.split())
    began = time.monotonic()
    told = ask(stack, "p2p", gpus=2, all=True, limit_s=1)
    assert told.defect is None
    assert told.absent is None
    assert told.answer["holds"] == holds
    assert time.monotonic() - began < 15


def test_a_shared_answer_ends_in_time_with_what_it_has(stack: Path, broken: Any) -> None:
    broken("hang_copy")
    assert ask(stack, "p2p", gpus=2, all=True, shared_s=2).answer["holds"] == []


# ------------------------------------------------------------------------------------------------------------ links


@pytest.fixture
def links(stack: Path, sysfs: Sysfs, broken: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks about the link of one GPU, which is idle, and as fast as the stand-in makes it, under load."""

    def look(gpu: Path, *what: str, **nvml: int) -> Any:
        monkeypatch.setenv("STANDIN_LINK", str(gpu))
        broken(*what)
        rig: list[dict[str, Any]] = [{"uuid": "GPU-0", "pci": "0000" + gpu.name.upper(), "sm": "120", **nvml}]
        cpuinfo = str(sysfs.root / "proc" / "cpuinfo")
        return ask(stack, "p2p", gpus=1, rig=rig, check="links", sysfs=str(sysfs.devices), cpuinfo=cpuinfo)

    return look


def test_a_link_that_only_idles_slowly_is_well(links: Any, sysfs: Sysfs) -> None:
    told = links(sysfs.put("0000:00:01.0", "0000:16:00.0"))
    (link,) = told.answer["links"]
    assert (link["gen"], link["width"], link["gen_max"], link["width_max"]) == (5, 16, 5, 16)
    assert told.said.startswith("GPU 0: PCIe gen 5 x16 under load, ")
    assert link["busy_s"] < p2p.LOAD_S / 2  # what is at its best needs no more load


def test_a_link_below_what_both_ends_can_is_a_fault_of_the_machine(links: Any, sysfs: Sysfs) -> None:
    gpu = sysfs.put("0000:00:01.0", "0000:16:00.0", now="8.0 GT/s PCIe", lanes="8")
    told = links(gpu, "slow_link")
    assert told.defect is not None
    assert told.defect[0] == "hardware"
    assert told.defect[1].startswith("GPU 0: PCIe gen 3 x8 under load where GPU and slot can do gen 5 x16, ")


def test_a_slot_that_can_no_more_is_no_fault(links: Any, sysfs: Sysfs) -> None:
    gpu = sysfs.put("0000:00:01.0", "0000:16:00.0", now="16.0 GT/s PCIe", lanes="8")
    sysfs.link(gpu.parent, "16.0 GT/s PCIe", "16.0 GT/s PCIe", "8", widest="8")
    assert links(gpu, "slow_link").said.startswith("GPU 0: PCIe gen 4 x8 under load, ")


def test_what_the_firmware_forbids_or_the_board_does_not_wire_is_no_fault(links: Any, sysfs: Sysfs) -> None:
    gpu = sysfs.put("0000:00:01.0", "0000:16:00.0", now="16.0 GT/s PCIe", lanes="8")
    assert links(gpu, "slow_link", pcie_gen=4, pcie_width_max=8).said.startswith("GPU 0: PCIe gen 4 x8 under load, ")
    for nvml in ({"pcie_gen": 5, "pcie_width_max": 8}, {"pcie_gen": 4, "pcie_width_max": 16}):
        told = links(gpu, "slow_link", **nvml)
        assert told.defect is not None
        assert told.defect[0] == "hardware"


@pytest.mark.parametrize("how", ["no slot", "virtual slot", "a guest"])
def test_a_slot_that_is_not_really_seen_is_not_judged(links: Any, sysfs: Sysfs, how: str) -> None:
    gpu = sysfs.put("0000:00:01.0", "0000:16:00.0", now="8.0 GT/s PCIe")
    if how == "no slot":
        for file in gpu.parent.glob("*_link_*"):
            file.unlink()
    elif how == "virtual slot":
        sysfs.link(gpu.parent, "Unknown", "Unknown", "0", widest="255")
    else:
        sysfs.cpuinfo(GUEST)
    told = links(gpu, "slow_link")
    assert told.said.startswith("GPU 0: PCIe gen 3 x16 under load (what its slot can do is not known), ")


def test_a_link_that_sysfs_does_not_show_is_told(links: Any, sysfs: Sysfs) -> None:
    assert links(sysfs.devices / "0000:17:00.0", "slow_link").said.startswith("GPU 0: PCIe speed not readable, ")


@pytest.mark.parametrize("script", [p2p, iommu])
def test_nvml_and_sysfs_spell_addresses_differently(script: Any) -> None:
    assert script.sysfs_name("00000000:C1:00.0") == "0000:c1:00.0"
    assert script.sysfs_name("00010000:01:00.0") == "10000:01:00.0"
    assert script.sysfs_name("") == ""


# ------------------------------------------------------------------------------------------------------------ iommu


def ways(sysfs: Sysfs, *gpus: Path, nvlinks: tuple[int, ...] = ()) -> Any:
    rig: list[dict[str, Any]] = [
        {"uuid": f"GPU-{place}", "pci": "0000" + gpu.name, "nvlinks": (*nvlinks, 0, 0)[place]}
        for place, gpu in enumerate(gpus)
    ]
    return ask("python3", "iommu", rig=rig, root=str(sysfs.root))


def behind_a_switch(sysfs: Sysfs, control: int | None, readable: int = 4096) -> tuple[Path, Path]:
    gpus = (
        sysfs.put("0000:00:01.0", "0000:10:00.0", "0000:11:00.0", "0000:16:00.0"),
        sysfs.put("0000:00:01.0", "0000:10:00.0", "0000:11:01.0", "0000:17:00.0"),
    )
    for bridge, kind in (("0000:00:01.0", 4), ("0000:10:00.0", 5), ("0000:11:00.0", 6), ("0000:11:01.0", 6)):
        (sysfs.devices / bridge / "config").write_bytes(config(kind, control, readable))
    return gpus


def test_acs_that_redirects_at_a_switch_is_told_by_its_ports(sysfs: Sysfs) -> None:
    told = ways(sysfs, *behind_a_switch(sysfs, 0x1D))
    assert told.answer["redirecting"] == ["0000:11:00.0", "0000:11:01.0"]
    assert told.said == "no IOMMU; ACS redirects traffic between GPUs at 0000:11:00.0, 0000:11:01.0"


def test_acs_leads_nothing_astray_where_every_gpu_has_nvlink(sysfs: Sysfs) -> None:
    gpus = behind_a_switch(sysfs, 0x1D)
    told = ways(sysfs, *gpus, nvlinks=(18, 18))
    assert told.answer["redirecting"] == []
    assert told.answer["acs_on"] == ["0000:11:00.0", "0000:11:01.0"]
    assert told.said.endswith("at 0000:11:00.0, 0000:11:01.0; these GPUs have NVLink")
    assert ways(sysfs, *gpus, nvlinks=(18, 0)).answer["redirecting"] == ["0000:11:00.0", "0000:11:01.0"]


@pytest.mark.parametrize("control", [0x11, None])
def test_acs_that_redirects_nothing_is_well(sysfs: Sysfs, control: int | None) -> None:
    told = ways(sysfs, *behind_a_switch(sysfs, control))
    assert told.answer["redirecting"] == []
    assert told.said == "no IOMMU; ACS redirects nothing between GPUs"


def test_what_only_root_may_read_is_unknown_and_not_off(sysfs: Sysfs) -> None:
    told = ways(sysfs, *behind_a_switch(sysfs, 0x1D, readable=64))
    assert told.answer["redirecting"] == []
    assert told.said == "no IOMMU; ACS of 3 bridges is not readable (only root may)"


def test_root_ports_are_no_switch(sysfs: Sysfs) -> None:
    gpus = sysfs.put("0000:00:01.0", "0000:16:00.0"), sysfs.put("0000:00:02.0", "0000:17:00.0")
    for bridge in ("0000:00:01.0", "0000:00:02.0"):
        (sysfs.devices / bridge / "config").write_bytes(config(4, 0x1D))
    assert ways(sysfs, *gpus).said == "no IOMMU; no switch between GPUs"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("DMA-FQ", "the IOMMU translates the traffic of GPUs (1; iommu=pt would let it pass); no switch between GPUs"),
        ("identity", "the IOMMU lets the GPUs' traffic pass; no switch between GPUs"),
    ],
)
def test_an_iommu_is_told_with_what_it_does(sysfs: Sysfs, kind: str, said: str) -> None:
    gpu = sysfs.put("0000:00:01.0", "0000:16:00.0")
    (sysfs.root / "sys" / "class" / "iommu" / "dmar0").mkdir(parents=True)
    (sysfs.root / "proc" / "cmdline").write_text(
        "quiet intel_iommu=on xiommu=1 pcie_acs_override=downstream root=/dev/sda\n"
    )
    sysfs.group(gpu, 7, kind)
    told = ways(sysfs, gpu)
    assert told.said == said
    assert told.answer["cmdline"] == ["intel_iommu=on", "pcie_acs_override=downstream"]
    assert told.answer["groups"]["0000:16:00.0"] == {"number": "7", "type": kind, "members": ["0000:16:00.0"]}


def test_a_machine_without_gpus_or_that_hides_them_is_not_judged(sysfs: Sysfs) -> None:
    assert ways(sysfs).absent == ("gpus", "this rig has no GPU")
    told = ways(sysfs, sysfs.devices / "0000:99:00.0")
    assert told.absent is not None
    assert told.absent[0] == "tools"
    assert "does not show the GPUs (0000:99:00.0)" in told.absent[1]


@pytest.mark.parametrize(
    "space",
    [
        b"",
        b"\x00" * 64,
        b"\xff" * 4096,
        bytes([0x10] * 0x34) + b"\x34" + b"\x34" * 4000,
        config(6, 0x1D)[:0x100] + struct.pack("<I", 0x0002 | 0x100 << 20) + bytes(100),
    ],
)
def test_nonsense_in_a_configuration_space_neither_loops_nor_raises(space: bytes) -> None:
    assert iommu.port_type(space) in (None, 3, 6)
    assert iommu.acs_control(space) == (None if len(space) < 0x104 or space[0] == 0xFF else 0)
