"""The words of a container's command line, and what an ini may say of containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.containers.end import remove_words
from pytest_gpuguard.containers.image import (
    Container,
    ContainerSettings,
    parse_arguments,
    parse_mount,
    parse_reference,
    parse_variable,
)

GPUS = ("GPU-1a", "GPU-2b")


def words(engine: str = "docker", settings: ContainerSettings | None = None, **given: Any) -> list[str]:
    container = Container(engine, "lab/x:1", "sha256:abc", settings or ContainerSettings())
    given = {"lease": "a" * 32, "run": "host-1", "cidfile": "/run/cid", "detached": True, **given}
    return container.run_words(["python3", "-m", "x"], given.pop("variables", {}), **given)


def after(found: list[str], word: str) -> list[str]:
    return [found[at + 1] for at, one in enumerate(found) if one == word]


def test_docker_is_given_gpus_in_its_own_quotes_and_podman_by_name() -> None:
    assert after(words(gpus=GPUS), "--gpus") == ['"device=GPU-1a,GPU-2b"']
    assert after(words("podman", gpus=GPUS), "--device") == ["nvidia.com/gpu=GPU-1a", "nvidia.com/gpu=GPU-2b"]
    assert "NVIDIA_VISIBLE_DEVICES" not in words(gpus=GPUS)
    assert after(words(), "--env") == ["NVIDIA_VISIBLE_DEVICES"], "a default NVIDIA runtime would show all of them"


def test_values_are_never_on_the_command_line_but_those_that_the_client_would_obey() -> None:
    variables = {"HF_TOKEN": "secret", "A": "x y\nz", "LD_PRELOAD": "/a.so", "DOCKER_HOST": "tcp://x", "PATH": "/p"}
    found = words(variables=variables, gpus=GPUS)
    assert after(found, "--env") == ["A", "DOCKER_HOST=tcp://x", "HF_TOKEN", "LD_PRELOAD=/a.so", "PATH=/p"]
    container = Container("docker", "lab/x:1", "sha256:abc")
    env = container.client_environment(variables, {"PATH": "/host", "OTHER": "1"})
    assert env == {"PATH": "/host", "OTHER": "1", "HF_TOKEN": "secret", "A": "x y\nz", "NVIDIA_VISIBLE_DEVICES": "void"}


def test_ours_comes_after_what_the_user_adds() -> None:
    found = words(settings=ContainerSettings(args=("--shm-size", "64g", "--label", "gpuguard.lease=mine")))
    assert after(found, "--shm-size") == ["32g", "64g"], "the last one counts"
    ours = ["gpuguard.lease=" + "a" * 32, "gpuguard.run=host-1"]
    assert after(found, "--label") == [*ours, "gpuguard.lease=mine", *ours]


def test_a_model_below_a_mount_is_not_mounted_again() -> None:
    settings = ContainerSettings(mounts=(("/data", "/data", False), ("/other", "/else", False)))
    found = words(settings=settings, read=["/data/models/a", "/database", "/other/m"])
    assert after(found, "--mount") == [
        "type=bind,source=/data,target=/data",
        "type=bind,source=/other,target=/else",
        "type=bind,source=/database,target=/database,readonly",
        "type=bind,source=/other/m,target=/other/m,readonly",
    ]


def test_secrets_of_settings_are_not_shown() -> None:
    settings = ContainerSettings(env=(("HF_TOKEN", "planted"),))
    assert "planted" not in repr(Container("docker", "a", "b", settings))


def test_variables_without_a_value_come_from_where_pytest_runs() -> None:
    container = Container("docker", "a", "b", ContainerSettings(env=(("A", None), ("B", None), ("C", "c"))))
    assert container.variables({"C": "claim"}, {"A": "a"}) == {"A": "a", "C": "claim"}


@pytest.mark.parametrize(
    "text", ["docker:", "docker:-v", "docker: a", "docker:a b", "podman:a\n", "python", "docker:a;b", "docker:../a"]
)
def test_what_is_no_image_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"docker:IMAGE|podman:IMAGE"):
        parse_reference(text)


def test_images_by_name_tag_port_and_digest_are_taken() -> None:
    for image in ("a", "lmsysorg/sglang:v0.5.9-cu130", "localhost:5000/a/b:c", "a@sha256:" + "1" * 64, "sha256:abc"):
        assert parse_reference(f"podman:{image}") == ("podman", image)


def test_mounts_variables_and_arguments_as_an_ini_says_them(tmp_path: Path) -> None:
    assert parse_mount(f" {tmp_path}/ ") == (str(tmp_path), str(tmp_path), False)
    assert parse_mount(f"{tmp_path}:/models:ro") == (str(tmp_path), "/models", True)
    assert parse_mount(f"{tmp_path}:/models:rw") == (str(tmp_path), "/models", False)
    for bad in ("", "a:b", f"{tmp_path}:b", f"{tmp_path}:/a:b", f"{tmp_path}:/a,readonly", f"{tmp_path}:/a:/b:ro"):
        with pytest.raises(ValueError, match="is no mount"):
            parse_mount(bad)
    assert parse_variable("A = b=c ") == ("A", "b=c")
    assert parse_variable("A") == ("A", None)
    assert parse_variable("A=") == ("A", "")
    with pytest.raises(ValueError, match="is no name of a variable") as refused:
        parse_variable("1A=planted")
    assert "planted" not in str(refused.value)
    assert parse_arguments("--ulimit memlock=-1") == ("--ulimit", "memlock=-1")
    for bad in ("--rm", "--restart=always", "--name x", "-e A=b", "--network none", "--log-driver none"):
        with pytest.raises(ValueError, match="is not yours to set"):
            parse_arguments(bad)
    with pytest.raises(ValueError, match="a secret in it") as refused:
        parse_arguments("--annotation token=hf_plantedplanted")
    assert "planted" not in str(refused.value)


def test_podman_is_told_not_to_wait_for_an_answer_to_term() -> None:
    assert remove_words("/usr/bin/docker") == ["rm", "--force", "--volumes"]
    assert remove_words("/usr/bin/podman") == ["rm", "--force", "--volumes", "--time", "0"]
