"""Small files of ours: those that the processes of one run exchange facts through, and the folder under a root folder.

A reader must never see half of one, nor a fact be asked for twice.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

#: What is this machine's own, in pytest's root folder.
OWN_FOLDER: Final = ".gpuguard"


def write_json(file: Path, data: Any) -> None:
    """Write a file that a reader sees whole, or not at all."""
    scratch = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    scratch.write_text(json.dumps(data), encoding="utf-8")
    scratch.replace(file)


def read_json(file: Path, default: Any = None) -> Any:
    """What ``write_json`` wrote; ``default`` when there is no such file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default


def asked_once(file: Path, ask: Callable[[], Any]) -> Any:
    """The answer to ``ask()``, as JSON data: whoever comes first asks, the others read its answer."""
    from filelock import FileLock

    with FileLock(f"{file}.lock"):
        if not file.exists():
            write_json(file, ask())
        return read_json(file)


def make_own_folder(folder: Path) -> None:
    """Make ``.gpuguard``: what is in it is this machine's own, may name hosts and paths, and belongs in no commit."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ".gitignore").exists():
        (folder / ".gitignore").write_text("*\n")


def make_folder(folder: Path) -> None:
    """Make the folder of a file that the user or a default names, which may be ``.gpuguard``. Raises OSError."""
    if folder.name == OWN_FOLDER and not folder.is_dir():
        make_own_folder(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
