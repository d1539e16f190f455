"""What a real engine does otherwise than one expects: late answers, other words, clients and daemons that go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.containers import end, start
from pytest_gpuguard.containers.client import ContainerError, find_image, run_in_image
from pytest_gpuguard.containers.image import Container, ContainerSettings
from pytest_gpuguard.engines import container as module
from pytest_gpuguard.engines.base import BootSpec
from pytest_gpuguard.engines.container import ContainerServer
from pytest_gpuguard.facts.lease import Lease, PortRange

from .docker.fixtures import HERE, IMAGE, Docker

STACK = f"docker:{IMAGE}"
CLIENT = str(HERE / "docker")
Run = Any


def client(folder: Path, script: str) -> str:
    """A client of an engine that answers as the script does."""
    made = folder / "docker"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    return str(made)


def wait_for(condition: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def boot(tmp_path: Path, script: str, grace: float = 1.0) -> ContainerServer:
    image = find_image(STACK, ContainerSettings())[0]
    spec = BootSpec("sglang", "image", "python3", str(tmp_path), container=image)
    lease = Lease((), (), PortRange(20000, 64), "here", "a test")
    return ContainerServer.boot(spec, lease, ["python3", "-c", script], {}, tmp_path / "log", (), grace)


def clients_of(server: ContainerServer, word: str) -> list[int]:
    found = []
    for pid in server.pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words and CLIENT.encode() in words:
            found.append(pid)
    return found


def test_an_engine_whose_socket_is_gone_does_not_say_that_the_container_is(tmp_path: Path) -> None:
    said = (
        "failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is correct and if the "
        "daemon is running: dial unix /var/run/docker.sock: connect: no such file or directory"
    )
    facts, why = end.inspect(client(tmp_path, f"echo '{said}' >&2; exit 1"), "f" * 64)
    assert facts is None
    assert why == said


@pytest.mark.parametrize(
    "said",
    [
        "Error response from daemon: No such container: f",
        "Error: No such object: f",
        'Error: no such container "f"',
        'Error: no container with name or ID "f" found: no such container',
    ],
)
def test_a_container_that_is_not_there_is_told_by_docker_and_by_podman(tmp_path: Path, said: str) -> None:
    assert end.inspect(client(tmp_path, f"echo '{said}' >&2; exit 1"), "f" * 64) == (None, "")


def test_the_end_is_given_up_in_time_however_long_one_answer_takes(docker: Docker, tmp_path: Path) -> None:
    """The warden kills what takes longer, and then nobody is told what is left."""
    docker.write("hang", ["ps"])
    began = time.monotonic()
    assert "did not answer" in str(end.end(CLIENT, str(tmp_path / "cid"), "ours", whole_s=1.0))
    assert time.monotonic() - began < 4


def test_a_container_that_is_still_being_made_when_its_client_is_killed_is_removed(
    docker: Docker, tmp_path: Path
) -> None:
    docker.write("creating", 2.0)
    words = Container("docker", IMAGE, "sha256:" + "1" * 64).run_words(
        ["sleep", "600"], {}, lease="a" * 32, run="a-run", cidfile=str(tmp_path / "cid"), detached=True
    )
    asked = subprocess.Popen([CLIENT, *words])
    wait_for(lambda: docker.calls)
    time.sleep(0.3)
    asked.kill()
    asked.wait()
    assert end.end(CLIENT, str(tmp_path / "cid"), "a" * 32) is None
    time.sleep(2.0)
    assert docker.containers == []


def test_no_line_is_lost_or_told_twice_when_what_copies_the_log_is_killed(docker: Docker, tmp_path: Path) -> None:
    script = (
        'import sys, time\nprint("up", flush=True)\n'
        'for n in range(150):\n    print("line", n, flush=True, file=sys.stderr if n % 3 else sys.stdout)\n'
        '    time.sleep(0.01)\nprint("done", flush=True)\ntime.sleep(600)'
    )
    server = boot(tmp_path, script)
    log = tmp_path / "log"
    try:
        for sign in ("line 20\n", "line 70\n"):
            wait_for(lambda sign=sign: sign in log.read_text())
            for pid in clients_of(server, "logs"):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: "done\n" in log.read_text())
        assert log.read_text().splitlines() == ["up", *(f"line {n}" for n in range(150)), "done"]
    finally:
        server.stop(0)


def test_what_the_engine_said_between_two_tellings_of_a_log_is_not_taken_for_the_servers(tmp_path: Path) -> None:
    """A telling begins anew; what is in our file of it already is left out, with the client's own words between."""
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(log, b"WARNING: of run\n")
        copy = start.Copy(log)
        for told in ([b"a\nb", b"\nunexpected EOF\n"], [b"a\n", b"b\nc\n"], [b"a\nb\nc\nd\n"], [b"rotated\n"]):
            copy.begin()
            for data in told:
                copy.take(data)
    finally:
        os.close(log)
    assert (tmp_path / "log").read_text() == "WARNING: of run\na\nb\nunexpected EOF\nc\nd\nrotated\n"


def test_an_engine_that_hangs_while_a_server_boots_is_no_hang_of_the_server(
    claims: Run, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log does not come any more; a claim that the server hangs must not hold for that."""
    source = """
    import json, os
    from pathlib import Path

    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "hang"})
    @fails("hang.timeout")
    def test_it(): ...
    """
    claims(source, stack=STACK, ini="gpuguard_stall_timeout = 2s\n").assert_outcomes(passed=1)
    docker.write("hang", ["logs", "inspect"])
    result = claims(source, stack=STACK, ini="gpuguard_stall_timeout = 2s\n")
    result.stdout.fnmatch_lines(["*INFRA*infra.lost*docker no longer says*"])
    assert docker.containers == []


def test_a_killed_follower_is_no_failure_of_the_server(docker: Docker, claims: Run) -> None:
    source = """
    import os, signal, time
    from pathlib import Path

    @serves("sglang", MODEL, CPU)
    @works()
    def test_it(server):
        for one in Path("/proc").glob("[0-9]*"):
            try:
                words = (one / "cmdline").read_bytes().split(b"\\0")
            except OSError:
                continue
            if any(word.endswith(b"containers/start.py") for word in words) and LEASE in words:
                os.kill(int(one.name), signal.SIGKILL)
        time.sleep(1)
        server.generate("hello")
    """
    source = source.replace("LEASE in words", f"{str(docker.state)!r}.encode() in (one / 'environ').read_bytes()")
    result = claims(source, stack=STACK)
    result.stdout.fnmatch_lines(["*INFRA*infra.lost*"])
    assert docker.containers == []


def test_a_client_that_cannot_be_run_is_a_fault_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    command = [sys.executable, "-I", "-S", start.__file__, "--engine", str(tmp_path / "none"), "--grace", "1"]
    command += ["--cidfile", str(tmp_path / "boot" / "cid"), "--lease", "a", "--", "run", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == start.NOT_STARTED
    assert '"infra.boot"' in (tmp_path / "boot" / "state.json").read_text()
    assert "Traceback" not in done.stderr


def test_the_cause_is_told_and_not_the_clients_hint_at_its_help(docker: Docker) -> None:
    image = find_image(STACK, ContainerSettings(args=("--no-such-flag",)))[0]
    with pytest.raises(
        ContainerError, match=r"does not start in lab/sglang:v0\.5\.23: docker: unknown flag: --no-such"
    ):
        run_in_image(image, ["true"], {}, 20.0)


def test_podman_does_not_hand_on_the_proxies_of_this_machine() -> None:
    def words(engine: str) -> list[str]:
        return Container(engine, "lab/x:1", "abc").run_words(["python3"], {}, lease="a" * 32, run="r")

    assert "--http-proxy=false" in words("podman")
    assert "--http-proxy=false" not in words("docker"), "docker knows no such option"


def test_a_word_of_the_ini_that_is_no_option_makes_no_container_that_is_not_ours(docker: Docker) -> None:
    """The engine takes it for the image, and all that comes after it for a command."""
    words = Container("docker", IMAGE, "sha256:abc", ContainerSettings(args=("--ulimit", "memlock=-1", "nginx")))
    found = words.run_words(["python3"], {}, lease="a" * 32, run="r", cidfile="/run/cid", detached=True)
    before = found[: found.index("nginx")]
    assert "gpuguard.lease=" + "a" * 32 in before
    assert "--cidfile" in before


def test_the_digest_is_that_of_the_repository_that_was_named(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one comes with a mirror or a push of the same image, which is no change of it."""
    digests = ["a.mirror/lab/sglang@sha256:" + "0" * 64, "docker.io/lab/sglang@sha256:" + "d" * 64]
    answer = {"Id": "sha256:" + "1" * 64, "RepoDigests": digests}
    monkeypatch.setattr("pytest_gpuguard.containers.client.image_facts", lambda *_: answer)
    assert find_image(STACK, ContainerSettings())[1] == "sha256:" + "d" * 64
    named = f"docker:lab/sglang@sha256:{'0' * 64}"
    assert find_image(named, ContainerSettings())[1] == "sha256:" + "0" * 64
    assert find_image("docker:other:1", ContainerSettings())[1] == "sha256:" + "0" * 64


def test_a_hub_cache_with_a_relative_path_is_found_in_a_container_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    spec = BootSpec("sglang", "image", "python3", "org/model")
    assert module.inside(spec, {})["HF_HUB_CACHE"] == str(tmp_path / "hub")
    assert module._folder("org/model") == str(tmp_path / "hub")


def test_a_model_folder_with_a_relative_path_is_the_same_one_in_a_container(
    claims: Run, docker: Docker, pytester: Any
) -> None:
    folder = pytester.mkdir("org") / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    source = """
    @serves("sglang", "org/model", CPU)
    @fits()
    def test_it(): ...
    """
    claims(source, stack=STACK)
    (words,) = docker.runs
    assert f"type=bind,source={folder},target={folder},readonly" in words
    assert words[words.index("--model-path") + 1] == str(folder)


def test_two_images_of_one_name_are_refused_by_fetch(docker: Docker) -> None:
    command = [sys.executable, "-c", "from pytest_gpuguard.cli import main; main()", "fetch"]
    command += ["--stack", "new=docker:lab/other:1", "--stack", f"new={STACK}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, "else the first one would be left out, and nobody told"
    assert "two stacks called 'new'" in done.stderr
