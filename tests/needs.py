"""What a test needs of the machine: a skip that is counted here, and a failure where CI should have had it."""

from __future__ import annotations

import os
import shutil

import pytest


def need(condition: object, reason: str) -> None:
    """Skip the running test unless ``condition`` holds; with CI=true in the environment, fail it instead."""
    if condition:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must be able to run this test: {reason}", pytrace=False)
    pytest.skip(reason)


def need_tool(name: str) -> str:
    """The path of the program ``name``; without it the test is skipped, or fails in CI."""
    path = shutil.which(name)
    need(path, f"{name} is not installed")
    assert path is not None
    return path
