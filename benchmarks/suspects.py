"""Measures how often the ledger's history puts the true cause of a flip first, over planted histories.

A culprit is planted among components that changed together; it must never be known to what ranks them.

    python benchmarks/suspects.py [--histories 400] [--seed 1] [--json FILE]

Each earlier run has, of every component, the value of before or of now, one that is neither, or none that was noted;
its verdict is what the culprit's value makes it, but for flaky trials. In a *mixed* history components are chosen
independently; in a *usual* one every run is one of a few upgrades, each of which moves some components together.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pytest_gpuguard.ledger.record import Record
from pytest_gpuguard.ledger.suspects import rank

NAMES: Final = ("driver", "torch_cuda", "torch", "sglang", "sgl_kernel", "flashinfer_python", "triton", "nccl")
#: How often a value of an earlier run is neither of the two, and how often nobody noted it.
OTHER: Final = 0.1
MISSING: Final = 0.1
UPGRADES: Final = 3


@dataclass(frozen=True)
class Case:
    """``components`` that changed, the culprit among them; ``runs`` before the pair; the share of ``flaky`` trials."""

    components: int
    runs: int
    flaky: float
    usual: bool = False


@dataclass(frozen=True)
class Found:
    """Shares of histories: the culprit first and alone, first with others, behind another one, nothing ranked."""

    first: float
    shared: float
    behind: float
    unranked: float


CASES: Final = tuple(
    Case(components, runs, flaky)
    for flaky in (0.0, 0.05)
    for components in (3, 5, 8)
    for runs in (0, 1, 2, 4, 6, 8, 12, 20)
) + tuple(Case(5, runs, flaky, usual=True) for flaky in (0.0, 0.05) for runs in (2, 4, 8, 20))


@dataclass(frozen=True)
class History:
    """A flip, what was before it, and what is behind it."""

    before: Record
    now: Record
    earlier: tuple[Record, ...]
    culprit: str


def planted(case: Case, rng: random.Random) -> History:
    """One history. In a real one the pair itself may be flaky too: that is what ``--gpuguard-confirm`` is for."""
    names = rng.sample(NAMES, case.components)
    culprit = rng.choice(names)
    # what a third version does is its own affair
    fails = {"old": False, "new": True, **{f"other {at}": rng.random() < 0.5 for at in range(3)}}
    earlier = []
    for at in range(case.runs):
        together = [rng.random() < 0.5 for _ in range(UPGRADES)]
        values: dict[str, str] = {}
        for place, name in enumerate(names):
            moved = together[place % UPGRADES] if case.usual else rng.random() < 0.5
            other = rng.random() < OTHER
            values[name] = f"other {rng.randrange(3)}" if other else "new" if moved else "old"
        failed = fails[values[culprit]] != (rng.random() < case.flaky)
        noted = {name: value for name, value in values.items() if rng.random() >= MISSING}
        earlier.append(record(f"r{at}", failed, noted, float(at)))
    before = record("before", False, dict.fromkeys(names, "old"), float(case.runs))
    now = record("now", True, dict.fromkeys(names, "new"), float(case.runs + 1))
    return History(before, now, tuple(earlier), culprit)


def record(run: str, failed: bool, components: dict[str, str], when: float) -> Record:
    verdict, outcome = ("CONTRADICTED (worse)", "oom.weights") if failed else ("HOLDS", "ready")
    return Record(
        run, "claim", "default", "fits()", verdict, outcome, "", when, "verified", "test_a.py::test_fits",
        cards=("NVIDIA H200",), components=components,
    )  # fmt: skip


def measured(case: Case, histories: int, seed: int) -> Found:
    rng = random.Random(f"{seed} {case}")
    first = shared = behind = unranked = 0
    for _ in range(histories):
        history = planted(case, rng)
        suspects, ranked = rank(history.before, history.now, history.earlier)
        place = {one.change.component: one.rank for one in suspects}
        leaders = sum(one == 1 for one in place.values())
        if not ranked:
            unranked += 1
        elif place[history.culprit] > 1:
            behind += 1
        elif leaders > 1:
            shared += 1
        else:
            first += 1
    return Found(first / histories, shared / histories, behind / histories, unranked / histories)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=400, help="of each case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = []
    print("history  components  earlier runs  flaky   first  first with others  behind another  a list")
    for case in CASES:
        found = measured(case, args.histories, args.seed)
        rows.append({**vars(case), **vars(found)})
        print(
            f"{'usual' if case.usual else 'mixed':7}  {case.components:10}  {case.runs:12}  {case.flaky:5.0%}"
            f"  {found.first:6.1%}  {found.shared:17.1%}  {found.behind:14.1%}  {found.unranked:6.1%}"
        )
    print(f"{len(CASES) * args.histories} histories")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
