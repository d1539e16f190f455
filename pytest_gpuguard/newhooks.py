"""Hooks that a conftest may implement to say where its claims' stack and models are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .facts.stackref import StackRef


@pytest.hookspec(firstresult=True)
def pytest_gpuguard_stack(item: pytest.Item) -> StackRef | None:
    """Return the stack that this folder's claims are about, or None to leave it to the command line."""


@pytest.hookspec(firstresult=True)
def pytest_gpuguard_model(item: pytest.Item, model: str) -> str | None:
    """Return the folder of a model that claims name, or None when the name is not known here."""
