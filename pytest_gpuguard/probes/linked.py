"""Finds out whether the kernel libraries were linked against torch's CUDA, and that one CUDA runtime is in one process.

``args`` ``part``: "needed" reads the files' own lists of libraries, "mapped" imports all and looks at the process;
without it both are answered by their names, each with "said" where it holds. Must never take a library for broken that
only could not be imported: the claims about imports tell that.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import struct
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pytest_gpuguard.probes import kit

#: Packages whose compiled libraries run beside torch in one process.
PACKAGES = (
    "torch",
    "sgl_kernel",
    "flashinfer",
    "flashinfer_jit_cache",
    "vllm",
    "deep_gemm",
    "deep_gemm_cpp",
    "deep_ep",
    "deep_ep_cpp",
    "flash_mla",
    "flash_attn_2_cuda",
    "xformers",
    "torchvision",
    "torchaudio",
)
#: Of those, what is imported to see which runtime they bring. torch comes first, as in every engine.
IMPORTED = ("torch", "sgl_kernel", "flashinfer", "vllm._C", "deep_gemm", "deep_ep", "flash_attn_2_cuda")
#: A CUDA library whose major is CUDA's own. Wheels repaired by auditwheel have a hash in the name.
CUDA_LIBRARY = re.compile(r"^(libcudart|libnvrtc|libcublas|libcublasLt)(?:[.-][0-9a-f]{8})?\.so\.(\d+)")
RUNTIME = re.compile(r"^libcudart(?:[.-][0-9a-f]{8})?\.so\.\d")
#: The most files that are read of one package; of FlashInfer's precompiled kernels there are thousands, all alike.
MOST_FILES = 300
PARTS = ("needed", "mapped")
#: How long one of both may take, in seconds.
LIMIT_S = 150.0


def run() -> None:
    """One of the two parts, or both at once, each in a process of its own."""
    cuda = build_of_torch()
    if cuda is None:
        kit.absent("cuda", "torch is no CUDA build here, or not installed")
    kit.answer(torch_cuda=cuda)
    part = kit.args.get("part")
    if part == "needed":
        _needed(int(cuda.partition(".")[0]))
    elif part == "mapped":
        _mapped(int(cuda.partition(".")[0]))
    elif part is None:
        _both()
    else:
        raise ValueError(f'args part {part!r}: "needed" or "mapped"')


def _both() -> None:
    with ThreadPoolExecutor(max_workers=len(PARTS)) as threads:
        ended = list(threads.map(lambda one: kit.child("run", LIMIT_S, args={"part": one}), PARTS))
    found: dict[str, Any] = {}
    for part, rank in zip(PARTS, ended):  # noqa: B905 (strict= is newer than 3.8)
        found[part] = {"said": rank.data.get("said", "")} if rank.ok else {"defect": rank.defect, "told": rank.told}
    kit.answer(**found, said="; ".join(one["said"] for one in found.values() if "said" in one) or "neither holds")


def build_of_torch() -> str | None:
    """The CUDA that torch was built for, read and not imported; None without torch and for other builds."""
    folder = _folder("torch")
    try:
        with open(os.path.join(folder or "", "version.py"), encoding="utf-8") as file:
            found = re.search(r"""^cuda(?:: [^=\n]*)? = ["'](\d+\.\d+)""", file.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _folder(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return folders[0] if folders else spec.origin


# ------------------------------------------------------------------------------------------------- what files ask for


def _needed(major: int) -> None:
    wrong: dict[str, list[str]] = {}
    looked = 0
    for package in PACKAGES:
        folder = _folder(package)
        if folder is None:
            continue
        for number, path in enumerate(_libraries(folder)):
            if number == MOST_FILES:
                break
            looked += 1
            others = [one for one in needed_by(path) if _major(one) not in (None, major)]
            if others:
                wrong.setdefault(package, []).append(
                    f"{os.path.relpath(path, os.path.dirname(folder))} needs {' and '.join(others)}"
                )
    kit.answer(files=looked)
    if wrong:
        found = [
            f"{files[0]}{f' (and {len(files) - 1} more files)' if len(files) > 1 else ''}" for files in wrong.values()
        ]
        for files in wrong.values():
            print("\n".join(files))
        kit.defect("import.abi", f"torch is built for CUDA {major}, and {'; '.join(found)}: a wheel for another CUDA")
    kit.answer(said=f"{looked} compiled files ask for CUDA {major} or none")


def _major(soname: str) -> int | None:
    found = CUDA_LIBRARY.match(soname)
    return int(found.group(2)) if found else None


def _libraries(folder: str) -> Iterator[str]:
    if not os.path.isdir(folder):
        yield folder
        return
    for root, folders, files in os.walk(folder):
        folders.sort()
        for one in sorted(files):
            if ".so" in one:
                yield os.path.join(root, one)


def needed_by(path: str) -> list[str]:
    """The DT_NEEDED names of a 64-bit little-endian ELF file; none for any other file."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
                return []
            (table,) = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            file.seek(table)
            headers = file.read(size * count)
            segments = [
                struct.unpack_from("<IIQQQQQQ", headers, at) for at in range(0, len(headers) - 55, max(size, 56))
            ]
            dynamic = next((one for one in segments if one[0] == 2), None)  # PT_DYNAMIC
            if dynamic is None:
                return []
            file.seek(dynamic[2])
            entries = list(struct.iter_unpack("<QQ", file.read(dynamic[5] // 16 * 16)))
            values = dict(entries)
            strings, length = values.get(5), values.get(10, 0)  # DT_STRTAB, DT_STRSZ
            load = next(
                (
                    one
                    for one in segments
                    if one[0] == 1 and strings is not None and one[3] <= strings < one[3] + one[5]
                ),
                None,
            )
            if strings is None or load is None:
                return []
            file.seek(load[2] + strings - load[3])
            names = file.read(min(length, 10_000_000))
    except (OSError, struct.error):
        return []
    return [
        names[at : names.find(b"\0", at)].decode("utf-8", "replace") for tag, at in entries if tag == 1
    ]  # DT_NEEDED


# ------------------------------------------------------------------------------------------------- what a process has


def _mapped(major: int) -> None:
    kit.stage("import torch and the kernel libraries")
    if not kit.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an import must not open a context on a GPU that another has leased
    imported, failed = [], []
    for module in IMPORTED:
        if _folder(module.partition(".")[0]) is None:
            continue
        kit.stage(f"import {module}")
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever its import raises: the claim about imports tells
            print("".join(traceback.format_exception_only(type(error), error)))
            failed.append(module)
        else:
            imported.append(module)
    every = mapped_files()
    found = [one for one in every if RUNTIME.match(os.path.basename(one))]
    runtimes = asked_for(found, every)
    loaded = [one for one in found if one not in runtimes]
    kit.answer(imported=imported, failed=failed, runtimes=runtimes, only_loaded=loaded)
    if "torch" in failed:
        kit.absent("package", "torch cannot be imported")
    majors = {_major(os.path.basename(path)) for path in runtimes}
    if len(majors) > 1:
        kit.defect(
            "import.abi",
            f"{len(majors)} CUDA runtimes in one process after {', '.join(imported)}: {', '.join(runtimes)}",
        )
    if majors - {major}:
        kit.defect("import.abi", f"torch is built for CUDA {major}, and the runtime in its process is {runtimes[0]}")
    without = f" ({', '.join(failed)} cannot be imported)" if failed else ""
    unused = f"; loaded, and nothing is linked against it: {', '.join(loaded)}" if loaded else ""
    kit.answer(
        said=f"{runtimes[0] if runtimes else 'a runtime linked in'} after {', '.join(imported)}{without}{unused}"
    )


def asked_for(runtimes: list[str], files: list[str]) -> list[str]:
    """Those of the runtimes that one of the files is linked against, by their majors; all where none is.

    sgl_kernel loads the runtime of whatever toolkit it finds (sgl_kernel/load_utils.py): nothing ever calls that one.
    """
    needed = {_major(one) for path in files for one in needed_by(path) if one.startswith("libcudart")}
    return [one for one in runtimes if _major(os.path.basename(one)) in needed] or runtimes


def mapped_files() -> list[str]:
    """The paths of all libraries in this process."""
    found = set()
    with open("/proc/self/maps", errors="replace") as file:
        for line in file:
            parts = line.rstrip("\n").split(None, 5)
            if len(parts) == 6 and ".so" in os.path.basename(parts[5]):
                found.add(parts[5])
    return sorted(found)


if __name__ == "__main__":
    kit.main(run)
