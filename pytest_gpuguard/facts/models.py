"""Where a model is on this machine. Never downloads: a model that is not here is a claim that is not evaluated."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


class ModelMissing(LookupError):
    """A model is not on this machine; the message says where it was looked for and what would help."""


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
    cache = hub_cache(env)
    snapshots = cache / f"models--{target.replace('/', '--')}" / "snapshots"
    found = [one for one in snapshots.glob("*") if (one / "config.json").is_file()] if snapshots.is_dir() else []
    if not found:
        raise ModelMissing(
            f"{called} is not in the hub cache {cache}: download it first, nothing is fetched in a lease"
        )
    return Model(target, max(found, key=lambda one: one.stat().st_mtime))


def hub_cache(env: Mapping[str, str]) -> Path:
    """The folder of the Hugging Face hub cache, by its own environment variables."""
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"]).expanduser()
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
