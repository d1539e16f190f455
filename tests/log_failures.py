# ruff: noqa: E501  (log lines are as long as they are)
"""Small logs of boots that fail, process by process, so that a test may interleave them as it likes.

Every text is written for the tests, in the words that the programs print; no test may need a real log.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.log_decoys import DECOYS
from tests.log_samples import MAIN, STAMP, v, vllm

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 94.97 GiB of which "
    "1.61 GiB is free. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation."
)
NO_ROOM = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
V_NO_ROOM = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
NO_IMAGE = "RMSNorm failed with error code no kernel image is available for execution on the device"
NINJA = "RuntimeError: Ninja build failed. Ninja output:\nFAILED: x.o\n/x/a.cuh:3:10: fatal error: cuda_fp8.h: No such file or directory\nninja: build stopped: subcommand failed."
GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:2000"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, remote process "
    "exited or there was a network error, NCCL version 2.27.3"
)
ADVICE = DECOYS["sglang's advice"]

_BOOT = (
    "Init torch distributed begin.",
    "Init torch distributed ends. mem usage=0.40 GB",
    "Load weight begin. avail mem=94.00 GB",
    "Load weight end. type=M, dtype=torch.bfloat16, avail mem=34.50 GB, mem usage=59.50 GB.",
    "KV Cache is allocated. #tokens: 400000, KV size: 20.00 GB",
    "Memory pool end. avail mem=12.00 GB",
    "Capture cuda graph begin. This can take up to several minutes. avail mem=11.50 GB",
)


def _frames(*names: str, folder: str = "/x/sglang/srt/model_executor") -> list[str]:
    return [
        line
        for n, name in enumerate(names, 1)
        for line in (f'  File "{folder}/model_runner.py", line {n}, in {name}', f"    self.{name}()")
    ]


def sglang_rank(rank: int, steps: int, exception: str, *names: str) -> list[list[str]]:
    """What one rank prints until it dies, as blocks of lines that stay together (an exception's lines have no prefix)."""
    stamp = f"{STAMP} TP{rank}] "
    blocks = [[stamp + line] for line in _BOOT[:steps]]
    head = f"{stamp}Scheduler hit an exception: Traceback (most recent call last):"
    return [*blocks, [head, *_frames("run_scheduler_process", "__init__", *names), *exception.split("\n"), ""]]


SIGQUIT = [f"{MAIN}Received sigquit from a child process. It usually means the child failed."]


def vllm_worker(rank: int, exception: str, *names: str, pool: bool = False) -> list[list[str]]:
    """The same for a worker of vLLM, whose every line has a prefix."""
    who = f"(Worker_TP{rank} pid={1350 + rank}) "
    lines = [v("Starting to load model m...", "gpu_model_runner.py")]
    lines += [v("Model loading took 55.67 GiB memory and 44.5 seconds", "gpu_model_runner.py")] if pool else []
    trace = [
        "WorkerProc failed to start.",
        "Traceback (most recent call last):",
        *_frames("__init__", *names, folder="/x/vllm/v1/worker"),
        *exception.split("\n"),
    ]
    return [
        [who + line]
        for line in (*lines, *(f"ERROR 01-15 10:00:09 [multiproc_executor.py:622] {line}" for line in trace))
    ]


def vllm_core(exception: str, *names: str) -> list[list[str]]:
    """The engine core's own end."""
    who = "(EngineCore_DP0 pid=1310) "
    trace = [
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        *_frames("__init__", *names, folder="/x/vllm/v1/engine"),
        *exception.split("\n"),
    ]
    return [[f"{who}ERROR 01-15 10:00:10 [core.py:708] {line}"] for line in trace]


def vllm_api() -> list[list[str]]:
    """The API server's end, which never knows why."""
    trace = [
        "Traceback (most recent call last):",
        *_frames("wait_for_engine_startup", folder="/x/vllm/v1/engine"),
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    return [[f"(APIServer pid=1001) {line}"] for line in trace]


WORKERS_FAILED = "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."


class Failing(NamedTuple):
    """A boot that fails: ``proof`` stands in the line that decides; each process prints its blocks in this order."""

    engine: str
    outcome: str
    proof: str
    processes: list[list[list[str]]]


FAILING: dict[str, Failing] = {
    "sglang oom.weights": Failing(
        "sglang",
        "oom.weights",
        "CUDA out of memory",
        [
            sglang_rank(0, 3, GLOO),
            sglang_rank(1, 3, NCCL),
            sglang_rank(2, 3, OOM, "load_model"),
            [[f"{STAMP} TP3] {line}"] for line in _BOOT[:3]],
            [SIGQUIT, SIGQUIT],
        ],
    ),
    "sglang oom.weights, two ranks": Failing(
        "sglang",
        "oom.weights",
        "CUDA out of memory",
        [sglang_rank(0, 3, OOM), sglang_rank(1, 3, OOM), [SIGQUIT]],
    ),
    "sglang oom.kv_pool": Failing(
        "sglang",
        "oom.kv_pool",
        "Not enough memory.",
        [*(sglang_rank(rank, 4, NO_ROOM, "init_memory_pool") for rank in range(3)), sglang_rank(3, 4, GLOO), [SIGQUIT]],
    ),
    "sglang oom.kv_pool, torch": Failing(
        "sglang",
        "oom.kv_pool",
        "CUDA out of memory",
        [sglang_rank(0, 4, OOM, "init_memory_pool"), sglang_rank(1, 5, NCCL), [SIGQUIT]],
    ),
    "sglang oom.graph_capture": Failing(
        "sglang",
        "oom.graph_capture",
        "CUDA out of memory",
        [
            sglang_rank(0, 7, f"Exception: Capture cuda graph failed: {GLOO}\n{ADVICE}", "init_device_graphs"),
            sglang_rank(1, 7, f"Exception: Capture cuda graph failed: {OOM}\n{ADVICE}", "init_device_graphs"),
            [SIGQUIT],
        ],
    ),
    "sglang unsupported.arch": Failing(
        "sglang",
        "unsupported.arch",
        "no kernel image",
        [
            *(sglang_rank(rank, 7, f"Exception: Capture cuda graph failed: {NO_IMAGE}\n{ADVICE}") for rank in range(8)),
            [SIGQUIT] * 8,
        ],
    ),
    "sglang jit.compile": Failing(
        "sglang",
        "jit.compile",
        "fatal error: cuda_fp8.h",
        [
            sglang_rank(0, 7, f"Exception: Capture cuda graph failed: {NINJA}\n{ADVICE}"),
            sglang_rank(1, 7, f"Exception: Capture cuda graph failed: {NCCL}\n{ADVICE}"),
            [SIGQUIT],
        ],
    ),
    "sglang nobody knows": Failing(
        "sglang",
        "indeterminate.peer_died",
        "",
        [sglang_rank(0, 3, GLOO), sglang_rank(1, 4, NCCL), [SIGQUIT]],
    ),
    "vllm oom.weights": Failing(
        "vllm",
        "oom.weights",
        "CUDA out of memory",
        [
            vllm_worker(0, NCCL, "load_model"),
            vllm_worker(1, OOM, "load_model", "initialize_model"),
            vllm_core(WORKERS_FAILED, "_init_executor"),
            vllm_api(),
        ],
    ),
    "vllm oom.kv_pool": Failing(
        "vllm",
        "oom.kv_pool",
        "No available memory",
        [
            [[line]]
            for line in vllm(
                2,
                "*" + v("Model loading took 55.67 GiB memory and 44.5 seconds"),
                "*" + v("Available KV cache memory: 1.71 GiB"),
            )
        ]
        + [vllm_core(V_NO_ROOM, "_initialize_kv_caches"), vllm_api()],
    ),
    "vllm unsupported.arch": Failing(
        "vllm",
        "unsupported.arch",
        "no kernel image",
        [
            *(
                vllm_worker(
                    rank,
                    "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
                    "load_model",
                )
                for rank in range(4)
            ),
            vllm_core(WORKERS_FAILED, "_init_executor"),
            vllm_api(),
        ],
    ),
    "vllm jit.compile": Failing(
        "vllm",
        "jit.compile",
        "fatal error: cuda_fp8.h",
        [
            vllm_worker(0, NINJA, "determine_available_memory", pool=True),
            vllm_worker(1, GLOO, "determine_available_memory", pool=True),
            vllm_core(
                "RuntimeError: Worker failed with error 'Ninja build failed', please check the stack trace above for the root cause",
                "_init_executor",
            ),
            vllm_api(),
        ],
    ),
}


def vllm_v0(exception: str, *names: str, worker: bool) -> list[list[str]]:
    """A process of vLLM 0.6: the driver's lines have no name in front, the workers' have."""
    who = "(VllmWorkerProcess pid=1897) " if worker else ""
    lines = ["INFO 01-15 10:00:03 model_runner.py:1094] Starting to load model m..."]
    at, head = (
        ("multiproc_worker_utils.py:236", "Exception in worker VllmWorkerProcess while processing method load_model.")
        if worker
        else ("engine.py:366", exception)
    )
    trace = [head, "Traceback (most recent call last):", *_frames(*names, folder="/x/vllm/worker"), exception]
    return [[who + line] for line in (*lines, *(f"ERROR 01-15 10:00:09 {at}] {line}" for line in trace))]


def torchrun_rank(rank: int, exception: str, *names: str) -> list[list[str]]:
    """A rank of torchrun: its traceback's lines name it."""
    trace = ["Traceback (most recent call last):", *_frames("main", *names), exception]
    return [[f"[rank{rank}]: {line}"] for line in trace]


FAILING |= {
    "vllm v0 oom.weights": Failing(
        "vllm",
        "oom.weights",
        "CUDA out of memory",
        [vllm_v0(OOM, "load_model", worker=False), vllm_v0(GLOO, "load_model", worker=True)],
    ),
    "vllm v0 oom.weights, worker": Failing(
        "vllm",
        "oom.weights",
        "CUDA out of memory",
        [vllm_v0(GLOO, "load_model", worker=False), vllm_v0(OOM, "load_model", worker=True)],
    ),
    "torchrun oom.weights": Failing(
        "sglang",
        "oom.weights",
        "CUDA out of memory",
        [*(torchrun_rank(rank, NCCL, "load_model") for rank in (0, 1, 3)), torchrun_rank(2, OOM, "load_model")],
    ),
    "torchrun unsupported.config": Failing(
        "vllm",
        "unsupported.config",
        "divisible",
        [
            *(
                torchrun_rank(rank, "ValueError: 52 heads must be divisible by tp_size 8", "__init__")
                for rank in range(2)
            ),
            torchrun_rank(2, GLOO, "load_model"),
        ],
    ),
}

#: How failures begin; before such a line there is none.
TROUBLE = ("hit an exception", "Traceback (most recent", "sigquit", " ERROR ", "ERROR 01-15")
