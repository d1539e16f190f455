"""Two processes that want one GPU, through our lease code, with torch really filling it.

The folder of locks is the check's own, so that nobody else waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pytest_gpuguard.facts.nvml import NvmlChild

from .result import BASELINE, MIB, Device, Findings, gib

_SCRIPTS: Final = Path(__file__).resolve().parent.parent
ROUNDS: Final = 2
_SIZE: Final = 8 << 30
_HOLD_S: Final = 0.5
#: So long the heir waits before the holder is killed.
_WAIT_S: Final = 2.0
_STEP_S: Final = 80.0
#: For both to have taken their turns: a contender itself waits 90 s for a lease.
_TURNS_S: Final = 120.0


class Contender:
    """One contender process, and what it has said so far. Ended by ``close`` or by the end of this process."""

    def __init__(self, device: Device, locks: Path, rounds: int, size: int, hold_s: float) -> None:
        words = [device.uuid, device.visible, str(rounds), str(size), str(hold_s)]
        path = os.pathsep.join(filter(None, [str(_SCRIPTS), str(_SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
        self.events: list[dict[str, Any]] = []
        self.text = ""
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "device_check.contender", *words],
            env={**os.environ, "GPUGUARD_LOCK_DIR": str(locks), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                if line.startswith('{"event"'):
                    self.events.append(json.loads(line))
                else:
                    self.text = (self.text + line)[-4000:]
                self._news.notify_all()

    def wait_for(self, event: str, seconds: float = _STEP_S) -> dict[str, Any] | None:
        """The first event of this name, waited for; None when it does not come."""
        until = time.monotonic() + seconds
        with self._news:
            while True:
                found = next((one for one in self.events if one["event"] == event), None)
                left = until - time.monotonic()
                ended = self.process.poll() is not None and not self._thread.is_alive()
                if found is not None or left <= 0 or ended:
                    return found
                self._news.wait(min(left, 0.2))

    def finish(self, seconds: float = _STEP_S) -> bool:
        """Wait until it is done; False when it did not end well."""
        try:
            ended = self.process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            ended = False
        self._thread.join(5.0)
        return ended

    def close(self) -> None:
        """Kill it; its worker goes with it."""
        self.process.kill()
        self.process.wait(30)


def leases(device: Device) -> Findings:
    """They take turns and never see each other's memory; a killed holder's GPU is handed on once it is clean."""
    found = Findings()
    locks = device.scratch / "contended"
    locks.mkdir(mode=0o1777)
    locks.chmod(0o1777)
    with NvmlChild() as child:
        free = child.memory([device.uuid])[device.uuid].free or 0
    pair = [Contender(device, locks, ROUNDS, min(_SIZE, free // 2), _HOLD_S) for _ in range(2)]
    try:
        until = time.monotonic() + _TURNS_S
        done = [one.finish(max(0.1, until - time.monotonic())) for one in pair]
    finally:
        for one in pair:
            one.close()
    found.log = "".join(one.text for one in pair)
    for number, one in enumerate(pair):
        words = one.text.strip().splitlines()[-1:] or ["it said nothing"]
        found.expect(done[number], f"contender {number} did not end well: {words[0][:200]}")
    taken_turns(found, [one.events for one in pair])
    if not found.problems:
        _killed(found, device, locks)
    found.headline = found.headline or "two contenders took turns"
    return found


def taken_turns(found: Findings, told: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """From what contenders told: leases do not overlap, each began clean, each was really used and given back clean."""
    spans = []
    for events in told:
        began: Mapping[str, Any] | None = None
        for event in events:
            if event["event"] == "leased":
                began = event
                found.expect(
                    (event["used"] or 0) <= BASELINE, f"a lease began with {gib(event['used'] or 0)} GiB in use"
                )
            elif event["event"] == "taken":
                found.expect((event["used"] or 0) > BASELINE, "a holder's allocation was not seen by NVML")
            elif event["event"] == "given_back" and began is not None:
                spans.append((began["at"], event["at"]))
                found.expect(event["leak"] is None, f"not given back clean: {event['leak']}")
    spans.sort()
    overlaps = sum(later[0] < earlier[1] for earlier, later in pairwise(spans))
    found.expect(overlaps == 0, f"{overlaps} leases overlapped")
    found.expect(len(spans) == ROUNDS * len(told), f"{len(spans)} leases instead of {ROUNDS * len(told)}")
    gaps = [round(later[0] - earlier[1], 3) for earlier, later in pairwise(spans)]
    found.figures["leases"] = len(spans)
    found.figures["from_given_back_to_leased_s"] = gaps


def _killed(found: Findings, device: Device, locks: Path) -> None:
    """Kill a holder with nearly all memory taken while another one waits."""
    with NvmlChild() as child:
        idle = child.memory([device.uuid])[device.uuid].used or 0
    holder = Contender(device, locks, 1, -2 * BASELINE, 600.0)
    heir: Contender | None = None
    try:
        taken = holder.wait_for("taken")
        if not found.expect(taken is not None, "the holder to be killed did not take its memory"):
            return
        heir = Contender(device, locks, 1, BASELINE * 2, 0.0)
        time.sleep(_WAIT_S)
        found.expect(not heir.events, "the heir had the GPU while it was held")
        killed = time.monotonic()
        holder.process.send_signal(signal.SIGKILL)
        leased = heir.wait_for("leased")
        if found.expect(leased is not None, "the heir never had the GPU") and leased is not None and taken is not None:
            seconds = leased["at"] - killed
            found.figures["killed_with_gib"] = gib(taken["used"])
            found.figures["from_kill_to_heir_s"] = round(seconds, 3)
            found.figures["heir_saw_mib_over_idle"] = (leased["used"] - idle) // MIB
            found.expect(leased["used"] <= BASELINE, f"the heir was given a GPU with {gib(leased['used'])} GiB in use")
            found.headline = (
                f"{found.figures['leases']} leases in turns; a killed holder's {gib(taken['used']):.0f} GiB were "
                f"handed on clean after {seconds:.2f} s"
            )
        found.expect(heir.finish(), "the heir did not end well")
        found.log += heir.text
    finally:
        holder.close()
        if heir is not None:
            heir.close()
