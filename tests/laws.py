"""Hypothesis as our tests use it: without its deadline, because a busy machine is no counterexample.

The same examples are tried on every run: a run that fails says something of the change, not of its luck.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

__all__ = ["example", "given", "settings", "st"]

settings.register_profile("gpuguard", deadline=None, derandomize=True)
settings.load_profile("gpuguard")
