"""SGLang on a simulated rig: the same command line and the same questions, with the stand-in in the server's place.

It is handed argv, environment, the model's folder and known facts, as a server is; it never sees a claim.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ..engines.sglang import SGLang
from ..facts.models import find_model
from ..facts.simulated import simulated_stack
from .order import Order, words_of

if TYPE_CHECKING:
    from ..diagnose.signature import SignatureFile
    from ..engines.base import BootSpec
    from ..facts.lease import Lease, PortRange

_STAND_IN: Final = Path(__file__).with_name("__main__.py")


class SimulatedSGLang(SGLang):
    """The stand-in, as an engine. ``rig`` is its rig as the command line spells it; ``memory`` where use is noted."""

    def __init__(self, rig: str, memory: Path, signatures: tuple[SignatureFile, ...] = ()) -> None:
        super().__init__(signatures)
        self._rig = rig
        self._memory = memory

    def command(self, spec: BootSpec, ports: PortRange) -> list[str]:
        """The stand-in's own words, then SGLang's. A wrapper is told and not run: it belongs to another machine."""
        argv = super().command(spec, ports)
        order = Order(
            rig=self._rig,
            stack=spec.python,
            gpus=(),
            folder=find_model(spec.model, {}).folder,
            memory=self._memory,
            argv=tuple(argv[argv.index("--model-path") :]),
            env=MappingProxyType(dict(spec.env)),
            measured=MappingProxyType(dict(spec.measured)),
            wrapper=spec.wrapper,
        )
        return [sys.executable, str(_STAND_IN), *words_of(order)]

    def environment(self, spec: BootSpec, lease: Lease) -> dict[str, str]:
        """The leased GPUs, and the variables that were declared for the server."""
        return {
            "PYTHONUNBUFFERED": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, lease.indices)),
            **dict(spec.env),
        }


def stack_help(python: str) -> str:
    """What ``--help`` of a simulated stack lists: the flags that the table of releases has for it."""
    from .release import help_text

    return help_text(simulated_stack("sim", python).packages["sglang"])
