r"""How long a process tree outlives its holder: kill -9 at random moments, and the seconds until nothing is left.

    python benchmarks/kill9.py                                   # 20 rounds over small trees that resist SIGTERM
    python benchmarks/kill9.py --rounds 5 --latest 40 \
        --command "python -m pytest -p no:cacheprovider --basetemp {} suites/cpu"

``--command`` is the holder that is killed; it is split like a shell would, but runs without one, so that the process
that is killed is the command itself. ``{}`` in it stands for a scratch folder of the round. What belongs to the tree is
found in two ways: the processes below the holder just before the kill (and what descends from them), and whatever
carries the variable GPUGUARD_BENCH_MARK, which the tree inherits. "Gone" means that two looks in a row find neither.
Exit status: 0 if every round took at most ``--law`` seconds, else 1. Linux only; whatever a round leaves is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pytest_gpuguard.lease.warden import Proc, descendants, read_proc  # noqa: E402

MARK = "GPUGUARD_BENCH_MARK"
LAW_S = 5.0

SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); time.sleep(600)"
for i in range(4):
    subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=i % 2 == 0)
    time.sleep(0.1)
time.sleep(600)
"""


def hold(folder: Path) -> None:
    """The built-in holder: boots a server as the plugin does, and waits to be killed."""
    from pytest_gpuguard.engines.process import ServerProcess

    server = ServerProcess.start([sys.executable, "-S", "-c", SERVER], None, None, folder / "server.log")
    server.wait(600)


def marked(mark: str) -> dict[int, Proc]:
    """The living processes whose environment carries the mark."""
    needle = f"{MARK}={mark}".encode()
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            proc = read_proc(int(name)) if needle in environ.split(b"\0") else None
            if proc is not None and not proc.dead:
                found[proc.pid] = proc
    return found


class Tree:
    """All processes that a holder has brought about, followed beyond its death."""

    def __init__(self, holder: int, mark: str) -> None:
        self.mark = mark
        self.known = descendants(holder)

    def alive(self) -> dict[int, Proc]:
        """Those that live now, with what descends from them."""
        found = marked(self.mark)
        for pid, proc in self.known.items():
            now = read_proc(pid)
            if now is not None and now.start == proc.start and not now.dead:
                found[pid] = now
        for pid in list(found):
            found.update((below.pid, below) for below in descendants(pid).values() if not below.dead)
        self.known.update(found)
        return found

    def sweep(self) -> None:
        """Kill what is left: the next round must not suffer from this one."""
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass


def one_round(command: Sequence[str], moment: float, patience: float) -> tuple[float | None, int]:
    """Start the holder, kill it after ``moment`` seconds: (seconds until all is gone or None, processes there were)."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="kill9-") as folder:
        argv = [word.replace("{}", folder) for word in command]
        with open(Path(folder) / "holder.log", "wb") as log:
            holder = subprocess.Popen(
                argv, env={**os.environ, MARK: mark}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        time.sleep(moment)
        if holder.poll() is not None:
            tail = (Path(folder) / "holder.log").read_text(errors="replace")[-2000:]
            Tree(holder.pid, mark).sweep()
            sys.exit(
                f"{shlex.join(argv)} ended by itself after less than {moment:.1f} s, rc {holder.returncode}:\n{tail}"
            )
        tree = Tree(holder.pid, mark)
        holder.kill()
        began = time.monotonic()
        holder.wait()
        empty = 0
        taken = None
        while empty < 2 and time.monotonic() - began < patience:
            if tree.alive():
                empty = 0
            else:
                taken = time.monotonic() - began if empty == 0 else taken
                empty += 1
            time.sleep(0.02)
        tree.sweep()
        return (taken if empty == 2 else None), len(tree.known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", help="the holder to be killed (default: a built-in one); {} is a scratch folder")
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument(
        "--earliest", type=float, default=0.0, metavar="S", help="first moment of the kill (%(default)s)"
    )
    parser.add_argument("--latest", type=float, default=2.0, metavar="S", help="last moment of the kill (%(default)s)")
    parser.add_argument("--law", type=float, default=LAW_S, metavar="S", help="most that is allowed (%(default)s)")
    parser.add_argument("--patience", type=float, default=60.0, metavar="S", help="stop waiting then (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="for the same random moments again")
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold is not None:
        hold(options.hold)
        return 0
    command = shlex.split(options.command) if options.command else [sys.executable, __file__, "--hold", "{}"]
    dice = random.Random(options.seed)
    times: list[float] = []
    left = 0
    for number in range(1, options.rounds + 1):
        moment = dice.uniform(options.earliest, options.latest)
        seconds, processes = one_round(command, moment, options.patience)
        if seconds is None:
            left += 1
        else:
            times.append(seconds)
        what = "NOT GONE" if seconds is None else f"gone after {seconds:6.3f} s"
        print(f"round {number:3}: killed at {moment:6.2f} s, {processes:3} processes, {what}", flush=True)
    if times:
        print(f"median {statistics.median(times):.3f} s, max {max(times):.3f} s, law {options.law:g} s")
    good = not left and bool(times) and max(times) <= options.law
    print("PASS" if good else f"FAIL ({left} rounds left processes behind)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
