"""What an engine is to the rest of us: a command, flags that can be checked, a log that can be read, HTTP questions.

Values here are frozen; nothing here starts a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from ..claims.layout import Layout

if TYPE_CHECKING:
    from ..containers.image import Container
    from ..facts.lease import Lease, PortRange
    from .flags import FlagProblem
    from .log import LogReader
    from .portable import Translation


@dataclass(frozen=True, slots=True)
class BootSpec:
    """One server as declared: equal specs may share a boot. ``flags`` are verbatim, layout flags already added.

    ``exclusive``: every other GPU of the rig is kept idle meanwhile. ``boot_timeout_s`` does not make two servers
    different. ``measured`` are known facts that a rehearsal takes in place of rules; a real boot has none.
    ``container`` is the image that it runs in; ``python`` is then found by that image's PATH.
    """

    engine: str
    stack: str
    python: str
    model: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    wrapper: tuple[str, ...] = ()
    gpus: int = 0
    exclusive: bool = False
    boot_timeout_s: float = field(default=1200.0, compare=False)
    measured: tuple[tuple[str, float], ...] = ()
    container: Container | None = None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server said over HTTP. ``model`` is the path that it serves; ``info`` its server_info, if it has one.

    ``listens``: somebody answers on its port, and so it must be the server itself.
    """

    healthy: bool
    model: str | None = None
    info: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    listens: bool = True


class Engine(Protocol):
    """One inference engine: how it is started, and how it is asked."""

    @property
    def name(self) -> str:
        """``sglang``."""
        ...

    @property
    def package(self) -> str:
        """The distribution that carries its version."""
        ...

    def layout_flags(self, layout: Layout, flags: Sequence[str], known: frozenset[str]) -> tuple[str, ...]:
        """The flags that express a layout in this release. Raises ClaimError for what it cannot express."""
        ...

    def help_command(self, python: str) -> list[str]:
        """The command that prints the flags of this release."""
        ...

    def check_flags(self, flags: Sequence[str], help_text: str) -> list[FlagProblem]:
        """Flags that this release will refuse."""
        ...

    def translate(self, flags: Sequence[str], help_text: str) -> tuple[tuple[str, ...], tuple[Translation, ...]]:
        """The flags in this release's words, and each change: only exact renames, only for ``portable=True``."""
        ...

    def command(self, spec: BootSpec, ports: PortRange) -> list[str]:
        """The whole command line, wrapper first."""
        ...

    def environment(self, spec: BootSpec, lease: Lease) -> dict[str, str]:
        """What the server's environment gets on top of ours."""
        ...

    def port(self, spec: BootSpec, ports: PortRange) -> int:
        """The port that it will listen on."""
        ...

    def reader(self, version: str | None, majors: Sequence[int]) -> LogReader:
        """A fresh reader of this release's log, on GPUs of these compute capability majors."""
        ...

    def ask(self, url: str, spec: BootSpec, timeout_s: float) -> ServerFacts:
        """Health, model and server_info of a server. Never raises for a server that does not answer."""
        ...
