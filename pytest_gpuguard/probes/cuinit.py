"""Finds out whether CUDA's driver comes up, by its own number: cuInit, the devices it counts, the libcuda that answers.

Uses libcuda alone, so that neither torch nor an engine can hide the number. Must never open a context.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re

from pytest_gpuguard.probes import kit

#: CUresult → name, what the driver itself says, and what that usually is (cuda.h; cuGetErrorString gives the words).
NUMBERS = {
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory", "the host or a GPU has no memory for a context"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error", "the driver's device files cannot be used from here"),
    34: (
        "CUDA_ERROR_STUB_LIBRARY",
        "CUDA driver is a stub library",
        "the toolkit's stubs folder is on the library path",
    ),
    35: (
        "CUDA_ERROR_INSUFFICIENT_DRIVER",
        "CUDA driver version is insufficient for CUDA runtime version",
        "the driver is older than the CUDA of this stack",
    ),
    46: (
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA-capable device(s) is/are busy or unavailable",
        "a GPU is in exclusive mode, or in a bad state",
    ),
    100: (
        "CUDA_ERROR_NO_DEVICE",
        "no CUDA-capable device is detected",
        "the container or CUDA_VISIBLE_DEVICES hides the GPUs, or their device files are missing",
    ),
    214: ("CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered", "the GPU's memory is faulty"),
    802: (
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "system not yet initialized",
        "an NVSwitch system without a running fabric manager of the driver's version, or a driver not yet up",
    ),
    803: (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "system has unsupported display driver / cuda driver combination",
        "the libcuda in use is not the one of the kernel's driver: compat libraries of an image, or an upgrade of the "
        "driver without a restart",
    ),
    804: (
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "forward compatibility was attempted on non supported HW",
        "compat libraries are in use on a GPU that does not take them (GeForce, workstation cards)",
    ),
    999: (
        "CUDA_ERROR_UNKNOWN",
        "unknown error",
        "often nvidia-uvm is not loaded, or the environment was changed after start",
    ),
}
HARDWARE = (214,)


def run() -> None:
    """Load libcuda, call cuInit, and tell the number."""
    kit.stage("load libcuda.so.1")
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        if not kit.rig:
            kit.absent("gpus", f"no GPU and no libcuda.so.1 here: {error}")
        kit.defect(
            "driver.mismatch",
            f"NVML sees {len(kit.rig)} GPU(s), and CUDA's driver library cannot be loaded: {error}. A container needs "
            'the capability "compute" (NVIDIA_DRIVER_CAPABILITIES)',
        )
    path = mapped("libcuda.so")
    kit.answer(libcuda=path, driver=kit.driver)
    kit.stage("cuInit")
    number = int(libcuda.cuInit(0))
    kit.answer(number=number)
    if number:
        _broken(libcuda, number, path)
    kit.stage("cuDeviceGetCount")
    count, version = ctypes.c_int(), ctypes.c_int()
    for function, value in (("cuDeviceGetCount", count), ("cuDriverGetVersion", version)):
        number = int(getattr(libcuda, function)(ctypes.byref(value)))
        if number:
            kit.answer(number=number)
            _broken(libcuda, number, path, function)
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    kit.answer(count=count.value, leased=len(kit.gpus), cuda=cuda)
    if kit.gpus and count.value != len(kit.gpus):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        kit.defect(
            "infra.device",
            f"CUDA sees {count.value} of {len(kit.gpus)} leased GPUs (CUDA_VISIBLE_DEVICES={seen}): it stops counting "
            "at the first name that it does not know",
        )
    kit.answer(said=f"cuInit 0, {count.value} GPU(s), CUDA {cuda} by {path or 'libcuda.so.1'}")


def _broken(libcuda: ctypes.CDLL, number: int, path: str | None, function: str = "cuInit") -> None:
    name, words, usual = NUMBERS.get(number, ("", "", ""))
    name = _told(libcuda, "cuGetErrorName", number) or name or "not a number that is known"
    words = _told(libcuda, "cuGetErrorString", number) or words or "no words for it"
    parts = [f"{function}: Error {number}: {words} ({name})"]
    if usual:
        parts.append(f"usually: {usual}")
    if number == 802:
        parts.append(fabric())
    if number in (803, 804, 35, 34, 999, 100):
        parts += library_facts(path)
    kit.answer(name=name)
    kit.defect("hardware" if number in HARDWARE else "driver.mismatch", "; ".join(parts))


def _told(libcuda: ctypes.CDLL, function: str, number: int) -> str | None:
    """The library's own words for a number: these two functions need no initialization."""
    text = ctypes.c_char_p()
    try:
        call = getattr(libcuda, function)
    except AttributeError:
        return None
    if call(ctypes.c_int(number), ctypes.byref(text)) or not text.value:
        return None
    return text.value.decode("utf-8", "replace")


def mapped(name: str) -> str | None:
    """The path of the mapped library whose file name begins so, symbolic links resolved; None when none is."""
    try:
        with open("/proc/self/maps", errors="replace") as file:
            for line in file:
                parts = line.rstrip("\n").split(None, 5)
                if len(parts) == 6 and os.path.basename(parts[5]).startswith(name):
                    return parts[5]
    except OSError:
        pass
    return None


def library_facts(path: str | None) -> list[str]:
    """Which libcuda it is: of the driver or not, by a compat folder or not, and who put that on the path."""
    if path is None:
        return []
    facts = [f"libcuda is {path}"]
    version = re.search(r"libcuda\.so\.(\d{3,}\.\d+(?:\.\d+)?)$", os.path.realpath(path))
    if version and kit.driver and version.group(1) != kit.driver:
        facts.append(f"it is of driver {version.group(1)}, the kernel's is {kit.driver}")
    if "compat" in path:
        by = (
            [f"LD_LIBRARY_PATH={os.environ['LD_LIBRARY_PATH']}"]
            if "compat" in os.environ.get("LD_LIBRARY_PATH", "")
            else []
        )
        by += _compat_in_ld_so_conf()
        facts.append("a compat library" + (f", by {', '.join(by)}" if by else "") + ": use the driver's own")
    return facts


def _compat_in_ld_so_conf() -> list[str]:
    found = []
    for name in ["/etc/ld.so.conf", *sorted(glob.glob("/etc/ld.so.conf.d/*"))]:
        try:
            with open(name, errors="replace") as file:
                lines = [line.strip() for line in file if "compat" in line and not line.lstrip().startswith("#")]
        except OSError:
            continue
        found += [f"{name} ({line})" for line in lines]
    return found


def fabric() -> str:
    """What is known of NVSwitches and of the fabric manager."""
    switches = glob.glob("/dev/nvidia-nvswitch[0-9]*")
    running = _fabric_manager_runs()
    try:
        _, text = kit.run_tool(["systemctl", "is-active", "nvidia-fabricmanager"], 3.0)
        unit = f"systemctl says {text.strip().splitlines()[-1]}" if text.strip() else "systemctl says nothing"
    except OSError:
        unit = "no systemctl here to ask"
    kit.answer(nvswitches=len(switches), fabric_manager=running)
    return (
        f"{len(switches)} NVSwitch device files, nv-fabricmanager "
        + ("runs" if running else "does not run, as far as can be seen from here")
        + f" ({unit})"
    )


def _fabric_manager_runs() -> bool:
    for name in glob.glob("/proc/[0-9]*/comm"):
        try:
            with open(name) as file:
                if file.read().startswith("nv-fabricmanag"):  # the kernel keeps 15 characters
                    return True
        except OSError:
            continue
    return False


if __name__ == "__main__":
    kit.main(run)
