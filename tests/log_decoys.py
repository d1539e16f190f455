# ruff: noqa: E501  (log lines are as long as they are)
"""What stands in logs of boots that go well, wherever, and must never be taken for a failure.

Every text is written for the tests, in the words that the programs print; no test may need a real log.
"""

from __future__ import annotations

from tests.log_samples import MAIN, RANK, WORKER, v

#: What stands in logs of boots that go well, wherever: advice, lists of arguments, usage texts, warnings, other programs.
DECOYS: dict[str, str] = {
    # advice
    "sglang's advice": (
        "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
        "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n3. disable torch compile by not using --enable-torch-compile\n"
        "4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)\n"
        "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose"
    ),
    "torch's advice": (
        "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    ),
    "vllm's advice": v(
        "If you see CUDA out of memory errors, try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
        "kv_cache_utils.py",
    ),
    "vllm's graph memory": WORKER
    + v(
        "CUDA graph memory profiling is disabled. Without it, CUDA graph memory is not accounted for during KV cache allocation, which may require lowering --gpu-memory-utilization to avoid OOM.",
        level="WARNING",
    ),
    "vllm's capture": "INFO 01-15 10:00:04 model_runner.py:984] CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, consider decreasing `gpu_memory_utilization` or enforcing eager mode.",
    "vllm's fitted memory": WORKER
    + v(
        "Free memory on device (46.93/47.4 GiB) on startup. Desired GPU memory utilization is (0.95, 45.03 GiB). Replace gpu_memory_utilization config with `--kv-cache-memory=-1160530022` (-1.08 GiB) to fit into requested memory."
    ),
    "oom killer advice": "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
    "cuda's advice": "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "container's banner": (
        "NOTE: The SHMEM allocation limit is set to the default of 64MB.  This may be\n   insufficient for SGLang.  NVIDIA recommends the use of the following flags:\n"
        "   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 ..."
    ),
    "container's doubt": "WARNING: Detected NVIDIA GB10 GPU, which may not yet be supported in this version of the container",
    "container's complaint": "ERROR: No supported GPU(s) detected to run this container",
    "pip": (
        "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed. This behaviour is the source of the following dependency conflicts.\n"
        "sglang 0.5.6 requires torch==2.9.1, but you have torch 2.8.0 which is incompatible."
    ),
    "ld.so": "ERROR: ld.so: object '/usr/lib/x86_64-linux-gnu/libjemalloc.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
    "hub": (
        "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /m/resolve/main/config.json (Caused by NewConnectionError('Failed to resolve 'huggingface.co'"
        "'))\"), '(Request ID: 1)')' thrown while requesting HEAD https://huggingface.co/m/resolve/main/config.json\nRetrying in 1s [Retry 1/5]."
    ),
    "hub download": "Error while downloading from https://cas-bridge.xethub.hf.co/x: HTTPSConnectionPool(host='cas-bridge.xethub.hf.co', port=443): Read timed out.\nTrying to resume download...",
    "health probe": "curl: (7) Failed to connect to localhost port 30000 after 0 ms: Connection refused",
    "clean up": "rm: cannot remove '/dev/shm/nccl-*': No such file or directory\ncat: /models/m/README.md: No such file or directory",
    # arguments
    "server_args": MAIN
    + "server_args=ServerArgs(model_path='m', mem_fraction_static=0.9, json_model_override_args='{}', help='RuntimeError: Not enough memory', log_level='error')",
    "server_args dict": MAIN
    + "server_args={'model_path': 'm', 'error': 'CUDA out of memory. Tried to allocate 1 GiB', 'tp_size': 1}",
    "namespace": "INFO 01-15 10:00:00 [api_server.py:1035] args: Namespace(model='m', chat_template='NCCL error: CUDA error: out of memory', port=8000)",
    "non-default args": "(APIServer pid=1001) INFO 01-15 10:00:00 [utils.py:233] non-default args: {'model': 'm', 'override': 'no kernel image is available'}",
    "engine config": WORKER
    + v(
        "Initializing a V1 LLM engine (v0.11.0) with config: model='m', quantization=None, compilation_config={'debug': 'ValueError: not supported'}",
        "core.py",
    ),
    "shell trace": "+ exec python3 -m sglang.launch_server --model-path /m --enable-nan-detection --disable-custom-all-reduce",
    "environment": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\nNCCL_DEBUG=WARN\nTORCH_NCCL_BLOCKING_WAIT=1",
    "usage": (
        "usage: launch_server.py [-h] --model-path MODEL_PATH\n                        [--kv-cache-dtype {auto,fp8_e5m2}]\n"
        "                        [--device DEVICE] CUDA out of memory is not raised here"
    ),
    "request dump": MAIN
    + "Receive: obj=GenerateReqInput(rid='a', text='Scheduler hit an exception: RuntimeError: CUDA out of memory. Tried to allocate', stream=True)",
    "vllm request": v(
        "Received request cmpl-1: prompt: 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\\nTraceback (most recent call last):', params: SamplingParams(n=1)",
        "logger.py",
    ),
    # NCCL, gloo, c10d
    "nccl info": "node0:1001:1101 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Failed to open: cannot open shared object file",
    "nccl peers": "node0:1001:1101 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct /dev/shm/nccl-Xk2 Connection closed by peer",
    "nccl in a prefix": RANK + "node0:1001:1101 [0] NCCL INFO cudaDriverVersion 12080 out of memory",
    "nccl verbs": "node0:1001:1101 [0] misc/ibvwrap.cc:94 NCCL WARN Failed to open libibverbs.so[.1]",
    "nccl bus": "node0:1001:1101 [1] graph/xml.cc:332 NCCL WARN Could not find real path of /sys/class/pci_bus/0000:01/../../0000:01:00.0",
    "rccl": 'node0:1001:1101 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
    "verbs": "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': libmlx5-rdmav34.so: cannot open shared object file: No such file or directory",
    "gloo": "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "c10d socket": "[rank0]:[W115 10:00:09.006 socket.cpp:200] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    "c10d store": "[rank1]:[W115 10:00:09.006 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=87, addr=[localhost]:1): Connection reset by peer",
    "c10d group": "[rank0]:[W115 10:00:09.006 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.",
    "c10d barrier": "[W115 10:00:09.006 ProcessGroupNCCL.cpp:5023] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 as device used by this process is currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.",
    # Python's and torch's warnings
    "frozen warning": "<frozen importlib._bootstrap_external>:1301: FutureWarning: The cuda.cudart module is deprecated and will be removed in a future release, please switch to use the cuda.bindings.runtime module instead.",
    "gb10": (
        "/x/torch/cuda/__init__.py:283: UserWarning: \n    Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.\n"
        "    Minimum and Maximum cuda capability supported by this version of PyTorch is\n    (8.0) - (12.0)\n    \n  warnings.warn("
    ),
    "sm_120": (
        "/x/torch/cuda/__init__.py:235: UserWarning: \nNVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.\n"
        "The current PyTorch installation supports CUDA capabilities sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90.\n"
        "If you want to use the NVIDIA GeForce RTX 5090 GPU with PyTorch, please check the instructions at https://pytorch.org/get-started/locally/\n\n  warnings.warn("
    ),
    "awq": '/x/awq.py:68: UserWarning: Only CUDA and HIP support AWQ currently.\n  warnings.warn(f"Only CUDA and HIP support AWQ currently.")',
    "arch list": "W0115 10:00:02.120000 1350 torch/utils/cpp_extension.py:2425] TORCH_CUDA_ARCH_LIST is not set, all archs for visible cards are included for compilation. \nW0115 10:00:02.120000 1350 torch/utils/cpp_extension.py:2425] If this is not desired, please set os.environ['TORCH_CUDA_ARCH_LIST'] to specific architectures.",
    "recompiles": "W0115 10:00:02.120000 1350 torch/_dynamo/convert_frame.py:1016] [0/8] torch._dynamo hit config.recompile_limit (8)",
    "deprecated dtype": "`torch_dtype` is deprecated! Use `dtype` instead!",
    "model type": "You are using a model of type qwen3_next to instantiate a model of type qwen3. This is not supported for all configurations of models and can yield errors.",
    "rope": "Unrecognized keys in `rope_scaling` for 'rope_type'='yarn': {'original_max_position_embeddings'}",
    "torchao": "Skipping import of cpp extensions due to incompatible torch version 2.9.1+cu128 for torchao version 0.14.1             Please see https://github.com/pytorch/ao/issues/2919 for more info",
    "too long": "Token indices sequence length is longer than the specified maximum sequence length for this model (18294 > 16384). Running this sequence through the model will result in indexing errors",
    "tokenizers": "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...",
    "tensorflow": "2026-01-15 10:00:02.120000: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been registered",
    "absl": "E0000 00:00:1740000000.123456    1350 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered",
    "root warning": "WARNING:root:Failed to import deep_gemm: No module named 'deep_gemm'. CUDA error handling is limited.",
    "pydantic": "/x/pydantic/_internal/_generate_schema.py:2249: UnsupportedFieldAttributeWarning: The 'repr' attribute with value False was provided to the `Field()` function, which has no effect in the context it was used.\n  warnings.warn(",
    # left out and fallen back
    "left out": MAIN
    + "Ignore import error when loading sglang.srt.models.grok: libfoo.so: cannot open shared object file: No such file or directory",
    "left out module": MAIN
    + "Ignore import error when loading sglang.srt.models.glm_ocr: No module named 'transformers.models.glm_ocr'",
    "custom_ar": MAIN
    + "Failed to import from custom_ar with ImportError('/x/common_ops.abi3.so: undefined symbol: _ZN3c10')",
    "vllm._C": "WARNING 01-15 10:00:02 [cuda.py:22] Failed to import from vllm._C with ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')",
    "triton kernels": "(EngineCore_DP0 pid=1310) ERROR 01-15 10:00:02 [gpt_oss_triton_kernels_moe.py:60] Failed to import Triton kernels. Please make sure your triton version is compatible. Error: cannot import name 'routing_from_bitmatrix' from 'triton_kernels.routing' (/x/triton_kernels/routing.py)",
    "repo id": "(APIServer pid=1001) ERROR 01-15 10:00:02 [repo_utils.py:65] Error retrieving file list: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/m'. Use `repo_type` argument if needed., retrying 1 of 2",
    "safetensors repo": "(APIServer pid=1001) ERROR 01-15 10:00:02 [repo_utils.py:47] Error retrieving safetensors: '/models/m' is not a safetensors repo. Couldn't find 'model.safetensors.index.json' or 'model.safetensors' files., retrying 2 of 2",
    "no deepep": RANK + "DeepEP is not installed. No module named 'deep_ep'",
    "custom allreduce": RANK
    + "Setup Custom allreduce failed with CUDART error: peer access is not supported between these two devices. To silence this warning, specify --disable-custom-all-reduce explicitly.",
    "custom allreduce pcie": RANK
    + "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this warning, specify --disable-custom-all-reduce explicitly.",
    "vllm custom allreduce": WORKER
    + v(
        "Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. To silence this warning, specify disable_custom_all_reduce=True explicitly.",
        "custom_all_reduce.py",
        "WARNING",
    ),
    "symm_mem": WORKER
    + v(
        "SymmMemCommunicator: Device capability 12.0 not supported, communicator is not available.",
        "symm_mem.py",
        "WARNING",
    ),
    "sglang symm_mem": RANK
    + "TorchSymmMemCommunicator: Device capability 12 not supported, communicator is not available.",
    "fusion off": WORKER
    + v(
        "Flashinfer allreduce fusion is not supported for world size 8 or max size is not provided",
        "allreduce_rms_fusion.py",
        "WARNING",
    ),
    "workspace off": RANK
    + "Failed to initialize FlashInfer workspace (backend=trtllm): CUDA out of memory. Tried to allocate 2.00 GiB. Disabling it permanently.",
    "moe config": RANK
    + "Using MoE kernel config with down_moe=False. Performance might be sub-optimal! Config file not found at /x/E=128,N=384,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition_down.json",
    "scale format": RANK
    + "DeepGEMM is enabled but the scale_fmt of checkpoint is not ue8m0. This might cause accuracy degradation on Blackwell.",
    "fa3": WORKER
    + v(
        "Flash Attention 3 is only supported on Hopper (SM90); falling back to FlashAttention 2.",
        "fa_utils.py",
        "WARNING",
    ),
    "marlin": WORKER
    + v(
        "Your GPU does not have native support for FP4 computation but FP4 quantization is being used. Weight-only FP4 compression will be used leveraging the Marlin kernel.",
        "marlin_utils_fp4.py",
        "WARNING",
    ),
    "wsl": WORKER
    + v("Using 'pin_memory=False' as WSL is detected. This may slow down the performance.", "interface.py", "WARNING"),
    "swap": "WARNING 01-15 10:00:02 config.py:1148] Possibly too large swap space. 4.00 GiB out of the 7.75 GiB total CPU memory is allocated for the swap space.",
    "kv retracted": RANK
    + "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.09 -> 0.19",
    "decode retracted": RANK + "Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.0980 -> 0.1919",
    "soft watchdog": RANK + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
    # just-in-time compilation, tuning
    "autotune": "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 163840 Hardware limit:101376 Reducing block sizes or `num_stages` may help.\nAUTOTUNE mm(4096x6144, 6144x256)\n  triton_mm_12 0.0410 ms 100.0%",
    "autotune left out": "\n".join(
        f"W0115 10:00:02.120000 1350 torch/_inductor/select_algorithm.py:2100] [0/0] {line}"
        for line in (
            "Runtime error during autotuning: ",
            "out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.. ",
            "Ignoring this choice.",
        )
    ),
    "tactic oom": "2026-01-15 10:00:29,170 - WARNING - autotuner.py:1315 - flashinfer.jit: [Autotuner]: OOM detected, falling back to default tactic",
    "tactic skipped": (
        "2026-01-15 10:00:29,170 - WARNING - autotuner.py:485 - flashinfer.jit: [Autotuner]: Skipping tactic <flashinfer.fused_moe.core.MoERunner object at 0x7f> 14, due to failure while profiling: "
        "[TensorRT-LLM][ERROR] Assertion failed: Failed to initialize cutlass TMA WS grouped gemm. Error: Error Internal (/x/moe_gemm_tma_ws_launcher.inl:199)\n"
        "1       0x7f3e1c0d2f tensorrt_llm::common::throwRuntimeError(char const*, int, char const*) + 82\n2       0x7f3e1c1a00 /x/fused_moe_120.so(+0x2a00) [0x7f3e1c1a00]"
    ),
    "tuning": "[AutoTuner]: Tuning fp8_gemm:  86%|████████▌ | 18/21 [00:00<00:00, 23.54profile/s]",
    "jit": "2026-01-15 10:00:31,320 - INFO - flashinfer.jit: Prebuilt kernels not found, using JIT backend",
    "deep_gemm": RANK
    + "Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins) if you have not run `sglang.compile_deep_gemm`.",
    "deep_gemm warmup": RANK + "Required memory for warmup: 44.37500047683716GB, Available memory: 39.47662353515625GB",
    "nvcc advice": "Warning: please use at least NVCC 12.9 for the best DeepGEMM performance",
    "ptxas info": "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline",
    "nvcc": '[1/3] /usr/local/cuda/bin/nvcc --generate-dependencies-with-compile -gencode=arch=compute_120a,code=sm_120a -DFLASHINFER_ENABLE_FP8_E4M3 -c /x/batch_prefill.cu -o x.o\n/x/prefill.cuh(123): warning #177-D: variable "error" was declared but never referenced',
    "ld": "/usr/bin/ld: skipping incompatible /usr/lib/i386-linux-gnu/libcuda.so when searching for -lcuda",
    "jit at run time": WORKER
    + v(
        "Triton kernel JIT compilation during inference: _topk_topp_kernel. This causes a latency spike; consider extending warmup to cover this shape/config.",
        "jit_monitor.py",
        "WARNING",
    ),
    "no block": "(EngineCore_DP0 pid=1310) "
    + v(
        "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).",
        "shm_broadcast.py",
    ),
    "trtllm workspace": "[TensorRT-LLM][WARNING] Attention workspace size is not enough, increase the size from 0 bytes to 100738048 bytes",
    "trt tactic": "[05/18/2026-18:57:48] [TRT] [W] UNSUPPORTED_STATESkipping tactic 9 due to insufficient memory on requested size of 157500 detected for tactic 0x0000000000000009.",
    "deprecated endpoint": MAIN
    + "Endpoint '/get_model_info' is deprecated and will be removed in a future version. Please use '/model_info' instead.",
    "wheel": "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.9it/s]",
    "ray": "(RayWorkerWrapper pid=4298) node0:4298:4486 [3] NCCL INFO P2P Chunksize set to 131072 [repeated 2x across cluster]",
    "record": '{"level": "WARN", "message": "CUDA out of memory. Tried to allocate 2 GiB", "time": 1}',
    "prose": "we requires only SM90 in prose, and Hopper is nice",
}

#: A traceback that the program lived on with: a line of it is followed by more of the boot.
SURVIVED: dict[str, str] = {
    "ignored": (
        "Exception ignored in: <function CustomAllreduce.__del__ at 0x7f1c>\nTraceback (most recent call last):\n"
        "  File \"/x/custom_all_reduce.py\", line 400, in __del__\n    self.close()\nAttributeError: 'CustomAllreduce' object has no attribute '_ptr'"
    ),
    "import": (
        'Traceback (most recent call last):\n  File "/x/deep_gemm/__init__.py", line 4, in <module>\n    from . import _C\n'
        "ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory"
    ),
    "inductor": "\n".join(
        f"E0115 10:00:02.120000 1350 torch/_inductor/select_algorithm.py:2134] [0/0] {line}"
        for line in (
            "Exception out of resource: shared memory, Required: 163840, Hardware limit: 101376. for benchmark choice TritonTemplateCaller",
            "Traceback (most recent call last):",
            '  File "/x/triton/compiler/compiler.py", line 416, in _init_handles',
            "    raise OutOfResources(self.metadata.shared, max_shared, 'shared memory')",
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        )
    ),
    "full gpu": (
        f'{RANK}Autotuning failed, using defaults\nTraceback (most recent call last):\n  File "/x/autotune.py", line 9, in run\n    f()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB."
    ),
}

#: Other programs' refusals of their command line, before the engine starts.
OTHERS = {
    "modprobe": '/usr/bin/nvidia-modprobe: unrecognized option: "-s"\n\nERROR: Invalid commandline, please run `/usr/bin/nvidia-modprobe --help` for usage information.',
    "usage": "usage: wait_for_disk.py [-h] [--path PATH]\nwait_for_disk.py: error: unrecognized arguments: --timeout 5",
}

#: Requests that failed at a server that is ready; it goes on.
REQUESTS: dict[str, str] = {
    "too long": (
        f'{MAIN}ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n  File "/x/starlette/routing.py", line 1, in app\n    f()\n'
        "ValueError: The input (90000 tokens) is longer than the model's context length (40960 tokens)"
    ),
    "vllm's": "\n".join(
        f"ERROR 01-15 10:01:02 [serving_chat.py:200] {line}"
        for line in (
            "Error in preprocessing prompt inputs",
            "Traceback (most recent call last):",
            '  File "/x/vllm/entrypoints/openai/serving_chat.py", line 183, in create_chat_completion',
            "    ) = await self._preprocess_chat(",
            "ValueError: This model's maximum context length is 16384 tokens. However, you requested 122946 tokens. Please reduce the length of the messages.",
        )
    ),
    "grammar": f"{RANK}Failed to compile the grammar: RuntimeError: [10:00:02] /x/grammar_compiler.cc:1: CUDA error: the schema is unsupported",
    "tool call": "\n".join(
        f"(APIServer pid=1001) ERROR 01-15 10:01:02 [hermes_tool_parser.py:121] {line}"
        for line in (
            "Error in extracting tool call from response.",
            "Traceback (most recent call last):",
            '  File "/x/hermes_tool_parser.py", line 98, in f',
            "    json.loads(match)",
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        )
    ),
    "not found": f'{MAIN}INFO:     10.0.0.1:5012 - "GET /error:%20unrecognized%20arguments:%20CUDA%20out%20of%20memory HTTP/1.1" 404 Not Found',
}
