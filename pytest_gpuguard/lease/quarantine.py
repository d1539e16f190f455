"""GPUs that are not handed out: what we had leased and what did not come back, with the reason and the time.

One file per GPU in the lock folder, for every user of it. It ends with the boot of the machine, or when it is lifted.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..claims.outcome import HOST_FAULTS
from .dirs import LockDirError
from .flocks import Locks, boot_id, told, write_record
from .gpus import lock_name
from .keeper import open_lock

_PREFIX: Final = "quarantine-"
_MOST_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class Quarantine:
    """One GPU that nobody gets. ``outcome`` is the host fault that a claim meets by it; ``since`` in epoch seconds."""

    uuid: str
    outcome: str
    reason: str
    since: float | None = None
    user: str | None = None
    pid: int | None = None
    test: str | None = None

    def __str__(self) -> str:
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(self.since)) if self.since is not None else ""
        by = f", noticed in {self.test}" if self.test else ""
        return f"{self.uuid} is in quarantine{since}: {self.reason}{by}"


def put(locks: Locks, uuid: str, outcome: str, reason: str) -> Quarantine:
    """Keep a GPU from being handed out, until ``lift``. Raises LockDirError."""
    path = _file(locks.directory, uuid)
    said = {"uuid": uuid, "outcome": outcome, "reason": reason, **locks.signature()}
    try:
        fd = open_lock(path)
    except OSError as error:
        raise LockDirError(
            f"{uuid} should be in quarantine ({reason}), but {path} cannot be written: {error.strerror}"
        ) from None
    try:
        write_record(fd, said)
    finally:
        os.close(fd)
    return _of(uuid, said)


def quarantined(directory: Path) -> dict[str, Quarantine]:
    """What is in quarantine now, by UUID. A file that cannot be read counts: it was not put there for nothing."""
    found = {}
    try:
        entries = sorted(os.listdir(directory))
    except OSError:
        return {}
    for entry in entries:
        if entry.startswith(_PREFIX) and entry.endswith(".json"):
            one = _read(directory / entry)
            if one is not None:
                found[one.uuid] = one
    return found


def lift(directory: Path, uuid: str) -> bool:
    """Hand a GPU out again; False when it was not in quarantine. Raises LockDirError."""
    if uuid not in quarantined(directory):
        return False
    path = _file(directory, uuid)
    try:
        try:
            path.unlink()
        except PermissionError:  # another user's, in a sticky folder: its text can be replaced
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                write_record(fd, {})
            finally:
                os.close(fd)
    except OSError as error:
        raise LockDirError(f"{path} cannot be removed or written: {error.strerror}") from None
    return uuid not in quarantined(directory)


def _file(directory: Path, uuid: str) -> Path:
    return directory / f"{_PREFIX}{lock_name(uuid).removeprefix('gpu-')}.json"


def _read(path: Path) -> Quarantine | None:
    named = path.name.removeprefix(_PREFIX).removesuffix(".json")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        return Quarantine(named, "infra.dirty_gpu", f"its record may not be read ({path})")
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        text = os.read(fd, _MOST_BYTES)
    finally:
        os.close(fd)
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if said == {}:
        return None  # lifted
    if not isinstance(said, dict):
        return Quarantine(named, "infra.dirty_gpu", f"its record cannot be read ({path})")
    if said.get("boot") not in (None, boot_id()):
        return None  # the machine was booted since: what was stuck is not any more
    return _of(str(said.get("uuid", named)), said)


def _of(uuid: str, said: Mapping[str, Any]) -> Quarantine:
    reason = str(said.get("reason") or "no reason was recorded")
    known = told(said, ("since", "user", "pid", "test"))
    outcome = str(said.get("outcome"))  # anybody may write there
    return Quarantine(uuid, outcome if outcome in HOST_FAULTS else "infra.dirty_gpu", reason, **known)
