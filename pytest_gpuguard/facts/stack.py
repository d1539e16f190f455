"""The software under test: one python with what is installed in it, as frozen facts with a fingerprint.

The python is asked in a process of its own, with a deadline; this process never imports what is installed there.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from . import stack_cache
from .choice import SIMULATED
from .model import model_facts
from .named import NAMED_PACKAGES
from .stack_cache import cache_dir
from .stack_probe import canonical, redact_text

__all__ = ["DEADLINE_S", "NAMED_PACKAGES", "Stack", "StackError", "cache_dir", "model_facts", "probe_stack"]

DEADLINE_S: Final = 60.0
_SCRIPT: Final = Path(__file__).with_name("stack_probe.py")


class StackError(Exception):
    """A stack cannot be asked: ``cause`` says why, ``cure`` what to do."""

    def __init__(self, name: str, cause: str, cure: str) -> None:
        super().__init__(name, cause, cure)
        self.name, self.cause, self.cure = name, cause, cure

    def __str__(self) -> str:
        return f"stack {self.name!r}: {self.cause}. {self.cure}."


@dataclass(frozen=True, slots=True)
class Stack:
    """One named stack. ``python`` is the executable as the user named it; ``facts`` are the probe's answers.

    Keys of ``facts``: python, packages, torch (version, cuda, hip, build), driver, kernel, libcuda, nvcc,
    jit_caches, environment, and image where it is one (engine, name, id, digest); docs/facts.md documents them.
    ``name`` is the user's word and part of no comparison.
    """

    name: str
    python: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Whether nothing of it is installed: ``python`` is then what the user said of it."""
        return self.python.startswith(SIMULATED)

    @property
    def packages(self) -> Mapping[str, str]:
        """Every installed distribution: canonical name (PEP 503) → version."""
        packages: Mapping[str, str] = self.facts.get("packages", {})
        return packages

    def package(self, name: str) -> str | None:
        """The version of a distribution, however its name is spelt; None when it is not installed."""
        return self.packages.get(canonical(name))

    @property
    def torch_version(self) -> str | None:
        """Torch's own version, with its local part ("2.13.0+cpu"); None without torch."""
        torch = self.facts.get("torch") or {}
        version: str | None = torch.get("version") or self.package("torch")
        return version

    @property
    def torch_cuda(self) -> str | None:
        """The CUDA that torch was built for ("12.8"); None without torch and for CPU and ROCm builds."""
        torch = self.facts.get("torch") or {}
        cuda: str | None = torch.get("cuda")
        return cuda

    @property
    def python_version(self) -> str | None:
        """Such as "3.11.7"."""
        python = self.facts.get("python") or {}
        version: str | None = python.get("version")
        return version

    @property
    def image(self) -> str | None:
        """The digest that the image's registry knows it by, else its local id; None for a python."""
        image = self.facts.get("image") or {}
        found: str | None = image.get("digest") or image.get("id")
        return found

    @property
    def driver(self) -> str | None:
        """The NVIDIA driver that this stack runs on."""
        driver: str | None = self.facts.get("driver")
        return driver

    def with_driver(self, driver: str | None) -> Stack:
        """The same stack on the driver that NVML named (a container or a stand-in may hide the kernel module's)."""
        return replace(self, facts={**self.facts, "driver": driver}) if driver else self

    def describe(self) -> str:
        """One line, such as "sglang 0.5.23, torch 2.13.0+cpu (CPU), python 3.11.7"."""
        if self.simulated:
            named = [f"{name} {version}" for name, version in self.packages.items()]
            named += [f"CUDA {self.torch_cuda}"] if self.torch_cuda else []
            from .simulated import beyond_what_is_known

            beyond = beyond_what_is_known(self.package("sglang"))
            return f"simulated: {', '.join(named)}" + (f" ({beyond})" if beyond else "")
        parts = [f"{engine} {self.package(engine)}" for engine in ("sglang", "vllm") if self.package(engine)]
        if self.torch_version:
            torch = self.facts.get("torch") or {}
            builds = {"cpu": "CPU", "cuda": f"CUDA {self.torch_cuda}", "rocm": f"ROCm {torch.get('hip')}"}
            build = builds.get(torch.get("build", ""))
            parts.append(f"torch {self.torch_version}" + (f" ({build})" if build else ""))
        else:
            parts.append("no torch")
        parts.append(f"python {self.python_version}")
        return ", ".join(parts)

    def fingerprint(self) -> dict[str, Any]:
        """What a verdict was true on, JSON-able: versions, builds, driver, kernel, caches and environment.

        It leaves out the stack's name and the place of its python, so that equal stacks have equal fingerprints.
        """
        facts = self.facts
        named = {
            label: next((version for one in names if (version := self.package(one))), None)
            for label, names in NAMED_PACKAGES.items()
        }
        return {
            "python": self.python_version,
            "torch": self.torch_version,
            "torch_cuda": self.torch_cuda,
            **({"image": self.image} if self.image else {}),
            **named,
            "driver": self.driver,
            "kernel": facts.get("kernel"),
            "libcuda": facts.get("libcuda"),
            "nvcc": (facts.get("nvcc") or {}).get("release"),
            "jit_caches": {name: one["state"] for name, one in (facts.get("jit_caches") or {}).items()},
            "environment": dict(facts.get("environment") or {}),
            "packages": dict(self.packages),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by ``from_dict``."""
        return {"name": self.name, "python": self.python, "facts": dict(self.facts)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Stack:
        """The stack that ``to_dict`` wrote."""
        return Stack(data["name"], data["python"], data["facts"])


def probe_stack(
    name: str, python: str, env: Mapping[str, str] | None = None, cache: bool = True, deadline_s: float = DEADLINE_S
) -> Stack:
    """Ask ``python`` (a path, or a name on the PATH) what it has, in the environment a server would be started in.

    With ``cache``, its packages come from the cache while their files are unchanged; what may change without them
    (JIT caches, environment, kernel, driver, libcuda, nvcc) is asked every time. Raises StackError.
    """
    env = dict(os.environ if env is None else env)
    executable = _executable(name, python, env)
    script = _SCRIPT.read_text(encoding="utf-8")
    folder = cache_dir(env)
    key = stack_cache.key_of(executable, env, script)
    known = stack_cache.load(folder, key) if cache else None
    answer = _ask(name, executable, script, "volatile" if known else "all", env, deadline_s)
    durable = known or answer["durable"]
    if cache and known is None:
        stack_cache.store(folder, key, durable)
    facts = {**durable, **answer["volatile"]}
    facts.pop("watched", None)
    return Stack(name, executable, facts)


def _executable(name: str, python: str, env: Mapping[str, str]) -> str:
    text = os.path.expanduser(python)
    if os.path.isdir(text):
        inside = os.path.join(text, "bin", "python")
        hint = f"Name the executable: {inside}" if os.path.exists(inside) else "Name a python executable"
        raise StackError(name, f"{python} is a directory", hint)
    found = shutil.which(text, path=env.get("PATH"))  # leaves a path with a slash as it is
    if found:
        return os.path.abspath(found)
    if os.path.exists(text):
        raise StackError(name, f"{python} is not executable", f"chmod +x {python}, or name another python")
    raise StackError(name, f"there is no {python}", "Name an existing python executable")


def _ask(
    name: str, python: str, script: str, what: str, env: Mapping[str, str], deadline_s: float
) -> dict[str, dict[str, Any]]:
    """Run the probe. Its answer has a pipe of its own: what sitecustomize prints goes nowhere."""
    if os.name != "posix":
        raise StackError(name, "stacks can be asked on Linux and macOS only", "Use WSL on Windows")
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors, os.fdopen(reader, "rb", buffering=0) as pipe:
        try:
            process = subprocess.Popen(
                [python, "-c", script, str(writer), what],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=env,
                pass_fds=(writer,),
                start_new_session=True,
            )
        except OSError as error:
            raise StackError(
                name, f"{python} cannot be started ({error.strerror or error})", "Name a working python executable"
            ) from None
        finally:
            os.close(writer)
        try:
            line = _read_line(pipe, process, deadline_s)
        finally:
            _end(process)
        if line is None:
            raise StackError(
                name,
                f"{python} did not answer within {deadline_s:g} s",
                "Run it by hand: something that starts with python (sitecustomize, a .pth file) or a driver call hangs",
            )
        try:
            return dict(json.loads(line))
        except ValueError:  # nothing, or half of it
            pass
        raise StackError(name, _why(python, process, errors), f"Run {python} by hand: it must be Python 3.8 or newer")


def _read_line(pipe: Any, process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """The answer's one line; b"" when the process ended without; None when the deadline passed."""
    until = time.monotonic() + deadline_s
    data = b""
    while not data.endswith(b"\n"):
        ended = process.poll() is not None
        wait = 0.0 if ended else min(0.2, until - time.monotonic())
        if wait < 0:
            return None
        # a descendant may keep the pipe open, hence the look at the process too
        if select.select([pipe], [], [], wait)[0]:
            chunk = pipe.read(1 << 20)
            if not chunk:
                break
            data += chunk
        elif ended:
            break
    return data


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no probe behind; it has a process group of its own, for nvcc and whatever else hangs with it."""
    try:
        process.wait(1.0)  # an answer needs no more than the interpreter's own end after it
        return
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        pass  # stuck in the kernel


def _why(python: str, process: subprocess.Popen[bytes], errors: Any) -> str:
    code = process.returncode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    errors.seek(0)
    lines = redact_text(errors.read()[-4000:].decode("utf-8", "replace")).strip().splitlines()
    return f"{python} {how} instead of answering" + (f": {lines[-1].strip()}" if lines else "")
