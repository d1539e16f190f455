"""Cause before consequence: ranks in any order, chained tracebacks, wrappers, advice, vLLM's and Ray's prefixes."""

from __future__ import annotations

import itertools

import pytest

from pytest_gpuguard.diagnose import classify_text

BOOT = "".join(f"[2026-01-02 03:04:05 TP{rank}] Load weight begin. avail mem=94.00 GB\n" for rank in range(3))
TRACE = '  File "/x/sglang/srt/model_loader/loader.py", line 7, in load_model\n    self.model = f()\n'


def rank_died(rank: int, exception: str) -> str:
    head = f"[2026-01-02 03:04:06 TP{rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
    return head + TRACE + exception + "\n\n"


CAUSE = rank_died(2, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB.")
GLOO = rank_died(0, "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:2000")
NCCL = rank_died(
    1, "torch.distributed.DistBackendError: NCCL error in: x.cpp:7, remote process exited or there was a network error"
)
NOISE = "[rank0]:[W115 10:00:09.0 TCPStore.cpp:125] [c10d] recvValue failed: Connection reset by peer\n"
SIGQUIT = "[2026-01-02 03:04:07] Received sigquit from a child process. It usually means the child failed.\n"
PARENT = (
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common "
    "cause is the OS OOM killer.\n"
)


@pytest.mark.parametrize("order", list(itertools.permutations([CAUSE, GLOO, NCCL, SIGQUIT])), ids=range(24))
def test_the_cause_wins_in_every_order_of_the_ranks(order: tuple[str, ...]) -> None:
    log = BOOT + "".join(order) + NOISE + PARENT
    reading = classify_text(log)
    assert (reading.outcome, reading.phase, reading.fatal) == ("oom.weights", "weights", True)
    assert reading.decisive is not None
    assert reading.decisive.text.startswith("torch.OutOfMemoryError")
    assert any("Connection closed by peer" in text for text in reading.consequences)
    assert len(reading.consequences) <= 8


def test_consequences_alone_are_indeterminate() -> None:
    for log in (GLOO + SIGQUIT, GLOO + NCCL + SIGQUIT, SIGQUIT, GLOO + PARENT, NCCL):
        assert classify_text(BOOT + log).outcome == "indeterminate.peer_died", log


def test_an_unknown_exception_is_a_better_cause_than_a_failed_collective() -> None:
    nobody = rank_died(0, "ValueError: what nobody knows")
    failed = rank_died(1, "torch.distributed.DistBackendError: NCCL error in: x.cpp:7, unhandled cuda error")
    for log in (nobody + failed, failed + nobody):
        reading = classify_text(BOOT + log + SIGQUIT)
        assert reading.outcome == "unknown"
        assert reading.decisive is not None
        assert reading.decisive.text == "ValueError: what nobody knows"


def test_of_two_causes_the_first_decides() -> None:
    other = rank_died(0, "ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.")
    assert classify_text(BOOT + other + CAUSE).outcome == "unsupported.arch"
    assert classify_text(BOOT + CAUSE + other).outcome == "oom.weights"


def test_an_exception_that_the_engine_survived_is_not_the_cause() -> None:
    caught = "Traceback (most recent call last):\n" + TRACE + "RuntimeError: CUDA error: no kernel image is available\n"
    nobody = rank_died(0, "ValueError: what nobody knows")
    assert classify_text(BOOT + caught + nobody).outcome == "unknown"
    assert classify_text(caught + BOOT + SIGQUIT).outcome == "indeterminate.peer_died"


# --- chains ---

HANDLING = (
    "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
)
DIRECT = (
    "\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
)


@pytest.mark.parametrize("joint", [HANDLING, DIRECT])
@pytest.mark.parametrize(
    ("first", "second", "outcome", "decisive"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: it failed", "oom.weights", 0),
        ("KeyError: 'nope'", "ValueError: size 5 must be divisible by tp_size 2", "unsupported.config", 1),
        ("ValueError: one thing", "RuntimeError: another thing", "unknown", 0),
        ("ModuleNotFoundError: No module named 'fancy'", "RuntimeError: another thing", "unknown", 1),
        ("AttributeError: no such thing", "RuntimeError: another thing", "unknown", 1),
    ],
)
def test_a_chain_is_read_from_its_cause(joint: str, first: str, second: str, outcome: str, decisive: int) -> None:
    reading = classify_text(BOOT + rank_died(0, first + "\n" + joint + TRACE + second) + SIGQUIT)
    assert (reading.outcome, reading.fatal) == (outcome, True)
    assert reading.decisive is not None
    assert reading.decisive.text == (first, second)[decisive]


def test_a_wrapper_is_never_the_cause() -> None:
    inner = {
        "RMSNorm failed with error code no kernel image is available for execution": "unsupported.arch",
        "CUDA error: uncorrectable ECC error encountered": "hardware",
        "a text that nobody knows": "unknown",
        "[pair.cc:534] Connection closed by peer": "indeterminate.peer_died",
        "CUDA out of memory. Tried to allocate 448.00 MiB.": "oom.graph_capture",
    }
    advice = (
        "Possible solutions:\n1. CUDA out of memory: set --mem-fraction-static to a smaller value\n2. Killed process\n"
    )
    for text, outcome in inner.items():
        for wrapper in (
            "Capture cuda graph failed: ",
            "Capture frozen-KV MTP cuda graph failed: ",
            "Capture CPU graph failed: ",
        ):
            log = BOOT + rank_died(0, f"Exception: {wrapper}{text}\n{advice}") + SIGQUIT
            reading = classify_text(log)
            assert (reading.outcome, reading.phase) == (outcome, "graph_capture"), (wrapper, text)


def test_the_announcement_may_stand_on_a_line_of_its_own() -> None:
    log = (
        BOOT + "[2026-01-02 03:04:06 TP0] Scheduler hit an exception:\nTraceback (most recent call last):\n" + TRACE
        + "ValueError: 52 heads must be divisible by 8\n"
    )  # fmt: skip
    assert classify_text(log).fatal
    assert classify_text(log).outcome == "unsupported.config"
    short = BOOT + "[2026-01-02 03:04:06 TP0] Scheduler hit an exception: ValueError: 52 heads must be divisible by 8\n"
    assert (classify_text(short).outcome, classify_text(short).fatal) == ("unsupported.config", True)


def test_a_native_abort_is_read_too() -> None:
    log = BOOT + (
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: an illegal memory access was encountered\n"
        "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f in libc10.so)\n"
    )
    reading = classify_text(log)
    assert (reading.outcome, reading.fatal) == ("illegal_memory", True)
    watchdog = BOOT + (
        "[rank0]:[E115 10:00:32.970893361 ProcessGroupNCCL.cpp:2055] [PG ID 5 Rank 0] Process group watchdog thread "
        "terminated with exception: CUDA error: operation not permitted when stream is capturing\n"
    )
    assert (classify_text(watchdog).outcome, classify_text(watchdog).fatal) == ("graph.incompatible", True)
    crash = BOOT + "Fatal Python error: Segmentation fault\n"
    assert (classify_text(crash).outcome, classify_text(crash).fatal) == ("unknown", True)


def test_a_driver_warning_explains_an_exception_that_does_not() -> None:
    warning = "/x/torch/cuda/__init__.py:184: UserWarning: CUDA initialization: Error 802: system not yet initialized\n"
    assert classify_text(warning + BOOT).outcome == "starting"
    failed = classify_text(warning + "RuntimeError: No accelerator is available.\n")
    assert (failed.outcome, failed.fatal) == ("driver.mismatch", True)
    assert classify_text(warning + BOOT + CAUSE).outcome == "oom.weights"


def test_a_pasted_log_that_lost_its_indentation_is_read() -> None:
    log = BOOT + rank_died(0, "ValueError: 52 heads must be divisible by 8").replace("\n  ", "\n").replace("\n  ", "\n")
    assert classify_text(log + SIGQUIT).outcome == "unsupported.config"
    bare = BOOT + rank_died(0, "ValueError: what nobody knows").replace("\n    ", "\n").replace("\n  ", "\n")
    reading = classify_text(bare)
    assert reading.decisive is not None
    assert reading.decisive.text == "ValueError: what nobody knows"


# --- other launchers and engines ---


def test_a_ray_worker_s_prefix_and_colours_are_seen_through() -> None:
    worker = "\x1b[36m(SGLangWorker pid=38138)\x1b[0m "
    log = "".join(worker + line + "\n" for line in (BOOT + CAUSE + SIGQUIT).splitlines())
    assert (classify_text(log).outcome, classify_text(log).fatal) == ("oom.weights", True)


@pytest.mark.parametrize(
    "prefix", ["server-1  | ", "2026-01-02T03:04:05.123456789Z ", "2026-01-02T03:04:05.123Z stderr F "]
)
def test_a_container_s_prefix_is_seen_through(prefix: str) -> None:
    log = "".join(prefix + line + "\n" for line in (BOOT + CAUSE + SIGQUIT).splitlines())
    assert (classify_text(log).outcome, classify_text(log).fatal) == ("oom.weights", True)


def test_a_vllm_log_is_recognised() -> None:
    core = "(EngineCore_DP0 pid=1002) "
    log = (
        "INFO 01-15 10:00:00 [api_server.py:1034] vLLM API server version 0.11.0\n"
        f"{core}INFO 01-15 10:00:01 [gpu_worker.py:298] Available KV cache memory: 1.71 GiB\n"
        f"{core}ERROR 01-15 10:00:02 [core.py:708] EngineCore failed to start.\n"
        f"{core}ERROR 01-15 10:00:02 [core.py:708] Traceback (most recent call last):\n"
        f'{core}ERROR 01-15 10:00:02 [core.py:708]   File "/x/kv_cache_utils.py", line 699, in check_enough\n'
        f"{core}ERROR 01-15 10:00:02 [core.py:708] ValueError: No available memory for the cache blocks. Try more.\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    reading = classify_text(log, engine=None)
    assert (reading.outcome, reading.engine, reading.engine_version) == ("oom.kv_pool", "vllm", "0.11.0")
    assert reading.decisive is not None
    assert reading.decisive.line == 6
    healthy = log.split(f"{core}ERROR")[0] + "(APIServer pid=1) INFO:     Application startup complete.\n"
    assert classify_text(healthy, engine=None).outcome == "ready"
    tail = (
        "ERROR 01-15 10:00:18 [x.py:885] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    assert classify_text(tail, engine="vllm").outcome == "indeterminate.peer_died"


def test_sglang_s_own_startup_complete_is_not_ready_when_the_engine_is_detected() -> None:
    log = BOOT + "[2026-01-02 03:04:06] INFO:     Application startup complete.\n"
    reading = classify_text(log, engine=None)
    assert (reading.outcome, reading.engine) == ("starting", "sglang")


def test_a_capture_that_was_broken_off_gives_way_to_the_failure_that_broke_it() -> None:
    """The traceback is printed, and then the process ends in the destructor of what was captured."""
    oom = (
        "Traceback (most recent call last):\n"
        '  File "/x/torch/cuda/graphs.py", line 255, in __exit__\n'
        "    self.cuda_graph.capture_end()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.\n"
    )
    ended = (
        "terminate called after throwing an instance of 'c10::AcceleratorError'\n"
        "  what():  CUDA error: operation failed due to a previous error during capture\n"
        "Fatal Python error: Aborted\n"
    )
    assert classify_text(oom + ended).outcome == "oom.graph_capture"
    assert classify_text(ended).outcome == "graph.incompatible"
