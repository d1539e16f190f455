"""A stand-in for dockerd: containers are process trees in a pid namespace of their own, and children of this process.

So they outlive any client, as they do with the real one. Images are names with an environment; there is no file system
of their own, no network and no GPU. One request a connection, one line of JSON each way.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: The first process of a container with --init: starts the command, passes SIGTERM on, ends with it.
INIT = """
import os, signal, sys
child = os.fork()
if child == 0:
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        os.write(2, f"exec: {sys.argv[1]}: {error.strerror}\\n".encode())
        os._exit(127)
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
while True:
    pid, status = os.wait()
    if pid == child:
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
"""

UNSHARE = shutil.which("unshare") or "unshare"


class Container:
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.id = secrets.token_hex(32)
        self.folder = folder / self.id
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.folder.mkdir()
        for name in ("log", "err"):
            (self.folder / name).touch()
        if config["interactive"]:
            os.mkfifo(self.folder / "stdin")

    def start(self, ended: Any) -> None:
        config = self.config
        command = [config["entrypoint"], *config["command"]]
        if config["init"]:
            command = [sys.executable, "-I", "-S", "-c", INIT, *command]
        stdin = os.open(self.folder / "stdin" if config["interactive"] else os.devnull, os.O_RDONLY)
        log, err = ((self.folder / name).open("ab") for name in ("log", "err"))
        self.process = subprocess.Popen(
            [UNSHARE, "--pid", "--fork", "--mount-proc", "--kill-child", *command],
            stdin=stdin,
            stdout=log,
            stderr=log if config["detached"] else err,
            env=config["env"],
            cwd="/",
            start_new_session=True,
        )
        os.close(stdin)
        log.close()
        err.close()
        threading.Thread(target=self._reap, args=(ended,), daemon=True).start()

    def _reap(self, ended: Any) -> None:
        assert self.process is not None
        code = self.process.wait()
        self.code = code if code >= 0 else 128 - code
        if self.config["remove"]:
            ended(self)

    @property
    def running(self) -> bool:
        return self.process is not None and self.code is None

    @property
    def pid(self) -> int:
        """The host's pid of the first process in the namespace."""
        if self.process is None or self.code is not None:
            return 0
        until = time.monotonic() + 5
        while time.monotonic() < until and self.process.poll() is None:
            try:
                found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            except OSError:
                return 0
            if found:
                return int(found[0])
            time.sleep(0.005)
        return 0

    def signal(self, number: int) -> None:
        pid = self.pid
        if pid:
            try:
                os.kill(pid, number)
            except OSError:
                pass

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            time.sleep(0.01)
        return not self.running

    def facts(self) -> dict[str, Any]:
        return {
            "Id": self.id,
            "Name": "/" + self.config["name"],
            "State": {"Running": self.running, "Pid": self.pid, "ExitCode": self.code or 0},
            "Config": {"Labels": self.config["labels"], "Env": [f"{a}={b}" for a, b in self.config["env"].items()]},
            "HostConfig": {"Words": self.config["words"]},
        }


class Daemon:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.containers: dict[str, Container] = {}
        (state / "containers").mkdir(exist_ok=True)

    def answer(self, asked: dict[str, Any]) -> Any:
        what = asked.pop("do")
        if what == "create":
            delay = self.state / "creating.json"
            time.sleep(json.loads(delay.read_text()) if delay.exists() else 0)
            made = Container(self.state / "containers", asked)
            self.containers[made.id] = made
            with (self.state / "created").open("a") as file:
                file.write(json.dumps(asked) + "\n")
            return made.id
        if what == "list":
            return [one.id for one in self.containers.values() if asked["label"] in self._labels(one)]
        found = next((one for name, one in self.containers.items() if name.startswith(asked["id"])), None)
        if found is None:
            return None
        if what == "start":
            found.start(self.remove)
        elif what == "kill":
            found.signal(signal.SIGKILL)
        elif what == "stop":
            found.signal(signal.SIGTERM)
            if not found.wait(asked["grace"]):
                found.signal(signal.SIGKILL)
            found.wait(10)
        elif what == "remove":
            found.signal(signal.SIGKILL)
            found.wait(10)
            self.remove(found)
        return found.facts()

    @staticmethod
    def _labels(one: Container) -> list[str]:
        return [f"{name}={value}" for name, value in one.config["labels"].items()]

    def remove(self, one: Container) -> None:
        self.containers.pop(one.id, None)
        shutil.rmtree(one.folder, ignore_errors=True)

    def close(self) -> None:
        for one in list(self.containers.values()):
            one.signal(signal.SIGKILL)
            one.wait(5)


def main(state: Path) -> None:
    daemon = Daemon(state)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(json.dumps(daemon.answer(json.loads(self.rfile.readline()))).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    server = Server(str(state / "socket"), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(0.05)
    daemon.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
