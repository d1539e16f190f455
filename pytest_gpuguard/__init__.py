"""Claims about LLM-serving hardware as pytest tests: run for real, judged by reason, re-verified on every upgrade.

The decorators are loaded when the first of them is asked for: a run without claims does not pay for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .claims.markers import (
        claim,
        compare,
        expect_toks,
        fails,
        fits,
        ignores,
        max_mem,
        needs_arch,
        needs_cuda,
        needs_driver,
        needs_gpus,
        needs_package,
        needs_sm,
        needs_sm70,
        needs_sm75,
        needs_sm80,
        needs_sm86,
        needs_sm87,
        needs_sm89,
        needs_sm90,
        needs_sm100,
        needs_sm101,
        needs_sm103,
        needs_sm110,
        needs_sm120,
        needs_sm121,
        ooms,
        serves,
        unsupported,
        uses,
        works,
    )

__version__ = "0.1.0"

__all__ = [
    "claim",
    "compare",
    "expect_toks",
    "fails",
    "fits",
    "ignores",
    "max_mem",
    "needs_arch",
    "needs_cuda",
    "needs_driver",
    "needs_gpus",
    "needs_package",
    "needs_sm",
    "needs_sm70",
    "needs_sm75",
    "needs_sm80",
    "needs_sm86",
    "needs_sm87",
    "needs_sm89",
    "needs_sm90",
    "needs_sm100",
    "needs_sm101",
    "needs_sm103",
    "needs_sm110",
    "needs_sm120",
    "needs_sm121",
    "ooms",
    "serves",
    "unsupported",
    "uses",
    "works",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .claims import markers

    globals().update({one: getattr(markers, one) for one in __all__})
    return globals()[name]
