"""Memory of one Hopper card, without an engine: torch alone, run by the stack's python (torch_memory.py beside this).

That memory ran out is told by torch's own error, in code that looks like loading, graph capture and serving. They show
that a stack's torch and driver still say it in words that are understood; a rehearsal has no GPU for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_gpuguard import claim, fits, max_mem, needs_gpus, needs_package, needs_sm90, ooms

SCRIPT = str(Path(__file__).with_name("torch_memory.py"))
WORDS = "pytorch c10/cuda/CUDACachingAllocator.cpp"

one = needs_gpus(1)
has_torch = needs_package("torch>=2.0")


@needs_sm90
@has_torch
@one
@ooms("weights")
@claim(id="H10.load", title="a full GPU in code that loads is told as such", source=WORDS, minutes=2)
def test_out_of_memory_while_loading(command_server: Any, stack: Any) -> None:
    """torch.OutOfMemoryError below ``load_model``."""
    command_server([stack.python, SCRIPT, "load"], ready="never said", boot_timeout="3m")


@needs_sm90
@has_torch
@one
@ooms("graph_capture")
@claim(id="H10.capture", title="a full GPU in graph capture is told as such", source=WORDS, minutes=2)
def test_out_of_memory_in_graph_capture(command_server: Any, stack: Any) -> None:
    """The error inside ``torch.cuda.graph``, which may be followed by one about the capture that it broke."""
    command_server([stack.python, SCRIPT, "capture"], ready="never said", boot_timeout="3m")


@needs_sm90
@has_torch
@one
@ooms("runtime")
@claim(id="H10.run", title="a full GPU in a batch is told as such", source=WORDS, minutes=2)
def test_out_of_memory_while_running(command_server: Any, stack: Any) -> None:
    """The error below ``execute_model``."""
    command_server([stack.python, SCRIPT, "run"], ready="never said", boot_timeout="3m")


@needs_sm90
@has_torch
@one
@max_mem("9GiB", of="peak")
@claim(
    id="H11",
    title="eight GiB and a context take less than nine",
    source="unslothai/unsloth#9362 (a context takes 612 MiB on a B200)",
    minutes=2,
)
def test_the_peak_of_what_torch_holds(command_server: Any, stack: Any) -> None:
    """Sampled by NVML from outside: the allocation, and what CUDA keeps for the process."""
    command_server([stack.python, SCRIPT, "hold", "8"], ready="^up, with", boot_timeout="3m")


@needs_sm90
@has_torch
@one
@fits
@claim(
    id="H12",
    title="CUDA's total is NVML's less the driver's reserve",
    source="recorded cards: H100 81559 MiB, of which torch sees 79.18 GiB (vllm-omni #4165); H200 143771 MiB",
    minutes=2,
)
def test_the_total_that_torch_sees(command_server: Any, stack: Any, rig: Any) -> None:
    """Three totals go by the same name: the marketed one, NVML's, and what is left of it for programs."""
    up = command_server([stack.python, SCRIPT, "facts"], ready="^up, with", boot_timeout="3m")
    (told,) = [line for line in Path(up.log).read_text().splitlines() if line.startswith("facts: ")]
    found = json.loads(told.removeprefix("facts: "))
    memory = rig.gpu(up.observation.gpus[0]).memory
    assert found["capability"] == [9, 0]
    assert abs(found["total"] - (memory.total - memory.reserved)) <= 64 << 20
