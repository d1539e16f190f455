"""A container stack as a value, and the command line that runs something in it. Pure: nothing is started here.

It must never put the value of a variable on a command line, which every user of the machine can read, and never hand
on a variable that nobody named.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..diagnose.redact import without_secrets
from ..names import CONTAINER_ENGINES

__all__ = [
    "LEASE_LABEL",
    "PYTHON",
    "RUN_LABEL",
    "Container",
    "ContainerSettings",
    "parse_arguments",
    "parse_mount",
    "parse_reference",
    "parse_variable",
]

#: The label that says which boot a container belongs to (a random number, known to nobody else), and which run.
LEASE_LABEL: Final = "gpuguard.lease"
RUN_LABEL: Final = "gpuguard.run"
#: What runs the engine in an image: found by the image's own PATH.
PYTHON: Final = "python3"
#: A limit, not a reservation. Docker's own 64 MiB are too few for NCCL and for tensors between processes.
_SHM: Final = "32g"
#: Variables that the client itself obeys: set in its environment they would change what it does.
_CLIENT_READS: Final = re.compile(
    r"PATH|HOME|TMPDIR|GODEBUG|GOMAXPROCS|(LD|XDG|CONTAINERS|REGISTRY|STORAGE|BUILDAH|PODMAN)_.*"
    r"|DOCKER_.*|CONTAINER_(HOST|CONNECTION|SSHKEY|TLS_.*)"
)
#: What is set by us, would let a container outlive its boot, or keep its log from being read.
_NOT_YOURS: Final = (
    "--cidfile",
    "--detach",
    "--entrypoint",
    "--env",
    "--env-file",
    "--gpus",
    "--log-driver",
    "--name",
    "--net",
    "--network",
    "--pid",
    "--publish",
    "--pull",
    "--restart",
    "--rm",
    "-d",
    "-e",
    "-p",
)
_IMAGE: Final = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """What every container of a run is given: mounts as (host, inside, read only), variables, words for ``run``.

    A variable without a value has the value that it has where pytest runs, and is left out where it has none there.
    """

    mounts: tuple[tuple[str, str, bool], ...] = ()
    env: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """An image that is there, under its ``id``, so that a tag that moves meanwhile changes nothing."""

    engine: str
    image: str
    id: str
    settings: ContainerSettings = field(default_factory=ContainerSettings)

    def variables(self, env: Mapping[str, str], own: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the settings pass on, and ``env`` over it. ``own`` is where pytest runs."""
        own = os.environ if own is None else own
        found = {}
        for name, value in self.settings.env:
            given = own.get(name) if value is None else value
            if given is not None:
                found[name] = given
        return found | dict(env)

    def run_words(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        lease: str,
        run: str,
        cidfile: str | None = None,
        gpus: Sequence[str] = (),
        read: Iterable[str] = (),
        detached: bool = False,
    ) -> list[str]:
        """The words after ``docker``: ``command`` in this image, with these variables and these GPUs (UUIDs).

        ``read`` are folders that it sees read-only at the same place, unless a mount of the settings covers them. The
        values of ``variables`` are to be in the client's environment (``client_environment``).
        """
        labels = ["--label", f"{LEASE_LABEL}={lease}", "--label", f"{RUN_LABEL}={run}"]
        words = ["run", *(["--detach", "--log-driver", "json-file"] if detached else ["--rm", "--interactive"])]
        # Before the user's words too: one that is no option is taken for the image, and ends what is read as options.
        words += ["--name", f"gpuguard-{lease[:12]}", *(["--cidfile", cidfile] if cidfile is not None else []), *labels]
        words += ["--pull", "never", "--init", "--network", "host", "--shm-size", _SHM]
        if self.engine == "podman":
            words += ["--http-proxy=false"]  # else those of this machine, with their passwords, go along
        words += ["--no-healthcheck", "--stop-signal", "SIGTERM", *self.settings.args, *labels]
        for host, inside, read_only in self._mounts(read):
            words += ["--mount", f"type=bind,source={host},target={inside}" + (",readonly" if read_only else "")]
        if not gpus:  # where the NVIDIA runtime is the default one, an image may ask for all of them
            variables = {"NVIDIA_VISIBLE_DEVICES": "void"} | dict(variables)
        for name, value in sorted(variables.items()):
            words += ["--env", f"{name}={value}" if _CLIENT_READS.fullmatch(name) else name]
        words += self._gpu_words(gpus)
        return [*words, "--entrypoint", command[0], self.id, *command[1:]]

    def client_environment(self, variables: Mapping[str, str], own: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of the client that is given ``run_words``: ours, and the values of the variables."""
        passed = {"NVIDIA_VISIBLE_DEVICES": "void"} | dict(variables)
        given = {name: value for name, value in passed.items() if not _CLIENT_READS.fullmatch(name)}
        return dict(os.environ if own is None else own) | given

    def _mounts(self, read: Iterable[str]) -> list[tuple[str, str, bool]]:
        found = list(self.settings.mounts)
        for folder in dict.fromkeys(read):
            if not any(host == inside and _within(folder, host) for host, inside, _ in found):
                found.append((folder, folder, True))
        return found

    def _gpu_words(self, gpus: Sequence[str]) -> list[str]:
        if not gpus:
            return []
        if self.engine == "podman":
            return [word for one in gpus for word in ("--device", f"nvidia.com/gpu={one}")]
        return ["--gpus", f'"device={",".join(gpus)}"']  # the quotes are the client's: it reads comma-separated values


def parse_reference(text: str) -> tuple[str, str]:
    """``docker:lmsysorg/sglang:v0.5.9`` → engine and image. Raises ValueError."""
    engine, _, image = text.partition(":")
    if engine not in CONTAINER_ENGINES:
        raise ValueError(f"{text!r} is no container stack: write docker:IMAGE or podman:IMAGE")
    if not _IMAGE.fullmatch(image):
        raise ValueError(f"{text!r} names no image: write {engine}:IMAGE, such as {engine}:lmsysorg/sglang:v0.5.9")
    return engine, image


def parse_mount(text: str) -> tuple[str, str, bool]:
    """``/data/models``, ``/host:/inside`` or ``/host:/inside:ro``. Raises ValueError; the host's folder must exist."""
    parts = os.path.expanduser(text.strip()).split(":")
    read_only = len(parts) > 1 and parts[-1] in ("ro", "rw")
    mode = parts.pop() if read_only else "rw"
    host, inside = (parts[0], parts[-1]) if len(parts) <= 2 else ("", "")
    if not (os.path.isabs(host) and os.path.isabs(inside)) or "," in text:
        raise ValueError(f"{text!r} is no mount: write HOST:CONTAINER or HOST:CONTAINER:ro, absolute, no commas")
    if not os.path.exists(host):
        raise ValueError(f"{text!r}: there is no {host} on this machine")
    return os.path.normpath(host), os.path.normpath(inside), mode == "ro"


def parse_variable(text: str) -> tuple[str, str | None]:
    """``NAME`` or ``NAME=VALUE``. Raises ValueError, without the value in it."""
    name, equals, value = text.strip().partition("=")
    name = name.strip()
    if not _VARIABLE.fullmatch(name) or "\0" in value:
        raise ValueError(f"{name[:40]!r} is no name of a variable: write NAME, or NAME=VALUE")
    return name, value.strip() if equals else None


def parse_arguments(text: str) -> tuple[str, ...]:
    """Words for ``docker run``. Raises ValueError for what is set by us."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{text!r} are no words of a command line: {error}") from None
    for word in words:
        if word.partition("=")[0] in _NOT_YOURS:
            raise ValueError(f"{word!r} is not yours to set: it is set for every container, or must not be")
    if words != without_secrets(words):
        raise ValueError("it has a secret in it, which every user of this machine could read: pass it as a variable")
    return words


def _within(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.normpath(path), folder]) == folder
