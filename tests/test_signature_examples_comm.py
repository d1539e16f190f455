# ruff: noqa: E501  (log lines are as long as they are)
"""An example of every failure between GPUs and processes (signatures of comm.toml)."""

from __future__ import annotations

import pytest

from .failure_logs import (
    CAPTURING,
    INIT,
    LOADED,
    LOADING,
    POOLED,
    SERVING,
    V1_LOADING,
    Example,
    check,
    raised,
    sglang,
    vllm,
)

CUSTOM = "sglang/srt/distributed/device_communicators/custom_all_reduce.py __init__"
GROUP = "torch/distributed/distributed_c10d.py all_reduce"
WARN = "node0:1:1 [0] "
RANK3 = "[rank3]:[E115 10:20:01.000000001 ProcessGroupNCCL.cpp:629] [Rank 3] "

EXAMPLES = (
    Example("p2p.not_supported", "comm.p2p", "peer access is not supported", sglang("RuntimeError: CUDART error: peer access is not supported between these two devices", CUSTOM, before=LOADED)),
    Example("p2p.not_supported", "comm.p2p", "mapping of buffer object failed", "CUDA error: mapping of buffer object failed\n"),
    Example("p2p.ipc", "comm.p2p", "invalid argument", vllm("RuntimeError: CUDA error: invalid argument", "vllm/distributed/device_communicators/custom_all_reduce.py create_shared_buffer")),
    Example("p2p.ipc", "comm.p2p", "invalid resource handle", raised("RuntimeError: [TensorRT-LLM][ERROR] CUDA runtime error in cudaIpcOpenMemHandle: invalid resource handle", "tensorrt_llm/_ipc_utils.py open_ipc_memory")),
    Example("p2p.symmetric_memory", "comm.p2p", "CUDASymmetricMemory", sglang("RuntimeError: CUDASymmetricMemoryAllocator::rendezvous: pidfd_getfd failed: Operation not permitted", before=LOADED)),
    Example("p2p.ipc.line", "comm.p2p", "custom_all_reduce.cuh:455", POOLED + "Failed: Cuda error /x/csrc/custom_all_reduce.cuh:455 'invalid argument'\n"),
    Example("deepep", "comm.deepep", "DeepEP error", sglang("RuntimeError: DeepEP error: timeout (dispatch CPU)", before=SERVING)),
    Example("deepep", "comm.deepep", "num_max_dispatch_tokens_per_rank", sglang(
        "RuntimeError: Failed: Assertion error /x/deep_ep.cpp:1105 'x.size(0) == topk_idx.size(0) and x.size(0) <= num_max_dispatch_tokens_per_rank'", before=CAPTURING)),
    Example("deepep.line", "comm.deepep", "DeepEP dispatch", POOLED + "DeepEP dispatch NVL receiver timeout, channel: 3, RDMA: 0, nvl: 1, src NVL: 2\n"),
    Example("nvshmem.line", "comm.deepep", "nvshmem", LOADED + "/x/nvshmem/src/host/init/init.cu:1032: non-zero status: 7 nvshmem setup connections failed\n"),
    Example("nvshmem.line", "comm.deepep", "ibgda", LOADED + "/x/src/modules/transport/ibgda/ibgda.cpp:3612: Unable to create ah\n"),
    Example("nccl.shm", "nccl.shm", "/dev/shm/nccl-a", INIT + WARN + "misc/shmutils.cc:129 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a (size 33030528)\n"),
    Example("nccl.shm", "nccl.shm", "insufficient shared memory (shm)", raised(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", "torch/utils/data/_utils/signal_handling.py handler")),
    Example("nccl.duplicate_gpu", "nccl.error", "Duplicate GPU detected", INIT + WARN + "init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000\n"),
    Example("nccl.duplicate_gpu", "nccl.error", "Multiple Ranks are using the same GPU", INIT + WARN + "init.cc:1020 NCCL WARN Multiple Ranks are using the same GPU/Partition: rank 1 and rank 0\n"),
    Example("nccl.no_algorithm", "nccl.error", "No algorithm/protocol available", sglang("torch.distributed.DistBackendError: NCCL error in: /x/NCCLUtils.cpp:90, invalid usage\nLast error:\nError : No algorithm/protocol available for function AllGather with datatype ncclBfloat16.")),
    Example("nccl.no_algorithm", "nccl.error", "no algorithm/protocol available", sglang("torch.distributed.DistBackendError: NCCL error in: /x/NCCLUtils.cpp:94, invalid usage. no algorithm/protocol available for function AllGather with datatype ncclInt8.", GROUP, before=INIT)),
    Example("nccl.no_algorithm", "nccl.error", "no algorithm/protocol available", "Error : no algorithm/protocol available for function Broadcast with datatype ncclInt8. NCCL_ALGO was set to Tree.\n"),
    Example("nccl.nvls", "nccl.error", "Failed to bind NVLink SHARP", raised("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nFailed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401", GROUP)),
    Example("nccl.nvls", "nccl.error", "Failed to bind NVLink SHARP", "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 1 'invalid argument'\n"),
    Example("nccl.warned", "nccl.error", "no socket interface found", INIT + WARN + "bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found\n"),
    Example("nccl.warned", "nccl.error", "Call to ibv_modify_qp failed", INIT + WARN + "misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out errno 110\n"),
    Example("nccl.error", "nccl.error", "unhandled cuda error", sglang("torch.distributed.DistBackendError: NCCL error in: /x/ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3", GROUP, before=INIT)),
    Example("nccl.error", "nccl.error", "NCCL error: unhandled system error", vllm("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", "vllm/distributed/device_communicators/pynccl_wrapper.py NCCL_CHECK")),
    Example("nccl.error", "nccl.error", "Failed, NCCL error", "Failed, NCCL error /src/tensorrt_llm/runtime/ncclCommunicator.cpp:77 'unhandled cuda error (run with NCCL_DEBUG=INFO for details)'\n"),
    Example("nccl.timeout", "nccl.timeout", "seconds waiting for clients", raised("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", "torch/distributed/rendezvous.py _create_c10d_store")),
    Example("nccl.timeout", "nccl.timeout", "client socket has timed out after", "The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 5000).\n"),
    Example("nccl.timeout.line", "nccl.timeout", "Watchdog caught collective operation timeout", SERVING + RANK3 + "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1) ran for 600013 milliseconds before timing out.\n", "serving"),
    Example("nccl.peer", "indeterminate.peer_died", "Connection closed by peer", sglang("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:2000", "torch/distributed/distributed_c10d.py broadcast", before=LOADING)),
    Example("nccl.peer", "indeterminate.peer_died", "remote process exited", vllm("torch.distributed.DistBackendError: NCCL error in: /x/ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.27.3", GROUP)),
    Example("peer.gloo", "indeterminate.peer_died", "gloo/transport/tcp/pair.cc", V1_LOADING + "WARNING 01-02 03:04:05 [group.py:9] [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:546] Connection lost by [10.0.0.2]:2000\n"),
    Example("peer.store_gone", "indeterminate.peer_died", "TCPStore server has shut down too early", LOADED + "[rank1]:[W115 10:00:09.0 ProcessGroupNCCL.cpp:1680] [PG ID 0 PG GUID 0 Rank 1] Failed to check the \"should dump\" flag on TCPStore, "
        "(maybe TCPStore server has shut down too early), with error: failed\n"),
)  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.signature)
def test_a_failure_between_gpus_is_known(example: Example) -> None:
    check(example)


HEALTHY = (
    "[2026-01-02 03:04:05 TP0] Setup Custom allreduce failed with CUDART error: peer access is not supported between these two devices.\n",
    WARN + "transport/net_ib.cc:1 NCCL WARN Failed to open libibverbs.so[.1]\n",
    WARN + "init.cc:1 NCCL INFO Invalid NCCL_ALGO is none; failed with error is none\n",
    "/x/nvshmem/transport.cpp:281: WARN: init failed for remote transport: ibrc\n",
    "WARNING 01-02 03:04:05 [symm_mem.py:66] SymmMemCommunicator: Device capability 12.0 not supported, communicator is not available.\n",
    "[rank0]:[W115 10:00:09.0 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.\n",
    "Exception ignored in: <function ResourceTracker.__del__>\n",
)  # fmt: skip
