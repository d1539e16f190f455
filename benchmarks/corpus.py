"""Measures the classifier on a file of labelled logs: right outcomes, decisive lines, recall per class, false alarms.

A case is one JSON object a line: `log` (the text), `class` (an outcome's name; `none` for a healthy boot, which counts
as right when it is read as `ready` or `starting`), `engine`, `root` (a part of the line that shows the cause, or null),
`id`. A case of `hang.timeout` or `perf` without root counts as right when it is read as `starting`: such a log just
ends. It measures only; it must never be used to fit a signature to one case.

    python benchmarks/corpus.py cases.jsonl [more.jsonl …] [--engine auto] [--wrong]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from pytest_gpuguard.claims.outcome import READY, STARTING, UNKNOWN
from pytest_gpuguard.diagnose import classify_text

ENGINES = ("sglang", "vllm")


def right(case: dict[str, Any], outcome: str) -> bool:
    """Whether the outcome is the case's class."""
    if case["class"] == "none":
        return outcome in (READY, STARTING)
    silent = case["class"] in ("hang.timeout", "perf") and not case["root"]
    return outcome == case["class"] or (silent and outcome == STARTING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--engine", choices=["known", "auto"], default="known", help="auto: the engine is not told")
    parser.add_argument("--wrong", action="store_true", help="list the cases that came out wrong")
    options = parser.parse_args()
    cases = [json.loads(line) for file in options.files for line in file.read_text().splitlines() if line.strip()]
    total: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    roots = found = unknown = caused = 0
    alarms, wrong = [], []
    for case in cases:
        engine = case["engine"] if options.engine == "known" and case["engine"] in ENGINES else None
        reading = classify_text(case["log"], engine)
        total[case["class"]] += 1
        ok = right(case, reading.outcome)
        hits[case["class"]] += ok
        shown = reading.decisive.text if reading.decisive is not None else ""
        if case["root"]:
            roots += 1
            found += case["root"] in shown
            if case["class"] != UNKNOWN:
                caused += 1
                unknown += reading.outcome == UNKNOWN
        family = reading.outcome.partition(".")[0]
        if not ok and family in ("oom", "unsupported") and family != case["class"].partition(".")[0]:
            alarms.append(case["id"])
        if not ok:
            wrong.append(f"{case['id']}: {case['class']}, read as {reading.outcome}: {shown[:120]}")
    for name in sorted(total):
        print(f"{name:24} {hits[name]:3} of {total[name]:3}")
    print(f"outcome: {sum(hits.values())} of {len(cases)} ({sum(hits.values()) / len(cases):.1%})")
    print(f"decisive line: {found} of {roots} ({found / max(roots, 1):.1%})")
    print(f"unknown where the log holds a cause: {unknown} of {caused} ({unknown / max(caused, 1):.1%})")
    print(f"another class read as oom.* or unsupported.*: {len(alarms)} {alarms or ''}")
    if options.wrong:
        print("\n".join(wrong))


if __name__ == "__main__":
    main()
