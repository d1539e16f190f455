"""Collection of 10,000 decorated tests against the same suite gated with plain ``skipif``.

    python benchmarks/collect.py [--tests 10000] [--pairs 5]

Both suites carry the same number of marks per test. Interleaved, each run is a process of its own; prints the ratio
of the medians. Goal: at most 1.1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLAIMS = """
@needs_sm120
@needs_gpus({gpus}, vram="96GB")
@serves("sglang", "model-{model}", "--mem-fraction-static 0.9", layout="TP{gpus}")
@fits(kv_tokens=">=32768")
def test_{number}(): ...
"""
PLAIN = """
@pytest.mark.skipif(sys.platform == "x", reason="needs SM120")
@pytest.mark.skipif({gpus} > 99, reason="needs 8 GPUs")
@pytest.mark.skipif(len("model-{model}") > 99, reason="no such model")
@pytest.mark.skipif(sys.maxsize < 32768, reason="too small")
def test_{number}(): ...
"""


#: Bytecode may be written, as on an installed plugin: compiling anew in every run is not what is measured.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def write(folder: Path, head: str, body: str, tests: int) -> None:
    """A suite of files of 100 tests each, as people write them."""
    for file in range(0, tests, 100):
        chunk = (body.format(number=file + i, gpus=2 ** (i % 4), model=i % 20) for i in range(100))
        (folder / f"test_{file:05d}.py").write_text(head + "".join(chunk))


def once(folder: Path) -> float:
    """Seconds that one collection took."""
    command = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider", str(folder)]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False, env=ENV)
    elapsed = time.perf_counter() - started
    assert done.returncode == 0, done.stdout[-2000:]
    return elapsed


def main() -> int:
    """Measure and print; exit status 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        claims, plain = Path(base, "claims"), Path(base, "plain")
        claims.mkdir()
        plain.mkdir()
        write(claims, "from pytest_gpuguard import fits, needs_gpus, needs_sm120, serves\n", CLAIMS, arguments.tests)
        write(plain, "import sys\nimport pytest\n", PLAIN, arguments.tests)
        once(claims), once(plain)  # warm: assertion rewriting writes its bytecode
        times: dict[Path, list[float]] = {claims: [], plain: []}
        for number in range(arguments.pairs):
            for folder in (claims, plain) if number % 2 else (plain, claims):
                times[folder].append(once(folder))
    ours, theirs = statistics.median(times[claims]), statistics.median(times[plain])
    ratio = ours / theirs
    print(f"{arguments.tests} tests, {arguments.pairs} interleaved pairs: claims {ours:.2f} s, skipif {theirs:.2f} s")
    print(f"ratio {ratio:.3f}, goal <= 1.1: {'PASS' if ratio <= 1.1 else 'FAIL'}")
    return int(ratio > 1.1)


if __name__ == "__main__":
    sys.exit(main())
