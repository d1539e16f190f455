"""Measures how fast a log is explained: a large log of a serving engine, against `grep -cE`, and one that grows.

The log is a boot's lines followed by decode lines of eight ranks, of changing numbers, with an answered request
between now and then. Peak memory is that of a process that explains it, for a tenth of the log and for all of it. The
cost of following is the processor time of `gpuguard explain --follow` while so many lines a second are written. It must
never favour ours: the file is in the page cache for both, and the time includes starting Python.

    python benchmarks/explain.py --megabytes 1000 --seconds 30
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
EXPLAIN = [
    sys.executable,
    "-c",
    "from pytest_gpuguard.cli import main; main(prog_name='gpuguard')",
    "explain",
    "--json",
]
PATTERN = "Scheduler hit an exception|CUDA out of memory|Not enough memory|NCCL error"

HEAD = """\
[2026-01-02 03:00:00] server_args=ServerArgs(model_path='m', mem_fraction_static=0.88, tp_size=8)
[2026-01-02 03:00:07 TP0] Load weight begin. avail mem=94.00 GB
[2026-01-02 03:00:17 TP0] Load weight end. type=M, dtype=torch.bfloat16, avail mem=78.50 GB, mem usage=15.50 GB.
[2026-01-02 03:00:18 TP0] KV Cache is allocated. #tokens: 400000, K size: 27.50 GB, V size: 27.50 GB
[2026-01-02 03:00:18 TP0] Memory pool end. avail mem=22.00 GB
[2026-01-02 03:00:30] The server is fired up and ready to roll!
"""


def line(number: int) -> str:
    """One line of a serving engine."""
    second = number // 8
    stamp = f"2026-01-02 {3 + second // 3600 % 20:02}:{second // 60 % 60:02}:{second % 60:02}"
    if number % 97 == 96:
        return f'[{stamp}] INFO:     10.0.0.{number % 250}:{40000 + number % 9000} - "POST /generate HTTP/1.1" 200 OK\n'
    return (
        f"[{stamp} TP{number % 8}] Decode batch, #running-req: {number % 64 + 1}, #token: {number * 7 % 90000}, "
        f"token usage: 0.{number % 99:02}, cuda graph: True, "
        f"gen throughput (token/s): {number * 37 % 300000 / 100:.2f}, #queue-req: {number % 3}\n"
    )


def write_log(path: Path, megabytes: int) -> int:
    """Write a log of so many MB; returns its size in bytes."""
    with path.open("w") as stream:
        size = stream.write(HEAD)
        number = 0
        while size < megabytes * 1_000_000:
            block = "".join(map(line, range(number, number + 4000)))
            number += 4000
            size += stream.write(block)
    return path.stat().st_size


def timed(command: Sequence[str]) -> tuple[float, int]:
    """Seconds that a command takes, and its peak memory in MiB."""
    code = (
        "import resource, subprocess, sys, time; begin = time.perf_counter();"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
        "print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    seconds, peak = done.stdout.split()
    return float(seconds), int(peak)


def follow_cost(path: Path, per_second: int, seconds: float) -> float:
    """The share of one core that following the log takes, while so many lines a second are written to it."""
    path.write_text(HEAD)
    over = threading.Event()

    def write() -> None:
        number, begin = 0, time.perf_counter()
        with path.open("a") as stream:
            while not over.is_set():
                due = int((time.perf_counter() - begin) * per_second)
                stream.write("".join(map(line, range(number, due))))
                stream.flush()
                number = due
                time.sleep(0.05)

    follower = subprocess.Popen([*EXPLAIN, "--follow", str(path)], stdout=subprocess.DEVNULL)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        time.sleep(3)  # Python is up, and the boot's lines are read
        before, begin = _cpu_seconds(follower.pid), time.perf_counter()
        time.sleep(seconds)
        return (_cpu_seconds(follower.pid) - before) / (time.perf_counter() - begin)
    finally:
        over.set()
        writer.join()
        follower.send_signal(signal.SIGINT)
        follower.wait(10)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the log")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each, alternating")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the growing log is followed")
    parser.add_argument("--lines", type=int, default=1000, help="lines a second that it grows by")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small.log"), Path(folder, "large.log")
        write_log(small, max(1, options.megabytes // 10))
        megabytes = write_log(large, options.megabytes) / 1e6
        _, small_peak = timed([*EXPLAIN, str(small)])
        ours, grep, peaks = [], [], []
        for _ in range(options.pairs):
            seconds, peak = timed([*EXPLAIN, str(large)])
            ours.append(seconds)
            peaks.append(peak)
            grep.append(timed(["grep", "-cE", PATTERN, str(large)])[0] if large.exists() else 0.0)
        best, median = min(ours), sorted(ours)[len(ours) // 2]
        other = sorted(grep)[len(grep) // 2]
        print(f"explain: {megabytes:.0f} MB in {median:.2f} s (best {best:.2f}): {megabytes / median:.0f} MB/s")
        print(f"grep -cE: {other:.2f} s: {megabytes / other:.0f} MB/s; ratio {median / other:.2f}")
        print(f"peak memory: {small_peak} MiB for a tenth of it, {max(peaks)} MiB for all of it")
        share = follow_cost(Path(folder, "grows.log"), options.lines, options.seconds)
        print(f"following {options.lines} lines/s: {share:.2%} of a core over {options.seconds:.0f} s")


if __name__ == "__main__":
    main()
