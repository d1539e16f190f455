"""Finds out which nvcc a just-in-time build would take, and whether it can compile for the GPUs of this machine.

The way it is looked for is that of torch, tvm-ffi, FlashInfer and SGLang. Must never choose a better one by itself.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import tempfile
from importlib import metadata
from typing import NoReturn

from pytest_gpuguard.probes import kit

KERNEL = "__global__ void gpuguard(float* one) { *one += 1; }\n"
#: The oldest CUDA whose nvcc FlashInfer builds with for a major of the SM, and the release from which on it does so
#: (flashinfer/compilation_context.py, flashinfer-ai/flashinfer#2577).
FLASHINFER_WANTS = {12: (12, 9)}
FLASHINFER_SINCE = (0, 6, 7)
#: The oldest that DeepGEMM builds with (DeepGEMM csrc/jit/compiler.hpp); it has kernels for these majors.
DEEP_GEMM_WANTS = (12, 3)
DEEP_GEMM_MAJORS = (9, 10)
#: Variables that make one builder take another compiler (flashinfer/jit/cpp_ext.py, torch/utils/cpp_extension.py).
OTHER_COMPILERS = ("FLASHINFER_NVCC", "PYTORCH_NVCC", "DG_JIT_NVCC_COMPILER")


def run() -> None:
    """Find it, ask what it knows, hold it against torch, compile three lines for each SM."""
    torch_cuda = build_of_torch()
    kit.answer(torch_cuda=torch_cuda)
    path, how = find()
    kit.answer(path=path, found_by=how)
    if not kit.sms():
        kit.absent(
            "gpus",
            "no GPU here for whose architecture a kernel would be compiled" + (f"; nvcc is {path}" if path else ""),
        )
    if path is None or not os.access(path, os.X_OK):
        _missing(path, how)
    kit.stage(f"ask {path}")
    try:
        code, text = kit.run_tool([path, "--version"], 20.0)
    except OSError as error:  # no program of this machine
        kit.defect("jit.compile", f"{path} cannot be started: {error.strerror}")
    release = re.search(r"release (\d+)\.(\d+)", text)
    if code != 0 or release is None:
        how = "does not end within 20 s" if code is None else f"gives {_last(text) or 'nothing'} (exit status {code})"
        kit.defect("jit.compile", f"{path} --version {how}")
    version = (int(release.group(1)), int(release.group(2)))
    said, where = f"nvcc {version[0]}.{version[1]}", f" ({path}, found by {how})"
    kit.answer(version=f"{version[0]}.{version[1]}")
    _, text = kit.run_tool([path, "--list-gpu-arch"], 20.0)
    known = set(re.findall(r"compute_(\d+)", text))
    kit.answer(known=sorted(known))
    for sm in kit.sms():
        if known and sm not in known:
            print(text)
            if int(sm) < min(map(int, known)):
                kit.defect(
                    "jit.compile",
                    f"{said} no longer knows compute_{sm}{where}: take an older toolkit, or hide that GPU "
                    f"(CUDA_VISIBLE_DEVICES){_others(path)}",
                )
            kit.defect(
                "jit.compile",
                f"{said} does not know compute_{sm}, torch is built for CUDA {torch_cuda or 'none'}{where}: set "
                f"CUDA_HOME to a newer toolkit{_others(path)}",
            )
    for sm in kit.sms():
        wanted = FLASHINFER_WANTS.get(int(sm[:-1]))
        if wanted and version < wanted and _flashinfer_refuses():
            kit.defect(
                "jit.compile",
                f"{said} is too old for FlashInfer: SM {sm[:-1]}.x requires CUDA >= {wanted[0]}.{wanted[1]}, else it "
                f"builds for no GPU{where}{_others(path)}",
            )
        _compile(path, sm)
    compiles = f"{said}, found by {how}, compiles for sm_{', sm_'.join(kit.sms())} ({path})"
    kit.answer(said="; ".join([compiles, *_notes(version, torch_cuda)]))


def _notes(version: tuple[int, int], torch_cuda: str | None) -> list[str]:
    """What some builder lacks, or takes instead: no defect, because others go on, and kernels may be precompiled."""
    found = []
    if torch_cuda is not None and int(torch_cuda.partition(".")[0]) != version[0]:
        # SGLang's and FlashInfer's builds go on (sglang/kernels/jit/utils/arch.py).
        found.append(f"it is of another major than torch's CUDA {torch_cuda}: torch's own extensions refuse it")
    deep_gemm = _version("sgl-deep-gemm") or _version("deep-gemm")
    if deep_gemm and version < DEEP_GEMM_WANTS and any(int(sm[:-1]) in DEEP_GEMM_MAJORS for sm in kit.sms()):
        found.append(f"DeepGEMM refuses it: it requires nvcc >= {DEEP_GEMM_WANTS[0]}.{DEEP_GEMM_WANTS[1]}")
    if (_version("flashinfer-python") or _version("sglang")) and shutil.which("ninja") is None:
        found.append("no ninja in the PATH: FlashInfer and SGLang compile nothing without (pip install ninja)")
    for name in OTHER_COMPILERS:
        if os.environ.get(name):
            found.append(f"{name} makes its builder take {os.environ[name]} instead, which is not judged")
    kit.answer(notes=found)
    return found


def _flashinfer_refuses() -> bool:
    """Whether the installed FlashInfer takes no older nvcc; it does where its list has suffixes ("12.0a")."""
    version = tuple(map(int, re.findall(r"\d+", (_version("flashinfer-python") or "").partition("+")[0])[:3]))
    return version >= FLASHINFER_SINCE and not re.search(
        r"\d[a-z](?:\s|$)", os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "")
    )


def build_of_torch() -> str | None:
    """The CUDA that torch was built for, read and not imported; None without torch and for other builds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
                found = re.search(r"""^cuda(?:: [^=\n]*)? = ["'](\d+\.\d+)""", file.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return found.group(1)
    return None


def find() -> tuple[str | None, str]:
    """Path and way: CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda. A home without an nvcc is not passed over."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return os.path.join(os.environ[name], "bin", "nvcc"), name
    path = shutil.which("nvcc")
    if path:
        # Builders take the folder above: a link or wrapper in /usr/local/bin makes them look in /usr/local/bin/nvcc.
        return path, "PATH"
    return ("/usr/local/cuda/bin/nvcc", "default") if os.path.isdir("/usr/local/cuda") else (None, "nothing")


def _missing(path: str | None, how: str) -> NoReturn:
    cure = _others(None) or "; install the toolkit of torch's CUDA, or precompiled kernels"
    # A runtime image has /usr/local/cuda without an nvcc: FlashInfer then goes by torch's CUDA and what is precompiled.
    if path is not None and how not in ("PATH", "default"):
        kit.defect("jit.compile", f"a just-in-time build looks for {path} ({how}), which is no program{cure}")
    kit.absent(
        "tools", f"no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda: kernels cannot be compiled here{cure}"
    )


def _others(path: str | None) -> str:
    """Other toolkits of this machine: what CUDA_HOME could be set to."""
    homes = glob.glob("/usr/local/cuda-*")
    spec = importlib.util.find_spec("nvidia")  # what the wheels nvidia-cuda-nvcc bring
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        homes += glob.glob(os.path.join(folder, "*"))
    real = os.path.realpath(path) if path else None
    found = [one for one in sorted(homes) if os.access(os.path.join(one, "bin", "nvcc"), os.X_OK)]
    found = [one for one in found if os.path.realpath(os.path.join(one, "bin", "nvcc")) != real]
    return f"; here are also {', '.join(found[:4])}" if found else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compile(path: str, sm: str) -> None:
    target = f"{sm}a" if int(sm) >= 90 else sm
    kit.stage(f"compile for sm_{target}")
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "gpuguard.cu")
        with open(source, "w") as file:
            file.write(KERNEL)
        argv = [path, f"-gencode=arch=compute_{target},code=sm_{target}", "-cubin", "-o", source + "bin", source]
        code, text = kit.run_tool(argv, 60.0)
    if code != 0:
        print(text)
        how = "did not end within 60 s" if code is None else f"fails: {_last(text) or f'exit status {code}'}"
        kit.defect("jit.compile", f"nvcc for sm_{target} {how} ({path})")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if "fatal" in line or "error" in line]
    return (fatal or lines or [""])[-1][:300]


if __name__ == "__main__":
    kit.main(run)
