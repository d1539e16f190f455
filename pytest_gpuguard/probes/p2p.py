"""How the GPUs reach each other and the host: copies that must arrive whole, bandwidth, and PCIe links under load.

Links are judged only while data moves: an idle one runs slower on purpose. No copy that hangs may outlive it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading
import time
from typing import Any

from pytest_gpuguard.probes import kit

#: How long torch and the CUDA contexts may take, and how long one copy, in seconds.
IMPORT_S, COPY_S = 90.0, 30.0
#: Bytes that are compared, and bytes that are timed.
COMPARED, TIMED = 16 << 20, 128 << 20
REPEATS = 4
#: How long a link is kept busy while its speed is read, in seconds.
LOAD_S = 0.6
SYSFS = "/sys/bus/pci/devices"
#: GT/s of the PCIe generations.
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def run() -> None:
    """``args``: {"check": "copies"} between all pairs of GPUs, or {"check": "links"} to the host."""
    what = kit.args.get("check", "copies")
    if what not in ("copies", "links"):
        raise ValueError(f"check is {what!r}: it must be copies or links")
    found = devices()
    least = 2 if what == "copies" else 1
    if len(found) < least:
        kit.absent("gpus", f"this needs {least} GPUs at least: {len(found)} are leased")
    limit_s = IMPORT_S + COPY_S * (len(found) ** 2 + 1)
    kit.stage(what)
    done = kit.child(what, limit_s)
    if done.ok:
        kit.answer(**done.data)
        (judge_copies if what == "copies" else judge_links)(done.data)
        return
    kit.settle([done], what)


def devices() -> list[str]:
    """The devices by torch's names."""
    return [str(one) for one in kit.args.get("devices") or [f"cuda:{index}" for index in range(len(kit.gpus))]]


def judge_copies(data: dict[str, Any]) -> None:
    """A copy that arrives changed is a defect; the rest is told."""
    if data["wrong"]:
        first = data["wrong"][0]
        kit.defect(
            "comm.p2p",
            f"a copy from GPU {first['from']} to GPU {first['to']} arrived with {first['bytes']} wrong bytes of "
            f"{COMPARED} ({len(data['wrong'])} of {data['pairs']} directions): with IOMMU or ACS on, P2P may corrupt "
            "data",
        )
    rates = [one for row in data["gb_per_s"] for one in row if one is not None]
    reach = data["access"]
    if reach is None:
        access = "P2P access unknown"
    else:
        able = sum(one is True for row in reach for one in row)
        access = f"P2P access in {able} of {data['pairs']} directions"
    kit.answer(said=f"{access}; copies whole, {min(rates):.1f} to {max(rates):.1f} GB/s")


def judge_links(data: dict[str, Any]) -> None:
    """A link below what GPU and slot can both do is a fault of the machine."""
    slow = [one for one in data["links"] if one["below"]]
    if slow:
        kit.defect("hardware", "; ".join(told(one) for one in slow))
    kit.answer(said="; ".join(told(one) for one in data["links"]))


def told(link: dict[str, Any]) -> str:
    """One link in words."""
    rates = f"{link['to_gpu']:.1f} GB/s to it, {link['from_gpu']:.1f} from it"
    if link["gen"] is None or link["width"] is None:
        return f"GPU {link['gpu']}: PCIe speed not readable, {rates}"
    now = f"PCIe gen {link['gen']} x{link['width']} under load"
    if link["gen_max"] is None:
        return f"GPU {link['gpu']}: {now} (what its slot can do is not known), {rates}"
    if link["below"]:
        return f"GPU {link['gpu']}: {now} where GPU and slot can do gen {link['gen_max']} x{link['width_max']}, {rates}"
    return f"GPU {link['gpu']}: {now}, {rates}"


# ------------------------------------------------------------------------------------------------------ in the child


def copies() -> None:
    """Every direction between two devices: may it be read directly, does a copy arrive whole, and how fast is it."""
    torch, found = start()
    count = len(found)
    access: list[list[bool | None]] | None = None
    if found[0].startswith("cuda"):
        access = [[peer(torch, a, b) for b in range(count)] for a in range(count)]
    original = (torch.arange(COMPARED // 4, dtype=torch.int32) * 40503) ^ 0x5A5A5A5A
    rate: list[list[float | None]] = [[None] * count for _ in found]
    wrong = []
    for a in range(count):
        begin(f"fill GPU {a}", COPY_S)
        whole = original.to(found[a])
        source = torch.zeros(TIMED // 4, dtype=torch.int32, device=found[a])
        for b in range(count):
            if a == b:
                continue
            begin(f"copy from GPU {a} to GPU {b}", COPY_S)
            arrived = torch.zeros(COMPARED // 4, dtype=torch.int32, device=found[b])  # not what lay there before
            wait(torch, found[a], found[b])
            arrived.copy_(whole)
            wait(torch, found[a], found[b])
            back = arrived.to("cpu")
            if not torch.equal(back, original):
                wrong.append({"from": a, "to": b, "bytes": int((back != original).sum()) * 4})
            target = torch.empty(TIMED // 4, dtype=torch.int32, device=found[b])
            rate[a][b] = round(speed(torch, source, target, found[a], found[b]), 2)
            del target, arrived
        del source, whole
    faulthandler.cancel_dump_traceback_later()
    kit.answer(access=access, gb_per_s=rate, wrong=wrong, pairs=count * (count - 1))


def peer(torch: Any, a: int, b: int) -> bool | None:
    """Whether one GPU may read another's memory; None for itself."""
    return None if a == b else bool(torch.cuda.can_device_access_peer(a, b))


def links() -> None:
    """Each GPU's way to the host and back, with the link's speed read while it is busy."""
    torch, found = start()
    pinned = found[0].startswith("cuda")
    host = torch.empty(TIMED // 4, dtype=torch.int32, pin_memory=pinned)
    read = []
    for index, name in enumerate(found):
        begin(f"copies between the host and GPU {index}", COPY_S + LOAD_S)
        there = torch.zeros(TIMED // 4, dtype=torch.int32, device=name)
        pci = bus_ids()[index] if index < len(bus_ids()) else None
        with Watched(pci) as watched:
            until = time.monotonic() + LOAD_S
            while time.monotonic() < until:
                there.copy_(host, non_blocking=True)
                host.copy_(there, non_blocking=True)
                wait(torch, name)
        to, back = speed(torch, host, there, name), speed(torch, there, host, name)
        read.append({"gpu": index, "pci": pci, "to_gpu": round(to, 2), "from_gpu": round(back, 2), **watched.found()})
        del there
    faulthandler.cancel_dump_traceback_later()
    kit.answer(links=read)


def start() -> tuple[Any, list[str]]:
    """Torch, and the devices with a context on each."""
    begin("import torch", IMPORT_S)
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        kit.absent("package", "this stack has no torch")
    found = devices()
    begin("CUDA contexts", IMPORT_S)
    if found[0].startswith("cuda"):
        if torch.version.cuda is None:
            kit.absent("cuda", f"this stack's torch {torch.__version__} has no CUDA")
        wait(torch, *found)
    return torch, found


def begin(stage: str, limit_s: float) -> None:
    """A stage with an end of its own: at its limit the process prints where it is and is gone."""
    kit.stage(stage)
    faulthandler.dump_traceback_later(float(kit.args.get("limit_s", limit_s)), exit=True)


def wait(torch: Any, *names: str) -> None:
    """Until what these devices were given is done."""
    for name in names:
        if name.startswith("cuda"):
            torch.cuda.synchronize(torch.device(name))


def speed(torch: Any, source: Any, target: Any, *names: str) -> float:
    """The best of several copies, in GB/s (10⁹)."""
    best = 0.0
    for _ in range(REPEATS):
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait(torch, *names)
        best = max(best, TIMED / (time.perf_counter() - begun) / 1e9)
    return best


# ------------------------------------------------------------------------------------------------------------- sysfs


def bus_ids() -> list[str]:
    """The leased GPUs' PCI addresses in the order of the lease, as sysfs spells them."""
    by_uuid = {one.get("uuid"): str(one.get("pci") or "") for one in kit.rig}
    return [sysfs_name(by_uuid.get(uuid, "")) for uuid in kit.gpus]


def sysfs_name(pci: str) -> str:
    """NVML writes the domain with eight digits, sysfs with four or more: ``0000:16:00.0``."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if rest else ""


class Watched:
    """Reads a link's speed and width again and again while it is busy, and keeps the best."""

    def __init__(self, pci: str | None) -> None:
        root = str(kit.args.get("sysfs", SYSFS))
        # The real path goes from the root port down to the GPU: one folder up is the slot's end of the link.
        self._gpu = os.path.realpath(os.path.join(root, pci)) if pci else ""
        self._best: tuple[float, int] = (0.0, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _read(self) -> None:
        while True:
            speed, width = self._ask("current", self._gpu)
            self._best = max(self._best, (speed or 0.0, width or 0))
            if self._over.wait(0.02):
                return

    @staticmethod
    def _ask(which: str, folder: str) -> tuple[float | None, int | None]:
        """GT/s and lanes, None for what cannot be read: virtual bridges say "Unknown", or nothing."""
        speed = re.match(r"\s*([\d.]+) GT/s", read(os.path.join(folder, f"{which}_link_speed")))
        width = re.match(r"\s*([1-9]\d?)\s*$", read(os.path.join(folder, f"{which}_link_width")))
        return float(speed[1]) if speed else None, int(width[1]) if width and int(width[1]) <= 32 else None

    def found(self) -> dict[str, Any]:
        """Generation and lanes under load, what GPU and slot can both do, and whether it is below that.

        The last two are unknown where the slot is not seen, or is one that a hypervisor made up.
        """
        speed, width = self._best
        gpu, slot = self._ask("max", self._gpu), self._ask("max", os.path.dirname(self._gpu))
        found: dict[str, Any] = {"gen": GENERATIONS.get(speed), "width": width or None}
        virtual = " hypervisor" in read(str(kit.args.get("cpuinfo", "/proc/cpuinfo")))
        if virtual or None in (*gpu, *slot) or not speed or not width:
            return {**found, "gen_max": None, "width_max": None, "below": False}
        fastest, widest = min(gpu[0] or 0.0, slot[0] or 0.0), min(gpu[1] or 0, slot[1] or 0)
        below = speed < fastest or width < widest
        return {**found, "gen_max": GENERATIONS.get(fastest), "width_max": widest, "below": below}


def read(path: str) -> str:
    """A small file's text; "" when there is none, or it is not for us."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


if __name__ == "__main__":
    kit.main(run)
