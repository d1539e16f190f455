"""One prediction: configuration, card, release and flags in, numbers and a verdict out.

Reads the model's config.json and nothing else. Bad input is a PredictError; what had to be assumed is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..claims.layout import Layout
from .budget import predict_sglang
from .config import Config, read_config
from .facts import MEASURED, Facts
from .quant import quantization_of
from .reading import shape_of
from .settings import settings_of
from .sglang import check_card
from .values import Box, PredictError, Prediction

ENGINES: Final = ("sglang", "vllm")


def predict(
    model: str | Path | Mapping[str, Any],
    box: Box,
    engine: str = "sglang",
    version: str | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] = MappingProxyType({}),
    measured: Mapping[str, float] = MappingProxyType({}),
    layout: Layout | None = None,
) -> Prediction:
    """What would happen if this model were served on this box by these flags.

    ``model`` is a folder with config.json, such a file, or its content; ``measured`` replaces rules by known numbers
    (keys: ``facts.MEASURED``, in GiB and bytes as their names say). Takes some milliseconds. Raises PredictError.
    """
    try:
        found = _predicted(model, box, engine, version, flags, env, measured, layout)
    except PredictError:
        raise
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = "the configuration" if isinstance(model, Mapping) else str(model)
        raise PredictError(f"{what} has a field in a form that is not understood: {error}") from error
    if not _finite(found):
        raise PredictError("the configuration has sizes that no model has: the numbers are not finite")
    return found


def _predicted(
    model: str | Path | Mapping[str, Any],
    box: Box,
    engine: str,
    version: str | None,
    flags: Sequence[str],
    env: Mapping[str, str],
    measured: Mapping[str, float],
    layout: Layout | None,
) -> Prediction:
    _same_engine(engine, flags)
    facts = facts_of(model, box, measured)
    if engine == "sglang":
        return predict_sglang(facts, version, settings_of(flags, layout), env)
    if engine == "vllm":
        from .vllm import predict_vllm

        return predict_vllm(facts, version, flags, layout)
    raise PredictError(f"{engine!r} is none of {', '.join(ENGINES)}")


#: Flags of one engine that the other one refuses, and how that one spells them: a layout or a limit that was overlooked
#: would make a wrong prediction.
_ELSEWHERE: Final[Mapping[str, Mapping[str, str]]] = {
    "sglang": {
        "--gpu-memory-utilization": "--mem-fraction-static",
        "--max-model-len": "--context-length",
        "--max-num-seqs": "--max-running-requests",
        "--max-num-batched-tokens": "--chunked-prefill-size",
        "--enable-expert-parallel": "--ep-size N",
        "-tp": "--tp-size",
        "-pp": "--pp-size",
        "-dp": "--dp-size",
    },
    "vllm": {
        "--tp-size": "--tensor-parallel-size",
        "--tp": "--tensor-parallel-size",
        "--pp-size": "--pipeline-parallel-size",
        "--pp": "--pipeline-parallel-size",
        "--dp-size": "--data-parallel-size",
        "--dp": "--data-parallel-size",
        "--ep-size": "--enable-expert-parallel",
        "--mem-fraction-static": "--gpu-memory-utilization",
        "--context-length": "--max-model-len",
        "--max-running-requests": "--max-num-seqs",
        "--chunked-prefill-size": "--max-num-batched-tokens",
        "--max-total-tokens": "--num-gpu-blocks-override",
    },
}


def _same_engine(engine: str, flags: Sequence[str]) -> None:
    for word in flags:
        name = word.partition("=")[0]
        if name in _ELSEWHERE.get(engine, {}):
            raise PredictError(f"{name} is no flag of {engine}: write {_ELSEWHERE[engine][name]}")


def _finite(found: Prediction) -> bool:
    numbers = (found.weights_gib, found.rest_gib, found.kv_cell_bytes, found.kv_gib, found.margin_gib, found.f_min)
    return all(number is None or math.isfinite(number) for number in (*numbers, *found.bars.values()))


def facts_of(model: str | Path | Mapping[str, Any], box: Box, measured: Mapping[str, float]) -> Facts:
    """What does not depend on flags. Raises PredictError."""
    config = read_config(model)
    return Facts(config, shape_of(config), quantization_of(config), check_card(box), checked(measured), _cache(config))


def checked(measured: Mapping[str, float]) -> Mapping[str, float]:
    """Known numbers, or PredictError for a name that no rule has, or a value that is no size."""
    for name, value in measured.items():
        if name not in MEASURED:
            raise PredictError(f"measured: {name!r} is none of {', '.join(MEASURED)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise PredictError(f"measured: {name} is {value!r}, which is no size")
        if not value and name in ("avail_before_gib", "kv_cell_bytes"):
            raise PredictError(f"measured: {name} is 0, and nothing would be counted with it: leave it out")
    return dict(measured)


def _cache(config: Config) -> bool:
    """Whether the checkpoint says that its cache is fp8."""
    told = config.quantization or {}
    algo = told.get("kv_cache_quant_algo")
    scheme = told.get("kv_cache_scheme")
    if isinstance(algo, str):
        return algo.upper() == "FP8"
    return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8
