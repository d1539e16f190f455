# ruff: noqa: E501  (log lines are as long as they are)
"""What must never be read into a log: words of prompts, other people's kills, boots before the last, survived failures."""

from __future__ import annotations

import pytest

from pytest_gpuguard.diagnose import classify_text

from .failure_logs import (
    API,
    CAPTURING,
    CORE0,
    HEADER,
    LOADED,
    LOADING,
    MAIN,
    POOLED,
    RANK0,
    SERVING,
    SIGQUIT,
    V1_LOADING,
    V1_SERVING,
    raised,
    sglang,
)

DECODE = RANK0 + "Decode batch, #running-req: 1, cuda graph: True, gen throughput (token/s): 20.0, #queue-req: 0\n"
ARGS = MAIN + "server_args=ServerArgs(model_path='m', tp_size=2, mem_fraction_static={})\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 672.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which 136.94 MiB is free."

SCARY = (
    "OOMKilled",
    "kernel: Out of memory: Killed process 1 (python3)",
    "SIGTERM received.",
    "Fatal Python error: Aborted",
    "Watchdog timeout (self.watchdog_timeout=300)",
    "Rank 0 scheduler died during initialization (exit code: -9)",
    "[Errno 98] error while attempting to bind on address ('0.0.0.0', 1): address already in use",
    "Watchdog caught collective operation timeout",
)


@pytest.mark.parametrize("words", SCARY)
@pytest.mark.parametrize(
    "line",
    [
        "[request 1] prompt='why did I see {}?'",
        "Receive: rid=1, obj=GenerateReqInput(text='{}')",
        "Finish: rid=1, out={{'text': '{}'}}",
        "Loading adapter /models/{}",
    ],
)
def test_the_words_of_a_request_say_nothing_of_the_server(line: str, words: str) -> None:
    log = SERVING + MAIN + line.format(words) + "\n" + DECODE
    for engine in ("sglang", None):
        assert classify_text(log, engine=engine).outcome == "ready"


@pytest.mark.parametrize("words", SCARY)
def test_nor_do_they_hide_what_comes_after(words: str) -> None:
    log = (
        SERVING
        + MAIN
        + f"[request 1] prompt='{words}'\n"
        + RANK0
        + "Scheduler hit an exception: "
        + raised(OOM, "x.py f")
    )
    assert classify_text(log).outcome == "oom.runtime"


def test_a_kill_of_another_process_is_not_the_servers() -> None:
    kernel = "Jan 02 03:04:05 node7 kernel: Out of memory: Killed process 999 ({}) total-vm:1kB\n"
    assert classify_text(LOADING + kernel.format("chrome")).outcome == "starting"
    assert classify_text(LOADING + kernel.format("python3")).outcome == "oom.host"
    # A server that goes on was not killed, whoever was.
    assert classify_text(LOADING + kernel.format("python3") + LOADED + SERVING).outcome == "ready"


# --- several boots in one log -------------------------------------------------------------------------------------------


def test_a_boot_after_a_ready_one_is_read_for_itself() -> None:
    first = ARGS.format("0.88") + SERVING + DECODE
    died = sglang(
        OOM,
        "sglang/srt/model_loader/loader.py load_model",
        before=ARGS.format("0.5") + LOADING.replace("94.00", "60.00"),
    )
    reading = classify_text(first + died)
    assert (reading.outcome, reading.phase, reading.boots) == ("oom.weights", "weights", 2)
    assert (reading.memory.avail_before_gib, reading.memory.mem_fraction_static) == (60.0, 0.5)
    assert reading.memory.kv_gib is None


def test_a_boot_after_a_failed_one_is_read_for_itself() -> None:
    failed = sglang(
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        before=ARGS.format("0.5") + LOADED,
    )
    reading = classify_text(failed * 3)
    assert (reading.outcome, reading.boots, reading.memory.weights_gib) == ("oom.kv_pool", 3, 84.0)
    reading = classify_text(failed + ARGS.format("0.88") + SERVING)
    assert (reading.outcome, reading.boots, reading.memory.mem_fraction_static) == ("ready", 2, 0.88)


def test_a_boot_after_a_stop_counts_again() -> None:
    stopped = (
        ARGS.format("0.88")
        + SERVING
        + MAIN
        + "SIGTERM received. signum=15 frame=None. Draining requests and shutting down...\n"
    )
    log = stopped + sglang(OOM, "sglang/srt/model_loader/loader.py load_model", before=ARGS.format("0.88") + LOADING)
    assert classify_text(log).outcome == "oom.weights"


def test_arguments_that_are_printed_again_begin_no_boot() -> None:
    log = ARGS.format("0.88") + SERVING + DECODE + ARGS.format("0.5") + DECODE
    reading = classify_text(log)
    assert (reading.outcome, reading.boots, reading.memory.mem_fraction_static) == ("ready", 1, 0.88)


# --- what was survived, or explains nothing -----------------------------------------------------------------------------


def test_a_warning_about_a_card_explains_nothing_once_weights_were_loaded() -> None:
    warned = (
        "NVIDIA GeForce GT 1030 with CUDA capability sm_61 is not compatible with the current PyTorch installation.\n"
    )
    late = sglang("TypeError: forward() missing 1 required positional argument: 'x'", before=warned + CAPTURING)
    assert classify_text(late).outcome == "unknown"
    assert classify_text(warned + POOLED + SIGQUIT).outcome == "indeterminate.peer_died"
    early = sglang("TypeError: forward() missing 1 required positional argument: 'x'", before=warned + LOADING)
    assert classify_text(early).outcome == "unsupported.arch"


@pytest.mark.parametrize(
    "survived",
    [
        "E0102 03:04:05.000000 1002 torch/_inductor/select_algorithm.py:2100] [0/0] Exception out of resource: shared memory, Required: 131072 for benchmark choice X\n",
        "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 163840 Hardware limit:101376. Ignoring this choice.\n",
    ],
)
def test_a_choice_that_was_passed_over_is_no_cause(survived: str) -> None:
    log = sglang("TypeError: forward() missing 1 required positional argument: 'x'", before=CAPTURING + survived)
    assert classify_text(log).outcome == "unknown"
    assert classify_text(CAPTURING + survived).outcome == "starting"


def test_the_exception_that_ended_the_engine_says_more_than_a_line_logged_as_an_error() -> None:
    line = CORE0 + "ERROR 01-02 03:04:05 [backends.py:9] FlashMLA requires compute capability 9.0, trying TRITON_MLA\n"
    died = CORE0 + "ERROR 01-02 03:04:06 [core.py:708] EngineCore failed to start.\n"
    trace = (HEADER, '  File "/x/vllm/v1/engine/core.py", line 9, in __init__\n', "TypeError: no\n")
    log = V1_LOADING + line + died + "".join(CORE0 + f"ERROR 01-02 03:04:06 [core.py:708] {part}" for part in trace)
    assert classify_text(log, engine="vllm").outcome == "unknown"


def test_a_mention_of_a_failed_import_counts_less_than_the_exception_after_it() -> None:
    log = "Failed to import deep_gemm, ImportError: /x/deep_gemm.so: undefined symbol: _ZN3c10\n" + raised(
        "TypeError: no", "x.py main"
    )
    assert classify_text(log, engine=None).outcome == "unknown"


def test_a_failure_that_the_log_merely_ends_with_is_weak() -> None:
    caught = LOADING + raised(OOM, "sglang/srt/model_loader/loader.py load_model")
    assert (classify_text(caught).outcome, classify_text(caught).weak) == ("oom.weights", True)
    died = classify_text(sglang(OOM, "sglang/srt/model_loader/loader.py load_model"))
    assert (died.outcome, died.weak) == ("oom.weights", False)


def test_a_bare_traceback_of_a_rank_is_read_in_the_phase_of_the_boot() -> None:
    log = ARGS.format("0.88") + CAPTURING + raised(OOM, "x.py bar")
    assert classify_text(log).outcome == "oom.graph_capture"


def test_a_request_that_failed_leaves_a_server_of_vllm_ready() -> None:
    log = V1_SERVING + API + "ERROR 01-02 03:04:05 [serving_chat.py:200] Error in preprocessing prompt inputs\n"
    assert classify_text(log, engine="vllm").outcome == "ready"


# --- lines that are many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["a\r" * 32000, '{"level":"error","msg":"' + "a\\n" * 15000 + '"}'])
def test_a_line_of_many_pieces_does_not_take_long(line: str) -> None:
    import time

    began = time.process_time()
    classify_text((LOADING + line + "\n") * 3)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "collector",
    [
        "[pod/sglang-0-abcdef/server] 2026-01-02T03:04:05.123456789Z {}",
        "Jan 02 03:04:05.123456 node7 sglang[1234]: {}",
        '{{"log":"{}\\n","stream":"stderr","time":"2026-01-02T03:04:05.1Z"}}',
    ],
)
def test_what_a_log_collector_put_in_front_is_taken_off(collector: str) -> None:
    log = sglang("KeyError: 'layers.0.mlp.scale'", "sglang/srt/models/m.py load_weights").replace('"', "'")
    wrapped = "".join(collector.format(line) + "\n" for line in log.splitlines())
    reading = classify_text(wrapped, engine=None)
    assert (reading.outcome, reading.decisive and reading.decisive.text) == (
        "weights.mismatch",
        "KeyError: 'layers.0.mlp.scale'",
    )
