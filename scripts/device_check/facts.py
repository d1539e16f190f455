"""What NVML tells us of the GPU, against nvidia-smi and torch, and what each call costs.

It reads and changes nothing; a call that hangs ends with the process of its check.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pytest_gpuguard.facts.faults import HostFault
from pytest_gpuguard.facts.nvml import NvmlChild

from .result import MIB, Device, Findings, gib
from .work import Worker, settled

if TYPE_CHECKING:
    from pytest_gpuguard.facts.gpu import Gpu, Rig

#: Fields of ``nvidia-smi --query-gpu`` beside ours.
_FIELDS: Final = ("name", "uuid", "memory.total", "driver_version", "compute_cap", "pci.bus_id")
#: As nvidia-smi's head writes it, before and since release 610.
_CUDA: Final = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)")
_TOOL_S: Final = 30.0
#: Each call is made so often, or for so long, whichever is over first.
_CALLS: Final = 300
_CALLS_S: Final = 1.0
#: What we say of free memory and sizes may differ by so much from what others say at another moment.
_NEAR: Final = 64 * MIB


def facts(device: Device) -> Findings:
    """Name, UUID, memory, driver, CUDA, SM and bus id are those that nvidia-smi prints."""
    found = Findings()
    with NvmlChild() as child:
        rig = child.rig()
    gpu = rig.gpu(device.uuid)
    ours = _ours(rig, gpu)
    found.figures["nvml"] = {**ours, "memory": _memory(gpu)}
    found.figures["described"] = rig.describe()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        found.headline = f"{rig.describe()}; nvidia-smi is not installed, so only torch was compared (memory)"
        found.figures["nvidia_smi"] = None
        return found
    theirs = _nvidia_smi(tool, gpu.uuid)
    found.figures["nvidia_smi"] = theirs
    for name, value in ours.items():
        told = theirs.get(name)
        if told is not None or name != "cuda":  # its head does not always name a CUDA
            found.expect(str(value).lower() == str(told).lower(), f"{name}: NVML {value}, nvidia-smi {told}")
    found.headline = f"{rig.describe()}: as nvidia-smi says"
    return found


def _ours(rig: Rig, gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory.total": None if gpu.memory.total is None else gpu.memory.total // MIB,
        "driver_version": rig.driver,
        "compute_cap": f"{gpu.sm[:-1]}.{gpu.sm[-1:]}",
        "pci.bus_id": gpu.bus_id,
        "cuda": rig.cuda,
    }


def _memory(gpu: Gpu) -> dict[str, Any]:
    one = gpu.memory
    return {"total": one.total, "used": one.used, "free": one.free, "reserved": one.reserved, "version": one.version}


def _nvidia_smi(tool: str, uuid: str) -> dict[str, Any]:
    """What it prints of this GPU, with numbers as numbers."""
    query = [tool, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    rows = _output(query).splitlines()
    table = [dict(zip(_FIELDS, map(str.strip, row.split(",")), strict=False)) for row in rows if row.strip()]
    row: dict[str, Any] = next((one for one in table if one.get("uuid") == uuid), {})
    if row.get("memory.total", "").isdigit():
        row["memory.total"] = int(row["memory.total"])
    head = _CUDA.search(_output([tool]))
    return {**row, "cuda": head[1] if head is not None else None}


def _output(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, timeout=_TOOL_S, check=False, stdin=subprocess.DEVNULL)
    return done.stdout.decode(errors="replace")


# --------------------------------------------------------------------------------------------------------------- costs


def costs(device: Device) -> Findings:
    """Microseconds of each call that the sampler and the checks before a boot make; milliseconds of our questions."""
    import pynvml

    found = Findings()
    began = time.perf_counter()
    pynvml.nvmlInit()
    found.figures["nvmlInit_ms"] = round((time.perf_counter() - began) * 1e3, 2)
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
        found.figures["us"] = {name: _cost(call) for name, call in _calls(pynvml, handle, device.uuid).items()}
    finally:
        pynvml.nvmlShutdown()
    with NvmlChild() as child:
        child.rig()
        asked: dict[str, Callable[[], Any]] = {
            "memory": lambda: child.memory([device.uuid]),
            "processes": lambda: child.processes([device.uuid]),
            "machine": child.machine,
        }
        found.figures["asked_of_our_child_us"] = {name: _cost(call, 50) for name, call in asked.items()}
    sample = found.figures["us"]["memory v2"]["median"] or found.figures["us"]["memory v1"]["median"]
    if found.expect(sample is not None, "NVML gives no memory of this GPU, so nothing could be sampled"):
        found.expect(
            sample < 10_000, f"one reading of memory takes {sample / 1000:.1f} ms: a sampler at 50 Hz is too fast"
        )
        found.headline = f"a reading of memory takes {sample:.0f} µs, nvmlInit {found.figures['nvmlInit_ms']:.0f} ms"
    return found


def _calls(pynvml: Any, handle: Any, uuid: str) -> dict[str, Callable[[], Any]]:
    return {
        "handle by UUID": lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid),
        "memory v1": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle),
        "memory v2": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
        "processes": lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
        "SM clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "why clocks are low": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle),
        "power": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "accounting mode": lambda: pynvml.nvmlDeviceGetAccountingMode(handle),
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
    }


def _cost(call: Callable[[], Any], calls: int = _CALLS) -> dict[str, Any]:
    """Median, 99th percentile and longest of a call in µs; only the error's name where it fails."""
    took: list[float] = []
    until = time.perf_counter() + _CALLS_S
    while len(took) < calls and (not took or time.perf_counter() < until):
        began = time.perf_counter()
        try:
            call()
        except Exception as error:  # of NVML: not every card has every reading
            return {"median": None, "error": type(error).__name__}
        took.append((time.perf_counter() - began) * 1e6)
    ordered = sorted(took)
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "longest": round(ordered[-1], 2),
        "calls": len(ordered),
    }


# ------------------------------------------------------------------------------------------------- against torch's view


def memory(device: Device) -> Findings:
    """NVML's v2 memory is what torch sees: total less the reserve, what is free, and what an allocation takes."""
    found = Findings()
    with NvmlChild() as child:
        if not settled(found, child, device.uuid):
            return found
        idle = child.memory([device.uuid])[device.uuid]
        with Worker(device.env) as worker:
            seen = worker.first
            now = child.memory([device.uuid])[device.uuid]
            if now.used is None or now.total is None or now.free is None or idle.used is None:
                found.problems.append(f"NVML does not say how much of this GPU is in use (version {now.version})")
                return found
            context = now.used - idle.used
            found.figures = {
                "torch": seen["torch"],
                "cuda_of_torch": seen["cuda"],
                "nvml_version": now.version,
                "total_gib": gib(now.total),
                "reserved_mib": None if now.reserved is None else now.reserved // MIB,
                "idle_used_mib": idle.used // MIB,
                "torch_total_less_ours_mib": (seen["total"] - (now.total - (now.reserved or 0))) / MIB,
                "torch_free_less_ours_mib": (seen["free"] - now.free) / MIB,
                "context_mib": context // MIB,
            }
            found.expect(now.version == 2, f"memory was read by version {now.version} of NVML's numbers, not 2")
            own = "NVML total less reserved is {:.0f} MiB off torch's total"
            apart = found.figures["torch_total_less_ours_mib"]
            found.expect(abs(apart) * MIB <= _NEAR, own.format(apart))
            apart = found.figures["torch_free_less_ours_mib"]
            found.expect(abs(apart) * MIB <= _NEAR, f"free memory differs by {apart:.0f} MiB from torch's")
            found.expect(0 < context < 4 << 30, f"a context takes {context / MIB:.0f} MiB, which cannot be")
            worker.do("take", bytes=1 << 30)
            after = child.memory([device.uuid])[device.uuid]
            grown = (after.used or 0) - now.used
            found.figures["used_grows_by_mib_with_1024"] = grown // MIB
            found.expect(abs(grown - (1 << 30)) <= _NEAR, f"1024 MiB taken, and used memory grew by {grown // MIB} MiB")
            _processes(found, child, device, worker.pid)
    found.headline = f"as torch sees it; a context takes {context // MIB} MiB"
    return found


def _processes(found: Findings, child: NvmlChild, device: Device, pid: int) -> None:
    """Whether NVML names the process by the pid that we know it by: not in a container. Figures only."""
    try:
        listed = child.processes([device.uuid])[device.uuid]
    except HostFault as fault:
        found.figures["processes_listed"] = None
        found.figures["why"] = f"{fault.cause}. {fault.cure}"
        return
    found.figures["processes_listed"] = len(listed)
    found.figures["our_pid_is_listed"] = pid in [one for one, _ in listed]
    found.figures["its_mib"] = next((used // MIB for one, used in listed if one == pid and used is not None), None)
