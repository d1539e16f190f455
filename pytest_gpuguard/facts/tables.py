"""The package's data files by their path, and nothing with them: for a process that must start at once.

``diagnose.data`` reads the same files; importing it brings the whole reading of logs along.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


@cache
def toml_table(path: str) -> dict[str, Any]:
    """A TOML file, by its path below ``pytest_gpuguard/``. Read it, and change nothing in it."""
    data: dict[str, Any] = tomllib.loads(_text(path))
    return data


@cache
def json_table(path: str) -> dict[str, Any]:
    """A JSON file that holds an object, by its path below ``pytest_gpuguard/``."""
    data: dict[str, Any] = json.loads(_text(path))
    return data


def _text(path: str) -> str:
    return files("pytest_gpuguard").joinpath(path).read_text(encoding="utf-8")
