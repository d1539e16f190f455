"""Runs and judgements for the tests of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

from pytest_gpuguard.ledger import lines
from pytest_gpuguard.ledger.record import Kind, Record, Run
from pytest_gpuguard.ledger.store import Store


def a_run(number: int, kind: Kind = "verified", **changed: Any) -> Run:
    """Runs are an hour apart."""
    given: dict[str, Any] = {"rig": "1x card", "tool": "0.1", "suite": "a7c0944", "stacks": ("new",), **changed}
    return Run(f"run-{number:03d}", 1e9 + 3600.0 * number, "host", kind, **given)


def a_record(run: int | str, claim: str = "tests/a.py::test_it", verdict: str = "HOLDS", **changed: Any) -> Record:
    """A judgement of a run of ``a_run``, a minute after its start."""
    name, start = (run, 1e9) if isinstance(run, str) else (f"run-{run:03d}", 1e9 + 3600.0 * run)
    components: Mapping[str, str | None] = {"torch": "2.9.0", "driver": None}
    given: dict[str, Any] = {
        "stack": "new",
        "expectation": "fits(margin=2GiB)",
        "outcome": "ready",
        "fact": "ready, 4 GiB free",
        "when": start + 60,
        "kind": "verified",
        "nodeid": f"{claim}[new]",
        "cards": ("a card",),
        "components": components,
        **changed,
    }
    return Record(run=name, claim=claim, verdict=verdict, **given)


def told(store: Store) -> str:
    """All that a ledger holds, as text."""
    out = StringIO()
    lines.export(store, out)
    return out.getvalue()
