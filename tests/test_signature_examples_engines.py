# ruff: noqa: E501  (log lines are as long as they are)
"""An example of every failure that only SGLang or vLLM prints (signatures of sglang.toml and vllm.toml)."""

from __future__ import annotations

import pytest

from .failure_logs import (
    API,
    CORE0,
    INIT,
    LOADED,
    LOADING,
    MAIN,
    POOLED,
    RANK0,
    SERVING,
    SIGQUIT,
    V0_LOADING,
    V1,
    V1_LOADING,
    Example,
    check,
    raised,
    sglang,
    v0,
    vllm,
)

POOL = "sglang/srt/model_executor/model_runner.py init_memory_pool"
ARGS = "sglang/srt/server_args.py __post_init__"

EXAMPLES = (
    # --- SGLang ---
    Example("sglang.kv.no_room", "oom.kv_pool", "Not enough memory", sglang(
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", POOL, before=LOADED), "kv_pool"),
    Example("sglang.kv.no_room", "oom.kv_pool", "leave no GPU memory for the KV cache", sglang(
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.85. Raise --mem-fraction-static above 0.912 "
        "(minimum viable = 1 - available/pre = 0.9113).", POOL, before=LOADED), "kv_pool"),
    Example("sglang.kv.negative", "oom.kv_pool", "the profiled value -561981", sglang(
        "AssertionError", "sglang/srt/mem_cache/allocator.py alloc", before=LOADED + RANK0 + "max_total_tokens=8192 is larger than the profiled value -561981. Use the profiled value instead.\n"), "kv_pool"),
    Example("sglang.kv.one_request", "oom.kv_pool", "cannot hold even one request", sglang(
        "RuntimeError: SWA pool (128 tokens) cannot hold even one request of 4096 tokens.", POOL, before=LOADED), "kv_pool"),
    Example("sglang.kv.one_request", "oom.kv_pool", "state cache is too small", sglang(
        "RuntimeError: The mamba state cache is too small for max_running_requests=1.", POOL, before=LOADED), "kv_pool"),
    Example("sglang.unbalanced", "infra.dirty_gpu", "memory capacity is unbalanced", sglang(
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=21.5, local_gpu_memory=93.1",
        "sglang/srt/model_executor/model_runner.py init_torch_distributed", before=INIT), "init"),
    Example("sglang.batch_oom", "oom.runtime", "Prefill out of memory.", sglang(
        "RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 4096 tokens.\nAvailable tokens: 12", "sglang/srt/managers/schedule_batch.py alloc_token_slots", before=SERVING), "serving"),
    Example("sglang.batch_oom", "oom.runtime", "Decode out of memory.", sglang("RuntimeError: Decode out of memory. Try to lower your batch size.", before=SERVING), "serving"),
    Example("sglang.watchdog", "hang.timeout", "Watchdog timeout (self.watchdog_timeout=300)", SERVING + RANK0 + "Watchdog timeout (self.watchdog_timeout=300)\n" + SIGQUIT, "serving"),
    Example("sglang.watchdog", "hang.timeout", "watchdog timeout", LOADED + RANK0 + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"),
    Example("sglang.moe_block", "unsupported.config", "--tp` and `--ep` correctly", sglang(
        "ValueError: For quantized MoE models, please make sure (moe_intermediate_size=1536 / moe_tp_size=8) % weight_block_size_n=128 == 0 where moe_tp_size is equal to tp_size (8) divided by "
        "ep_size (1). You can fix this by setting arguments `--tp` and `--ep` correctly.", before=INIT)),
    Example("sglang.moe_block", "unsupported.config", "The expert parallel size must be 1", raised(
        "AssertionError: The expert parallel size must be 1 or the same as the tensor parallel size", ARGS)),
    Example("sglang.kv_dtype_assert", "unsupported.config", "self.store_dtype == torch.uint8", sglang(
        "AssertionError", "sglang/srt/mem_cache/memory_pool.py __init__ | assert self.store_dtype == torch.uint8, dtype", before=LOADED)),
    Example("sglang.backend_pair", "unsupported.config", "DispatchOutput' object has no attribute", sglang(
        "AttributeError: 'DeepEPNormalDispatchOutput' object has no attribute 'topk_output'", "sglang/srt/layers/moe/moe_runner/runner.py run", before=POOLED)),
    Example("sglang.gdn_backends", "unsupported.arch", "hybrid GDN models", sglang(
        "AssertionError: triton, trtllm_mha, or fa4 backends are supported on Blackwell GPUs for hybrid GDN models, use --attention-backend triton to specify the backend.", before=POOLED)),
    Example("sglang.args_invalid", "unsupported.config", "a rule that no other signature names", raised("ValueError: a rule that no other signature names", ARGS), "args"),
    Example("sglang.args_invalid", "unsupported.config", "assert self.chunked_prefill_size", raised(
        "AssertionError", "sglang/srt/arg_groups/speculative.py adjust | assert self.chunked_prefill_size > 0"), "args"),
    Example("sglang.rank_died", "oom.host", "(exit code: -9)", LOADING + raised(
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.")),
    Example("sglang.rank_died", "oom.host", "Exit code: -9", LOADING + MAIN + "Rank 0 scheduler is dead. Please check if there are relevant logs.\n" + MAIN + "Exit code: -9\n" + raised("EOFError")),
    Example("sglang.child_died", "indeterminate.peer_died", "Received sigquit", LOADED + SIGQUIT),
    Example("sglang.child_died", "indeterminate.peer_died", "scheduler died during initialization", LOADING + raised(
        "RuntimeError: Rank 3 scheduler died during initialization (exit code: 1).")),
    Example("sglang.child_died", "indeterminate.peer_died", "crashed with exit code -11", SERVING + MAIN + "Subprocess scheduler_0 (pid=7) crashed with exit code -11. Triggering SIGQUIT for cleanup...\n"),
    Example("sglang.nan_line", "numerics", "NaN in the logits", sglang(
        "torch.AcceleratorError: CUDA error: device-side assert triggered", before=POOLED + RANK0 + "Detected errors during sampling! NaN in the logits.\n")),
    # --- vLLM ---
    Example("vllm.free_memory", "infra.dirty_gpu", "is less than desired GPU memory utilization", vllm("ValueError: Free memory on device (10.2/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28 GiB).", before=V1), phase="init"),
    Example("vllm.kv.no_room", "oom.kv_pool", "No available memory for the cache blocks", vllm(
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."), "kv_pool"),
    Example("vllm.kv.no_room", "oom.kv_pool", "larger than the available KV cache memory", vllm(
        "ValueError: To serve at least one request with the models's max seq len (131072), (24.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.40 GiB). "
        "Based on the available memory, the estimated maximum model length is 51328. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."), "kv_pool"),
    Example("vllm.kv.no_room", "oom.kv_pool", "maximum number of tokens that can be stored", v0(
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (57344). Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len` when initializing the engine."), "kv_pool"),
    Example("vllm.features_multiple", "unsupported.config", "in features size is not multiple of 16", vllm("ValueError: Unsupported model when in features size is not multiple of 16")),
    Example("vllm.mla_query_len", "unsupported.config", "m.max_query_len <= self.reorder_batch_threshold", vllm(
        "AssertionError", "vllm/v1/attention/backends/mla/common.py build_for_cudagraph_capture | assert m.max_query_len <= self.reorder_batch_threshold")),
    Example("vllm.engine_dead", "indeterminate.peer_died", "See root cause above", V1_LOADING + raised(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}")),
    Example("vllm.engine_dead", "indeterminate.peer_died", "EngineDeadError", V1_LOADING + API + "ERROR 01-02 03:04:05 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
        "See stack trace (above) for the root cause.\n"),
    Example("vllm.engine_dead", "indeterminate.peer_died", "Engine process failed to start", V0_LOADING + raised(
        "RuntimeError: Engine process failed to start. See stack trace for the root cause.", "vllm/entrypoints/openai/api_server.py build_async_engine_client")),
    Example("vllm.kv.negative", "oom.kv_pool", "Available KV cache memory: -5.67 GiB", vllm(
        "ZeroDivisionError: float division by zero", before=V1_LOADING + CORE0 + "INFO 01-02 03:04:03 [gpu_worker.py:298] Available KV cache memory: -5.67 GiB\n")),
)  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.signature)
def test_an_engine_s_own_failure_is_known(example: Example) -> None:
    check(example)
