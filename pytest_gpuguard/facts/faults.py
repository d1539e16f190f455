"""Faults of the host, as values that can also be raised.

A host fault says nothing about a claim: it must end in INFRA, and never in a skip.
"""

from __future__ import annotations

from typing import Any, Final

from pytest_gpuguard.claims.outcome import HOST_FAULTS

DRIVER_MISMATCH: Final = "driver.mismatch"
HARDWARE: Final = "hardware"


class HostFault(Exception):
    """Something is broken on this machine: ``outcome`` (a name of ``claims.outcome.HOST_FAULTS``), cause and cure.

    ``gpu`` is the UUID of the GPU it is about, or None when it is about the whole host. Equal by value, so that a
    fault survives the way through JSON.
    """

    def __init__(self, outcome: str, cause: str, cure: str, gpu: str | None = None) -> None:
        if outcome not in HOST_FAULTS:
            raise ValueError(f"{outcome!r} is not a host fault; known are {', '.join(sorted(HOST_FAULTS))}")
        super().__init__(outcome, cause, cure, gpu)
        self.outcome = outcome
        self.cause = cause
        self.cure = cure
        self.gpu = gpu

    def __str__(self) -> str:
        return f"{self.outcome}: {self.cause}. {self.cure}."

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostFault) and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by ``from_dict``."""
        return {"outcome": self.outcome, "cause": self.cause, "cure": self.cure, "gpu": self.gpu}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> HostFault:
        """The fault that ``to_dict`` wrote."""
        return HostFault(data["outcome"], data["cause"], data["cure"], data.get("gpu"))


class NvmlTimeout(HostFault):
    """NVML hung: it did not answer in time, and the child that asked it was killed."""

    def __init__(self, what: str, deadline_s: float) -> None:
        super().__init__(
            HARDWARE,
            f"NVML did not answer within {deadline_s:g} s ({what})",
            "Look for Xid lines in dmesg; a GPU that hangs the driver usually needs a reset or a reboot",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return HostFault, self.args


def nvml_fault(name: str, code: int | None, gpu: str | None = None) -> HostFault:
    """The host fault behind an NVML error: ``name`` is pynvml's class, ``code`` the number (nvml.h, nvmlReturn_t).

    Texts of NVML errors differ between library and binding, hence only the number decides.
    """
    which = f" on {gpu}" if gpu else ""
    detail = f"{name}, code {code}" if code is not None else name
    if code == 18:
        return HostFault(
            DRIVER_MISMATCH,
            f"the NVIDIA driver in the kernel and the user-space library have different versions ({detail})",
            "Reboot, or unload and reload the nvidia kernel modules: the driver was upgraded while it was loaded",
        )
    if code == 15:
        return HostFault(
            HARDWARE,
            f"the GPU is lost: it fell off the bus{which} ({detail})",
            "Look for Xid 79 in dmesg; check power, risers and temperature, then reboot",
            gpu,
        )
    if code == 16:
        return HostFault(
            HARDWARE, f"the GPU needs a reset{which} ({detail})", "Reset it with nvidia-smi --gpu-reset, or reboot", gpu
        )
    if code == 4:
        return HostFault(
            HARDWARE,
            f"NVML may not be asked{which}: no permission ({detail})",
            "Give this user (or container) access to the /dev/nvidia* devices",
            gpu,
        )
    if code == 999 and gpu is None:
        return HostFault(
            HARDWARE,
            f"NVML failed with an unknown error ({detail})",
            "In a container: restart it, as it has probably lost its device cgroup. Else look into dmesg",
        )
    return HostFault(HARDWARE, f"NVML failed{which} ({detail})", "Look for NVRM and Xid lines in dmesg", gpu)
