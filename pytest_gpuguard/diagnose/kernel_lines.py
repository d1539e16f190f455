"""What single kernel messages say: Xids of NVIDIA's driver, GPUs that fell off the bus, processes that were killed.

Pure parsing, of live messages and of a log file's lines alike; whether a message counts is decided in ``evidence``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from .data import package_toml

HARDWARE: Final = "hardware"
HANDLED: Final = "handled"
APPLICATION: Final = "application"
CONSEQUENCE: Final = "consequence"
OTHER: Final = "other"

#: open-gpu-kernel-modules src/nvidia/arch/nvalloc/unix/src/os.c, nvErrorLog: "(PCI:0000:65:00 GPU-I:05)" under MIG.
_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,40}\): (?P<number>\d{1,5})"
)
_XID_PID: Final = re.compile(r"pid='?(\d{1,10})")
_XID_NAME: Final = re.compile(r"name=([^,]{1,64})")
_OFF_BUS: Final = re.compile(
    r"NVRM: GPU (?:at )?(?:PCI:)?(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[.0-9]{0,3}:? "
    r".{0,40}fallen off the bus"
)
_GPU_AT: Final = re.compile(
    r"NVRM: GPU at (?:PCI:)?(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}): (?P<uuid>GPU-[0-9a-f-]{36})"
)
#: linux mm/oom_kill.c: __oom_kill_process and dump_oom_summary. A task's name may hold anything.
_KILLED: Final = re.compile(r"Killed process (?P<pid>\d{1,10}) \((?P<name>.{0,64}?)\),? (?:UID|total-vm)")
_OOM_KILL: Final = re.compile(r"oom-kill:constraint=.{0,400}?task=(?P<name>.{0,64}?),pid=(?P<pid>\d{1,10}),uid=")
_PREFIX: Final = re.compile(r"^.{0,120}?(?=NVRM:|oom-kill:|Out of memory|Memory cgroup out of memory|Killed process)")
_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Xid:
    """One Xid message. ``bus`` is a PCI address as (domain, bus, device); ``pid`` and ``name`` are None if not told.

    ``kind`` is the section of ``xids.toml`` that the number is in, or "other"; ``meaning`` its text there, or "".
    """

    number: int
    bus: tuple[int, int, int]
    kind: str
    meaning: str
    pid: int | None
    name: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that the kernel's OOM killer ended."""

    pid: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class KernelLines:
    """Everything in some messages that can matter. ``uuids``: PCI address → UUID, as the driver printed it."""

    xids: tuple[Xid, ...] = ()
    kills: tuple[Kill, ...] = ()
    uuids: Mapping[tuple[int, int, int], str] = field(default_factory=lambda: MappingProxyType({}))


@lru_cache(maxsize=1)
def _catalogue() -> dict[int, tuple[str, str]]:
    tables = package_toml("diagnose/xids.toml")
    return {int(number): (kind, text) for kind, table in tables.items() for number, text in table.items()}


def xid_kind(number: int) -> tuple[str, str]:
    """(kind, meaning) of an Xid number, such as ("hardware", "NVLink error"); ("other", "") if not in the table."""
    return _catalogue().get(number, (OTHER, ""))


def pci_address(text: str) -> tuple[int, int, int] | None:
    """(domain, bus, device) of "00000000:01:00.0" (NVML), "0000:01:00" (messages) and the like; else None."""
    parts = text.strip().split(".")[0].split(":")
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        return None
    return domain, bus, device


def kernel_lines_of(lines: Iterable[str]) -> KernelLines:
    """The Xids and OOM kills in some lines, whatever dmesg, journalctl, syslog or a container's log put before them."""
    xids: list[Xid] = []
    kills: dict[int, Kill] = {}
    uuids: dict[tuple[int, int, int], str] = {}
    for line in lines:
        if "NVRM" in line:
            found = _xid(line)
            if found is not None:
                xids.append(found)
            elif (named := _GPU_AT.search(line)) is not None:
                uuids[_bus(named)] = named["uuid"]
        elif "task=" in line or "illed process" in line:
            kill = _kill(line)
            if kill is not None:
                kills[kill.pid] = kill  # two messages are printed for one kill: the second one is for people
    return KernelLines(tuple(xids), tuple(kills.values()), uuids)


def _bus(match: re.Match[str]) -> tuple[int, int, int]:
    address = pci_address(match["bus"])
    assert address is not None
    return address


def _xid(line: str) -> Xid | None:
    match = _XID.search(line)
    if match is None:
        gone = _OFF_BUS.search(line)
        if gone is None:
            return None
        return Xid(79, _bus(gone), *xid_kind(79), None, None, _text(line))
    number = int(match["number"])
    pid, name = _XID_PID.search(line, match.end()), _XID_NAME.search(line, match.end())
    told = name[1].strip() if name is not None and "<unknown>" not in name[1] else None
    return Xid(number, _bus(match), *xid_kind(number), int(pid[1]) if pid else None, told, _text(line))


def _kill(line: str) -> Kill | None:
    match = _KILLED.search(line) or _OOM_KILL.search(line)
    if match is None:
        return None
    return Kill(int(match["pid"]), match["name"], _text(line))


def _text(line: str) -> str:
    return _PREFIX.sub("", line.strip(), count=1)[:_CHARS]
