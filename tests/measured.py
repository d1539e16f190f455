"""What the tests of measured claims share: short samples, and claims that name their load."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from textwrap import dedent
from typing import Any

import pytest

Run = Any
Boots = Callable[[], list[str]]
#: Samples of a fifth of a second, few blocks: the machine that runs the tests is busy, and the rates lie far apart.
QUICK = "import pytest_gpuguard.loaded as l\nl.SAMPLE_S = 0.2\nimport pytest_gpuguard.comparing as c\nc.BLOCKS = 8\n"
#: ``at(rate)``: a server that streams so many tokens per request and second.
AT = """
def at(rate, **more):
    return serves("sglang", MODEL, *more.pop("flags", ()), env={"FAKE_SGLANG_TOKS": str(rate), **more})
"""


def loaded(claims: Run, source: str, *args: str) -> pytest.RunResult:
    """Runs claims that name their load as ``**LOAD``, and servers of a rate as ``at(rate)``."""
    result: pytest.RunResult = claims(
        f'LOAD = dict(input_len=8, output_len=8, limit="40s")\n{AT}{dedent(source)}', *args
    )
    return result


def lines(result: pytest.RunResult, *patterns: str) -> None:
    result.stdout.fnmatch_lines(list(patterns), consecutive=False)


def fact(result: pytest.RunResult, test: str) -> str:
    """The line of a test in the closing section."""
    found = re.search(rf"^(\S.*?  \S+::{test}\s.*)$", result.stdout.str(), re.MULTILINE)
    assert found, result.stdout.str()
    return found[1]


def gpus_of(boots: Sequence[str]) -> list[str]:
    """The GPUs of each server that was started, in order."""
    return re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", "\n".join(boots))
