"""The stacks of one run: which there are, their facts, and the flags that their engines know. Each is asked once.

Under xdist the workers share what is asked through a folder. It must never import what is installed in a stack.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .facts.stackref import StackRef
from .files import asked_once

if TYPE_CHECKING:
    from .containers.image import Container, ContainerSettings
    from .engines.base import Engine
    from .facts.stack import Stack
    from .options import Config

_HELP_TIMEOUT_S: Final = 180.0


class StackAbsent(LookupError):
    """A stack that is not there; the message names the command that builds it, when one is known.

    ``kind`` is what an unmet need of it is counted by.
    """

    def __init__(self, message: str, kind: str = "stack") -> None:
        super().__init__(message)
        self.kind = kind


class FlagsUnknown(RuntimeError):
    """The stack's own ``--help`` could not be read; the message carries what it printed."""


class RunStacks:
    """``share`` is the folder that xdist workers exchange facts through, or None."""

    def __init__(self, config: Config, share: Path | None) -> None:
        self.config = config
        self._share = share
        self._stacks: dict[str, Stack] = {}
        self._refused: dict[str, Exception] = {}  # images that are absent, or cannot be asked
        self._help: dict[str, str | FlagsUnknown] = {}

    @property
    def simulated(self) -> bool:
        """Whether the rig is simulated: then NVML is never asked, and nothing that is found is a verification."""
        return self.config.simulated

    def named_stack(self, name: str) -> StackRef:
        """One of the stacks of the command line."""
        return StackRef(name, dict(self.config.stacks)[name])

    def default_stack(self) -> StackRef:
        """The stack of the command line, else the python that runs pytest; on a simulated rig the newest release."""
        if self.config.stacks:
            name, python = self.config.stacks[0]
            return StackRef(name, python)
        if self.simulated:
            from .facts.simulated import default_stack

            return StackRef("simulated", default_stack())
        return StackRef("default", sys.executable, explicit=False)

    def stack(self, ref: StackRef) -> Stack:
        """The facts of a stack. Raises StackAbsent, or StackError when its python cannot be asked."""
        from .facts.stack import Stack, StackError, probe_stack

        if ref.simulated != self.simulated:
            raise self._mismatch(ref)
        if ref.simulated:
            from .facts.simulated import STACK_FORM, SimulationError, simulated_stack

            try:
                return simulated_stack(ref.name, ref.python)
            except SimulationError as error:
                raise StackError(ref.name, str(error), f"Write {STACK_FORM}") from None
        if ref.container:
            return self._image(ref)
        if not Path(ref.python).exists():
            cure = f"; build it: {ref.build}" if ref.build else ""
            raise StackAbsent(f"stack {ref.name!r}: {ref.python} does not exist{cure}")
        if ref.python not in self._stacks:
            key = "stack-" + hashlib.sha256(f"{ref.name}\0{ref.python}".encode()).hexdigest()[:16]
            self._stacks[ref.python] = self._cold(
                Stack.from_dict(self.shared(key, lambda: probe_stack(ref.name, ref.python).to_dict()))
            )
        return self._stacks[ref.python]

    def _image(self, ref: StackRef) -> Stack:
        """The facts of an image. Raises StackAbsent, StackError."""
        from .containers.client import ImageAbsent
        from .containers.probe import probe_image
        from .facts.stack import Stack, StackError

        if ref.python in self._refused:  # an engine that hangs is waited for once, and not for every claim
            raise self._refused[ref.python]
        if ref.python not in self._stacks:
            key = "stack-" + hashlib.sha256(ref.python.encode()).hexdigest()[:16]

            def ask() -> dict[str, Any]:
                return probe_image(ref.name, ref.python, self._container_settings()).to_dict()

            try:
                self._stacks[ref.python] = self._cold(Stack.from_dict(self.shared(key, ask)))
            except (ImageAbsent, StackError) as error:
                said = f"stack {ref.name!r}: {str(error).replace('NAME=', f'{ref.name}=')}"
                refused = StackAbsent(said) if isinstance(error, ImageAbsent) else error
                self._refused[ref.python] = refused
                raise refused from None
        return self._stacks[ref.python]

    def container(self, stack: Stack) -> Container | None:
        """The image that a stack is, with what its containers are given; None for a python."""
        from .containers.probe import container_of

        return container_of(stack, self._container_settings()) if "image" in stack.facts else None

    def _container_settings(self) -> ContainerSettings:
        from .containers.image import ContainerSettings

        return self.config.containers or ContainerSettings()

    def _cold(self, stack: Stack) -> Stack:
        """A stack whose JIT caches this run makes empty ones of."""
        from .fresh_jit import cold

        return cold(stack) if self.config.fresh_jit else stack

    def _mismatch(self, ref: StackRef) -> StackAbsent:
        if self.simulated:
            said = f"stack {ref.name!r}: a simulated rig cannot run a real stack ({ref.python})"
            return StackAbsent(said, "simulated")
        return StackAbsent(f"stack {ref.name!r}: {ref.python} runs on a simulated rig only, and this one is real")

    def help_text(self, engine: Engine, stack: Stack) -> str:
        """The engine's ``--help`` in this stack, kept on disk for as long as the stack's packages stay the same.

        Raises FlagsUnknown.
        """
        from .facts.stack import cache_dir

        if stack.simulated:
            from .sim.engine import stack_help

            return stack_help(stack.python)
        container = self.container(stack)
        stamps = _stamps(stack.python, engine.package) if container is None else [[container.id]]
        state = json.dumps([engine.name, stack.python, dict(stack.packages), stamps], sort_keys=True)
        key = hashlib.sha256(state.encode()).hexdigest()[:24]
        known = self._help.get(key)
        if isinstance(known, FlagsUnknown):
            raise known
        if known is not None:
            return known
        file = cache_dir() / f"help-{key}.txt"
        try:
            if not stamps:
                raise OSError("an editable installation changes under an unchanged version")
            text = file.read_text()
        except OSError:
            try:
                text = (
                    _run_help(engine.help_command(stack.python)) if container is None else _help_in(container, engine)
                )
            except FlagsUnknown as error:
                self._help[key] = error
                raise
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                scratch = file.with_suffix(f".{threading.get_ident()}.tmp")
                scratch.write_text(text)
                scratch.replace(file)
            except OSError:
                pass  # a cache that cannot be written is no cache
        self._help[key] = text
        return text

    def shared(self, name: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer to ``ask()``, JSON data: under xdist one worker asks for all."""
        if self._share is None:
            return ask()
        found: dict[str, Any] = asked_once(self._share / f"{name}.json", ask)
        return found


def _stamps(python: str, package: str) -> list[list[object]]:
    """Size and time of the installed files that declare the engine's flags; empty when pip did not put them there."""
    roots = Path(python).parent.parent.glob(f"lib/python3*/site-packages/{package}")
    files = [
        file
        for root in roots
        for file in (*root.glob("*.py"), *root.glob("srt/*args*.py"), *root.glob("srt/arg_groups/*.py"))
    ]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]


def _help_in(container: Container, engine: Engine) -> str:
    from .containers.client import ContainerError
    from .containers.probe import help_of

    try:
        return help_of(container, engine.help_command, _HELP_TIMEOUT_S)
    except ContainerError as error:
        raise FlagsUnknown(str(error)) from error


def _run_help(command: list[str]) -> str:
    import os

    env = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=_HELP_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FlagsUnknown(f"{' '.join(command)}: {error}") from error
    text = done.stdout.decode(errors="replace")
    if done.returncode != 0 or "--" not in text:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise FlagsUnknown(f"{' '.join(command)} failed: {said[-1] if said else f'exit {done.returncode}'}")
    return text
