"""Measures how near a packed run comes to what no run can beat, on 8 stand-in GPUs with stand-in servers.

The same suite runs one claim after the other, under xdist's own distribution (``-n 8``, where claims wait for each
other's GPUs), and packed. It must never count what is not held: GPU-seconds are read from the kernel's list of locks.

    python benchmarks/packing.py [--few] [--ways serial,naive,packed] [--json FILE]

The makespan is from the first claim's start to the last one's end (set-up to tear-down, as pytest runs it), without
the start of pytest and its workers. The bound is the larger of the GPU-seconds held in the packed run over 8, and its
longest claim.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from pytest_gpuguard.lease.gpus import lock_name  # noqa: E402
from tests.standin import standin  # noqa: E402
from tests.standin.fixtures import FakeRig  # noqa: E402

GPUS = 8
LOOK_EVERY_S = 0.02
#: What a stand-in server costs besides its stated boot: starting Python, stopping, looking at memory.
OVERHEAD_S = 1.5


@dataclass(frozen=True)
class Server:
    """One server of the suite and the seconds that the bodies of its claims take; ``boot`` in seconds."""

    gpus: int
    boot: float
    bodies: tuple[float, ...]
    exclusive: bool = False


#: 40 claims on 33 servers: two exclusive ones, some that share, 2 to 12 seconds each.
SERVERS: tuple[Server, ...] = (
    Server(2, 1.5, (1.0,), exclusive=True),
    Server(1, 1.0, (1.0,), exclusive=True),
    Server(8, 2.0, (1.0,)),
    Server(8, 1.0, (1.5,)),
    *(Server(4, boot, (body,)) for boot, body in ((3.0, 3.0), (2.0, 6.0), (4.0, 1.0), (1.0, 2.0))),
    Server(4, 3.0, (1.0, 2.0)),
    Server(2, 3.0, (2.0, 1.0, 1.5)),
    *(Server(2, boot, (body,)) for boot, body in ((2.0, 8.0), (5.0, 3.0), (1.0, 1.0), (3.0, 4.0), (6.0, 3.0))),
    Server(1, 3.0, (1.0, 1.0, 2.0, 1.0)),
    Server(1, 4.0, (2.0, 2.0)),
    *(
        Server(1, boot, (body,))
        for boot, body in (
            (2.0, 9.0), (6.0, 5.0), (1.0, 7.0), (3.0, 3.0), (1.0, 1.0), (2.0, 2.0), (4.0, 4.0), (1.0, 10.0),
            (5.0, 1.0), (2.0, 5.0), (3.0, 1.0), (1.0, 3.0), (6.0, 1.0), (2.0, 3.0), (1.0, 5.0), (4.0, 2.0),
        )
    ),
)  # fmt: skip
#: What a test runs: 7 claims on 6 servers.
FEW: tuple[Server, ...] = (
    Server(2, 0.6, (0.5,), exclusive=True),
    Server(8, 0.6, (0.5,)),
    Server(4, 0.9, (1.0, 1.0)),
    Server(2, 0.6, (3.0,)),
    Server(1, 0.6, (3.0,)),
    Server(1, 0.9, (2.0,)),
)

CONFTEST = """
import json, os, time
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    began = time.monotonic()
    result = yield
    if hasattr(item, "function"):
        with open(os.environ["PACKING_TIMES"], "a") as file:
            file.write(json.dumps([item.nodeid, began, time.monotonic()]) + chr(10))
    return result
"""


@dataclass(frozen=True)
class Sample:
    """One run. Times in seconds; ``held`` in GPU-seconds; ``boots`` of ``servers`` that are distinct."""

    way: str
    wall: float
    makespan: float
    longest: float
    held: float
    most: int
    boots: int
    servers: int
    summary: str

    @property
    def bound(self) -> float:
        """Return what no run of these claims can beat, by what this one held."""
        return max(self.held / GPUS, self.longest)


def suite(servers: Sequence[Server], model: str) -> str:
    """Return the source of the claims, round the servers, so that those of one server lie far apart."""
    rounds: list[list[str]] = []
    for number, server in enumerate(servers):
        env = {"FAKE_SGLANG_DELAY": str(round(server.boot / 3, 3)), "SERVER": str(number)}
        for position, body in enumerate(server.bodies):
            minutes = (server.boot + OVERHEAD_S + body) / 60
            while len(rounds) <= position:
                rounds.append([])
            rounds[position].append(
                f"@claim(minutes={minutes:.4f})\n"
                f"@needs_gpus({server.gpus}, exclusive={server.exclusive})\n"
                f'@serves("sglang", {model!r}, layout="TP{server.gpus}", env={env!r})\n'
                f"@fits\n"
                f"def test_{number}_{position}():\n    time.sleep({body})\n\n"
            )
    claims = [claim for one in rounds for claim in one]
    return "import time\nfrom pytest_gpuguard import *\n\n" + "".join(claims)


class LockWatcher(threading.Thread):
    """Adds up for how long how many GPUs are held, from the kernel's list of locks."""

    def __init__(self, locks: Path, uuids: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._files = [locks / f"{lock_name(uuid)}.lock" for uuid in uuids]
        self._over = threading.Event()
        self.held = 0.0
        self.most = 0

    def run(self) -> None:
        """Look until told to stop."""
        last = time.monotonic()
        while not self._over.wait(LOOK_EVERY_S):
            known = {str(file.stat().st_ino) for file in self._files if file.exists()}
            with open("/proc/locks") as file:
                locked = {line.split()[5].rpartition(":")[2] for line in file if " FLOCK " in line and "->" not in line}
            now, count = time.monotonic(), len(known & locked)
            self.held += count * (now - last)
            self.most = max(self.most, count)
            last = now

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()


class Bench:
    """A folder with the stand-in rig, the stand-in stack and a model."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.rig = FakeRig(base / "rig.bin", standin.build(base, "gcc"))
        shared = self.rig.shared
        for index in range(GPUS):
            standin.fill_gpu(
                shared.gpu[index],
                index,
                name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
                sm="120",
                total_mib=97887,
                reserved_mib=637,
            )
        shared.count, shared.driver, shared.cuda, shared.magic = GPUS, b"580.105.08", 13000, standin.MAGIC
        venv = base / "stack"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "fake_stack.pth").write_text(f"{CHECKOUT / 'tests' / 'fake_stack'}\n")
        self.python = venv / "bin" / "python"
        self.model = base / "a-model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')

    def measure(self, way: str, servers: Sequence[Server], arguments: Sequence[str], ports: str) -> Sample:
        """Run the suite one way.

        :raises SystemExit: when not every claim holds: then there is no measurement.
        """
        folder = self.base / way
        folder.mkdir()
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text(f"[pytest]\ngpuguard_ports = {ports}\n")
        (folder / "test_claims.py").write_text(suite(servers, str(self.model)))
        locks = folder / "locks"
        env = self.rig.environ(
            GPUGUARD_LOCK_DIR=str(locks),
            GPUGUARD_CACHE_DIR=str(self.base / "cache"),
            PACKING_TIMES=str(folder / "times"),
            FAKE_SGLANG_BOOTS=str(folder / "boots"),
            PYTHONPATH=os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", f"--gpuguard-stack=fake={self.python}"]
        watcher = LockWatcher(locks, [self.rig.uuid(index) for index in range(GPUS)])
        watcher.start()
        began = time.monotonic()
        done = subprocess.run([*command, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)
        wall = time.monotonic() - began
        watcher.stop()
        lines = (folder / "times").read_text().splitlines() if (folder / "times").exists() else []
        times = [json.loads(line) for line in lines]
        count = sum(len(server.bodies) for server in servers)
        if done.returncode or len(times) != count:
            raise SystemExit(
                f"{way}: {len(times)} of {count} claims ran, exit {done.returncode}\n{done.stdout[-4000:]}"
            )
        return Sample(
            way,
            wall,
            max(end for _, _, end in times) - min(start for _, start, _ in times),
            max(end - start for _, start, end in times),
            watcher.held,
            watcher.most,
            len((folder / "boots").read_text().splitlines()),
            len(servers),
            done.stdout.strip().splitlines()[-1],
        )


WAYS: dict[str, tuple[str, ...]] = {
    "serial": (),
    "naive": ("-n", str(GPUS)),
    "packed": ("-n", "auto", "--gpuguard-pack"),
}


def compare(servers: Sequence[Server], ways: Sequence[str], base: Path, ports: str) -> list[Sample]:
    """Run the suite in each of the ways, one after the other."""
    bench = Bench(base)
    try:
        return [bench.measure(way, servers, WAYS[way], ports) for way in ways]
    finally:
        bench.rig.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--few", action="store_true", help="7 claims instead of 40")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of " + ", ".join(WAYS))
    parser.add_argument("--ports", default="28672-32767", help="ports for the servers")
    parser.add_argument("--json", type=Path, help="write the samples there, too")
    given = parser.parse_args()
    servers = FEW if given.few else SERVERS
    with tempfile.TemporaryDirectory(prefix="packing-") as base:
        samples = compare(servers, given.ways.split(","), Path(base), given.ports)
    bound = next((one.bound for one in samples if one.way == "packed"), min(one.bound for one in samples))
    claims = sum(len(server.bodies) for server in servers)
    print(f"{claims} claims on {len(servers)} servers, {GPUS} GPUs; bound {bound:.1f} s")
    print(f"{'way':8} {'makespan':>9} {'/ bound':>8} {'GPU-s':>7} {'at most':>8} {'boots':>6} {'wall':>7}")
    for one in samples:
        print(
            f"{one.way:8} {one.makespan:8.1f}s {one.makespan / bound:8.3f} {one.held:7.1f} {one.most:8} "
            f"{one.boots:6} {one.wall:6.1f}s"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in samples], indent=1))


if __name__ == "__main__":
    main()
