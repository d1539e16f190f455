"""Who has a GPU's memory, in words: process, user, systemd unit or container, as far as they are visible.

NVML reports the host's process ids; in a container they may name nobody. Nothing is ever killed by such an id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from .stack_probe import REDACTED, redact_text

#: Names of flags and variables whose values are secrets: --api-key, --hf-token, AWS_SECRET_ACCESS_KEY.
_SECRET: Final = re.compile(r"(?:^|[-_])(?:api-?key|key|token|password|passwd|secret|credentials?)$", re.IGNORECASE)
_UNIT = re.compile(r"/([^/]+\.(?:service|scope))(?:/|$)")
#: The inode of the machine's first pid namespace (PROC_PID_INIT_INO in the kernel's proc_ns.h).
_HOST_NAMESPACE: Final = "pid:[4026531836]"
_CONTAINER = re.compile(r"(?:docker|libpod|cri-containerd|crio)[-/]([0-9a-f]{12})[0-9a-f]*")


def describe_pid(pid: int, proc: Path = Path("/proc")) -> str:
    """``pid 4242 (python -m sglang.launch_server …), unit sglang.service``; says so when the pid is not visible.

    It is another user's command line: keys, tokens and passwords in it are masked.
    """
    folder = proc / str(pid)
    try:
        argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        words = " ".join(_masked(argv)).strip()
        words = words or (folder / "comm").read_text().strip()
    except OSError:
        return f"pid {pid} (not visible from here: another pid namespace, or gone)"
    words = " ".join("".join(one if one.isprintable() else " " for one in words).split())  # one line, no escapes
    text = f"pid {pid} ({words if len(words) <= 80 else words[:79] + '…'})"
    try:
        cgroup = (folder / "cgroup").read_text()
    except OSError:
        return text
    container = _CONTAINER.search(cgroup)
    if container is not None:
        return f"{text}, container {container[1]}"
    units = [unit for unit in _UNIT.findall(cgroup) if not unit.startswith(("session-", "user@", "init."))]
    return f"{text}, unit {units[-1]}" if units else text


def _masked(argv: Sequence[str]) -> Iterator[str]:
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = _SECRET.search(name) is not None
        if hide and not word.startswith("--"):
            yield REDACTED
        else:
            yield f"{name}={REDACTED}" if secret and equals else redact_text(word)
        hide = secret and not equals and word.startswith("-")


@cache
def host_pids() -> bool:
    """Whether the pids that NVML names are those that we see: not in a container with a pid namespace of its own."""
    try:
        return os.readlink("/proc/self/ns/pid") == _HOST_NAMESPACE
    except OSError:
        return False


def describe_dirty(uuid: str, used: int | None, processes: list[tuple[int, int | None]]) -> str:
    """One line on a GPU that is not clean: bytes in GiB, and its holders."""
    size = "an unknown amount" if used is None else f"{used / 2**30:.2f} GiB"
    who = "; ".join(describe_pid(pid) for pid, _ in processes) or "no process is reported for it"
    return f"{uuid} has {size} in use: {who}"
