"""Asks aiconfigurator for the memory of some boots: JSON in, JSON out, run by `predict.py` in another environment.

A request has `id`, `config` (a file), `quant` (a file beside it or null), `system`, `mib`, `backend`, `tp`, `pp`, `ep`,
`dp`, `experts`, `kv_dtype`, `fraction`, `chunk`, `nextn`. It must never import anything of this project: the
environment it runs in has only aiconfigurator.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def ask(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Weights in GiB and tokens of one boot, with which of the two ways they were found."""
    from aiconfigurator_core.sdk import memory  # type: ignore[import-not-found,unused-ignore]

    folder /= request["id"]  # configurations are cached by their path
    folder.mkdir()
    shutil.copy(request["config"], folder / "config.json")
    if request["quant"]:
        shutil.copy(request["quant"], folder / "hf_quant_config.json")
    tp, ep, dp = request["tp"], request["ep"], request["dp"]
    sizes = {"tp_size": tp // dp, "pp_size": request["pp"], "attention_dp_size": dp}
    experts = {"moe_tp_size": tp // ep, "moe_ep_size": ep} if request["experts"] else {}
    answer: dict[str, Any] = {"id": request["id"], "weights": None, "tokens": None, "way": None, "error": None}
    try:
        native = memory.KVCacheEstimator.from_request(
            str(folder),
            request["system"],
            request["backend"],
            "current",
            max_num_tokens=request["chunk"],
            max_batch_size=256,
            kvcache_quant_mode="fp8" if str(request["kv_dtype"]).startswith("fp8") else None,
            nextn=request["nextn"],
            **sizes,
            **experts,
        )
        answer.update(way="model", weights=native.breakdown["weights_bytes"] / 2**30)
        if request["fraction"]:
            found = native.estimate(
                is_of_free=False,
                fraction=request["fraction"],
                gpu_memory_capacity_bytes_override=int(request["mib"]) << 20,
            )
            answer["tokens"] = found["total_kv_size_tokens"]
    except Exception as error:  # whatever it refuses is an answer
        answer["error"] = f"{type(error).__name__}: {error}"
        if answer["way"] is None:
            answer.update(naive(memory, request, folder))
    return answer


def naive(memory: Any, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Its own fall-back for models that it has no model of."""
    try:
        estimator = memory.NaiveKVCacheEstimator.from_model_path(
            str(folder),
            tp_size=request["tp"] // request["dp"],
            pp_size=request["pp"],
            allow_hf_config_download=False,
            moe_ep_size=request["ep"],
            moe_tp_size=request["tp"] // request["ep"],
        )
        weights = estimator.weight_bytes()
        found: dict[str, Any] = {"way": "naive", "weights": weights / 2**30 if weights else None}
        tokens = estimator.estimate(capacity=int(request["mib"]) << 20, naive_kv_reservation=0.8)
        return {**found, "tokens": tokens["total_kv_size_tokens"]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        answers = [ask(request, Path(folder)) for request in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
