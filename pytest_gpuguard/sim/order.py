"""What the stand-in is told, as words of its command line: the rig, the stack, the memory file, and SGLang's own argv.

Nothing of the claim is among it. Pure, but for the look at the environment variables that are named.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Order:
    """One boot. ``argv`` is what SGLang would be given; ``env`` the variables that were declared for this server.

    ``gpus`` are the ordinals within the rig that it may use, as CUDA_VISIBLE_DEVICES says. ``memory`` is the folder in
    which it is noted what its GPUs hold. ``measured`` are known facts in place of rules (``weights_gib`` …).
    """

    rig: str
    stack: str
    gpus: tuple[int, ...]
    folder: Path
    memory: Path
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    wrapper: tuple[str, ...] = ()


def words_of(order: Order) -> list[str]:
    """The order as words; of variables the names only, since a command line is for everybody to see."""
    words = ["--rig", order.rig, "--stack", order.stack, "--config", str(order.folder), "--memory", str(order.memory)]
    for name in order.env:
        words += ["--env", name]
    for name, value in order.measured.items():
        words += ["--measured", f"{name}={value!r}"]
    for word in order.wrapper:
        words.append(f"--wrapper={word}")
    return [*words, "--", *order.argv]


def read_order(words: Sequence[str]) -> Order:
    """The order that ``words_of`` wrote. Ends the process with status 2 for anything else."""
    parser = argparse.ArgumentParser(prog="pytest_gpuguard.sim", allow_abbrev=False)
    for name in ("rig", "stack", "config", "memory"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("env", "measured", "wrapper"):
        parser.add_argument(f"--{name}", action="append", default=[])
    at = list(words).index("--") if "--" in words else len(words)
    given = parser.parse_args(list(words[:at]))
    return Order(
        rig=given.rig,
        stack=given.stack,
        gpus=tuple(int(one) for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.isdecimal()),
        folder=Path(given.config),
        memory=Path(given.memory),
        argv=tuple(words[at + 1 :]),
        env=MappingProxyType({name: os.environ.get(name, "") for name in given.env}),
        measured=MappingProxyType(
            {name: float(value) for name, _, value in (one.partition("=") for one in given.measured)}
        ),
        wrapper=tuple(given.wrapper),
    )
