"""What the plugin costs a pytest that has nothing to do with it: ``pytest --co`` of an empty folder, with and without.

    python benchmarks/startup.py [--pairs 15]

Pairs are interleaved, each run is a process of its own; prints the median difference in ms. Goal: at most 50 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMAND = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider"]


#: Bytecode may be written, as on an installed plugin: compiling anew in every run is not what is measured.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def once(folder: str, *options: str) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    done = subprocess.run([*COMMAND, *options], cwd=folder, capture_output=True, check=False, env=ENV)
    elapsed = time.perf_counter() - started
    assert done.returncode == 5, done.stdout  # nothing collected
    return elapsed


def main() -> int:
    """Measure and print; exit status 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        once(folder), once(folder, "-p", "no:gpuguard")  # warm the file cache
        without, difference = [], []
        for number in range(pairs):
            runs = [((), "with"), (("-p", "no:gpuguard"), "without")]
            found = {name: once(folder, *options) for options, name in (runs if number % 2 else runs[::-1])}
            without.append(found["without"])
            difference.append(found["with"] - found["without"])
    cost = statistics.median(difference) * 1000
    base = statistics.median(without) * 1000
    print(f"{pairs} interleaved pairs: without {base:.0f} ms, the plugin adds {cost:.1f} ms")
    print(f"goal <= 50 ms: {'PASS' if cost <= 50 else 'FAIL'}")
    return int(cost > 50)


if __name__ == "__main__":
    sys.exit(main())
