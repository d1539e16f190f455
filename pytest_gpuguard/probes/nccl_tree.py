"""What one collective does under one NCCL_ALGO, eager or captured in a CUDA graph: its result, or NCCL's refusal.

The variable must be set for the ranks alone, and each collective be tried by itself: one refusal ends a communicator.
"""

from __future__ import annotations

import datetime
import faulthandler
import inspect
from typing import Any

from pytest_gpuguard.probes import kit

#: How long importing torch may take, and each later stage, in seconds.
IMPORT_S, LIMIT_S = 90.0, 30.0
#: Elements that each rank gives.
SIZE = 1 << 16
REPLAYS = 3
OPERATIONS = ("all_reduce", "all_gather")


def run() -> None:
    """``args``: {"op": "all_reduce" or "all_gather", "graph": false, "algo": "Tree", "backend": "nccl", "world": n}."""
    operation = kit.args.get("op", "all_reduce")
    if operation not in OPERATIONS:
        raise ValueError(f"op is {operation!r}: it must be one of {', '.join(OPERATIONS)}")
    world = int(kit.args.get("world") or len(kit.gpus))
    if world < 2 or (backend() == "nccl" and world > len(kit.gpus)):
        kit.absent("gpus", f"a collective needs two GPUs at least: {len(kit.gpus)} are leased")
    how = "captured in a CUDA graph" if kit.args.get("graph") else "eager"
    what = f"{operation} over {world} GPUs, {how}, with NCCL_ALGO={algorithm()}"
    kit.stage(what)
    # Without NCCL's own warnings torch names no cause.
    env = {"NCCL_ALGO": algorithm(), "NCCL_DEBUG": "WARN"}
    group = kit.ranks("collective", world, IMPORT_S + 5 * limit_s(), env=env)
    failed = [one for one in group if not one.ok]
    if not failed:
        kit.answer(**group[0].data, said=f"{what}: right")
        return
    kit.settle(failed, what)


def limit_s() -> float:
    """How long one stage may take, in seconds."""
    return float(kit.args.get("limit_s", LIMIT_S))


def algorithm() -> str:
    """What NCCL_ALGO is set to."""
    return str(kit.args.get("algo", "Tree"))


def backend() -> str:
    """What carries the collective: NCCL, or gloo where there is no GPU."""
    return str(kit.args.get("backend", "nccl"))


# -------------------------------------------------------------------------------------------------------- the ranks


def collective(rank: int, world: int) -> None:
    """The collective of the order, its result checked; graphs are warmed up eagerly first, as engines do it."""
    begin("import torch", IMPORT_S)
    try:
        import torch
        import torch.distributed as dist
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        kit.absent("package", "this stack has no torch")
    graph = bool(kit.args.get("graph"))
    cuda = backend() == "nccl"
    if (cuda or graph) and torch.version.cuda is None:
        kit.absent("cuda", f"this stack's torch {torch.__version__} has no CUDA")
    begin("CUDA context", IMPORT_S)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    options: dict[str, Any] = {"backend": backend(), "timeout": datetime.timedelta(seconds=limit_s() + 30)}
    if cuda:
        torch.cuda.set_device(device)
        if "device_id" in inspect.signature(dist.init_process_group).parameters:
            options["device_id"] = device
    begin("NCCL init", limit_s())
    dist.init_process_group(**options)
    given = torch.empty(SIZE, dtype=torch.float32, device=device)
    result = given if kit.args.get("op", "all_reduce") == "all_reduce" else torch.empty(SIZE * world, device=device)
    expected = expectation(torch, world, device)
    if graph:
        captured(torch, given, result, rank, expected)
    else:
        begin("eager call", limit_s())
        given.fill_(rank + 1)
        call(dist, given, result)
        compare(result, expected)
    faulthandler.cancel_dump_traceback_later()
    kit.answer(world=world)


def captured(torch: Any, given: Any, result: Any, rank: int, expected: Any) -> None:
    """Warm-up on a stream of its own, capture, and some replays whose results are checked."""
    begin("eager warm-up before the capture", limit_s())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(torch.distributed, given, result)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    begin("capture", limit_s())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(torch.distributed, given, result)
    begin("replay", limit_s())
    for _ in range(REPLAYS):
        given.fill_(rank + 1)
        graph.replay()
        compare(result, expected)


def expectation(torch: Any, world: int, device: Any) -> Any:
    """What every rank must have in the end."""
    if kit.args.get("op", "all_reduce") == "all_reduce":
        return torch.full((SIZE,), world * (world + 1) / 2, device=device)
    return torch.arange(1, world + 1, dtype=torch.float32, device=device).repeat_interleave(SIZE)


def call(dist: Any, given: Any, result: Any) -> None:
    """The collective itself."""
    if given is result:
        dist.all_reduce(given)
    else:
        dist.all_gather_into_tensor(result, given)


def compare(result: Any, expected: Any) -> None:
    """End the rank when the result is wrong."""
    wrong = int((result != expected).sum())  # waits for the GPU
    if wrong:
        kit.defect("numerics", f"{wrong} wrong values of {expected.numel()} under NCCL_ALGO={algorithm()}")


def begin(stage: str, limit: float) -> None:
    """A stage with an end of its own: at its limit the process prints where it is and is gone."""
    kit.stage(stage)
    faulthandler.dump_traceback_later(limit, exit=True)


if __name__ == "__main__":
    kit.main(run)
