"""Told to pytest by ``gpuguard preflight``: passes the facts and each verdict on, as they come, as lines of JSON.

It must never print: the pipe whose number is in the environment is all that it writes to.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest

from .packing.history import key_of
from .report.payload import REPORT_KEY
from .stacks import plain_nodeid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .facts.stackref import StackRef
    from .ledger.record import Record
    from .run import Runner

#: What the files of the suite look at, in the order in which one stands on the other.
ORDER: Final = ("test_driver", "test_toolchain", "test_libraries", "test_links", "test_collectives", "test_features")
#: The variable with the number of the pipe.
PIPE: Final = "GPUGUARD_PREFLIGHT_PIPE"


def tell(kind: str, **data: Any) -> None:
    """One line."""
    number = os.environ.get(PIPE, "")
    if number.isdigit():
        line = json.dumps({"kind": kind, **data}) + "\n"
        rest = line.encode()
        try:
            while rest:
                rest = rest[os.write(int(number), rest) :]
        except OSError:
            _stop()


def _stop() -> None:
    """Whoever asked is gone: give the GPUs back, as after Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def _watch(number: int) -> None:
    """Wait until nobody reads the pipe any more."""
    waiter = select.poll()
    waiter.register(number, 0)  # errors and hang-ups are always told
    waiter.poll()
    _stop()


def pytest_configure(config: pytest.Config) -> None:
    """A command that is killed must not leave a run behind that goes on to use GPUs."""
    number = os.environ.get(PIPE, "")
    if number.isdigit():
        threading.Thread(target=_watch, args=(int(number),), daemon=True).start()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """All that was to be told has been."""
    tell("end")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Whether hearsay is looked at too: it takes GPUs and time, and is never red."""
    parser.addoption("--gpuguard-preflight-hearsay", action="store_true", help=argparse.SUPPRESS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave hearsay out, and begin with what the rest stands on."""
    from .collect import CLAIM

    left = [one for one in items if CLAIM in one.stash and one.stash[CLAIM].about.hearsay]
    if left and not config.getoption("--gpuguard-preflight-hearsay"):
        items[:] = [one for one in items if one not in left]
        config.hook.pytest_deselected(items=left)
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER))


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
    stacks: list[dict[str, Any]] = []
    changed = _changed(runner, items)
    for ref in refs:
        try:
            stack = runner.session.stack(ref)
        except (StackAbsent, StackError) as error:
            stacks.append({"name": ref.name, "describe": str(error), "jit_caches": {}, "changed": []})
            continue
        caches = {name: one["state"] for name, one in (stack.facts.get("jit_caches") or {}).items()}
        told = {"name": ref.name, "describe": stack.describe(), "jit_caches": caches}
        stacks.append({**told, "changed": changed.get(ref.name, [])})
    about = [(item.stash[CLAIM].about, plain_nodeid(item)) for item in items]
    titles = [title_of(key_of(one.id or plain, plain), one.title) for one, plain in about]
    lines = facts_lines(runner.session, refs, locks=False)
    tell(
        "begin",
        titles=titles,
        lines=lines,
        stacks=stacks,
        gpus=any("rig: " in line and "no GPUs" not in line for line in lines),
    )


def title_of(key: str, title: str | None) -> str:
    """A claim's words, with the parameters of its test: ``the library imports [flashinfer]``."""
    parameters = key[key.index("[") :] if key.endswith("]") else ""
    return f"{title} {parameters}".rstrip() if title else key


def _changed(runner: Runner, items: Sequence[pytest.Item]) -> dict[str, list[str]]:
    """What differs from when these checks were last decided, by stack, as ``nvidia-cublas 13.0.0.19 → 13.1.0.3``.

    A change is no defect; it is what to suspect of one.
    """
    from .ledger.changes import CACHE, Change, changes, told

    last: dict[tuple[str, str], Record] = {}
    for (claim, _, _), records in runner.before().items():
        for one in records:
            if (claim, one.stack) not in last or one.when > last[claim, one.stack].when:
                last[claim, one.stack] = one
    found: dict[str, dict[str, Change]] = {}
    for item in items:
        evaluation = runner.evaluation(item)
        record = last.get((evaluation.claim.about.id or item.nodeid, evaluation.ref.name))
        for change in changes(record.components, runner.memory.components(item)) if record is not None else ():
            if not change.component.startswith(CACHE) and change.component != "suite":
                found.setdefault(evaluation.ref.name, {})[change.component] = change
    return {name: told(list(several.values())) for name, several in found.items()}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A verdict."""
    data = getattr(report, REPORT_KEY, None)
    if data is not None:
        tell("verdict", claim=data, seconds=round(report.duration, 2))
    elif report.failed:
        tell("broken", nodeid=report.nodeid, said=str(report.longrepr)[-2000:])
