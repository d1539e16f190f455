"""Torch's symmetric memory between the GPUs: torch's own rendezvous and reads, or the class that SGLang reduces with.

A hang must end at its limit with the stage that it was in, and no rank may outlive the script.
"""

from __future__ import annotations

import datetime
import faulthandler
import inspect
import logging
from typing import Any

from pytest_gpuguard.probes import kit

#: How long importing torch or SGLang may take, and each later stage, in seconds.
IMPORT_S, LIMIT_S = 120.0, 30.0
#: Elements of each rank's buffer.
SIZE = 1 << 16
SGLANG = "sglang.srt.distributed.device_communicators"
CALLS = {"torch": "own", "sglang": "of_sglang"}


def run() -> None:
    """``args``: {"of": "torch"}, or {"of": "sglang"}; {"world": n} for fewer ranks than leased GPUs."""
    of = kit.args.get("of", "torch")
    if of not in CALLS:
        raise ValueError(f"of is {of!r}: it must be one of {', '.join(CALLS)}")
    world = int(kit.args.get("world") or len(kit.gpus))
    if world < 2 or world > len(kit.gpus):
        kit.absent("gpus", f"symmetric memory needs two GPUs at least: {len(kit.gpus)} are leased")
    kit.stage(f"{of} over {world} GPUs")
    group = kit.ranks(CALLS[of], world, IMPORT_S + 4 * limit_s())
    failed = [one for one in group if not one.ok]
    if not failed:
        kit.answer(**group[0].data)
        return
    kit.settle(failed, f"{of} over {world} GPUs")  # without words that are signatures


def limit_s() -> float:
    """How long one stage may take, in seconds."""
    return float(kit.args.get("limit_s", LIMIT_S))


# -------------------------------------------------------------------------------------------------------- the ranks


def own(rank: int, world: int) -> None:
    """Every rank writes its number into a symmetric buffer, and reads those of all others."""
    torch, device = joined(rank, world)
    begin("allocation", limit_s())
    symmetric = module(torch)
    mine = symmetric.empty(SIZE, dtype=torch.float32, device=device)
    begin("rendezvous", limit_s())
    handle = symmetric.rendezvous(mine, torch.distributed.group.WORLD.group_name)
    mine.fill_(rank + 1)
    begin("reads from the peers", limit_s())
    handle.barrier()
    wrong = []
    for peer in range(world):
        there = handle.get_buffer(peer, (SIZE,), torch.float32)
        if not bool((there == peer + 1).all()):
            wrong.append(peer)
    handle.barrier()
    torch.cuda.synchronize()  # nobody may be gone while another still reads
    faulthandler.cancel_dump_traceback_later()
    if wrong:
        kit.defect("comm.p2p", f"rank {rank} read wrong values from the symmetric memory of ranks {wrong}")
    multicast = bool(getattr(handle, "multicast_ptr", 0))
    kit.answer(multicast=multicast, said=f"{world} GPUs read each other's; multicast: {'yes' if multicast else 'no'}")


def of_sglang(rank: int, world: int) -> None:
    """SGLang's communicator: made, and one all_reduce; what it warned of when it stays off."""
    torch, device = joined(rank, world)
    begin("import sglang", IMPORT_S)
    warned = Warned()
    logging.getLogger().addHandler(warned)
    made = communicator()(group=torch.distributed.group.WORLD, device=device)
    if made.disabled:
        text = warned.said or "SGLang's symmetric memory is off, and it did not say why"
        kit.defect("unsupported.arch" if "capability" in text else "unsupported.config", text)
    begin("all_reduce", limit_s())
    data = torch.full((SIZE,), float(rank + 1), dtype=torch.bfloat16, device=device)
    reduced = made.all_reduce(data)
    right = reduced is not None and bool((reduced == world * (world + 1) // 2).all())
    faulthandler.cancel_dump_traceback_later()
    if not right:
        kit.defect("numerics", f"SGLang's all_reduce in symmetric memory gave wrong sums over {world} GPUs")
    kit.answer(said=f"SGLang reduces over {world} GPUs in symmetric memory")


def communicator() -> Any:
    """SGLang's class, by its newer and its older name."""
    import importlib

    try:
        importlib.import_module("sglang")
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        kit.absent("package", "this stack has no sglang")
    for name, where in (("TorchSymmMemCommunicator", "torch_symm_mem"), ("SymmMemCommunicator", "symm_mem")):
        try:
            found = importlib.import_module(f"{SGLANG}.{where}")
        except ModuleNotFoundError as error:
            if error.name != f"{SGLANG}.{where}":
                raise
            continue
        return getattr(found, name)
    kit.absent("package", "this sglang has no symmetric memory communicator (it came with 0.5.3)")


class Warned(logging.Handler):
    """Keeps the last warning about symmetric memory."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        if "ymm" in record.name or "ymm" in record.getMessage():
            self.said = record.getMessage()


def joined(rank: int, world: int) -> tuple[Any, Any]:
    """Torch, and this rank's GPU, once the group is there and all GPUs may read each other's memory."""
    begin("import torch", IMPORT_S)
    try:
        import torch
        import torch.distributed as dist
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        kit.absent("package", "this stack has no torch")
    if torch.version.cuda is None:
        kit.absent("cuda", f"this stack's torch {torch.__version__} has no CUDA")
    begin("CUDA context", IMPORT_S)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    if kit.args.get("of", "torch") == "torch":
        blind = [one for one in range(world) if one != rank and not torch.cuda.can_device_access_peer(rank, one)]
        if blind:
            kit.absent("gpus", f"GPU {rank} has no P2P access to GPU {blind[0]}: symmetric memory needs it")
    begin("NCCL init", limit_s())
    options: dict[str, Any] = {"backend": "nccl", "timeout": datetime.timedelta(seconds=limit_s() + 30)}
    if "device_id" in inspect.signature(dist.init_process_group).parameters:
        options["device_id"] = device
    dist.init_process_group(**options)
    return torch, device


def module(torch: Any) -> Any:
    """Torch's module of symmetric memory."""
    import importlib

    try:
        found = importlib.import_module("torch.distributed._symmetric_memory")
    except ModuleNotFoundError as error:
        if error.name != "torch.distributed._symmetric_memory":
            raise
        found = None
    if found is None or not hasattr(found, "empty") or not hasattr(found, "rendezvous"):
        kit.absent("package", f"this stack's torch {torch.__version__} has no symmetric memory (it came with 2.6)")
    return found


def begin(stage: str, limit: float) -> None:
    """A stage with an end of its own: at its limit the process prints where it is and is gone."""
    kit.stage(stage)
    faulthandler.dump_traceback_later(limit, exit=True)


if __name__ == "__main__":
    kit.main(run)
