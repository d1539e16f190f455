"""From the NVML child's plain answers to values: pure, and the only place that knows the shape of those answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .faults import HostFault, nvml_fault
from .gpu import P2P_STATUS, TOPOLOGY_LEVELS, Gpu, Pair

_OURS = ("nvml_index", "nvlink_peers", "fault")


def as_gpu(index: int, facts: Mapping[str, Any]) -> Gpu:
    """The GPU at position ``index`` of the PCI order, from the child's answer about it."""
    known = {key: value for key, value in facts.items() if key not in _OURS and value is not None}
    known.setdefault("uuid", _stand_in_uuid(facts))
    known.setdefault("name", "unknown GPU")
    known.setdefault("bus_id", "")
    capability = facts.get("compute_capability")
    return Gpu.from_dict(
        {
            **known,
            "index": index,
            "sm": f"{capability[0]}{capability[1]}" if capability else "",
            "nvlinks": len(facts.get("nvlink_peers", ())),
            "fault": gpu_fault(known["uuid"], facts).cause if "fault" in facts else None,
        }
    )


def gpu_fault(uuid: str, facts: Mapping[str, Any]) -> HostFault:
    """The fault that the child met when it asked for these facts."""
    return nvml_fault(facts["fault"]["name"], facts["fault"]["code"], uuid)


def _stand_in_uuid(facts: Mapping[str, Any]) -> str:
    """A name for a GPU that was lost before anybody learnt its UUID."""
    return f"unknown-nvml-index-{facts['nvml_index']}"


@dataclass(frozen=True, slots=True)
class LinkTables:
    """How GPUs reach each other, by pairs of UUIDs: see ``Rig``."""

    topology: dict[Pair, str]
    p2p: dict[Pair, str]
    nvlink: dict[Pair, int]

    def add(self, here: Mapping[str, Any], there: Mapping[str, Any], row: Mapping[str, Any], buses: set[str]) -> None:
        """Enter the child's answer about one pair; ``buses`` are the PCI bus ids of all GPUs of the machine."""
        pair = here["uuid"], there["uuid"]
        if row["topology"] is not None:
            self.topology[pair] = TOPOLOGY_LEVELS.get(row["topology"], "SYS")
        if row["p2p"] is not None:
            self.p2p[pair] = P2P_STATUS.get(row["p2p"], "U")
        count = nvlinks_between(here, there, row["nvlink"], buses)
        if count:
            self.nvlink[pair] = count


def nvlinks_between(here: Mapping[str, Any], there: Mapping[str, Any], status: int | None, buses: set[str]) -> int:
    """Links that lead from one GPU straight to the other; else through switches, as far as both have such links.

    ``status`` is the P2P status over NVLink (0 is OK): with switches, the only evidence that two GPUs do meet.
    """
    direct = sum(1 for peer in here["nvlink_peers"] if peer and peer.upper() == there["bus_id"].upper())
    if direct or status not in (0, None):
        return direct
    return min(_through_switches(here, buses), _through_switches(there, buses))


def _through_switches(facts: Mapping[str, Any], buses: set[str]) -> int:
    return sum(1 for peer in facts["nvlink_peers"] if not peer or peer.upper() not in buses)
