"""Ask a container engine, with deadlines: whether an image is there, and what a command in it says.

Nothing that is started here outlives the question: a container that hangs is ended, and one that we could not end any
more, because we were killed, ends with the pipe that we held.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..diagnose.redact import redact
from . import end
from .image import PYTHON, Container, ContainerSettings, parse_reference

__all__ = ["ContainerError", "ImageAbsent", "Ran", "client_of", "find_image", "image_facts", "run_in_image", "run_name"]

INSPECT_S: Final = 30.0
_ABSENT: Final = ("no such image", "image not known", "no such object")
#: Runs a command, and ends with it or with the pipe on its input: whoever asks holds the other end. Its first line
#: tells which kernel it runs on. With it as the first process below ``--init``, its end is the end of all.
_GUARD: Final = """
import os, subprocess, sys, threading
try:
    boot = open("/proc/sys/kernel/random/boot_id").read().strip()
except OSError:
    boot = ""
print("gpuguard-kernel:" + boot, flush=True)
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
code = child.wait()
os._exit(code if code >= 0 else 128 - code)
"""
_KERNEL: Final = "gpuguard-kernel:"
#: How docker ends what it says of an error.
_HINT: Final = re.compile(r"(Run|See) '\S+ .*--help'")


class ContainerError(Exception):
    """An image, or its engine, cannot be asked: ``cause`` says why, ``cure`` what to do."""

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(cause, cure)
        self.cause, self.cure = cause, cure

    def __str__(self) -> str:
        return f"{self.cause}. {self.cure}."


class ImageAbsent(ContainerError):
    """The image, or the engine, is not on this machine."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command in an image ended, and what it said."""

    code: int
    out: str
    err: str


def client_of(engine: str) -> str:
    """The path of ``docker`` or ``podman``. Raises ImageAbsent."""
    found = shutil.which(engine)
    if found is None:
        raise ImageAbsent(f"{engine} is not installed here", f"Install {engine}, or name a python as the stack")
    return os.path.abspath(found)


def run_name() -> str:
    """What the run's label says: host and pid of the process that boots."""
    return f"{socket.gethostname()}-{os.getpid()}"


def image_facts(engine: str, image: str, deadline_s: float = INSPECT_S) -> dict[str, Any] | None:
    """What the engine says of an image; None when it is not here. Raises ContainerError, ImageAbsent."""
    code, out, err = end.call([client_of(engine), "image", "inspect", image], deadline_s)
    if code != 0:
        if any(one in err.lower() for one in _ABSENT):
            return None
        said = _last_words(err) or f"status {code}"
        cure = f"Run it by hand: {engine} image inspect {image}"
        raise ContainerError(f"{engine} cannot be asked for {image}: {said}", cure)
    try:
        found = json.loads(out)[0]
    except (ValueError, LookupError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("Id"), str):
        raise ContainerError(f"{engine} image inspect {image} answers no JSON", "Update the engine")
    return found


def find_image(
    reference: str, settings: ContainerSettings, deadline_s: float = INSPECT_S
) -> tuple[Container, str | None]:
    """The image of ``docker:IMAGE``, and the digest that its registry knows it by, if there is one.

    Raises ImageAbsent with the command that pulls it, ContainerError.
    """
    engine, image = parse_reference(reference)
    facts = image_facts(engine, image, deadline_s)
    if facts is None:
        pull = f"gpuguard fetch --stack NAME={reference}"
        raise ImageAbsent(f"the image {image} is not on this machine", f"Pull it: {engine} pull {image} (or {pull})")
    return Container(engine, image, facts["Id"], settings), _digest(image, facts.get("RepoDigests") or ())


def _digest(image: str, digests: Iterable[Any]) -> str | None:
    """The digest in the repository that was named: another one comes with a mirror, and changes nothing."""
    known = sorted(tuple(str(one).rpartition("@")[::2]) for one in digests)
    name, _, asked = image.partition("@")
    folder, slash, last = name.rpartition("/")
    repository = folder + slash + last.partition(":")[0]
    full = {f"{prefix}{repository}" for prefix in ("", "docker.io/", "docker.io/library/", "localhost/")}
    own = [digest for where, digest in known if where in full]
    found = own or [digest for _, digest in known]
    if asked in (digest for _, digest in known):
        return asked
    return found[0] if found else None


def run_in_image(
    container: Container,
    command: Sequence[str],
    env: Mapping[str, str],
    deadline_s: float,
    read: Iterable[str] = (),
) -> Ran:
    """Run a command in the image without a GPU, on this kernel. Raises ContainerError when it hangs or cannot start."""
    engine = client_of(container.engine)
    lease = uuid.uuid4().hex
    variables = container.variables(env)
    words = container.run_words([PYTHON, "-c", _GUARD, *command], variables, lease=lease, run=run_name(), read=read)
    over = False
    client = None
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            client = subprocess.Popen(
                [engine, *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=container.client_environment(variables),
                start_new_session=True,
            )
            try:
                code = client.wait(deadline_s)
                over = True
            except subprocess.TimeoutExpired:
                raise ContainerError(
                    f"{container.image} did not answer within {deadline_s:g} s",
                    _by_hand(container),
                ) from None
            said, complained = _text(out), _text(err)
    finally:
        if client is not None and not over:
            end.kill(client)
        if client is not None and client.stdin is not None:
            client.stdin.close()
        if not over and client is not None:
            end.end(engine, "", lease)
    return Ran(code, _on_this_kernel(container, code, said, complained), complained)


def _on_this_kernel(container: Container, code: int, said: str, complained: str) -> str:
    """The answer without the guard's own line. Raises ContainerError when there is none, or from another machine."""
    first, newline, rest = said.partition("\n")
    while newline and not first.startswith(_KERNEL):  # what sitecustomize prints comes before it
        first, newline, rest = rest.partition("\n")
    if not newline:
        said = _last_words(complained)
        why = f": {said}" if said else f" (status {code})"
        raise ContainerError(
            f"{PYTHON} does not start in {container.image}{why}",
            _by_hand(container),
        )
    try:
        here = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        here = ""
    there = first.removeprefix(_KERNEL).strip()
    if here and there and here != there:
        raise ContainerError(
            f"{container.engine} runs containers on another machine, or in a virtual one",
            "Its GPUs and ports are not those that are leased here: use an engine of this machine",
        )
    return rest


def _last_words(complained: str) -> str:
    """The last line of a complaint that says something of it."""
    lines = [line.strip() for line in redact(complained).splitlines()]
    return next((line for line in reversed(lines) if line and not _HINT.match(line)), "")


def _by_hand(container: Container) -> str:
    words = f"{container.engine} run --rm --pull never --entrypoint {PYTHON} {container.image} -V"
    return f"Run it by hand: {words}"


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read(32 << 20).decode("utf-8", "replace"))
