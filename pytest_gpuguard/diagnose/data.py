"""Load the package's TOML and JSON tables. A pattern in them must never be one that a hostile line could make slow."""

from __future__ import annotations

import json
import re
import sys
from importlib.resources import files
from typing import Any, Final

from .backtracking import PatternError, compile_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


__all__ = ["PatternError", "compile_bounded", "has_digit", "package_json", "package_text", "package_toml", "parse_toml"]


_DIGIT: Final = re.compile(r"[0-9]")
_COUNTS: Final = re.compile(r"\{[0-9]*,?[0-9]*\}")


def package_text(path: str) -> str:
    """The text of a data file of this package, by its path below ``pytest_gpuguard/``."""
    return files("pytest_gpuguard").joinpath(path).read_text(encoding="utf-8")


def package_toml(path: str) -> dict[str, Any]:
    """A TOML data file of this package."""
    return parse_toml(package_text(path))


def package_json(path: str) -> dict[str, Any]:
    """A JSON data file of this package (an object)."""
    data = json.loads(package_text(path))
    assert isinstance(data, dict)
    return data


def parse_toml(text: str) -> dict[str, Any]:
    """TOML text to a dict; raises ValueError (tomllib.TOMLDecodeError)."""
    data: dict[str, Any] = tomllib.loads(text)
    return data


def has_digit(*texts: str) -> bool:
    """Whether literals or patterns ask for digits of their own; the counts in braces are none."""
    return any(_DIGIT.search(_COUNTS.sub("", text)) is not None for text in texts)
