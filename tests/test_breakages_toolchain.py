"""Public breakages that need no model, each with its symptom and cured, through the claim that is shipped for it.

The numbers are those of docs/breakages.md. Nothing here fakes a message that a loader, an interpreter or gcc can write.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .fake_wheels import EXTENSION, FakeStack, fat_binary, link, needing, node_of, run_suite, with_code
from .needs import need_tool
from .standin.fixtures import FakeRigFactory

Evaluate = Callable[..., list[str]]

#: What sgl_kernel does when its compiled part cannot be loaded (sgl-kernel/python/sgl_kernel/load_utils.py).
SGL_KERNEL = """\
import ctypes, os, torch
path = os.path.join(os.path.dirname(__file__), "sm100", "common_ops.abi3.so")
try:
    ctypes.CDLL(path)
except OSError as error:
    raise ImportError(
        "\\n[sgl_kernel] CRITICAL: Could not load any common_ops library!\\n\\nGPU Info:\\n- Compute capability: 120\\n"
        f"- Expected variant: SM120\\n\\nError details from previous import attempts:\\n- ImportError: {error}\\n"
    )
torch.OPS.append("sgl_kernel::rmsnorm")
"""
COMMON_OPS = "sgl_kernel/sm100/common_ops.abi3.so"
#: A package that loads a library of its own folder when it is imported.
LOADS = """\
import ctypes, os
ctypes.CDLL(os.path.join(os.path.dirname(__file__), "lib", "{}"), ctypes.RTLD_GLOBAL)
"""
LIBCUDA = """\
#include <stdlib.h>
#include <string.h>
static int number = {number};
int cuInit(unsigned flags) {{ return number; }}
int cuDeviceGetCount(int* count) {{
    const char* seen = getenv("CUDA_VISIBLE_DEVICES");
    *count = 1;
    for (; seen && *seen; seen++) *count += *seen == ',';
    return 0;
}}
int cuDriverGetVersion(int* version) {{ *version = 13000; return 0; }}
int cuGetErrorName(int error, const char** name) {{
    *name = error == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    return 0;
}}
int cuGetErrorString(int error, const char** text) {{
    *text = error == 802 ? "system not yet initialized"
                         : "system has unsupported display driver / cuda driver combination";
    return 0;
}}
"""
#: What `nvcc --version` and `nvcc --list-gpu-arch` of Ubuntu's nvidia-cuda-toolkit 11.5 and of CUDA 13.0 print.
NVCC = """\
for argument; do last=$argument; done
case $1 in
--version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
--list-gpu-arch) for one in {known}; do echo compute_$one; done ;;
*) grep -q __global__ "$last" ;;
esac
"""
NVCC_11 = NVCC.format(release="11.5", known="35 37 50 52 53 60 61 62 70 72 75 80 86 87")
NVCC_13 = NVCC.format(release="13.0", known="75 80 86 87 88 89 90 100 110 103 120 121")
#: ptxas of CUDA 12.4 and of 12.8, as far as Triton asks.
PTXAS = """\
case $1 in
--version) echo "Cuda compilation tools, release {release}, V{release}.99" ;;
--gpu-name=sm_120a) {then} ;;
*) exit 1 ;;
esac
"""
PTXAS_OLD = PTXAS.format(
    release="12.4", then="""echo "ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'" >&2; exit 255"""
)
PTXAS_NEW = PTXAS.format(release="12.8", then="exit 0")


@pytest.fixture
def stack(tmp_path: Path, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch) -> FakeStack:
    """A stack for CUDA 13 on a machine with one SM120 card; neither toolkits nor libraries of this machine are seen."""
    need_tool("gcc")
    fake_rig(n=1).apply(monkeypatch)
    for name in ("CUDA_HOME", "CUDA_PATH", "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)
    made = FakeStack(tmp_path / "stack")
    made.torch()
    return made


@pytest.fixture
def evaluate(stack: FakeStack, pytester: pytest.Pytester) -> Evaluate:
    """What is said of shipped claims, by their ids, for the stack as it is now: verdict, outcome, and the fact."""

    def said(*claims: str) -> list[str]:
        tests = [node_of(claim) for claim in claims]
        told = run_suite(pytester, stack.python, *tests)
        return [told[test] for test in tests]

    return said


def _is(verdict: str, what: str, *texts: str) -> None:
    assert verdict.startswith(what), verdict
    for text in texts:
        assert text in verdict, verdict


WORSE = "CONTRADICTED (worse) "


# -------------------------------------------------------------------------------------------------- code for the GPU


def test_5_a_wheel_without_code_for_sm120(stack: FakeStack, evaluate: Evaluate) -> None:
    stack.file("sgl_kernel/__init__.py")
    stack.library(COMMON_OPS, with_code(fat_binary("sm_90a", "sm_100a", "compute_90a")))
    (broken,) = evaluate("preflight.code[sgl_kernel]")
    _is(broken, WORSE + "unsupported.arch", "no code for sm_120", "carries compute_90a sm_100a sm_90a")
    stack.library(COMMON_OPS, with_code(fat_binary("sm_90a", "sm_100a", "sm_120a")))
    (cured,) = evaluate("preflight.code[sgl_kernel]")
    _is(cured, "HOLDS", "sgl_kernel carries sm_120a for sm_120")


def test_5_a_kernel_without_an_image_for_the_card_is_no_memory_problem(stack: FakeStack, evaluate: Evaluate) -> None:
    stack.computes()
    stack.library(COMMON_OPS)
    norm = 'import torch\ntorch.OPS.append("sgl_kernel::rmsnorm")\n\n\ndef rmsnorm(rows, weight, eps):\n    {}\n'
    fails = (
        'raise RuntimeError("RMSNorm failed with error code no kernel image is available for execution on the device")'
    )
    stack.file("sgl_kernel/__init__.py", norm.format(fails))
    (broken,) = evaluate("preflight.runs[sgl_kernel]")
    _is(broken, WORSE + "unsupported.arch", "no kernel image is available")
    stack.file("sgl_kernel/__init__.py", norm.format("return rows + 1"))
    (wrong,) = evaluate("preflight.runs[sgl_kernel]")
    _is(wrong, WORSE + "numerics", "rmsnorm of ones is 2.0…2.0, and should be 1.0")
    stack.file("sgl_kernel/__init__.py", norm.format("return rows"))
    (cured,) = evaluate("preflight.runs[sgl_kernel]")
    _is(cured, "HOLDS")


def test_15_a_build_of_vllm_without_the_fp8_kernel(stack: FakeStack, evaluate: Evaluate) -> None:
    """vllm-project/vllm#32109 met it while memory was profiled; here nothing but the kernel is asked for."""
    stack.computes()
    stack.wheel("vllm", "0.26.0")
    stack.file("vllm/__init__.py", 'import torch\ntorch.OPS.append("_C::rms_norm")\n')
    stack.library("vllm/_C.abi3.so", EXTENSION + with_code(fat_binary("sm_90a", "sm_100a")))
    gemm = "import torch\n\n\ndef cutlass_scaled_mm(left, right, scale_a, scale_b, out_dtype):\n    {}\n"
    message = "No compiled cutlass_scaled_mm for CUDA device capability: 120"
    stack.file("vllm/_custom_ops.py", gemm.format(f"raise NotImplementedError({message!r})"))
    claims = ("preflight.runs[vllm]", "preflight.code[vllm]")
    runs, code = evaluate(*claims)
    _is(runs, WORSE + "unsupported.arch", message)
    _is(code, WORSE + "unsupported.arch", "vllm has no code for sm_120")
    stack.library("vllm/_C.abi3.so", EXTENSION + with_code(fat_binary("sm_90a", "sm_120a")))
    stack.file("vllm/_custom_ops.py", gemm.format("return left @ right"))
    for cured in evaluate(*claims):
        _is(cured, "HOLDS")


def test_6_a_ptxas_that_does_not_know_sm120a(
    stack: FakeStack, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.file("triton/__init__.py")
    bundled = stack.tool("triton/backends/nvidia/bin/ptxas", PTXAS_OLD)
    (broken,) = evaluate("preflight.ptxas")
    _is(broken, WORSE + "jit.compile", "Value 'sm_120a' is not defined for option 'gpu-name'", "bundled with Triton")
    other = stack.tool("bin/ptxas", PTXAS_NEW)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    (cured,) = evaluate("preflight.ptxas")
    _is(cured, "HOLDS", "by TRITON_PTXAS_PATH")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    shutil.copy(other, bundled)
    (cured,) = evaluate("preflight.ptxas")
    _is(cured, "HOLDS", "ptxas 12.8 (bundled with Triton) assembles for sm_120a")


# ------------------------------------------------------------------------------------------------- what links to what


def test_8_a_kernel_library_of_another_cuda(stack: FakeStack, evaluate: Evaluate, tmp_path: Path) -> None:
    stack.file("sgl_kernel/__init__.py", SGL_KERNEL)
    stack.library(COMMON_OPS, "int unused;", *needing(tmp_path / "gone", "libnvrtc.so.12"))
    claims = ("preflight.import[sgl_kernel]", "preflight.linked")
    fails, differs = evaluate(*claims)
    _is(fails, WORSE + "import.abi", "libnvrtc.so.12: cannot open shared object file")
    _is(differs, WORSE + "import.abi", "torch is built for CUDA 13", "needs libnvrtc.so.12")
    stack.library(COMMON_OPS)
    for cured in evaluate(*claims):
        _is(cured, "HOLDS")


def test_9_a_loader_that_asks_for_the_runtime_of_cuda_12(
    stack: FakeStack, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.file("sgl_kernel/__init__.py", SGL_KERNEL)
    stack.library(COMMON_OPS, "int unused;", *needing(tmp_path / "gone", "libcudart.so.12"))
    claims = ("preflight.import[sgl_kernel]", "preflight.linked")
    fails, differs = evaluate(*claims)
    _is(fails, WORSE + "import.abi", "libcudart.so.12: cannot open shared object file")
    _is(differs, WORSE + "import.abi", "needs libcudart.so.12")
    # Where some toolkit's runtime is on the loader's path the import passes, and the file still asks for the wrong one.
    with monkeypatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'gone'}", prepend=":")
        passes, differs = evaluate(*claims)
        _is(passes, "HOLDS")
        _is(differs, WORSE + "import.abi", "needs libcudart.so.12")
    stack.library(COMMON_OPS)
    for cured in evaluate(*claims):
        _is(cured, "HOLDS")


def test_10_a_kernel_library_built_for_another_torch(stack: FakeStack, evaluate: Evaluate) -> None:
    stack.file("sgl_kernel/__init__.py", SGL_KERNEL)
    call = "void _ZN3c104cuda9SetDeviceEa(signed char); void go(void) { _ZN3c104cuda9SetDeviceEa(0); }"
    stack.library(COMMON_OPS, call)
    (broken,) = evaluate("preflight.import[sgl_kernel]")
    _is(broken, WORSE + "import.abi", "undefined symbol: _ZN3c104cuda9SetDeviceEa")
    stack.library("torch/lib/libc10_cuda.so", "void _ZN3c104cuda9SetDeviceEa(signed char device) {}")
    stack.torch(source=LOADS.format("libc10_cuda.so"))
    (cured,) = evaluate("preflight.import[sgl_kernel]")
    _is(cured, "HOLDS")


def test_21_two_cuda_runtimes_in_one_process(stack: FakeStack, evaluate: Evaluate) -> None:
    stack.library("torch/lib/libcudart.so.13", "int thirteen;")
    stack.torch(source=LOADS.format("libcudart.so.13"))
    stack.library("flashinfer/lib/libcudart.so.12", "int twelve;")
    stack.file("flashinfer/__init__.py", LOADS.format("libcudart.so.12"))
    (broken,) = evaluate("preflight.one_runtime")
    _is(broken, WORSE + "import.abi", "2 CUDA runtimes in one process", "libcudart.so.12", "libcudart.so.13")
    stack.file("flashinfer/__init__.py")
    (cured,) = evaluate("preflight.one_runtime")
    _is(cured, "HOLDS")
    # A single one that is not torch's is as bad.
    stack.torch()
    stack.file("flashinfer/__init__.py", LOADS.format("libcudart.so.12"))
    (broken,) = evaluate("preflight.one_runtime")
    _is(broken, WORSE + "import.abi", "torch is built for CUDA 13")


# ---------------------------------------------------------------------------------------------------------- the driver


def test_11_a_driver_that_is_not_up(
    stack: FakeStack, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _libcuda(tmp_path / "driver", 802, monkeypatch)
    (broken,) = evaluate("preflight.cuinit")
    _is(broken, "INFRA driver.mismatch", "Error 802: system not yet initialized", "nv-fabricmanager does not run")
    _libcuda(tmp_path / "driver", 0, monkeypatch)
    (cured,) = evaluate("preflight.cuinit")
    _is(cured, "HOLDS", "cuInit 0, 1 GPU(s), CUDA 13.0")


def test_12_compat_libraries_of_an_image(
    stack: FakeStack, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        compat = tmp_path / "cuda-13.0" / "compat"
        _libcuda(compat, 803, patch)
        (broken,) = evaluate("preflight.cuinit")
        _is(broken, "INFRA driver.mismatch", "Error 803: system has unsupported display driver")
        _is(broken, "INFRA", f"libcuda is {compat}/libcuda.so.1", "a compat library, by LD_LIBRARY_PATH")
    _libcuda(tmp_path / "driver", 0, monkeypatch)
    (cured,) = evaluate("preflight.cuinit")
    _is(cured, "HOLDS")


def _libcuda(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libcuda.so.1 whose cuInit returns that, first on the loader's path."""
    folder.mkdir(parents=True, exist_ok=True)
    link(folder / "libcuda.so.1", LIBCUDA.format(number=number))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder), prepend=":")


# ------------------------------------------------------------------------------------------------- compilers and wheels


def test_13_an_old_nvcc_on_the_path(stack: FakeStack, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(stack.tool("usr/bin/nvcc", NVCC_11).parent), prepend=":")
    (broken,) = evaluate("preflight.nvcc")
    _is(broken, WORSE + "jit.compile", "nvcc 11.5 does not know compute_120, torch is built for CUDA 13.0")
    home = stack.tool("cuda-13.0/bin/nvcc", NVCC_13).parent.parent
    monkeypatch.setenv("CUDA_HOME", str(home))
    (cured,) = evaluate("preflight.nvcc")
    _is(cured, "HOLDS", "nvcc 13.0, found by CUDA_HOME, compiles for sm_120")


def test_14_an_upgrade_in_place_that_keeps_quack(stack: FakeStack, evaluate: Evaluate) -> None:
    stack.wheel("nvidia-cutlass-dsl", "4.6.0")
    stack.wheel("quack-kernels", "0.4.1", "torch", "nvidia-cutlass-dsl>=4.4.1")
    stack.file("cutlass/__init__.py")
    stack.file("cutlass/cute/__init__.py", "from . import core\n")
    stack.file("cutlass/cute/core.py")
    stack.file("quack/__init__.py", "from cutlass.cute import core\nMMA = core.ThrMma\n")
    claims = ("preflight.import[quack]", "preflight.other_pins")
    broken, pins = evaluate(*claims)
    _is(broken, WORSE + "import.abi", "module 'cutlass.cute.core' has no attribute 'ThrMma'")
    _is(pins, "HOLDS")  # their own words allow the pair
    stack.wheel("quack-kernels", "0.4.1", "torch", "nvidia-cutlass-dsl==4.4.1")
    (pins,) = evaluate("preflight.other_pins")
    told = "quack-kernels 0.4.1 requires nvidia-cutlass-dsl==4.4.1, installed is nvidia-cutlass-dsl 4.6.0"
    _is(pins, WORSE + "import.abi", told)
    stack.wheel("quack-kernels", "0.6.1", "torch", "nvidia-cutlass-dsl==4.6.0")
    stack.file("quack/__init__.py", "from cutlass.cute import core\n")
    for cured in evaluate(*claims):
        _is(cured, "HOLDS")


def test_20_an_nvidia_wheel_that_torch_does_not_pin(stack: FakeStack, evaluate: Evaluate) -> None:
    stack.torch("2.11.0+cu130", "13.0", "", 'nvidia-cublas==13.1.0.3; platform_system == "Linux"')
    stack.wheel("nvidia-cublas", "13.0.2.14")
    (broken,) = evaluate("preflight.nvidia_wheels")
    told = "torch 2.11.0+cu130 requires nvidia-cublas==13.1.0.3, installed is nvidia-cublas 13.0.2.14"
    _is(broken, WORSE + "import.abi", told)
    stack.wheel("nvidia-cublas", "13.1.0.3")
    (cured,) = evaluate("preflight.nvidia_wheels")
    _is(cured, "HOLDS")
