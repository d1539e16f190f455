"""What /proc tells about a server's processes: memory, listening sockets, and what a killed warden left behind.

It must never signal a process that is not proven to be of the tree: by pid and start time, by the boot's random marker
in its environment, by a session that one of those lives in, or by descent from one of those.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from ..lease.warden import Proc, kill_groups, read_proc, send_signal

__all__ = ["Proc", "kill_until_gone", "listens", "marked_or_seen", "rss_bytes"]

_LISTEN = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def rss_bytes(pid: int) -> int:
    """Resident bytes of one process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def listens(pids: Iterable[int], port: int, host: str | None = None) -> bool:
    """Whether one of the processes listens on the port in our network namespace, at ``host`` or at every address."""
    inodes = {inode for address, inode in _listeners(port) if _serves(address, host)}
    return bool(inodes) and any(not inodes.isdisjoint(_socket_inodes(pid)) for pid in pids)


def marked_or_seen(marker: str, seen: Mapping[int, Proc], spare: set[int]) -> dict[int, Proc]:
    """The living processes of a tree that has lost its root.

    ``marker`` is ``NAME=value`` in their environment (a server that sets its process title may have overwritten it),
    ``seen`` are processes known from before, ``spare`` pids that are never part of it.
    """
    everybody = {}
    for name in os.listdir("/proc"):
        proc = read_proc(int(name)) if name.isdigit() else None
        if proc is not None and not proc.dead and proc.pid not in spare:
            everybody[proc.pid] = proc
    mine = {
        pid: proc
        for pid, proc in everybody.items()
        if (pid in seen and seen[pid].start == proc.start) or _has_marker(pid, marker)
    }
    # A process may have been seen between fork and setsid, in a session that is not the tree's own.
    sessions = {proc.sid for proc in mine.values()} - {0, os.getsid(0)} - spare
    mine.update((pid, proc) for pid, proc in everybody.items() if proc.sid in sessions)
    grown = True
    while grown:
        children = {pid: proc for pid, proc in everybody.items() if proc.ppid in mine and pid not in mine}
        mine.update(children)
        grown = bool(children)
    return mine


def kill_until_gone(remains: Callable[[], Mapping[int, Proc]], timeout_s: float) -> tuple[int, tuple[int, ...]]:
    """SIGKILL what remains, again and again: how many were met, and the pids that are still there at the end."""
    deadline = time.monotonic() + timeout_s
    met: set[tuple[int, int]] = set()
    while True:
        left = remains()
        if not left or time.monotonic() > deadline:
            return len(met), tuple(sorted(left))
        fresh = {(proc.pid, proc.start) for proc in left.values()} - met
        met |= fresh
        kill_groups(list(left.values()), {os.getpgrp()})
        for proc in left.values():
            send_signal(proc, signal.SIGKILL)
        if not fresh:
            time.sleep(0.02)


def _has_marker(pid: int, marker: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker.encode() in file.read().split(b"\0")
    except OSError:
        return False


def _listeners(port: int) -> Iterable[tuple[Address, str]]:
    """(address, socket inode) of everybody who listens on the port."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:  # no IPv6
            continue
        for row in rows:
            address, _, hexport = row[1].rpartition(":")
            if row[3] == _LISTEN and int(hexport, 16) == port:
                yield _address(address), row[9]


def _address(text: str) -> Address:
    """The kernel prints addresses as 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _serves(address: Address, host: str | None) -> bool:
    if host is None:
        return True
    if host == "localhost":
        return address.is_unspecified or address.is_loopback
    asked = ipaddress.ip_address(host.strip("[]"))
    if address.is_unspecified:  # "::" usually takes IPv4 as well
        return asked.version == 4 or address.version == 6
    return address == asked or asked.is_unspecified


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found
