# ruff: noqa: E501  (log lines are as long as they are)
"""Logs of boots in SGLang's words, built from a boot's numbers: where its memory went, and how it died.

They hold what the reading of memory needs and no more; no test may need a real log.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from pytest_gpuguard.claims.observation import Decisive, LogReading, MemoryTable
from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.memory import complete
from pytest_gpuguard.diagnose.remedies import remedies, setup_of
from pytest_gpuguard.diagnose.resolved import resolve

STAMP = "[2026-01-02 03:04:05"
NO_ROOM = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GPU 0 has a total capacity of 94.97 GiB of which {} is free."


def arguments(**values: Any) -> str:
    """The line with the server's arguments."""
    return f"{STAMP}] server_args=ServerArgs(model_path='m', {', '.join(f'{k}={v!r}' for k, v in values.items())})\n"


def loading(ranks: list[str], before: float) -> str:
    """These ranks begin to load, with so many GiB free."""
    return "".join(f"{STAMP}{rank}] Load weight begin. avail mem={before:.2f} GB\n" for rank in ranks)


def loaded(ranks: list[str], before: float, after: float) -> str:
    """These ranks have loaded: GiB free before and after."""
    ends = (
        f"{STAMP}{rank}] Load weight end. type=M, dtype=torch.bfloat16, avail mem={after:.2f} GB, mem usage="
        f"{before - after:.2f} GB.\n"
        for rank in ranks
    )
    return loading(ranks, before) + "".join(ends)


def dies(text: str, rank: str = " TP0", frame: str = "") -> str:
    """A scheduler's exception, and what the main process says of it."""
    stack = f'  File "/x/sglang/srt/model_executor/model_runner.py", line 1, in {frame or "initialize"}\n    x()\n'
    return (
        f"{STAMP}{rank}] Scheduler hit an exception: Traceback (most recent call last):\n{stack}{text}\n\n"
        f"{STAMP}] Received sigquit from a child process. It usually means the child failed.\n"
    )


def tp(count: int, more: str = "") -> list[str]:
    """The prefixes of so many ranks."""
    return [f" TP{rank}{more}" for rank in range(count)]


KIMI = arguments(mem_fraction_static=0.778734296875, chunked_prefill_size=8192, cuda_graph_max_bs=128, tp_size=8)
KIMI += loaded(tp(8), 94.0, 16.3)
F7 = NO_ROOM + " Current value: self.server_args.mem_fraction_static=0.778734296875"


def graph_capture(version: str, graphs: int = 256) -> str:
    """A boot that has come as far as graph capture, as the release spells it."""
    newer = Version(version) >= Version("0.5.15")
    begin = "Capture cuda graph begin. This can take up to several minutes. avail mem=9.71 GB"
    if newer:
        begin = f"Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2, {graphs}], avail mem=9.71 GB"
    return (
        arguments(mem_fraction_static=0.85, tp_size=1)
        + loaded([""], 94.0, 30.0)
        + f"{STAMP}] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 160000, K size: 7.95 GB, V size: 7.95 GB\n"
        + f"{STAMP}] Memory pool end. avail mem=9.90 GB\n{STAMP}] {begin}\n"
        + ("" if newer else f"{STAMP}] Capture cuda graph bs [1, 2, {graphs}]\n")
    )


#: A small model on a card of 16 GB, as measured: 5.98 GiB of weights, 399,740 tokens.
READY = (
    arguments(mem_fraction_static=0.8, tp_size=1, attention_backend="triton", disable_radix_cache=False)
    + f"{STAMP}] Init torch distributed begin.\n"
    + loaded([""], 15.24, 9.26)
    + f"{STAMP}] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 399740, K size: 1.52 GB, V size: 1.52 GB\n"
    + f"{STAMP}] Memory pool end. avail mem=3.42 GB\n"
    + f"{STAMP}] Capture cuda graph begin. This can take up to several minutes. avail mem=3.40 GB\n"
    + f"{STAMP}] Capture cuda graph end. Time elapsed: 8.90 s. mem usage=0.09 GB. avail mem=3.31 GB.\n"
    + f"{STAMP}] max_total_num_tokens=399740, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, available_gpu_mem=3.31 GB\n"
    + f"{STAMP}] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)\n"
    + f"{STAMP}] The server is fired up and ready to roll!\n"
)
#: No room for the KV pool: 94 GiB free, 16.3 left, 20.8 held back.
FAILED = KIMI + dies(F7)


def table(before: float, after: float, fraction: float | None, **more: Any) -> MemoryTable:
    numbers = {"avail_before_gib": before, "avail_after_weights_gib": after, "mem_fraction_static": fraction}
    return complete(MemoryTable(**{**numbers, **more}))


def failed(outcome: str, memory: MemoryTable, text: str = NO_ROOM, engine: str = "sglang", **more: Any) -> LogReading:
    return LogReading(outcome, "x", engine, decisive=Decisive(9, text), memory=memory, **more)


def cure(
    log: str, flags: str = "", gpus: int = 0, version: str | None = None, engine: str = "sglang"
) -> tuple[str, ...]:
    """The remedies for a log, as ``gpuguard explain`` gives them."""
    reading = classify_text(log, engine, version)
    resolved = resolve(engine, flags.split(), reading.evidence)
    return remedies(reading, setup_of(resolved, reading, gpus))
