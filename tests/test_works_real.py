"""The probe against the real SGLang: random weights pass, and NaN is found while the server calls itself healthy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pytest_gpuguard.measure.ask import Asker
from pytest_gpuguard.measure.reference import BadReference, compare, make
from pytest_gpuguard.measure.works import works
from tests.needs import need

STACK = Path(os.environ.get("GPUGUARD_CPU_STACK") or Path(__file__).parents[1] / ".cpu-stack")

#: Puts NaN into one matrix of the last layer.
SPOIL = """
import sys
from safetensors.torch import load_file, save_file
weights = load_file(sys.argv[1])
weights["model.layers.1.mlp.down_proj.weight"].fill_(float("nan"))
save_file(weights, sys.argv[1], metadata={"format": "pt"})
"""

pytestmark = [pytest.mark.real_server, pytest.mark.timeout(600)]


@contextmanager
def served(tmp_path: Path, nan: bool = False) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    python = STACK / "venv" / "bin" / "python"
    need(python.exists(), f"the CPU stack is not built at {STACK}: python tools/cpu_stack.py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = STACK / "models" / "tiny"
    if nan:
        model = Path(shutil.copytree(model, tmp_path / "model"))
        subprocess.run([python, "-c", SPOIL, model / "model.safetensors"], check=True)
    argv = [str(python), "-m", "sglang.launch_server", "--model-path", str(model)]
    argv += ["--device", "cpu", "--port", str(port), "--max-total-tokens", "4096", "--chunked-prefill-size", "512"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log, env=env) as process:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    if httpx.get(f"{url}/health", trust_env=False, timeout=20).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.5)
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def test_random_weights_answer_sanely_on_every_path(tmp_path: Path) -> None:
    with served(tmp_path) as (url, process):
        found = works(url, {}, context=None, model=None, alive=lambda: process.poll() is None, deadline_s=200)
        again = works(url, {}, context=None, model=None, alive=lambda: process.poll() is None, deadline_s=200)
        with Asker(url, {}, deadline_s=100) as asker:
            first, second = make(asker), make(asker)
    for one in (found, again):
        assert one.ok is True, one
        assert "came from the prefix cache" in one.checks[1].fact
        assert "in chunks of 512" in one.checks[2].fact
    assert compare(first, second.passages).mean_abs < 0.01
    assert first.engine == "sglang"


def test_nan_in_a_healthy_server_is_found(tmp_path: Path) -> None:
    with served(tmp_path, nan=True) as (url, process):
        found = works(url, {}, context=None, model=None, alive=lambda: process.poll() is None, deadline_s=200)
        with Asker(url, {}, deadline_s=100) as asker, pytest.raises(BadReference, match="is null, and no number"):
            make(asker)
        assert process.poll() is None
    assert found.first_bad is not None
    assert found.first_bad.outcome == "numerics", found
