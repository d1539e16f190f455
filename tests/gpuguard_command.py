"""The ``gpuguard`` command for tests: in this process where that shows the same, else in one of its own."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RUN = [sys.executable, "-c", "from pytest_gpuguard.cli import main; main(prog_name='gpuguard')"]


@dataclass(frozen=True, slots=True)
class Done:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


def called(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Done:
    """The command in this process: as into a pipe."""
    from pytest_gpuguard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments], prog_name="gpuguard")
    said = capsys.readouterr()
    code = ended.value.code
    return Done(code if isinstance(code, int) else 0, said.out, said.err)


def ran(*arguments: str | Path, before: tuple[str, ...] = (), **options: Any) -> Done:
    """The command in a process of its own; ``before`` are the words of a command that runs it."""
    command = [*before, *RUN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=120, **options)
    return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


class Running:
    """The command in a process of its own that goes on; what it prints is waited for line by line."""

    def __init__(self, *arguments: str | Path, stdin: Any = subprocess.DEVNULL) -> None:
        command = [*RUN, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._new.put(line.rstrip("\n"))
        self._new.put(None)

    def until(self, words: str, seconds: float = 30) -> str:
        """The first line from here on that holds the words; fails when there is none."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._new.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                pytest.fail(f"no {words!r} within {seconds} s in {self.lines}")
            if line is None:
                pytest.fail(f"it ended without {words!r}: {self.lines} {self.error()}")
            self.lines.append(line)
            if words in line:
                return line

    def rest(self, seconds: float = 30) -> tuple[int, list[str]]:
        """How it ended, and what it printed since."""
        code = self.process.wait(seconds)
        found = []
        while (line := self._new.get(timeout=seconds)) is not None:
            found.append(line)
        return code, found

    def error(self) -> str:
        """What it wrote to stderr; once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *details: object) -> None:
        self.process.kill()
        self.process.wait()


def on_a_terminal(*arguments: str | Path, columns: int = 160, env: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """How the command ends on a terminal of so many columns, and all that it writes there."""
    import fcntl
    import pty
    import struct
    import termios

    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {**env, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    process = subprocess.Popen([*RUN, *map(str, arguments)], stdout=writer, stderr=writer, env=env)
    os.close(writer)
    shown = b""
    try:
        while chunk := os.read(reader, 65536):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(reader)
    return process.wait(60), shown.decode()
