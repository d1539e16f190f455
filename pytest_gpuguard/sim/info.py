"""What the stand-in says of itself over HTTP, in the shape of its release: arguments as resolved, tokens, memory.

Pure. It reports what was predicted and nothing that would need a running model, such as a speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..predict.values import Prediction
from .argv import Given
from .model import ModelFacts
from .numbers import Steps
from .order import Order
from .release import Release

#: SGLang's own words for what was not given (sglang/srt/server_args.py), as far as a reader asks for them.
_DEFAULTS: Mapping[str, Any] = {
    "host": "127.0.0.1",
    "port": 30000,
    "device": "cuda",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "disable_cuda_graph": False,
    "disable_radix_cache": False,
    "disable_overlap_schedule": False,
    "disable_custom_all_reduce": False,
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "moe_a2a_backend": "none",
    "moe_runner_backend": "auto",
}


def arguments(
    order: Order, release: Release, given: Given, prediction: Prediction, backend: str | None
) -> dict[str, Any]:
    """The server's arguments as it resolved them; what this release has no setting for is left out."""
    known = {flag.dest for flag in release.flags.values()}
    layout = prediction.layout
    path = given.values.get("model_path", str(order.folder))
    fields: dict[str, Any] = {"model_path": path, "tokenizer_path": path, "served_model_name": path}
    fields |= {name: value for name, value in _DEFAULTS.items() if name in known}
    fields |= {name: value for name, value in prediction.resolved.items() if name in known}
    fields |= given.values
    sizes = {"tp_size": layout.tp, "pp_size": layout.pp, "dp_size": layout.dp, "ep_size": layout.ep}
    if "attn_dp_size" in known and layout.dp_attention and layout.dp > 1:
        sizes |= {"attn_dp_size": layout.dp, "dp_size": 1}
    fields |= sizes
    if prediction.mem_fraction_static is not None:
        fields["mem_fraction_static"] = prediction.mem_fraction_static
    if backend is not None and "attention_backend" in known:
        fields.setdefault("attention_backend", backend)
        fields["attention_backend"] = fields["attention_backend"] or backend
    for secret in ("api_key", "admin_api_key", "ssl_keyfile_password"):
        if fields.get(secret):
            fields[secret] = "***"
    return fields


def server_info(
    release: Release, fields: Mapping[str, Any], prediction: Prediction, steps: Steps, model: ModelFacts, states: int
) -> dict[str, Any]:
    """The body of ``/server_info``."""
    tokens = prediction.kv_tokens or 0
    context = context_of(prediction, model)
    state: dict[str, Any] = {}
    usage = _memory_usage(release, prediction, steps, tokens)
    if usage:
        state["memory_usage"] = usage
    return {
        **fields,
        "max_total_num_tokens": tokens,
        "max_req_input_len": max(context - 5, 1),
        "internal_states": [dict(state) for _ in range(states)],
        "version": release.version,
        "simulated": True,
    }


def context_of(prediction: Prediction, model: ModelFacts) -> int:
    """The longest request, in tokens."""
    return int(prediction.resolved.get("context_length") or model.context or 2048)


def requests_of(prediction: Prediction, model: ModelFacts) -> int:
    """How many requests may run at once (SGLang: tokens/context·512, between 2048 and 4096, unless it is given)."""
    given = prediction.resolved.get("max_running_requests")
    if given:
        return int(given)
    share = int((prediction.kv_tokens or 0) / context_of(prediction, model) * 512)
    return min(max(share, 2048), 4096)


def _memory_usage(release: Release, prediction: Prediction, steps: Steps, tokens: int) -> dict[str, Any]:
    if not release.at_least("0.4.10"):
        return {}
    usage = {"weight": round(steps.weights, 2), "kvcache": round(prediction.kv_gib or 0.0, 2), "token_capacity": tokens}
    graph = round(steps.graph, 2)
    if not release.at_least("0.5.3"):
        return {**usage, "cuda_graph": graph}
    if not release.at_least("0.5.18"):
        return {**usage, "graph": graph}
    return {**usage, "startup_available": round(steps.end, 2), "graph": {"decode": graph}}
