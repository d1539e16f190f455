"""Memory as it moves: running out of it for real, peaks that were sampled against torch's own, and how it returns.

Whatever is allocated here is gone when the check ends.
"""

from __future__ import annotations

import subprocess
import time
from typing import Final

from pytest_gpuguard.claims.units import GIB
from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.facts.nvml import NvmlChild
from pytest_gpuguard.measure.sampler import Sampler

from .result import MIB, Device, Findings, gib
from .work import Worker, command, settled

#: What each way of running out must be called.
EXPECTED: Final = {"load": "oom.weights", "capture": "oom.graph_capture", "run": "oom.runtime"}
#: Three of it, and three times _RECLAIM_S where memory does return, are within the deadlines of their checks.
_OOM_S: Final = 45.0
_SPIKES: Final = 10
_SPIKE_S: Final = 0.02
#: At most so much is allocated and freed at once: more takes a driver longer than the spike is to last.
_SPIKE: Final = 4 * GIB
_NEAR: Final = 64 * MIB
#: How often memory is looked at after a kill, and for how long, in seconds.
_LOOK_S: Final = 0.005
_RECLAIM_S: Final = 60.0


def out_of_memory(device: Device) -> Findings:
    """Real torch runs out of memory in code that looks like loading, graph capture and serving: each log says which."""
    found = Findings()
    for where, outcome in EXPECTED.items():
        began = time.monotonic()
        try:
            done = subprocess.run(
                command("oom", where),
                env=device.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_OOM_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            found.log += f"--- {where}\n{(error.output or b'').decode(errors='replace')[-8000:]}\n"
            found.problems.append(f"{where}: memory did not run out within {_OOM_S:g} s")
            continue
        text = done.stdout.decode(errors="replace")
        found.log += f"--- {where}: exit {done.returncode}\n{text[-8000:]}\n"
        reading = classify_text(text, engine="command")
        line = reading.decisive.text if reading.decisive is not None else ""
        found.figures[where] = {
            "outcome": reading.outcome,
            "line": line[:300],
            "seconds": round(time.monotonic() - began, 2),
            "exit": done.returncode,
        }
        found.expect(reading.outcome == outcome, f"{where}: {reading.outcome} instead of {outcome} ({line[:120]})")
    found.headline = "real torch OOMs: " + ", ".join(f"{where} is {name}" for where, name in EXPECTED.items())
    return found


def sampled(device: Device) -> Findings:
    """The sampler's peak against torch's own, and spikes that are held for 20 ms, at the default of 50 Hz."""
    found = Findings()
    with NvmlChild() as child:
        if not settled(found, child, device.uuid):
            return found
    pids: set[int] = set()
    sampler = Sampler([device.uuid], ours=lambda: pids)
    sampler.start()
    try:
        with Worker(device.env) as worker:
            pids.add(worker.pid)
            with NvmlChild() as child:
                memory = child.memory([device.uuid])[device.uuid]
            free = worker.do("info")["free"]
            base = spike = min(int(free * 0.25), _SPIKE)
            sampler.mark("base")
            worker.do("take", bytes=base)
            time.sleep(0.5)
            held = []
            for number in range(_SPIKES):
                sampler.mark(f"spike {number}")
                held.append(worker.do("spike", bytes=spike, seconds=_SPIKE_S))
                sampler.mark("between")
                time.sleep(0.1)
            told = worker.do("info")
            peak = sampler.peak()
            if peak is None or memory.used is None:
                found.problems.append("nothing was sampled")
                return found
    finally:
        sampler.stop()
    phases = dict(peak.phases)
    steady = phases.get("base", 0.0) * GIB
    seen = [phases.get(f"spike {number}", 0.0) * GIB - steady for number in range(_SPIKES)]
    caught = sum(abs(one - spike) <= _NEAR for one in seen)
    context = steady - base
    apart = peak.gib * GIB - (told["reserved"] + context)
    took_ms = [round(one["all_s"] * 1e3, 1) for one in held]
    found.figures = {
        "torch_reserved_gib": gib(told["reserved"]),
        "torch_allocated_gib": gib(told["allocated"]),
        "context_mib": round(context / MIB),
        "sampled_peak_gib": round(peak.gib, 3),
        "spike_gib": gib(spike),
        "apart_mib": round(apart / MIB, 1),
        "spikes_seen": caught,
        "spikes": _SPIKES,
        "spikes_held_ms": [round(one["held_s"] * 1e3, 1) for one in held],
        "spikes_took_ms": took_ms,
        "samples": peak.samples,
        "gaps": peak.gaps,
        "source": peak.source,
        "missing": list(peak.missing),
    }
    found.expect(0 < context < 4 * GIB, f"the context would take {context / MIB:.0f} MiB, which cannot be")
    found.expect(abs(apart) <= _NEAR, f"the sampled peak is {apart / MIB:.0f} MiB off torch's reserve and the context")
    spikes = f"{_SPIKES} spikes of at most {max(took_ms):.0f} ms"
    found.expect(caught >= 0.8 * _SPIKES, f"only {caught} of {spikes} were seen")
    found.headline = f"{apart / MIB:+.0f} MiB off torch's peak, {caught} of {spikes} seen"
    return found


def reclaim(device: Device) -> Findings:
    """How long after kill -9 of a process the memory that it had is free again: 1 GiB, half, and all of the card."""
    found = Findings()
    with NvmlChild() as child:

        def used() -> int:
            return child.memory([device.uuid])[device.uuid].used or 0

        if not settled(found, child, device.uuid):
            return found
        idle = used()
        free = child.memory([device.uuid])[device.uuid].free or 0
        for name, size in (("1 GiB", GIB), ("half", free // 2), ("all", -GIB)):
            with Worker(device.env) as worker:
                worker.do("take", bytes=size)
                had = used() - idle
                began = time.monotonic()
                worker.kill()
                gone = time.monotonic() - began
                while used() > max(idle + _NEAR, 0) and time.monotonic() - began < _RECLAIM_S:
                    time.sleep(_LOOK_S)
                took = time.monotonic() - began
            left = used() - idle
            found.figures[name] = {
                "had_gib": gib(had),
                "process_gone_s": round(gone, 4),
                "memory_back_s": round(took, 4),
            }
            found.expect(
                had > 0.8 * (abs(size) if size > 0 else free - 2 * GIB), f"{name}: only {gib(had)} GiB were taken"
            )
            late = f"{name}: {left / MIB:.0f} MiB are still in use {_RECLAIM_S:g} s after kill -9"
            if not found.expect(left <= _NEAR, late):
                break  # what is left would be part of the next, and there is time for one such wait only
    slowest = max((one["memory_back_s"] for one in found.figures.values()), default=0.0)
    found.headline = f"memory is back {slowest:.2f} s after kill -9 at most"
    return found
