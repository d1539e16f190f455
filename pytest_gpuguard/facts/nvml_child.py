"""The one process that talks to NVML: JSON requests on stdin, one JSON answer a line on what was its stdout.

Run by file path, with the folder of pynvml as its argument; imports nothing of ours. It must never outlive its
parent, even while a call hangs in the driver, and never print anything but answers.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
GPU_BROKEN = (15, 16)  # lost, reset required
NOT_MIG = 0xFFFFFFFF


class Nvml:
    """pynvml with the session kept open, and answers as plain dictionaries."""

    def __init__(self, pynvml: Any) -> None:
        self.nvml = pynvml
        self.by_uuid: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """Do one request: ``op`` names the method, ``args`` are its arguments."""
        operations: dict[str, Callable[..., Any]] = {
            "open": self.open,
            "gpu": self.gpu,
            "links": self.links,
            "memory": self.memory_of,
            "processes": self.processes_of,
            "xid_events": self.xid_events_of,
        }
        return operations[request["op"]](**request.get("args", {}))

    def attempt(self, name: str, *args: Any) -> Any:
        """The call's result, or None where this GPU, driver or binding does not have it. A broken GPU raises."""
        function = getattr(self.nvml, name, None)
        if function is None:
            return None
        try:
            return function(*args)
        except Exception as error:
            # not only NVMLError: a missing symbol may become NVMLLibraryMismatchError, which is none
            if code_of(error) in GPU_BROKEN:
                raise
            return None

    def open(self) -> dict[str, Any]:
        """Initialise once; what the whole host has."""
        self.nvml.nvmlInit()
        cuda = self.attempt("nvmlSystemGetCudaDriverVersion_v2") or self.attempt("nvmlSystemGetCudaDriverVersion")
        return {
            "driver": text(self.attempt("nvmlSystemGetDriverVersion")),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            "count": self.nvml.nvmlDeviceGetCount(),
        }

    def gpu(self, index: int) -> dict[str, Any]:
        """Everything about one GPU. A broken one answers with ``fault`` and what was learnt before it broke."""
        facts: dict[str, Any] = {"nvml_index": index}
        try:
            self.fill(facts, self.nvml.nvmlDeviceGetHandleByIndex(index))
        except Exception as error:
            facts["fault"] = describe(error)
        return facts

    def fill(self, facts: dict[str, Any], handle: Any) -> None:
        """Ask ``handle`` for all facts, the identifying ones first."""
        nvml, attempt = self.nvml, self.attempt
        facts["uuid"] = text(nvml.nvmlDeviceGetUUID(handle))
        facts["bus_id"] = text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        facts["name"] = text(nvml.nvmlDeviceGetName(handle))
        self.by_uuid[facts["uuid"]] = handle
        facts["compute_capability"] = attempt("nvmlDeviceGetCudaComputeCapability", handle)
        facts["memory"], facts["unified"] = self.memory(handle)
        facts["minor_number"] = attempt("nvmlDeviceGetMinorNumber", handle)
        facts["numa"] = self.numa(handle, facts["bus_id"])
        facts["ecc"] = switch(attempt("nvmlDeviceGetEccMode", handle))
        facts["persistence"] = switch(attempt("nvmlDeviceGetPersistenceMode", handle))
        facts["compute_mode"] = attempt("nvmlDeviceGetComputeMode", handle)
        facts["clocks"] = {
            "sm": attempt("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory": attempt("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "sm_max": attempt("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_max": attempt("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM),
        }
        limit = attempt("nvmlDeviceGetEnforcedPowerLimit", handle) or attempt(
            "nvmlDeviceGetPowerManagementLimit", handle
        )
        facts["power_limit_w"] = limit / 1000 if limit else None
        facts["pcie_gen"] = attempt("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        facts["pcie_gen_now"] = attempt("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        facts["pcie_width"] = attempt("nvmlDeviceGetCurrPcieLinkWidth", handle)
        facts["pcie_width_max"] = attempt("nvmlDeviceGetMaxPcieLinkWidth", handle)
        facts["mig"] = switch(attempt("nvmlDeviceGetMigMode", handle))
        facts["mig_devices"] = self.mig_devices(handle) if facts["mig"] else []
        facts["nvlink_peers"] = [] if facts["mig"] else self.nvlink_peers(handle)

    def memory(self, handle: Any) -> tuple[dict[str, int | None], bool]:
        """Memory in bytes, v2, else v1, else the host's when neither exists (then True: unified)."""
        # pynvml picks the v2 struct by this number; older bindings have no v2 at all.
        version2 = getattr(self.nvml, "nvmlMemory_v2", None)
        codes = []
        for version, arguments in ((2, (handle, version2)), (1, (handle,))):
            if version == 2 and version2 is None:
                continue
            try:
                info = self.nvml.nvmlDeviceGetMemoryInfo(*arguments)
            except Exception as error:
                if code_of(error) in GPU_BROKEN:
                    raise
                codes.append(code_of(error))
                continue
            numbers = {"total": info.total, "used": info.used, "free": info.free, "version": version}
            return {**numbers, "reserved": info.reserved if version == 2 else None}, False
        if codes[-1] != NOT_SUPPORTED:  # no permission and the like: unknown, not unified
            return {}, False
        return host_memory(), True

    def numa(self, handle: Any, bus_id: str) -> int | None:
        """The NUMA node of the CPUs next to the GPU."""
        nodes = self.attempt(
            "nvmlDeviceGetMemoryAffinity", handle, 1, getattr(self.nvml, "NVML_AFFINITY_SCOPE_NODE", 0)
        )
        if nodes is not None and nodes[0]:
            mask = int(nodes[0])
            return (mask & -mask).bit_length() - 1
        try:
            # sysfs has four digits of domain, NVML eight
            with open(f"/sys/bus/pci/devices/{bus_id[-12:].lower()}/numa_node") as file:
                node = int(file.read())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def mig_devices(self, parent: Any) -> list[dict[str, Any]]:
        """The MIG devices of one GPU; positions may be empty."""
        devices = []
        for position in range(self.attempt("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
            handle = self.attempt("nvmlDeviceGetMigDeviceHandleByIndex", parent, position)
            if handle is None:
                continue
            uuid = text(self.nvml.nvmlDeviceGetUUID(handle))
            self.by_uuid[uuid] = handle
            memory, _ = self.memory(handle)
            devices.append({"uuid": uuid, "name": text(self.attempt("nvmlDeviceGetName", handle)), "memory": memory})
        return devices

    def nvlink_peers(self, handle: Any) -> list[str | None]:
        """One entry per active link: the peer's PCI bus id, None when the driver does not say."""
        peers = []
        for link in range(getattr(self.nvml, "NVML_NVLINK_MAX_LINKS", 18)):
            if self.attempt("nvmlDeviceGetNvLinkState", handle, link) != 1:
                continue  # inactive, not supported, or beyond the last link
            remote = self.attempt("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            peers.append(text(remote.busId) if remote is not None else None)
        return peers

    def links(self, index: int, others: list[int]) -> list[dict[str, Any]]:
        """How GPU ``index`` reaches each of ``others`` (NVML indices)."""
        rows = []
        here = self.nvml.nvmlDeviceGetHandleByIndex(index)
        for other in others:
            there = self.nvml.nvmlDeviceGetHandleByIndex(other)
            rows.append(
                {
                    "other": other,
                    "topology": self.attempt("nvmlDeviceGetTopologyCommonAncestor", here, there),
                    # literal numbers: pynvml's NVML_P2P_CAPS_INDEX_READ is a tuple by mistake
                    "p2p": self.attempt("nvmlDeviceGetP2PStatus", here, there, 0),
                    "nvlink": self.attempt("nvmlDeviceGetP2PStatus", here, there, 2),
                }
            )
        return rows

    def handle(self, uuid: str) -> Any:
        """The handle of a GPU or MIG device, looked up once."""
        if uuid not in self.by_uuid:
            self.by_uuid[uuid] = self.nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        return self.by_uuid[uuid]

    def memory_of(self, uuid: str) -> dict[str, int | None]:
        """Memory of one GPU or MIG device in bytes."""
        return self.memory(self.handle(uuid))[0]

    def xid_events_of(self, uuid: str) -> bool:
        """Whether NVML reports Xid events of this device (nvml.h: nvmlEventTypeXidCriticalError)."""
        return bool((self.attempt("nvmlDeviceGetSupportedEventTypes", self.handle(uuid)) or 0) & 0x8)

    def processes_of(self, uuid: str) -> list[tuple[int, int | None]]:
        """(pid, bytes or None) of all that hold the GPU: compute, graphics, MPS. Host pids inside a container.

        Raises what the driver answers where it lists no compute processes: an empty list means that there are none.
        """
        handle = self.handle(uuid)
        found: dict[int, int | None] = {}
        for family in ("Compute", "Graphics", "MPSCompute"):
            # the unversioned name is _v3 in today's binding; older drivers have only _v2
            call = f"nvmlDeviceGet{family}RunningProcesses"
            processes = self.attempt(f"{call}_v3", handle)
            if processes is None and family == "Compute":
                processes = getattr(self.nvml, f"{call}_v2")(handle)
            elif processes is None:
                processes = self.attempt(f"{call}_v2", handle)
            for process in processes or ():
                used = process.usedGpuMemory  # pynvml turns "not available" into None
                known = found.get(process.pid)
                found[process.pid] = used if known is None else max(known, used or 0)
        return sorted(found.items())


def code_of(error: Exception) -> int | None:
    """NVML's number for the error (nvmlReturn_t); None when it is not NVML's. Its text is not to be relied on."""
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def describe(error: Exception) -> dict[str, Any]:
    """The error for our parent."""
    code = code_of(error)
    name = type(error).__name__
    return {"name": name if code is not None else f"{name}: {error}", "kind": name, "code": code}


def text(value: Any) -> Any:
    """``value``, decoded when a binding of another age gave bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def switch(value: Any) -> bool | None:
    """The current state of an on/off setting; [current, pending] pairs give the first."""
    if value is None:
        return None
    return bool(value[0] if isinstance(value, (list, tuple)) else value)


def host_memory() -> dict[str, int | None]:
    """MemTotal and MemAvailable of /proc/meminfo in bytes: all that a unified-memory GPU lets us know."""
    sizes = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                key, _, rest = line.partition(":")
                sizes[key] = int(rest.split()[0]) * 1024
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return {}
    return {"total": total, "free": free, "used": total - free, "reserved": None, "version": 0}


def serve(requests: queue.Queue[str], answers: Any, binding_folder: str) -> None:
    """Answer requests one by one, for ever."""
    nvml: Nvml | None = None
    while True:
        request = json.loads(requests.get())
        try:
            if nvml is None:
                sys.path.append(binding_folder)
                import pynvml

                nvml = Nvml(pynvml)
            reply = {"id": request["id"], "result": nvml.answer(request)}
        except Exception as error:
            reply = {"id": request["id"], "error": describe(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def die_with(parent: int) -> None:
    """End this process once its parent is gone, even if somebody else inherited our stdin's other end."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main() -> None:
    """Read requests until stdin ends. NVML runs on another thread, so that a hanging call cannot keep us alive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is our parent's affair
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not garble the answers
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=serve, args=(requests, answers, sys.argv[1]), daemon=True).start()
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
