"""The names of what can happen to a booted engine, and what each name may prove.

An outcome is read from log, phase, HTTP and NVML together, never from an exit code (SGLang kills itself with
SIGKILL after *any* scheduler exception).
"""

from __future__ import annotations

from typing import Final

READY: Final = "ready"
STARTING: Final = "starting"
UNKNOWN: Final = "unknown"
ARGS_REMOVED: Final = "args.removed"

#: Phases of a boot, in the order in which they are reached. ``serving`` is after the ready line.
PHASES: Final = ("start", "args", "init", "weights", "kv_pool", "graph_capture", "warmup", "ready", "serving")

#: Every failure that is the stack's own: it may satisfy, contradict or change a claim.
STACK_FAILURES: Final = frozenset(
    {
        "oom.weights",
        "oom.kv_pool",
        "oom.graph_capture",
        "oom.runtime",
        "oom.host",
        "unsupported.arch",
        "unsupported.config",
        "unsupported.model",
        "weights.mismatch",
        "jit.compile",
        "jit.smem",
        "graph.incompatible",
        "illegal_memory",
        "nccl.error",
        "nccl.shm",
        "nccl.timeout",
        "comm.p2p",
        "comm.deepep",
        "hang.timeout",
        "import.abi",
        "numerics",
        "perf",
        ARGS_REMOVED,
    }
)

#: Faults of the host or of the harness: they say nothing about the claim.
HOST_FAULTS: Final = frozenset(
    {
        "driver.mismatch",
        "hardware",
        "port.in_use",
        "bad.args",
        "model.missing",
        "infra.deadline",
        "infra.device",
        "infra.dirty_gpu",
        "infra.lease",
        "infra.lost",
        "infra.boot",
        "infra.test",
    }
)

#: Failures whose cause the log does not show.
UNDECIDED: Final = frozenset({UNKNOWN, "indeterminate.peer_died"})

OUTCOMES: Final = frozenset({READY, STARTING}) | STACK_FAILURES | HOST_FAULTS | UNDECIDED

#: ``ooms(phase)`` → the outcome that satisfies it.
OOM_PHASES: Final = ("weights", "kv_pool", "graph_capture", "runtime", "host")
GPU_OOM_PHASES: Final = ("weights", "kv_pool", "graph_capture", "runtime")
