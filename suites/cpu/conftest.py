"""Pins the CPU stack: real SGLang without a GPU, and two local models, built by tools/cpu_stack.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_gpuguard.facts.stackref import StackRef

ROOT = Path(__file__).parents[2]
STACK = Path(os.environ.get("GPUGUARD_CPU_STACK") or ROOT / ".cpu-stack")
MODELS = ("tiny", "mid")


def pytest_gpuguard_stack(item: pytest.Item) -> StackRef:
    """The claims here are about this stack, whatever the command line says."""
    return StackRef("cpu", str(STACK / "venv" / "bin" / "python"), build="python tools/cpu_stack.py")


def pytest_gpuguard_model(item: pytest.Item, model: str) -> str | None:
    """``tiny`` (random weights, with tokenizer) and ``mid`` (0.47 GiB when loaded with --load-format dummy)."""
    return str(STACK / "models" / model) if model in MODELS else None
