"""Notices a lock folder that others who use the same GPUs probably do not see: private ones of containers and services.

Guesses from what /proc tells, for a person to read: it decides nothing, and never fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..facts.holders import host_pids
from .dirs import DEFAULTS, ENV

_MOUNTINFO: Final = Path("/proc/self/mountinfo")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
#: flock on these excludes nobody on other machines, or nobody at all.
_REMOTE: Final = re.compile(r"nfs\d?|cifs|smb3?|9p|fuse(\..+)?|lustre|gpfs|beegfs|ceph|glusterfs|afs|virtiofs")
#: Roots of a private /tmp: systemd's PrivateTmp, pam_namespace.
_PRIVATE: Final = re.compile(r"systemd-private-|/tmp-inst/|\.inst\b")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: where it is, which part of its file system it shows, and of what kind that is."""

    point: str
    root: str
    kind: str


def mounts_of(text: str) -> list[Mount]:
    """/proc/PID/mountinfo, in its order; later mounts cover earlier ones (proc(5))."""
    found = []
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) >= 5 and rest.split():
            found.append(Mount(_plain(words[4]), _plain(words[3]), rest.split()[0]))
    return found


def mount_of(folder: str, mounts: list[Mount]) -> Mount | None:
    """The mount that a folder lies in."""
    inside = [one for one in mounts if one.point == "/" or f"{folder}/".startswith(f"{one.point}/")]
    longest = max((len(one.point) for one in inside), default=0)
    return next((one for one in reversed(inside) if len(one.point) == longest), None)


def judge(folder: str, mount: Mount | None, contained: bool) -> list[str]:
    """What is doubtful about a lock folder in this mount, one line each. ``contained``: we are in a container."""
    if mount is None:
        return []
    found = []
    if _REMOTE.fullmatch(mount.kind):
        found.append(
            f"{folder} is on {mount.kind}, where locks may exclude nobody: "
            f"set {ENV} to a folder on a local disk or tmpfs of this machine"
        )
    if _PRIVATE.search(mount.root):
        found.append(
            f"{folder} is in a private {mount.point} of this service or session, which nobody else sees: "
            f"make {DEFAULTS[0]} (mode 1777) for everybody, or set PrivateTmp=no"
        )
    elif contained and (mount.point == "/" or mount.root == "/"):
        found.append(
            f"this is a container, and {folder} is its own: others do not see who has which GPU: "
            f"start it with -v {DEFAULTS[0]}:{DEFAULTS[0]}"
        )
    return found


def findings(folder: Path) -> list[str]:
    """Why others may not see the locks in this folder, one line each; empty when nothing is known against it."""
    path = os.path.realpath(folder)
    try:
        mount = mount_of(path, mounts_of(_MOUNTINFO.read_text(errors="replace")))
    except OSError:
        mount = None
    found = judge(path, mount, in_container())
    if not found and _is_another_for_init(path):
        found.append(
            f"{path} is another folder for the rest of this machine (a mount namespace of our own): "
            f"others do not see who has which GPU"
        )
    shared = DEFAULTS[0]
    if os.environ.get(ENV) and os.path.isdir(shared) and os.path.realpath(shared) != path:
        found.append(f"{ENV} is set, and {shared} is there too: who does not set it locks there, and not here")
    return found


def in_container(exists: Callable[[str], bool] = os.path.exists) -> bool:
    """Whether this is a container, as far as its usual marks tell."""
    return not host_pids() or any(map(exists, ("/.dockerenv", "/run/.containerenv")))


def _is_another_for_init(path: str) -> bool:
    """Whether pid 1 finds another folder under this name; only root may look."""
    try:
        theirs, ours = os.stat(f"/proc/1/root{path}"), os.stat(path)
    except FileNotFoundError:
        return os.path.isdir(path)
    except OSError:
        return False
    return (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
