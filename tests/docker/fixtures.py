"""A container engine for tests: the stand-in daemon, its client in front of the PATH, and two images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
IMAGE = "lab/sglang:v0.5.23"


class Docker:
    """The stand-in's state, and what a person would do with the client."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def __call__(self, *words: str) -> str:
        done = subprocess.run([str(HERE / "docker"), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, name: str, what: Any) -> None:
        """``images``, ``registry``, ``hang`` (first words of commands that hang), ``slow`` (seconds before a start),
        ``creating`` (seconds before it is made)."""
        (self.state / f"{name}.json").write_text(json.dumps(what))

    @property
    def calls(self) -> list[list[str]]:
        """Every command line of the client so far."""
        file = self.state / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def runs(self) -> list[list[str]]:
        """Those that started a server."""
        return [one for one in self.calls if one[0] == "run" and {"--detach", "sglang.launch_server"} <= set(one)]

    @property
    def created(self) -> list[Any]:
        """What every container so far was given: env, labels, entrypoint, command and more."""
        return [json.loads(line) for line in (self.state / "created").read_text().splitlines()]

    @property
    def served(self) -> list[Any]:
        """Those that were servers."""
        return [one for one in self.created if one["detached"] and "sglang.launch_server" in one["command"]]

    @property
    def containers(self) -> list[str]:
        """Ids of all containers, in whatever state."""
        return sorted(one.name for one in (self.state / "containers").glob("*"))

    def facts(self, container: str) -> Any:
        return json.loads(self("inspect", container))[0]

    def stranger(self, **labels: str) -> str:
        """A container of somebody else."""
        given = [word for name, value in labels.items() for word in ("--label", f"{name.replace('_', '.')}={value}")]
        return self("run", "--detach", "--init", "--name", "stranger", *given, "--entrypoint", "sleep", IMAGE, "600")


@pytest.fixture
def docker(tmp_path: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    """A container engine with one image, whose ``sglang`` is the stand-in of tests/fake_stack."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "true"]
    if subprocess.run(unshare, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a pid namespace of its own (root, or CAP_SYS_ADMIN)")
    state = tmp_path / "docker"
    state.mkdir()
    docker = Docker(state)
    env = {"PATH": f"{fake_python.parent}:{os.environ['PATH']}", "IN_IMAGE": "yes", "SGLANG_IMAGE_SAYS": "1"}
    image = {"id": "sha256:" + "1" * 64, "digest": "lab/sglang@sha256:" + "d" * 64, "env": env}
    docker.write("images", {IMAGE: image})
    docker.write("registry", {"lab/other:1": {**image, "id": "sha256:" + "2" * 64}})
    daemon = subprocess.Popen([sys.executable, str(HERE / "daemon.py"), str(state)], env={"PATH": os.environ["PATH"]})
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    monkeypatch.setenv("PATH", f"{HERE}:{os.environ['PATH']}")
    try:
        until = time.monotonic() + 20
        while not (state / "socket").exists() and time.monotonic() < until:
            time.sleep(0.01)
        yield docker
    finally:
        daemon.terminate()
        daemon.wait(20)
