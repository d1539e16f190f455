"""Whether PCI traffic between GPUs is led astray: IOMMU translation, and ACS redirection at switches, from sysfs.

Needs no GPU context and changes no setting; what only root may read is told as unknown, never as off.
"""

from __future__ import annotations

import os
import re
import struct
from typing import Any

from pytest_gpuguard.probes import kit

#: PCI Express capability, and the extended one of access control (PCI Express Base Specification, 7.5.3 and 7.7.11).
EXPRESS, ACS = 0x10, 0x000D
#: Port types of the Express capability.
ROOT_PORT, DOWNSTREAM = 4, 6
#: ACS control bits that send peer traffic up to the root: request redirect, completion redirect.
REDIRECT = 0x04 | 0x08
#: The vendor of a device that does not answer.
ASLEEP = b"\xff\xff"
WORDS = re.compile(r"\b(?:intel_iommu|amd_iommu|iommu|iommu\.\w+|pcie_acs_override|pci)=\S+")


def run() -> None:
    """Each GPU of the rig: its IOMMU group, and the bridges above it."""
    root = str(kit.args.get("root", "/"))
    devices = os.path.join(root, "sys/bus/pci/devices")
    if not kit.rig:
        kit.absent("gpus", "this rig has no GPU")
    kit.stage("sysfs")
    addresses = [sysfs_name(str(one.get("pci") or "")) for one in kit.rig]
    missing = [one for one in addresses if not one or not os.path.isdir(os.path.join(devices, one))]
    if missing:
        kit.absent("tools", f"{devices} does not show the GPUs ({', '.join(missing) or 'no addresses'})")
    units = listed(os.path.join(root, "sys/class/iommu"))
    groups = {one: group_of(devices, one) for one in addresses}
    translated = [one for one, group in groups.items() if group is not None and group["type"].startswith("DMA")]
    bridges = shared_bridges(devices, addresses)
    on = [one["pci"] for one in bridges if one["redirects"]]
    nvlinked = all(one.get("nvlinks") for one in kit.rig)  # then what GPUs tell each other is not on PCIe
    redirecting = [] if nvlinked else on
    unknown = [one["pci"] for one in bridges if one["redirects"] is None]
    words = WORDS.findall(read(os.path.join(root, "proc/cmdline")).decode("utf-8", "replace"))
    kit.answer(
        units=units,
        groups=groups,
        translated=translated,
        bridges=bridges,
        acs_on=on,
        nvlinked=nvlinked,
        redirecting=redirecting,
        unknown=unknown,
        cmdline=words,
        said=said(units, translated, bridges, on, unknown) + ("; these GPUs have NVLink" if on and nvlinked else ""),
    )


def said(
    units: list[str], translated: list[str], bridges: list[dict[str, Any]], on: list[str], unknown: list[str]
) -> str:
    """One line for the report."""
    if not units:
        first = "no IOMMU"
    elif translated:
        first = f"the IOMMU translates the traffic of GPUs ({len(translated)}; iommu=pt would let it pass)"
    else:
        first = "the IOMMU lets the GPUs' traffic pass"
    if on:
        return f"{first}; ACS redirects traffic between GPUs at {', '.join(on)}"
    if unknown:
        return f"{first}; ACS of {len(unknown)} bridges is not readable (only root may)"
    if not bridges:
        return f"{first}; no switch between GPUs"
    return f"{first}; ACS redirects nothing between GPUs"


def shared_bridges(devices: str, addresses: list[str]) -> list[dict[str, Any]]:
    """The switch ports between GPUs: above one of them, and below a bridge that another is under too.

    A root port is none: traffic between two of them goes through the root in any case.
    """
    ways = {one: way(devices, one) for one in addresses}
    found: dict[str, dict[str, Any]] = {}
    for mine, path in ways.items():
        for place, bridge in enumerate(path):
            above = path[:place]
            others = [other for other in ways if other != mine and set(above) & set(ways[other])]
            if not others or bridge in found:
                continue
            config = read(os.path.join(devices, bridge, "config"))
            kind = port_type(config)
            if kind in (DOWNSTREAM, None):
                control = acs_control(config)
                redirects = None if control is None else bool(control & REDIRECT)
                found[bridge] = {"pci": bridge, "above": mine, "acs_control": control, "redirects": redirects}
    return list(found.values())


def way(devices: str, address: str) -> list[str]:
    """The bridges from the root down to a device, as sysfs nests their folders."""
    parts = os.path.realpath(os.path.join(devices, address)).split(os.sep)[:-1]
    return [part for part in parts if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)]


def group_of(devices: str, address: str) -> dict[str, Any] | None:
    """The IOMMU group of a device: its number, the type of its domain ("DMA", "DMA-FQ", "identity"), its members."""
    folder = os.path.join(devices, address, "iommu_group")
    if not os.path.isdir(folder):
        return None
    return {
        "number": os.path.basename(os.path.realpath(folder)),
        "type": read(os.path.join(folder, "type")).decode("utf-8", "replace").strip(),
        "members": listed(os.path.join(folder, "devices")),
    }


def port_type(config: bytes) -> int | None:
    """The type of an Express port; None when it is none, or its capabilities are not readable."""
    if len(config) < 64 or config[:2] == ASLEEP or not config[0x06] & 0x10:
        return None
    at, seen = config[0x34] & 0xFC, set()
    while at and at not in seen and at + 4 <= len(config):
        seen.add(at)
        if config[at] == EXPRESS:
            return config[at + 2] >> 4
        at = config[at + 1] & 0xFC
    return None


def acs_control(config: bytes) -> int | None:
    """The control register of access control services, 0 for a bridge without; None when not readable.

    Others than root get the first 64 bytes of a configuration space, without an error.
    """
    if len(config) < 0x104 or config[:2] == ASLEEP:
        return None
    at, seen = 0x100, set()
    while at and at not in seen and at + 8 <= len(config):
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == ACS:
            return int(struct.unpack_from("<H", config, at + 6)[0])
        at = (header >> 20) & 0xFFC
    return 0


def sysfs_name(pci: str) -> str:
    """NVML writes the domain with eight digits, sysfs with four or more: ``0000:16:00.0``."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if rest else ""


def listed(folder: str) -> list[str]:
    """The names in a folder, sorted; none when there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read(path: str) -> bytes:
    """A small file; b"" when there is none, or it is not for us."""
    try:
        with open(path, "rb") as file:
            return file.read(8192)
    except OSError:
        return b""


if __name__ == "__main__":
    kit.main(run)
