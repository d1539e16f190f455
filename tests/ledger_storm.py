"""Eight writers at once, any of which is killed with -9: what was reported as kept must be there, and nothing broken.

    python -m tests.ledger_storm URL ROUNDS [SEED]

Prints one line per finding and ends with 1 when there was any, else a line of figures.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sqlite3
import sys
import time
from collections.abc import Callable

from pytest_gpuguard.ledger.store import Store, open_ledger

from .ledger_values import a_record, a_run

WRITERS = 8


def write(url: str, run: int, report: int, stop: int) -> None:
    """Adds to a run of its own, about claims that all have, and counts in a note of all; until told to stop."""

    def one_more(_name: str, note: dict[str, int] | None) -> dict[str, int]:
        return {"n": (note or {"n": 0})["n"] + 1}

    with open_ledger(url) as store:
        store.begin(a_run(run))
        number = 0
        while not select.select([stop], [], [], 0)[0]:
            claims = [f"claim {number * 3 + one}" for one in range(3)]
            payload = {"log": "x" * 3000, "number": number}
            store.add([a_record(run, claim, evidence=payload) for claim in claims])
            os.write(report, f"add {run} {number}\n".encode())
            store.amend(["count"], one_more)
            os.write(report, b"amend 0 0\n")
            number += 1


def spawn(work: Callable[[], None], *unused: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for descriptor in unused:
            os.close(descriptor)
        work()
        status = 0
    except BaseException as error:  # a child of a fork must never return into its parent's code
        os.write(2, f"a writer failed: {error!r}\n".encode())
    finally:
        os._exit(status)


def listen(report: int, until: float | None) -> str:
    """What the writers say until a time, or until all of them are gone."""
    said = []
    while until is None or time.monotonic() < until:
        if select.select([report], [], [], 0.05)[0]:
            data = os.read(report, 65536)
            if not data:
                break
            said.append(data.decode())
    return "".join(said)


def round_of(url: str, number: int, chance: random.Random) -> tuple[list[str], list[str]]:
    """What the writers reported as done, and what went wrong with them."""
    heard, report = os.pipe()
    stop, hold = os.pipe()
    children = [
        spawn(lambda run=number * WRITERS + one: write(url, run, report, stop), heard, hold)  # type: ignore[misc]
        for one in range(WRITERS)
    ]
    os.close(report)
    os.close(stop)
    said = ""
    deadline = time.monotonic() + 60
    while said.count("\n") < WRITERS and time.monotonic() < deadline:  # they are at work
        said += listen(heard, time.monotonic() + 0.05)
    said += listen(heard, time.monotonic() + chance.uniform(0.0, 0.4))
    doomed = chance.sample(children, chance.choice((1, 1, 3, WRITERS)))
    for child in doomed:
        os.kill(child, signal.SIGKILL)
        said += listen(heard, time.monotonic() + chance.uniform(0.0, 0.05))
    os.close(hold)
    said += listen(heard, None)
    os.close(heard)
    ends = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    bad = [f"a writer ended with {end}" for child, end in ends.items() if end != 0 and child not in doomed]
    return said.split("\n")[:-1], bad


def lost(store: Store, reported: list[str]) -> list[str]:
    kept = {}
    found = []
    for line in reported:
        what, run, number = line.split()
        if what == "add":
            name = f"run-{int(run):03d}"
            if name not in kept:
                kept[name] = {one.claim for one in store.records(name, evidence=True) if one.evidence}
            claims = {f"claim {int(number) * 3 + one}" for one in range(3)}
            if not claims <= kept[name]:
                found.append(f"lost: {line}")
    # An add is whole or not there.
    found += [f"{name} has half an add: {len(claims)} judgements" for name, claims in kept.items() if len(claims) % 3]
    return found


def main(url: str, rounds: int, seed: int = 1) -> int:
    chance = random.Random(seed)
    findings: list[str] = []
    adds = amends = 0
    for number in range(rounds):
        reported, bad = round_of(url, number, chance)
        findings += bad
        adds += sum(line.startswith("add") for line in reported)
        amends += sum(line.startswith("amend") for line in reported)
        with open_ledger(url) as store:
            findings += lost(store, reported)
            count = store.notes().get("count", {"n": 0})["n"]
        # A killed writer may have counted and not said so, once.
        if not amends <= count <= amends + (number + 1) * WRITERS:
            findings.append(f"{amends} counted, and the note says {count}")
        if url.startswith("sqlite:///"):
            connection = sqlite3.connect(url[len("sqlite:///") :])
            whole = connection.execute("PRAGMA integrity_check").fetchall()
            connection.close()
            findings += [f"integrity: {one}" for (one,) in whole if one != "ok"]
    for finding in findings:
        print(finding)
    if not findings:
        print(f"{rounds} rounds: {adds} adds and {amends} counts reported, all of them kept")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
