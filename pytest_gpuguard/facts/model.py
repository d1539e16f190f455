"""Which model a folder holds: its revision, and a hash of its configuration. Reads small files only."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

_REVISION = re.compile(r"[0-9a-f]{40}")


def model_facts(path: str | Path) -> dict[str, str | None]:
    """``{"revision", "config_sha256"}`` of the model in folder ``path``; None for what cannot be told.

    The revision is the snapshot's name in a Hugging Face cache (…/models--org--name/snapshots/REVISION), else the
    commit of a git checkout whose root is the folder. The hash is of config.json with sorted keys and no
    blanks, so that reformatting does not change it.
    """
    folder = Path(path)
    return {"revision": _snapshot(folder) or _git_commit(folder), "config_sha256": _config_hash(folder / "config.json")}


def _snapshot(folder: Path) -> str | None:
    for one in (folder.absolute(), folder.resolve()):
        if one.parent.name == "snapshots" and one.parent.parent.name.startswith("models--"):
            return one.name
    return None


def _git_commit(folder: Path) -> str | None:
    git = folder / ".git"
    try:
        if git.is_file():  # a worktree or submodule: "gitdir: PATH"
            git = folder / git.read_text(encoding="utf-8").partition(":")[2].strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head if _REVISION.fullmatch(head) else None
        name = head.partition(":")[2].strip()
        common = git / "commondir"
        root = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
        loose = root / name
        if loose.exists():
            return loose.read_text(encoding="utf-8").strip()
        for line in (root / "packed-refs").read_text(encoding="utf-8").splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return commit
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _config_hash(config: Path) -> str | None:
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = json.dumps(parsed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
