"""Whether FlashInfer's JIT makes its allreduce fusion for this GPU: its own module, generated, compiled and loaded.

It must take the module as FlashInfer gives it, with the architectures and flags that FlashInfer chose.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from typing import Any

from pytest_gpuguard.probes import kit

#: Where the generator was, the newest place first.
PLACES = ("flashinfer.jit.comm", "flashinfer.comm.trtllm_ar", "flashinfer.comm")
GENERATOR = "gen_trtllm_comm_module"
#: What FlashInfer says when there is nothing to compile with.
NO_COMPILER = re.compile(
    r"Could not find nvcc|nvcc not found|nvcc: (?:not found|No such file)"
    r"|No such file or directory: '(?:ninja|[^']*nvcc)'"
)


def run() -> None:
    """A module that is not in the cache is only generated, which takes no compiler: compiling it takes minutes.

    ``args``: {"compile": true} compiles it, {"compile": false} does not even load one that is in the cache.
    """
    if not kit.gpus and not os.environ.get("FLASHINFER_CUDA_ARCH_LIST"):
        kit.absent("gpus", "FlashInfer compiles for the GPUs that it sees, and none is leased")
    kit.stage("import flashinfer")
    version = imported()
    kit.stage("generate the module")
    try:
        made = generator(version)()
    except (RuntimeError, FileNotFoundError) as error:
        without_compiler(error)
        raise
    kit.answer(flashinfer=version, compiled=False)
    there = cached(made)
    if not kit.args.get("compile", there):
        why = " (not compiled: it is not in the cache, and that takes minutes; args compile true does it)"
        kit.answer(said=f"flashinfer {version} generates its allreduce fusion for this GPU" + ("" if there else why))
        return
    was = "compiled before" if there else "compiled just now"
    kit.stage("compile and load the module" + ("" if was == "compiled before" else ", which was not in the cache"))
    begun = time.monotonic()
    try:
        made.build_and_load()
    except (RuntimeError, FileNotFoundError) as error:
        without_compiler(error)
        raise
    took = time.monotonic() - begun
    kit.answer(
        compiled=True,
        seconds=round(took, 1),
        said=f"flashinfer {version} has its allreduce fusion for this GPU ({was}, {took:.0f} s)",
    )


def imported() -> str:
    """FlashInfer's version; a stack without it is not judged, one that fails to import is."""
    try:
        found = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            raise
        kit.absent("package", "this stack has no flashinfer")
    return str(getattr(found, "__version__", "of no version"))


def generator(version: str) -> Any:
    """FlashInfer's own function, wherever this release has it."""
    for place in PLACES:
        try:
            found = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:
                raise
            continue
        if hasattr(found, GENERATOR):
            return getattr(found, GENERATOR)
    kit.absent("package", f"flashinfer {version} has no {GENERATOR}: no allreduce fusion of this kind")


def cached(made: Any) -> bool:
    """Whether the library is there already, from the package or from an earlier compilation."""
    if getattr(made, "is_aot", False):
        return True
    path = getattr(made, "jit_library_path", None)
    return path is not None and os.path.exists(path)


def without_compiler(error: Exception) -> None:
    """End the probe when all that is missing is a compiler."""
    found = NO_COMPILER.search(str(error))
    if found is not None:
        kit.absent("tools", f"FlashInfer cannot compile here: {found[0]}")


if __name__ == "__main__":
    kit.main(run)
