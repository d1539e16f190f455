"""Whether the GPUs can reduce together: NCCL's init and a first all_reduce over all, and over 2, 4… of them; latency.

A hang must end at its limit with the stage that it was in, and no rank may outlive the script.
"""

from __future__ import annotations

import datetime
import faulthandler
import inspect
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from pytest_gpuguard.probes import kit

#: How long one rank may take for importing torch and making its CUDA context, in seconds.
IMPORT_S = 90.0
#: How long init, and how long the first all_reduce may take, in seconds.
LIMIT_S = 30.0
#: Elements of the first all_reduce: 4 MiB in float32, more than one chunk of every protocol.
FIRST = 1 << 20
#: Tokens of a decode batch, and the hidden size: what one all_reduce of a decode step carries in bfloat16.
TOKENS = (1, 4, 16, 64)
HIDDEN = 7168
#: Calls that are timed together, and how often that is repeated.
TOGETHER, REPEATS = 10, 15

INIT = "NCCL init"
FIRST_CALL = "first all_reduce"
#: A torch that makes its communicators late does both in one call.
BOTH = "NCCL init and first all_reduce"
LATENCY = "latency"


def run() -> None:
    """One rank on each GPU, and the smaller numbers in groups of these; each by itself once something fails there."""
    backend = kit.args.get("backend", "nccl")
    limit_s = float(kit.args.get("limit_s", LIMIT_S))
    worlds = sorted({int(one) for one in kit.args.get("worlds") or sizes(len(kit.gpus))})
    if not worlds or (backend == "nccl" and max(worlds) > len(kit.gpus)):
        kit.absent("gpus", f"an all_reduce needs two GPUs at least, and as many as ranks: {len(kit.gpus)} are leased")
    what = "NCCL" if backend == "nccl" else backend
    kit.stage(f"all_reduce over {', '.join(map(str, worlds))} GPUs")
    group = together(worlds, limit_s)
    failed = [one for one in group if not one.ok]
    if failed and not any(one.absent for one in failed):
        for place, world in enumerate(worlds[:-1]):  # that of all ranks comes first, so it has been by itself
            kit.stage(f"all_reduce over {world} GPUs by themselves")
            check(together([world], limit_s), [world], limit_s, what, worlds[:place])
    check(group, worlds, limit_s, what, worlds[:-1])
    first = group[0].data
    kit.answer(backend=backend, **first, paths=paths(group[0].text))
    kit.answer(said=said(what, first["version"], first["latency_us"]))


def together(worlds: list[int], limit_s: float) -> list[kit.Rank]:
    """As many ranks as the largest number, which also reduce in groups of the others."""
    whole = 2 * IMPORT_S + (3 * len(worlds) + 1) * limit_s  # every stage ends by itself before
    return kit.ranks("reduce", worlds[-1], whole, env=surroundings(), args={**kit.args, "worlds": worlds})


def sizes(gpus: int) -> list[int]:
    """2, 4, 8… and all: the groups that layouts make."""
    doubles = [1 << power for power in range(1, gpus.bit_length())]
    return sorted({*(one for one in doubles if one <= gpus), gpus} - {0, 1})


def surroundings() -> dict[str, str]:
    """NCCL says when its init was complete, over which paths it goes, and why it failed; the caller's words win."""
    return {
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO"),
        "NCCL_DEBUG_SUBSYS": os.environ.get("NCCL_DEBUG_SUBSYS", "INIT"),
    }


def check(group: list[kit.Rank], worlds: list[int], limit_s: float, what: str, fine: list[int]) -> None:
    """Return when all ranks did it; else end the probe with what went wrong in the earliest stage."""
    failed = [one for one in group if not one.ok]
    if not failed:
        return
    before = f"; {' and '.join(map(str, fine))} GPUs could by themselves" if fine else ""
    subject = f"all_reduce over {worlds[-1]} GPUs"
    kit.settle(failed, subject, lambda late: hang(late, worlds[-1], limit_s, what) + before)


def hang(late: Sequence[kit.Rank], ranks: int, limit_s: float, what: str) -> str:
    """Which of the two it was that did not return: NCCL's init, or the first all_reduce after it."""
    stages = [stage_of(one, ranks) for one in late]
    for earliest in (INIT, BOTH, FIRST_CALL, LATENCY):
        for stage, world in stages:
            if stage == earliest:
                return words(stage, f"{world} GPUs" if world == ranks else f"{world} of {ranks} GPUs", limit_s, what)
    return f"a rank of {ranks} did not return in {late[0].stage!r}"


def words(stage: str, over: str, limit_s: float, what: str) -> str:
    """One hang in words."""
    late = f"did not return within {limit_s:g} s"
    if stage == INIT:
        return f"{what}'s init over {over} {late}"
    if stage == BOTH:
        return f"{what}'s init, or the first all_reduce, over {over} {late}"
    if stage == FIRST_CALL:
        return f"{what}'s init over {over} was complete, but the first all_reduce {late}"
    return f"the first all_reduce over {over} was right, but a later one did not return"


def stage_of(one: kit.Rank, ranks: int) -> tuple[str, int]:
    """The stage that a rank was in, and of how many; NCCL's own word decides where torch does both in one call."""
    stage, _, size = one.stage.partition(", in a group of ")
    world = int(size or ranks)
    complete = re.search(rf"\bnranks {world} .*Init COMPLETE", one.text) is not None
    return FIRST_CALL if stage == BOTH and complete else stage, world


def paths(text: str) -> list[str]:
    """How NCCL moves the data, by its own log: ``["P2P/CUMEM", "SHM/direct/direct"]``."""
    found = (line.rpartition(" via ")[2].split() for line in text.splitlines() if "Channel" in line and " via " in line)
    return sorted({words[0] for words in found if words})[:8]


def said(what: str, version: str, latency: dict[str, dict[str, float]]) -> str:
    """One line for the report."""
    name = f"{what} {version}".strip()
    world, timed = list(latency.items())[-1]
    times = ", ".join(f"{int(size) / 1024:g} KiB in {micros:.0f} µs" for size, micros in ends(timed))
    return f"{name}: right over {', '.join(latency)} GPUs; {times} over {world}"


def ends(timed: dict[str, float]) -> list[tuple[str, float]]:
    """The smallest and the largest size."""
    return list(timed.items())[:: max(1, len(timed) - 1)]


# -------------------------------------------------------------------------------------------------- one rank of them


def reduce(rank: int, world: int) -> None:
    """Init, a first all_reduce whose sums are checked, and the latency at a decode step's sizes; so in each group."""
    backend = kit.args.get("backend", "nccl")
    limit_s = float(kit.args.get("limit_s", LIMIT_S))
    smaller = kit.args["worlds"][-2::-1]
    begin("import torch", IMPORT_S)
    torch = torch_of_the_stack()
    dist = torch.distributed
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        kit.absent("cuda", f"this stack's torch {torch.__version__} has no {backend}")
    begin("CUDA context", IMPORT_S)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)
    rest_s = 2 * len(smaller) * limit_s  # what those who are in no smaller group wait for
    options: dict[str, Any] = {"backend": backend, "timeout": datetime.timedelta(seconds=rest_s + limit_s + 30)}
    early = "device_id" in inspect.signature(dist.init_process_group).parameters
    if early and device.type == "cuda":
        options["device_id"] = device  # else the communicator is made in the first call
    begun = time.monotonic()
    begin(INIT, limit_s)
    dist.init_process_group(**options)
    first = FIRST_CALL if early else BOTH
    latency, seconds = {}, {}
    latency[str(world)] = reduced(torch, device, rank, world, limit_s, first, None)
    seconds[str(world)] = round(time.monotonic() - begun, 1)
    groups = {}
    for size in smaller:
        begin(f"{INIT}, in a group of {size}", limit_s)
        groups[size] = dist.new_group(list(range(size)))
    for size, group in groups.items():
        if rank < size:
            begun = time.monotonic()
            latency[str(size)] = reduced(torch, device, rank, size, limit_s, first, group)
            seconds[str(size)] = round(time.monotonic() - begun, 1)
    if groups:
        begin("wait for the smaller groups", rest_s + limit_s)
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    faulthandler.cancel_dump_traceback_later()
    version = nccl_version(torch) if backend == "nccl" else ""
    kit.answer(version=version, latency_us=dict(reversed(latency.items())), seconds=dict(reversed(seconds.items())))


def reduced(torch: Any, device: Any, rank: int, size: int, limit_s: float, first: str, group: Any) -> dict[str, float]:
    """A first all_reduce of one group, and its latency by the bytes: in µs."""
    where = "" if group is None else f", in a group of {size}"
    begin(first + where, limit_s)
    check_sums(torch, device, rank, size, group)
    begin(LATENCY + where, limit_s)
    latency = {}
    for tokens in TOKENS:
        data = torch.zeros(tokens * HIDDEN, dtype=torch.bfloat16, device=device)
        latency[str(tokens * HIDDEN * 2)] = round(timed(torch, device, data, group), 1)
    return latency


def begin(stage: str, limit_s: float) -> None:
    """A stage with an end of its own: at its limit the process prints where it is and is gone."""
    kit.stage(stage)
    faulthandler.dump_traceback_later(limit_s, exit=True)


def torch_of_the_stack() -> Any:
    """The stack's torch; a stack without one is no defect of its collectives."""
    try:
        import torch
        import torch.distributed
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        kit.absent("package", "this stack has no torch")
    return torch


def check_sums(torch: Any, device: Any, rank: int, world: int, group: Any) -> None:
    """All ranks add numbers that differ by place and rank, and small enough to be exact."""
    places = torch.arange(FIRST, dtype=torch.float32, device=device) % 251
    data = places * (rank + 1)
    torch.distributed.all_reduce(data, group=group)
    expected = places * (world * (world + 1) // 2)
    wrong = int((data != expected).sum())  # waits for the GPU
    if wrong:
        kit.defect("numerics", f"an all_reduce over {world} GPUs gave {wrong} wrong sums of {FIRST}")


def timed(torch: Any, device: Any, data: Any, group: Any) -> float:
    """Median over the repeats, in µs for one call of several at once: launches overlap as in a decode step."""
    took = []
    for _ in range(REPEATS + 2):  # two to warm up
        begun = time.perf_counter()
        for _ in range(TOGETHER):
            torch.distributed.all_reduce(data, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append((time.perf_counter() - begun) / TOGETHER * 1e6)
    return sorted(took[2:])[REPEATS // 2]


def nccl_version(torch: Any) -> str:
    """NCCL's version as it says it itself: ``"2.28.9"``."""
    found = torch.cuda.nccl.version()
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


if __name__ == "__main__":
    kit.main(run)
