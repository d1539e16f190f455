# ruff: noqa: E501  (log lines are as long as they are)
"""Each outcome from a small log of its own, and the healthy words that must not be taken for it."""

from __future__ import annotations

import pytest

from pytest_gpuguard.claims.observation import LogReading
from pytest_gpuguard.diagnose import classify_file, classify_text

STAMP = "[2026-01-02 03:04:05 TP0] "
MAIN = "[2026-01-02 03:04:05] "
DIED = STAMP + "Scheduler hit an exception: Traceback (most recent call last):\n"
SIGQUIT = MAIN + "Received sigquit from a child process. It usually means the child failed.\n"
LOADING = STAMP + "Load weight begin. avail mem=94.00 GB\n"
LOADED = LOADING + STAMP + "Load weight end. elapsed=9.00 s, type=M, avail mem=10.00 GB, mem usage=84.00 GB.\n"
POOLED = LOADED + STAMP + "Memory pool end. avail mem=5.00 GB\n"
CAPTURING = POOLED + STAMP + "Capture cuda graph begin. This can take up to several minutes. avail mem=5.00 GB\n"
SERVING = POOLED + MAIN + "The server is fired up and ready to roll!\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 94.97 GiB "
    "of which 1.61 GiB is free. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
)
ADVICE = (
    "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    "2. set --cuda-graph-max-bs to a smaller value (e.g., 16) to avoid CUDA out of memory\n"
    "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose\n"
)


def frames(*functions: str, path: str = "/x/sglang/srt/model_executor/model_runner.py") -> str:
    return "".join(f'  File "{path}", line {n}, in {name}\n    {name}()\n' for n, name in enumerate(functions, 1))


def died(exception: str, before: str = LOADED, trace: str = "") -> str:
    return before + DIED + (trace or frames("run_scheduler_process", "__init__")) + exception + "\n" + SIGQUIT


CASES: dict[str, tuple[str, str, str]] = {
    # name: (outcome, phase, log)
    "weights": ("oom.weights", "weights", died(OOM, LOADING)),
    "weights by frame": ("oom.weights", "weights", died(OOM, "", frames("load_model", "_initialize_model"))),
    "torch pool": ("oom.kv_pool", "kv_pool", died(OOM, LOADED, frames("init_memory_pool", "__init__"))),
    "workspace after the pool": ("oom.runtime", "warmup", died(OOM, POOLED, frames("init_attention_backend"))),
    "capture": ("oom.graph_capture", "graph_capture", died("Exception: Capture cuda graph failed: " + OOM + ADVICE, CAPTURING)),
    "capture, cut log": ("oom.graph_capture", "graph_capture", died("Exception: Capture prefill CUDA graph failed: " + OOM, "")),
    "capture by frame": ("oom.graph_capture", "graph_capture", died(OOM, POOLED, frames("init_device_graphs", "capture"))),
    "serving": ("oom.runtime", "serving", died(OOM, SERVING, frames("event_loop_overlap", "run_batch"))),
    "serving, replayed graph": ("oom.runtime", "serving", died(OOM, SERVING, frames("forward", "capture"))),
    "before the weights": ("unknown", "start", died(OOM, "")),
    "batch": ("oom.runtime", "serving", died("RuntimeError: Prefill out of memory. Try to lower your batch size.", SERVING)),
    "pool, old text": ("oom.kv_pool", "kv_pool", died("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")),
    "pool, new text": (
        "oom.kv_pool",
        "kv_pool",
        died(
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.85. Raise "
            "--mem-fraction-static above 0.912 (minimum viable = 1 - available/pre = 0.9113). If using speculative "
            "decoding, draft weights are now counted."
        ),
    ),
    "pool, one request": ("oom.kv_pool", "kv_pool", died("RuntimeError: SWA pool (128 tokens) cannot hold even one request of 4096.")),
    "dirty": ("infra.dirty_gpu", "init", died(
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
        STAMP + "Init torch distributed begin.\n",
    )),
    "host allocator": (
        "oom.host",
        "kv_pool",
        died(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 9068871296 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ),
    "host MemoryError": ("oom.host", "weights", died("MemoryError", LOADING)),
    "host numpy": (
        "oom.host",
        "weights",
        died("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9.00 GiB for an array", LOADING),
    ),
    "host bad_alloc": ("oom.host", "weights", LOADING + "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"),
    "host ENOMEM": ("oom.host", "weights", died("OSError: [Errno 12] Cannot allocate memory", LOADING)),
    "host pinned": (
        "oom.host",
        "kv_pool",
        died("RuntimeError: CUDA error: out of memory", LOADED, frames("__init__", path="/x/mem_cache/memory_pool_host.py")),
    ),
    "killed at boot": (
        "oom.host",
        "weights",
        LOADING + "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), "
        "a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.\n",
    ),
    "killed at boot, old": (
        "oom.host",
        "weights",
        LOADING + MAIN + "Rank 0 scheduler is dead. Please check if there are relevant logs.\n" + MAIN + "Exit code: -9\n"
        "Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nEOFError\n",
    ),
    "kernel": ("oom.host", "weights", LOADING + "kernel: Memory cgroup out of memory: Killed process 1004 (python3)\n"),
    "args": (
        "bad.args",
        "args",
        "usage: launch_server.py [-h] --model-path MODEL_PATH\n                        [--kv-cache-dtype {auto,fp8_e5m2}]\n"
        "launch_server.py: error: unrecognized arguments: --enable_metrics\n",
    ),
    "args, bare": ("bad.args", "args", MAIN + "server_args={'a': 1}\nerror: unrecognized arguments: --served-model m\n"),
    "args, choice": ("bad.args", "args", "sglang serve: error: argument --load-format: invalid choice: 'x' (choose from auto)\n"),
    "args, value": ("bad.args", "args", "launch_server.py: error: argument --port: expected one argument\n"),
    "args, ambiguous": ("bad.args", "args", "sglang serve: error: ambiguous option: --cuda-graph-max-bs could match --x, --y\n"),
    "port": (
        "port.in_use",
        "warmup",
        POOLED
        + STAMP
        + "max_total_num_tokens=4096, max_running_requests=2048, context_len=2048\n"
        + MAIN + "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 18207): address already in use\n"
        + MAIN + "INFO:     Waiting for application shutdown.\n",
    ),
    "port, zmq": ("port.in_use", "start", died("zmq.error.ZMQError: Address already in use (addr='tcp://*:32765')", "")),
    "port, waited for": (
        "port.in_use",
        "start",
        "Traceback (most recent call last):\n" + frames("main")
        + "ValueError: nccl_port at 40290 is not available in 30 seconds. nccl_port is used by a process already.\n",
    ),
    "model, hub name": (
        "model.missing",
        "start",
        "Traceback (most recent call last):\n" + frames("cached_file")
        + "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no'.\n"
        "\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
        + frames("f") + "OSError: Can't load the configuration of '/no'. If you were trying to load it from the Hub, …\n",
    ),
    "model, not local": ("model.missing", "start", "OSError: nosuch is not a local folder and is not a valid model identifier listed on the Hub\n"),
    "model, no weights": ("model.missing", "weights", died("RuntimeError: Cannot find any model weights with `/m`", LOADING)),
    "model, no config": ("model.missing", "start", died("OSError: /m does not appear to have a file named config.json.", "")),
    "model, file gone": ("model.missing", "start", died("FileNotFoundError: [Errno 2] No such file or directory: '/m/model-1.safetensors'", "")),
    "truncated": ("weights.mismatch", "weights", died(
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered", LOADING,
    )),
    "shape": (
        "weights.mismatch",
        "weights",
        LOADING + DIED + '  File "/x/sglang/srt/model_loader/weight_utils.py", line 7, in default_weight_loader\n'
        "    assert param.size() == loaded_weight.size()\nAssertionError\n" + SIGQUIT,
    ),
    "watchdog, old": ("hang.timeout", "serving", SERVING + STAMP + "Watchdog timeout (self.watchdog_timeout=300)\n" + SIGQUIT),
    "watchdog, new": (
        "hang.timeout",
        "serving",
        SERVING + STAMP + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n",
    ),
    "config, divide": ("unsupported.config", "weights", died(
        "ValueError: The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128.", LOADING,
    )),
    "config, assert": (
        "unsupported.config",
        "weights",
        LOADING + DIED + '  File "/x/moe/layer.py", line 7, in __init__\n    assert self.num_experts % self.tp_size == 0\nAssertionError\n',
    ),
    "config, resolution": (
        "unsupported.config",
        "args",
        "Traceback (most recent call last):\n" + frames("__post_init__", path="/x/sglang/srt/server_args.py")
        + "AssertionError: a combination that no other signature names\n",
    ),
    "arch, fusion": ("unsupported.arch", "kv_pool", died("ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.", POOLED)),
    "arch, jit": (
        "unsupported.arch",
        "graph_capture",
        died(
            "Exception: Capture cuda graph failed: No supported CUDA architectures found for major versions [9, 10].\n" + ADVICE,
            CAPTURING,
        ),
    ),
    "arch, kernel image": (
        "unsupported.arch",
        "graph_capture",
        died("Exception: Capture cuda graph failed: RMSNorm failed with error code no kernel image is available for execution on the device", CAPTURING),
    ),
    "arch, args": (
        "unsupported.arch",
        "start",
        "Traceback (most recent call last):\n" + frames("__post_init__", path="/x/sglang/srt/server_args.py")
        + "ValueError: TRTLLM MHA backend is only supported on Blackwell GPUs (SM100). Please use a different backend.\n",
    ),
    "arch, table": (
        "unsupported.arch",
        "kv_pool",
        died("KeyError: 12", LOADED, frames("__init__", path="/x/device_communicators/symm_mem.py")),
    ),
    "smem": ("jit.smem", "serving", died("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376.", SERVING)),
    "jit header": ("jit.compile", "graph_capture", died(
        "Exception: Capture cuda graph failed: Ninja build failed. Ninja output:\nfatal error: cuda_fp8.h: No such file or directory\n" + ADVICE,
        CAPTURING,
    )),
    "illegal": ("illegal_memory", "serving", died("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", SERVING)),
    "capturing": ("graph.incompatible", "graph_capture", died(
        "Exception: Capture cuda graph failed: CUDA error: operation not permitted when stream is capturing\n" + ADVICE, CAPTURING,
    )),
    "shm": (
        "nccl.shm",
        "init",
        STAMP + "Init torch distributed begin.\n[rank3]: torch.distributed.DistBackendError: NCCL error in: x.cpp:3690, unhandled "
        "system error\n[rank3]: Last error:\n[rank3]: Error while creating shared memory segment /dev/shm/nccl-a (size 7)\n" + SIGQUIT,
    ),
    "nccl": ("nccl.error", "init", died("torch.distributed.DistBackendError: NCCL error in: x.cpp:7, unhandled cuda error", STAMP + "Init torch distributed begin.\n")),
    "nccl timeout": (
        "nccl.timeout",
        "kv_pool",
        LOADED + "[rank26]:[E115 10:20:01.000000001 ProcessGroupNCCL.cpp:629] [Rank 26] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600013 milliseconds before timing out.\n",
    ),
    "ecc": ("hardware", "graph_capture", died("Exception: Capture cuda graph failed: CUDA error: uncorrectable ECC error encountered\n" + ADVICE, CAPTURING)),
    "peer": ("indeterminate.peer_died", "graph_capture", died(
        "Exception: Capture cuda graph failed: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:2000\n" + ADVICE,
        CAPTURING,
    )),
    "only sigquit": ("indeterminate.peer_died", "kv_pool", LOADED + SIGQUIT),
    "nobody knows": ("unknown", "kv_pool", died("ValueError: a text that no signature knows")),
    "threads are not memory": ("unknown", "weights", died("RuntimeError: can't start new thread", LOADING)),
    "mapping is not memory": ("unknown", "weights", died("RuntimeError: x.so: failed to map segment from shared object", LOADING)),
    "killed while serving": ("indeterminate.peer_died", "serving", SERVING + MAIN + "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"),
    "torn off": ("unknown", "kv_pool", LOADED + DIED + frames("run_scheduler_process")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_outcome_is_read_from_the_log(name: str) -> None:
    outcome, phase, log = CASES[name]
    reading = classify_text(log)
    assert (reading.outcome, reading.phase, reading.fatal) == (outcome, phase, True), reading
    assert reading.decisive is not None
    assert reading.decisive.text in log
    assert log.splitlines()[reading.decisive.line - 1].endswith(reading.decisive.text[-40:])
    if outcome != "unknown":
        assert reading.why
        assert reading.signature


@pytest.mark.parametrize("name", CASES)
def test_asking_every_engine_s_signatures_changes_nothing(name: str) -> None:
    outcome, phase, log = CASES[name]
    reading = classify_text(log, engine=None)
    assert (reading.outcome, reading.phase) == (outcome, phase)


DECOYS = [
    STAMP + "Setup Custom allreduce failed with CUDART error: peer access is not supported between these two devices.",
    STAMP + "TorchSymmMemCommunicator: Device capability 12 not supported, communicator is not available.",
    STAMP + "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.",
    STAMP + "KV cache pool is full. Retract requests. #retracted_reqs: 1",
    STAMP + "Failed to initialize FlashInfer workspace (backend=trtllm): CUDA out of memory. Disabling it permanently.",
    STAMP + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
    MAIN + "Receive: obj=GenerateReqInput(text='RuntimeError: CUDA out of memory. Scheduler hit an exception: no')",
    MAIN + "server_args=ServerArgs(help='RuntimeError: Not enough memory', mem_fraction_static=0.5, error='[Errno 98]')",
    MAIN + "Ignore import error when loading sglang.srt.models.grok: libfoo.so: cannot open shared object file",
    MAIN + "max_total_tokens=9 is larger than the profiled value 8. Use the profiled value instead.",
    MAIN + "WARNING:  Address already in use is what this warning is about",
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 163840 Hardware limit:101376",
    "node0:1:1 [0] NCCL INFO Trees [0] 14/-1/-1->13->12 Connection closed by peer /dev/shm/nccl-a CUDA out of memory",
    "[rank0]:[W115 10:00:09.0 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl: Connection reset by peer",
    "/x/torch/cuda/__init__.py:287: UserWarning: RTX 5080 with CUDA capability sm_120 is not compatible. only sm_90",
    "/x/y.py:1: RuntimeWarning: CUDA out of memory is a risk",
    "Warning: processes are hanging, to avoid OOM lower something; No space left on device",
    "usage: launch_server.py [-h]\n  error: unrecognized arguments: --x\n  CUDA out of memory",
    "AUTOTUNE mm(4096x6144, 6144x256)",
    "INFO 01-15 10:00:06 [shm_broadcast.py:698] No available shared memory broadcast block found in 60 seconds.",
    "(Worker_TP5 pid=1) WARNING 01-15 10:00:07 [gpu_worker.py:494] may require lowering it to avoid OOM. not supported",
    "we requires only SM90 in prose, and Hopper is nice",
    "Killed",
]  # fmt: skip


@pytest.mark.parametrize("decoy", DECOYS)
def test_scary_words_of_a_healthy_boot_are_no_failure(decoy: str) -> None:
    starting = classify_text(LOADING + decoy + "\n" + decoy + "\n")
    assert (starting.outcome, starting.fatal) == ("starting", False), starting
    ready = classify_text(LOADED + decoy + "\n" + SERVING + decoy + "\n")
    assert (ready.outcome, ready.fatal) == ("ready", False), ready


def test_all_scary_words_together_stay_healthy() -> None:
    log = LOADED + "\n".join(DECOYS) + "\n" + SERVING + "\n".join(DECOYS) + "\n"
    assert classify_text(log).outcome == "ready"
    assert classify_text(log, engine=None).outcome == "ready"


def test_a_failed_request_does_not_end_a_server() -> None:
    log = (
        SERVING
        + MAIN
        + "ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n"
        + frames("generate")
        + "ValueError: The input is longer than the model's context length\n"
        + STAMP
        + "Decode batch. #running-req: 1, gen throughput (token/s): 1.0\n"
    )
    reading = classify_text(log)
    assert (reading.outcome, reading.phase, reading.fatal) == ("ready", "serving", False)


def test_a_server_that_was_told_to_stop_has_not_failed() -> None:
    log = (
        SERVING
        + MAIN
        + "SIGTERM received. signum=None Draining requests and shutting down...\n"
        + SIGQUIT
        + died(OOM, "")
    )
    assert classify_text(log).outcome == "ready"


def test_a_keyboard_interrupt_is_no_failure() -> None:
    log = LOADING + "Traceback (most recent call last):\n" + frames("main") + "KeyboardInterrupt\n"
    assert classify_text(log).outcome == "starting"


def test_application_startup_is_not_ready_and_a_crash_after_it_counts() -> None:
    log = died(
        "torch.AcceleratorError: CUDA error: misaligned address",
        POOLED + MAIN + "INFO:     Application startup complete.\n",
    )
    assert classify_text(log).outcome == "illegal_memory"


def test_error_texts_fill_the_memory_table() -> None:
    memory = classify_text(CASES["pool, new text"][2]).memory
    assert (memory.mem_fraction_static, memory.f_min) == (0.85, 0.9113)
    assert memory.reserved_gib == pytest.approx(94 * 0.15, abs=1e-4)
    assert memory.rest_gib == pytest.approx(10 - 94 * 0.15, abs=1e-4)


def test_the_gpu_s_own_major_in_the_list_means_a_wrong_compiler() -> None:
    from pytest_gpuguard.engines.log import LogReader

    def read(majors: tuple[int, ...]) -> LogReading:
        reader = LogReader(majors=majors)
        reader.feed(died("RuntimeError: No supported CUDA architectures found for major versions [10, 12].").encode())
        return reader.closed()

    assert read((12,)).outcome == "jit.compile"
    assert read((9,)).outcome == "unsupported.arch"


def test_a_file_reads_like_its_text(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "log"
    path.write_text(CASES["capture"][2], encoding="utf-8")
    assert classify_file(path) == classify_text(CASES["capture"][2])
    with pytest.raises(OSError, match="nowhere"):
        classify_file(path.parent / "nowhere")
