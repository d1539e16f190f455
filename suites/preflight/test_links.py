"""The ways between the GPUs, and to the host: copies arrive whole, PCIe links run at full speed, nothing led astray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_gpuguard import claim, needs_gpus, works

Probe = Callable[..., Any]

# Torch on the GPUs, copies and links are looked at in one process, whose answer the claims share. What does not hold
# there is asked once more by itself: so its log is its own, and a hang is no verdict about the others.


@needs_gpus(2)
@works
@claim(
    id="preflight.p2p",
    title="copies between any two GPUs arrive whole",
    source="local-inference-lab/rtx6kpro#15; noonghunna/club-3090#873",
    minutes=1,
)
def test_copies_between_gpus_arrive_whole(probe: Probe) -> None:
    """Which GPUs may read each other's memory, and how fast, is told: without P2P a copy goes through the host."""
    part(probe, "copies")


@needs_gpus(1)
@works
@claim(
    id="preflight.pcie",
    title="PCIe links run as fast and as wide as GPU and slot can",
    source="PCI Express Base Specification, 7.5.3 (link capabilities and status)",
    minutes=1,
)
def test_pcie_links_are_at_full_speed_under_load(probe: Probe) -> None:
    """Read while the link is busy: idle ones run slower on purpose. A slot with fewer lanes is no fault of the link."""
    part(probe, "links")


@needs_gpus(2)
@works
@claim(
    id="preflight.acs",
    title="no switch sends traffic between GPUs up to the root",
    source="NVIDIA NCCL documentation, Troubleshooting, PCI Access Control Services",
    minutes=1,
)
def test_acs_redirects_nothing_between_gpus(probe: Probe) -> None:
    """Whether an IOMMU translates is told, and is no defect by itself. GPUs that all have NVLink do not go that way."""
    found = probe("iommu", gpus=0, deadline="20s").data
    assert not found["redirecting"], (
        f"ACS redirects peer traffic at {', '.join(found['redirecting'])}, so P2P takes the long way or hangs: "
        "turn ACS off in the firmware, or in each bridge with setpci … ECAP_ACS+0x6.w=0000"
    )


def part(probe: Probe, name: str) -> None:
    """One part of the shared answer, or an answer of its own."""
    if name not in probe("p2p", args={"all": True}, gpus="all", deadline="4m").data["holds"]:
        probe("p2p", args={"check": name}, gpus="all", deadline="3m")
