"""Notices a lock folder that others who use the same GPUs probably do not see, or whose owner could remove the locks.

Guesses from what /proc tells, for a person to read: it decides nothing, and never fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..facts.holders import host_pids
from .dirs import DEFAULTS, ENV, foreign_owner

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
#: flock on these excludes nobody on other machines, or nobody at all.
_REMOTE: Final = re.compile(
    r"nfs\d?|cifs|smb3?|9p|fuse(\.(?!fuse-overlayfs).+)?|lustre|gpfs|beegfs|ceph|glusterfs|afs|virtiofs"
)
#: Roots of a private /tmp: systemd's PrivateTmp, pam_namespace.
_PRIVATE: Final = re.compile(r"systemd-private-|/tmp-inst/|\.inst\b")
#: File systems that the root of a container is made of.
_LAYERED: Final = ("overlay", "aufs", "fuse.fuse-overlayfs")
_CGROUP: Final = re.compile(r"docker[-/]|kubepods|libpod-|/lxc[./]|lxc\.payload|cri-containerd|crio-")
#: A folder that a pod's containers share with each other, and with nobody else.
_OF_A_POD: Final = "kubernetes.io~empty-dir"
#: Where Debian mounts a tmpfs of its own: bound into a container, it looks like one of the container's own.
_HOSTS_TMPFS: Final = "/run/lock"


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: where it is, which part of its file system it shows, of what kind and device that is."""

    point: str
    root: str
    kind: str
    device: str = field(default="", compare=False)

    def place(self, folder: str) -> tuple[str, str]:
        """Where a folder in it really is: the device, and the path there."""
        return self.device, os.path.normpath(f"{self.root}/{folder.removeprefix(self.point)}")


def mounts_of(text: str) -> list[Mount]:
    """/proc/PID/mountinfo, in its order; later mounts cover earlier ones (proc(5))."""
    found = []
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) >= 5 and rest.split():
            found.append(Mount(_plain(words[4]), _plain(words[3]), rest.split()[0], words[2]))
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
    elif contained and _is_its_own(mount):
        found.append(
            f"this is a container, and {folder} is its own: others do not see who has which GPU: "
            f"start it with -v {DEFAULTS[0]}:{DEFAULTS[0]}"
        )
    return found


def _is_its_own(mount: Mount) -> bool:
    """Whether a container has this mount to itself: its root, a tmpfs of its own, and not what was bound into it."""
    if mount.kind == "tmpfs" and mount.point == _HOSTS_TMPFS:
        return False
    return mount.point == "/" or mount.root == "/" or _OF_A_POD in mount.root


def _cgroups() -> str:
    """Our cgroups and those of the first process that we see; empty where nobody tells."""
    found = []
    for pid in ("self", "1"):
        try:
            found.append(Path(f"/proc/{pid}/cgroup").read_text())
        except OSError:
            pass
    return "\n".join(found)


def findings(folder: Path) -> list[str]:
    """Why the locks in this folder may keep nobody out, one line each; empty when nothing is known against it."""
    path = os.path.realpath(folder)
    mounts = _mounts("self")
    mount = mount_of(path, mounts)
    found = judge(path, mount, in_container(mounts))
    if not found and elsewhere(path, mounts, _mounts("1")):
        found.append(
            f"{path} is another folder for the rest of this machine (a mount namespace of our own): "
            f"others do not see who has which GPU"
        )
    try:
        owner = foreign_owner(os.stat(path))
    except OSError:
        owner = None
    if owner is not None:
        found.append(f"{path} belongs to uid {owner}, who can remove locks: let root make it (mode 1777)")
    shared = DEFAULTS[0]
    if os.environ.get(ENV) and os.path.isdir(shared) and os.path.realpath(shared) != path:
        found.append(f"{ENV} is set, and {shared} is there too: who does not set it locks there, and not here")
    return found


def in_container(
    mounts: list[Mount],
    exists: Callable[[str], bool] = os.path.exists,
    host: Callable[[], bool] = host_pids,
    cgroups: Callable[[], str] = _cgroups,
) -> bool:
    """Whether this is a container, as far as its usual marks tell.

    One of them may lie: virtual machines are made of container images, and sandboxes have pids of their own. Then the
    root file system decides.
    """
    if _CGROUP.search(cgroups()):
        return True
    marks = any(map(exists, ("/.dockerenv", "/run/.containerenv", "/run/systemd/container"))) + (not host())
    root = mount_of("/", mounts)
    return marks == 2 or (marks == 1 and root is not None and (root.kind in _LAYERED or root.root != "/"))


def elsewhere(folder: str, ours: list[Mount], theirs: list[Mount]) -> bool:
    """Whether this name is another folder where those mounts are; False when either is not known."""
    here, there = mount_of(folder, ours), mount_of(folder, theirs)
    return here is not None and there is not None and here.place(folder) != there.place(folder)


def _mounts(pid: str) -> list[Mount]:
    """What this process sees mounted (pid 1: the machine, or our container); empty where nobody may know."""
    try:
        return mounts_of(Path(f"/proc/{pid}/mountinfo").read_text(errors="replace"))
    except OSError:
        return []


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
