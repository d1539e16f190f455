"""``--gpuguard-stack`` → names and references, checked against the rig before anything is collected.

Imports nothing heavy: every run that has us installed pays.
"""

from __future__ import annotations

import os
import re

import pytest

from .names import SIMULATED, is_container


def parse_stacks(texts: list[str], rig: str) -> tuple[tuple[str, str], ...]:
    """(name, reference) of each. Raises pytest.UsageError that says what it takes."""
    found = []
    for text in texts:
        name, equals, reference = (part.strip() for part in text.partition("="))
        if not (name and equals and reference):
            raise pytest.UsageError(
                f"--gpuguard-stack {text!r}: write NAME=PYTHON, such as --gpuguard-stack new=/opt/new/bin/python"
            )
        if is_container(reference):
            from .container_options import check_reference

            check_reference(text, reference)
        if rig.startswith(SIMULATED) or reference.startswith(SIMULATED):
            _check_simulated(text, name, reference, rig)
        found.append((name, os.path.expanduser(reference)))
    names = [name for name, _ in found]
    for name in names:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name) is None:  # they become parts of node ids
            raise pytest.UsageError(f"--gpuguard-stack: {name!r}: a name has letters, digits, and _ . + - only")
        if names.count(name) > 1:
            raise pytest.UsageError(f"--gpuguard-stack: two stacks are called {name!r}: every stack needs its own name")
    return tuple(found)


def _check_simulated(text: str, name: str, reference: str, rig: str) -> None:
    """A simulated stack goes with a simulated rig, and a real one with a real one."""
    from .facts.simulated import STACK_FORM, simulated_stack

    if not reference.startswith(SIMULATED):
        raise pytest.UsageError(
            f"--gpuguard-stack {text}: a simulated rig ({rig}) cannot run a real stack, there being no GPU for it: "
            f"write {name}={STACK_FORM}, or leave it out for the newest release"
        )
    if not rig.startswith(SIMULATED):
        raise pytest.UsageError(
            f"--gpuguard-stack {text}: a simulated stack runs on a simulated rig only: "
            f"add --gpuguard-rig sim:<card>:<n>"
        )
    try:
        simulated_stack(name, reference)
    except ValueError as error:
        raise pytest.UsageError(f"--gpuguard-stack {error}") from None
