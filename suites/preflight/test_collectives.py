"""NCCL between the GPUs: its init, a first all_reduce, the latency of a decode step, and Tree for two collectives.

Two known breakages print nothing at all: an init that hangs, and a first all_reduce that hangs after it. A server would
take minutes to show the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpuguard import claim, fails, needs_gpus, works

Probe = Callable[..., Any]

NOTES = "field notes, 8x RTX PRO 6000 Blackwell, Kimi-K2.5 on SGLang"
REFUSED = r"[Nn]o algorithm/protocol available for function AllGather"


def limit_s() -> float:
    """How long NCCL's init, and how long the first all_reduce may take: 30 s, or GPUGUARD_PREFLIGHT_LIMIT_S."""
    given = os.environ.get("GPUGUARD_PREFLIGHT_LIMIT_S") or "30"
    try:
        limit = float(given)
    except ValueError:
        limit = 0.0
    if not 0 < limit < 3600:
        raise pytest.UsageError(f"GPUGUARD_PREFLIGHT_LIMIT_S={given}: write seconds, such as 30")
    return limit


LIMIT = {"limit_s": limit_s()}


@needs_gpus(2)
@works
@claim(
    id="preflight.allreduce",
    title="NCCL reduces over 2, 4… all GPUs within 30 s, and rightly",
    source="vllm-project/vllm#39774; local-inference-lab/rtx6kpro#15",
    minutes=2,
)
def test_a_first_all_reduce_returns(probe: Probe) -> None:
    """A hang says whether NCCL's init had come to its end; with NCCL_P2P_DISABLE=1 it is tried once more.

    Where that passes, P2P between these GPUs is what hangs. The latency at the sizes of a decode step is told.
    """
    probe("allreduce", args=LIMIT, gpus="all", deadline="4m", contrast={"NCCL_P2P_DISABLE": "1"})


@needs_gpus(2)
@works
@claim(
    id="preflight.tree.all_reduce",
    title="AllReduce works under NCCL_ALGO=Tree",
    source=NOTES,
    status="hearsay",
    minutes=1,
)
def test_all_reduce_under_tree(probe: Probe) -> None:
    """Eager: the part of F11 that nobody doubted."""
    tree(probe, "all_reduce", graph=False)


@needs_gpus(2)
@works
@claim(
    id="preflight.tree.all_reduce.graph",
    title="AllReduce works under NCCL_ALGO=Tree in a CUDA graph",
    source=NOTES,
    status="hearsay",
    minutes=1,
)
def test_all_reduce_under_tree_in_a_graph(probe: Probe) -> None:
    """F11 says the opposite of "Tree and graphs"; if this holds, the graphs were not to blame."""
    tree(probe, "all_reduce", graph=True)


@needs_gpus(2)
@fails("nccl.error", match=REFUSED)
@claim(
    id="preflight.tree.all_gather",
    title="AllGather is refused under NCCL_ALGO=Tree",
    source=f"{NOTES}; nccl src/enqueue.cc",
    status="hearsay",
    minutes=1,
)
def test_all_gather_under_tree(probe: Probe) -> None:
    """A bare "Tree" is for every collective, and NCCL has no tree for AllGather. "allreduce:tree" is for one."""
    tree(probe, "all_gather", graph=False)


@needs_gpus(2)
@fails("nccl.error", match=REFUSED)
@claim(
    id="preflight.tree.all_gather.graph",
    title="AllGather is refused under NCCL_ALGO=Tree before a CUDA graph can be captured",
    source=f"{NOTES}; nccl src/enqueue.cc",
    status="hearsay",
    minutes=1,
)
def test_all_gather_under_tree_in_a_graph(probe: Probe) -> None:
    """The same refusal, in the eager calls before the capture: it is no matter of graphs."""
    tree(probe, "all_gather", graph=True)


def tree(probe: Probe, operation: str, *, graph: bool) -> None:
    """One collective under NCCL_ALGO=Tree, over two GPUs: what NCCL has no algorithm for is the same for more."""
    probe("nccl_tree", args={**LIMIT, "op": operation, "graph": graph}, deadline="4m")
