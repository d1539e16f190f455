"""Where the lock files of this host lie: one folder for all users, or there is no exclusion between them.

It must never follow a symlink or trust a folder in which another user could swap a lock file.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Final

from ..facts.lease import require_linux

ENV: Final = "GPUGUARD_LOCK_DIR"
DEFAULTS: Final = ("/run/lock/gpuguard", "/tmp/gpuguard")
MODE: Final = 0o1777
_SETTLE_S: Final = 0.5


class LockDirError(RuntimeError):
    """The folder for the lock files cannot be used; the message says why and what to do."""


def lock_dir() -> Path:
    """The folder for lock files, made if need be with mode 1777.

    ``$GPUGUARD_LOCK_DIR``, else /run/lock/gpuguard if it is there or can be made, else /tmp/gpuguard. Everybody who
    shares GPUs must get the same folder: set the variable where only root can write to /run/lock, and mount the folder
    into containers (``-v /run/lock/gpuguard:/run/lock/gpuguard``). Raises LockDirError, UnsupportedPlatform.
    """
    require_linux("reserving GPUs and ports")
    chosen = os.environ.get(ENV)
    if chosen:
        return usable(Path(chosen))
    for candidate in DEFAULTS[:-1]:
        path = Path(candidate)
        if not os.path.lexists(path):
            try:
                _make(path)
            except FileExistsError:
                pass  # another first run was faster: both must get the same folder
            except OSError:
                continue
        return usable(path, ours=True)
    return usable(Path(DEFAULTS[-1]), ours=True)


def usable(path: Path, *, ours: bool = False) -> Path:
    """The folder itself, made if it is not there; raises LockDirError unless every user may safely lock in it.

    ``ours`` says that nobody but this plugin makes the folder: if we own it, its mode is set right. Such a folder may
    belong to whoever ran first (``mounts.findings`` tells that); one that was chosen must be root's or our own.
    """
    cure = f"Remove it, or set {ENV} to a folder that every user of these GPUs can write to (mode 1777)."
    if not os.path.lexists(path):
        try:
            _make(path)
        except FileExistsError:
            pass
        except OSError as error:
            raise LockDirError(f"The lock folder {path} cannot be made: {error.strerror}. {cure}") from None
    deadline = time.monotonic() + _SETTLE_S  # another process may be between its mkdir and its chmod
    while True:
        try:
            info = os.lstat(path)
        except OSError as error:
            raise LockDirError(f"The lock folder {path} cannot be read: {error.strerror}. {cure}") from None
        if stat.S_ISLNK(info.st_mode):
            raise LockDirError(f"The lock folder {path} is a symbolic link, which anybody may have planted. {cure}")
        if not stat.S_ISDIR(info.st_mode):
            raise LockDirError(f"The lock folder {path} is not a folder. {cure}")
        mine = info.st_uid == os.geteuid()
        if mine and ours and stat.S_IMODE(info.st_mode) != MODE:
            os.chmod(path, MODE)
            continue
        if not mine and not info.st_mode & stat.S_ISVTX:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            raise LockDirError(
                f"The lock folder {path} belongs to uid {info.st_uid} and is not sticky (mode "
                f"{stat.S_IMODE(info.st_mode):04o}): its lock files could be swapped. Its owner may run "
                f"`chmod 1777 {path}`. {cure}"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise LockDirError(f"The lock folder {path} cannot be written to by uid {os.geteuid()}. {cure}")
        owner = foreign_owner(info)
        if owner is not None and not ours and os.fspath(path) not in DEFAULTS:
            raise LockDirError(
                f"The lock folder {path} belongs to uid {owner}, who can remove the lock files of others in it. "
                f"Let root own it (`chown root {path}`). {cure}"
            )
        return path


def foreign_owner(info: os.stat_result) -> int | None:
    """The ordinary user, and not we, who owns a folder: the sticky bit does not keep its owner from removing files.

    None too where the owner is not known: root outside of our user namespace looks like any user without a number here.
    """
    if info.st_uid in (0, os.geteuid()) or (info.st_uid == _overflow_uid() and not _all_uids()):
        return None
    return info.st_uid


def _overflow_uid() -> int:
    """What the kernel shows for owners that have no number in our user namespace."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _all_uids() -> bool:
    """Whether every user of the machine has a number here: not in a user namespace of our own."""
    try:
        return Path("/proc/self/uid_map").read_text().split()[-1:] == ["4294967295"]
    except OSError:
        return True


def _make(path: Path) -> None:
    """Make the folder open to all users; raises OSError."""
    path.mkdir(parents=False)
    os.chmod(path, MODE)  # mkdir's own mode is cut by the umask
