"""Measures how soon a harness notices that a boot has failed: a claim of ours, and SGLang's own `popen_launch_server`.

Both boot the same server, real SGLang on CPU, which dies for want of KV cache. The clock starts when the decisive line
arrives in the server's log, read by the same watcher for both, and stops at the harness's verdict (ours) or exception
(theirs). It must never favour ours: the boots alternate, and theirs runs with the settings that suit it best.

    python tools/cpu_stack.py && python benchmarks/fail_fast.py --pairs 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parent.parent

FLAGS = "--device cpu --load-format dummy --max-total-tokens 20000 --mem-fraction-static 0.0001"
DECISIVE = b"Loaded weights leave no GPU memory for the KV cache"

#: How often the watcher looks at the log: the resolution of the clock's start.
LOOK_EVERY_S = 0.005
TIMEOUT_S = 240

#: What `sglang.test` imports beyond the CPU stack. It goes into a folder of its own that only their harness's process
#: sees, at the end of its path, so that no package of the stack is replaced.
OVERLAY = (
    "datasets==5.2.0",
    "pandas==3.1.1",
    "pyarrow==26.0.1",
    "xxhash==4.1.0",
    "multiprocess==0.70.19",
    "python-dateutil==4.0.0",
    "pytz==2026.6",
    "six==1.17.0",
    "tzdata==2026.6",
)

THEIR_HARNESS = """
import json, sys, time
overlay, model, flags, port, answer = sys.argv[1:]
sys.path.append(overlay)
from sglang.test.test_utils import popen_launch_server

try:
    popen_launch_server(
        model, f"http://127.0.0.1:{port}", timeout=200, other_args=flags.split(), device="cpu"
    )
except Exception as error:
    noticed, told = time.monotonic(), f"{type(error).__name__}: {error}"
with open(answer, "w") as file:
    json.dump({"noticed": noticed, "told": told}, file)
"""

OUR_CLAIM = """
from pytest_gpuguard import ooms, serves

@serves("sglang", {model!r}, {flags!r})
@ooms("kv_pool")
def test_no_room_for_the_kv_cache():
    "0.01 % of the memory does not even hold the weights."
"""

#: The moment of our verdict is the moment pytest has the claim's report.
OUR_CLOCK = """
import json, os, time

def pytest_runtest_logreport(report):
    if report.when == "call":
        with open(os.environ["FAIL_FAST_ANSWER"], "w") as file:
            json.dump({"noticed": time.monotonic(), "told": report.outcome}, file)
"""


@dataclass(frozen=True)
class Sample:
    """One failed boot under one harness; both moments are seconds of the system's monotonic clock."""

    harness: str
    decisive: float
    noticed: float
    told: str

    @property
    def delay_s(self) -> float:
        """Return how long the harness took to notice."""
        return self.noticed - self.decisive


class LogWatcher(threading.Thread):
    """Notes when the decisive line arrives in a log file that may not exist yet."""

    def __init__(self, find_log: Callable[[], Path | None]) -> None:
        super().__init__(daemon=True)
        self.find_log = find_log
        self.seen: float | None = None
        self.give_up = threading.Event()

    def run(self) -> None:
        """Look for the log, then for the line in it, until told to give up."""
        log: Path | None = None
        while log is None and not self.give_up.wait(LOOK_EVERY_S):
            log = self.find_log()
        if log is None:
            return
        tail = b""
        with log.open("rb") as file:
            while not self.give_up.wait(LOOK_EVERY_S):
                tail = tail[-len(DECISIVE) :] + file.read()
                if DECISIVE in tail:
                    self.seen = time.monotonic()
                    return


def log_of_server(model: Path) -> Path | None:
    """Return the file that the standard error of this model's server goes to, None while there is no such server."""
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if any("sglang" in word for word in command) and str(model) in command:
                target = Path(f"/proc/{process.pid}/fd/2").resolve()
                if target.is_file():
                    return target
        except (psutil.Error, OSError):
            continue
    return None


def measure(
    harness: str, command: Sequence[str | Path], watcher: LogWatcher, folder: Path, **env: str | None
) -> Sample:
    """Run one harness to its end and return what the two clocks say.

    :raises SystemExit: when the harness gave no answer, or the decisive line never came: then there is no measurement.
    """
    answer = folder / "answer.json"
    output = folder / "output.log"
    environment = {**os.environ, "FAIL_FAST_ANSWER": str(answer), **{k: v for k, v in env.items() if v is not None}}
    for name in [name for name, value in env.items() if value is None]:
        environment.pop(name, None)
    watcher.start()
    with output.open("wb") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=TIMEOUT_S, cwd=folder)
    watcher.give_up.set()
    watcher.join()
    if not answer.exists() or watcher.seen is None:
        missing = "no verdict" if not answer.exists() else "no decisive line"
        raise SystemExit(f"{harness}: {missing}. The end of its output:\n{output.read_text(errors='replace')[-3000:]}")
    told = json.loads(answer.read_text())
    return Sample(harness, watcher.seen, told["noticed"], told["told"])


def measure_theirs(stack: Path, overlay: Path, folder: Path, port: int, offline: bool) -> Sample:
    """Boot under `popen_launch_server`.

    With HF_HUB_OFFLINE=1 it takes a failed boot for a missing download and boots a second time. Unless ``offline`` asks
    for that, it gets the variable unset; the model is a local folder. In CI mode it would check a model cache first:
    also unset.
    """
    python = stack / "venv" / "bin" / "python"
    script = folder / "their_harness.py"
    script.write_text(THEIR_HARNESS)
    command: list[str | Path] = [
        python,
        script,
        overlay,
        stack / "models" / "mid",
        FLAGS,
        str(port),
        folder / "answer.json",
    ]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # it starts the server as `sglang serve`
    watcher = LogWatcher(lambda: folder / "output.log" if (folder / "output.log").exists() else None)
    hub = "1" if offline else None
    return measure(
        "popen_launch_server", command, watcher, folder, PATH=path, HF_HUB_OFFLINE=hub, CI=None, SGLANG_IS_IN_CI=None
    )


def measure_ours(stack: Path, folder: Path) -> Sample:
    """Boot under a claim in its own pytest run; the server's log is found through the process that writes it."""
    model = folder / "mid"  # a path of this sample's own, so that its server can be told from any other
    model.symlink_to(stack / "models" / "mid")
    (folder / "test_claim.py").write_text(OUR_CLAIM.format(model=str(model), flags=FLAGS))
    (folder / "fail_fast_clock.py").write_text(OUR_CLOCK)
    command = [sys.executable, "-m", "pytest", "-p", "fail_fast_clock", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), f"--gpuguard-stack=cpu={stack / 'venv' / 'bin' / 'python'}", "test_claim.py"]
    sample = measure(
        "pytest-gpuguard", command, LogWatcher(lambda: log_of_server(model)), folder, PYTHONPATH=str(folder)
    )
    if sample.told != "passed":
        output = (folder / "output.log").read_text(errors="replace")
        raise SystemExit(f"pytest-gpuguard: the claim {sample.told}, so this is no measurement:\n{output[-3000:]}")
    return sample


def prepare_overlay(stack: Path) -> Path:
    """Install what `sglang.test` imports, once, and return the folder."""
    overlay = stack / "bench-overlay"
    done = overlay / ".done"
    if not done.exists() or done.read_text() != repr(OVERLAY):
        print(f"Installing what sglang.test imports into {overlay} (about 80 MB to download)", flush=True)
        pip: list[str | Path] = [
            stack / "venv" / "bin" / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, "--no-deps", "--upgrade", "--target", overlay, *OVERLAY], check=True)
        done.write_text(repr(OVERLAY))
    return overlay


def report(samples: Sequence[Sample]) -> None:
    """Print every sample, the medians and their ratio."""
    print("\nFrom the decisive line to the harness's word (s)")
    medians = {}
    for harness in dict.fromkeys(sample.harness for sample in samples):
        delays = [sample.delay_s for sample in samples if sample.harness == harness]
        medians[harness] = statistics.median(delays)
        print(f"  {harness:20}  {'  '.join(f'{delay:6.2f}' for delay in delays)}   median {medians[harness]:6.2f}")
    if len(medians) == 2:
        theirs, ours = medians["popen_launch_server"], medians["pytest-gpuguard"]
        print(f"  ratio of the medians: {theirs / ours:.1f}")


def main() -> None:
    """Run the pairs, theirs and ours alternating."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("GPUGUARD_CPU_STACK") or CHECKOUT / ".cpu-stack")
    parser.add_argument("--stack", type=Path, default=default, help="folder of the CPU stack")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=("theirs", "ours"), help="measure one harness alone")
    parser.add_argument("--port", type=int, default=18950, help="port for their servers (ours finds its own)")
    parser.add_argument("--offline", action="store_true", help="HF_HUB_OFFLINE=1, as on a runner without network")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the samples here")
    options = parser.parse_args()
    stack = options.stack.absolute()
    if not (stack / "stamp.json").exists() and not (stack / "venv").exists():
        parser.error(f"no CPU stack in {stack}: python tools/cpu_stack.py builds it")

    overlay = prepare_overlay(stack) if options.only != "ours" else stack
    samples: list[Sample] = []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory(prefix="fail-fast-") as scratch:
            for name in ("theirs", "ours"):
                if options.only not in (None, name):
                    continue
                folder = Path(scratch) / name
                folder.mkdir()
                theirs = name == "theirs"
                if theirs:
                    sample = measure_theirs(stack, overlay, folder, options.port, options.offline)
                else:
                    sample = measure_ours(stack, folder)
                print(f"pair {pair + 1}: {sample.harness} {sample.delay_s:.2f} s ({sample.told})", flush=True)
                samples.append(sample)
    report(samples)
    if options.json:
        rows = [{**asdict(sample), "delay_s": sample.delay_s} for sample in samples]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
