"""Blocks of TCP ports of this host: one per server, so that what a server derives from ``--port`` is its own too.

A probe alone is a race (another one probes before we bind); a lock alone knows nothing of strangers. So both. It must
never hand out a port that somebody listens to, nor one port twice.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..facts.lease import PortRange
from .flocks import HeldLocks, Holder, Locks

#: Below Linux's default range for outgoing connections (32768–60999), out of which any program may be given a port.
FIRST: Final = 20000
LAST: Final = 32767
#: With dp-attention SGLang listens on --port + 233 (torch store; ZMQ_TCP_PORT_DELTA in its server_args.py) and on the
#: ports after it: four sockets, one per dp rank, a handshake (+13 in late releases). 256 covers dp 8 of every release.
SIZE: Final = 256
#: Locks are taken per unit, so that callers with other sizes or bounds exclude each other as well.
UNIT: Final = 64
_DOOR: Final = "ports-door"
_DOOR_WAIT_S: Final = 10.0
_ADDRESSES: Final = (
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET, "0.0.0.0"),
    (socket.AF_INET6, "::1"),
    (socket.AF_INET6, "::"),
)


class PortsExhausted(RuntimeError):
    """No free block of ports is left; the message names who has them."""

    def __init__(self, wanted: PortRange, size: int, holders: tuple[Holder, ...], busy: tuple[int, ...]) -> None:
        self.holders = holders
        self.busy = busy
        lines = [f"No block of {size} free ports is left in {wanted}."]
        lines += [f"  {holder}" for holder in holders]
        if busy:
            more = f" and {len(busy) - 8} more" if len(busy) > 8 else ""
            lines.append(f"  other programs listen on {', '.join(map(str, busy[:8]))}{more} (`ss -ltnp` names them)")
        lines.append("Wait until a holder is done, end the strangers, or give a wider range of ports.")
        super().__init__("\n".join(lines))


class PortLease(HeldLocks):
    """``size`` consecutive ports from ``base`` on, reserved on this host."""

    def __init__(self, ports: PortRange, fds: list[int]) -> None:
        super().__init__(fds)
        self.ports = ports

    @property
    def base(self) -> int:
        """The port for the server itself."""
        return self.ports.base

    @property
    def size(self) -> int:
        """How many ports there are."""
        return self.ports.size


def lease_ports(
    first: int = FIRST, last: int = LAST, size: int = SIZE, *, test: str = "", directory: Path | None = None
) -> PortLease:
    """Reserve the lowest free block of ``size`` ports within ``first``…``last``, both included.

    Blocks start at multiples of 64. A block with a listener on any of its ports is passed over. Hand ``fds`` to the
    warden, so that a server that outlives us by two seconds keeps its block. Does not wait. Raises PortsExhausted,
    ValueError, LockDirError, UnsupportedPlatform.
    """
    if not (0 < first <= last < 65536 and size > 0):
        raise ValueError(f"{size} ports within {first}-{last} cannot be leased: ports are 1-65535")
    locks = Locks(test, directory)
    taken: dict[str, Holder] = {}
    busy: list[int] = []
    with _door(locks):
        for base in _bases(first, last, size):
            names = [f"ports-{unit * UNIT}" for unit in range(base // UNIT, (base + size - 1) // UNIT + 1)]
            got = locks.attempt_all(names, len(names))
            if not got:
                taken.update((holder.lock, holder) for holder in locks.holders(names))
                continue
            lease = PortLease(PortRange(base, size), list(got.values()))
            listened = [port for port in lease.ports if not is_free(port)]
            if not listened:
                return lease
            lease.release()
            busy += [port for port in listened if port not in busy]
    raise PortsExhausted(PortRange(first, last - first + 1), size, tuple(taken.values()), tuple(sorted(busy)))


def is_free(port: int) -> bool:
    """Whether nobody listens on this port: on loopback, on every address, in IPv4 and IPv6."""
    for family, address in _ADDRESSES:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            # no IPv6 on this machine, or not on loopback
    return True


def _bases(first: int, last: int, size: int) -> Iterator[int]:
    step = -(-size // UNIT) * UNIT
    base = -(-first // UNIT) * UNIT
    while base + size - 1 <= last:
        yield base
        base += step


def _door(locks: Locks) -> HeldLocks:
    """One searcher at a time, or two would make each other pass over free blocks. It is held for milliseconds."""
    deadline = time.monotonic() + _DOOR_WAIT_S
    while True:
        fd = locks.attempt(_DOOR)
        if fd is not None:
            return HeldLocks([fd])
        if time.monotonic() > deadline:
            return HeldLocks()  # its holder is stopped or stuck: the locks of the blocks decide all the same
        time.sleep(0.005)
