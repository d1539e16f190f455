r"""The meter of tok/s: its ceiling, what long replies cost, its accuracy, and how it compares with bench_serving.

    python benchmarks/meter.py ceiling long accuracy          # against tests/stream_server.py
    python benchmarks/meter.py sglang --stack .cpu-stack --datasets DIR [--rounds 3]

The stand-in server is a process of its own. *ceiling* serves 64 requests at a set pace, where every event wakes the
meter for itself, and takes the CPU time of the meter's process per event: its inverse is what one core can count. It
then lets the server send as fast as it can. *accuracy* compares with the set speed of the stand-in,
concurrency × tokens / (ttft + (tokens − 1) × itl), and with what it sent by its own account, which alone counts where
the machine kept it from its set speed. *sglang* boots the real server of the CPU stack (tools/cpu_stack.py) and
measures the same load with both, ours theirs theirs ours; bench_serving wants the package ``datasets``, which lies in
DIR (pip install --target DIR datasets). Exit status 1 if a law is broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pytest_gpuguard.measure.load import Load, Window  # noqa: E402
from pytest_gpuguard.measure.meter import Meter  # noqa: E402
from pytest_gpuguard.measure.stream import Reply, count_tokens  # noqa: E402
from tests.stream_server import stand_in  # noqa: E402

LAW_TRUE = 0.02
LAW_THEIRS = 0.03


def good(window: Window) -> Window:
    if window.failed:
        sys.exit(f"failed: {window.failed}")
    return window


def ceiling() -> bool:
    print("\nceiling: one process of the meter, 64 requests of 64 tokens")
    print(f"{'server':<34}{'events/s':>10}{'busy':>8}{'CPU/event':>12}{'ceiling/core':>14}")
    rows = [
        ("paced, 10 tok/s a request", ("--ttft", "0.1", "--itl", "0.1"), 16),
        ("paced, 50 tok/s a request", ("--ttft", "0.02", "--itl", "0.02"), 64),
        ("paced, 100 tok/s a request", ("--ttft", "0.01", "--itl", "0.01"), 64),
        ("as fast as it can", (), 64),
    ]
    for name, options, length in rows:
        with stand_in(*options) as url, Meter(url, {}, Load(64, output_len=length), processes=1) as meter:
            meter.warm_up()
            window = good(meter.sample(5.0))
            cost = meter.busy * window.seconds / window.tokens
            figures = f"{window.output_toks:>10.0f}{meter.busy:>8.0%}{cost * 1e6:>9.0f} µs{1 / cost:>14.0f}"
            print(f"{name:<34}{figures}", *window.doubts, sep="  ")
    return True


def long() -> bool:
    print("\nlong: the cost of cumulative events (text and ids so far), 8 requests, 250 tok/s each")
    print(f"{'output_len':>10}{'events/s':>10}{'busy':>8}{'CPU/event':>12}")
    for length in (64, 512, 2048):
        load = Load(8, output_len=length)
        with stand_in("--itl", "0.004", "--ttft", "0.004") as url, Meter(url, {}, load, processes=1) as meter:
            window = good(meter.sample(1.0, rounds=1))
            cost = meter.busy * window.seconds / window.tokens
            print(f"{length:>10}{window.output_toks:>10.0f}{meter.busy:>8.0%}{cost * 1e6:>9.0f} µs")
    for length in (64, 512, 2048):
        meta = {"id": "0" * 32, "finish_reason": None, "prompt_tokens": 128, "completion_tokens": length}
        event = json.dumps({"text": " word" * length, "output_ids": [1234] * length, "meta_info": meta}).encode()
        reply = Reply(0.0)
        search, whole = timed(partial(count_tokens, event, reply)), timed(partial(json.loads, event))
        print(f"event of token {length}: {len(event):>6} bytes, search {search:.1f} µs, json.loads {whole:.1f} µs")
    return True


def timed(act: Callable[[], object], times: int = 500) -> float:
    """Microseconds of one call, the least of five tries."""
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times):
            act()
        best = min(best, (time.perf_counter() - start) / times * 1e6)
    return best


def accuracy(samples: int) -> bool:
    print(f"\naccuracy: {samples} windows each; 64 tokens, ttft 100 ms, itl 20 ms; noise as a share of each time")
    print(f"{'':>12}{'noise':>6}{'set tok/s':>11}{'ours':>9}{'off':>8}{'worst':>8}{'sent':>8}  doubts")
    fine = True
    for concurrency in (1, 8, 64):
        for noise in (0.0, 0.1, 0.3):
            with stand_in("--ttft", "0.1", "--itl", "0.02", "--noise", str(noise)) as url:
                with Meter(url, {}, Load(concurrency, output_len=64)) as meter:
                    meter.warm_up()
                    windows = [good(meter.sample(3.0)) for _ in range(samples)]
                true = concurrency * 64 / (0.1 + 63 * 0.02)
                sent = 0
                for window in windows:
                    with urllib.request.urlopen(f"{url}/truth?{window.started}&{window.ended}") as answer:
                        sent += json.load(answer)
            ours = sum(window.tokens for window in windows) / sum(window.seconds for window in windows)
            worst = max((window.output_toks / true - 1 for window in windows), key=abs)
            off_sent = sum(window.tokens for window in windows) / sent - 1
            # Noise, and a busy machine, move the stand-in from its set speed: then what it sent is the truth.
            moved = ours / true / (1 + off_sent) - 1
            held = abs(off_sent) <= LAW_TRUE and (abs(moved) > LAW_TRUE / 2 or abs(ours / true - 1) <= LAW_TRUE)
            fine = fine and held
            remarks = ["BROKEN"] * (not held) + [f"the stand-in sent {moved:+.1%} off its set speed"] * (
                abs(moved) > LAW_TRUE / 2
            )
            remarks += sorted({doubt for window in windows for doubt in window.doubts})
            print(
                f"{concurrency:>3} requests{noise:>6}{true:>11.1f}{ours:>9.1f}{ours / true - 1:>+8.2%}{worst:>+8.2%}"
                f"{off_sent:>+8.2%}  {'; '.join(remarks)}"
            )
    return fine


def apart() -> tuple[set[int], set[int]]:
    """The cores of the server and those of either client: else a client that needs more CPU slows the server down."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores at least, one for the server and one for the clients")
    return set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])


@contextmanager
def sglang_server(stack: Path) -> Iterator[str]:
    """The real server on CPU, on cores of its own."""
    mine, clients = apart()
    os.sched_setaffinity(0, mine)  # inherited by what is started
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [str(stack / "venv/bin/python"), "-m", "sglang.launch_server", "--model-path", str(stack / "models/tiny")]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command += ["--max-total-tokens", "16384", "--log-level", "warning"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.sched_setaffinity(0, clients)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(180):
            if process.poll() is not None:
                sys.exit("the server died")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def theirs(stack: Path, datasets: Path, url: str, load: Load, prompts: int) -> tuple[float, float]:
    """(output tok/s, mean TTFT in seconds) of bench_serving for the same load."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.jsonl"
        command = [str(stack / "venv/bin/python"), "-m", "sglang.bench_serving", "--backend", "sglang"]
        command += ["--base-url", url, "--model", str(stack / "models/tiny"), "--dataset-name", "random-ids"]
        command += ["--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)]
        command += ["--random-range-ratio", "1.0", "--num-prompts", str(prompts)]
        command += [
            "--max-concurrency",
            str(load.concurrency),
            "--output-file",
            str(file),
            "--seed",
            str(time.time_ns() % 10**6),
        ]
        # Token ids, as ours: random ids made into text are more tokens than asked for when they come back from it.
        command += ["--warmup-requests", "1", "--tokenize-prompt"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(datasets)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode or not file.exists():
            sys.exit(f"bench_serving failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}")
        result = json.loads(file.read_text().splitlines()[-1])
    assert result["completed"] == prompts
    assert result["total_output_tokens"] == prompts * load.output_len
    return result["output_throughput"], result["mean_ttft_ms"] / 1000


def sglang(
    stack: Path, datasets: Path, given: str | None, rounds: int, requests: int, concurrencies: list[int]
) -> bool:
    fine = True
    with nullcontext(given) if given else sglang_server(stack) as url:
        for concurrency in concurrencies:
            # A server that runs already may know the prompts of an earlier run.
            load = Load(concurrency, input_len=128, output_len=64, seed=time.time_ns() % 10**9)
            print(f"\nsglang: {concurrency} requests, 128 tokens in, 64 out; ours theirs theirs ours, {rounds} rounds")
            rates: dict[str, list[float]] = {"ours": [], "theirs": []}
            with Meter(url, {}, load) as meter:
                good(meter.warm_up())
                meter.pause()
                theirs(stack, datasets, url, load, concurrency)
                for who in ("ours", "theirs", "theirs", "ours") * rounds:
                    doubts: tuple[str, ...] = ()
                    if who == "theirs":
                        rate, ttft = theirs(stack, datasets, url, load, requests * concurrency)
                    else:
                        window = good(meter.sample(10.0))
                        meter.pause()
                        rate, doubts = window.output_toks, window.doubts
                        ttft = window.ttft_s.mean if window.ttft_s else math.nan
                    rates[who].append(rate)
                    print(f"  {who:<7}{rate:8.1f} tok/s  ttft {ttft * 1000:6.1f} ms", *doubts, sep="  ", flush=True)
            # A block's own ratio is free of what drifts slowly on this machine.
            pairs = zip(rates["ours"], rates["theirs"], strict=True)
            logs = [math.log(ours / others) for ours, others in pairs]
            blocks = [(a + b) / 2 for a, b in zip(logs[::2], logs[1::2], strict=True)]
            ratio = math.exp(statistics.mean(blocks))
            error = statistics.stdev(blocks) / math.sqrt(len(blocks)) if rounds > 1 else math.nan
            held = abs(ratio - 1) <= LAW_THEIRS
            fine = fine and held
            print(f"  {rounds} blocks: {ratio:.4f}, standard error {error:.1%}{'' if held else '  BROKEN'}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["ceiling", "long", "accuracy", "sglang"])
    parser.add_argument("--samples", type=int, default=5, help="windows of accuracy")
    parser.add_argument("--stack", type=Path, default=Path(os.environ.get("GPUGUARD_CPU_STACK", ROOT / ".cpu-stack")))
    parser.add_argument("--datasets", type=Path, help="a folder with the package datasets")
    parser.add_argument("--url", help="an SGLang server that runs already, for sglang")
    parser.add_argument("--requests", type=int, default=32, help="of bench_serving per slot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="of the comparison")
    args = parser.parse_args()
    fine = []
    if "ceiling" in args.what:
        fine.append(ceiling())
    if "long" in args.what:
        fine.append(long())
    if "accuracy" in args.what:
        fine.append(accuracy(args.samples))
    if "sglang" in args.what:
        if args.datasets is None:
            parser.error("sglang needs --datasets")
        fine.append(sglang(args.stack, args.datasets, args.url, args.rounds, args.requests, args.concurrency))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
