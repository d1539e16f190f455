"""What the arithmetic of a remedy needs beside the memory table: GPUs, chunk, graphs, as far as they are known.

It never fills in a default: what was neither printed nor asked is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Final

from packaging.version import Version

from ..claims.observation import LogReading
from ..claims.resolved import Resolved
from .features import release

#: Since this release the largest captured batch size has a flag for each kind of graph.
_SPLIT_GRAPHS: Final = Version("0.5.15")
#: A prefill that is not chunked takes SGLang's default ``--max-prefill-tokens`` at once.
_UNCHUNKED: Final = 16384
#: More than any count of GPUs, tokens or requests.
_BEYOND: Final = 1 << 60
_SHARE: Final = re.compile(r"[01]?\.?\d{1,12}")


@dataclass(frozen=True, slots=True)
class Setup:
    """One boot's setup. ``leased``: GPUs that the boot could have used; ``replicas``: copies of the model, while
    ``attention_replicas`` share one copy of the experts (dp-attention).

    ``loaded`` is the share of the checkpoint that was loaded when the boot ended, 0 to 1. ``graph_flag`` is how the
    release spells the largest captured batch size. ``max_total_tokens`` is what the user limits the KV pool to,
    ``gpu_memory_utilization`` the share of the card that vLLM was given, 0 to 1.
    """

    engine: str | None = None
    tp: int | None = None
    pp: int = 1
    ep: int = 1
    replicas: int = 1
    attention_replicas: int = 1
    chunked_prefill_size: int | None = None
    cuda_graph_max_bs: int | None = None
    graph_flag: str = "--cuda-graph-max-bs"
    max_total_tokens: int | None = None
    leased: int = 0
    loaded: float | None = None
    gpu_memory_utilization: float | None = None

    @property
    def gpus(self) -> int | None:
        """GPUs that hold one copy of the model."""
        return self.tp * self.pp if self.tp is not None else None

    @property
    def tp_flag(self) -> str | None:
        """How the engine spells over how many GPUs a layer is spread."""
        return {"sglang": "--tp-size", "vllm": "--tensor-parallel-size"}.get(self.engine or "")

    def possible(self) -> Setup:
        """The same without numbers that no boot can have, such as a negative count, which say nothing."""
        wrong: dict[str, int | None] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            least = 0 if one.name in ("leased", "loaded") else 1
            if one.name == "gpu_memory_utilization":
                if value is not None and not 0 < value <= 1:
                    wrong[one.name] = None
            elif isinstance(value, (int, float)) and not least <= value < _BEYOND:
                wrong[one.name] = {"pp": 1, "ep": 1, "replicas": 1, "attention_replicas": 1, "leased": 0}.get(one.name)
        return replace(self, **wrong) if wrong else self  # type: ignore[arg-type]


def setup_of(resolved: Resolved, reading: LogReading, leased: int = 0) -> Setup:
    """The setup of a boot, from what is known to have run, or at least was asked."""

    def number(name: str) -> int | None:
        found = resolved.setting(name)
        text = found.runs if found.runs is not None else found.asked
        if text is not None and name == "chunked_prefill_size" and text.startswith("-"):
            return _UNCHUNKED
        return int(text) if text is not None and text.isdecimal() else None

    limit = resolved.setting("max_total_num_tokens").asked
    return Setup(
        engine=reading.engine,
        tp=number("tp_size") or _tp_of(reading),
        pp=number("pp_size") or 1,
        ep=number("ep_size") or 1,
        replicas=1 if _shares_attention(resolved) else number("dp_size") or 1,
        attention_replicas=(number("dp_size") or 1) if _shares_attention(resolved) else 1,
        chunked_prefill_size=number("chunked_prefill_size"),
        cuda_graph_max_bs=number("cuda_graph_max_bs"),
        graph_flag="--cuda-graph-max-bs-decode" if _splits_graphs(resolved, reading) else "--cuda-graph-max-bs",
        max_total_tokens=int(limit) if limit is not None and limit.isdecimal() else None,
        leased=leased,
        loaded=reading.loaded,
        gpu_memory_utilization=_share_of(resolved, reading) if reading.engine == "vllm" else None,
    )


def _share_of(resolved: Resolved, reading: LogReading) -> float | None:
    """What vLLM was given of the card: as the log dumps it, else as it was asked."""
    known = resolved.setting("mem_fraction_static")
    texts = (dict(reading.evidence.dump).get("gpu_memory_utilization"), known.runs, known.asked)
    return next((float(text) for text in texts if text is not None and _SHARE.fullmatch(text)), None)


def _tp_of(reading: LogReading) -> int | None:
    """From the ranks that printed their memory: all of them, or the log does not begin at its beginning."""
    ranks = {int(match[1]) for name, _ in reading.ranks if (match := re.search(r"\bTP(\d{1,4})", name))}
    return len(ranks) if ranks and ranks == set(range(len(ranks))) else None


def _shares_attention(resolved: Resolved) -> bool:
    """With DP attention the groups share the GPUs of one copy."""
    mode = resolved.setting("dp_attention")
    return "on" in (mode.asked, mode.runs) or "attn_dp_size" in (resolved.setting("dp_size").evidence or "")


def _splits_graphs(resolved: Resolved, reading: LogReading) -> bool:
    version = release(reading.engine_version)
    if version is not None:
        return version >= _SPLIT_GRAPHS
    said = resolved.setting("cuda_graph_max_bs").evidence or ""
    return "cuda_graph_config" in dict(reading.evidence.dump) or "target decode" in said
