"""What a stack's python last said about its packages, kept as long as the files it read are the same.

A cache that cannot be read or written is no error: the stack is then asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: What of the environment changes which packages a python finds.
_RELEVANT: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONPLATLIBDIR", "HOME")
_MOST_ENTRIES: Final = 64
_LOCK_TIMEOUT_S: Final = 10.0


def cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """$GPUGUARD_CACHE_DIR, else $XDG_CACHE_HOME/gpuguard, else ~/.cache/gpuguard; of our environment by default."""
    env = os.environ if env is None else env
    if own := env.get("GPUGUARD_CACHE_DIR"):
        return Path(own)
    if shared := env.get("XDG_CACHE_HOME"):
        return Path(shared, "gpuguard")
    return Path(env.get("HOME") or Path.home(), ".cache", "gpuguard")


def key_of(python: str, env: Mapping[str, str], script: str) -> str:
    """The name of an entry: this python (as named, and its real file's state), this environment, this probe."""
    real = os.path.realpath(python)
    facts = os.stat(real)
    venv = Path(os.path.abspath(python)).parent.parent / "pyvenv.cfg"
    parts = [
        os.path.abspath(python),
        real,
        facts.st_mtime_ns,
        facts.st_size,
        _stamp(str(venv)),
        {name: env.get(name) for name in _RELEVANT},
        hashlib.sha256(script.encode()).hexdigest(),
        sys.platform,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(folder: Path, key: str) -> dict[str, Any] | None:
    """The remembered answer, if every file and folder that it came from is unchanged."""
    entry = _read(folder / "stacks.json").get(key)
    try:
        assert entry is not None
        if all(_stamp(path) == stamp for path, stamp in entry["watched"].items()):
            remembered: dict[str, Any] = entry
            return remembered
    except (AssertionError, KeyError, TypeError, AttributeError):
        pass
    return None


def store(folder: Path, key: str, answer: dict[str, Any]) -> None:
    """Remember an answer; the newest entries stay."""
    import filelock

    path = folder / "stacks.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(path) + ".lock", timeout=_LOCK_TIMEOUT_S):
            entries = _read(path)
            entries.pop(key, None)
            entries[key] = answer
            newest = dict(list(entries.items())[-_MOST_ENTRIES:])
            descriptor, fresh = tempfile.mkstemp(dir=folder, prefix="stacks-")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(newest, file)
                os.replace(fresh, path)
            except BaseException:
                os.unlink(fresh)
                raise
    except (OSError, filelock.Timeout, NotImplementedError):
        pass


def _read(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _stamp(path: str) -> list[int] | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return [facts.st_mtime_ns, facts.st_size]
