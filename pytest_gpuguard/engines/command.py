"""Any command as a server: its words, its port, and how it says that it is ready.

Nothing is known of what it prints but what every engine's log has in common, and nothing is added to its words but a
port; it is never taken for ready because it merely runs.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..claims.layout import flag_value
from ..claims.observation import LogReading
from ..diagnose.blocks import HEADER
from ..diagnose.lines import ANSI
from .base import BootSpec, ServerFacts
from .log import LogReader

if TYPE_CHECKING:
    from ..claims.layout import Layout
    from ..diagnose.lines import Line
    from ..diagnose.signature import SignatureFile
    from ..facts.lease import Lease, PortRange
    from .flags import FlagProblem
    from .portable import Translation

#: The engine's name in specs, observations and reports.
COMMAND: Final = "command"
#: What stands for the port in a command's words.
PORT: Final = "{port}"
#: One that is not up yet is asked so often, and may take so long to be connected to, in seconds.
_AGAIN_S: Final = 0.1
_CONNECT_S: Final = 2.0
#: The end of a log in which its last traceback is looked for.
_LAST_LINES: Final = 400
#: So much of a line is searched for the words of readiness.
_LINE_CHARS: Final = 4000


@dataclass(frozen=True, slots=True)
class Readiness:
    """When a command is ready: a path answers 200, or a line of its log matches. Exactly one is given."""

    path: str | None = None
    line: re.Pattern[str] | None = None

    def __str__(self) -> str:
        """What was seen when it is ready."""
        return f"GET {self.path} answers 200" if self.line is None else f"a line of its log has {self.line.pattern!r}"


class CommandReader(LogReader):
    """Reads the log of a command: ready by HTTP (asked from the start), or by a line.

    What a server prints while it serves it has mostly survived; a traceback that its log ends with, it has not.
    """

    def __init__(self, ready: Readiness, majors: Sequence[int] = (), extra: tuple[SignatureFile, ...] = ()) -> None:
        super().__init__(COMMAND, None, majors, extra)
        self._line = ready.line
        self._said = ready.line is None
        self._up = False
        self._last: deque[Line] = deque(maxlen=_LAST_LINES)
        self._died: LogReading | None = None
        self._another = partial(LogReader, COMMAND, None, majors, extra)

    def become_ready(self) -> None:
        """It was asked, and it is ready."""
        super().become_ready()
        self._up = True

    def reading(self) -> LogReading:
        """What the output says so far; ``ready_line`` is by this command's own words."""
        return replace(self._died or super().reading(), ready_line=self._said)

    def closed(self) -> LogReading:
        """The output has ended; one that was up has died of the traceback that is its last word."""
        reading = super().closed()
        if self._up and self._died is None and not reading.fatal:
            self._died = self._last_words(reading)
        return self.reading()

    def _last_words(self, reading: LogReading) -> LogReading | None:
        lines = [one for one in self._last if one.text.strip()]
        begin = max((at for at, one in enumerate(lines) if one.text.startswith(HEADER)), default=None)
        if begin is None:
            return None
        after = [one for one in lines[begin + 1 :] if not one.text[:1].isspace()]
        if len(after) != 1 or after[0] is not lines[-1]:  # something was printed after it
            return None
        fresh = self._another()
        fresh.feed("".join(f"{one.text}\n" for one in lines[begin:]).encode(errors="replace"))
        found = fresh.closed()
        full = found.outcome.startswith("oom.") or (found.signature or "").startswith("gpu.out_of_memory")
        return replace(
            reading,
            outcome="oom.runtime" if full and found.outcome != "oom.host" else found.outcome,
            phase="serving",
            decisive=replace(found.decisive, line=after[0].number) if found.decisive is not None else None,
            signature=found.signature,
            why=found.why,
            cure=found.cure,
            fatal=True,
            weak=True,
        )

    def _keep(self, line: Line) -> None:
        super()._keep(line)
        if not line.final:
            return
        self._last.append(line)
        if not self._said and self._line is not None:
            text = ANSI.sub("", line.text)[:_LINE_CHARS]  # uvicorn prints the address in bold
            self._said = self._line.search(text) is not None


class Command:
    """A command that serves. ``port`` is the one that it was told to use; None: the first that was leased."""

    name = COMMAND
    package = ""

    def __init__(self, ready: Readiness, port: int | None = None, signatures: tuple[SignatureFile, ...] = ()) -> None:
        self.ready = ready
        self._port = port
        self._signatures = signatures

    def layout_flags(self, layout: Layout, flags: Sequence[str], known: frozenset[str]) -> tuple[str, ...]:
        """None: a command's words are its own."""
        return ()

    def help_command(self, python: str) -> list[str]:
        """None: nobody knows how it would be asked."""
        return []

    def check_flags(self, flags: Sequence[str], help_text: str) -> list[FlagProblem]:
        """None is known to be wrong."""
        return []

    def translate(self, flags: Sequence[str], help_text: str) -> tuple[tuple[str, ...], tuple[Translation, ...]]:
        """The words as they are."""
        return tuple(flags), ()

    def command(self, spec: BootSpec, ports: PortRange) -> list[str]:
        """The words verbatim, with the port in the place of ``{port}``."""
        port = str(self.port(spec, ports))
        return [*spec.wrapper, *(word.replace(PORT, port) for word in spec.flags)]

    def environment(self, spec: BootSpec, lease: Lease) -> dict[str, str]:
        """Leased GPUs only (none without a lease), the port, hub offline, the stack's programs first in PATH."""
        env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if os.path.isabs(spec.python):
            env["PATH"] = os.pathsep.join([os.path.dirname(spec.python), os.environ.get("PATH", os.defpath)])
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = lease.cuda_visible_devices
        env["PORT"] = str(self.port(spec, lease.ports))
        return env | dict(spec.env)

    def port(self, spec: BootSpec, ports: PortRange) -> int:
        """The port that it is to listen on."""
        return self._port if self._port is not None else ports.base

    def reader(self, version: str | None, majors: Sequence[int]) -> LogReader:
        """A reader that knows failures, and no engine."""
        return CommandReader(self.ready, majors, self._signatures)

    def ask(self, url: str, spec: BootSpec, timeout_s: float) -> ServerFacts:
        """Ask for the path of readiness, then which model it serves, where it is one that says so.

        With readiness by a line nothing is asked, and a command that listens nowhere is fine.
        """
        if not _answers(url):
            time.sleep(_AGAIN_S)
            return ServerFacts(healthy=self.ready.line is not None, listens=False)
        if self.ready.path is None:
            return ServerFacts(True, None, _info(url, spec, _CONNECT_S))
        import httpx

        from .sglang import headers

        try:
            with httpx.Client(timeout=timeout_s, trust_env=False, verify=False, headers=headers(spec)) as client:
                healthy = client.get(url + self.ready.path).status_code == 200
        except httpx.HTTPError:
            healthy = False
        if not healthy:
            time.sleep(_AGAIN_S)
            return ServerFacts(healthy=False)
        return ServerFacts(True, None, _info(url, spec, timeout_s))


def _answers(url: str) -> bool:
    """Whether anybody accepts connections there: cheaper than a request, while a command starts up."""
    host, _, port = url.partition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def _info(url: str, spec: BootSpec, timeout_s: float) -> dict[str, Any]:
    """The name that requests must give the model by: what the test said, else the first of ``/v1/models``."""
    if spec.model != default_model(spec.flags):
        return {}
    import httpx

    from .sglang import headers

    try:
        with httpx.Client(timeout=timeout_s, trust_env=False, verify=False, headers=headers(spec)) as client:
            answer = client.get(f"{url}/v1/models")
            named = answer.json()["data"][0]["id"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return {}
    return {"served_model_name": named} if isinstance(named, str) and named else {}


def default_model(words: Sequence[str]) -> str:
    """How a command is called whose model nobody named: by ``--model``, else by the program's own name."""
    named = flag_value(words, ("--model", "--model-path"))
    return named or os.path.basename(words[0]) or words[0]
