"""Several stacks in one run: every claim is a test of its own on each of them, side by side.

It must never change a test that is no claim of ours, nor the name of a claim: the stack's name is no part of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from .names import MARKS

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The fixture by which a test is multiplied; function scope, for session scope would run all of the old one first.
CHOICE: Final = "gpuguard_stack_choice"
#: Fixtures by which a test that is no claim comes to a stack.
_FIXTURES: Final = frozenset(
    {"stack", "sglang_server", "command_server", "server", "probe"}
    | {"gpuguard_stack", "gpuguard_sglang_server", "gpuguard_command_server", "gpuguard_server", "gpuguard_probe"}
)


def multiply(metafunc: pytest.Metafunc, names: Sequence[str]) -> None:
    """Make one test for each stack of a test that is about one."""
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if marks.isdisjoint(MARKS) and _FIXTURES.isdisjoint(metafunc.fixturenames):
        return
    metafunc.fixturenames.append(CHOICE)
    metafunc.parametrize(CHOICE, list(names), ids=list(names), indirect=True, scope="function")


def chosen(item: pytest.Item) -> str | None:
    """The name of the stack that a test was multiplied for; None where there is one stack only."""
    callspec: Any = getattr(item, "callspec", None)
    name: str | None = callspec.params.get(CHOICE) if callspec is not None else None
    return name


def plain_nodeid(item: pytest.Item) -> str:
    """The node id without the stack's name, which is the last of its parameters."""
    name = chosen(item)
    if name is None:
        return item.nodeid
    return (
        item.nodeid.removesuffix(f"[{name}]")
        if item.nodeid.endswith(f"[{name}]")
        else (item.nodeid.removesuffix(f"-{name}]") + "]")
    )
