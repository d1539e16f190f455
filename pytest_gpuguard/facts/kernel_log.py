"""The kernel's messages since a given moment: from /dev/kmsg, else from journalctl or dmesg, else a reason why not.

It only reads, never waits longer than it was told, and never raises: a right that is missing is a ``Denied`` value.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: How long a command may take that is not waited for by a judgement.
PROBE_S: Final = 2.0
#: Messages beyond so many add nothing to a judgement.
_MOST: Final = 400
_RECORD_BYTES: Final = 16384  # a record of /dev/kmsg has at most 8 KiB, and a shorter buffer gets EINVAL
_CHARS: Final = 600
#: What a message must hold to be kept: NVIDIA's driver and the OOM killer (mm/oom_kill.c) are all that we judge by.
_WANTED: Final = re.compile(r"NVRM: Xid|NVRM: GPU|fallen off the bus|oom-kill:|Killed process")
_STAMP: Final = re.compile(r"^\[ {0,12}(\d{1,12}\.\d{1,9})\]")
_ESCAPE: Final = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Denied:
    """Evidence that could not be had: ``what`` ("kernel log", "NVML events"), and ``why`` in a few words."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the kernel is read. ``commands`` are tried in this order when ``kmsg`` cannot be read."""

    kmsg: Path = Path("/dev/kmsg")
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    commands: tuple[str, ...] = ("journalctl", "dmesg")


#: The paths that a watch uses when it is given none.
PATHS = Paths()


class KernelLog:
    """The kernel's messages from the moment at which this was made. ``commands`` stand in for an unreadable kmsg."""

    def __init__(self, paths: Paths | None = None) -> None:
        paths = paths or PATHS
        self._lines: list[str] = []
        self._rest = b""
        self._command: _Command | None = None
        self._lock = threading.Lock()  # a boot is stopped from another thread than the one that reads
        try:
            self._fd: int | None = os.open(paths.kmsg, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self._fd = None
            self._command = _Command(f"{paths.kmsg}: {error.strerror}", paths.commands)

    def read(self, budget_s: float) -> tuple[str, ...] | Denied:
        """The messages so far, oldest first and without their time stamps; at most ``budget_s`` seconds."""
        if self._command is not None:
            return self._command.read(budget_s)
        with self._lock:
            if self._fd is not None:
                try:
                    self._drain(self._fd, time.monotonic() + budget_s)
                except OSError as error:
                    return tuple(self._lines) or Denied("kernel log", f"/dev/kmsg: {error.strerror}")
            return tuple(self._lines)

    def denied(self, budget_s: float = 2 * PROBE_S) -> Denied | None:
        """Why nothing can be read, or None when it can be."""
        found = self.read(0.0) if self._command is None else self._command.denied(budget_s)
        return found if isinstance(found, Denied) else None

    def close(self) -> None:
        """Stop reading; what was read stays known. Waits for a ``read`` that is under way."""
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)

    def _drain(self, fd: int, deadline: float) -> None:
        while True:
            try:
                data = os.read(fd, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                data = b"\n"  # the ring buffer has overtaken us: the next read goes on with what is left
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line[:1] != b" " and len(self._lines) < _MOST:  # " KEY=value" lines belong to the record above
                    self._keep(line.decode(errors="replace").partition(";")[2])
            if time.monotonic() > deadline:
                return

    def _keep(self, text: str) -> None:
        if _WANTED.search(text):
            self._lines.append(_ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)[:_CHARS])


class _Command:
    """journalctl or dmesg, run once now for the newest time stamp, and again for what came later.

    The stamps are the kernel's own clock, which drifts away from ours by seconds a day: only they are compared.
    """

    def __init__(self, why: str, commands: Sequence[str]) -> None:
        self._why = [why]
        self._since = int(time.time())
        self._name: str | None = None
        self._last = -1.0
        self._thread = threading.Thread(target=self._probe, args=(tuple(commands),), daemon=True)
        self._thread.start()

    def denied(self, budget_s: float) -> Denied | None:
        """Why neither command answers; None when one does."""
        self._thread.join(budget_s)
        if self._thread.is_alive():
            return Denied("kernel log", "; ".join([*self._why, "the commands do not answer"]))
        return Denied("kernel log", "; ".join(self._why)) if self._name is None else None

    def read(self, budget_s: float) -> tuple[str, ...] | Denied:
        """What came later than the newest message at the start."""
        deadline = time.monotonic() + budget_s
        denied = self.denied(budget_s)
        if denied is not None or self._name is None:
            return denied or Denied("kernel log", "; ".join(self._why))
        text = _run(_window(self._name, self._since), max(0.02, deadline - time.monotonic()))
        if isinstance(text, Denied):
            return text
        later = [(stamp, line) for stamp, line in map(_stamped, text.splitlines()) if stamp > self._last]
        return tuple(line[:_CHARS] for _, line in later if _WANTED.search(line))[:_MOST]

    def _probe(self, commands: tuple[str, ...]) -> None:
        for name in commands:
            text = _run(_newest(name), PROBE_S)
            if isinstance(text, Denied):
                self._why.append(text.why)
                continue
            stamps = [stamp for stamp, _ in map(_stamped, text.splitlines()) if stamp >= 0]
            if stamps:
                self._last, self._name = max(stamps), name
                return
            self._why.append(f"{os.path.basename(name)} shows no kernel messages")


def _newest(name: str) -> list[str]:
    return [name, "-k", "-q", "-n", "1", "-o", "short-monotonic", "--no-pager"] if _is_journal(name) else [name]


def _window(name: str, since: int) -> list[str]:
    if not _is_journal(name):
        return [name]
    return [name, "-k", "-q", f"--since=@{since}", "-o", "short-monotonic", "--no-pager"]


def _is_journal(name: str) -> bool:
    return os.path.basename(name) == "journalctl"


def _run(argv: list[str], timeout_s: float) -> str | Denied:
    env = {**os.environ, "LC_ALL": "C"}
    name = os.path.basename(argv[0])
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return Denied("kernel log", f"{name} took more than {timeout_s:.1f} s")
    except OSError as error:
        return Denied("kernel log", f"{name}: {error.strerror}")
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        words = said[-1] if said else f"exit code {done.returncode}"
        return Denied("kernel log", words if words.startswith(name) else f"{name}: {words}")
    return done.stdout.decode(errors="replace")


def _stamped(line: str) -> tuple[float, str]:
    """(seconds of the kernel's clock, the line after its stamp); -1 without one."""
    match = _STAMP.match(line)
    return (float(match[1]), line[match.end() :].strip()) if match else (-1.0, line)


def kernel_log_denied(
    paths: Paths | None = None, make: Callable[[Paths | None], KernelLog] = KernelLog
) -> Denied | None:
    """Why this user may not read the kernel's messages, or None. Takes at most four seconds, as a rule none."""
    log = make(paths)
    try:
        return log.denied()
    finally:
        log.close()
