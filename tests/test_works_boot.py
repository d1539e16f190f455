"""The probe against whole stand-in servers, which die as real ones do: process, log and socket together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pytest_gpuguard.claims.answers import Answers
from pytest_gpuguard.measure.works import works

STACK = Path(__file__).parent / "fake_stack"


@contextmanager
def served(answers: str | None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(STACK), **({"FAKE_SGLANG_ANSWERS": answers} if answers else {})}
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(400):
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.05)
            yield url, process
        finally:
            process.kill()


def probed(answers: str | None) -> Answers:
    with served(answers) as (url, process):
        return works(url, {}, context=None, model=None, alive=lambda: process.poll() is None, deadline_s=60.0)


@pytest.mark.parametrize("answers", [None, "healthy"])
def test_a_stand_in_that_answers_passes(answers: str | None) -> None:
    found = probed(answers)
    assert found.ok is True, found


@pytest.mark.parametrize(
    ("answers", "name", "outcome"),
    [
        ("nan", "prefill", "numerics"),
        ("null", "prefill", "numerics"),
        ("zeros", "prefill", "numerics"),
        ("nan_500", "prefill", "numerics"),
        ("first_dies", "prefill", "unknown"),
        ("second_dies", "same prompt again", "unknown"),
        ("burst_dies", "burst", "unknown"),
        ("repeat", "burst", "numerics"),
    ],
)
def test_each_way_to_answer_badly(answers: str, name: str, outcome: str) -> None:
    bad = probed(answers).first_bad
    assert bad is not None
    assert (bad.name, bad.outcome) == (name, outcome), bad
