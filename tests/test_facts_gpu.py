"""Rigs as values: JSON, one-line descriptions, architectures and the catalogue."""

from __future__ import annotations

import json
import pickle
from importlib.resources import files

import pytest

from pytest_gpuguard.claims.architectures import SM_ARCHITECTURES
from pytest_gpuguard.facts.catalogue import MIB, cards
from pytest_gpuguard.facts.faults import DRIVER_MISMATCH, HARDWARE, HostFault, NvmlTimeout, nvml_fault
from pytest_gpuguard.facts.gpu import Gpu, GpuMemory, Rig, arch_of, known_sms


def gpu(index: int, **changes: object) -> Gpu:
    base: dict[str, object] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "bus_id": f"00000000:{index:02X}:00.0",
        "compute_capability": (9, 0),
        "sm": "90",
        "memory": GpuMemory(143771 * MIB, 0, 143157 * MIB, 614 * MIB, 2),
    }
    return Gpu(**(base | changes))  # type: ignore[arg-type]


def test_the_catalogue_and_the_cheap_table_agree() -> None:
    assert known_sms() == SM_ARCHITECTURES
    for card in cards().values():
        assert card.sm in SM_ARCHITECTURES or not card.name.startswith(("NVIDIA", "Tesla")), card.slug
        assert card.sources, card.slug
        assert (card.total_mib is None) == card.unified, card.slug


def test_every_card_is_accepted_at_the_size_it_is_sold_with() -> None:
    sold = {
        "rtx-pro-6000-server": 96,
        "h200": 141,
        "h100": 80,
        "a100-80": 80,
        "a100-40": 40,
        "l40s": 48,
        "l4": 24,
        "a10": 24,
        "t4": 16,
        "b200": 180,
        "rtx-5090": 32,
        "rtx-6000d": 84,
    }
    for slug, gb in sold.items():
        total = cards()[slug].total_mib
        assert total is not None
        assert total * MIB >= gb * 10**9, slug


@pytest.mark.parametrize(
    ("sm", "arch"),
    [("75", "turing"), ("86", "ampere"), ("89", "ada"), ("90", "hopper"), ("121", "blackwell"), ("999", "unknown")],
)
def test_architectures(sm: str, arch: str) -> None:
    assert arch_of(sm) == arch


def test_the_catalogue_is_part_of_the_package() -> None:
    assert files("pytest_gpuguard.facts").joinpath("catalogue.toml").is_file()


def test_descriptions() -> None:
    assert Rig().describe() == "no GPUs"
    assert Rig(reason="no NVIDIA driver").describe() == "no GPUs (no NVIDIA driver)"
    assert Rig((gpu(0),), driver="595.80").describe() == "1× NVIDIA H200 (SM90, 140.4 GiB), driver 595.80"
    assert Rig((gpu(0),), kind="simulated").describe() == "simulated: 1× NVIDIA H200 (SM90, 140.4 GiB)"
    assert (
        Rig((gpu(0),), hidden=7).describe() == "1× NVIDIA H200 (SM90, 140.4 GiB), 7 more outside CUDA_VISIBLE_DEVICES"
    )
    mig = gpu(0, mig=True, memory=GpuMemory())
    assert Rig((mig,)).describe() == "1× NVIDIA H200 (SM90, memory unknown, MIG, 0 devices)"


def test_json_keeps_everything() -> None:
    rig = Rig(
        (gpu(0), gpu(1, fault="lost")),
        driver="580.1",
        cuda="13.0",
        topology={("GPU-0", "GPU-1"): "PIX", ("GPU-1", "GPU-0"): "PIX"},
        p2p={("GPU-0", "GPU-1"): "OK"},
        nvlink={("GPU-0", "GPU-1"): 18},
        kind="replayed",
        faults=(HostFault(HARDWARE, "lost", "reboot", "GPU-1"),),
        hidden=2,
        reason="because",
    )
    again = Rig.from_dict(json.loads(json.dumps(rig.to_dict())))
    assert again == rig
    assert again.gpus[0].compute_capability == (9, 0)
    assert again.gpu("GPU-1").fault == "lost"
    assert again.usable == (gpu(0),)
    with pytest.raises(KeyError):
        again.gpu("GPU-9")


def test_faults_are_values_that_can_be_raised() -> None:
    fault = nvml_fault("NVMLError_LibRmVersionMismatch", 18)
    assert fault.outcome == DRIVER_MISMATCH
    assert fault == HostFault.from_dict(json.loads(json.dumps(fault.to_dict())))
    assert fault != nvml_fault("NVMLError_GpuIsLost", 15, "GPU-0")
    timeout = NvmlTimeout("nvmlInit", 10.0)
    assert pickle.loads(pickle.dumps(timeout)) == timeout
    assert "within 10 s" in str(timeout)
    with pytest.raises(ValueError, match="not a host fault"):
        HostFault("oom.weights", "x", "y")


@pytest.mark.parametrize("code", [4, 15, 16, 18, 999, 1234, None])
def test_every_nvml_error_has_a_cause_and_a_cure(code: int | None) -> None:
    fault = nvml_fault("NVMLError_Something", code, "GPU-0")
    assert "NVMLError_Something" in fault.cause
    assert fault.cure
