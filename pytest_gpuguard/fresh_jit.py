"""``--gpuguard-fresh-jit``: empty caches of compiled kernels, so that a boot pays for, and shows, what it compiles.

It must never empty a cache that is there: boots are pointed at folders of their own, which end with the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .facts.stack import Stack

#: Where a container keeps them, with a name for each boot after it: in its own file system, which ends with it.
INSIDE: Final = "/tmp/gpuguard-jit"
#: Which variable says where each of them is (facts/stack_probe.py reads the same ones), and the folder below ours.
#: XDG_CACHE_HOME is not among them: models are below it too.
_VARIABLES: Final = {
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "SGL_DG_CACHE_DIR": "deep_gemm",
    "DG_CACHE_DIR": "deep_gemm",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CACHE_ROOT": "vllm",
}


def environment(folder: str) -> dict[str, str]:
    """The variables that put every cache that we know of below ``folder``."""
    return {name: f"{folder}/{below}" for name, below in _VARIABLES.items()}


def cold(stack: Stack) -> Stack:
    """The stack as such a boot finds it: no cache has anything in it, wherever the user's own ones are."""
    caches = {name: {**one, "state": "cold"} for name, one in (stack.facts.get("jit_caches") or {}).items()}
    return replace(stack, facts={**stack.facts, "jit_caches": caches})
