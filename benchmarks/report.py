"""Measures what the reports of one large run take of a processor, and how large its page is.

Every claim has measured rates, a boot's memory and a history; all stages from records to the page count, in a process
that has imported nothing before. Reading the ledger is not part of it. It must never reuse what an earlier round made.

    python benchmarks/report.py --claims 500 --points 50
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
BOUND_S, BOUND_MB = 3.0, 6.0


def one_round(claims: int, points: int) -> str:
    """Seconds of document and page, and MB of the page."""
    sys.path.insert(0, str(CHECKOUT))
    from tests.report_runs import NEW, earlier, evidence, failed, flip, record, run

    records, before = [], {}
    for i in range(claims):
        name = f"suites/blackwell/test_generated.py::test_claim_with_a_usual_name[{i}]"
        now = failed(name) if i % 50 == 0 else record(name, evidence=evidence(i))
        records.append(now)
        steps = {step: {"sglang": f"0.5.{step}"} for step in range(5, points, 10)}
        before[name] = earlier(now, points, steps | {points - 1: NEW})
    flips = [flip(one) for one in records if one.verdict != "HOLDS"]
    clock = time.process_time  # as on a machine with nothing else to do: nothing here waits
    start = clock()
    from pytest_gpuguard.report.document import document
    from pytest_gpuguard.report.html import html

    found = document(run(ended=None), records, flips, history=before.__getitem__)
    middle = clock()
    page = html(found)
    end = clock()
    return f"{middle - start:.3f} {end - middle:.3f} {len(page.encode()) / 1e6:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=int, default=500)
    parser.add_argument("--points", type=int, default=50, help="runs in each claim's history")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="one round in this process, as figures")
    options = parser.parse_args()
    if options.once:
        print(one_round(options.claims, options.points))
        return
    command = [sys.executable, __file__, "--once", f"--claims={options.claims}", f"--points={options.points}"]
    rounds = []
    for _ in range(options.rounds):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rounds.append([float(one) for one in done.stdout.split()])
    for name, values in zip(("document, s", "page, s", "page, MB"), zip(*rounds, strict=True), strict=True):
        print(f"{name:12} median {statistics.median(values):.2f}, worst {max(values):.2f}")
    total = statistics.median(one[0] + one[1] for one in rounds)
    print(f"{'together, s':12} median {total:.2f} (bound {BOUND_S:g} s and {BOUND_MB:g} MB)")
    if total > BOUND_S or rounds[0][2] > BOUND_MB:
        sys.exit("too slow or too large")


if __name__ == "__main__":
    main()
