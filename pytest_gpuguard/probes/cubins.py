"""Finds out whether the compiled files of one kernel library carry code for the GPUs of this machine.

``args``: ``name`` (of TABLE). Reads headers only: must never import the library, nor need a GPU of its own.
"""

from __future__ import annotations

import glob
import importlib.util
import mmap
import os
import re
import shutil
import struct
from collections.abc import Iterator

from pytest_gpuguard.probes import kit

#: Module → how the names of those files begin that carry what every model needs. Others may be for one card alone.
TABLE = {
    "sgl_kernel": "common_ops",
    "vllm": r"_C[._]",
    "deep_ep": "",
    "flash_mla": "",
    "flash_attn_2_cuda": "",
}

#: How a fat binary begins (0xBA55ED50, little-endian); a section holds one for each translation unit.
MAGIC = b"\x50\xed\x55\xba"


def run() -> None:
    """Find the files, read what they carry, hold it against each SM."""
    name = kit.args.get("name")
    if name not in TABLE:
        raise ValueError(f"args name {name!r}: one of {', '.join(sorted(TABLE))}")
    files = list(_files(name, TABLE[name]))
    if not kit.sms():
        kit.absent("gpus", "no GPU here whose architecture the library must have code for")
    kit.stage(f"read the code in {', '.join(os.path.basename(one) for one in files)}")
    targets = {path: sorted(code_of(path)) for path in files}
    every = sorted({one for found in targets.values() for one in found})
    if not every:
        every = _by_cuobjdump(files)
    kit.answer(code={path: found for path, found in targets.items() if found}, targets=every)
    said = []
    for sm in kit.sms():
        fitting = [one for one in every if runs_on(one, sm)]
        if not fitting:
            names = ", ".join(sorted({os.path.basename(one) for one in files}))
            kit.defect("unsupported.arch", f"{name} has no code for sm_{sm}: {names} carries {' '.join(every)}")
        cubins = [one for one in fitting if one.startswith("sm_")]
        said.append(
            f"{cubins[-1]} for sm_{sm}"
            if cubins
            else f"only PTX for sm_{sm} ({fitting[-1]}), which the driver compiles when it is first used"
        )
    kit.answer(said=f"{name} carries {', '.join(said)}")


def _files(name: str, begin: str) -> Iterator[str]:
    spec = importlib.util.find_spec(name)
    if spec is None:
        kit.absent("package", f"{name} is not installed in this stack")
    folders = list(spec.submodule_search_locations or ())
    paths = [os.path.join(root, one) for folder in folders for root, _, files in os.walk(folder) for one in files]
    for folder in folders:
        paths += glob.glob(glob.escape(folder) + "_*.so*")  # beside the package: deep_ep_cpp.*.so is DeepEP's
    found = False
    for path in sorted(paths or [str(spec.origin)]):
        if ".so" in os.path.basename(path) and re.match(begin, os.path.basename(path)) and _is_elf(path):
            found = True
            yield path
    if not found:
        kit.absent("package", f"{name} has no compiled file {begin}".rstrip() + ": what that means, its import tells")


def _is_elf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def runs_on(target: str, sm: str) -> bool:
    """Whether code for ``target`` ("sm_120", "sm_90a", "compute_80") can run on a GPU of that SM ("120").

    A cubin runs on its own major, from its minor on, also an ``f`` (family) target; an ``a`` target only on its own
    capability; PTX is compiled by the driver for anything newer.
    """
    parts = re.match(r"(sm|compute)_(\d+)(\d)([af]?)$", target)
    if parts is None:
        return False
    own, suffix = (int(parts.group(2)), int(parts.group(3))), parts.group(4)
    here = (int(sm[:-1]), int(sm[-1]))
    if suffix == "a":
        return own == here
    if parts.group(1) == "compute" and not suffix:
        return own <= here
    return own[0] == here[0] and own[1] <= here[1]


def code_of(path: str) -> set[str]:
    """The targets of the fat binaries in an ELF file: cubins ("sm_120a") and PTX ("compute_90").

    Read from the containers' own headers, which name kind, architecture and suffix; nothing is unpacked, so that a
    library of some gigabytes takes milliseconds. It is what ``cuobjdump --list-elf`` prints, but that it calls a
    family's target plain.
    """
    found: set[str] = set()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, size in _sections(data, (b".nv_fatbin", b"__nv_relfatbin")):
            position, end = start, min(start + size, len(data))
            while position + 16 <= end:
                position = data.find(MAGIC, position, end)
                if position < 0 or position + 16 > end:
                    break
                _, _, header, length = struct.unpack_from("<IHHQ", data, position)
                entry, last = position + header, min(position + header + length, end)
                while entry + 48 <= last:
                    kind, _, before, payload = struct.unpack_from("<HHIQ", data, entry)
                    (number,) = struct.unpack_from("<I", data, entry + 28)
                    (flags,) = struct.unpack_from("<Q", data, entry + 40)
                    suffix = "a" if flags & 0x100000 else "f" if flags & 0x200000 else ""
                    if kind in (1, 2) and 10 <= number < 1000:
                        found.add(("compute_" if kind == 1 else "sm_") + f"{number}{suffix}")
                    entry += max(before + payload, 8)
                position = max(last, position + 16)
    return found


def _sections(data: mmap.mmap, wanted: tuple[bytes, ...]) -> Iterator[tuple[int, int]]:
    """Offset and size of the named sections of a 64-bit little-endian ELF file."""
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    if size < 64 or table + size * count > len(data) or names >= count:
        return
    (strings,) = struct.unpack_from("<Q", data, table + names * size + 24)
    for index in range(count):
        name, _, _, _, offset, length = struct.unpack_from("<IIQQQQ", data, table + index * size)
        if any(data[strings + name : strings + name + len(one) + 1] == one + b"\0" for one in wanted):
            yield offset, length


def _by_cuobjdump(files: list[str]) -> list[str]:
    """The same by the toolkit's tool (Triton brings one along), for files whose containers cannot be read."""
    tool = shutil.which("cuobjdump") or _bundled()
    if tool is None:
        kit.absent("tools", "no GPU code could be read in the files, and there is no cuobjdump to read it with")
    found: set[str] = set()
    for path in files:
        for option in ("--list-elf", "--list-ptx"):
            kit.stage(f"{tool} {option} {os.path.basename(path)}")
            _, text = kit.run_tool([tool, option, path], 60.0)
            found.update(re.findall(r"\.(sm_\d+[af]?)\.cubin", text))
            found.update("compute_" + one for one in re.findall(r"\.sm_(\d+[af]?)\.ptx", text))
    if not found:
        kit.absent("tools", f"neither we nor {tool} find GPU code in {', '.join(map(os.path.basename, files))}")
    return sorted(found)


def _bundled() -> str | None:
    homes = [os.path.join(os.environ.get(name) or "/usr/local/cuda", "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    spec = importlib.util.find_spec("triton")
    homes += (
        [os.path.join(one, "backends", "nvidia", "bin") for one in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    paths = [os.path.join(one, "cuobjdump") for one in homes]
    return next((one for one in paths if os.access(one, os.X_OK)), None)


if __name__ == "__main__":
    kit.main(run)
