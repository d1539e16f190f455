"""The processes that generate a load: what becomes of them, and of a window when they fail."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_gpuguard.measure import meter_child
from pytest_gpuguard.measure.load import Load
from pytest_gpuguard.measure.meter import Meter
from pytest_gpuguard.measure.stream import Reply
from tests.stream_server import stand_in

ROOT = Path(__file__).parent.parent
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as running:
        yield lambda *options: running.enter_context(stand_in(*options))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_dies_or_hangs_is_a_failure(serve: Serve, how: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpuguard.measure.meter._HANG_S", 6.0)
    url = serve("--itl", "0.005")
    with Meter(url, {}, Load(2, output_len=4), processes=2) as meter:
        assert meter.sample(0.1).failed is None
        os.kill(meter.pids[1], how)
        window = meter.sample(0.1)
        says = "a process of the meter died of signal 9" if how == signal.SIGKILL else "a process of the meter hangs"
        assert window.failed is not None
        assert says in window.failed
        assert meter.sample(0.1).failed is None  # new ones are started


def test_a_child_says_that_it_lives_for_as_long_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TICK_S", 0.002), ("BEAT_S", 0.05), ("_KEEP_S", 0.1)):
        monkeypatch.setattr(meter_child, name, value)
    said = io.StringIO()
    config: dict[str, Any] = {"load": asdict(Load()), "url": "", "headers": {}, "model": None}
    config |= {"silence_s": 1.0, "first": 0, "slots": [0]}

    async def live() -> None:
        ticker = asyncio.create_task(meter_child.Child(config, said)._tick())
        await asyncio.sleep(1.0)  # ten times as long as ticks are kept
        ticker.cancel()

    asyncio.run(live())
    beats = [json.loads(line)["beat"] for line in said.getvalue().splitlines()]
    assert len(beats) >= 5
    assert beats[-1] - beats[0] > 0.6


def test_a_child_that_cannot_work_says_why(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpuguard.measure.meter_process.httpx_folders", list)
    with Meter(serve(), {}, Load()) as meter:
        window = meter.sample()
    assert window.failed == "a process of the meter crashed: ModuleNotFoundError: No module named 'httpx'"


def test_processes_that_cannot_be_started_are_a_failure(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with Meter("http://127.0.0.1:1", {}, Load()) as meter:
        window = meter.sample()
    assert window.failed is not None
    assert window.failed.startswith("the meter cannot start its processes: ")


def test_no_child_is_left_after_the_block(serve: Serve) -> None:
    url = serve("--itl", "0.005")
    with Meter(url, {}, Load(2, output_len=4), processes=2) as meter:
        meter.sample(0.1)
        pids = meter.pids
        assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


HOLDER = """
import os, sys, time
from pytest_gpuguard.measure.load import Load
from pytest_gpuguard.measure.meter import Meter
meter = Meter(sys.argv[1], {}, Load(2, output_len=4), processes=2)
meter.sample(0.1)
if os.fork() == 0:  # somebody else holds the other end of the children's stdin
    time.sleep(30)
    os._exit(0)
print(*meter.pids, flush=True)
meter.sample(60.0)
"""


def test_children_die_with_a_parent_that_was_killed(serve: Serve) -> None:
    url = serve("--itl", "0.005")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    (forked,) = {child.pid for child in psutil.Process(holder.pid).children()} - set(pids)
    assert len(pids) == 2
    holder.kill()
    holder.wait()
    deadline = time.monotonic() + 5
    try:
        while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(_lives(pid) for pid in pids)
    finally:
        os.kill(forked, signal.SIGKILL)
        holder.stdout.close()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_pytest_process_imports_no_client(serve: Serve) -> None:
    code = (
        "import sys; from pytest_gpuguard.measure.meter import Meter; from pytest_gpuguard.measure.load import Load\n"
        "with Meter(sys.argv[1], {}, Load(output_len=4)) as meter: print(meter.sample(0.1).failed)\n"
        "print('httpx' in sys.modules, 'asyncio' in sys.modules)"
    )
    url = serve("--itl", "0.005")
    ran = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.stdout.split() == ["None", "False", "False"], ran


@pytest.mark.parametrize(("given", "then"), [(None, 3), (1, 1)])
def test_a_busy_meter_takes_more_processes_unless_their_number_is_given(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, given: int | None, then: int
) -> None:
    monkeypatch.setattr("pytest_gpuguard.measure.meter.BUSY", 0.0001)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    url = serve("--itl", "0.01")
    with Meter(url, {}, Load(3, output_len=8), processes=given) as meter:
        assert meter.processes == 1
        assert meter.warm_up().failed is None
        assert meter.processes == len(meter.pids) == then
        assert meter.sample(0.1).failed is None


def test_a_slot_ends_though_its_cancellation_was_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes in the moment of the cancellation may swallow it (wait_for, bpo-42130)."""
    asked = []

    async def swallows(*_: Any) -> Reply:
        asked.append(1)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
        return Reply(0.0, 1.0)

    async def run() -> None:
        said = io.StringIO()
        config: dict[str, Any] = {"url": "http://127.0.0.1:9", "headers": {}, "model": None, "silence_s": 60.0}
        child = meter_child.Child({**config, "load": asdict(Load()), "slots": [0], "first": 0}, said)
        commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        serving = asyncio.create_task(child.serve(commands))
        await commands.put({"op": "go"})
        while not asked:
            await asyncio.sleep(0.01)
        await commands.put({"op": "stop", "id": 1})
        for _ in range(500):
            if '"stopped": true' in said.getvalue():
                break
            await asyncio.sleep(0.01)
        assert '"stopped": true' in said.getvalue()
        assert len(asked) == 1
        serving.cancel()

    monkeypatch.setattr(meter_child, "stream", swallows)
    asyncio.run(run())
