# ruff: noqa: E501  (log lines are as long as they are)
"""An example of every failure on the GPU: its architecture, compilation, graphs, memory, numbers, hangs."""

from __future__ import annotations

import pytest

from .failure_logs import (
    CAPTURING,
    CORE0,
    LOADED,
    LOADING,
    POOLED,
    SERVING,
    V1_LOADING,
    V1_SERVING,
    Example,
    capture,
    check,
    prefixed,
    raised,
    sglang,
    v0,
    vllm,
)

SYMM = "sglang/srt/distributed/device_communicators/symm_mem.py __init__"
TRITON = "triton/compiler/compiler.py compile"
BUILD = "torch/utils/cpp_extension.py _run_ninja_build"
RAY = "(RayWorkerWrapper pid=77) "
ENTRY = "vllm/v1/engine/core.py run_engine_core"

ARCH = (
    Example("arch.no_kernel_image", "unsupported.arch", "no kernel image is available", capture("RMSNorm failed with error code no kernel image is available for execution on the device"), "graph_capture"),
    Example("arch.no_kernel_image", "unsupported.arch", "invalid device function", vllm("RuntimeError: HIP error: invalid device function")),
    Example("arch.no_kernel_image", "unsupported.arch", "no kernel image is available", "CUDA error (/x/flash_fwd_launch_template.h:175): no kernel image is available for execution on the device\n"),
    Example("arch.no_supported_majors", "unsupported.arch", "for major versions [9, 10]", capture("No supported CUDA architectures found for major versions [9, 10].")),
    Example("arch.no_supported_majors", "unsupported.arch", "for major versions [9, 10]", "No supported CUDA architectures found for major versions [9, 10].\n"),
    Example("arch.fp8_type", "unsupported.arch", "type fp8e4nv not supported in this architecture", vllm("ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')", TRITON)),
    Example("arch.fp8_type", "unsupported.arch", "requires .target sm_80", "ptxas /tmp/x.ptx, line 62; error   : Feature '.bf16' requires .target sm_80 or higher\n"),
    Example("arch.compute_capability", "unsupported.arch", "compute capability of at least 8.0", v0(
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5.", "vllm/worker/worker.py _check_if_gpu_supports_dtype")),
    Example("arch.compute_capability", "unsupported.arch", "device capability: 120", vllm("RuntimeError: No compiled cutlass_scaled_mm for CUDA device capability: 120")),
    Example("arch.minimum_capability", "unsupported.arch", "compile time compute cap 90", "Could not start backend: Runtime compute cap 75 is not compatible with compile time compute cap 90\n"),
    Example("arch.sm_required", "unsupported.arch", "requires SM90 or SM10X", sglang("ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.", before=POOLED)),
    Example("arch.sm_required", "unsupported.arch", "only supported on Blackwell", raised("ValueError: TRTLLM MHA backend is only supported on Blackwell GPUs (SM100). Please use a different backend.", "sglang/srt/server_args.py __post_init__")),
    Example("arch.this_gpu", "unsupported.arch", "on this GPU", vllm("RuntimeError: The fused MoE kernel is not supported on this GPU.")),
    Example("arch.unsupported_architecture", "unsupported.arch", "Unsupported architecture", sglang("RuntimeError: Error in function 'run' at /x/fmhaRunner.cuh:31: Unsupported architecture", before=POOLED)),
    Example("arch.unsupported_architecture", "unsupported.arch", "Unsupported architecture", capture("Assertion error (csrc/apis/attention.hpp:183): Unsupported architecture")),
    Example("arch.expects_one_of", "unsupported.arch", "expects arch to be one of", sglang("cutlass.base_dsl.common.OpError: OpError: expects arch to be one of [Arch.sm_100a, Arch.sm_103a], but got Arch.sm_120a", before=POOLED)),
    Example("arch.capability_table", "unsupported.arch", "KeyError: 12", sglang("KeyError: 12", SYMM, before=LOADED)),
    Example("arch.asserted", "unsupported.arch", "is_sm90_supported()", sglang("AssertionError", "sglang/srt/layers/attention/flashmla_backend.py __init__ | assert is_sm90_supported(), self", before=POOLED)),
    Example("arch.no_attention_backend", "unsupported.arch", "No valid attention backend found", vllm(
        "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=576, dtype=torch.bfloat16). Reasons: {FLASHMLA: [use_sparse]}.", "vllm/platforms/cuda.py get_attn_backend_cls")),
    Example("arch.torch_warned", "unsupported.arch", "sm_120 is not compatible", "/x/torch/cuda/__init__.py:235: UserWarning: \nNVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.\n"
        "The current PyTorch installation supports CUDA capabilities sm_80 sm_86 sm_90.\n" + vllm("RuntimeError: the device could not be used", before="")),
)  # fmt: skip

JIT = (
    Example("jit.smem", "jit.smem", "out of resource: shared memory", sglang("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.", before=SERVING)),
    Example("jit.smem", "jit.smem", "too much shared data", "ptxas error   : Entry function 'attn_fwd' uses too much shared data (0x1a400 bytes, 0xc000 max)\n"),
    Example("jit.smem.limit", "jit.smem", "lacks the shared memory resources", "[TensorRT-LLM][ERROR] Assertion failed: GPU lacks the shared memory resources to run GroupedGEMM kernel (/src/tensorrt_llm/cutlass/moe_gemm.h:1)\n"),
    Example("jit.smem.limit", "jit.smem", "exceeds the limit", vllm("RuntimeError: Dynamic shared memory size 131072 exceeds the limit of 101376", TRITON)),
    Example("jit.nvcc_arch", "jit.compile", "nvcc fatal", "nvcc fatal   : Unsupported gpu architecture 'compute_120a'\n"),
    Example("jit.nvcc_arch", "jit.compile", "is not defined for option 'gpu-name'", vllm("RuntimeError: the assembler failed: ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", TRITON)),
    Example("jit.ptx_version", "jit.compile", "Unsupported .version 8.7", "ptxas /tmp/x.ptx, line 5; fatal   : Unsupported .version 8.7; current version is '8.4'\n"),
    Example("jit.header_missing", "jit.compile", "Python.h: No such file or directory", "/tmp/x/main.c:5:10: fatal error: Python.h: No such file or directory\n    5 | #include <Python.h>\n"),
    Example("jit.link", "jit.compile", "cannot find -lcuda", "/usr/bin/ld: cannot find -lcuda: No such file or directory\ncollect2: error: ld returned 1 exit status\n"),
    Example("jit.compiler_missing", "jit.compile", "nvcc: not found", "/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found\n"),
    Example("jit.tool_missing", "jit.compile", "Failed to find C compiler", vllm("RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.", TRITON)),
    Example("jit.tool_missing", "jit.compile", "'ninja'", sglang("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", "flashinfer/jit/cpp_ext.py run_ninja", before=POOLED)),
    Example("jit.home_asserted", "jit.compile", "assert cuda_home is not None", sglang("AssertionError", "deep_gemm/__init__.py _find_cuda_home | assert cuda_home is not None", before=POOLED)),
    Example("jit.tool_missing", "jit.compile", "unsupported GNU version", "/usr/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 13 are not supported!\n"),
    Example("jit.triton", "jit.compile", "PassManager::run failed", sglang("RuntimeError: PassManager::run failed", TRITON, before=POOLED)),
    Example("jit.triton", "jit.compile", "`ptxas` failed", "`ptxas` failed with error code 255\n"),
    Example("jit.build_failed", "jit.compile", "CppCompileError", vllm("torch._inductor.exc.CppCompileError: C++ compile error")),
    Example("jit.build_failed", "jit.compile", "ninja: error: ", "ninja: error: loading 'build.ninja': No such file or directory\n"),
    Example("jit.build_failed", "jit.compile", "Ninja build failed", sglang("RuntimeError: Ninja build failed. Ninja output:\nninja: Entering directory '/root/.cache'\n[1/2] c++ -o x.o", "flashinfer/jit/cpp_ext.py run_ninja", before=POOLED)),
    Example("jit.build_failed", "jit.compile", "Error building extension", vllm("RuntimeError: Error building extension 'quant'", BUILD)),
    Example("jit.build_failed", "jit.compile", "NVCC compilation failed", "NVCC compilation failed: /root/.cache/deep_gemm/kernel.cu\n"),
    Example("jit.command_failed", "jit.compile", "returned non-zero exit status 1", vllm("subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/x/main.c', '-O3', '-shared']' returned non-zero exit status 1.", "triton/runtime/build.py _build")),
    Example("jit.command_failed", "jit.compile", "returned non-zero exit status 255", "Command '['/usr/local/cuda/bin/nvcc', '-c', 'x.cu']' returned non-zero exit status 255.\n"),
    Example("jit.ninja_stopped", "jit.compile", "ninja: build stopped", "[1/2] c++ -MMD -o x.o\nFAILED: x.o\nninja: build stopped: subcommand failed.\n"),
)  # fmt: skip

GRAPHS = (
    Example("graph.capturing", "graph.incompatible", "operation not permitted when stream is capturing", capture("CUDA error: operation not permitted when stream is capturing"), "graph_capture"),
    Example("graph.capturing", "graph.incompatible", "operation would make the legacy stream depend", "CUDA error: operation would make the legacy stream depend on a capturing blocking stream\n"),
    Example("graph.during_capture", "graph.incompatible", "Cannot copy between CPU and CUDA tensors", capture("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.")),
    Example("graph.during_capture", "graph.incompatible", "Offset increment outside graph capture", vllm("RuntimeError: Offset increment outside graph capture encountered unexpectedly.", "torch/cuda/graphs.py replay")),
    Example("graph.capture_broken", "graph.incompatible", "previous error during capture", sglang("RuntimeError: CUDA error: operation failed due to a previous error during capture", before=CAPTURING)),
    Example("graph.capturing.nccl", "graph.incompatible", "'operation not permitted when stream is capturing'", CAPTURING + "node0:1:1 [0] enqueue.cc:1437 NCCL WARN Cuda failure 900 'operation not permitted when stream is capturing'\n"),
)  # fmt: skip

MEMORY = (
    Example("gpu.kv_cache_buffer", "oom.kv_pool", "failed to allocate buffer for kv cache", "llama_kv_cache_init: failed to allocate buffer for kv cache\n", "kv_pool"),
    Example("gpu.component", "oom.kv_pool", "could not be created:", "[01/02/2026-03:04:05] [TRT-LLM] [E] The following component could not be created: Primary KV cache pool\n"),
    Example("gpu.component", "oom.weights", "could not be created: Model", raised("RuntimeError: Executor creation failed. The following component could not be created: Model", "tensorrt_llm/_torch/pyexecutor/py_executor_creator.py create")),
    Example("gpu.component", "oom.kv_pool", "KV cache", "The following component could not be created: Initial KV cache (temporary for KV cache size estimation)\nTotal GPU memory (GiB): 93.09\n"),
    Example("gpu.out_of_memory", "oom.weights", "Tried to allocate 2.25 GiB", sglang("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 94.97 GiB of which 1.61 GiB is free."), "weights"),
    Example("gpu.out_of_memory", "oom.runtime", "HIP out of memory", sglang("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.25 GiB.", before=SERVING), "serving"),
    Example("gpu.out_of_memory.text", "oom.graph_capture", "cudaMalloc failed: out of memory", CAPTURING + "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4480.00 MiB on device 3: cudaMalloc failed: out of memory\n", "graph_capture"),
    Example("gpu.out_of_memory.nccl", "oom.kv_pool", "'out of memory'", LOADED + "node0:1:1 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'\n", "kv_pool"),
)  # fmt: skip

NUMBERS = (
    Example("numerics.nan", "numerics", "probability tensor contains either", vllm("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", "vllm/v1/sample/sampler.py sample")),
    Example("numerics.nan", "numerics", "NaN in the logits", sglang("ValueError: Detected errors during sampling! NaN in the logits.", before=SERVING), "serving"),
    Example("numerics.nan", "numerics", "contains NaN", "Input logits contains NaN.\n"),
    Example("numerics.assert", "numerics", "Assertion `probability tensor", "/pytorch/aten/src/ATen/native/cuda/TensorCompare.cu:110: _assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.\n"),
    Example("numerics.nan_probe", "numerics", "device-side assert triggered", sglang("torch.AcceleratorError: CUDA error: device-side assert triggered", "sglang/srt/speculative/spec_utils.py maybe_detect_nan", before=SERVING)),
    Example("gpu.device_assert", "illegal_memory", "Assertion `-sizes[i] <= index", "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:94: operator(): block: [5,0,0], thread: [64,0,0] Assertion `-sizes[i] <= index && index < sizes[i] && \"index out of bounds\"` failed.\n"),
    Example("gpu.illegal_memory", "illegal_memory", "an illegal memory access", sglang("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", before=SERVING)),
    Example("gpu.illegal_memory", "illegal_memory", "misaligned address", "CUDA error: misaligned address\n"),
    Example("gpu.memory_access_fault", "illegal_memory", "Memory access fault by GPU node-5", V1_SERVING + "Memory access fault by GPU node-5 (Agent handle: 0x460e3a50) on address 0x7ec4dfe0e000. Reason: Write access to a read-only page.\n", "serving"),
    Example("native.crash", "unknown", "Segmentation fault", LOADED + "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"),
    Example("native.crash", "unknown", "Segfault encountered", "!!!!!!! Segfault encountered !!!!!!!\n"),
)  # fmt: skip

HANGS = (
    Example("hang.timed_out", "hang.timeout", "TimeoutError", vllm("TimeoutError", "vllm/distributed/device_communicators/shm_broadcast.py acquire_read")),
    Example("hang.timed_out", "hang.timeout", "TimeoutError", raised("asyncio.exceptions.TimeoutError", "vllm/engine/async_llm_engine.py run_engine_loop | async with asyncio_timeout(ENGINE_ITERATION_TIMEOUT_S):")),
    Example("hang.rpc", "hang.timeout", "RPC call to sample_tokens timed out", vllm("TimeoutError: RPC call to sample_tokens timed out.", "vllm/v1/executor/multiproc_executor.py get_response")),
    Example("hang.rpc", "hang.timeout", "Engine iteration timed out", "Engine iteration timed out. This should never happen!\n"),
)  # fmt: skip

PEERS = (
    Example("peer.eof", "indeterminate.peer_died", "EOFError", LOADING + raised("EOFError", "multiprocessing/connection.py _recv")),
    Example("peer.died", "indeterminate.peer_died", "ActorDiedError", V1_LOADING + raised("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "ray/_private/worker.py get")),
    Example("peer.died", "indeterminate.peer_died", "ShardCannotStart", "Error: ShardCannotStart\n"),
    Example("peer.died", "indeterminate.peer_died", "died unexpectedly", V1_LOADING + CORE0 + "ERROR 01-02 03:04:05 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n"),
    Example("peer.died", "indeterminate.peer_died", "mpirun noticed", "mpirun noticed that process rank 3 with PID 77 on node n1 exited on signal 9 (Killed).\n"),
    Example("peer.worker_exit", "indeterminate.peer_died", "died, exit code: -15", V1_LOADING + "ERROR 01-02 03:04:05 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 77 died, exit code: -15\n"),
)  # fmt: skip

EXAMPLES = ARCH + JIT + GRAPHS + MEMORY + NUMBERS + HANGS + PEERS


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.signature)
def test_a_failure_on_the_gpu_is_known(example: Example) -> None:
    check(example)


HEALTHY = (
    "node0:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n",
    prefixed("INFO 01-02 03:04:05 [cuda.py:1] ", "FlashAttention 3 is not supported on this GPU, using FlashAttention 2\nCompute capability 12.0 does not support trtllm; minimum 10.0"),
    "Warning: Compute capability 12.0 is not fully supported, only 9.0\n",
    "[2026-01-02 03:04:05 TP0] FlashInfer allreduce fusion requires SM90 or SM10X, disabling it\n",
    "To avoid CUDA out of memory, lower --max-running-requests\n",
    "AUTOTUNE mm(4096x6144, 6144x256)\n  triton_mm_1 OutOfMemoryError: out of resource: triton_mm Required: 163840 Hardware limit:101376\n",
    "No available shared memory broadcast block found in 60 seconds.\n",
)  # fmt: skip
