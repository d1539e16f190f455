# ruff: noqa: E501  (log lines are as long as they are)
"""Small logs of boots that go well, of several releases and ranks.

Every text is written for the tests, in the words that the programs print; no test may need a real log.
"""

from __future__ import annotations

STAMP = "[2026-01-02 03:04:05"
MAIN = STAMP + "] "
RANK = STAMP + " TP1] "
WORKER = "(Worker_TP1 pid=1351) "


def sglang(ranks: int, *lines: str) -> list[str]:
    """The lines of a boot: a line that begins with ``*`` is printed by every rank, any other by the main process."""
    return [
        f"{STAMP}{f' TP{rank}' if every and ranks > 1 else ''}] {line.removeprefix('*')}"
        for line in lines
        for every in (line.startswith("*"),)
        for rank in range(ranks if every else 1)
    ]


def vllm(ranks: int, *lines: str) -> list[str]:
    """The same for vLLM: ``*`` by every worker, ``+`` by the engine core, any other by the API server."""
    found = []
    for line in lines:
        who = (
            [f"(Worker_TP{rank} pid={1350 + rank}) " for rank in range(ranks)]
            if ranks > 1
            else ["(EngineCore_DP0 pid=1310) "]
        )
        who = who if line[0] == "*" else ["(EngineCore_DP0 pid=1310) "] if line[0] == "+" else ["(APIServer pid=1001) "]
        found += [one + line.lstrip("*+") for one in who]
    return found


def v(text: str, place: str = "gpu_worker.py", level: str = "INFO") -> str:
    """A line of vLLM's logger, without the name of the process."""
    return f"{level} 01-15 10:00:03 [{place}:298] {text}"


SGLANG_046 = sglang(
    4,
    "server_args=ServerArgs(model_path='m', api_key=None, mem_fraction_static=0.88, tp_size=4, disable_cuda_graph=False)",
    "*Attention backend not set. Use flashinfer backend by default.",
    "*Init torch distributed begin.",
    "*sglang is using nccl==2.21.5",
    "*Init torch distributed ends. mem usage=0.40 GB",
    "*Load weight begin. avail mem=94.00 GB",
    "*Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=78.50 GB, mem usage=15.50 GB.",
    "*KV Cache is allocated. #tokens: 400000, K size: 27.50 GB, V size: 27.50 GB",
    "*Memory pool end. avail mem=22.00 GB",
    "*Capture cuda graph begin. This can take up to several minutes. avail mem=21.50 GB",
    "*Capture cuda graph end. Time elapsed: 9.10 s. avail mem=20.00 GB. mem usage=1.50 GB.",
    "*max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960",
    "INFO:     Started server process [1001]",
    "INFO:     Waiting for application startup.",
    "INFO:     Application startup complete.",
    "INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)",
    'INFO:     127.0.0.1:55770 - "GET /get_model_info HTTP/1.1" 200 OK',
    "*Prefill batch. #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0",
    "The server is fired up and ready to roll!",
    "*Decode batch. #running-req: 1, #token: 812, token usage: 0.01, gen throughput (token/s): 20.03, #queue-req: 0",
    'INFO:     127.0.0.1:55780 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
)

SGLANG_056 = sglang(
    2,
    "server_args=ServerArgs(model_path='m', mem_fraction_static=0.85, tp_size=2, attention_backend='triton')",
    "*Init torch distributed begin.",
    "*Init torch distributed ends. mem usage=0.40 GB",
    "*Load weight begin. avail mem=94.00 GB",
    "*Load weight end. type=Qwen3MoeForCausalLM, dtype=torch.bfloat16, avail mem=34.50 GB, mem usage=59.50 GB.",
    "*Using KV cache dtype: torch.bfloat16",
    "*KV Cache is allocated. #tokens: 400000, KV size: 20.00 GB",
    "*Memory pool end. avail mem=12.00 GB",
    "*Capture cuda graph begin. This can take up to several minutes. avail mem=11.50 GB",
    "*Capture cuda graph bs [1, 2, 4, 8]",
    "*Capture cuda graph end. Time elapsed: 9.10 s. mem usage=1.50 GB. avail mem=10.00 GB.",
    "max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, available_gpu_mem=10.00 GB",
    "INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)",
    "The server is fired up and ready to roll!",
    "*Decode batch, #running-req: 1, #token: 812, token usage: 0.01, cuda graph: True, gen throughput (token/s): 20.03, #queue-req: 0, ",
)

SGLANG_0523 = sglang(
    1,
    "server_args={'model_path': 'm', 'mem_fraction_static': 0.88, 'tp_size': 1, 'api_key': '***'}",
    "Init parallel begin.",
    "Init parallel ends. elapsed=0.02 s",
    "Memory baseline taken. mem usage=0.40 GB",
    "Load weight begin. avail mem=94.00 GB",
    "Load weight end. elapsed=9.90 s, type=Qwen3ForCausalLM, avail mem=78.50 GB, mem usage=15.50 GB.",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 400000, K size: 27.50 GB, V size: 27.50 GB",
    "Memory pool end. avail mem=22.00 GB",
    "Capture target prefill CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=22.00 GB",
    "Capture target prefill CUDA graph end. elapsed=2.00 s, mem usage=0.50 GB, avail mem=21.50 GB.",
    "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=21.50 GB",
    "Capture target decode CUDA graph end. elapsed=8.00 s, mem usage=1.00 GB, avail mem=20.00 GB.",
    "max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, available_gpu_mem=20.00 GB",
    "INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)",
    "The server is fired up and ready to roll!",
    "Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0, ",
)

VLLM_V0 = [
    "INFO 01-15 10:00:00 api_server.py:840] vLLM API server version 0.6.6",
    "INFO 01-15 10:00:00 api_server.py:841] args: Namespace(host=None, port=8000, model='m', gpu_memory_utilization=0.9)",
    "INFO 01-15 10:00:01 llm_engine.py:234] Initializing an LLM engine (v0.6.6) with config: model='m', dtype=torch.bfloat16",
    "INFO 01-15 10:00:02 selector.py:120] Using Flash Attention backend.",
    "(VllmWorkerProcess pid=1897) INFO 01-15 10:00:03 multiproc_worker_utils.py:222] Worker ready; awaiting tasks",
    "INFO 01-15 10:00:03 model_runner.py:1094] Starting to load model m...",
    "(VllmWorkerProcess pid=1897) INFO 01-15 10:00:03 model_runner.py:1094] Starting to load model m...",
    "INFO 01-15 10:00:09 model_runner.py:1099] Loading model weights took 14.9888 GB",
    "(VllmWorkerProcess pid=1897) INFO 01-15 10:00:09 model_runner.py:1099] Loading model weights took 14.9888 GB",
    "INFO 01-15 10:00:11 worker.py:241] Memory profiling takes 1.30 seconds",
    "INFO 01-15 10:00:11 worker.py:241] model weights take 14.99GiB; non_torch_memory takes 0.33GiB; PyTorch activation peak memory takes 1.01GiB; the rest of the memory reserved for KV Cache is 14.52GiB.",
    "INFO 01-15 10:00:11 distributed_gpu_executor.py:57] # GPU blocks: 7299, # CPU blocks: 2048",
    "(VllmWorkerProcess pid=1897) INFO 01-15 10:00:14 model_runner.py:1415] Capturing cudagraphs for decoding. This may lead to unexpected consequences if the model is not static. If out-of-memory error occurs during cudagraph capture, consider decreasing `gpu_memory_utilization` or switching to eager mode.",
    "INFO 01-15 10:00:30 model_runner.py:1535] Graph capturing finished in 16 secs, took 0.31 GiB",
    "INFO 01-15 10:00:30 llm_engine.py:431] init engine (profile, create kv cache, warmup model) took 21.00 seconds",
    "INFO:     Started server process [1001]",
    "INFO:     Waiting for application startup.",
    "INFO:     Application startup complete.",
    'INFO:     127.0.0.1:55770 - "POST /v1/completions HTTP/1.1" 200 OK',
    "INFO 01-15 10:00:50 metrics.py:467] Avg prompt throughput: 10.2 tokens/s, Avg generation throughput: 41.9 tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 0.1%, CPU KV cache usage: 0.0%.",
]

VLLM_V1 = vllm(
    2,
    v("vLLM API server version 0.11.0", "api_server.py"),
    v("non-default args: {'model': 'm', 'gpu_memory_utilization': 0.92, 'tensor_parallel_size': 2}", "utils.py"),
    "+" + v("Initializing a V1 LLM engine (v0.11.0) with config: model='m', dtype=torch.bfloat16", "core.py"),
    "*" + v("vLLM is using nccl==2.27.3", "pynccl.py"),
    "*" + v("Starting to load model m...", "gpu_model_runner.py"),
    "*" + v("Loading weights took 5.31 seconds", "default_loader.py"),
    "*" + v("Model loading took 55.67 GiB memory and 44.557197 seconds", "gpu_model_runner.py"),
    "*" + v("torch.compile takes 20.53 s in total", "monitor.py"),
    "*" + v("Available KV cache memory: 17.36 GiB"),
    "+" + v("GPU KV cache size: 188,640 tokens", "kv_cache_utils.py"),
    "+" + v("Maximum concurrency for 32,768 tokens per request: 5.76x", "kv_cache_utils.py"),
    "*" + v("Graph capturing finished in 33 secs, took 1.22 GiB", "gpu_model_runner.py"),
    "+" + v("init engine (profile, create kv cache, warmup model) took 147.16 seconds", "core.py"),
    "INFO:     Started server process [1001]",
    "INFO:     Waiting for application startup.",
    "INFO:     Application startup complete.",
    'INFO:     127.0.0.1:55770 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    v(
        "Engine 000: Avg prompt throughput: 760.3 tokens/s, Avg generation throughput: 41.9 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 2.9%, Prefix cache hit rate: 91.1%",
        "loggers.py",
    ),
)

#: name: (the engine, the lines of a boot that goes well and serves)
HEALTHY: dict[str, tuple[str, list[str]]] = {
    "sglang 0.4.6": ("sglang", SGLANG_046),
    "sglang 0.5.6": ("sglang", SGLANG_056),
    "sglang 0.5.23": ("sglang", SGLANG_0523),
    "vllm v0": ("vllm", VLLM_V0),
    "vllm v1": ("vllm", VLLM_V1),
}
