"""Load the package's TOML and JSON tables, and refuse patterns that a hostile log line could make slow."""

from __future__ import annotations

import json
import re
import sys
from importlib.resources import files
from typing import Any, Final

if sys.version_info >= (3, 11):
    import re._constants as _ops
    import re._parser as _parser

    import tomllib
else:
    import sre_constants as _ops
    import sre_parse as _parser

    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

#: The longest run that one quantifier may take, and the most work that all of a pattern's quantifiers may multiply to:
#: where the pattern may begin anywhere in a line, and where it is tied to the line's beginning.
MAX_REPEAT: Final = 500
MAX_WORK: Final = 4_000
MAX_WORK_ANCHORED: Final = 40_000


class PatternError(ValueError):
    """A regular expression in a data file is wrong or could take long."""


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


def compile_bounded(pattern: str, flags: int = 0, *, anchored: bool = False) -> re.Pattern[str]:
    """Compile a pattern whose quantifiers are all bounded and not nested; raises PatternError.

    Searching text of length n then costs at most n · MAX_WORK steps (MAX_WORK_ANCHORED for one that begins with ``^``),
    whatever the text is. ``anchored``: it is only ever tried where a line begins.
    """
    try:
        parsed = _parser.parse(pattern, flags)
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise PatternError(f"not a regular expression: {error}") from None
    anchored = anchored or (_anchored(parsed) and not compiled.flags & re.MULTILINE)
    _work(parsed, MAX_WORK_ANCHORED if anchored else MAX_WORK)
    return compiled


def _anchored(items: Any) -> bool:
    """Whether a match can only begin where the text begins."""
    for op, argument in items:
        if op is _ops.AT:
            return argument in (_ops.AT_BEGINNING, _ops.AT_BEGINNING_STRING)
        if op is _ops.SUBPATTERN:
            return _anchored(argument[-1])
        return op is _ops.BRANCH and all(_anchored(branch) for branch in argument[1])
    return False


def _work(items: Any, limit: int) -> int:
    """The product of the variable runs in a sequence; raises PatternError beyond the limits."""
    product = 1
    for op, argument in items:
        if op in (_ops.MAX_REPEAT, _ops.MIN_REPEAT):
            low, high, body = argument
            inner = _work(body, limit)
            if high is _ops.MAXREPEAT or high > MAX_REPEAT:
                raise PatternError(f"an unbounded quantifier; write {{0,n}} with n <= {MAX_REPEAT}")
            if inner > 1 and high > 1 and high * inner > MAX_REPEAT:
                raise PatternError("nested quantifiers")
            product *= (high - low + 1) * inner
        elif op is _ops.SUBPATTERN:
            product *= _work(argument[-1], limit)
        elif op is _ops.BRANCH:
            product *= max(_work(branch, limit) for branch in argument[1])
        elif op in (_ops.ASSERT, _ops.ASSERT_NOT):
            product *= _work(argument[1], limit)
        if product > limit:
            raise PatternError(f"too much backtracking: its quantifiers multiply to more than {limit}")
    return product
