"""Claims that two real stacks on CPU answer differently, SGLang 0.5.18 and 0.5.23: docs/upgrade.md."""

from __future__ import annotations

from pytest_gpuguard import claim, fails, fits, serves

TINY = "--device cpu --max-total-tokens 4096"


@serves("sglang", "tiny", TINY, boot_timeout="5m")
@fits
@claim(id="boots", minutes=1)
def test_a_tiny_model_boots() -> None:
    """With flags that both know."""


@serves("sglang", "tiny", TINY, "--cuda-graph-max-bs 8", boot_timeout="5m")
@fits
@claim(id="production", minutes=1)
def test_the_production_command_boots() -> None:
    """One flag of it was renamed on the way."""


@serves("sglang", "tiny", TINY, "--constrained-json-max-whitespace-cnt 2", boot_timeout="5m")
@fails("args.removed")
@claim(id="whitespace", minutes=1)
def test_whitespace_in_json_cannot_be_limited() -> None:
    """The workaround is a grammar of our own."""
