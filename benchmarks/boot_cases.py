"""Turns measured boots into inputs of the predictor: card, configuration, release, flags, and what may be compared.

A folder holds `boots.jsonl` (a boot as it was read in a public log, in that log's words) or `boots.json` (the same
with the words already mapped), and `configs/`. It must never use a measured number as an input, with one exception that
is counted apart: a card that the log does not name is taken as a common card of its class, with the free memory that
the boot itself printed. Every other choice is a table below:

- the card's words to a card of the catalogue or, for a card that is not in it, to its recorded size;
- the release's words to the release that they name. `main` and `dev` are the release nearest by date, any other date is
  the newest release until then (a month means its middle); an image of one model is the first release that has it;
- flags: what the log tells; a value that the engine chose by itself, or words that name no flag, are not passed.

Not compared: another quantization than the configuration's, tokens that `--max-total-tokens` clipped, numbers that
depend on a fraction that nobody told, anything of a boot whose number of ranks is unknown. Tokens, fractions and
verdicts of forks, branches, patched images and unknown releases are counted apart: they follow rules of their own.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpuguard.facts.catalogue import cards
from pytest_gpuguard.predict.values import Box

#: (words, card of the catalogue) in the order in which they are tried.
NAMED = (
    (r"MI355X", "mi355x"),
    (r"RTX PRO 6000.*Server", "rtx-pro-6000-server"),
    (r"RTX PRO 6000.*Max-Q", "rtx-pro-6000-maxq"),
    (r"RTX PRO 6000", "rtx-pro-6000-workstation"),
    (r"RTX 5090", "rtx-5090"),
    (r"RTX 4090", "rtx-4090"),
    (r"\bGB200", "gb200"),
    (r"\bB200", "b200"),
    (r"\bH200", "h200"),
    (r"\bH100 (?!PCIe)|\bH100$", "h100"),
    (r"\bA100.*40 ?GB", "a100-40"),
    (r"\bA100", "a100-80"),
    (r"\bL40S", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bA10\b", "a10"),
)
#: Cards that the catalogue does not have: (words, name, MiB, SM, whether it has NVLink).
SIZES: tuple[tuple[Any, ...], ...] = (
    (r"MI300X", "AMD Instinct MI300X", 196592, None, False),
    (r"\bH20\b", "NVIDIA H20", 97871, "90", True),
    (r"H100 PCIe", "NVIDIA H100 PCIe", 81559, "90", False),
    (r"\bL20\b", "NVIDIA L20", 46068, "89", False),
    (r"RTX 3090", "NVIDIA GeForce RTX 3090", 24576, "86", False),
)
#: Classes whose card was not read, as a common card of that size; only with the boot's own free memory.
CLASSES: tuple[tuple[Any, ...], ...] = (
    (r"16 ?GB class", "a 16 GB card", 16376, "89", False),
    (r"24 ?GB class", "a 24 GB card", 24564, "89", False),
    (r"32 ?GB class", "a 32 GB card", 32607, "120", False),
    (r"48 ?GB class", "a 48 GB card", 49140, "89", False),
    (r"80 ?GB class", "an 80 GB card", 81559, "90", True),
    (r"95 ?GB class", "a 96 GB Hopper card", 97871, "90", True),
    (r"GB300 class", "a GB300", 284208, "103", True),
    (r"\bGB10\b", "a GB10", 122570, "121", False),
)
#: Days of releases (PyPI).
RELEASES = {
    "sglang": """0.4.0 2024-12-03, 0.4.0.post1 2024-12-06, 0.4.1 2024-12-25, 0.4.1.post7 2025-01-20, 0.4.2 2025-01-27,
        0.4.3 2025-02-14, 0.4.3.post4 2025-03-06, 0.4.4 2025-03-13, 0.4.4.post2 2025-03-27, 0.4.5 2025-04-07,
        0.4.6 2025-04-27, 0.4.6.post5 2025-05-24, 0.4.7 2025-06-10, 0.4.8 2025-06-24, 0.4.9 2025-07-06,
        0.4.9.post2 2025-07-12, 0.4.10 2025-07-31, 0.4.10.post2 2025-08-03, 0.5.1 2025-08-23, 0.5.2 2025-09-11,
        0.5.3 2025-10-06, 0.5.4 2025-10-24, 0.5.5 2025-11-06, 0.5.6 2025-12-03, 0.5.6.post2 2025-12-11,
        0.5.7 2026-01-01, 0.5.8 2026-01-23, 0.5.8.post1 2026-02-05, 0.5.9 2026-02-23, 0.5.10 2026-04-05,
        0.5.10.post1 2026-04-08, 0.5.11 2026-05-05, 0.5.12 2026-05-16, 0.5.12.post1 2026-05-23, 0.5.13 2026-06-11,
        0.5.13.post1 2026-06-15, 0.5.14 2026-06-26, 0.5.15 2026-07-10, 0.5.15.post1 2026-07-14, 0.5.16 2026-07-25,
        0.5.17 2026-08-08, 0.5.18 2026-08-21, 0.5.19 2026-09-04, 0.5.20 2026-09-18, 0.5.21 2026-10-01,
        0.5.22 2026-10-16, 0.5.23 2026-10-30""",
    "vllm": """0.6.4 2024-11-15, 0.6.6 2024-12-27, 0.7.2 2025-02-06, 0.8.5 2025-04-28, 0.9.2 2025-07-08,
        0.10.0 2025-07-25, 0.10.1 2025-08-19, 0.11.0 2025-10-04, 0.12.0 2025-12-03, 0.16.0 2026-02-26,
        0.17.0 2026-03-07, 0.18.0 2026-03-20, 0.19.0 2026-04-03, 0.20.0 2026-04-27, 0.20.2 2026-05-10,
        0.22.0 2026-05-29, 0.23.0 2026-06-13, 0.24.0 2026-06-30, 0.26.0 2026-07-25, 0.28.0 2026-08-26,
        0.30.0 2026-09-22, 0.33.0 2026-11-02""",
}
#: Images and branches of one model: the first release that has it.
IMAGES = ((r"deepseek-v4|DSv4", "0.5.12"), (r"glm5-blackwell", "0.5.9"))
#: Releases that follow rules of their own.
OTHER_RULES = re.compile(r"fork|branch|patched|\bPR\b|voipmonitor|local|lmsysorg/sglang:")
#: (model's words, configuration's words): a configuration of another quantization, or of the text part only.
OTHER_QUANTIZATION = (
    (r"Kimi-K2 INT4|Kimi-K2-Thinking", r"Kimi-K2-Instruct"),
    (r"Qwen3\.6-27B-FP8", r"Qwen3\.6-27B-NVFP4"),
)
#: (model's words, configuration) where another checkpoint at hand has the same numbers and the same quantization: the
#: base checkpoint has fp8 experts throughout, the instruct one fp4.
SAME_NUMBERS = ((r"DeepSeek-V4-Flash-Base", "sgl-project--DeepSeek-V4-Flash-FP8_config.json"),)
TEXT_PART = ((r"Omni", r"Qwen3-30B-A3B"),)
#: Words in `others` that stand for a flag of SGLang or vLLM.
WORDS = (
    (r"page_size=(\d+)", "--page-size {}"),
    (r"swa_full_tokens_ratio ([\d.]+)", "--swa-full-tokens-ratio {}"),
    (r"(?:attention )?(triton|aiter|fa3|trtllm_mha)(?: attention)?", "--attention-backend {}"),
    (r"max_num_seqs (\d+)", "--max-num-seqs {}"),
    (r"max_num_batched_tokens (\d+)", "--max-num-batched-tokens {}"),
    (r"piecewise graphs on.*", "--enable-piecewise-cuda-graph"),
    (r"LoRA enabled", "--enable-lora"),
)
NUMBERS = ("weights", "tokens", "fraction", "verdict")


@dataclass(frozen=True)
class Case:
    """One boot. ``skipped`` tells why a number is not compared; ``apart`` why it is counted apart."""

    id: str
    source: str
    engine: str
    version: str | None
    model: str
    config: str | None
    box: Box | None
    card: str | None
    flags: tuple[str, ...]
    inputs: Mapping[str, float] = field(default_factory=dict)
    weights: float | None = None
    tokens: int | None = None
    fraction: float | None = None
    outcome: str | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)

    def measured(self, number: str) -> Any:
        """What was measured of this number; None when it was not."""
        return getattr(self, "outcome" if number == "verdict" else number)


def read_cases(folder: Path) -> list[Case]:
    """The boots of a folder, or of one file with `configs/` beside it."""
    file = folder if folder.is_file() else next(folder.glob("boots.json*"))
    configs = file.parent / "configs"
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return [mapped(row, configs) for row in json.loads(text)]
    return [case_of(json.loads(line), configs) for line in text.splitlines() if line.strip()]


def mapped(row: Mapping[str, Any], configs: Path) -> Case:
    """A boot whose words are mapped already."""
    given = row["card"]
    box, card = _box(given, row["count"]), given if isinstance(given, str) else None
    kept = ("id", "source", "engine", "model", "weights", "tokens", "fraction", "outcome", "inputs", "skipped", "apart")
    config, flags = str(configs / row["config"]), tuple(shlex.split(row["flags"]))
    told = {key: row[key] for key in kept if key in row}
    return Case(**told, version=row.get("version"), config=config, box=box, card=card, flags=flags)


def _box(card: str | list[Any], count: int) -> Box:
    if isinstance(card, list):
        name, total, sm, nvlink = card
        return Box(name, count, total, None, sm, nvlink)
    known = cards()[card]
    assert known.total_mib is not None
    return Box(known.name, count, known.total_mib, known.reserved_mib, known.sm, known.nvlink)


def case_of(row: Mapping[str, Any], configs: Path) -> Case:
    """A boot in the words of its log."""
    flags, measured, notes = row["flags"], row["measured"], row.get("notes") or ""
    engine, words = row["engine"], str(row["version"])
    skipped: dict[str, str] = {}
    apart: dict[str, str] = {}
    box, card, inputs, why = _card(row)
    if why is not None:
        apart.update(dict.fromkeys(("tokens", "verdict", "fraction"), why))
    version = release(engine, words)
    strange = "a fork, branch or image of its own" if OTHER_RULES.search(words) else None
    strange = strange or ("the release is not told" if version is None else None)
    if strange is not None:
        apart.update(dict.fromkeys(("tokens", "verdict", "fraction"), strange))
    config = row.get("config_file")
    config = next((same for words, same in SAME_NUMBERS if re.search(words, row["model"])), config)
    maker, _, name = row["model"].partition("/")
    if config and name and "NVFP4" in name and not config.startswith(f"{maker}--") and not flags["kv_cache_dtype"]:
        apart["tokens"] = "another maker's quantization, which may keep another KV cache"
    for table, numbers, reason in (
        (OTHER_QUANTIZATION, NUMBERS, "the configuration at hand has another quantization"),
        (TEXT_PART, ("weights", "tokens"), "the configuration at hand is of the text part only"),
    ):
        if any(re.search(a, row["model"]) and re.search(b, config or "") for a, b in table):
            (skipped if numbers is NUMBERS else apart).update(dict.fromkeys(numbers, reason))
    if flags["max_total_tokens"]:
        skipped["tokens"] = "clipped by --max-total-tokens"
    if re.search(r"fraction (is earlier|not told)|undecidable", notes):
        skipped["tokens"] = skipped["verdict"] = "the fraction is not told"
    if flags["tp"] is None:
        skipped.update(dict.fromkeys(NUMBERS, "the number of ranks is not told"))
    elif box is None:
        skipped.update(dict.fromkeys(NUMBERS, f"no known card: {row['gpu']}"))
    if config is None:
        skipped.update(dict.fromkeys(NUMBERS, "no configuration at hand"))
    fraction = measured["resolved_mem_fraction_static"]
    return Case(
        id=row["id"],
        source=row["source"],
        engine=engine,
        version=version,
        model=row["model"],
        config=str(configs / config) if config else None,
        box=box,
        card=card,
        flags=tuple(_sglang(flags) if engine == "sglang" else _vllm(flags)),
        inputs=inputs,
        weights=measured["weights_gib"],
        tokens=measured["kv_tokens"] or measured["max_total_num_tokens"],
        fraction=fraction if flags["mem_fraction_static"] is None else None,
        outcome=measured["outcome"],
        skipped=skipped,
        apart=apart,
    )


def _card(row: Mapping[str, Any]) -> tuple[Box | None, str | None, dict[str, float], str | None]:
    """The box, its name in the catalogue, measured inputs, and why it is counted apart."""
    words, count = row["gpu"], row["gpu_count_used"] or row["flags"]["tp"]
    if not count:
        return None, None, {}, None
    for pattern, *card in CLASSES:
        if re.search(pattern, words):
            free = _free(row["measured"])
            if free is None:
                return _box(card, count), None, {}, "the card is not named, nor its free memory"
            why = "the card is not named: the boot's own free memory is an input"
            return _box(card, count), None, {"avail_before_gib": free}, why
    for pattern, *card in SIZES:
        if re.search(pattern, words):
            return _box(card, count), None, {}, None
    for pattern, slug in NAMED:
        if re.search(pattern, words):
            return _box(slug, count), slug, {}, None
    return None, None, {}, None


def _free(measured: Mapping[str, Any]) -> float | None:
    if measured["avail_before_gib"] is not None:
        return float(measured["avail_before_gib"])
    if measured["avail_after_weights_gib"] is not None and measured["weights_gib"] is not None:
        return float(round(measured["avail_after_weights_gib"] + measured["weights_gib"], 2))
    return None


def release(engine: str, words: str) -> str | None:
    """The release that the words mean; None when they tell neither a release nor a day."""
    for pattern, first in IMAGES:
        if re.search(pattern, words) is not None:
            return first
    named: list[str] = re.findall(
        r"\d+\.\d+(?:\.\d+)?(?:\.post\d+)?", re.sub(r"\d{4}-\d\d(-\d\d)?|rocm\d+", " ", words)
    )
    named = [one if one.count(".") > 1 else f"{one}.0" for one in named if not one.startswith("0.0")]
    moving = re.search(r"\bmain\b|\bdev\b", words) is not None
    if named:
        return named[-1] if moving else named[0]
    day = re.search(r"(20\d\d)-?(\d\d)(?:-?(\d\d))?", words)
    if day is None:
        return None
    then = dt.date(int(day[1]), int(day[2]), int(day[3] or 15))
    known = [entry.split() for entry in RELEASES[engine].split(",")]
    dated = [(name, dt.date.fromisoformat(date)) for name, date in known]
    if moving:
        return min(dated, key=lambda one: abs((one[1] - then).days))[0]
    until = [one for one in dated if one[1] <= then]
    return max(until, key=lambda one: one[1])[0] if until else None


def _pairs(flags: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    found = []
    for key, flag in names.items():
        value = flags.get(key)
        if value is None or (isinstance(value, str) and re.search(r"^mxfp4 \(", value)):
            continue
        found += [flag, str(value).split()[0]]
    return found


def _others(flags: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for text in flags["others"]:
        if text.startswith("--"):
            found += shlex.split(text)
            continue
        for part in text.split(", "):
            for pattern, form in WORDS:
                match = re.fullmatch(pattern, part, re.IGNORECASE)
                if match:
                    found += form.format(*(one.lower() for one in match.groups())).split()
                    break
    return found


def _sglang(flags: Mapping[str, Any]) -> list[str]:
    found = _pairs(
        flags,
        {
            "tp": "--tp-size",
            "ep": "--ep-size",
            "pp": "--pp-size",
            "dp": "--dp-size",
            "quantization": "--quantization",
            "kv_cache_dtype": "--kv-cache-dtype",
            "mem_fraction_static": "--mem-fraction-static",
            "context_length": "--context-length",
            "chunked_prefill_size": "--chunked-prefill-size",
            "cuda_graph_max_bs": "--cuda-graph-max-bs",
            "max_total_tokens": "--max-total-tokens",
            "max_running_requests": "--max-running-requests",
        },
    )
    if flags["dp_attention"]:
        found.append("--enable-dp-attention")
    speculative = flags["speculative"]
    if speculative:
        found += ["--speculative-algorithm", "EAGLE"]
        for word, flag in (("steps", "num-steps"), ("topk", "eagle-topk"), ("draft", "num-draft-tokens")):
            match = re.search(rf"{word}(\d+)", speculative)
            found += [f"--speculative-{flag}", match[1]] if match else []
    return found + _others(flags)


def _vllm(flags: Mapping[str, Any]) -> list[str]:
    found = _pairs(
        flags,
        {
            "tp": "--tensor-parallel-size",
            "pp": "--pipeline-parallel-size",
            "dp": "--data-parallel-size",
            "dcp": "--decode-context-parallel-size",
            "quantization": "--quantization",
            "kv_cache_dtype": "--kv-cache-dtype",
            "gpu_memory_utilization": "--gpu-memory-utilization",
            "context_length": "--max-model-len",
            "max_running_requests": "--max-num-seqs",
        },
    )
    match = re.fullmatch(r"mtp (\d+)", flags["speculative"] or "")
    if match:
        found += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": int(match[1])})]
    return found + _others(flags)
