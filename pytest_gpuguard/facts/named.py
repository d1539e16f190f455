"""The packages that a fingerprint calls by a label of its own. Data: it must never need what asks a stack for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: The packages that a fingerprint names first: label → distributions, the first that is installed counts.
NAMED_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "sglang": ("sglang",),
    "vllm": ("vllm",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),  # renamed on the way
    "flashinfer_python": ("flashinfer-python",),
    "flashinfer_cubin": ("flashinfer-cubin",),
    "flashinfer_jit_cache": ("flashinfer-jit-cache",),
    "triton": ("triton",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11"),
    "transformers": ("transformers",),
}
