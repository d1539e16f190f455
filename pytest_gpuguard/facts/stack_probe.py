"""Run inside the python under test, as text after ``-c``: what is installed there, and what surrounds it.

Standard library only, any Python from 3.8 on. Never imports torch or an engine, and prints nothing: the answer is one
line of JSON on the file descriptor given as the first argument; the second is "all" or "volatile".
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path and sys.path[0] == "":
    del sys.path[0]  # a json.py in the current directory must not be taken for the standard library's

import ast
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import time
from typing import Any

#: Which environment variables may change how a server behaves, by prefix.
PREFIXES = (
    "NCCL_",
    "SGLANG_",
    "SGL_",
    "VLLM_",
    "CUDA_",
    "TORCH_",
    "FLASHINFER_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "DG_",
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_SECRET_QUERY = re.compile(
    r"([?&][^=&\s]*(?:token|key|secret|password|credential|signature)[^=&\s]*=)[^&#\s]+", re.IGNORECASE
)
REDACTED = "<redacted>"


def redact(name: str, value: str) -> str:
    """``value``, without what the variable's name or a URL in it gives away."""
    if _SECRET_NAME.search(name):
        return REDACTED
    return redact_text(value)


def redact_text(text: str) -> str:
    """``text`` with user, password and secret parameters of any URL in it replaced."""
    return _SECRET_QUERY.sub(r"\1" + REDACTED, _USERINFO.sub(REDACTED + "@", text))


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 spells it: "sgl_kernel" and "SGL.Kernel" are "sgl-kernel"."""
    return re.sub(r"[-_.]+", "-", name).lower()


# --- what is installed: depends on files only, and may be remembered -------------------------------------------------


def durable() -> dict[str, Any]:
    """Python, distributions and torch's build, and the files whose change makes all of it stale."""
    watched = {}
    for folder in sys.path:
        watched[folder] = stamp(folder)  # before reading, so that a change meanwhile is noticed next time
        for file in path_files(folder):
            watched[file] = stamp(file)
    torch = torch_build(watched)
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "base_prefix": sys.base_prefix,
        },
        "packages": distributions(),
        "torch": torch,
        "watched": watched,
    }


def stamp(path: str) -> list[int] | None:
    """[mtime in ns, size] of a file or folder; None when it is not there."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return [facts.st_mtime_ns, facts.st_size]


def path_files(folder: str) -> list[str]:
    """The .pth files of a folder: edited in place, they change sys.path and leave the folder's own time alone."""
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth")]
    except OSError:
        return []


def distributions() -> dict[str, str]:
    """Every distribution on sys.path: canonical name → version. The first on the path wins, as it does on import."""
    from importlib import metadata

    found: dict[str, str] = {}
    for one in metadata.distributions():
        try:
            name, version = one.metadata["Name"], one.version
        except Exception:
            continue  # a half-removed distribution
        if name and version:
            found.setdefault(canonical(name), version)
    return dict(sorted(found.items()))


def torch_build(watched: dict[str, Any]) -> dict[str, str | None] | None:
    """What torch/version.py says, read and not imported; None when there is no torch."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    path = os.path.join(next(iter(spec.submodule_search_locations)), "version.py")
    watched[path] = stamp(path)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            values = assignments(file.read())
    except OSError:
        return {"version": None, "cuda": None, "hip": None, "build": "unknown"}
    build = "cuda" if values.get("cuda") else "rocm" if values.get("hip") else "cpu"
    return {
        "version": values.get("__version__"),
        "cuda": values.get("cuda"),
        "hip": values.get("hip"),
        "build": build if "cuda" in values else "unknown",
    }


def assignments(source: str) -> dict[str, Any]:
    """The module-level names of ``source`` that are given a literal, annotated or not."""
    values: dict[str, Any] = {}
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return values
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        try:
            value = ast.literal_eval(statement.value)  # type: ignore[arg-type]
        except ValueError:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                values[target.id] = value
    return values


# --- what surrounds it: asked anew every time ------------------------------------------------------------------------


def volatile() -> dict[str, Any]:
    """Kernel, driver, libcuda, nvcc, JIT caches and environment, as this process finds them."""
    return {
        "kernel": " ".join(platform.uname()[index] for index in (0, 2, 4)),
        "driver": kernel_driver(),
        "libcuda": mapped_libcuda(),
        "nvcc": nvcc(),
        "jit_caches": jit_caches(),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """The variables with our prefixes, without secrets."""
    return {
        name: redact(name, value).encode("utf-8", "replace").decode()
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES)
    }


def kernel_driver() -> str | None:
    """The NVIDIA driver's version as its kernel module tells it, without NVML."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            match = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read())
    except OSError:
        return None
    return match.group(1) if match else None


def mapped_libcuda() -> str | None:
    """The libcuda.so.1 that a server started like this would get; loading it opens no CUDA context."""
    try:
        ctypes.CDLL("libcuda.so.1")
        with open("/proc/self/maps", errors="replace") as file:
            for line in file:
                if "libcuda.so" in line:
                    return line.split(None, 5)[5].strip()
    except OSError:
        pass
    return None


def nvcc() -> dict[str, str | None]:
    """The compiler that JIT builds would find: CUDA_HOME or CUDA_PATH, else the PATH, else /usr/local/cuda.

    The order is torch.utils.cpp_extension's and FlashInfer's. A home that is set and has no nvcc is not passed over.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(path, os.X_OK):
        return {"path": None, "release": None, "missing": path if home else None}
    try:
        text = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=15
        ).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.SubprocessError):
        text = ""
    match = re.search(r"release \d+\.\d+, V(\d+(?:\.\d+)+)", text)
    return {"path": path, "release": match.group(1) if match else None, "missing": None}


def jit_caches() -> dict[str, dict[str, str]]:
    """Folders of compiled kernels, and whether a boot would find any there: "warm", "cold" or "unreadable"."""
    found = {}
    for name, folders in jit_folders().items():
        states = [(folder, temperature(folder)) for folder in folders]
        folder, state = next((one for one in states if one[1] != "cold"), states[0])
        found[name] = {"path": folder, "state": state}
    return found


def jit_folders() -> dict[str, list[str]]:
    """Where each JIT keeps its kernels, as its own code chooses the place."""
    env = os.environ.get
    home = os.path.expanduser("~")
    cache = env("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    try:
        import getpass

        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except Exception:
        user = str(os.getuid()) if hasattr(os, "getuid") else ""
    deep_gemm = env("DG_JIT_CACHE_DIR") or env("SGLANG_DG_CACHE_DIR") or env("SGL_DG_CACHE_DIR") or env("DG_CACHE_DIR")
    return {
        "flashinfer": [os.path.join(env("FLASHINFER_WORKSPACE_BASE") or home, ".cache", "flashinfer")],
        "triton": [env("TRITON_CACHE_DIR") or os.path.join(env("TRITON_HOME") or home, ".triton", "cache")],
        "torch_extensions": [env("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")],
        "inductor": [env("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_" + user)],
        # SGLang's default, then DeepGEMM's own
        "deep_gemm": [deep_gemm]
        if deep_gemm
        else [os.path.join(home, ".cache", "deep_gemm"), os.path.join(home, ".deep_gemm")],
        "tvm_ffi": [env("TVM_FFI_CACHE_DIR") or os.path.join(home, ".cache", "tvm-ffi")],
    }


def temperature(folder: str) -> str:
    """Whether any file but locks and logs lies below ``folder``."""
    refused: list[OSError] = []
    for _, _, files in os.walk(folder, onerror=refused.append):
        if any(not name.endswith((".lock", ".tmp", ".log")) for name in files):
            return "warm"
    return "unreadable" if any(isinstance(error, PermissionError) for error in refused) else "cold"


def die_with(parent: int) -> None:
    """End with the process that asked, however it ends."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Write the answer to the descriptor."""
    threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    answer = {"volatile": volatile()}
    if sys.argv[2] == "all":
        answer["durable"] = durable()
    with os.fdopen(int(sys.argv[1]), "wb") as out:
        out.write(json.dumps(answer).encode("ascii") + b"\n")


if __name__ == "__main__":
    main()
