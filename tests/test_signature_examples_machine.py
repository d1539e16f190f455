# ruff: noqa: E501  (log lines are as long as they are)
"""An example of every failure of the machine: host memory, hardware, driver, how the installed packages fit."""

from __future__ import annotations

import pytest

from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.data import package_toml

from .failure_logs import (
    LOADED,
    LOADING,
    POOLED,
    Example,
    check,
    prefixed,
    raised,
    sglang,
    v0,
    vllm,
)

DL = "torch/_ops.py load_library"

HOST = (
    Example("host.cpu_allocator", "oom.host", "DefaultCPUAllocator: can't allocate memory", sglang(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9068871296 bytes. Error code 12 (Cannot allocate memory)")),
    Example("host.cpu_allocator", "oom.host", "not enough memory", "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 58720256 bytes.\n"),
    Example("host.pinned", "oom.host", "CUDA error: out of memory", sglang("RuntimeError: CUDA error: out of memory", "sglang/srt/mem_cache/memory_pool_host.py __init__", before=POOLED)),
    Example("host.pinned", "oom.host", "cudaErrorMemoryAllocation", vllm("RuntimeError: cudaErrorMemoryAllocation", "vllm/v1/worker/gpu_model_runner.py init | torch.zeros(n, pin_memory=True)")),
    Example("host.hicache", "oom.host", "Not enough host memory", sglang(
        "ValueError: Not enough host memory available. Requesting 80.00 GB but only have 60.00 GB free. Please reduce the size of the hierarchical cache.", before=POOLED)),
    Example("host.hicache", "oom.host", "Not enough host memory", "Not enough host memory available. Requesting 21.30 GB but only have 12.00 GB free.\n"),
    Example("host.swap_space", "oom.host", "Too large swap space.", v0("ValueError: Too large swap space. 16.00 GiB out of the 15.50 GiB total CPU memory is allocated for the swap space.")),
    Example("host.swap_space", "oom.host", "Too large swap space.", "(pid=77) Too large swap space. 64.00 GiB out of the 62.70 GiB total CPU memory is allocated for the swap space.\n"),
    Example("host.ray", "oom.host", "low on memory", v0("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.")),
    Example("host.ray", "oom.host", "memory pressure", "(raylet) node_manager.cc:3065: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: 5f)\n"),
    Example("host.python", "oom.host", "MemoryError", sglang("MemoryError")),
    Example("host.python", "oom.host", "_ArrayMemoryError", vllm("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9.00 GiB for an array with shape (9, 2) and data type float32")),
    Example("host.bad_alloc", "oom.host", "std::bad_alloc", LOADING + "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"),
    Example("host.bad_alloc", "oom.host", "memory allocation of 4294967296 bytes failed", "memory allocation of 4294967296 bytes failed\n"),
    Example("host.mmap", "oom.host", "unable to mmap", vllm("RuntimeError: unable to mmap 4961000000 bytes from file </m/model-00001-of-00004.safetensors>: Cannot allocate memory (12)")),
    Example("host.mmap", "oom.host", "mmap failed", "llama_model_load: error loading model: mmap failed: Cannot allocate memory\n"),
    Example("host.buffer", "oom.host", "failed to allocate CPU buffer", "alloc_tensor_range: failed to allocate CPU buffer of size 437944320\n"),
    Example("host.enomem", "oom.host", "[Errno 12]", sglang("OSError: [Errno 12] Cannot allocate memory", "multiprocessing/popen_fork.py _launch")),
    Example("host.oom_killer", "oom.host", "Killed process 1004", LOADING + "kernel: Memory cgroup out of memory: Killed process 1004 (python3) total-vm:181200000kB, anon-rss:62914560kB\n"),
    Example("host.oom_killer", "oom.host", "Out of memory: Killed process", "[  915.204] Out of memory: Killed process 4242 (VLLM::Worker_TP) total-vm:94371840kB, anon-rss:63000000kB, UID:0\n"),
    Example("host.oom_killed_status", "oom.host", "OOMKilled", "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"),
    Example("host.oom_kill_constraint", "oom.host", "oom-kill:constraint", LOADED + "[  915.203] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/x,task=python3,pid=9,uid=0\n"),
)  # fmt: skip

HARDWARE = (
    Example("hardware.ecc", "hardware", "uncorrectable ECC error", sglang("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", before=POOLED)),
    Example("hardware.ecc", "hardware", "fallen off the bus", "[ 1843.4] NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.\n"),
    Example("hardware.ecc", "hardware", "GPU is lost", "Unable to determine the device handle for GPU0000:65:00.0: GPU is lost.  Reboot the system to recover this GPU\n"),
    Example("hardware.xid", "hardware", "Xid (PCI:0000:65:00): 119", "[ 1843.4] NVRM: Xid (PCI:0000:65:00): 119, pid=1694, name=python3, Timeout after 45s of waiting for RPC response from GPU0 GSP!\n"),
    Example("hardware.xid.handled", "hardware", "Xid (PCI:0000:65:00): 63", "kernel: NVRM: Xid (PCI:0000:65:00): 63, pid=7, Row Remapper: New row marked for remapping\n"),
    Example("hardware.xid.application", "illegal_memory", "Xid (PCI:0000:65:00): 31", "Jan  2 03:04:05 node7 kernel: NVRM: Xid (PCI:0000:65:00): 31, pid=1694, name=python3, Ch 00000008, intr 00000000. MMU Fault\n"),
    Example("hardware.driver_log", "hardware", "RmInitAdapter failed", "[   12.9] NVRM: GPU 0000:65:00.0: RmInitAdapter failed! (0x62:0x40:1918)\n"),
    Example("hardware.driver_log", "hardware", "AER: Uncorrected (Fatal)", "[   12.9] pcieport 0000:60:01.1: AER: Uncorrected (Fatal) error message received from 0000:65:00.0\n"),
    Example("driver.mismatch", "driver.mismatch", "Error 803:", raised("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination")),
    Example("driver.mismatch", "driver.mismatch", "Driver/library version mismatch", "Failed to initialize NVML: Driver/library version mismatch\n"),
    Example("driver.mismatch", "driver.mismatch", "driver on your system is too old", vllm("RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver.", "torch/cuda/__init__.py _lazy_init")),
    Example("driver.mismatch.line", "driver.mismatch", "forward compatibility was attempted", "CUDA error 804: forward compatibility was attempted on non supported HW\n" + sglang("RuntimeError: no GPU for this rank", before="")),
    Example("driver.mismatch.warned", "driver.mismatch", "Error 802:", "/x/torch/cuda/__init__.py:184: UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
        "that might have already set an error? Error 802: system not yet initialized\n" + raised("RuntimeError: No accelerator (CUDA, XPU, HPU) is available.")),
    Example("driver.ptx_toolchain", "driver.mismatch", "unsupported toolchain", sglang("torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain.", before=POOLED)),
    Example("driver.ptx_toolchain", "driver.mismatch", "cudaErrorUnsupportedPtxVersion", "CUDA runtime call failed: cudaErrorUnsupportedPtxVersion\n"),
    Example("driver.container", "driver.mismatch", "unsatisfied condition: cuda>=12.8", "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver to a newer version, or use an earlier cuda container: unknown.\n"),
    Example("driver.container", "driver.mismatch", "could not select device driver", 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].\n'),
    Example("driver.absent", "driver.mismatch", "Found no NVIDIA driver", raised("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver", "torch/cuda/__init__.py _lazy_init")),
    Example("driver.absent", "driver.mismatch", "couldn't communicate", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n"),
)  # fmt: skip

IMPORTS = (
    Example("import.undefined_symbol", "import.abi", "undefined symbol: _ZN3c105ErrorC2E", raised("ImportError: /x/common_ops.abi3.so: undefined symbol: _ZN3c105ErrorC2E", DL)),
    Example("import.undefined_symbol", "import.abi", "symbol lookup error", "/usr/bin/python3: symbol lookup error: /x/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister\n"),
    Example("import.library", "import.abi", "cannot open shared object file", "error while loading shared libraries: libnvinfer.so.10: cannot open shared object file: No such file or directory\n"),
    Example("import.binary", "import.abi", "may indicate binary incompatibility", raised("ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from PyObject")),
    Example("import.binary", "import.abi", "operator torchvision::nms does not exist", raised("RuntimeError: operator torchvision::nms does not exist", "torchvision/_meta_registrations.py meta_nms")),
    Example("import.binary", "import.abi", "were compiled with different CUDA", "Detected that PyTorch and torchvision were compiled with different CUDA major versions. PyTorch has CUDA Version=12.8 and torchvision has CUDA Version=12.6.\n"),
    Example("import.op_missing", "import.abi", "'_OpNamespace' '_C' object has no attribute", vllm("AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'", "torch/_ops.py __getattr__")),
    Example("import.op_missing", "import.abi", "'sgl_kernel' object has no attribute", "failed: '_OpNamespace' 'sgl_kernel' object has no attribute 'fp8_scaled_mm'\n"),
    Example("import.backend_missing", "import.abi", "with arguments from the 'CUDA' backend", sglang("NotImplementedError: Could not run 'sgl_kernel::x' with arguments from the 'CUDA' backend.")),
    Example("import.backend_missing", "import.abi", "Could not run", "Could not run 'torchvision::nms' with arguments from the 'CUDA' backend.\n"),
    Example("driver.absent", "driver.mismatch", "No CUDA GPUs are available", sglang("RuntimeError: No CUDA GPUs are available", before="")),
    Example("import.version_required", "import.abi", "less than the minimum required version", raised("Exception: flashinfer_python is installed with version 0.2.5, which is less than the minimum required version 0.2.9rc2. "
        "Please reinstall the latest version by following the instructions at https://docs.flashinfer.ai/installation.html.", "sglang/srt/entrypoints/engine.py _set_envs_and_config")),
    Example("import.version_required", "import.abi", "does not match flashinfer version", raised("RuntimeError: flashinfer-cubin version (0.5.2) does not match flashinfer version (0.5.3). Please install the same version of both packages.")),
    Example("import.common_ops", "import.abi", "common_ops", raised("ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops library!", "sgl_kernel/load_utils.py _load_architecture_specific_ops")),
    Example("import.stored_error", "import.abi", "'ImportError' object has no attribute", sglang("AttributeError: 'ImportError' object has no attribute 'fp8_gemm_nt'", "sglang/srt/layers/deep_gemm_wrapper/entrypoint.py gemm", before=POOLED)),
    Example("import.attribute", "import.abi", "cannot import name", raised("ImportError: cannot import name 'Qwen2_5_VLConfig' from 'transformers' (/x/transformers/__init__.py)")),
    Example("import.attribute", "import.abi", "module 'triton' has no attribute", vllm("AttributeError: module 'triton' has no attribute 'jit'")),
    Example("import.module_missing", "import.abi", "No module named 'sgl_kernel'", raised("ModuleNotFoundError: No module named 'sgl_kernel'", "sglang/srt/layers/activation.py <module>")),
    Example("import.module_missing", "import.abi", "No module named 'vllm._C'", raised("ModuleNotFoundError: No module named 'vllm._C'", "vllm/platforms/cuda.py <module>")),
)  # fmt: skip

EXAMPLES = HOST + HARDWARE + IMPORTS


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.signature)
def test_a_failure_of_the_machine_is_known(example: Example) -> None:
    check(example)


HEALTHY = (
    # A container that was not killed for memory; a corrected error; a reset that a program asked for.
    'docker inspect: "OOMKilled": false, "Dead": false\n',
    "[    1.2] mce: [Hardware Error]: Machine check events logged\n[    1.2] EDAC: [Hardware Error]: Corrected error, no action required.\n",
    "[    1.2] pcieport 0000:60:01.1: AER: Corrected error received: 0000:65:00.0\n",
    # What torch and Ray say on machines where all is well.
    "/x/torch/cuda/__init__.py:734: UserWarning: Can't initialize NVML\n",
    "/x/google/protobuf/x.py:1: UserWarning: Protobuf gencode version 5.28.3 is exactly one major version older than the runtime\n",
    "2026-01-02 03:04:05,123\tINFO worker.py:1917 -- Started a local Ray instance.\n",
    "Warning: numpy.ufunc size changed, may indicate binary incompatibility. Expected 216 from C header, got 232 from PyObject\n",
    prefixed("(raylet) ", "[2026-01-02 03:04:05,123 I 7 7] node_manager.cc: memory usage is 71.2% of 512 GiB\n"),
)  # fmt: skip


def test_the_numbers_of_xids_mean_the_same_in_a_log_as_beside_it() -> None:
    outcomes = {
        "hardware": "hardware",
        "handled": "hardware",
        "application": "illegal_memory",
        "consequence": "illegal_memory",
    }
    taken_otherwise = {8, 154}
    for kind, table in package_toml("diagnose/xids.toml").items():
        for number in set(map(int, table)) - taken_otherwise:
            log = f"kernel: NVRM: Xid (PCI:0000:65:00): {number}, pid=7, name=python3\n"
            assert (number, classify_text(log, engine=None).outcome) == (number, outcomes[kind])
