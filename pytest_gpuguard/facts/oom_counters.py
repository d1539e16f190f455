"""How often the kernel's OOM killer has struck: on the whole host, and in the cgroups that a server's processes are in.

It only reads /proc and the cgroup tree (v2, v1, or both mounted), and never raises: what cannot be read is absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from . import kernel_log
from .kernel_log import Paths

_COUNT: Final = re.compile(r"^oom_kill (\d{1,19})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter of OOM kills: the file it stands in, and its value before the boot and now.

    ``shared``: it is an ancestor's of the server's cgroup, and counts for everybody below that.
    """

    where: str
    before: int
    now: int
    shared: bool = False

    @property
    def grown(self) -> int:
        """Kills since the boot began."""
        return max(0, self.now - self.before)


class OomCounters:
    """Reads the counters at a boot's start, and how much they have grown since."""

    def __init__(self, paths: Paths | None = None) -> None:
        self._paths = paths or kernel_log.PATHS
        self._host: int | None = None
        self._before: dict[Path, int] = {}
        self._own: Path | None = None
        self._server: set[Path] = set()
        self._exact: set[Path] = set()
        self._noted: set[int] = set()

    def start(self) -> None:
        """Remember the values before the boot: the host's, and those of our own cgroup and its ancestors."""
        self._host = self._read_host()
        files = self._looked_up("self")
        self._own = files[0] if files else None
        self._before = {file: value for file in files if (value := _read(file)) is not None}

    def note(self, pids: Iterable[int]) -> None:
        """Learn the cgroups of processes while they live; each is looked at once."""
        for pid in set(pids) - self._noted:
            self._noted.add(pid)
            files = self._looked_up(str(pid))
            if not files:
                continue
            self._server.add(files[0])
            if files[0] not in self._before:
                value = _read(files[0])
                if value is not None:
                    self._before[files[0]] = value

    def host(self) -> Counter | None:
        """The kernel's count over the whole machine (not the container): /proc/vmstat, Linux 4.13 and later."""
        now = self._read_host()
        if now is None or self._host is None:
            return None
        return Counter(str(self._paths.proc / "vmstat"), self._host, now)

    def cgroups(self) -> tuple[Counter, ...]:
        """The counts of the server's cgroups; of our own, which a server inherits, when none was seen of it."""
        files = self._server or ({self._own} if self._own is not None else set())
        found = []
        for file in sorted(files):
            before = self._before.get(file)
            now = _read(file)  # a cgroup that is gone with its server has no count any more
            if before is not None and now is not None:
                found.append(Counter(str(file), before, now, shared=file not in self._exact))
        return tuple(found)

    def _read_host(self) -> int | None:
        return _read(self._paths.proc / "vmstat")

    def _looked_up(self, pid: str) -> list[Path]:
        """The files that count for a process, the nearest one first; one of its very own cgroup is remembered."""
        files, exact = self._files(pid)
        if exact:
            self._exact.add(files[0])
        return files

    def _files(self, pid: str) -> tuple[list[Path], bool]:
        """The files that count kills in a process's cgroup, then in its ancestors; whether its own one is there."""
        try:
            lines = (self._paths.proc / pid / "cgroup").read_text().splitlines()
        except OSError:
            return [], False
        groups = dict(line.split(":", 2)[1:] for line in lines if line.count(":") >= 2)
        root = self._paths.cgroup
        unified = root if (root / "cgroup.controllers").exists() else root / "unified"
        files, exact = _upwards(unified, groups.get(""), ("memory.events", "memory.events.local"))
        if files:
            return files, exact
        version1 = next((path for names, path in groups.items() if "memory" in names.split(",")), None)
        return _upwards(root / "memory", version1, ("memory.oom_control",))


def _upwards(root: Path, group: str | None, names: tuple[str, ...]) -> tuple[list[Path], bool]:
    """The first readable of ``names`` in a cgroup and in each of its ancestors, up to the mounted root.

    And whether the first file found is the cgroup's own.
    """
    if group is None or ".." in PurePosixPath(group).parts:  # outside of our cgroup namespace
        return [], False
    found = []
    here = PurePosixPath(group.lstrip("/"))
    for part in (here, *here.parents) if here.parts else (here,):
        file = next((one for name in names if _read(one := root / part / name) is not None), None)
        if file is not None:
            found.append(file)
    return found, bool(found) and found[0].parent == root / here


def _read(file: Path) -> int | None:
    """The number after ``oom_kill`` in a file; None when it cannot be read or does not say."""
    try:
        match = _COUNT.search(file.read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None
