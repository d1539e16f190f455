"""The few facts of a model that a log line names, read from its config.json. No model is known by its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: Keys of layers that are no plain full attention: windows, sinks, state spaces, sparse indexers.
_NOT_PLAIN: Final = ("sliding_window", "linear_", "mamba", "ssm_", "attention_sink", "index_", "compress_", "hybrid_")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``latent``: the KV cache holds one compressed vector (MLA) and not K and V. ``plain``: full attention everywhere.

    Unknown numbers are None or 0.
    """

    architecture: str = "Unknown"
    layers: int = 0
    latent: bool = False
    dtype: str = "torch.bfloat16"
    context: int | None = None
    quant: str | None = None
    plain: bool = False


def read_model(folder: Path) -> ModelFacts:
    """The facts of the model in a folder. What cannot be read is left unknown: the prediction says why."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ModelFacts()
    if not isinstance(config, dict):
        return ModelFacts()
    text = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(text, dict):
        text = config
    both = {**config, **text}
    names = config.get("architectures") or text.get("architectures") or ["Unknown"]
    quant = both.get("quantization_config") or {}
    dtype = str(both.get("torch_dtype") or both.get("dtype") or "bfloat16").removeprefix("torch.")
    return ModelFacts(
        architecture=str(names[0]),
        layers=_number(both.get("num_hidden_layers")) or 0,
        latent=both.get("kv_lora_rank") is not None,
        dtype=f"torch.{dtype}",
        context=_number(both.get("max_position_embeddings")),
        quant=quant.get("quant_method") if isinstance(quant, dict) else None,
        plain=not any(_special(name, value) for name, value in text.items()),
    )


def _special(name: str, value: Any) -> bool:
    """Whether a key says that not every layer has plain full attention."""
    if name == "layer_types":
        return isinstance(value, list) and set(value) != {"full_attention"}
    return bool(value) and name.startswith(_NOT_PLAIN) and not (name == "sliding_window" and _number(value) is None)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
