"""What GPU leases cost and how fairly they are served, beside three simpler ways, all in one run.

It must never look at real GPUs: names are made up, and where memory matters the NVML stand-in of the tests shows it.

    python benchmarks/leases.py [trial] [storm] [latency] [kills] [--folder DIR] …    # default: all four

trial    6 workers that want 1 GPU, 2 that want 4 and 1 that wants 8 of 8, over and over for some seconds: how often
         each is served by hold-and-wait, retry with jitter, one lock for the door, and our lease.
storm    32 processes, 8 each that want 1, 2, 4 and 8 of 8: nobody shares a GPU, equals are served in their order.
latency  an uncontended lease, and how long a waiter waits after the holder let go, or was killed.
kills    kill -9 of a holder with a server tree at random moments: seconds until its GPU can be leased clean.

Exit status: 0 when every goal was met, else 1. Linux only; ``kills`` needs gcc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

UUIDS: Final = tuple(f"GPU-{number}" for number in range(8))
TRIAL: Final = (1,) * 6 + (4,) * 2 + (8,)
STORM: Final = (1, 2, 4, 8) * 8
WAYS: Final = ("hold-and-wait", "retry", "door", "ours")
RETRY_S: Final = 0.005
MARK: Final = "GPUGUARD_BENCH_MARK"
#: In the environment of the servers and what comes of them, but not of their holder, its warden and its NVML child.
TREE: Final = "GPUGUARD_BENCH_TREE"
#: Clocks of two processors may differ by less: a later one of two equals whose turn is so much earlier has overtaken.
AT_ONCE_S: Final = 0.001

# ------------------------------------------------------------------------------------------------------ simpler ways


def lock(path: str, wait: bool = False) -> int | None:
    """A descriptor that holds the lock of this file, or None."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return fd
    except BlockingIOError:
        os.close(fd)
        return None


def let_go(fds: Sequence[int]) -> None:
    """Close descriptors, and so free their locks."""
    for fd in fds:
        os.close(fd)


def simply(way: str, folder: Path, n: int, until: float) -> dict[str, int]:
    """``n`` GPUs by one of the simpler ways; nothing when it had none at the time ``until``."""
    door = lock(f"{folder}/door", wait=True) if way == "door" else None
    got: dict[str, int] = {}
    while True:
        for name in UUIDS:
            if len(got) < n and name not in got:
                fd = lock(f"{folder}/{name}")
                if fd is not None:
                    got[name] = fd
        if len(got) == n or time.monotonic() > until:
            break
        if way != "hold-and-wait":
            let_go(list(got.values()))
            got = {}
        time.sleep(random.uniform(0.5, 1.5) * RETRY_S)
    if door is not None:
        os.close(door)
    if len(got) < n:
        let_go(list(got.values()))
        return {}
    return got


@contextmanager
def served(way: str, folder: Path, n: int, until: float) -> Iterator[Sequence[str]]:
    """``n`` GPUs, or nothing when the time is over."""
    from pytest_gpuguard.lease.gpus import lease_gpus

    if way == "ours":
        with lease_gpus(random.sample(UUIDS, len(UUIDS)), n, 600, directory=folder) as lease:
            yield lease.uuids
        return
    got = simply(way, folder, n, until)
    try:
        yield tuple(got)
    finally:
        let_go(list(got.values()))


def work(way: str, folder: Path, n: int, seconds: float, hold_s: float) -> dict[str, Any]:
    """One worker's life: GPUs, a while with them, and again. Fails when a GPU is somebody else's too.

    Only what was had before the end counts, whatever the way. "served" has for each time (place in the queue or None,
    seconds of waiting, moment of the look at the queue that gave it its turn); "called" whom this worker told that it
    is its turn (place in the queue, moment of that look); "having" when each was had; "longest" the longest wait, one
    that the end broke off too.
    """
    from pytest_gpuguard.lease.book import Book, Ticket

    places: list[int] = []
    called: list[tuple[int, float]] = []
    looked = [0.0]
    enter, queue_up, call = Book.__enter__, Book.queue_up, Ticket.call

    def enter_and_note(self: Book) -> Book:
        book = enter(self)
        looked[0] = time.monotonic()
        return book

    def queue_up_and_note(self: Book, request: Any) -> Ticket:
        ticket = queue_up(self, request)
        places.append(ticket.request.number)
        return ticket

    def call_and_note(self: Ticket, uuids: Sequence[str], now: float) -> None:
        called.append((self.request.number, looked[0]))
        call(self, uuids, now)

    Book.__enter__ = enter_and_note  # type: ignore[method-assign]
    Book.queue_up, Ticket.call = queue_up_and_note, call_and_note  # type: ignore[method-assign]
    told: list[tuple[int | None, float, float]] = []
    having: list[float] = []
    longest = 0.0
    print("ready", flush=True)
    end = float(sys.stdin.readline()) + seconds
    while time.monotonic() < end:
        asked = time.monotonic()
        with served(way, folder, n, end) as uuids:
            got = time.monotonic()
            longest = max(longest, min(got, end) - asked)
            place = places.pop() if places else None
            if not uuids or got >= end:
                break
            told.append((place, got - asked, looked[0]))
            having.append(got)
            for one in uuids:
                (folder / f"{one}.in-use").touch(exist_ok=False)  # fails if somebody else has it
            time.sleep(random.uniform(0.5, 1.5) * hold_s)
            for one in uuids:
                (folder / f"{one}.in-use").unlink()
    return {"n": n, "served": told, "called": called, "having": having, "longest": longest}


def contend(way: str, sizes: Sequence[int], seconds: float, hold_s: float, folder: Path) -> list[dict[str, Any]]:
    """One worker per size, all at once; raises CalledProcessError when one failed, TimeoutExpired when one hangs."""
    command = [sys.executable, __file__, "--work", way, str(folder), str(seconds), str(hold_s)]
    workers = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in sizes
    ]
    try:
        for one in workers:
            assert one.stdout is not None
            one.stdout.readline()
        start = f"{time.monotonic()}\n"
        for one in workers:
            assert one.stdin is not None
            one.stdin.write(start)
            one.stdin.flush()
        found = []
        for one in workers:
            said, _ = one.communicate(timeout=seconds + 120)
            if one.returncode:
                raise subprocess.CalledProcessError(one.returncode, one.args)
            found.append(json.loads(said))
        return found
    finally:
        for one in workers:
            one.kill()
            one.wait()


# ------------------------------------------------------------------------------------------------------------- trial


def trial(rounds: int, seconds: float, hold_s: float, folder: Path) -> bool:
    """Print how often each size is served by each way; medians of so many rounds, which alternate between the ways."""
    runs: dict[str, list[dict[int, int]]] = {way: [] for way in WAYS}
    longest = dict.fromkeys(WAYS, 0.0)
    for _ in range(rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                found = contend(way, TRIAL, seconds, hold_s, Path(scratch))
            runs[way].append({n: sum(len(one["served"]) for one in found if one["n"] == n) for n in set(TRIAL)})
            longest[way] = max([longest[way], *(one["longest"] for one in found if one["n"] == 8)])
    print(f"trial: {rounds} × {seconds:g} s, GPUs held {hold_s * 500:g} to {hold_s * 1500:g} ms, medians of runs")
    print(f"{'':>15} {'1 GPU':>7} {'4 GPUs':>7} {'8 GPUs':>7} {'total':>7}   8 GPUs by round; longest wait for them")
    middle = {}
    for way in WAYS:
        middle[way] = {n: statistics.median(one[n] for one in runs[way]) for n in set(TRIAL)}
        middle[way][0] = statistics.median(sum(one.values()) for one in runs[way])
        each = "  ".join(f"{middle[way][n]:>6g}" for n in (1, 4, 8, 0))
        print(f"{way:>15}  {each}   {' '.join(str(one[8]) for one in runs[way])}; {longest[way]:.2f} s")
    ours, door = middle["ours"], middle["door"]
    print(f"ours / door: 8 GPUs {ours[8] / door[8]:.3f}, total {ours[0] / door[0]:.3f}")
    return goal("trial", ours[8] >= 40 and ours[8] >= door[8] and ours[0] >= door[0], "8 GPUs ≥ 40 and ≥ door's, total")


# ------------------------------------------------------------------------------------------------------------- storm


@dataclass(frozen=True)
class Storm:
    """What 32 processes met. Seconds by which a later one of two equals was earlier: in its turn, and in having."""

    served: dict[int, int]
    longest_s: float
    turn: tuple[float, ...]
    having: tuple[float, ...]

    @property
    def fair(self) -> bool:
        """Whether the turns of equals came in their order."""
        return max(self.turn, default=0.0) <= AT_ONCE_S


def storm_of(sizes: Sequence[int], seconds: float, hold_s: float, folder: Path) -> Storm:
    """Contend by our lease; see ``contend`` for what it raises."""
    found = contend("ours", sizes, seconds, hold_s, folder)
    called = {place: moment for one in found for place, moment in one["called"]}
    turn: list[float] = []
    having: list[float] = []
    for n in set(sizes):
        equals = [one for one in found if one["n"] == n]
        queue = sorted(
            (place, called.get(place, looked), got)
            for one in equals
            for (place, _, looked), got in zip(one["served"], one["having"], strict=True)
            if place
        )
        turn += _overtaken([moment for _, moment, _ in queue])
        having += _overtaken([got for _, _, got in queue])
    return Storm(
        {n: sum(len(one["served"]) for one in found if one["n"] == n) for n in sorted(set(sizes))},
        max(one["longest"] for one in found),
        tuple(turn),
        tuple(having),
    )


def _overtaken(moments: Sequence[float]) -> list[float]:
    """By how much those that come later in the order were earlier than one before them."""
    latest = 0.0
    found = []
    for one in moments:
        if one < latest:
            found.append(latest - one)
        latest = max(latest, one)
    return found


def storm(seconds: float, folder: Path) -> bool:
    """Print how a storm went."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        met = storm_of(STORM, seconds, 0.015, Path(scratch))
    total = sum(met.served.values())
    print(f"storm: 32 processes for {seconds:g} s, no deadlock, no GPU twice; runs {met.served}")
    print(f"longest wait {met.longest_s:.2f} s; equals out of the order of their tickets, of {total}:")
    for what, found in (("in their turn", met.turn), ("in having GPUs", met.having)):
        print(f"{what:>20}: {len(found)}, by at most {max(found, default=0.0) * 1000:.1f} ms")
    return goal("storm", met.fair and all(met.served.values()), "all served, turns of equals in their order")


# ----------------------------------------------------------------------------------------------------------- latency


def spread(name: str, seconds: Sequence[float]) -> tuple[float, float]:
    """Print median, p99 and the longest in ms; returns median and p99 in ms."""
    ordered = sorted(one * 1000 for one in seconds)
    median, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"{name:>40}: median {median:6.2f} ms, p99 {p99:6.2f} ms, longest {ordered[-1]:6.2f} ms ({len(ordered)})")
    return median, p99


def hold(folder: Path, n: int) -> None:
    """A holder of the first ``n`` GPUs: says when it has them, and when it lets go, which it does at a word."""
    from pytest_gpuguard.lease.gpus import lease_gpus

    for _ in sys.stdin:
        lease = lease_gpus(UUIDS[:n], n, 100, directory=folder)
        print(time.monotonic(), flush=True)
        sys.stdin.readline()
        now = time.monotonic()
        lease.end("clean")
        print(now, flush=True)


class Holder:
    """A process that holds GPUs."""

    def __init__(self, folder: Path, n: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--hold", str(folder), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self) -> None:
        """Have it go on to its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def moment(self) -> float:
        """When it had its GPUs, or let go: the next word of it."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """End it in whatever state."""
        self.process.kill()
        self.process.communicate()


def hand_over(folder: Path, n: int, times: int, killed: bool) -> list[float]:
    """Seconds from a holder's end to the next one's having its GPUs."""
    found = []
    holder, waiter = Holder(folder, n), Holder(folder, n)
    holder.say()
    holder.moment()
    for _ in range(times):
        spare = Holder(folder, n) if killed else None
        waiter.say()
        while not any(name.startswith("gpu-wait-") for name in os.listdir(folder)):
            time.sleep(0.002)
        time.sleep(0.05 + random.random() / 20)
        if spare is not None:
            ended = time.monotonic()
            holder.process.send_signal(signal.SIGKILL)
            found.append(waiter.moment() - ended)
            holder.end()
            holder, waiter = waiter, spare
        else:
            holder.say()
            ended = holder.moment()
            found.append(waiter.moment() - ended)
            holder, waiter = waiter, holder
    holder.end()
    waiter.end()
    return found


def latency(times: int, folder: Path) -> bool:
    """Print how long a lease takes when nobody has the GPUs, and when somebody lets go of them."""
    from pytest_gpuguard.lease.gpus import lease_gpus

    print("latency:")
    good = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for n in (1, 8):
            taken = []
            for _ in range(5 * times):
                began = time.monotonic()
                lease = lease_gpus(UUIDS, n, directory=Path(scratch))
                taken.append(time.monotonic() - began)
                lease.end("clean")
            good.append(spread(f"uncontended lease of {n} GPU(s)", taken)[1] <= 5.0)
        for killed, how in ((False, "given back"), (True, "holder killed with -9")):
            for n in (1, 8):
                found = hand_over(Path(scratch), n, times // (2 if killed else 1), killed)
                good.append(spread(f"hand-over of {n} GPU(s), {how}", found)[1] <= 60.0)
    return goal("latency", all(good), "p99: lease ≤ 5 ms, hand-over ≤ 60 ms")


# ------------------------------------------------------------------------------------------------------------- kills

#: A server that ignores SIGTERM, with children in sessions of their own; each has memory on the stand-in.
SERVER: Final = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.standin import standin
signal.signal(signal.SIGTERM, signal.SIG_IGN)
slots = standin.open_rig(Path({rig!r})).gpu[0].process
me = os.getpid() if len(sys.argv) < 2 else None
for number in range(3):
    if number == 0 or os.fork() == 0:
        if number:
            os.setsid()
        slot = slots[number]
        slot.start, slot.bytes = standin.start_time(os.getpid()), 10 << 30
        slot.pid = os.getpid()
        if number:
            break
time.sleep(600)
"""


def room_of(rig: Path, library: Path) -> tuple[Any, Callable[[], None], str]:
    """The clean room of a stand-in machine as a session would have it, how to close it, and its GPU's UUID."""
    from pytest_gpuguard.facts.nvml import NvmlChild
    from pytest_gpuguard.lease.clean import CleanRoom

    child = NvmlChild({**os.environ, "LD_LIBRARY_PATH": str(library.parent), "GPUGUARD_FAKE_RIG": str(rig)})
    gpu = child.rig().gpus[0].uuid
    room = CleanRoom(
        lambda uuids: {one: memory.used for one, memory in child.memory(uuids).items()},
        child.processes,
        reclaim_s=60.0,
    )
    return room, child.close, gpu


def serve(folder: Path, rig: Path, library: Path) -> None:
    """The holder that is killed: a clean GPU, a server on it under a warden, its end, and again."""
    from pytest_gpuguard.claims.gpuset import GpuChoice
    from pytest_gpuguard.engines.process import ServerProcess
    from pytest_gpuguard.lease.cleanroom import hand_out, take_back

    room, _, gpu = room_of(rig, library)
    code = SERVER.format(root=str(ROOT), rig=str(rig))
    while True:
        lease = hand_out(GpuChoice((gpu,)), 1, room, 60, directory=folder)
        argv, env = [sys.executable, "-c", code], {**os.environ, TREE: "1"}
        server = ServerProcess.start(argv, env, None, folder / "server.log", pass_fds=lease.fds)
        server.wait(1.2)
        server.stop(0.3)
        take_back(lease, room, "after the server", ours=server.processes())


def marked(mark: str, also: str = "") -> set[int]:
    """The living processes of the holder with this mark and its tree; ``also`` TREE: of its servers alone."""
    from pytest_gpuguard.lease.warden import read_proc

    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        proc = read_proc(int(name))
        if f"{MARK}={mark}".encode() in environ and also.encode() in environ and proc is not None and not proc.dead:
            found.add(proc.pid)
    return found


@dataclass(frozen=True)
class Kill:
    """One holder's end: seconds until the GPU was leased on a clean driver, and what of its server lived then."""

    moment: float
    seconds: float
    alive: frozenset[int]
    used: int
    processes: int


def kill_once(moment: float, folder: Path, rig: Path, library: Path, room: Any, gpu: str) -> Kill:
    """Start a holder, kill it after ``moment`` seconds, and wait for its GPU in the queue like anybody else."""
    from pytest_gpuguard.claims.gpuset import GpuChoice
    from pytest_gpuguard.lease.cleanroom import hand_out

    mark = uuid.uuid4().hex
    holder = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(folder), str(rig), str(library)], env={**os.environ, MARK: mark}
    )
    try:
        time.sleep(moment)
        processes = len(marked(mark))
        began = time.monotonic()
        holder.kill()
        lease = hand_out(GpuChoice((gpu,)), 1, room, 60, directory=folder)
        seconds = time.monotonic() - began
        alive = frozenset(marked(mark, TREE))
        used = room.read([gpu])[gpu]
        lease.end("clean")
        return Kill(moment, seconds, alive, used, processes)
    finally:
        holder.kill()
        holder.wait()
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def kill_often(moments: Sequence[float], folder: Path) -> list[Kill]:
    """A holder killed at each of these moments (seconds after its start)."""
    from tests.standin import standin

    rig, library = folder / "rig.bin", standin.build(folder, "gcc")
    shared = standin.open_rig(rig)
    standin.fill_gpu(shared.gpu[0], 0, name="Stand-in", sm="120", total_mib=97_000, reserved_mib=600)
    shared.count, shared.driver, shared.cuda, shared.magic = 1, b"580.105.08", 13000, standin.MAGIC
    room, close, gpu = room_of(rig, library)
    locks = folder / "locks"
    locks.mkdir()
    try:
        return [kill_once(moment, locks, rig, library, room, gpu) for moment in moments]
    finally:
        close()


def kills(rounds: int, folder: Path, seed: int | None) -> bool:
    """Print how long a GPU takes to come back after its holder was killed."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        found = kill_often([dice.uniform(0.3, 4.0) for _ in range(rounds)], Path(scratch))
    early = [one for one in found if one.alive or one.used]
    taken = sorted(one.seconds for one in found)
    trees = [one.processes for one in found]
    print(f"kills: {rounds} holders killed with -9 after 0.3 to 4 s, trees of {min(trees)} to {max(trees)} processes")
    print(f"GPU leased clean after median {statistics.median(taken):.2f} s, longest {taken[-1]:.2f} s; ", end="")
    print(f"too early {len(early)} times")
    return goal("kills", not early and taken[-1] <= 5.0, "≤ 5 s, and never while anything of the tree lives")


# -------------------------------------------------------------------------------------------------------------- main


def goal(name: str, met: bool, what: str) -> bool:
    """Print whether a goal was met."""
    print(f"{name} goal ({what}): {'PASS' if met else 'FAIL'}\n", flush=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="trial, storm, latency, kills (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of the trial (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a round of the trial (%(default)s)")
    parser.add_argument("--hold", type=float, default=0.04, metavar="S", help="mean time of holding (%(default)s)")
    parser.add_argument("--storm", type=float, default=20.0, metavar="S", help="length of the storm (%(default)s)")
    parser.add_argument("--times", type=int, default=200, help="measurements of a hand-over (%(default)s)")
    parser.add_argument("--kills", type=int, default=50, help="holders that are killed (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="for the same moments of the kills again")
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    parser.add_argument("--folder", type=Path, default=shm, help="where locks lie (%(default)s: in memory, as /run is)")
    options = parser.parse_args()
    known = ("trial", "storm", "latency", "kills")
    parts = options.parts or known
    if not set(parts) <= set(known):
        parser.error(f"parts are {', '.join(known)}")
    good = []
    if "trial" in parts:
        good.append(trial(options.rounds, options.seconds, options.hold, options.folder))
    if "storm" in parts:
        good.append(storm(options.storm, options.folder))
    if "latency" in parts:
        good.append(latency(options.times, options.folder))
    if "kills" in parts:
        good.append(kills(options.kills, options.folder, options.seed))
    return 0 if all(good) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        way, where, seconds, mean, size = sys.argv[2:]
        print(json.dumps(work(way, Path(where), int(size), float(seconds), float(mean))))
    elif sys.argv[1:2] == ["--hold"] and len(sys.argv) == 4:
        hold(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["--serve"]:
        serve(*map(Path, sys.argv[2:5]))
    else:
        sys.exit(main())
