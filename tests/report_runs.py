"""Runs, records and flips for the tests of reports: plausible ones, hostile ones, and as many as wanted."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpuguard.ledger.flips import Change, Flip, Suspect
from pytest_gpuguard.ledger.record import Kind, Record, Run

START = 1_769_774_695.0
DAY = 86_400.0
CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
LOAD = "c1 in1024 out512"
OLD = {"sglang": "0.5.18", "torch": "2.9.1", "torch_cuda": "12.8", "driver": "570.86.15", "flashinfer-python": "0.6.3"}
NEW = {**OLD, "sglang": "0.5.23", "torch_cuda": "13.0", "driver": "580.65.06", "flashinfer-python": "0.6.9"}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.62 GiB. GPU 3 has a total capacity of 94.97 GiB"

#: What a log may hold: markup, terminal escapes, NUL, a direction override, half a surrogate pair, workflow commands.
HOSTILE = (
    "<script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\x1b[31mred\x1b[0m\x1b]0;title\x07"
    "\x00nul \u202eecilam\udc80 ${{ 7*7 }} {{ 7*7 }} | `tick` [a](javascript:window.pwned=1) \"'--></script>\r\n"
    "::error::injected\n##[error]injected @everyone"
)
#: What of it must not be in any report as it is.
RAW = ("\x1b", "\x00", "\u202e", "\udc80", "\r")


def run(kind: Kind = "verified", stacks: Sequence[str] = ("old", "new"), **more: Any) -> Run:
    given: dict[str, Any] = {"host": "gpu-07", "rig": f"8 × {CARD}", "tool": "0.1.0", "suite": "a7c0944", **more}
    return Run("20260130-130455-3f2a", START, kind=kind, stacks=tuple(stacks), **given)


def evidence(seed: int = 0, rate: float = 65.0, **more: Any) -> dict[str, Any]:
    chance = random.Random(seed)
    samples = [round(rate * chance.uniform(0.985, 1.015), 2) for _ in range(9)]
    return {
        "title": None,
        "judgements": [],
        "phase": "ready",
        "engine": "sglang",
        "engine_version": "0.5.23",
        "decisive": None,
        "memory": {
            "avail_before_gib": 94.2,
            "weights_gib": 70.0 + seed % 9,
            "avail_after_weights_gib": 24.2 - seed % 9,
            "mem_fraction_static": 0.93,
            "reserved_gib": 6.59,
            "rest_gib": 17.6 - seed % 9,
            "kv_gib": 12.1,
            "kv_tokens": 131072,
            "graph_gib": 1.9,
            "free_gib": 4.3,
        },
        "peak_gib": 90.1,
        "peak_phases": {
            "init": 1.2,
            "weights": 71.3 + seed % 9,
            "kv_pool": 86.4,
            "graph_capture": 89.2,
            "serving": 90.1,
        },
        "rates": {
            LOAD: {
                "verdict": "HOLDS",
                "samples": samples,
                "rejected": ["the GPU was throttled"],
                "failed": [],
                "doubts": [],
                "latencies_s": {"ttft": 0.21, "itl": 0.0149, "e2e": 7.9},
                "baseline": {"rate": 65.2, "when": START - 90 * DAY},
                "ours": None,
                "unmet": None,
                "how": None,
                "understated": False,
            }
        },
        "remedies": [],
        "warnings": [],
        "elapsed_s": 341.2,
        "log": "/var/lib/gpuguard/boots/20260130-130455/sglang-ep8.log",
        "argv": ["python", "-m", "sglang.launch_server", "--model-path", "kimi k2.6", "--tp-size", "8"],
        "translated": [],
        "resolved": {
            "settings": [{"name": "attention_backend", "asked": "trtllm_mla", "runs": "triton", "differs": True}]
        },
        "gpus": ["GPU-1"],
        **more,
    }


def record(claim: str = "suites/test_kimi.py::test_ep8_fits", verdict: str = "HOLDS", **more: Any) -> Record:
    given: dict[str, Any] = {
        "run": "20260130-130455-3f2a",
        "stack": "new",
        "expectation": "fits(kv_tokens=>=32768)",
        "outcome": "ready",
        "fact": "ready: 131,072 tokens in the KV pool, claimed at least 32,768",
        "when": START + 60,
        "kind": "verified",
        "nodeid": f"{claim}[{more.get('stack', 'new')}]" if "::" in claim else f"suites/test_kimi.py::test_x[{claim}]",
        "cards": (CARD,),
        "components": NEW,
        "evidence": {},
        **more,
    }
    return Record(claim=claim, verdict=verdict, **given)


def failed(claim: str = "suites/test_kimi.py::test_ep8_fits", **more: Any) -> Record:
    said = evidence(
        1,
        decisive={"line": 812, "text": OOM},
        remedies=["--mem-fraction-static 0.95 would leave 1.4 GiB for the KV pool", "four more GPUs (TP8)"],
        phase="weights",
        rates={},
    )
    given = {"outcome": "oom.weights", "fact": OOM, "evidence": said, **more}
    return record(claim, "CONTRADICTED (worse)", **given)


def flip(now: Record, before: Record | None = None, ranked: bool = True, sort: Any = "worse") -> Flip:
    then = before or record(now.claim, run="20260112-081200-77aa", when=START - 18 * DAY, components=OLD, kind=now.kind)
    changed = [name for name in NEW if OLD[name] != NEW[name]]
    suspects = [
        Suspect(
            Change(name, OLD[name], NEW[name]),
            i if ranked else 1,
            (f"held under every {name} before {NEW[name]}, 7 runs",) if ranked and i == 1 else (),
            (f"held on 2026-01-20 with {name} {NEW[name]}",) if ranked and i > 1 else (),
        )
        for i, name in enumerate(changed, 1)
    ]
    return Flip(sort, then, now, tuple(suspects), ranked)


def earlier(now: Record, count: int, steps: Mapping[int, Mapping[str, str]] | None = None) -> list[Record]:
    """Records of so many runs before this one, a day apart; ``steps`` are the changes of components before a run."""
    found, components = [], dict(OLD)
    for i in range(count):
        components |= (steps or {}).get(i, {})
        found.append(
            record(
                now.claim,
                run=f"r{i:04}",
                when=now.when - (count - i) * DAY,
                stack=now.stack,
                kind=now.kind,
                components=dict(components),
                evidence=evidence(i, 61.0 + (4 if i > count / 2 else 0)),
            )
        )
    return found
