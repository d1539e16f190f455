"""A torch of whole matrices in plain Python, for tests of probes: copied into a stack as its ``torch``.

``FAKE_TORCH`` (JSON) says what its CUDA is like: count, capability, built_for, init (an error's text), wrong (results).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from . import _C, version  # type: ignore[attr-defined]  # beside this file where it is copied to

LIKE = json.loads(os.environ.get("FAKE_TORCH", "{}"))
__version__ = version.__version__
OPS: list[str] = []
float32 = bfloat16 = float8_e4m3fn = "float"
__all__ = ["_C"]


class Tensor:
    """Rows of numbers."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows

    def _each(self, other: Any, how: Callable[[Any, Any], Any]) -> Tensor:
        if isinstance(other, Tensor):
            pairs = zip(self.rows, other.rows, strict=True)
            return Tensor([[how(a, b) for a, b in zip(left, right, strict=True)] for left, right in pairs])
        return Tensor([[how(a, other) for a in row] for row in self.rows])

    def __mod__(self, other: Any) -> Tensor:
        return self._each(other, lambda a, b: a % b)

    def __floordiv__(self, other: Any) -> Tensor:
        return self._each(other, lambda a, b: a // b)

    def __mul__(self, other: Any) -> Tensor:
        return self._each(other, lambda a, b: a * b)

    def __add__(self, other: Any) -> Tensor:
        return self._each(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Tensor:
        return self._each(other, lambda a, b: a - b)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return self._each(other, lambda a, b: a != b)

    def __le__(self, other: Any) -> Tensor:
        return self._each(other, lambda a, b: a <= b)

    def __matmul__(self, other: Tensor) -> Tensor:
        columns = list(zip(*other.rows, strict=True))
        product = [[sum(a * b for a, b in zip(row, one, strict=True)) for one in columns] for row in self.rows]
        if LIKE.get("wrong") and self.rows and getattr(self, "on_gpu", False):
            product[3][5] += 1
        return Tensor(product)

    def __getitem__(self, index: int) -> Tensor:
        return Tensor([self.rows[index]])

    def to(self, *where: Any) -> Tensor:
        """The same, on the GPU."""
        moved = Tensor(self.rows)
        moved.on_gpu = True  # type: ignore[attr-defined]
        return moved

    def _same(self) -> Tensor:
        return self

    double = cpu = float = contiguous = _same

    def t(self) -> Tensor:
        """Transposed."""
        return Tensor([list(one) for one in zip(*self.rows, strict=True)])

    def reshape(self, rows: int, columns: int) -> Tensor:
        """Rows of that many."""
        flat = self.rows[0]
        return Tensor([flat[at * columns : (at + 1) * columns] for at in range(rows)])

    def abs(self) -> Tensor:
        """Without signs."""
        return Tensor([[abs(one) for one in row] for row in self.rows])

    def sum(self) -> Any:
        """Of all."""
        return sum(map(sum, self.rows))

    def all(self) -> bool:
        """Whether all are true."""
        return all(map(all, self.rows))

    def min(self) -> Any:
        """Of all."""
        return min(map(min, self.rows))

    def max(self) -> Any:
        """Of all."""
        return max(map(max, self.rows))


def arange(end: int) -> Tensor:
    """Whole numbers in one row."""
    return Tensor([list(range(end))])


def ones(*shape: int, **where: Any) -> Tensor:
    """Ones, of one or two dimensions."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    return Tensor([[1.0] * columns for _ in range(rows)])


def equal(left: Tensor, right: Tensor) -> bool:
    """Whether all numbers are the same."""
    return left.rows == right.rows


def device(kind: str, index: int) -> tuple[str, int]:
    """A name for it."""
    return (kind, index)


class cuda:
    """What FAKE_TORCH says."""

    @staticmethod
    def init() -> None:
        """Fails where it is to."""
        if "init" in LIKE:
            raise RuntimeError(LIKE["init"])

    @staticmethod
    def device_count() -> int:
        """As many as are visible, or as FAKE_TORCH says."""
        seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        return int(LIKE.get("count", len(seen)))

    @staticmethod
    def get_arch_list() -> list[str]:
        """What it was built for."""
        return list(LIKE.get("built_for", ["sm_90", "sm_120"]))

    @staticmethod
    def get_device_capability(index: int = 0) -> tuple[int, ...]:
        """SM120, unless FAKE_TORCH says otherwise."""
        return tuple(LIKE.get("capability", (12, 0)))

    @staticmethod
    def is_bf16_supported() -> bool:
        """Always."""
        return True
