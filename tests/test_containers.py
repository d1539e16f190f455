"""Claims on a stack that is an image, end to end: what its container is given, what is judged, and what is left."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import own_ports
from .docker.fixtures import IMAGE, Docker

Run = Any

STACK = f"docker:{IMAGE}"
#: Law 5: after a kill -9 of pytest.
WITHIN_S = 5.0
ONE = """
@serves("sglang", MODEL, CPU)
@fits()
def test_it(): ...
"""


def logs(folder: Path) -> str:
    return "".join(one.read_text(errors="replace") for one in (folder / ".gpuguard" / "logs").glob("*.log"))


def test_a_claim_holds_in_a_container_and_nothing_is_left(claims: Run, docker: Docker, pytester: Any) -> None:
    stranger = docker.stranger(gpuguard_lease="somebody-else")
    result = claims(ONE, stack=STACK)
    result.stdout.fnmatch_lines(["stack fake: sglang 0.5.23, no torch, python 3*", "HOLDS  test_claims.py::test_it*"])
    result.assert_outcomes(passed=1)
    assert docker.containers == [stranger]
    assert "ready to roll" in logs(pytester.path)
    assert not [words for words in docker.calls if words[0] in ("stop", "kill", "rm") and words[-1] == stranger]


def test_a_container_is_given_what_it_needs_and_no_more(claims: Run, docker: Docker, model: Path) -> None:
    claims(ONE, stack=STACK, ini=f"gpuguard_mounts =\n    {model.parent}:/data:ro\n").assert_outcomes(passed=1)
    (words,) = docker.runs
    assert words[words.index("--pull") + 1] == "never"
    assert words[words.index("--network") + 1] == "host"
    assert "--init" in words
    assert "--rm" not in words, "a log that is read after the end would be gone"
    assert "--gpus" not in words
    mounts = [words[at + 1] for at, word in enumerate(words) if word == "--mount"]
    assert mounts == [
        f"type=bind,source={model.parent},target=/data,readonly",
        f"type=bind,source={model},target={model},readonly",
    ]
    assert words[words.index("--entrypoint") + 1 :][:3] == ["python3", "sha256:" + "1" * 64, "-m"]
    (served,) = docker.served
    assert served["env"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert set(served["labels"]) == {"gpuguard.lease", "gpuguard.run"}


def test_nothing_of_the_environment_leaks_and_no_secret_is_on_a_command_line(
    claims: Run, docker: Docker, monkeypatch: pytest.MonkeyPatch, pytester: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_thisIsAPlantedToken")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-aws-secret")
    monkeypatch.setenv("SOMETHING_ELSE", "planted-other")
    monkeypatch.setenv("WITH_LINES", "one\ntwo # not a comment")
    ini = """
        gpuguard_container_env =
            HF_TOKEN
            WITH_LINES
            NOT_SET_ANYWHERE
            OWN = planted-own-value
    """
    env = {"NCCL_DEBUG": "INFO", "LD_PRELOAD": "/none.so", "CLAIMS": "planted-claim"}
    source = ONE.replace("CPU)", f"CPU, env={env})")
    result = claims(source, "-v", stack=STACK, ini=ini)
    result.assert_outcomes(passed=1)
    (served,) = docker.served
    env = served["env"]
    assert env["HF_TOKEN"] == "hf_thisIsAPlantedToken"
    assert env["WITH_LINES"] == "one\ntwo # not a comment"
    assert env["OWN"] == "planted-own-value"
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["LD_PRELOAD"] == "/none.so", "the client's own loader must not see it, so it is given by value"
    assert env["IN_IMAGE"] == "yes", "the image's own variables stay"
    assert "AWS_SECRET_ACCESS_KEY" not in env
    assert "SOMETHING_ELSE" not in env
    assert "NOT_SET_ANYWHERE" not in env
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["PATH"].split(":")[0].endswith("venv/bin"), "the image's own PATH"
    said = json.dumps(docker.calls) + logs(pytester.path) + result.stdout.str() + result.stderr.str()
    assert "planted" not in said.lower().replace("thisisaplantedtoken", "planted")


def test_an_image_that_is_missing_is_not_evaluated_and_the_cure_is_told(claims: Run, docker: Docker) -> None:
    result = claims(ONE, stack="docker:lab/none:1")
    result.stdout.fnmatch_lines(
        [
            "NOT_EVALUATED  *",
            "*the image lab/none:1 is not on this machine. Pull it: docker pull lab/none:1 "
            "(or gpuguard fetch --stack fake=docker:lab/none:1)*",
        ]
    )
    result.assert_outcomes(skipped=1)
    assert len([words for words in docker.calls if words[0] == "image"]) == 1, "asked once, whatever it says"
    assert claims(ONE, "--gpuguard-require=stack", stack="docker:lab/none:1").ret == 1
    assert docker.runs == []


def test_an_engine_that_does_not_answer_is_a_fault_of_the_host(claims: Run, docker: Docker) -> None:
    (docker.state / "socket").unlink()
    result = claims(ONE, stack=STACK)
    result.stdout.fnmatch_lines(["*INFRA*docker cannot be asked for lab/sglang*Cannot connect to the Docker daemon*"])
    assert result.ret == 1


def test_a_container_that_dies_while_it_boots_is_judged_by_its_log(claims: Run, docker: Docker, pytester: Any) -> None:
    source = """
    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "weights_oom"})
    @ooms("weights")
    def test_it(): ...

    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "silent_exit"})
    @fits()
    def test_silent(): ...
    """
    result = claims(source, stack=STACK)
    result.stdout.fnmatch_lines(["CONTRADICTED*test_silent*unknown*", "HOLDS*test_it*oom.weights*"])
    assert docker.containers == []
    assert "Tried to allocate 672.00 MiB" in logs(pytester.path)


def test_a_container_that_cannot_be_started_is_no_failure_of_the_stack(claims: Run, docker: Docker) -> None:
    result = claims(ONE, stack=STACK, ini="gpuguard_container_args = --no-such-flag\n")
    result.stdout.fnmatch_lines(["*INFRA*"])
    result.stdout.no_fnmatch_line("*CONTRADICTED*")
    assert docker.containers == []


def test_a_container_that_somebody_else_removes_is_lost(claims: Run, docker: Docker) -> None:
    source = """
    import os, subprocess
    from pathlib import Path

    @serves("sglang", MODEL, CPU)
    @works()
    def test_it(server):
        (one,) = (Path(os.environ["FAKE_DOCKER"]) / "containers").iterdir()
        subprocess.run(["docker", "rm", "--force", one.name], check=True)
        server.generate("hello")
    """
    result = claims(source, stack=STACK)
    result.stdout.fnmatch_lines(["*INFRA*infra.lost*"])
    assert docker.containers == []


def test_a_server_that_dies_under_a_test_is_no_fault_of_the_test(claims: Run, docker: Docker) -> None:
    source = """
    @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "vanish"})
    @fits()
    def test_it(server):
        server.generate("hello")
    """
    result = claims(source, stack=STACK)
    result.stdout.fnmatch_lines(["CONTRADICTED*test_it*unknown*"])


def test_a_port_that_is_taken_before_is_told_and_nothing_is_booted(claims: Run, docker: Docker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        source = ONE.replace("CPU)", f'CPU + " --port {port}")')
        result = claims(source, stack=STACK)
    result.stdout.fnmatch_lines([f"*INFRA*port.in_use*somebody listens on port {port} already*"])
    assert docker.runs == []


def test_a_server_that_serves_another_model_is_not_ours(claims: Run, docker: Docker) -> None:
    source = ONE.replace("CPU)", 'CPU, env={"FAKE_SGLANG": "foreign"})')
    claims(source, stack=STACK).stdout.fnmatch_lines(["*INFRA*port.in_use*serves /somebody/else*"])
    assert docker.containers == []


def test_the_flags_of_an_image_are_asked_once_for_its_id(
    claims: Run, docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUGUARD_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        claims(ONE, stack=STACK).assert_outcomes(passed=1)
    helps = [words for words in docker.calls if words[0] == "run" and words[-1] == "--help"]
    assert len(helps) == 1, "kept on disk by the image's id"
    (image,) = json.loads((docker.state / "images.json").read_text()).values()
    docker.write("images", {IMAGE: image | {"id": "sha256:" + "3" * 64}})
    claims(ONE, stack=STACK).assert_outcomes(passed=1)
    helps = [words for words in docker.calls if words[0] == "run" and words[-1] == "--help"]
    assert len(helps) == 2, "the same name, another image"


def test_a_container_sees_its_leased_gpus_and_they_are_numbered_from_0(
    claims: Run, docker: Docker, fake_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=4)
    rig.apply(monkeypatch)
    source = """
    @needs_gpus(2)
    @serves("sglang", MODEL, layout="TP2")
    @fits()
    def test_it(): ...
    """
    result = claims(source, stack=STACK)
    result.assert_outcomes(passed=1)
    (words,) = docker.runs
    named = words[words.index("--gpus") + 1]
    assert named.startswith('"device=GPU-')
    assert named.count("GPU-") == 2
    (served,) = docker.served
    assert "CUDA_VISIBLE_DEVICES" not in served["env"]
    assert served["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "NVIDIA_VISIBLE_DEVICES" not in served["env"]


def test_fresh_jit_caches_of_a_container_are_its_own(claims: Run, docker: Docker) -> None:
    source = ONE.replace("CPU)", 'CPU, env={"TRITON_CACHE_DIR": "/mine"})')
    source += """
@serves("sglang", MODEL, CPU)
@fits()
def test_other(): ...
"""
    claims(source, "--gpuguard-fresh-jit", stack=STACK).assert_outcomes(passed=2)
    folders = [served["env"]["FLASHINFER_WORKSPACE_BASE"] for served in docker.served]
    assert all(re.fullmatch("/tmp/gpuguard-jit-[0-9a-f]{12}/flashinfer", one) for one in folders)
    assert len(set(folders)) == 2, "a mount over /tmp would keep what the first boot has compiled"
    assert sorted(served["env"]["TRITON_CACHE_DIR"] for served in docker.served)[0] == "/mine", "the claim's own word"


@pytest.mark.parametrize("moment", ["creating", "booting", "ready", "stopping"])
def test_kill_9_of_pytest_ends_its_container_and_no_other(
    tmp_path: Path, docker: Docker, model: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The server ignores SIGTERM, and so does its child, which is in a session of its own."""
    stranger = docker.stranger(gpuguard_lease="somebody-else", gpuguard_run="somebody")
    delay = "20" if moment == "booting" else "0.02"
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\ngpuguard_ports = {own_ports()}\ngpuguard_grace = 30s\ngpuguard_container_env =\n"
        f"    FAKE_SGLANG = proof\n    FAKE_SGLANG_DELAY = {delay}\n"
    )
    (tmp_path / "test_claims.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from pytest_gpuguard import serves\n"
        f"@serves('sglang', {str(model)!r}, '--device cpu')\n"
        "def test_it(server):\n"
        "    Path('ready').touch()\n"
        f"    time.sleep({60 if moment == 'ready' else 0})\n"
        "    Path('body-done').touch()\n"
    )
    if moment == "creating":  # between the daemon's making it and its start
        docker.write("slow", 3)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--gpuguard-stack=image={STACK}"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    signs = {"ready": tmp_path / "ready", "stopping": tmp_path / "body-done"}

    def there() -> bool:
        if moment in signs:
            return signs[moment].exists()
        found = [one for one in docker.containers if one != stranger]
        if moment == "creating":
            return bool(found) and bool((docker.state / "created").exists() and docker.served)
        return bool(docker.served) and any(_log(docker, one) for one in found)

    try:
        wait_for(there, 90)
        time.sleep(0.3)
        assert run.poll() is None
        run.kill()
        run.wait()
        killed = time.monotonic()
        wait_for(lambda: docker.containers == [stranger], 30)
        assert time.monotonic() - killed <= WITHIN_S
        assert docker.facts(stranger)["State"]["Running"]
        time.sleep(0.3)
        assert docker.containers == [stranger], "and none that was still asked for comes later"
    finally:
        run.kill()


def _log(docker: Docker, container: str) -> bool:
    try:
        return (docker.state / "containers" / container / "log").stat().st_size > 0
    except OSError:
        return False


def wait_for(condition: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def test_fresh_jit_caches_of_a_python_end_with_the_run(claims: Run, tmp_path: Path, fake_python: Path) -> None:
    told = tmp_path / "told"
    wrapper = tmp_path / "sh"
    wrapper.write_text(f'#!/bin/sh\nmkdir -p "$TRITON_CACHE_DIR"; echo "$TRITON_CACHE_DIR" >> {told}\nexec "$@"\n')
    wrapper.chmod(0o755)
    source = ONE.replace("CPU)", f'CPU, wrapper="{wrapper}")')
    claims(source, "--gpuguard-fresh-jit").assert_outcomes(passed=1)
    folder = told.read_text().strip()
    assert folder.endswith("/triton")
    assert not os.path.exists(folder)
