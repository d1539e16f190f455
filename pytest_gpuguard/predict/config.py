"""Reading a model's config.json: the text part, the vision part, the quantization, wherever a release puts them.

Reads one or two small files and nothing else; what cannot be read is a PredictError that names file and field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .values import PredictError

#: Where a multimodal config keeps its language model.
_TEXT: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_VISION: Final = ("vision_config", "vision_tower_config", "visual")
_QUANT: Final = ("quantization_config", "compression_config")
_LARGEST: Final = 64 << 20
#: No size of a model comes near it.
_MOST: Final = 10**9


def whole(value: object) -> int | None:
    """A whole number as one; None for everything else, infinity and truth values included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value)


def finite(value: object) -> float | None:
    """A finite number of a size that a model can have; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST <= value <= _MOST:
        return None
    return float(value)


@dataclass(frozen=True, slots=True)
class Config:
    """A model's configuration. ``quantization`` is None for a model in its own dtype."""

    source: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any] | None
    quantization: Mapping[str, Any] | None

    def number(self, *names: str) -> int | None:
        """The first of these fields that is a positive whole number; None when none is there. Raises PredictError."""
        for name in names:
            value = self.text.get(name)
            if value is None:
                continue
            number = whole(value)
            if number is None:
                raise PredictError(f"{self.source}: {name} is {str(value)[:40]!r}, not a whole number")
            if number < 0:
                raise PredictError(f"{self.source}: {name} is {number}: a size is not negative")
            if number > _MOST:
                raise PredictError(f"{self.source}: {name} is {number:.3g}: nothing is that large")
            return number
        return None

    def needed(self, *names: str) -> int:
        """As ``number``; a field that is absent or 0 is a PredictError that names it."""
        found = self.number(*names)
        if not found:
            also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            state = "is 0" if found == 0 else "is missing"
            raise PredictError(f"{self.source}: {names[0]}{also} {state}: is this a language model's config.json?")
        return found


def read_config(model: str | Path | Mapping[str, Any]) -> Config:
    """The configuration in a folder, a file, or a mapping of the same form. Raises PredictError.

    modelopt checkpoints keep the quantization in ``hf_quant_config.json`` beside it.
    """
    if isinstance(model, Mapping):
        return _config("config", model, None)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    whole = _json(file)
    beside = file.with_name(file.name.replace("config.json", "hf_quant_config.json"))
    extra = _json(beside) if beside != file and beside.is_file() else None
    return _config(str(file), whole, extra)


def _json(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > _LARGEST:
            raise PredictError(f"{file} is no config.json: it has {file.stat().st_size >> 20} MiB")
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PredictError(f"{file} cannot be read: {error.strerror or error}; give a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise PredictError(f"{file} is no config.json: {error}") from None
    if not isinstance(parsed, dict):
        raise PredictError(f"{file} is no config.json: it holds a {type(parsed).__name__}, not an object")
    return parsed


def _config(source: str, whole: Mapping[str, Any], beside: Mapping[str, Any] | None) -> Config:
    text: Mapping[str, Any] = whole
    vision = _mapping(whole, _VISION)
    for _ in range(3):  # thinker_config.text_config, and no deeper
        inner = _mapping(text, _TEXT)
        if inner is None:
            break
        vision = vision or _mapping(text, _VISION)
        text = {**{key: value for key, value in text.items() if key in ("dtype", "torch_dtype")}, **inner}
    quantization = _mapping(whole, _QUANT) or _mapping(text, _QUANT)
    if quantization is None and beside is not None:
        inner = beside.get("quantization", beside)
        quantization = {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else None
    if "tie_word_embeddings" not in text and "tie_word_embeddings" in whole:
        text = {**text, "tie_word_embeddings": whole["tie_word_embeddings"]}
    return Config(source, text, vision, quantization)


def _mapping(where: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any] | None:
    for name in names:
        value = where.get(name)
        if isinstance(value, Mapping) and value:
            return value
    return None
