"""What the ini says of containers → one value. Imported only where it says something of them.

Its errors name the option; they never show the value of a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from .containers.image import (
    ContainerSettings,
    parse_arguments,
    parse_mount,
    parse_reference,
    parse_variable,
)

T = TypeVar("T")


def check_reference(text: str, reference: str) -> None:
    """An image is named. Raises pytest.UsageError; whether it is there is asked when a claim needs it."""
    _parsed(f"--gpuguard-stack {text}", reference, parse_reference)


def read_settings(mounts: Sequence[str], env: Sequence[str], args: str) -> ContainerSettings:
    """The settings of every container of this run. Raises pytest.UsageError."""
    return ContainerSettings(
        tuple(_parsed("gpuguard_mounts", one, parse_mount) for one in mounts),
        tuple(_parsed("gpuguard_container_env", one, parse_variable) for one in env),
        _parsed("gpuguard_container_args", args, parse_arguments),
    )


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise pytest.UsageError(f"{option}: {error}") from None
