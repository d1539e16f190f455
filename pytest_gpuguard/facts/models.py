"""Where a model is on this machine. Never downloads: a model that is not here is a claim that is not evaluated."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: One file of several: ``model-00001-of-00096.safetensors``.
_PART = re.compile(r"^(.+-)(\d{5})(-of-\d{5})(\.(?:safetensors|bin|gguf))$")
_MOST = 10_000
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


class ModelMissing(LookupError):
    """A model is not on this machine; the message says where it was looked for and what would help."""


class ModelsFileError(ValueError):
    """A ``models.toml`` cannot be read; the message names the file, the entry and what it should look like."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is here. ``argument`` is what the engine is given, ``folder`` where its config.json lies."""

    argument: str
    folder: Path


def find_model(name: str, names: Mapping[str, str], env: Mapping[str, str] | None = None) -> Model:
    """A folder, a name from ``names`` or a hub id whose snapshot is in the local cache. Raises ModelMissing."""
    env = os.environ if env is None else env
    target = names.get(name, name)
    called = f"model {name!r}" + (f" ({target})" if target != name else "")
    folder = Path(target).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelMissing(f"{called}: the folder has no config.json, so it is no model; is the download complete?")
        return Model(str(folder), folder)
    if folder.is_absolute() or target.startswith((".", "~")):
        raise ModelMissing(f"{called}: there is no such folder")
    if not _HUB_ID.match(target):
        raise ModelMissing(f"{called} is not known here: give its folder in gpuguard_models, as '{name} = /models/…'")
    found = newest_snapshot(target, hub_cache(env))
    if found is None:
        raise ModelMissing(
            f"{called} is not in the hub cache: looked for {_snapshots(target, hub_cache(env))}/*/config.json; "
            f"download it beforehand with 'gpuguard fetch {target}', nothing is fetched in a lease"
        )
    return Model(target, found)


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a hub id, ``org/name``."""
    return _HUB_ID.match(text) is not None


def newest_snapshot(hub_id: str, cache: Path) -> Path | None:
    """The snapshot of a hub id that was written last, with a config.json in it; None when there is none."""
    snapshots = _snapshots(hub_id, cache)
    found = [one for one in snapshots.glob("*") if (one / "config.json").is_file()] if snapshots.is_dir() else []
    return max(found, key=lambda one: one.stat().st_mtime) if found else None


def _snapshots(hub_id: str, cache: Path) -> Path:
    return cache / f"models--{hub_id.replace('/', '--')}" / "snapshots"


def missing_weights(folder: Path) -> tuple[int, int]:
    """(files that are missing, files that there should be) by the folder's own index of weights, else by their names.

    A download that broke before the index has ``model-00001-of-00096.safetensors``; (0, 0) where neither says anything.
    """
    files: set[str] = set()
    for index in folder.glob("*.index.json"):
        try:
            files |= set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
    for one in () if files else folder.iterdir():
        part = _PART.match(one.name)
        if part is not None:
            before, number, many, after = part.groups()
            files |= {f"{before}{at:0{len(number)}d}{many}{after}" for at in range(1, min(int(many[4:]), _MOST) + 1)}
    return sum(not (folder / name).is_file() for name in files), len(files)


def read_models(file: Path) -> dict[str, str]:
    """A ``models.toml``: its table ``[models]``, name → folder or hub id. Raises ModelsFileError.

    A folder begins with ``/``, ``~`` or ``.``; a relative one starts at the file's own folder. The rest are hub ids.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelsFileError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelsFileError(f"{file}: not TOML: {error}") from None
    models = data.get("models")
    if not isinstance(models, dict) or set(data) != {"models"}:
        raise ModelsFileError(f'{file}: write one table [models], with lines such as "qwen3-8b" = "Qwen/Qwen3-8B"')
    found = {}
    for name, target in models.items():
        if not isinstance(target, str) or not target.strip():
            raise ModelsFileError(f"{file}: {name} = {target!r}: give a folder or a hub id in quotes")
        local = target.startswith(("/", "~", "."))
        if not local and not is_hub_id(target):
            raise ModelsFileError(
                f"{file}: {name} = {target!r} is neither a hub id (org/name) nor a folder (it begins with /, ~ or .)"
            )
        path = os.path.expanduser(target)
        found[name] = str(file.parent / path) if target.startswith(".") else path
    return found


def hub_cache(env: Mapping[str, str]) -> Path:
    """The folder of the Hugging Face hub cache, by its own environment variables."""
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"]).expanduser()
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
