"""Measures the predictor on boots that somebody else booted: weights, KV tokens, default fractions, verdicts, and time.

A folder of measured boots is an argument (`tests/measured_boots` is one; `boot_cases.py` states what is made of the
words of a boot). Inputs are the card, the configuration, the release and the flags. An error is |predicted - measured|
/ measured; the 90th percentile interpolates. A fraction is right to the last printed digit, a verdict by its outcome,
which names the phase. aiconfigurator gets the same card, configuration and flags where a python that has it is given,
with the fraction that was told, printed or else predicted by ours. It must never drop a boot silently: what is not
compared is listed with the reason, and so is what is counted apart.

    python benchmarks/predict.py tests/measured_boots [--aiconfigurator VENV/bin/python] [--no-timing] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuguard.predict.predictor import predict
from pytest_gpuguard.predict.values import PredictError, Prediction

if TYPE_CHECKING:
    from benchmarks.boot_cases import NUMBERS, Case, read_cases
else:  # a script's own folder is where it imports from
    from boot_cases import NUMBERS, Case, read_cases

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-c", "from pytest_gpuguard.cli import main; main(prog_name='gpuguard')", "predict"]
#: aiconfigurator's systems that have data; another card is its H100 with the card's size.
SYSTEMS = {
    "rtx-pro-6000-server": "rtx_pro_6000_server",
    "rtx-pro-6000-workstation": "rtx_pro_6000_server",
    "rtx-pro-6000-maxq": "rtx_pro_6000_server",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h200": "h200_sxm",
    "h100": "h100_sxm",
    "a100-80": "a100_sxm",
    "l40s": "l40s",
}


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile, interpolated between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def predicted(case: Case) -> Prediction | str:
    """The prediction, or why there is none."""
    assert case.config is not None
    assert case.box is not None
    try:
        return predict(
            case.config, case.box, engine=case.engine, version=case.version, flags=case.flags, measured=case.inputs
        )
    except PredictError as error:
        return f"refused: {error}"


def outcome(prediction: Prediction) -> str:
    """A verdict in the words of a boot's outcome."""
    return "ready" if prediction.fits else prediction.verdict


def same_digits(value: float | None, printed: float) -> bool:
    """Whether the value is what was printed, to the last printed digit."""
    shown = Decimal(repr(printed))
    return value is not None and Decimal(repr(value)).quantize(shown) == shown


def found(number: str, prediction: Prediction) -> Any:
    """What was predicted of this number."""
    return {
        "weights": prediction.weights_gib,
        "tokens": prediction.kv_tokens,
        "fraction": prediction.mem_fraction_static,
        "verdict": outcome(prediction),
    }[number]


def compare(case: Case, result: Prediction | str) -> dict[str, Any]:
    """Error or rightness of each number that was measured and may be compared, and the reasons for the others."""
    row: dict[str, Any] = {
        "id": case.id,
        "model": case.model,
        "engine": case.engine,
        "errors": {},
        "skipped": {},
        "inside": {},
    }
    for number in NUMBERS:
        measured = case.measured(number)
        if measured is None or (number == "verdict" and not re.match(r"ready|oom\.", measured)):
            continue
        if number in case.skipped:
            row["skipped"][number] = case.skipped[number]
            continue
        if isinstance(result, str):
            row["skipped"][number] = result
            continue
        value = found(number, result)
        if number == "fraction":
            row["errors"][number] = 0.0 if same_digits(value, measured) else 1.0
        elif number == "verdict":
            row["errors"][number] = 0.0 if value == measured else 1.0
        elif value is None:
            row["skipped"][number] = f"not predicted ({result.verdict}, {result.phase})"
        else:
            row["errors"][number] = abs(value - measured) / measured
            bar = result.bars.get({"weights": "weights_gib", "tokens": "kv_tokens"}[number])
            if bar is not None and value > 0:
                row["inside"][number] = abs(value - measured) <= bar
    return row


def cell(number: str, case: Case, row: dict[str, Any], result: Prediction | str) -> str:
    """One number of the table of boots."""
    if number not in row["errors"]:
        return "-" if number not in row["skipped"] else "skipped"
    assert isinstance(result, Prediction)
    value, measured, error = found(number, result), case.measured(number), row["errors"][number]
    if number == "verdict":
        text = measured if not error else f"{value} NOT {measured}"
    elif number == "fraction":
        text = f"{value:.15g}" if not error else f"{value} NOT {measured}"
    else:
        text = f"{value:.2f}/{measured:.2f} {error:.1%}" if number == "weights" else f"{value}/{measured} {error:.1%}"
    return text + (" (apart)" if number in case.apart else "")


def line(name: str, errors: Sequence[float], number: str) -> str:
    """One sum."""
    if not errors:
        return f"{name:58} none"
    if number in ("fraction", "verdict"):
        return f"{name:58} {errors.count(0.0)} of {len(errors)} right"
    return f"{name:58} n {len(errors):2}  median {statistics.median(errors):.2%}  p90 {quantile(errors, 0.9):.2%}"


def sums(cases: Sequence[Case], rows: Sequence[dict[str, Any]], theirs: dict[str, Any] | None) -> list[str]:
    """The sums of both engines, with what is counted apart below what counts."""
    shown = []
    for engine in ("sglang", "vllm"):
        for number in NUMBERS:
            pairs = [(c, r["errors"][number]) for c, r in zip(cases, rows, strict=True) if number in r["errors"]]
            pairs = [pair for pair in pairs if pair[0].engine == engine]
            if not pairs:
                continue
            plain = [(case, error) for case, error in pairs if number not in case.apart]
            shown.append(line(f"{engine} {number}", [error for _, error in plain], number))
            for why in sorted({case.apart[number] for case, _ in pairs if number in case.apart}):
                some = [error for case, error in pairs if case.apart.get(number) == why]
                shown.append(line(f"    apart, {why}"[:57], some, number))
            if len(plain) < len(pairs):
                shown.append(line(f"    all {engine} {number}", [error for _, error in pairs], number))
            inside = [r["inside"][number] for r in rows if r["engine"] == engine and number in r["inside"]]
            if inside:
                shown.append(f"{'    within the error bar that was told':58} {sum(inside)} of {len(inside)}")
            if theirs is not None and number in ("weights", "tokens"):
                shown += beside(f"{engine} {number}", number, plain, theirs)
    both = [r["errors"]["weights"] for r in rows if "weights" in r["errors"]]
    shown.append(line("both engines: weights", both, "weights"))
    if theirs is not None:
        every = [(c, r["errors"]["weights"]) for c, r in zip(cases, rows, strict=True) if "weights" in r["errors"]]
        shown += beside("both engines: weights", "weights", every, theirs)
    return shown


def beside(name: str, number: str, pairs: Iterable[tuple[Case, float]], theirs: dict[str, Any]) -> list[str]:
    """The errors of aiconfigurator on the same boots, and ours on those that it answered."""
    ours, other, by_model = [], [], []
    for case, error in pairs:
        value = theirs[case.id][number]
        if value is not None:
            ours.append(error)
            other.append(abs(value - case.measured(number)) / case.measured(number))
            if theirs[case.id]["way"] == "model":
                by_model.append(other[-1])
    return [
        line("    aiconfigurator on them", other, number),
        line("    aiconfigurator, without its naive fall-back", by_model, number),
        line("    ours, where aiconfigurator answers", ours, number),
    ]


def reasons(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not compared, by reason."""
    why: dict[str, list[str]] = {}
    for row in rows:
        for number, reason in row["skipped"].items():
            why.setdefault(reason, []).append(f"{row['id']} {number}")
    return [f"  {reason}: {', '.join(names)}" for reason, names in sorted(why.items())]


def flag(case: Case, *names: str) -> str | None:
    """The value of a flag."""
    for name, value in zip(case.flags, case.flags[1:], strict=False):
        if name in names:
            return value
    return None


def ask_aiconfigurator(python: str, cases: Sequence[Case], results: Sequence[Prediction | str]) -> dict[str, Any]:
    """What aiconfigurator says of the same boots, by id."""
    requests = []
    for case, result in zip(cases, results, strict=True):
        assert case.config is not None
        assert case.box is not None
        config = Path(case.config)
        quant = config.with_name(config.name.replace("config.json", "hf_quant_config.json"))
        told = flag(case, "--mem-fraction-static", "--gpu-memory-utilization")
        fraction = float(told) if told else case.fraction
        if fraction is None and case.engine == "vllm":
            fraction = 0.9
        if fraction is None and isinstance(result, Prediction):
            fraction = result.mem_fraction_static
        whole = json.loads(config.read_text())
        keys = {**whole, **whole.get("text_config", {})}
        experts = any(keys.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
        attention = "--enable-dp-attention" in case.flags
        requests.append(
            {
                "id": case.id,
                "config": str(config),
                "quant": str(quant) if quant != config and quant.is_file() else None,
                "system": SYSTEMS.get(case.card or "", "h100_sxm"),
                "mib": case.box.total_mib,
                "backend": case.engine,
                "tp": int(flag(case, "--tp-size", "--tensor-parallel-size") or 1),
                "pp": int(flag(case, "--pp-size", "--pipeline-parallel-size") or 1),
                "ep": int(flag(case, "--ep-size") or 1),
                "dp": int(flag(case, "--dp-size") or 1) if attention else 1,
                "experts": experts,
                "kv_dtype": flag(case, "--kv-cache-dtype"),
                "fraction": fraction,
                "chunk": max(int(flag(case, "--chunked-prefill-size", "--max-num-batched-tokens") or 8192), 1),
                "nextn": 1 if flag(case, "--speculative-algorithm", "--speculative-config") else 0,
            }
        )
    worker = [python, str(HERE / "aiconfigurator_worker.py")]
    done = subprocess.run(worker, input=json.dumps(requests), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} has no aiconfigurator that answers:\n{done.stderr[-2000:]}")
    answers = {answer["id"]: answer for answer in json.loads(done.stdout)}
    for case in cases:  # it knows no decode context parallelism, which multiplies the tokens
        times = int(flag(case, "--decode-context-parallel-size") or 1)
        tokens = answers[case.id]["tokens"]
        answers[case.id]["tokens"] = tokens * times if tokens else None
    return answers


def seconds(call: Callable[[], object], times: int) -> float:
    """The median time of a call."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def timing(cases: Sequence[Case]) -> list[str]:
    """How long predictions, the command and a search take."""
    each = [seconds(lambda case=case: predicted(case), 5) * 1000 for case in cases]  # type: ignore[misc]
    shown = [
        f"predict(): median {statistics.median(each):.1f} ms, longest {max(each):.1f} ms ({len(each)} boots, 5 each)"
    ]
    large = [case for case in cases if case.engine == "sglang" and case.card and case.box and case.box.count == 8]
    large = large or [case for case in cases if case.engine == "sglang" and case.card]
    case = large[0]
    assert case.box is not None
    assert case.config is not None
    rig = f"sim:{case.card}:8"
    base = [*COMMAND, "--model", case.config, "--rig", rig, "--engine", f"sglang=={case.version}", "--json"]
    for name, command in (("the command", [*base, "--", *case.flags]), ("--search over 8 GPUs", [*base, "--search"])):
        first = subprocess.run(command, capture_output=True, text=True, check=False)
        if first.returncode not in (0, 1):
            shown.append(f"{name}: not there ({(first.stderr.strip().splitlines() or ['no message'])[-1]})")
            continue
        took = seconds(lambda command=command: subprocess.run(command, capture_output=True, check=False), 5)  # type: ignore[misc]
        shown.append(f"{name}: median {took:.2f} s of 5 ({case.id}, {rig}), Python's start included")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with boots.jsonl or boots.json, and configs/")
    parser.add_argument("--aiconfigurator", metavar="PYTHON", help="a python that has aiconfigurator, to be run beside")
    parser.add_argument("--engine", choices=["sglang", "vllm"], help="only the boots of this engine")
    parser.add_argument("--no-timing", action="store_true", help="errors only")
    parser.add_argument("--sums-only", action="store_true", help="do not list the boots")
    parser.add_argument("--json", type=Path, help="write every comparison to a file")
    options = parser.parse_args()
    every = [case for case in read_cases(options.folder) if options.engine in (None, case.engine)]
    cases = [case for case in every if case.config is not None and case.box is not None]
    results = [predicted(case) for case in cases]
    rows = [compare(case, result) for case, result in zip(cases, results, strict=True)]
    theirs = ask_aiconfigurator(options.aiconfigurator, cases, results) if options.aiconfigurator else None
    if not options.sums_only:
        print("predicted/measured and error of each boot; (apart): counted apart")
        for case, row, result in zip(cases, rows, results, strict=True):
            cells = [f"{number} {cell(number, case, row, result)}" for number in NUMBERS if case.measured(number)]
            print(f"{case.id} {case.engine} {case.version} {case.model[:40]}: {'; '.join(cells)}")
    print(f"\n{len(every)} boots")
    print("\n".join(sums(cases, rows, theirs)))
    left = [compare(case, "no known card") for case in every if case not in cases]
    print("\nnot compared:")
    print("\n".join(reasons([*rows, *left])))
    if theirs is not None:
        print("\naiconfigurator gave no number:")
        print("\n".join(f"  {name}: {answer['error'][:160]}" for name, answer in theirs.items() if answer["error"]))
    if options.json:
        details = [
            {**row, "predicted": result if isinstance(result, str) else result.to_dict()}
            for row, result in zip(rows, results, strict=True)
        ]
        options.json.write_text(json.dumps({"boots": details, "aiconfigurator": theirs}, indent=1, default=str))
    if not options.no_timing:
        print("\n" + "\n".join(timing(cases)))


if __name__ == "__main__":
    main()
