"""What a probe's script may use: its questions, the GPUs that it was given, and the ways to end.

Runs inside the python under test, which may have nothing of ours: standard library only, any Python from 3.8 on.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

#: What the answer's line begins with; a nonce follows where the launcher gave one.
MARK = "gpuguard-probe"
#: How long the others of a group are given once one has failed.
PEER_S = 5.0
#: The most that is kept of the output of one rank, child or tool, in bytes.
OUTPUT_LIMIT = 64 * 1024

#: What faulthandler prints of a process that was late, and Python of one that raised.
_TIMED_OUT = "Timeout ("
_RAISED = "Traceback (most recent call last)"

_order = json.loads(os.environ.get("GPUGUARD_PROBE") or "{}")

#: What the caller gave.
args: dict[str, Any] = _order.get("args") or {}
#: UUIDs of the leased GPUs; CUDA_VISIBLE_DEVICES names the same.
gpus: tuple[str, ...] = tuple(_order.get("gpus") or ())
#: NVML's facts of the leased GPUs, or of all GPUs of the rig where none is leased.
rig: list[dict[str, Any]] = _order.get("rig") or []
#: The NVIDIA driver's version, and the newest CUDA that it knows ("13.0").
driver: str | None = _order.get("driver")
driver_cuda: str | None = _order.get("driver_cuda")

_answer: dict[str, Any] = {}
_stage = ["start"]
_ended = [False]
#: Our own way out, whatever becomes of descriptor 1.
_out = os.dup(1)


class _End(BaseException):
    """Ends the script. Not an Exception, so that a broad except in between does not swallow it."""


class Rank(NamedTuple):
    """How one process of ``ranks`` or ``child`` ended.

    ``data`` is its answer, ``text`` the end of what it printed (64 kB at most), ``stage`` the last one that it began.
    ``hung``: it had not ended in time, and was killed. ``signal``: it was ended by that signal, and not by us.
    ``defect`` and ``absent`` are how it ended itself, if it did.
    """

    rank: int
    ok: bool
    data: dict[str, Any]
    text: str
    hung: bool
    stage: str
    signal: int | None
    defect: tuple[str, str] | None
    absent: tuple[str, str] | None

    @property
    def told(self) -> str:
        """What went wrong in one line, as far as the process itself said it."""
        if self.defect is not None or self.absent is not None:
            return (self.defect or self.absent or ("", ""))[1]
        if self.hung:
            return f"it did not return in {self.stage!r}"
        lines = [line.strip() for line in self.text.splitlines() if line.strip() and not line.startswith(MARK)]
        if self.signal is not None:
            name = _signal_name(self.signal)
            return f"it was ended by {name} in {self.stage!r}"
        return lines[-1] if lines else f"it ended without an answer in {self.stage!r}"


def sms() -> tuple[str, ...]:
    """The compute capabilities of the rig's GPUs, each once: ``("120",)``."""
    return tuple(dict.fromkeys(one["sm"] for one in rig if one.get("sm")))


def stage(name: str) -> None:
    """Say what comes next. The last stage is where a hang or a crash was."""
    _stage[0] = name
    _print(f"{MARK}: stage {name}")


def answer(**data: Any) -> None:
    """Add to the answer; ``said`` is the line that a report shows."""
    _answer.update(data)


def defect(outcome: str, text: str) -> NoReturn:
    """End the probe: something is broken, with an outcome by its name and one line that says what."""
    _end(defect=[outcome, text])
    raise _End


def absent(what: str, text: str) -> NoReturn:
    """End the probe: it cannot be decided here, for want of ``what`` ("gpus", "tools", "package", "cuda")."""
    _end(absent=[what, text])
    raise _End


def main(run: Callable[[], None]) -> None:
    """Run a script: the function that it gives, or the one that its parent asked for in this process."""
    call = _order.get("call")
    try:
        if call is None:
            run()
        else:
            function = run.__globals__[call]
            if _order.get("rank") is None:
                function()
            else:
                function(int(_order["rank"]), int(_order["world"]))
    except _End:
        _leave(3)  # so that a parent need not wait for the others of its group
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _end()
    _leave(0)


def ranks(
    call: str, world: int, limit_s: float, env: dict[str, str] | None = None, args: dict[str, Any] | None = None
) -> list[Rank]:
    """Run the script's function ``call(rank, world)`` in ``world`` processes at once; all are gone when it returns.

    Those that have not ended after ``limit_s`` seconds are killed, and so are all others of a group once one has failed
    and five seconds have passed; those are not ``hung``. ``args`` replaces ``kit.args`` there.
    """
    surroundings = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **(env or {}),
    }
    running = []
    try:
        for rank in range(world):
            order = {"call": call, "rank": rank, "world": world, **({} if args is None else {"args": args})}
            one = {**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append(_Process(rank, order, one))
        return _wait(running, limit_s)
    finally:
        for process in running:
            process.kill()


def child(call: str, limit_s: float, env: dict[str, str] | None = None, args: dict[str, Any] | None = None) -> Rank:
    """Run the script's function ``call()`` in one process of its own, which may crash or hang."""
    process = _Process(0, {"call": call, **({} if args is None else {"args": args})}, env or {})
    try:
        return _wait([process], limit_s)[0]
    finally:
        process.kill()


def settle(failed: Sequence[Rank], what: str, hang: Callable[[Sequence[Rank]], str] | None = None) -> NoReturn:
    """End the probe as these processes did: by a rank's own words, as a hang, or with the exception of the first.

    Those that only waited for one that raised, or that crashed, are no hang. ``hang`` words one, of those that were
    late: killed, or ended by ``faulthandler.dump_traceback_later``, which needs no interpreter lock.
    """
    for one in failed:
        if one.absent is not None:
            absent(*one.absent)
        if one.defect is not None:
            defect(*one.defect)
    for one in failed:
        print(f"rank {one.rank}, in {one.stage!r}:\n{one.text}", flush=True)
    late = [one for one in failed if one.hung or _TIMED_OUT in one.text]
    raised = [one for one in failed if one not in late and (one.signal or _RAISED in one.text)]
    if late and not raised:
        defect("hang.timeout", hang(late) if hang is not None else f"{what}: it did not return from {late[0].stage!r}")
    first = (raised or list(failed))[0]
    raise RuntimeError(f"{what}: rank {first.rank} failed in {first.stage!r}: {first.told}")


def run_tool(
    argv: Sequence[str], limit_s: float, env: dict[str, str] | None = None, input: str | None = None
) -> tuple[int | None, str]:
    """Exit code and output (both streams, 64 kB at most) of a tool; code None when it did not end in time.

    Raises OSError when it cannot be started.
    """
    with tempfile.TemporaryFile() as given:
        if input is not None:
            given.write(input.encode())
            given.seek(0)
        process = subprocess.Popen(
            list(argv),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    kept = _Kept(process)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None, kept.text()
    finally:
        _kill(process)
        kept.join()
    return process.returncode, kept.text()


# ------------------------------------------------------------------------------------------------------------ inside


class _Kept:
    """Reads what a process prints, and keeps its first and last parts."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._pipe = process.stdout
        self._process = process
        self._head = b""
        self._tail = b""
        self._left_out = 0
        self._lines = b""
        self.marks: list[str] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        number = self._pipe.fileno()
        while not self._closed.is_set():
            # A grandchild that got away may keep the pipe open for ever.
            if not select.select([number], [], [], 0.1)[0]:
                continue
            data = os.read(number, 65536)
            if not data:
                break
            self._keep(data)
        self._pipe.close()

    def _keep(self, data: bytes) -> None:
        *lines, self._lines = (self._lines + data).split(b"\n")
        if MARK.encode() not in self._lines:
            self._lines = self._lines[-OUTPUT_LIMIT:]
        for line in lines:  # something may have been printed before it without an end of line
            at = line.find(MARK.encode())
            self.marks += [line[at:].decode("utf-8", "replace")] if at >= 0 else []
        half = OUTPUT_LIMIT // 2
        room = half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > half:
            self._left_out += len(self._tail) - half
            self._tail = self._tail[-half:]

    def join(self) -> None:
        """Wait until all is read of a process that is gone."""
        self._thread.join(1.0)
        self._closed.set()
        self._thread.join(1.0)

    def text(self) -> str:
        """What it printed, without its middle where that is long."""
        middle = f"\n… {self._left_out} bytes left out …\n".encode() if self._left_out else b""
        return (self._head + middle + self._tail).decode("utf-8", "replace")


class _Process:
    """One process of this same script."""

    def __init__(self, rank: int, order: dict[str, Any], env: dict[str, str]) -> None:
        self.rank = rank
        self.killed = False
        whole = {**_order, **order}
        self._popen = subprocess.Popen(
            [sys.executable, *_again()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, "GPUGUARD_PROBE": json.dumps(whole), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._kept = _Kept(self._popen)

    @property
    def code(self) -> int | None:
        return self._popen.poll()

    def kill(self) -> None:
        if self._popen.poll() is None:
            self.killed = True
        _kill(self._popen)
        self._kept.join()

    def result(self, hung: bool) -> Rank:
        self.kill()
        told: dict[str, Any] = {}
        last = "start"
        for line in self._kept.marks:
            if line.startswith(MARK + ": stage "):
                last = line[len(MARK + ": stage ") :]
            elif line.startswith(MARK + ": {"):
                told = json.loads(line[len(MARK + ": ") :])
        code = self._popen.returncode
        by = -code if code is not None and code < 0 and not self.killed else None
        lines = (line for line in self._kept.text().splitlines() if not line.startswith(MARK + ":"))
        text = "\n".join(line.partition(MARK + ":")[0] for line in lines)
        ended = {how: (told[how][0], told[how][1]) for how in ("defect", "absent") if how in told}
        ok = bool(told) and not ended and code == 0
        return Rank(
            self.rank,
            ok,
            told.get("answer") or {},
            text,
            hung and not ok,
            last,
            by,
            ended.get("defect"),
            ended.get("absent"),
        )


def _wait(running: list[_Process], limit_s: float) -> list[Rank]:
    until = time.monotonic() + limit_s
    peer_gone = False
    while time.monotonic() < until and any(one.code is None for one in running):
        if not peer_gone and any(one.code for one in running):
            peer_gone = True  # the others wait for it in vain
            until = min(until, time.monotonic() + PEER_S)
        time.sleep(0.02)
    hung = [one.code is None and not peer_gone for one in running]
    return [one.result(late) for one, late in zip(running, hung)]  # noqa: B905 (strict= is newer than 3.8)


def _again() -> list[str]:
    """The arguments that make python run this script once more."""
    if not _order.get("launched"):
        return [os.path.abspath(sys.argv[0])]
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode().split("\0")
    return words[words.index("-c") : words.index("-c") + 2]


def _end(**how: Any) -> None:
    if _ended[0]:
        return  # the first word counts
    _ended[0] = True
    nonce = _order.get("nonce") if _order.get("call") is None else None
    mark = "{}{}".format(MARK, "-" + nonce if nonce else "")
    _print("{}: {}".format(mark, json.dumps({"answer": _answer, **how}, default=str)))


def _print(line: str) -> None:
    """Write past ``sys.stdout``, which a script or a library may have replaced or closed."""
    _flush(sys.stdout)
    data = (re.sub(r"[\r\n]+", " ", line) + "\n").encode("utf-8", "replace")
    while data:
        data = data[os.write(_out, data) :]


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        pass  # replaced, or closed


def _leave(code: int) -> NoReturn:
    """End at once: destructors of CUDA libraries may hang or crash, and what was found out has been told."""
    _flush(sys.stdout)
    _flush(sys.stderr)
    os._exit(code)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        pass  # stuck in the kernel


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
