"""Measures what the ledger takes to answer when it is full, and whether writers that are killed lose anything.

    python benchmarks/ledger.py [--url URL | --postgres] [--claims 10000] [--runs 100]
    python benchmarks/ledger.py --storm 100 [--postgres]

Without a URL the ledger is a file in a temporary folder; ``--postgres`` starts a server of its own. A ledger at a URL
must be empty: it must never fill one that is in use. Each time is of a ledger that was opened anew, the median of five,
with the file in the page cache, as it is after a run that wrote to it; whole commands are processes, the median of
seven. In the last run 11 claims flip, in the one before it hundreds do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from sqlalchemy import select  # noqa: E402

from pytest_gpuguard.ledger import rows, schema  # noqa: E402
from pytest_gpuguard.ledger.record import Record, Run  # noqa: E402
from pytest_gpuguard.ledger.store import Store, open_ledger  # noqa: E402
from pytest_gpuguard.ledger.writing import upsert  # noqa: E402
from tests.postgres import running  # noqa: E402

VERDICTS = ("HOLDS",) * 90 + ("CONTRADICTED (worse)", "CHANGED", "CONTRADICTED (better)") + ("NOT_EVALUATED",) * 7
REPEATS = 5
COMMANDS = 7
GPUGUARD = [sys.executable, "-c", "from pytest_gpuguard.cli import main; main()"]
FLIPS = 11


def claim(number: int) -> str:
    return f"suites/blackwell/test_deepseek_{number % 40}.py::TestMatrix::test_claim_{number}[fp8-tp8]"


def record(run: int, number: int, chance: random.Random) -> Record:
    packages = {f"package-{one}": f"1.{run // 7 if one == run % 30 else 0}.0" for one in range(30)}
    argv = ["python", "-m", "sglang.launch_server"] * 10
    payload = {"argv": argv, "memory": {"weights_gib": number / 7}, "log": claim(number)}
    return Record(
        run=f"run-{run:04d}",
        claim=claim(number),
        stack="new",
        expectation="fits(margin=2GiB, kv_tokens=>=262144)",
        verdict=chance.choice(VERDICTS),
        outcome="ready",
        fact="ready; 4.31 GiB free on the fullest GPU, 301,224 tokens in the KV pool",
        when=1.7e9 + 86400.0 * run + number,
        kind="verified",
        nodeid=claim(number),
        cards=("RTX PRO 6000 Blackwell Server Edition",),
        components=packages,
        evidence=payload if run % 10 == 0 else {},
    )


def fill(store: Store, claims: int, runs: int) -> None:
    """Straight into the tables, a transaction per run: what is measured is reading."""
    chance = random.Random(1)
    subjects = [rows.subject_row(record(0, one, chance)) for one in range(claims)]
    if store.runs():
        sys.exit(f"{store.url} has runs in it: give an empty one")
    with store._writing() as connection:
        upsert(connection, schema.subjects, subjects, ["digest"])
        found = {row.claim: row.id for row in connection.execute(select(schema.subjects))}
    known: dict[int, str] = {}  # claim → what it was last found to be
    for run in range(runs):
        start = 1.7e9 + 86400.0 * run
        store.begin(
            Run(f"run-{run:04d}", start, "host", "verified", "8x card", "0.1", "a7c0944", ("new",), start + 9e3)
        )
        first = record(run, 0, chance)
        judged = []
        payloads = []
        base = rows.judgement_row(first, 0, start)
        for number in range(claims):
            key = rows.digest(claim(number), "new", first.expectation)
            verdict = chance.choice(VERDICTS)
            if run == runs - 1:
                flips = number % max(claims // FLIPS, 1) == 0 and number // max(claims // FLIPS, 1) < FLIPS
                before = known.get(number, "HOLDS")
                verdict = before if not flips else "CHANGED" if before == "HOLDS" else "HOLDS"
            if verdict != "NOT_EVALUATED":
                known[number] = verdict
            judged.append(
                {
                    **base,
                    "key": key,
                    "subject": found[claim(number)],
                    "verdict": verdict,
                    "counts": int(verdict != "NOT_EVALUATED"),
                    "judged": start + number,
                    "nodeid": claim(number),
                }
            )
            if run % 10 == 0:
                one = record(run, number, chance)
                payloads.append(
                    {"run": one.run, "case": rows.case_of(one), "judged": one.when, "data": rows.pack(one.evidence)}
                )
        with store._writing() as connection:
            upsert(connection, schema.fingerprints, [rows.fingerprint_row(first)], ["digest"])
            connection.execute(schema.judgements.insert(), judged)
            if payloads:
                connection.execute(schema.evidence.insert(), payloads)


def timed(what: str, url: str, work: Callable[[Store], object]) -> None:
    walls, cpus = [], []
    for _ in range(REPEATS):
        with open_ledger(url) as store:
            store.aliases()  # connected
            wall, cpu = time.perf_counter(), time.process_time()
            work(store)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    figures = (
        f"{statistics.median(walls):7.3f} s ({min(walls):.3f} to {max(walls):.3f}; CPU {statistics.median(cpus):.3f})"
    )
    print(f"{what:40s} {figures}", flush=True)


def opened(url: str) -> None:
    took = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        open_ledger(url).close()
        took.append(time.perf_counter() - begun)
    print(f"{'open':40s} {statistics.median(took):7.3f} s", flush=True)


def added(url: str, runs: int, claims: int) -> None:
    chance = random.Random(2)
    took = []
    with open_ledger(url) as store:
        store.begin(Run(f"run-{runs:04d}", 1.8e9, "host", "verified", "8x card", "0.1"))
        for number in range(100):
            begun = time.perf_counter()
            store.add([record(runs, number % claims, chance)])
            took.append(time.perf_counter() - begun)
    print(f"{'add one judgement':40s} {statistics.median(took):7.3f} s  (slowest {max(took):.3f} s)", flush=True)


def commanded(what: str, *words: str) -> None:
    """A whole command, with Python's start and its imports."""
    took = []
    for _ in range(COMMANDS):
        begun = time.perf_counter()
        done = subprocess.run([*GPUGUARD, *words], cwd=CHECKOUT, capture_output=True)
        took.append(time.perf_counter() - begun)
        if done.returncode not in (0, 1):
            sys.exit(done.stderr.decode())
    lines = done.stdout.count(b"\n")
    print(
        f"{what:40s} {statistics.median(took):7.3f} s ({min(took):.3f} to {max(took):.3f}; {lines} lines)", flush=True
    )


def measure(url: str, claims: int, runs: int) -> None:
    begun = time.perf_counter()
    with open_ledger(url) as store:
        fill(store, claims, runs)
        print(f"{store.count()[1]:,} judgements in {time.perf_counter() - begun:.0f} s", flush=True)
    last, one = f"run-{runs - 1:04d}", claim(claims // 2)
    opened(url)
    timed("before(last run) + records(last run)", url, lambda store: (store.before(last), store.records(last)))
    middle = f"run-{runs // 2:04d}"
    timed("before + records of a run in the middle", url, lambda store: (store.before(middle), store.records(middle)))
    timed("history(claim)", url, lambda store: store.history(one))
    timed("history(claim, evidence=True)", url, lambda store: store.history(one, evidence=True))
    timed("latest()", url, lambda store: store.latest())
    timed("evaluated()", url, lambda store: store.evaluated())
    if "@" not in url:  # a password would stand in the list of processes
        commanded("gpuguard history CLAIM", "history", one, "--ledger", url)
        commanded(f"gpuguard diff, {FLIPS} flips", "diff", last, "--ledger", url)
        commanded("gpuguard diff, hundreds of flips", "diff", f"run-{runs - 2:04d}", "--ledger", url)
    added(url, runs, claims)


@contextmanager
def place(url: str | None, postgres: bool) -> Iterator[str]:
    if postgres:
        with running() as server:
            yield server.database()
    elif url is not None:
        yield url
    else:
        with tempfile.TemporaryDirectory(prefix="gpuguard-ledger-") as folder:
            yield f"sqlite:///{folder}/ledger.db"
            print(f"{sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6:.0f} MB on disk")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--claims", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--storm", type=int, metavar="ROUNDS")
    given = parser.parse_args()
    with place(given.url, given.postgres) as url:
        if given.storm:
            command = [sys.executable, "-m", "tests.ledger_storm", url, str(given.storm)]
            return subprocess.run(command, cwd=CHECKOUT).returncode
        measure(url, given.claims, given.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
