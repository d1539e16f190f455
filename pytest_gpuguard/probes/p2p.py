"""How torch computes on the GPUs, how they reach each other and the host: whole copies, bandwidth, PCIe under load.

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
#: How long all parts of a shared answer may take, in seconds.
SHARED_S = 200.0
#: Bytes that are compared, and bytes that are timed.
COMPARED, TIMED = 16 << 20, 128 << 20
REPEATS = 4
#: How long a link is kept busy at most while its speed is read, in seconds.
LOAD_S = 0.6
SYSFS = "/sys/bus/pci/devices"
#: GT/s of the PCIe generations.
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
#: The parts, and how many GPUs each needs.
LEAST = {"torch": 1, "copies": 2, "links": 1}

_part = ""


def run() -> None:
    """``args``: {"check": "copies"} between all pairs of GPUs, {"check": "links"} to the host, or {"all": true}.

    ``all`` asks for every part in one process, and answers which of them hold; a part that does not is to be asked for
    by itself, and torch's by the probe torch_gpus: then outcome, words and log are its own.
    """
    if kit.args.get("all"):
        shared()
        return
    what = kit.args.get("check", "copies")
    if what not in ("copies", "links"):
        raise ValueError(f"check is {what!r}: it must be copies or links")
    found = devices()
    if len(found) < LEAST[what]:
        kit.absent("gpus", f"this needs {LEAST[what]} GPUs at least: {len(found)} are leased")
    kit.stage(what)
    done = kit.child("alone", IMPORT_S + COPY_S * (len(found) ** 2 + 1))
    if not done.ok:
        kit.settle([done], what)
    kit.answer(**done.data)
    defect, said = JUDGES[what](done.data)
    if defect is not None:
        kit.defect(*defect)
    kit.answer(said=said)


def shared() -> None:
    """Every part that there are GPUs for; one that hangs or crashes is left out, and the others begin anew."""
    until = time.monotonic() + float(kit.args.get("shared_s", SHARED_S))
    left = [part for part, least in LEAST.items() if len(devices()) >= least]
    data: dict[str, Any] = {}
    while left and time.monotonic() < until:
        kit.stage(", ".join(left))
        done = kit.child("several", until - time.monotonic(), args={**kit.args, "parts": left})
        data = done.data if done.ok else {}
        if done.ok:
            break
        print(f"in {done.stage!r}:\n{done.text}", flush=True)
        part = done.stage.partition(":")[0]
        left = [one for one in left if one != part] if part in left else []  # torch itself: no part can hold
    judged = {part: JUDGES[part](found) for part, found in data.items()}
    holds = [part for part, (defect, _) in judged.items() if defect is None]
    kit.answer(**data, holds=holds, said="; ".join(judged[part][1] for part in holds) or "no part holds in one process")


def devices() -> list[str]:
    """The devices by torch's names."""
    return [str(one) for one in kit.args.get("devices") or [f"cuda:{index}" for index in range(len(kit.gpus))]]


def judge_torch(data: dict[str, Any]) -> tuple[tuple[str, str] | None, str]:
    """Every product was right: a GPU that torch does not see has none."""
    wrong = ("numerics", f"products are wrong on GPU {data['wrong'][0]}") if data["wrong"] else None
    return wrong, f"{len(devices())} GPU(s) compute with torch {data['torch']} (CUDA {data['cuda']})"


def judge_copies(data: dict[str, Any]) -> tuple[tuple[str, str] | None, str]:
    """A copy that arrives changed is a defect; the rest is told."""
    if data["wrong"]:
        first = data["wrong"][0]
        text = f"a copy from GPU {first['from']} to GPU {first['to']} arrived with {first['bytes']} wrong bytes of "
        text += f"{COMPARED} ({len(data['wrong'])} of {data['pairs']} directions)"
        return ("comm.p2p", f"{text}: with IOMMU or ACS on, P2P may corrupt data"), ""
    rates = [one for row in data["gb_per_s"] for one in row if one is not None]
    reach = data["access"]
    able = "an unknown number" if reach is None else sum(one is True for row in reach for one in row)
    access = f"P2P access in {able} of {data['pairs']} directions"
    return None, f"{access}; copies whole, {min(rates):.1f} to {max(rates):.1f} GB/s"


def judge_links(data: dict[str, Any]) -> tuple[tuple[str, str] | None, str]:
    """A link below what GPU and slot can both do is a fault of the machine."""
    slow = "; ".join(told(one) for one in data["links"] if one["below"])
    return (("hardware", slow) if slow else None), "; ".join(map(told, data["links"]))


def told(link: dict[str, Any]) -> str:
    """One link in words."""
    now = f"PCIe gen {link['gen']} x{link['width']} under load"
    if link["gen"] is None or link["width"] is None:
        now = "PCIe speed not readable"
    elif link["gen_max"] is None:
        now += " (what its slot can do is not known)"
    elif link["below"]:
        now += f" where GPU and slot can do gen {link['gen_max']} x{link['width_max']}"
    return f"GPU {link['gpu']}: {now}, {link['to_gpu']:.1f} GB/s to it, {link['from_gpu']:.1f} from it"


# ------------------------------------------------------------------------------------------------------ in the child


def alone() -> None:
    """The part that was asked for."""
    kit.answer(**CHECKS[kit.args.get("check", "copies")](*start()))


def several() -> None:
    """Some parts, one after another: what each found, by its name."""
    global _part
    torch, found = start()
    for _part in kit.args["parts"]:
        kit.answer(**{_part: CHECKS[_part](torch, found)})


def products(torch: Any, found: list[str]) -> dict[str, Any]:
    """A product of whole numbers on every device, which must be exact: it is small enough for bfloat16."""
    values = torch.arange(64 * 64).reshape(64, 64)
    left, right = (values * 7 // 5) % 2, (values // 64 + values) % 3
    exact = left.double() @ right.double()
    wrong = []
    for index, name in enumerate(found):
        begin(f"compute on GPU {index}", COPY_S)
        for dtype in (torch.float32, torch.bfloat16):
            product = left.to(name).to(dtype) @ right.to(name).to(dtype) + 1
            if not torch.equal(product.double().to("cpu") - 1, exact):
                wrong.append(index)
    faulthandler.cancel_dump_traceback_later()
    return {"wrong": wrong, "torch": str(torch.__version__), "cuda": torch.version.cuda}


def copies(torch: Any, found: list[str]) -> dict[str, Any]:
    """Every direction between two devices: may it be read directly, does a copy arrive whole, and how fast is it."""
    count = len(found)
    access: list[list[bool | None]] | None = None
    if found[0].startswith("cuda"):
        able = torch.cuda.can_device_access_peer
        access = [[None if a == b else bool(able(a, b)) for b in range(count)] for a in range(count)]
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
    return {"access": access, "gb_per_s": rate, "wrong": wrong, "pairs": count * (count - 1)}


def links(torch: Any, found: list[str]) -> dict[str, Any]:
    """Each GPU's way to the host and back, with the link's speed read while it is busy."""
    pinned = found[0].startswith("cuda")
    host = torch.empty(TIMED // 4, dtype=torch.int32, pin_memory=pinned)
    read = []
    for index, name in enumerate(found):
        begin(f"copies between the host and GPU {index}", COPY_S + LOAD_S)
        there = torch.zeros(TIMED // 4, dtype=torch.int32, device=name)
        facts = facts_of(index)
        with Watched(facts) as watched:
            begun = time.monotonic()
            while time.monotonic() < begun + LOAD_S and not watched.at_best():
                there.copy_(host, non_blocking=True)
                host.copy_(there, non_blocking=True)
                wait(torch, name)
            busy = time.monotonic() - begun
        to, back = speed(torch, host, there, name), speed(torch, there, host, name)
        rates = {"to_gpu": round(to, 2), "from_gpu": round(back, 2), "busy_s": round(busy, 2)}
        read.append({"gpu": index, "pci": sysfs_name(str(facts.get("pci") or "")), **rates, **watched.found()})
        del there
    faulthandler.cancel_dump_traceback_later()
    return {"links": read}


CHECKS = {"torch": products, "copies": copies, "links": links}
#: What is broken, by its outcome and in words (None: nothing), and the words for what holds.
JUDGES = {"torch": judge_torch, "copies": judge_copies, "links": judge_links}


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
    kit.stage(f"{_part}: {stage}" if _part else stage)
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


def facts_of(index: int) -> dict[str, Any]:
    """NVML's facts of a leased GPU, by its place in the lease; none where it has none."""
    uuid = kit.gpus[index] if index < len(kit.gpus) else None
    return next((one for one in kit.rig if one.get("uuid") == uuid), {})


def sysfs_name(pci: str) -> str:
    """NVML writes the domain with eight digits, sysfs with four or more: ``0000:16:00.0``."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if rest else ""


class Watched:
    """Reads a link's speed and width again and again while it is busy, and keeps the best."""

    def __init__(self, facts: dict[str, Any]) -> None:
        root, pci = str(kit.args.get("sysfs", SYSFS)), sysfs_name(str(facts.get("pci") or ""))
        self._facts = facts
        # The real path goes from the root port down to the GPU: one folder up is the slot's end of the link.
        self._gpu = os.path.realpath(os.path.join(root, pci)) if pci else ""
        self._most = self._able()
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

    def _able(self) -> tuple[int, int] | None:
        """Generation and lanes that GPU and slot can both do; None where the slot is not seen, or is made up.

        A slot may advertise what the firmware forbids or the board does not wire: NVML's own maximum counts too.
        """
        gpu, slot = self._ask("max", self._gpu), self._ask("max", os.path.dirname(self._gpu))
        virtual = " hypervisor" in read(str(kit.args.get("cpuinfo", "/proc/cpuinfo")))
        if virtual or None in (*gpu, *slot):
            return None
        fastest = GENERATIONS.get(min(gpu[0] or 0.0, slot[0] or 0.0), 0)
        widest = min(gpu[1] or 0, slot[1] or 0)
        gen, width = self._facts.get("pcie_gen"), self._facts.get("pcie_width_max")
        return min(fastest, gen or fastest), min(widest, width or widest)

    def at_best(self) -> bool:
        """Whether the link was seen at what GPU and slot can do: nothing more is to be waited for."""
        gen, width = GENERATIONS.get(self._best[0], 0), self._best[1]
        return self._most is not None and gen >= self._most[0] > 0 and width >= self._most[1]

    def found(self) -> dict[str, Any]:
        """Generation and lanes under load, what GPU and slot can both do (None: not known), and whether it is below."""
        speed, width = self._best
        found: dict[str, Any] = {"gen": GENERATIONS.get(speed), "width": width or None}
        if self._most is None or not speed or not width:
            return {**found, "gen_max": None, "width_max": None, "below": False}
        below = GENERATIONS.get(speed, 0) < self._most[0] or width < self._most[1]
        return {**found, "gen_max": self._most[0] or None, "width_max": self._most[1], "below": below}


def read(path: str) -> str:
    """A small file's text; "" when there is none, or it is not for us."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


if __name__ == "__main__":
    kit.main(run)
