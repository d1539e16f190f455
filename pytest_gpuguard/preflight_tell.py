"""Told to pytest by ``gpuguard preflight``: passes the facts and each verdict on, as they come, as lines of JSON.

It must never print: the pipe whose number is in the environment is all that it writes to.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import pytest

from .report.payload import REPORT_KEY

if TYPE_CHECKING:
    from .facts.stackref import StackRef

#: The variable with the number of the pipe.
PIPE: Final = "GPUGUARD_PREFLIGHT_PIPE"


def tell(kind: str, **data: Any) -> None:
    """One line."""
    number = os.environ.get(PIPE, "")
    if number.isdigit():
        line = json.dumps({"kind": kind, **data}) + "\n"
        try:
            os.write(int(number), line.encode())
        except OSError:
            pass  # whoever asked is gone; the run goes on for the ledger


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Rig and stacks, and what the checks are called."""
    from .collect import CLAIM
    from .facts.stack import StackError
    from .plugin import runner_of
    from .report.header import facts_lines
    from .run_stacks import StackAbsent

    items = [item for item in session.items if CLAIM in item.stash]
    if not items:
        tell("begin", titles=[], lines=[], stacks=[], gpus=False)
        return
    runner = runner_of(session.config)
    refs: list[StackRef] = list(dict.fromkeys(runner.ref_of(item) for item in items))
    stacks = []
    for ref in refs:
        try:
            stack = runner.session.stack(ref)
        except (StackAbsent, StackError) as error:
            stacks.append({"name": ref.name, "describe": str(error), "jit_caches": {}})
            continue
        caches = {name: one["state"] for name, one in (stack.facts.get("jit_caches") or {}).items()}
        stacks.append({"name": ref.name, "describe": stack.describe(), "jit_caches": caches})
    titles = [item.stash[CLAIM].about.title or item.nodeid for item in items]
    lines = facts_lines(runner.session, refs, locks=False)
    tell(
        "begin",
        titles=titles,
        lines=lines,
        stacks=stacks,
        gpus=any("rig: " in line and "no GPUs" not in line for line in lines),
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A verdict."""
    data = getattr(report, REPORT_KEY, None)
    if data is not None:
        tell("verdict", claim=data, seconds=round(report.duration, 2))
    elif report.failed:
        tell("broken", nodeid=report.nodeid, said=str(report.longrepr)[-2000:])
