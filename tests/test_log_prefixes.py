# ruff: noqa: E501  (log lines are as long as they are)
"""The prefixes that programs, launchers and log collectors put in front of a line, and what each one tells."""

from __future__ import annotations

import json

import pytest

from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.lines import inner, peel

from .failure_logs import LOADING, RANK0, V1_LOADING, prefixed, raised, sglang, v0, vllm

TEXT = "the text"
#: line: (source, level, whose prefix)
PREFIXES: dict[str, tuple[str, str, str | None]] = {
    # SGLang and vLLM
    "[2026-01-02 03:04:05 DP1 TP4 EP4] ": ("DP1 TP4 EP4", "", "sglang"),
    "[01-02 03:04:05.123 TP0] ": ("TP0", "", "sglang"),
    "[2026-01-02 03:04:05] INFO:     ": ("", "info", "sglang"),
    "INFO 01-02 03:04:05 [core.py:708] ": ("", "info", "vllm"),
    "WARNING 01-02 03:04:05 config.py:1668] ": ("", "warning", "vllm"),
    "ERROR 01-02 03:04:05 [v1/worker/gpu_worker.py:7] ": ("", "error", "vllm"),
    "(EngineCore_DP0 pid=1002) ERROR 01-02 03:04:05 [core.py:708] ": ("(EngineCore_DP0 pid=1002)", "error", "vllm"),
    "(VllmWorker rank=1 pid=7) INFO 01-02 03:04:05 [x.py:1] ": ("(VllmWorker rank=1 pid=7)", "info", "vllm"),
    # torch
    "[rank3]: ": ("rank3", "", None),
    "[rank0]:[W115 10:00:09.0 TCPStore.cpp:125] ": ("rank0", "warning", None),
    "[rank0]:[E115 10:00:09.123456789 ProcessGroupNCCL.cpp:629] ": ("rank0", "error", None),
    "[W102 03:04:05.5 socket.cpp:200] ": ("", "warning", None),
    "E0102 03:04:05.123456 77 x/y.cc:12] ": ("", "error", None),
    # the name of the GPU
    "[gpu_id=0] ": ("gpu_id=0", "", None),
    "[gpu=3] ": ("gpu=3", "", None),
    # TensorRT-LLM
    "[TensorRT-LLM][ERROR] ": ("", "error", "trtllm"),
    "[TensorRT-LLM][INFO] ": ("", "info", "trtllm"),
    "[TRT-LLM] [W] ": ("", "warning", "trtllm"),
    "[01/02/2026-03:04:05] [TRT-LLM] [E] ": ("", "error", "trtllm"),
    "[01/02/2026-03:04:05] [TRT-LLM] [RANK 3] [E] ": ("rank3", "error", "trtllm"),
    # loguru, logging, uvicorn, Rust's tracing
    "2026-01-02 03:04:05.123 | ERROR    | app.worker:run:77 - ": ("", "error", None),
    "2026-01-02 03:04:05 | INFO | ": ("", "info", None),
    "2026-01-02 03:04:05,123 - vllm.engine - ERROR - ": ("", "error", None),
    "2026-01-02 03:04:05,123 WARNING ": ("", "warning", None),
    "2026-01-02T03:04:05.123456Z ERROR ": ("", "error", None),
    "2026-01-02T03:04:05.123456Z  INFO text_generation_launcher: ": ("", "info", None),
    "CRITICAL: ": ("", "error", None),
    "ERROR:    ": ("", "error", None),
    "Warning: ": ("", "warning", None),
    "/x/torch/cuda/__init__.py:184: UserWarning: ": ("", "warning", None),
    # NCCL
    "node0:1:7 [0] NCCL INFO ": ("", "info", None),
    "node0:1:7 [0] init.cc:943 NCCL WARN ": ("", "nccl", None),
    "[2026-01-02 03:04:05] node0:1:7 [0] init.cc:943 NCCL WARN ": ("", "nccl", None),
}  # fmt: skip

#: What a log collector or a launcher puts in front of whatever the engine prints.
OUTER = (
    "server-1  | ",
    "[kimi-server.0]: ",
    "2026-01-02T03:04:05.123456789Z ",
    "2026-01-02T03:04:05.123Z stderr F ",
    "Jan  2 03:04:05 node7 sglang[4242]: ",
    "Jan 12 03:04:05 node7 docker/server[77]: ",
    "2026-01-02T03:04:05.123456+01:00 node7 vllm.service[4242]: ",
)
#: Launchers in no known format: the engine's own prefix is found behind theirs.
UNKNOWN = ("<node7> ", "#77 server> ", "[1,3]<stderr>:", "worker.3/12:45:01 -- ")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_tells_who_wrote_the_line_and_at_which_level(prefix: str) -> None:
    source, level, engine = PREFIXES[prefix]
    peeled = peel(prefix + TEXT)
    assert (peeled.source, peeled.level, peeled.engine) == (source, level, engine)
    assert peeled.body.endswith(TEXT)
    if level == "error":
        assert peeled.body == TEXT or peeled.body.endswith(" - " + TEXT)


@pytest.mark.parametrize("outer", [*OUTER, *UNKNOWN])
@pytest.mark.parametrize("prefix", [name for name, (source, _, engine) in PREFIXES.items() if engine in ("sglang", "vllm")])  # fmt: skip
def test_a_collector_s_prefix_is_seen_through(prefix: str, outer: str) -> None:
    assert peel(outer + prefix + TEXT) == peel(prefix + TEXT)


LOGS = {
    "sglang": sglang("RuntimeError: PassManager::run failed", "triton/compiler/compiler.py compile"),
    "vllm": vllm("RuntimeError: PassManager::run failed", "triton/compiler/compiler.py compile"),
    "vllm V0": v0("RuntimeError: PassManager::run failed", "triton/compiler/compiler.py compile"),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("log", LOGS)
def test_a_whole_log_behind_a_collector_s_prefix_reads_like_the_log_alone(log: str, outer: str) -> None:
    alone = classify_text(LOGS[log], engine=None)
    behind = classify_text(prefixed(outer, LOGS[log]), engine=None)
    assert (alone.outcome, alone.phase, alone.signature) == ("jit.compile", "weights", "jit.triton")
    assert (behind.outcome, behind.phase, behind.signature) == (alone.outcome, alone.phase, alone.signature)
    assert (behind.engine, behind.fatal) == (alone.engine, alone.fatal)
    assert (behind.decisive and behind.decisive.line) == (alone.decisive and alone.decisive.line)


@pytest.mark.parametrize("outer", UNKNOWN)
def test_behind_an_unknown_launcher_s_prefix_the_engine_s_lines_are_known(outer: str) -> None:
    error = "(EngineCore_DP0 pid=1002) ERROR 01-02 03:04:05 [core.py:708] "
    log = V1_LOADING + prefixed(
        error, "EngineCore failed to start.\n" + raised("RuntimeError: PassManager::run failed")
    )
    reading = classify_text(prefixed(outer, log), engine=None)
    assert (reading.outcome, reading.phase, reading.engine) == ("jit.compile", "weights", "vllm")
    quiet = log.replace("ERROR", "INFO")
    assert classify_text(prefixed(outer, quiet), engine=None).outcome == "starting"


def test_an_inner_prefix_counts_only_near_the_beginning() -> None:
    own = "(EngineCore_DP0 pid=1002) INFO 01-02 03:04:05 [core.py:708] "
    assert inner("x" * 20 + " " + own) == 21
    assert inner("x" * 120 + " " + own) == -1
    assert inner("nothing of the kind") == -1
    assert peel("x" * 120 + " " + own + TEXT).level == ""


def test_another_process_s_line_right_behind_a_bar_is_read() -> None:
    bar = "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.9it/s]"
    death = RANK0 + "Scheduler hit an exception: ValueError: 52 heads must be divisible by 8\n"
    assert classify_text(LOADING + bar + death).outcome == "unsupported.config"


def test_the_tracebacks_of_two_ranks_that_torch_printed_line_by_line_are_told_apart() -> None:
    full = prefixed("[rank0]: ", raised("torch.OutOfMemoryError: CUDA out of memory.", "vllm/worker/x.py load_model"))
    peer = prefixed(
        "[rank1]: ", raised("RuntimeError: [pair.cc:534] Connection closed by peer", "vllm/y.py profile_run")
    )
    pairs = zip(full.splitlines(), peer.splitlines(), strict=True)
    reading = classify_text("".join(f"{second}\n{first}\n" for first, second in pairs), engine=None)
    assert (reading.outcome, reading.phase) == ("oom.weights", "weights")
    assert any("closed by peer" in text for text in reading.consequences)


def test_the_level_of_a_rust_program_s_line_counts() -> None:
    failed = "2026-01-02T03:04:05.123456Z ERROR text_generation_launcher: CUDA error: an illegal memory access was encountered\n"
    assert classify_text(failed, engine=None).outcome == "illegal_memory"
    for level in (" INFO", " WARN", "DEBUG"):
        assert classify_text(failed.replace("ERROR", level), engine=None).outcome == "starting"


# --- one JSON object a line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"timestamp": "2026-01-02T03:04:05Z", "level": "ERROR", "fields": {"message": TEXT}, "target": "router"},
        {"asctime": "x", "levelname": "ERROR", "message": TEXT},
        {"severity": "error", "msg": TEXT},
        {"lvl": "Error", "event": TEXT, "rank": 3},
    ],
)
def test_a_json_record_gives_its_level_and_text(record: dict[str, object]) -> None:
    for line in (json.dumps(record), json.dumps(record, separators=(",", ":"))):
        peeled = peel(line)
        assert (peeled.level, peeled.body, peeled.logged) == ("error", TEXT, True)
    assert peel("[rank3]: " + json.dumps(record)).source == "rank3"


@pytest.mark.parametrize(
    "line",
    ['{"level": "ERROR", "message": "cut off', '{"level": "ERROR", "message": 3}', '{"a": 1}', '{"level": "ERROR"}', "{" * 400],
)  # fmt: skip
def test_what_is_no_record_comes_back_whole(line: str) -> None:
    assert (peel(line).level, peel(line).body) == ("", line)


def test_a_failure_in_json_records_is_read_and_a_warning_in_them_is_none() -> None:
    failed = json.dumps({"level": "ERROR", "fields": {"message": "RuntimeError: PassManager::run failed"}})
    assert classify_text(failed + "\n", engine=None).outcome == "jit.compile"
    for level in ("INFO", "WARN", "DEBUG"):
        assert classify_text(failed.replace("ERROR", level) + "\n", engine=None).outcome == "starting"


def test_a_rank_of_tensorrt_llm_is_a_source_of_its_own() -> None:
    each = "[01/02/2026-03:04:05] [TRT-LLM] [RANK 3] [E] "
    quiet = "[01/02/2026-03:04:05] [TRT-LLM] [RANK 0] [I] Using default max_batch_size\n"
    log = "".join(
        line + "\n" + quiet for line in prefixed(each, raised("RuntimeError: PassManager::run failed")).splitlines()
    )
    reading = classify_text(log, engine=None)
    assert (reading.outcome, reading.engine) == ("jit.compile", "trtllm")
