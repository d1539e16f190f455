"""Finds out whether a kernel library imports, holds what it should have compiled, and runs a kernel.

``args``: ``name`` (of TABLE), or ``all`` (names) for several at once, each in a process of its own; ``launch`` to also
run a kernel. Must never compile one that takes minutes, nor take an import without a GPU for all: sgl_kernel then loads
its file for SM100, and on Hopper another one, which only the launch shows.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import re
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple, NoReturn

from pytest_gpuguard.probes import kit


class Library(NamedTuple):
    """A kernel library: its distributions, the modules that it may be, and what it must hold.

    ``compiled``: how the names of the files begin that it cannot do without ("": any compiled one); ``ops``: the
    namespace of its torch operators; ``launch``: the function here that runs one of its kernels; ``own``: its folder
    may be another wheel's, and counts only with a distribution; ``source``: a folder of releases with nothing compiled.
    """

    distributions: tuple[str, ...]
    modules: tuple[str, ...]
    compiled: str | None = None
    ops: str | None = None
    launch: str | None = None
    own: bool = False
    source: str | None = None


TABLE = {
    "sgl_kernel": Library(
        ("sglang-kernel", "sgl-kernel"), ("sgl_kernel",), "common_ops", "sgl_kernel", "launch_sgl_kernel"
    ),
    "flashinfer": Library(("flashinfer-python",), ("flashinfer",), launch="launch_flashinfer"),
    "vllm": Library(("vllm",), ("vllm._C", "vllm._C_stable_libtorch"), r"_C[._]", "_C", "launch_vllm"),
    "triton": Library(("triton",), ("triton",), "libtriton", launch="launch_triton"),
    "deep_gemm": Library(("sgl-deep-gemm", "deep-gemm"), ("deep_gemm",), "", source="jit_kernels"),
    "deep_ep": Library(("sgl-deep-ep", "deep-ep"), ("deep_ep",), ""),
    "flash_mla": Library(("sgl-flash-mla", "flash-mla"), ("flash_mla",), ""),
    "flash_attn": Library(("flash-attn",), ("flash_attn_2_cuda",), "flash_attn_2_cuda", launch="launch_flash_attn"),
    "flash_attn_4": Library(("flash-attn-4",), ("flash_attn.cute",), own=True),
    "quack": Library(("quack-kernels",), ("quack",)),
    "cutlass": Library(("nvidia-cutlass-dsl",), ("cutlass.cute",)),
    "tilelang": Library(("tilelang",), ("tilelang",), ""),
    "b12x": Library(("b12x",), ("b12x",)),
}
#: How long one of several may take, in seconds.
LIMIT_S = 60.0
#: What is said where a library needs the driver's own to be imported, and there is no GPU.
NO_DRIVER = re.compile(r"libcuda\.so|libnvidia-ml\.so|No CUDA GPUs are available|Found no NVIDIA driver")


def run() -> None:
    """One library, or several at once."""
    names = kit.args.get("all")
    if names is None:
        look(kit.args.get("name"))
        return
    found = [name for name in names if find(_named(name)) is not None]
    kit.stage(f"look at {', '.join(found) or 'none'}")
    launch = {"launch": True} if kit.args.get("launch") else {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        ended = threads.map(lambda one: kit.child("run", LIMIT_S, args={"name": one, **launch}), found)
        holds = [name for name, rank in zip(found, ended) if rank.ok]  # noqa: B905 (strict= is newer than 3.8)
    said = f"{', '.join(holds) or 'none'} of {len(found)} that are installed"
    kit.answer(holds=holds, installed=found, said=f"{said}: {'run a kernel' if launch else 'import'}")


def _named(name: Any) -> Library:
    if name not in TABLE:
        raise ValueError(f"args name {name!r}: one of {', '.join(sorted(TABLE))}")
    return TABLE[name]


def look(name: Any) -> None:
    """Look at the files of one library, import it, look at its operators, launch a kernel."""
    library = _named(name)
    module, folder = find(library) or _not_there(library)
    version = _version(library, folder)
    kit.answer(name=name, module=module, version=version, folder=folder)
    files = list(compiled_files(folder, library.compiled)) if library.compiled is not None else []
    if library.compiled is not None and not files and not _of_sources(library, folder):
        kit.defect(
            "import.abi",
            f"{name} {version} has no compiled library {library.compiled}".rstrip()
            + f": a stand-in, or a broken installation, of which nothing can run ({folder})",
        )
    if not kit.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an import must not open a context on a GPU that another has leased
    kit.stage(f"import {module}")
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        if not kit.gpus and NO_DRIVER.search(str(error)):
            kit.absent("gpus", f"{module} needs the NVIDIA driver to be imported: {str(error).strip().splitlines()[0]}")
        raise
    except AssertionError as error:  # DeepGEMM's has no text
        if traceback.extract_tb(error.__traceback__)[-1].name.lstrip("_") == "find_cuda_home":
            kit.defect("jit.compile", f"{module} finds no CUDA toolkit on import: set CUDA_HOME to one with an nvcc")
        raise
    said = [f"{name} {version} imports"]
    if library.ops is not None:
        said.append(f"{_operators(name, library.ops)} operators")
    if kit.args.get("launch"):
        if library.launch is None or not kit.gpus:
            kit.absent("gpus", "no GPU is leased" if library.launch else f"no kernel of {name} is known to be launched")
        cuda = getattr(importlib.import_module("torch").version, "cuda", None)
        if cuda is None:
            kit.absent("cuda", "torch is no CUDA build here: what that means, the claim about torch tells")
        kit.stage(f"launch a kernel of {name}")
        said.append(globals()[library.launch]())
    kit.answer(said=", ".join(said))


def find(library: Library) -> tuple[str, str] | None:
    """The module to import, and the folder or file where its top package lies; None when there is none."""
    if library.own and not any(map(_distribution, library.distributions)):
        return None  # flash-attn 2 and some releases of sgl-kernel bring flash_attn/cute along
    for module in library.modules:
        top = module.partition(".")[0]
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            continue
        folders = list(spec.submodule_search_locations or ())
        below = module.partition(".")[2]
        if below and not any(one.partition(".")[0] == below for folder in folders for one in _names(folder)):
            continue  # two distributions may share a package, and releases name their parts differently
        return module, folders[0] if folders else str(spec.origin)
    return None


def _of_sources(library: Library, folder: str) -> bool:
    return library.source is not None and os.path.isdir(os.path.join(folder, library.source))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _not_there(library: Library) -> NoReturn:
    installed = [one for one in library.distributions if _distribution(one) is not None]
    if installed:
        kit.defect(
            "import.abi",
            f"{installed[0]} {_distribution(installed[0])} is installed, its module {library.modules[0]} is not there",
        )
    kit.absent("package", f"{' or '.join(library.distributions)} is not installed in this stack")


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version(library: Library, folder: str) -> str:
    for one in library.distributions:
        version = _distribution(one)
        if version:
            return version
    for name in ("__init__.py", "version.py", "_version.py"):
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                found = re.search(r"""^__version__ = ["']([^"']{1,60})["']""", file.read(100_000), re.MULTILINE)
        except OSError:
            continue
        if found:
            return f"{found.group(1)} (of no distribution)"
    return "of unknown version"


def compiled_files(folder: str, names: str | None) -> Iterator[str]:
    """The ELF libraries of a package (or the one file) whose name begins so; text in a file called .so is none.

    They may lie beside the package: deep_ep_cpp.*.so is DeepEP's.
    """
    found = [folder]
    if os.path.isdir(folder):
        found = [os.path.join(root, one) for root, _, files in os.walk(folder) for one in files if ".so" in one]
        found += glob.glob(glob.escape(folder) + "_*.so*")
    for path in sorted(found):
        if names and not re.match(names, os.path.basename(path)):
            continue
        try:
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path
        except OSError:
            continue


def _operators(name: str, namespace: str) -> int:
    import torch

    names = torch._C._dispatch_get_all_op_names()
    count = sum(str(one).startswith(namespace + "::") for one in names)
    kit.answer(operators=count)
    if not count:
        kit.defect(
            "import.abi", f"{name} imports and registers no operator {namespace}::…: nothing compiled was loaded"
        )
    return count


# -------------------------------------------------------------------------------------------------------- launches


def _ones(torch: Any, result: Any, value: float, what: str) -> str:
    got = result.float()
    if not bool(((got - value).abs() <= 0.02 * abs(value)).all()):
        kit.defect("numerics", f"{what} of ones is {float(got.min())}…{float(got.max())}, and should be {value}")
    return f"{what} runs and is right"


def launch_sgl_kernel() -> str:
    """RMSNorm: the first kernel of every model."""
    import torch

    sgl_kernel = importlib.import_module("sgl_kernel")
    if not callable(getattr(sgl_kernel, "rmsnorm", None)):
        return "this release has no rmsnorm to launch"
    ones = torch.ones(4, 128, dtype=torch.bfloat16, device="cuda")
    return _ones(torch, sgl_kernel.rmsnorm(ones, ones[0].contiguous(), 1e-6), 1.0, "rmsnorm")


def launch_vllm() -> str:
    """The FP8 GEMM where the card has FP8 (it is compiled per architecture), else RMSNorm."""
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        out = torch.empty(4, 128, dtype=torch.bfloat16, device="cuda")
        torch.ops._C.rms_norm(out, torch.ones_like(out), torch.ones_like(out[0]), 1e-6)
        return _ones(torch, out, 1.0, "rms_norm")
    left = torch.ones(16, 64, device="cuda").to(torch.float8_e4m3fn)
    right = torch.ones(32, 64, device="cuda").to(torch.float8_e4m3fn).t()
    scale = torch.ones(1, device="cuda")
    product = importlib.import_module("vllm._custom_ops").cutlass_scaled_mm(left, right, scale, scale, torch.bfloat16)
    return _ones(torch, product, 64.0, "the FP8 GEMM")


def launch_flash_attn() -> str:
    """One small attention: over values of one it is one."""
    import torch

    attention = importlib.import_module("flash_attn").flash_attn_func
    ones = torch.ones(1, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    return _ones(torch, attention(ones, ones, ones, causal=True), 1.0, "attention")


def launch_flashinfer() -> str:
    """Which targets its JIT builds for; compiling a kernel takes minutes and is left to the engine."""
    if importlib.util.find_spec("flashinfer.compilation_context") is None:
        return "what its JIT builds for, this release does not tell"
    context = importlib.import_module("flashinfer.compilation_context")
    targets = sorted(context.CompilationContext().TARGET_CUDA_ARCHS)
    kit.answer(targets=[f"{major}.{minor}" for major, minor in targets])
    missing = [sm for sm in kit.sms() if int(sm[:-1]) not in {int(major) for major, _ in targets}]
    if missing:
        kit.defect(
            "jit.compile",
            f"FlashInfer would build for {targets or 'nothing'} and not for sm_{', sm_'.join(missing)}, although the "
            "GPU is there: the CUDA toolkit that it finds is too old (SM 12.x requires CUDA >= 12.9), see CUDA_HOME",
        )
    return "its JIT builds for " + ", ".join(f"{major}.{minor}" for major, minor in targets)


TRITON_KERNEL = """\
import triton
import triton.language as tl


@triton.jit
def add_one(pointer, SIZE: tl.constexpr):
    at = pointer + tl.arange(0, SIZE)
    tl.store(at, tl.load(at) + 1)
"""


def launch_triton() -> str:
    """A kernel of three lines, compiled by Triton's own ptxas."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "gpuguard_kernel.py")  # Triton reads a kernel's source from its file
        with open(path, "w") as file:
            file.write(TRITON_KERNEL)
        spec = importlib.util.spec_from_file_location("gpuguard_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ones = torch.ones(128, device="cuda")
        module.add_one[(1,)](ones, SIZE=128)
        return _ones(torch, ones, 2.0, "a Triton kernel")


if __name__ == "__main__":
    kit.main(run)
