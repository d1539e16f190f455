"""Finds out whether torch sees every leased GPU and computes on it, and how its CUDA stands to the driver.

Every result is compared with one that is exact. Must never need more than a few megabytes of a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

from pytest_gpuguard.probes import kit

#: Small enough that every product and sum below is a whole number that bfloat16 holds exactly.
SIZE = 64


def run() -> None:
    """Import torch, start CUDA, and multiply on each GPU."""
    if importlib.util.find_spec("torch") is None:
        kit.absent("package", "torch is not installed in this stack")
    kit.stage("import torch")
    import torch

    cuda = torch.version.cuda
    kit.answer(torch=str(torch.__version__), cuda=cuda, driver_cuda=kit.driver_cuda, leased=len(kit.gpus))
    if cuda is None:
        _no_cuda(torch)
    kit.stage("start CUDA in torch")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        hint = _against_driver(cuda)
        if hint is None:
            raise
        kit.defect("driver.mismatch", f"torch cannot start CUDA: {_first_line(error)}; {hint}")
    count = torch.cuda.device_count()
    kit.answer(count=count)
    if not kit.gpus:
        kit.absent("gpus", "no GPU is leased")
    if count != len(kit.gpus):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        kit.defect("infra.device", f"torch sees {count} of {len(kit.gpus)} leased GPUs (CUDA_VISIBLE_DEVICES={seen})")
    built = list(torch.cuda.get_arch_list())
    kit.answer(built_for=built)
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        kit.stage(f"compute on GPU {index} (SM {major}{minor})")
        if built and not any(runs_on(one, major, minor) for one in built):
            kit.defect(
                "unsupported.arch",
                f"torch {torch.__version__} is built for {' '.join(built)}, GPU {index} is sm_{major}{minor}",
            )
        _compute(torch, index)
    note = _against_driver(cuda)
    kit.answer(said=f"{count} GPU(s) compute with torch {torch.__version__}" + (f"; {note}" if note else ""))


def _no_cuda(torch: Any) -> None:
    hip = getattr(torch.version, "hip", None)
    kind = f"a ROCm build ({hip})" if hip else "a CPU build"
    if kit.gpus and not hip:
        kit.defect(
            "import.abi",
            f"torch {torch.__version__} is a CPU build, and {len(kit.gpus)} GPU(s) are leased: servers would run on "
            "the CPU or refuse to start",
        )
    kit.absent("cuda", f"torch {torch.__version__} is {kind}")


def _against_driver(cuda: str) -> str | None:
    """How torch's CUDA stands to the newest that the driver knows, where it is newer."""
    ours, theirs = _version(cuda), _version(kit.driver_cuda or "")
    if not ours or not theirs or ours <= theirs:
        return None
    said = f"torch is built for CUDA {cuda}, driver {kit.driver or 'here'} knows CUDA {kit.driver_cuda}"
    if ours[0] > theirs[0]:
        return said + ": a newer major needs a newer driver, or compat libraries where the card takes them"
    return said + ": minor version compatibility, PTX of that toolkit cannot be compiled by this driver"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", text)[:2])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def runs_on(target: str, major: int, minor: int) -> bool:
    """Whether code for ``target`` ("sm_120", "sm_90a", "compute_80") can run on that compute capability.

    A cubin runs on its own major, from its minor on, also an ``f`` (family) target; an ``a`` target only on its own
    capability; PTX is compiled by the driver for anything newer.
    """
    parts = re.match(r"(sm|compute)_(\d+)(\d)([af]?)$", target)
    if parts is None:
        return False
    kind, own, suffix = parts.group(1), (int(parts.group(2)), int(parts.group(3))), parts.group(4)
    if suffix == "a":
        return own == (major, minor)
    if kind == "compute" and not suffix:
        return own <= (major, minor)
    return own[0] == major and own[1] <= minor


def _compute(torch: Any, index: int) -> None:
    values = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    left, right = (values * 7 // 5) % 2, (values // SIZE + values) % 3
    exact = left.double() @ right.double()
    for dtype in (torch.float32, torch.bfloat16):
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            continue
        device = torch.device("cuda", index)
        product = left.to(device, dtype) @ right.to(device, dtype) + 1
        got = product.double().cpu() - 1
        if not torch.equal(got, exact):
            wrong = int((got != exact).sum())
            kit.defect(
                "numerics",
                f"GPU {index}: {wrong} of {SIZE * SIZE} elements of a {dtype} product of whole numbers are wrong",
            )


if __name__ == "__main__":
    kit.main(run)
