"""The GPUs of one machine as frozen values, keyed by UUID and ordered by PCI bus id.

Sizes are bytes, as NVML gives them. These are facts as of one moment; nothing here asks a device anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pytest_gpuguard.claims.architectures import SM_ARCHITECTURES
from pytest_gpuguard.claims.units import GIB

from .faults import HostFault

#: nvmlGpuTopologyLevel_t → the name that nvidia-smi prints (INTERNAL: two GPUs on one board).
TOPOLOGY_LEVELS: Final[dict[int, str]] = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
#: nvmlGpuP2PStatus_t → the name that ``nvidia-smi topo -p2p`` prints.
P2P_STATUS: Final[dict[int, str]] = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}

Pair = tuple[str, str]


def arch_of(sm: str) -> str:
    """``"120"`` → ``"blackwell"``; ``"unknown"`` for an SM number that this version does not know."""
    return SM_ARCHITECTURES.get(sm, "unknown")


def known_sms() -> dict[str, str]:
    """SM number → architecture, from the shipped catalogue (reads a file)."""
    from .catalogue import sm_architectures

    return sm_architectures()


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes; None where the device does not say.

    ``version`` 2: NVML's v2 numbers, where ``used`` is what processes hold and ``reserved`` what the driver keeps
    (torch's total is ``total - reserved``). 1: the older numbers, whose ``used`` *includes* the reserve (R510 and
    later). 0: not from NVML but from /proc/meminfo, shared with the CPU (GB10); ``used`` is then the whole host's.
    """

    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class GpuClocks:
    """Clocks in MHz, now and at most."""

    sm: int | None = None
    memory: int | None = None
    sm_max: int | None = None
    memory_max: int | None = None


@dataclass(frozen=True, slots=True)
class MigDevice:
    """One MIG device of a GPU. Two compute instances of one GPU instance report the same memory: never sum."""

    uuid: str
    name: str | None = None
    memory: GpuMemory = field(default_factory=GpuMemory)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    ``index`` counts in PCI bus order over the whole machine: what CUDA_VISIBLE_DEVICES means under
    CUDA_DEVICE_ORDER=PCI_BUS_ID. ``sm`` is the capability without its dot ("120"), "" when unknown. ``numa`` is
    the NUMA node of the CPUs it hangs on. ``mig``, ``ecc``, ``persistence``: on, off, or None when not supported.
    ``pcie_gen`` is the best that GPU and slot can do (the current one drops when idle), ``pcie_width`` the lanes in
    use now. ``nvlinks`` counts active links. ``fault`` says why a GPU must not be used; its other facts may then be
    missing. ``unified``: its memory is the host's. ``mig_asked``: the caller's CUDA_VISIBLE_DEVICES names MIG devices
    of it; ``mig_devices`` are then only those, in the caller's order, and ``memory`` is that of the first.
    """

    index: int
    uuid: str
    name: str
    bus_id: str
    compute_capability: tuple[int, int] | None = None
    sm: str = ""
    memory: GpuMemory = field(default_factory=GpuMemory)
    numa: int | None = None
    mig: bool | None = None
    mig_devices: tuple[MigDevice, ...] = ()
    ecc: bool | None = None
    persistence: bool | None = None
    compute_mode: int | None = None
    clocks: GpuClocks = field(default_factory=GpuClocks)
    power_limit_w: float | None = None
    pcie_gen: int | None = None
    pcie_gen_now: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int = 0
    minor_number: int | None = None
    fault: str | None = None
    unified: bool = False
    mig_asked: bool = False

    @property
    def device(self) -> str:
        """What a server is given and memory and processes are asked of: its MIG device's UUID, if one was asked for.

        CUDA gives a process the first one alone. The lock is always that of the whole GPU: ``uuid``.
        """
        return self.mig_devices[0].uuid if self.mig_asked and self.mig_devices else self.uuid

    @property
    def arch(self) -> str:
        """Its architecture: "blackwell", "hopper" … or "unknown"."""
        return arch_of(self.sm)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; the keys are documented in docs/facts.md."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Gpu:
        """The GPU that ``to_dict`` wrote, also after JSON turned its tuples into lists."""
        capability = data.get("compute_capability")
        return Gpu(
            **{
                **data,
                "compute_capability": (capability[0], capability[1]) if capability else None,
                "memory": GpuMemory(**data.get("memory", {})),
                "clocks": GpuClocks(**data.get("clocks", {})),
                "mig_devices": tuple(
                    MigDevice(one["uuid"], one["name"], GpuMemory(**one["memory"]))
                    for one in data.get("mig_devices", ())
                ),
            }
        )


@dataclass(frozen=True, slots=True)
class Rig:
    """The GPUs of one machine that the caller may use, in the order of its CUDA_VISIBLE_DEVICES (else PCI order).

    ``topology``, ``p2p`` and ``nvlink`` are keyed by pairs of UUIDs, in both directions: the level of the nearest
    common ancestor (``TOPOLOGY_LEVELS``; never says NVLink), whether peer reads work (``P2P_STATUS``), and how many
    NVLinks join the two, directly or through switches. ``cuda`` is the newest CUDA that the driver serves.
    ``hidden`` counts the GPUs outside CUDA_VISIBLE_DEVICES. ``reason`` says why there are no GPUs. ``faults`` are
    what is broken: not to be read as "no GPUs".
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    topology: Mapping[Pair, str] = field(default_factory=dict)
    p2p: Mapping[Pair, str] = field(default_factory=dict)
    nvlink: Mapping[Pair, int] = field(default_factory=dict)
    kind: str = "real"
    faults: tuple[HostFault, ...] = ()
    hidden: int = 0
    reason: str | None = None

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The GPUs without a fault."""
        return tuple(gpu for gpu in self.gpus if gpu.fault is None)

    @property
    def leasable(self) -> tuple[Gpu, ...]:
        """Those of them that a claim may be given: one that is split only where its MIG device was asked for."""
        return tuple(gpu for gpu in self.usable if not gpu.mig or gpu.mig_asked)

    def gpu(self, uuid: str) -> Gpu:
        """The GPU with this UUID. Raises KeyError."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise KeyError(uuid)

    def describe(self) -> str:
        """One line, such as "8× NVIDIA RTX PRO 6000 Blackwell Server Edition (SM120, 95.6 GiB), driver 580.105.08"."""
        groups: dict[str, int] = {}
        for gpu in self.usable:
            label = _card_label(gpu)
            groups[label] = groups.get(label, 0) + 1
        text = ", ".join(f"{count}× {label}" for label, count in groups.items())
        if not text:
            text = f"no GPUs ({self.reason})" if self.reason else "no GPUs"
        if self.driver:
            text += f", driver {self.driver}"
        if self.hidden and self.gpus:
            text += f", {self.hidden} more outside CUDA_VISIBLE_DEVICES"
        if self.kind != "real":
            text = f"{self.kind}: {text}"
        if self.faults:
            text += "; host fault: " + "; ".join(fault.cause for fault in self.faults)
        return text

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by ``from_dict``: facts travel to xdist workers this way."""
        return {
            "kind": self.kind,
            "driver": self.driver,
            "cuda": self.cuda,
            "hidden": self.hidden,
            "reason": self.reason,
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "topology": _nested(self.topology),
            "p2p": _nested(self.p2p),
            "nvlink": _nested(self.nvlink),
            "faults": [fault.to_dict() for fault in self.faults],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Rig:
        """The rig that ``to_dict`` wrote."""
        return Rig(
            gpus=tuple(Gpu.from_dict(one) for one in data["gpus"]),
            driver=data["driver"],
            cuda=data["cuda"],
            topology=_paired(data["topology"]),
            p2p=_paired(data["p2p"]),
            nvlink=_paired(data["nvlink"]),
            kind=data["kind"],
            faults=tuple(HostFault.from_dict(one) for one in data["faults"]),
            hidden=data["hidden"],
            reason=data["reason"],
        )


def _card_label(gpu: Gpu) -> str:
    size = "memory unknown" if gpu.memory.total is None else f"{gpu.memory.total / GIB:.1f} GiB"
    facts = [f"SM{gpu.sm}" if gpu.sm else "SM unknown", f"{size} unified" if gpu.unified else size]
    if gpu.mig:
        facts.append("one MIG device" if gpu.mig_asked else f"MIG, {len(gpu.mig_devices)} devices")
    return f"{gpu.name} ({', '.join(facts)})"


def _nested(pairs: Mapping[Pair, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (one, other), value in pairs.items():
        nested.setdefault(one, {})[other] = value
    return nested


def _paired(nested: Mapping[str, Mapping[str, Any]]) -> dict[Pair, Any]:
    return {(one, other): value for one, row in nested.items() for other, value in row.items()}
