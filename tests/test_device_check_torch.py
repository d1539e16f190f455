"""The parts of scripts/device-check that use torch, with a real torch on the CPU as far as that goes.

Its CUDA calls are only checked to exist: what they do, a GPU alone can show.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.diagnose import classify_text
from scripts.device_check import memory, served, workload

from .conftest import own_ports
from .needs import need

ROOT = Path(__file__).resolve().parents[1]
STACK = Path(os.environ.get("GPUGUARD_CPU_STACK") or ROOT / ".cpu-stack")
WORKLOAD = Path(workload.__file__)

#: What takes the place of CUDA: real tensors of torch on the CPU, a thousandth of the size.
SHIM = """
import runpy, sys, torch
made = {name: getattr(torch, name) for name in ("empty", "ones")}
total, state = 16 << 30, {"used": 1 << 30}
def maker(name):
    def make(*shape, **options):
        options.update(device="cpu")
        (size,) = shape
        nbytes = size * (4 if options.get("dtype") is torch.float32 else 1)
        if state["used"] + nbytes > total:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total")
        state["used"] += nbytes
        return made[name](max(1, size // 1024), **options)
    return make
for name in made:
    setattr(torch, name, maker(name))
cuda = torch.cuda
cuda.init = cuda.synchronize = cuda.empty_cache = lambda: None
cuda.mem_get_info = lambda: (total - state["used"], total)
cuda.max_memory_allocated = cuda.max_memory_reserved = lambda: state["used"]
cuda.get_device_name = lambda index: "a shim"
cuda.get_device_capability = lambda index: (9, 0)
class Graph: ...
class Capture:
    def __init__(self, graph): assert isinstance(graph, Graph)
    def __enter__(self): return self
    def __exit__(self, *raised): return None
cuda.CUDAGraph, cuda.graph = Graph, Capture
script, sys.argv[:] = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = STACK / "venv" / "bin" / "python"
    need(found.exists(), f"the CPU stack is not built at {STACK}: python tools/cpu_stack.py")
    return str(found)


def test_every_cuda_call_of_the_workload_is_one_that_torch_has(python: str) -> None:
    used = sorted(set(re.findall(r"torch\.cuda\.(\w+)", WORKLOAD.read_text())))
    assert {"mem_get_info", "CUDAGraph", "graph", "OutOfMemoryError", "empty_cache"} <= set(used)
    code = f"import torch; print([name for name in {used!r} if not hasattr(torch.cuda, name)])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_workload_does_what_it_is_told_and_runs_out_of_memory_in_the_named_place(
    python: str, tmp_path: Path
) -> None:
    (tmp_path / "shim.py").write_text(SHIM)
    orders: list[dict[str, Any]] = [
        {"do": "take", "bytes": 1 << 30},
        {"do": "spike", "bytes": 1 << 30, "seconds": 0.02},
        {"do": "info"},
        {"do": "take", "bytes": -(2 << 30)},
    ]
    done = subprocess.run(
        [python, str(tmp_path / "shim.py"), str(WORKLOAD), "obey"],
        input="".join(f"{json.dumps(one)}\n" for one in orders),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, taken, spike, info, rest = map(json.loads, done.stdout.splitlines())
    assert first["ready"]
    assert first["capability"] == [9, 0]
    assert taken["taken"] == 1 << 20
    assert spike["held_s"] >= 0.02
    assert info["total"] - info["free"] == (3 << 30) + 1
    assert rest["taken"] > taken["taken"]
    for where, outcome in memory.EXPECTED.items():
        words = [python, str(tmp_path / "shim.py"), str(WORKLOAD), "oom", where]
        ran_out = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert ran_out.returncode == 1
        assert classify_text(ran_out.stdout, engine="command").outcome == outcome, ran_out.stdout


def test_the_meter_counts_what_a_torch_server_on_the_cpu_counts_itself(python: str, tmp_path: Path) -> None:
    found = served.run_claims(tmp_path / "run", 0, "cpu", [], {**os.environ, served.PORTS: own_ports()}, python)
    assert found.problems == [], found.log
    for row in found.figures["toks"]:
        assert row["meter"] == pytest.approx(row["server"], rel=0.02)
        assert row["server"] > 10
