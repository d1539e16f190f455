"""Start a container, copy its log, and end as it ends: what the warden runs in the place of a server.

Standard library only, Python 3.8 syntax, run as a file. On SIGTERM it has the engine stop the container (TERM, grace,
KILL); it must never write into the log what the server did not say, unless there is no server.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":  # as a file, with -I: its own folder is not on the path
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from end import id_in, inspect, is_ours  # type: ignore[import-not-found]
else:
    from .end import id_in, inspect, is_ours

#: How long ``docker run --detach`` may take: it unpacks nothing, but sets GPUs up.
START_S = 120.0
TICK_S = 0.05
#: How often the engine may fail to say what has become of a container whose log has ended.
MOST_SILENT = 5
NOT_STARTED = 125


class Copy:
    """The container's words in our log. Its engine tells all of them again whenever it is asked anew.

    So what the log has already is left out, even with the client's own last words after it.
    """

    def __init__(self, log: int) -> None:
        self.log = log
        self._parts: list[tuple[int, int]] = []  # where they are in the file
        self._had = b""
        self._same = 0
        self._told = True  # whether this telling has come to what the log does not have

    def begin(self) -> None:
        """A telling begins."""
        self._had, self._same, self._told = self._read(), 0, not self._parts

    def take(self, data: bytes) -> None:
        """Some of it. Raises OSError when the log cannot be written."""
        if not self._told:
            known = self._had[self._same : self._same + len(data)]
            same = next((at for at, byte in enumerate(known) if byte != data[at]), len(known))
            self._same += same
            data = data[same:]
            if not data:
                return
            if self._same < len(self._had):  # not the container's: a line of the client's, from its start
                line = self._had.rfind(b"\n", 0, self._same) + 1
                data, self._same = self._had[line : self._same] + data, line
            self._cut(self._same)
            self._had, self._told = b"", True
        end = os.fstat(self.log).st_size
        self._parts.append((end, end + len(data)))
        if len(self._parts) > 1 and self._parts[-2][1] == end:
            self._parts[-2:] = [(self._parts[-2][0], end + len(data))]
        while data:
            data = data[os.write(self.log, data) :]

    def _cut(self, length: int) -> None:
        kept = []
        for first, end in self._parts:
            if length > 0:
                kept.append((first, min(end, first + length)))
            length -= end - first
        self._parts = kept

    def _read(self) -> bytes:
        if not self._parts:
            return b""
        try:
            with open(f"/proc/self/fd/{self.log}", "rb") as file:
                return b"".join(os.pread(file.fileno(), end - first, first) for first, end in self._parts)
        except OSError:
            return b""  # told twice is better than not at all


class Runner:
    """One container, from its start to its end."""

    def __init__(self, engine: str, cidfile: str, lease: str, grace: float) -> None:
        self.engine, self.cidfile, self.lease, self.grace = engine, cidfile, lease, grace
        self.name = os.path.basename(engine)
        self.stopping = False
        self.state: dict[str, Any] = {"id": None, "pid": None, "fault": None}
        self._stop: subprocess.Popen[bytes] | None = None
        self._copy = Copy(1)

    def run(self, words: Sequence[str]) -> int:
        """The container's own exit status, or 125 when there never was one."""
        container = self.start(words)
        if container is None:
            return NOT_STARTED
        facts, _ = inspect(self.engine, container)
        if facts is not None and is_ours(facts, self.lease):
            self.note(pid=(facts.get("State") or {}).get("Pid") or None)
        return self.follow(container)

    def start(self, words: Sequence[str]) -> str | None:
        """Its id, or None; then why is noted for whoever judges, and what the client said is in the log."""
        client = subprocess.Popen([self.engine, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while client.poll() is None and not self.stopping and time.monotonic() < until:
            time.sleep(TICK_S)
        if client.poll() is None:
            client.kill()
            client.wait()
            said = "was told to stop" if self.stopping else f"did not answer within {START_S:g} s"
            self.note(fault=["infra.boot", f"{self.name} run {said}"])
            return None
        container: str | None = id_in(self.cidfile)
        if client.returncode != 0 or container is None:
            self.note(fault=["infra.boot", f"{self.name} run failed with status {client.returncode}; see the log"])
            return None
        self.note(id=container)
        return container

    def follow(self, container: str) -> int:
        """Copy the log until the container has ended."""
        silent = 0
        while True:
            self.copy(container)
            facts, why = inspect(self.engine, container)
            state = (facts or {}).get("State") or {}
            if facts is not None and not state.get("Running"):
                return int(state.get("ExitCode") or 0)
            if facts is None and not why:
                if not self.stopping:
                    self.note(fault=["infra.lost", "the container was removed by somebody else"])
                return 1
            silent = silent + 1 if facts is None else 0
            if silent >= MOST_SILENT:
                self.note(fault=["infra.lost", f"{self.name} no longer says what its container does: {why}"])
                return 1
            self.obey(container)
            time.sleep(0.2)

    def copy(self, container: str) -> None:
        """Copy the log as long as the engine's client tells it: to its end, or until client or engine go away."""
        words = [self.engine, "logs", "--follow", container]
        logs = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert logs.stdout is not None
        self._copy.begin()
        with logs.stdout as pipe:
            while True:
                self.obey(container)
                if select.select([pipe], [], [], TICK_S)[0]:
                    data = os.read(pipe.fileno(), 65536)
                    if not data:
                        break
                    self._copy.take(data)
                elif logs.poll() is not None:
                    break
        while logs.poll() is None:
            self.obey(container)
            time.sleep(TICK_S)

    def obey(self, container: str) -> None:
        """Have the engine stop it, once, when we were told to."""
        if self.stopping and self._stop is None:
            self._stop = subprocess.Popen(
                [self.engine, "stop", "-t", str(max(1, round(self.grace))), container],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        elif self._stop is not None:
            self._stop.poll()

    def note(self, **facts: Any) -> None:
        """Tell whoever watches the boot, through a file beside the cidfile."""
        self.state.update(facts)
        path = os.path.join(os.path.dirname(self.cidfile), "state.json")
        try:
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(self.state, file)
            os.replace(path + ".new", path)
        except OSError:
            pass  # the folder is gone: the boot is over


def main(arguments: Sequence[str]) -> int:
    """Run one container."""
    parser = argparse.ArgumentParser(prog="container-start")
    for name in ("--engine", "--cidfile", "--lease"):
        parser.add_argument(name, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    runner = Runner(options.engine, options.cidfile, options.lease, options.grace)

    def terminated(*_: Any) -> None:
        runner.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, terminated)
    try:
        return runner.run(words)
    except OSError as error:  # no client, no memory, a full disk: nothing that the server did
        why = f"its container cannot be followed: {error.strerror or error}"
        runner.note(fault=["infra.lost" if runner.state["id"] else "infra.boot", why])
        return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
