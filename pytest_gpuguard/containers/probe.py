"""The facts of an image, asked of its own python in a container without GPUs, as a stack with a fingerprint.

It must never make a container that outlives the question, and never pull.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ..diagnose.redact import redact
from ..facts import stack_probe
from ..facts.stack import DEADLINE_S, Stack, StackError
from .client import ContainerError, find_image, run_in_image
from .image import PYTHON, Container, ContainerSettings, parse_reference

#: Starting a container, and reading an image for the first time, take their time.
_START_S: Final = 60.0


def container_of(stack: Stack, settings: ContainerSettings) -> Container:
    """The image that was probed, for boots and for its ``--help``."""
    engine, image = parse_reference(stack.python)
    return Container(engine, image, stack.facts["image"]["id"], settings)


def probe_image(
    name: str, reference: str, settings: ContainerSettings, deadline_s: float = DEADLINE_S + _START_S
) -> Stack:
    """Ask the image of ``docker:IMAGE`` what it has. Raises ImageAbsent, StackError."""
    try:
        container, digest = find_image(reference, settings)
        script = Path(stack_probe.__file__).read_text(encoding="utf-8")
        ran = run_in_image(container, [PYTHON, "-c", script, "1", "all"], {}, deadline_s)
    except ContainerError as error:
        if type(error) is ContainerError:
            raise StackError(name, error.cause, error.cure) from None
        raise
    answer = _answer(ran.out)
    if answer is None:
        lines = redact(ran.err).strip().splitlines()
        why = f": {lines[-1].strip()}" if lines else f" (status {ran.code})"
        raise StackError(name, f"{PYTHON} of {container.image} did not answer{why}", "It must be Python 3.8 or newer")
    facts = {**answer["durable"], **answer["volatile"]}
    facts.pop("watched", None)
    facts["image"] = {"engine": container.engine, "name": container.image, "id": container.id, "digest": digest}
    return Stack(name, reference, facts)


def help_of(container: Container, help_command: Callable[[str], list[str]], deadline_s: float) -> str:
    """What the engine's ``--help`` says in this image. Raises ContainerError."""
    command = help_command(PYTHON)
    ran = run_in_image(container, command, {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}, deadline_s)
    if ran.code != 0 or "--" not in ran.out:
        said = redact(ran.err).strip().splitlines()
        why = said[-1] if said else f"exit {ran.code}"
        raise ContainerError(f"{' '.join(command)} in {container.image} failed: {why}", "Run it by hand in the image")
    return ran.out


def _answer(said: str) -> dict[str, dict[str, Any]] | None:
    """The probe's line: the last that is an object with its two keys (sitecustomize may print what it likes)."""
    for line in reversed(said.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if (
            isinstance(found, dict)
            and isinstance(found.get("durable"), dict)
            and isinstance(found.get("volatile"), dict)
        ):
            return found
    return None
