"""Real process trees to be taken down: small servers of every nasty shape, and ways to find what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest_gpuguard
from pytest_gpuguard.lease.warden import Proc, read_proc

ROOT = Path(pytest_gpuguard.__file__).parent.parent
MARK = "GPUGUARD_TEST_MARK"
LAW_S = 5.0

_HEAD = """
import os, signal, subprocess, sys, time
def child(code, **options):
    return subprocess.Popen([sys.executable, "-S", "-c", "import os, signal, sys, time\\n" + code], **options)
PROOF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
SLEEP = "time.sleep(600)"
"""
SHAPES = {
    "plain": 'child(SLEEP); print("up", flush=True); time.sleep(600)',
    "own-sessions": """
for _ in range(3):
    child("os.fork(); " + SLEEP, start_new_session=True)
print("up", flush=True); time.sleep(600)""",
    "term-proof": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    child(PROOF + "os.fork(); " + SLEEP, start_new_session=True)
child(PROOF + SLEEP)
print("up", flush=True); time.sleep(600)""",
    "storm": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        break
print("up", flush=True)
while True:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    time.sleep(0.004)""",
    "hopper": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    print("up", flush=True)
    end = time.monotonic() + 60  # should it ever escape, it must not hop for ever
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(0.004)
time.sleep(600)""",
}

_HOLDER = """
import json, os, signal, sys, time
from pytest_gpuguard.engines.process import ServerProcess
argv, log, mode = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
server = ServerProcess.start(argv, {**os.environ, "IN_TREE": "1"}, None, log)
print(server.pid, server.warden_pid, flush=True)
if mode == "fork" and os.fork() == 0:
    time.sleep(30)
    os._exit(0)
if mode == "exit":
    sys.exit(0)
if mode == "late-exit":
    time.sleep(0.5)
    sys.exit(0)
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("waiting", flush=True)
while True:
    time.sleep(600)
"""


def server(folder: Path, shape: str) -> list[str]:
    """The command line of a server of this shape."""
    return script(folder, shape, SHAPES[shape])


def script(folder: Path, name: str, code: str) -> list[str]:
    """The command line of a Python script with this code."""
    path = folder / f"{name}.py"
    path.write_text(_HEAD + code + "\n")
    return [sys.executable, "-S", str(path)]


def holder(folder: Path, argv: Sequence[str], mark: str, mode: str = "stay") -> subprocess.Popen[str]:
    """A process like pytest that has booted a server; everything below it carries the mark."""
    import json

    env = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, json.dumps(list(argv)), str(folder / "server.log"), mode],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def new_mark() -> str:
    """A word that no other process has in its environment."""
    return uuid.uuid4().hex


def marked(mark: str, also: str = "") -> dict[int, Proc]:
    """The living processes that carry the mark, by pid."""
    found = {}
    # the newest first: one that goes on under ever new pids would be gone from where it was listed
    for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int, reverse=True):
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        proc = read_proc(int(name))
        if f"{MARK}={mark}".encode() in environ and also.encode() in environ and proc is not None and not proc.dead:
            found[proc.pid] = proc
    return found


def seconds_until_gone(mark: str, also: str = "", limit: float = 50.0) -> float:
    """How long it takes until nothing that carries the mark is left; above ``limit`` it gives up."""
    began = time.monotonic()
    empty, gone = 0, limit
    while time.monotonic() - began < limit and empty < 8:  # one look may miss a process between two forks
        if marked(mark, also):
            empty = 0
        else:
            gone = gone if empty else time.monotonic() - began
            empty += 1
        time.sleep(0.02)
    return gone if empty == 8 else limit


def wait_until(condition: object, limit: float = 30.0) -> None:
    """Wait until ``condition()`` is true; an AssertionError after ``limit`` seconds."""
    assert callable(condition)
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {limit} s"
        time.sleep(0.01)


def sweep(mark: str) -> None:
    """End what a failed test has left."""
    while left := marked(mark):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
