"""The names of our marks, without what they mean: all that a run without claims needs to know of them."""

from __future__ import annotations

from typing import Final

SMS: Final = ("70", "75", "80", "86", "87", "89", "90", "100", "101", "103", "110", "120", "121")
ARCHITECTURES: Final = ("volta", "turing", "ampere", "ada", "hopper", "blackwell")
MARKS: Final = frozenset(
    {
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
        "ooms",
        "serves",
        "unsupported",
        "uses",
        "works",
        *(f"needs_sm{sm}" for sm in SMS),
    }
)

#: Reasons of NOT_EVALUATED that a runner should have met, and that ``--gpuguard-require`` may insist on.
REQUIRABLE: Final = ("gpus", "driver", "cuda", "package", "models", "stack")
#: Reasons that belong to another card, another window or the budget: never a fault of this runner.
NOT_REQUIRABLE: Final = ("sm", "arch", "vram", "link", "window", "budget", "card", "skip", "engine", "simulated")

#: How the fact of a claim begins that was left out for want of time.
OUT_OF_BUDGET: Final = "out of budget"

#: How a rig and a stack begin that are not there.
SIMULATED: Final = "sim:"
#: What results on a simulated rig are labelled, wherever they appear: they show what a suite does, not what is true.
REHEARSED: Final = "REHEARSED"
#: How the stand-in's own lines in its log begin; the first line is one.
STAND_IN: Final = "gpuguard-sim: "

#: Who can run an image; a container stack begins with one of them and a colon.
CONTAINER_ENGINES: Final = ("docker", "podman")


def is_container(reference: str) -> bool:
    """Whether this names an image: ``docker:IMAGE`` or ``podman:IMAGE``."""
    return reference.startswith(tuple(f"{engine}:" for engine in CONTAINER_ENGINES))


def labelled(label: str | None, text: str) -> str:
    """``REHEARSED HOLDS``: what is said of a verdict on a rig that is not real."""
    return f"{label} {text}" if label else text
