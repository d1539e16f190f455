"""``gpuguard explain`` called in this process, and the keys of its objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .gpuguard_command import Done, called

Capture = pytest.CaptureFixture[str]

KEYS = "log engine engine_version outcome phase decisive why note signature memory fullest_rank ranks remedies resolved"
KEYS += " consequences lines boots label"
NUMBERS = (
    "avail_before_gib avail_after_weights_gib weights_gib mem_fraction_static reserved_gib rest_gib f_min kv_tokens"
)
NUMBERS += " kv_gib graph_gib free_gib total_gib gpu_memory_utilization"


def explained(capsys: Capture, *arguments: str | Path) -> Done:
    return called(capsys, "explain", *arguments)


def objects(capsys: Capture, *arguments: str | Path) -> list[dict[str, Any]]:
    done = explained(capsys, "--json", *arguments)
    assert (done.code, done.err) == (0, "")
    return [json.loads(line) for line in done.out.splitlines()]
