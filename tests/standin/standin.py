"""Build the NVML stand-in, and write and change the machine it shows.

The ctypes structures mirror rig.h field by field; ``build`` checks that both sides agree on the size.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import re
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MAGIC = b"GPURIG3"
MIB = 1 << 20
MAX_GPUS, MAX_PROCESSES, MAX_MIG, MAX_LINKS = 16, 64, 7, 18
U32, U64 = ctypes.c_uint32, ctypes.c_uint64


class Process(ctypes.Structure):
    _fields_ = [("pid", U32), ("sticky", U32), ("start", U64), ("bytes", U64)]


class Account(ctypes.Structure):
    _fields_ = [("pid", U32), ("peak", U64), ("start_us", U64)]


class Mig(ctypes.Structure):
    _fields_ = [("uuid", ctypes.c_char * 96), ("name", ctypes.c_char * 96), ("total", U64), ("used", U64)]


class Gpu(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 96),
        ("bus", ctypes.c_char * 32),
        ("total", U64),
        ("reserved", U64),
        ("leaked", U64),
        ("throttle_reasons", U64),
        ("cc_major", U32),
        ("cc_minor", U32),
        ("minor_number", U32),
        ("ecc", U32),
        ("mig", U32),
        ("persistence", U32),
        ("temperature_c", U32),
        ("power_mw", U32),
        ("power_limit_mw", U32),
        ("sm_mhz", U32),
        ("memory_mhz", U32),
        ("sm_max_mhz", U32),
        ("memory_max_mhz", U32),
        ("pcie_gen", U32),
        ("pcie_gen_now", U32),
        ("pcie_width", U32),
        ("pcie_width_max", U32),
        ("numa", U32),
        ("lost", U32),
        ("hang", U32),
        ("memory_unsupported", U32),
        ("links", U32),
        ("no_events", U32),
        ("xid", U32),
        ("xids", U32),
        ("double_bits", U32),
        ("utilization", U32),
        ("accounting", U32),
        ("mig_count", U32),
        ("link_peer", (ctypes.c_char * 32) * MAX_LINKS),
        ("mig_device", Mig * MAX_MIG),
        ("process", Process * MAX_PROCESSES),
        ("account", Account * MAX_PROCESSES),
    ]


class Rig(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_char * 8),
        ("driver", ctypes.c_char * 80),
        ("count", U32),
        ("cuda", U32),
        ("init_result", U32),
        ("init_hang", U32),
        ("crash", U32),
        ("no_memory_v2", U32),
        ("processes_v2", U32),
        ("no_event_reasons", U32),
        ("hide_processes", U32),
        ("hide_sizes", U32),
        ("chatty", U32),
        ("delay_us", U32),
        ("topology", (U32 * MAX_GPUS) * MAX_GPUS),
        ("p2p", (U32 * MAX_GPUS) * MAX_GPUS),
        ("gpu", Gpu * MAX_GPUS),
    ]


def build(folder: Path, gcc: str = "gcc") -> Path:
    """Compile libnvidia-ml.so.1 into ``folder``; every NVML symbol that pynvml knows exists in it.

    Programs look for symbols before they use them (nvitop, gpustat), hence a stub for each that nvml.c leaves out.
    """
    source = (HERE / "nvml.c").read_text(encoding="utf-8")
    written = set(re.findall(r"^(?:result_t|const char \*)\s*(nvml\w+)\(", source, re.MULTILINE))
    spec = importlib.util.find_spec("pynvml")
    assert spec is not None, "nvidia-ml-py is not installed"
    assert spec.origin is not None
    binding = Path(spec.origin).read_text(encoding="utf-8")
    known = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', binding))
    stubs = folder / "stubs.c"
    stubs.write_text("".join(f"int {name}(void) {{ return 3; }}\n" for name in sorted(known - written)))
    library = folder / "libnvidia-ml.so.1"
    command = [gcc, "-shared", "-fPIC", "-O1", "-Wall", "-Wl,-soname,libnvidia-ml.so.1", f"-I{HERE}"]
    subprocess.run([*command, "-o", str(library), str(HERE / "nvml.c"), str(stubs)], check=True)
    size = ctypes.CDLL(str(library)).gpuguard_rig_size
    size.restype = ctypes.c_size_t
    assert size() == ctypes.sizeof(Rig), "rig.h and standin.py disagree"
    return library


def open_rig(path: Path) -> Rig:
    """Map the rig file, created when absent; changes are seen by every process that has it open."""
    with path.open("a+b") as file:
        file.truncate(ctypes.sizeof(Rig))
        mapped = mmap.mmap(file.fileno(), ctypes.sizeof(Rig))
    return Rig.from_buffer(mapped)


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat, which tells a process from a later one with its pid."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


def fill_gpu(gpu: Any, index: int, *, name: str, sm: str, total_mib: int | None, reserved_mib: int) -> None:
    """Write one idle GPU: slot ``index`` of an eight-slot server with two sockets."""
    gpu.name = name.encode()
    gpu.uuid = b"GPU-%08x-0000-4000-8000-%012d" % (0xA0000000 + index * 0x1000000, index)
    gpu.bus = b"00000000:%02X:00.0" % (0x16 + 0x11 * index)
    gpu.total = (total_mib or 0) * MIB
    gpu.reserved = reserved_mib * MIB
    gpu.memory_unsupported = total_mib is None
    gpu.cc_major, gpu.cc_minor = int(sm[:-1]), int(sm[-1])
    gpu.minor_number = index ^ 2  # /dev/nvidiaN numbers need not follow NVML's order
    gpu.ecc, gpu.mig, gpu.persistence = 1, 0, 1
    gpu.temperature_c, gpu.power_mw, gpu.power_limit_mw = 33, 39_200, 600_000
    gpu.sm_mhz, gpu.memory_mhz, gpu.sm_max_mhz, gpu.memory_max_mhz = 180, 405, 2430, 12481
    gpu.pcie_gen, gpu.pcie_gen_now, gpu.pcie_width, gpu.pcie_width_max = 5, 1, 16, 16
    gpu.numa = index // 4
