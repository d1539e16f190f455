"""Which vLLM release's memory rules apply, and since when each of them does.

Pure. A release that nobody has read gets the rules of the newest one before it that was read, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from packaging.version import Version

from .releases import meant

#: Releases whose sources were read, the oldest first.
READ: Final = (
    *("0.6.4.post1", "0.6.6", "0.7.2", "0.8.0", "0.8.5", "0.9.2", "0.10.1", "0.11.0", "0.13.0", "0.16.0", "0.18.0"),
    *("0.19.1", "0.20.0", "0.20.2", "0.22.0", "0.24.0", "0.26.0", "0.29.0", "0.33.0"),
)
#: Since which release (of those that were read) a rule holds, and where it stands there.
SINCE: Final = {
    "latent cache": "0.7.2",  # attention/backends/mla: the cache holds the latent, not the expanded heads
    "latent cache always": "0.8.0",  # config.py use_mla: before, only unquantized and fp8 checkpoints
    "v1": "0.8.0",  # envs.py VLLM_USE_V1: chunked prefill always, defaults by the card, warm-up of the sampler
    "balanced stages": "0.8.0",  # distributed/utils.py get_pp_indices
    "last head": "0.8.0",  # model_executor/models: before, every stage has the output layer
    "not a100": "0.9.2",  # engine/arg_utils.py: the A100 has the defaults of small cards
    "snapshot": "0.9.2",  # v1/worker/gpu_worker.py: what was there before the engine is not its own
    "asks for free": "0.9.2",  # v1/worker/gpu_worker.py: less free than requested is refused
    "hybrid groups": "0.9.2",  # v1/core/kv_cache_utils.py: windowed layers have blocks of their own
    "linear groups": "0.10.1",  # v1/core/kv_cache_utils.py: state of linear attention in the same blocks
    "nccl before": "0.11.0",  # v1/worker/gpu_worker.py: the snapshot is taken after the communicators
    "sparse latent": "0.11.0",  # model_executor/models: the indexer of sparse attention
    "sequence parallel experts": "0.11.0",  # config/parallel.py use_sequence_parallel_moe
    "triton mxfp4": "0.13.0",  # quantization/mxfp4.py: the kernels come with the wheel; before, Marlin
    "checkpoint cache": "0.16.0",  # utils/torch_utils.py: the cache's dtype is the one that the checkpoint tells
    "triton sampler": "0.18.0",  # v1/sample/ops/topk_topp_triton.py: the vocabulary is not sorted any more
    "plain sparse": "0.19.1",  # platforms/cuda.py: FlashInfer's sparse attention over a plain fp8 cache on SM100
    "compressed": "0.20.0",  # model_executor/models: compressed pools beside a window
    "utilization 0.92": "0.20.0",  # config/cache.py
    "graphs counted": "0.20.0",  # envs.py VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    "capacity": "0.20.2",  # v1/core/kv_cache_utils.py: tokens printed = concurrency x max_model_len
    "shared indexers": "0.24.0",  # model_executor/models: layers that reuse a result have no indexer
    "three bands": "0.29.0",  # engine/arg_utils.py: cards from 160 GiB
    "runner v2": "0.29.0",  # config/vllm.py use_v2_model_runner
}


@dataclass(frozen=True, slots=True)
class VllmRules:
    """The rules of ``release``. ``note`` says that another one was asked for."""

    release: str
    note: str | None = None

    def has(self, rule: str) -> bool:
        """Whether this rule of ``SINCE`` holds."""
        return Version(self.release).release >= Version(SINCE[rule]).release


def vllm_rules_for(version: str | None) -> VllmRules:
    """The rules of a release; of the nearest one where nobody knows it, which ``note`` says."""
    newest = READ[-1]
    if version is None:
        return VllmRules(newest, f"no release is given: the rules of vllm {newest} are used")
    named, note = meant(version, "vllm", newest)
    asked = Version(named)
    before = [one for one in READ if Version(one).release <= asked.release]
    release = before[-1] if before else READ[0]
    if Version(release).release == asked.release:
        return VllmRules(release, note)
    if release == newest:
        far = f"vllm {named} is newer than what is known: the rules of {newest} are used"
    elif not before:
        far = f"vllm {named} is older than what is known: the rules of {release} are used"
    else:
        far = f"vllm {named} was not read: the rules of {release}, the nearest before it, are used"
    return VllmRules(release, f"{note}; {far}" if note else far)
