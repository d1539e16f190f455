"""One container and its end: whatever is killed or hangs, ours is gone, and nobody else's is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.containers import end
from pytest_gpuguard.containers.client import ContainerError, find_image, image_facts, run_in_image
from pytest_gpuguard.containers.image import Container, ContainerSettings
from pytest_gpuguard.containers.probe import probe_image
from pytest_gpuguard.engines import container as module
from pytest_gpuguard.engines.base import BootSpec
from pytest_gpuguard.engines.container import ContainerServer
from pytest_gpuguard.facts.lease import Lease, PortRange
from pytest_gpuguard.facts.stack import StackError

from .docker.fixtures import HERE, IMAGE, Docker

STACK = f"docker:{IMAGE}"
CLIENT = str(HERE / "docker")
STUBBORN = 'import signal, time; signal.signal(15, signal.SIG_IGN); print("up", flush=True); time.sleep(600)'
MILD = 'print("up", flush=True); import time; time.sleep(600)'


def container() -> Container:
    return find_image(STACK, ContainerSettings())[0]


@pytest.fixture
def boot(docker: Docker, tmp_path: Path) -> Iterator[Any]:
    made: list[ContainerServer] = []

    def start(script: str, grace: float = 5.0, wait: str = "up") -> ContainerServer:
        spec = BootSpec("sglang", "image", "python3", str(tmp_path), container=container())
        lease = Lease((), (), PortRange(20000, 64), "here", "a test")
        log = tmp_path / f"log-{len(made)}"
        command = ["python3", "-c", script]
        made.append(ContainerServer.boot(spec, lease, command, {"PATH": "/host", "A": "b"}, log, (), grace))
        until = time.monotonic() + 20
        while wait not in log.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        return made[-1]

    yield start
    for one in made:
        one.stop(0)


def test_an_ordinary_stop_is_term_and_leaves_nothing(docker: Docker, boot: Any, tmp_path: Path) -> None:
    stranger = docker.stranger()
    script = 'import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print("had TERM", flush=True))); '
    server = boot(script + 'print("up", flush=True); time.sleep(600)')
    assert server.owns_port(1), "alive is all that there is to see"
    folder = server._cidfile.parent
    report = server.stop(5)
    assert report.clean
    assert "had TERM" in (tmp_path / "log-0").read_text()
    assert docker.containers == [stranger]
    assert not folder.exists()
    assert not server.owns_port(1)


def test_a_container_that_ignores_term_is_killed_after_the_grace(docker: Docker, boot: Any) -> None:
    server = boot(STUBBORN, grace=1.0)
    began = time.monotonic()
    server.stop(1)
    assert 1.0 <= time.monotonic() - began < 8
    assert docker.containers == []


def test_a_stop_that_hangs_does_not_keep_the_container(
    docker: Docker, boot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLACK_S", 0.5)
    server = boot(STUBBORN, grace=0.5)
    docker.write("hang", ["stop"])
    server.stop(0.5)
    assert docker.containers == []


def test_a_killed_warden_leaves_the_end_to_us(docker: Docker, boot: Any) -> None:
    stranger = docker.stranger()
    server = boot(STUBBORN)
    os.kill(server.warden_pid, signal.SIGKILL)
    while server.poll() is None:
        time.sleep(0.02)
    server.stop(1)
    assert docker.containers == [stranger]


def test_killed_clients_leave_nothing_either(docker: Docker, boot: Any) -> None:
    server = boot(STUBBORN)
    os.kill(server.pid, signal.SIGKILL)  # what starts and follows the container
    until = time.monotonic() + 10
    while docker.containers and time.monotonic() < until:
        time.sleep(0.05)
    assert docker.containers == [], "the warden ends what its main process has left"


def test_the_processes_of_a_container_are_known_by_the_pids_of_this_machine(docker: Docker, boot: Any) -> None:
    server = boot(MILD)
    (one,) = docker.containers
    until = time.monotonic() + 5
    pid = docker.facts(one)["State"]["Pid"]
    while pid not in server.pids() and time.monotonic() < until:
        time.sleep(0.05)
    theirs = [one for one in server.pids() if MILD in _command(one)]
    assert pid in server.pids()
    assert len(theirs) >= 2, "init, and the server below it"
    assert server.rss_bytes() > 0
    assert pid in server.processes()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_the_servers_environment_is_what_was_given(docker: Docker, boot: Any) -> None:
    boot(MILD)
    env = docker.created[-1]["env"]
    assert env["A"] == "b"
    assert env["GPUGUARD_BOOT"]
    assert env["PATH"] != "/host"
    assert set(env) == {"A", "GPUGUARD_BOOT", "NVIDIA_VISIBLE_DEVICES", "PATH", "IN_IMAGE", "SGLANG_IMAGE_SAYS"}


def test_only_what_carries_our_label_is_ended(docker: Docker, tmp_path: Path) -> None:
    """The file with the id may lie: it names a container of somebody else, or nothing that is an id."""
    stranger = docker.stranger(gpuguard_lease="theirs")
    for said in (stranger, "rm -rf", "", "f" * 64):
        (tmp_path / "cid").write_text(said)
        assert end.end(CLIENT, str(tmp_path / "cid"), "ours", whole_s=10) is None
    assert docker.containers == [stranger]
    assert docker.facts(stranger)["State"]["Running"]
    assert end.end(CLIENT, str(tmp_path / "cid"), "theirs", whole_s=10) is None
    assert docker.containers == []


def test_what_cannot_be_ended_is_said_with_the_cure(
    docker: Docker, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end, "WHOLE_S", 0.5)
    monkeypatch.setattr(end.end, "__defaults__", (0.5,))
    (docker.state / "socket").unlink()
    assert end.main(["--engine", CLIENT, "--cidfile", str(tmp_path / "x" / "cid"), "--lease", "a"]) == 1
    said = capfd.readouterr().err
    assert "Cannot connect to the Docker daemon" in said
    assert "End it by hand" in said


def test_a_client_that_hangs_is_given_up_after_the_deadline(docker: Docker) -> None:
    docker.write("hang", ["image"])
    began = time.monotonic()
    with pytest.raises(ContainerError, match=r"did not answer within 0\.5 s.*Run it by hand: docker image inspect"):
        image_facts("docker", IMAGE, deadline_s=0.5)
    assert time.monotonic() - began < 5


def test_a_probe_that_hangs_is_ended_with_its_container(docker: Docker) -> None:
    with pytest.raises(ContainerError, match=r"did not answer within 2 s"):
        run_in_image(container(), ["sleep", "600"], {}, 2.0)
    assert docker.containers == []
    docker.write("hang", ["run"])
    with pytest.raises(StackError, match=r"stack 'new': lab/sglang:v0\.5\.23 did not answer within 1 s"):
        probe_image("new", STACK, ContainerSettings(), deadline_s=1.0)


def test_a_probe_ends_with_whoever_asks(docker: Docker) -> None:
    script = (
        "from pytest_gpuguard.containers.client import find_image, run_in_image\n"
        "from pytest_gpuguard.containers.image import ContainerSettings\n"
        f"run_in_image(find_image({STACK!r}, ContainerSettings())[0], ['sleep', '600'], {{}}, 300.0)\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 30
    while not docker.containers and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5)
    assert docker.containers
    asker.kill()
    asker.wait()
    began = time.monotonic()
    while docker.containers and time.monotonic() - began < 10:
        time.sleep(0.02)
    assert docker.containers == []
    assert time.monotonic() - began <= 5


def test_the_facts_of_an_image_are_its_own_and_its_digest_is_in_the_fingerprint(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HOSTS_OWN", "1")
    stack = probe_image("new", STACK, ContainerSettings())
    fingerprint = stack.fingerprint()
    assert stack.package("sglang") == "0.5.23"
    assert fingerprint["environment"] == {"SGLANG_IMAGE_SAYS": "1"}
    assert fingerprint["image"] == "sha256:" + "d" * 64
    assert stack.facts["image"]["id"] == "sha256:" + "1" * 64
    assert stack.python == STACK
    assert "image" not in type(stack)("python", "/bin/python", {}).fingerprint()
    assert docker.containers == []


def test_an_image_without_python_or_on_another_kernel_is_told(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda self, **how: "other" if self.name == "boot_id" else real(self, **how))
        with pytest.raises(ContainerError, match="on another machine, or in a virtual one"):
            run_in_image(container(), ["true"], {}, 20.0)
    docker.write("images", {IMAGE: {"id": "sha256:" + "1" * 64, "env": {"PATH": "/nowhere"}}})
    with pytest.raises(StackError, match=r"python3 does not start in lab/sglang:v0\.5\.23: .*No such file"):
        probe_image("new", STACK, ContainerSettings())
    assert docker.containers == []


def test_fetch_pulls_what_is_missing_and_nothing_else(docker: Docker) -> None:
    def fetch(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-c", "from pytest_gpuguard.cli import main; main()", "fetch", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    both = ("--stack", f"old={STACK}", "--stack", "new=docker:lab/other:1")
    assert fetch(*both, "--list") == (
        1,
        f"old  there       {STACK}\nnew  missing     docker:lab/other:1\n",
    )
    code, said = fetch(*both)
    assert code == 0, said
    assert [words for words in docker.calls if words[0] == "pull"] == [["pull", "lab/other:1"]]
    assert fetch("--stack", "bad=docker:lab/none:1")[0] == 1
    assert fetch("--stack", "bad=/usr/bin/python3")[0] == 2
