"""All checks, one after the other, each in a process of its own with a deadline; a line for each, and one JSON file.

It takes an idle GPU that nobody has leased, or none: what others run there is never disturbed. Exit status: 0 when all
hold, 1 when one does not, 2 when there is no GPU to check, or it cannot be had.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .result import BASELINE, Device, Findings, Result, gib
from .work import STAND_IN

if TYPE_CHECKING:
    from pytest_gpuguard.facts.gpu import Gpu, Rig
    from pytest_gpuguard.facts.nvml import NvmlChild

#: Each check (the module here, and its function) and its deadline in seconds, in the order in which they are made.
CHECKS: Final[Mapping[str, tuple[str, str, float]]] = {
    "facts": ("facts", "facts", 60.0),
    "nvml-costs": ("facts", "costs", 45.0),
    "memory": ("facts", "memory", 90.0),
    "out-of-memory": ("memory", "out_of_memory", 150.0),
    "sampler": ("memory", "sampled", 90.0),
    "reclaim": ("memory", "reclaim", 150.0),
    "leases": ("leases", "leases", 200.0),
    "command-server": ("served", "served", 180.0),
}
#: The whole run, with what it takes to end it.
TOTAL_S: Final = 460.0
REPORT: Final = "device-check.json"
LOG: Final = "device-check.log"
_TORCH_S: Final = 120.0
#: Before 3.11 python itself reads no TOML.
_OLD: Final = ("tomli",) if sys.version_info < (3, 11) else ()
_IMPORTS: Final = ("torch", "pytest", "httpx", "filelock", "psutil", "packaging", *_OLD)
_TORCH: Final = (
    "import json, torch\n"
    "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, 'there': torch.cuda.is_available()}))"
)


class NoGpu(RuntimeError):
    """There is no GPU that could be checked; the text says why, and what helps."""


def main(words: Sequence[str], script: str) -> int:
    """``OUTDIR``; returns the exit status. ``script`` is what is run again for each check."""
    parser = argparse.ArgumentParser(prog="device-check", description=__doc__, allow_abbrev=False)
    parser.add_argument("outdir", type=Path, help=f"where {REPORT} and {LOG} are written")
    parser.add_argument("--one", nargs=3, metavar=("CHECK", "UUID", "VISIBLE"), help=argparse.SUPPRESS)
    given = parser.parse_args(list(words))
    if given.one is not None:
        return _one(given.one[0], Device(given.one[1], given.one[2], given.outdir))
    began = time.monotonic()
    try:
        given.outdir.mkdir(parents=True, exist_ok=True)
        (given.outdir / REPORT).unlink(missing_ok=True)  # of a run before this one
        (given.outdir / LOG).write_text("", encoding="utf-8")
    except OSError as error:
        print(
            f"device-check: {error.filename}: {error.strerror}: give a folder that can be written to", file=sys.stderr
        )
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with idle_gpu() as (rig, gpu):
            _needs()
            return _run(given.outdir, script, rig, gpu, _torch(gpu), began)
    except NoGpu as error:
        print(f"device-check: nothing was checked: {error}")
        _write(given.outdir, {"ok": False, "why": f"nothing was checked: {error}", "checks": []}, "")
        return 2
    except KeyboardInterrupt:
        if not (given.outdir / REPORT).exists():
            _write(given.outdir, {"ok": False, "why": "stopped before the first check had ended", "checks": []}, "")
        print(f"device-check: stopped; what was found until then: {given.outdir / REPORT}")
        return 1


def _interrupt(number: int, frame: object) -> None:
    """Being asked to end is like Ctrl-C: the check that runs is ended, and the GPU given back."""
    raise KeyboardInterrupt


def _needs() -> None:
    wanted = [name for name in _IMPORTS if name != "torch" or not os.environ.get(STAND_IN)]
    missing = [name for name in wanted if not _is_there(name)]
    if missing:
        said = f"{sys.executable} lacks {', '.join(missing)}"
        raise NoGpu(f"{said}: run this with a python that has {', '.join(_IMPORTS)}")


def _is_there(name: str) -> bool:
    """Whether a module can be imported; it is not."""
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


@contextmanager
def idle_gpu() -> Iterator[tuple[Rig, Gpu]]:
    """A GPU that nobody uses, leased for as long as it is checked. Raises NoGpu."""
    from pytest_gpuguard.claims.gpuset import GpuChoice
    from pytest_gpuguard.facts.faults import HostFault
    from pytest_gpuguard.facts.nvml import NvmlChild
    from pytest_gpuguard.lease.clean import CleanRoom
    from pytest_gpuguard.lease.cleanroom import NotClean, hand_out
    from pytest_gpuguard.lease.dirs import LockDirError
    from pytest_gpuguard.lease.flocks import LeaseTimeout

    with NvmlChild() as child:
        try:
            rig = child.rig()
            if not rig.leasable:
                raise NoGpu(f"{rig.describe()}" + (f" ({rig.reason})" if rig.reason and rig.gpus else ""))
            uuids = {gpu.uuid: gpu.device for gpu in rig.leasable if not gpu.unified}
            if not uuids:
                raise NoGpu(f"unified memory: NVML tells nothing of it ({rig.describe()})")
            room = CleanRoom(
                lambda asked: {one: child.memory([uuids[one]])[uuids[one]].used for one in asked},
                lambda asked: {one: child.processes([uuids[one]])[uuids[one]] for one in asked},
                reclaim_s=10.0,
            )
            lease = hand_out(GpuChoice(tuple(uuids)), 1, room, 2.0, test="device-check")
        except (NotClean, LeaseTimeout) as error:
            raise NoGpu(f"every GPU is in use, and what others run is not disturbed: {error}") from None
        except LockDirError as error:
            raise NoGpu(str(error)) from None
        except HostFault as fault:
            raise NoGpu(f"{fault.cause}. {fault.cure}") from None
        try:
            yield rig, rig.gpu(lease.uuids[0])
        finally:
            if _is_idle(child, rig.gpu(lease.uuids[0])):
                lease.give_back()
            lease.release()


def _is_idle(child: NvmlChild, gpu: Gpu) -> bool:
    """Whether nothing of ours is left there, so that whoever comes next need not wait for it."""
    from pytest_gpuguard.facts.faults import HostFault

    try:
        return (child.memory([gpu.device])[gpu.device].used or 0) <= BASELINE
    except HostFault:
        return False


def _visible(gpu: Gpu) -> str:
    return gpu.device if gpu.mig_asked else str(gpu.index)


def _torch(gpu: Gpu) -> dict[str, Any]:
    """Which torch there is, and that it sees the GPU. Raises NoGpu."""
    device = Device(gpu.device, _visible(gpu), Path())
    if os.environ.get(STAND_IN):
        return {"version": "a stand-in", "cuda": None, "there": True}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], env=device.env, capture_output=True, timeout=_TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoGpu(f"torch did not import and look for a GPU within {_TORCH_S:g} s") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout.decode(errors="replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise NoGpu(f"torch does not import: {said[0]}") from None
    if not found["there"]:
        raise NoGpu(f"torch {found['version']} (CUDA {found['cuda']}) sees no CUDA device, and NVML sees {gpu.name}")
    return found


# ------------------------------------------------------------------------------------------------------------ the run


def _run(outdir: Path, script: str, rig: Rig, gpu: Gpu, torch: Mapping[str, Any], began: float) -> int:
    report: dict[str, Any] = {
        "card": gpu.name,
        "sm": gpu.sm,
        "memory_gib": None if gpu.memory.total is None else gib(gpu.memory.total),
        "driver": rig.driver,
        "driver_cuda": rig.cuda,
        "torch": torch["version"],
        "torch_cuda": torch["cuda"],
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "ok": False,
        "checks": [],
    }
    print(f"{rig.describe()}; checked: {gpu.uuid} with torch {torch['version']} (CUDA {torch['cuda']})", flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="device-check-"))
    results: list[Result] = []
    try:
        for name, (_, _, deadline_s) in CHECKS.items():
            left = TOTAL_S - (time.monotonic() - began)
            result, log = run_check(script, name, gpu, scratch / name, min(deadline_s, left))
            results.append(result)
            print(f"{'ok  ' if result.ok else 'FAIL'} {name:<15} {result.seconds:6.1f} s  {result.said}", flush=True)
            report["checks"] = [one.to_dict() for one in results]
            report["ok"] = len(results) == len(CHECKS) and all(one.ok for one in results)
            report["seconds"] = round(time.monotonic() - began, 1)
            _write(outdir, report, f"=== {name}: {result.said}\n{log}\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    held = sum(one.ok for one in results)
    print(f"{held} of {len(results)} checks hold, in {report['seconds']:.0f} s; figures: {outdir / REPORT}")
    return 0 if report["ok"] else 1


def _write(outdir: Path, report: Mapping[str, Any], log: str) -> None:
    """What there is so far: whoever stops us keeps that."""
    scratch = outdir / f".{REPORT}.tmp"
    scratch.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    scratch.replace(outdir / REPORT)
    with (outdir / LOG).open("a", encoding="utf-8") as file:
        file.write(log)


def run_check(script: str, name: str, gpu: Gpu, scratch: Path, deadline_s: float) -> tuple[Result, str]:
    """One check in a process of its own; what it printed besides is the log. Ends it and all of its at the deadline."""
    began = time.monotonic()
    if deadline_s < 5:
        return Result(name, False, 0.0, f"no time was left of {TOTAL_S:g} s"), ""
    scratch.mkdir()
    locks = scratch / "locks"
    locks.mkdir(mode=0o700)
    words = [sys.executable, script, str(scratch), "--one", name, gpu.device, _visible(gpu)]
    env = {**os.environ, "GPUGUARD_LOCK_DIR": str(locks), "PYTHONUNBUFFERED": "1"}
    with (scratch / "output").open("wb") as output:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(deadline_s)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _kill_group(process)
    text = (scratch / "output").read_text(encoding="utf-8", errors="replace")[-20000:]
    seconds = time.monotonic() - began
    if late:
        return Result(name, False, seconds, f"it did not end within {deadline_s:.0f} s"), text
    try:
        told = json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = text.strip().splitlines()[-1:] or ["it said nothing"]
        return Result(name, False, seconds, f"it ended with {process.returncode}: {last[0][:200]}"), text
    return Result(name, told["ok"], seconds, told["said"], told["figures"]), told["log"] + text


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a check and what it left in its session; servers have a warden, which ends with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it is gone
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        pass  # stuck in the driver: it goes as soon as that lets it, and the other checks are made meanwhile


def _one(name: str, device: Device) -> int:
    """In the process of one check: make it, and write what it found."""
    from .workload import die_with_parent

    die_with_parent()
    module, function, _ = CHECKS[name]
    try:
        found = getattr(import_module(f".{module}", __package__), function)(device)
    except Exception as error:  # whatever it is, this check does not hold, and the others are made all the same
        import traceback

        found = Findings(problems=[f"{type(error).__name__}: {error}"[:400]], log=traceback.format_exc())
    told = {"ok": not found.problems, "said": found.said, "figures": found.figures, "log": found.log}
    (device.scratch / "result.json").write_text(json.dumps(told), encoding="utf-8")
    return 0
