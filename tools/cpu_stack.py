#!/usr/bin/env python3
"""Builds the CPU stack: a virtual environment with the real SGLang on CPU, and two small local models for it to serve.

It needs nothing but Python, never touches the environment it runs in, and never calls a stack ready before it has seen
it import its server.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PARTS = Path(__file__).resolve().parent / "cpu_stack"
LOCK = PARTS / "requirements.lock"
SHIMS = PARTS / "shims"
MODELS = PARTS / "make_models.py"

SGLANG_VERSION = "0.5.23"
TORCH_VERSION = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

#: The Python the lock was made with, then the ones for which every pin has a wheel but no boot was tried.
PYTHONS = ((3, 11), (3, 12), (3, 13))

DOWNLOAD_MB = 680
ON_DISK_GB = 2.8
NEEDED_BYTES = 6 * 10**9

IMPORT_THE_SERVER = """
import importlib.metadata, torch
import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
print("sglang", importlib.metadata.version("sglang"), "on torch", torch.__version__)
"""


class BuildError(Exception):
    """The stack cannot be built; the message says why and what to do."""


@dataclass(frozen=True)
class Layout:
    """Where things lie inside the stack's folder."""

    root: Path
    venv: Path
    python: Path
    models: Path
    stamp: Path
    log: Path
    lock: Path


def layout_of(root: Path) -> Layout:
    """Return the layout of the stack in this folder, whether or not it exists."""
    return Layout(
        root=root,
        venv=root / "venv",
        python=root / "venv" / "bin" / "python",
        models=root / "models",
        stamp=root / "stamp.json",
        log=root / "build.log",
        lock=root / ".lock",
    )


class Steps:
    """Prints `[n/m] what ... 12 s` and keeps the full output of every command in the build log."""

    def __init__(self, log: Path, total: int) -> None:
        self.log, self.total, self.number = log, total, 0
        self.started = time.monotonic()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Announce a step, and tell its duration when it is done."""
        self.number += 1
        begun = time.monotonic()
        say(f"  [{self.number}/{self.total}] {what}")
        yield
        say(f"        done in {time.monotonic() - begun:.0f} s ({time.monotonic() - self.started:.0f} s in all)")

    def run(self, argv: Sequence[str | Path]) -> str:
        """Run a command into the log and return what it said.

        :raises BuildError: when it fails; the message ends with the last lines of its output.
        """
        command = [str(word) for word in argv]
        with self.log.open("ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=clean_environment())
            try:
                self._wait(child)
            except BaseException:
                child.terminate()
                child.wait()
                raise
        with self.log.open("rb") as log:
            log.seek(start)
            output = log.read().decode(errors="replace")
        if child.returncode:
            tail = "\n".join(f"    {line}" for line in output.splitlines()[-15:])
            raise BuildError(f"exit status {child.returncode} of this command:\n  {shlex.join(command)}\n{tail}")
        return output

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                child.wait(timeout=30)
                return
            except subprocess.TimeoutExpired:
                say(f"        still at it ({time.monotonic() - self.started:.0f} s in all; details in {self.log})")


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would lead another Python astray."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def default_folder() -> Path:
    """Return `$GPUGUARD_CPU_STACK`, else `.cpu-stack` in the checkout."""
    return Path(os.environ.get("GPUGUARD_CPU_STACK") or CHECKOUT / ".cpu-stack").absolute()


def digest(*paths: Path) -> str:
    """Return a hash over the files' contents (a folder counts with all its files, compiled ones apart)."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    total = hashlib.sha256()
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            total.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def wanted(layout: Layout) -> dict[str, str]:
    """Return what a finished stack's stamp must say, per part."""
    return {
        "packages": f"{digest(LOCK)} in {layout.venv}",
        "shims": digest(SHIMS),
        "models": digest(MODELS),
    }


def finished(layout: Layout) -> dict[str, str]:
    """Return what the stamp says is done; nothing at all if the environment's Python is gone."""
    if not os.access(layout.python, os.X_OK):
        return {}
    try:
        stamp = json.loads(layout.stamp.read_text())
    except (OSError, ValueError):
        return {}
    return {str(part): str(value) for part, value in stamp.items()} if isinstance(stamp, dict) else {}


def missing(layout: Layout) -> list[str]:
    """Return the parts that are not there, or were built from other inputs."""
    done = finished(layout)
    return [part for part, value in wanted(layout).items() if done.get(part) != value]


def record(layout: Layout, part: str | None) -> None:
    """Note in the stamp that a part is done (None: that nothing is)."""
    stamp = finished(layout) if part else {}
    if part:
        stamp[part] = wanted(layout)[part]
    fresh = layout.stamp.with_suffix(".new")
    fresh.write_text(json.dumps(stamp, indent=2) + "\n")
    fresh.replace(layout.stamp)


@contextlib.contextmanager
def only_builder(layout: Layout) -> Iterator[None]:
    """Hold the folder's build lock; the kernel releases it however this process ends."""
    layout.root.mkdir(parents=True, exist_ok=True)
    with layout.lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another builder is at work in {layout.root}: waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def python_version(python: str) -> tuple[int, int] | None:
    """Return an interpreter's version, or None if it does not run or could not make a virtual environment."""
    code = "import sys, ensurepip, venv; print(*sys.version_info[:2])"
    try:
        environment = clean_environment()
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, env=environment)
        major, minor = answer.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return int(major), int(minor)


def choose_python() -> tuple[str, tuple[int, int]]:
    """Return an interpreter for the stack: the lock's own version first, then ones whose wheels exist.

    :raises BuildError: when none of the known versions is here, or none can make a virtual environment.
    """
    for version in PYTHONS:
        name = "python{}.{}".format(*version)
        for candidate in (sys.executable, shutil.which(name)):
            if candidate and python_version(candidate) == version:
                return candidate, version
    known = ", ".join("{}.{}".format(*version) for version in PYTHONS)
    raise BuildError(
        f"no Python {known} that can make a virtual environment is on the PATH, and the pinned packages have wheels for"
        " these versions only. On Debian and Ubuntu: apt install python3.11 python3.11-venv."
    )


def check_machine(layout: Layout) -> None:
    """Refuse a machine where the build cannot end well, before anything is downloaded.

    :raises BuildError: on another system than Linux, or with too little room on the disk.
    """
    if platform.system() != "Linux":
        raise BuildError(f"SGLang's CPU engine is for Linux; this is {platform.system()}.")
    if platform.machine() != "x86_64":
        say(f"  note: tried on x86_64 only; this is {platform.machine()}.")
    free = shutil.disk_usage(layout.root).free
    if free < NEEDED_BYTES:
        raise BuildError(
            f"{layout.root} has {free / 1e9:.1f} GB free and the build wants {NEEDED_BYTES / 1e9:.0f} GB."
            " Another place: --dir, or $GPUGUARD_CPU_STACK."
        )


def make_environment(layout: Layout, steps: Steps, python: str) -> None:
    """Create the virtual environment anew; what an interrupted build left is not trusted."""
    shutil.rmtree(layout.venv, ignore_errors=True)
    steps.run([python, "-m", "venv", layout.venv])


def pip_install(layout: Layout, *arguments: str | Path) -> list[str | Path]:
    """Return the pip command: exact pins only, no resolver, no bytecode (`compile_all` does it on all cores)."""
    quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off", "-q")
    return [layout.python, "-m", "pip", "install", *quiet, "--no-deps", "--no-compile", *arguments]


def install_torch(layout: Layout, steps: Steps, index: str | None) -> None:
    """Install the CPU build of torch.

    Many indexes serve a CUDA build of several GB under the plain version, so the CPU build is asked for by name: first
    where pip looks anyway, then in PyTorch's own CPU index. A named index is asked for the plain version.

    :raises BuildError: when no CPU build is to be had.
    """
    if index:
        steps.run(pip_install(layout, "--index-url", index, f"torch=={TORCH_VERSION}"))
    else:
        cpu_build = f"torch=={TORCH_VERSION}+cpu"
        try:
            steps.run(pip_install(layout, cpu_build))
        except BuildError as error:
            if "No matching distribution" not in str(error):
                raise
            say(f"        pip's own indexes have no {cpu_build}: asking {TORCH_CPU_INDEX}")
            try:
                steps.run(pip_install(layout, "--index-url", TORCH_CPU_INDEX, cpu_build))
            except BuildError as second:
                raise BuildError(
                    f"no CPU build of torch {TORCH_VERSION} was found. Name an index that has one with --torch-index or"
                    f" $GPUGUARD_TORCH_INDEX.\n{second}"
                ) from second
    cuda = cuda_of_torch(layout)
    if cuda:
        raise BuildError(
            f"torch came as a build for CUDA {cuda}, which cannot run here. Name an index with CPU builds:"
            f" --torch-index {TORCH_CPU_INDEX}"
        )


def cuda_of_torch(layout: Layout) -> str | None:
    """Return the CUDA version that the installed torch was built for, None for a CPU build.

    Read from its version file: a CUDA build without its libraries could not be imported to be asked.
    """
    files = list(layout.venv.glob("lib/python*/site-packages/torch/version.py"))
    if not files:
        raise BuildError(f"torch was installed, but not into {layout.venv}.")
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", files[0].read_text(), re.MULTILINE)
    return found.group(1) if found else None


def install_packages(layout: Layout, steps: Steps) -> None:
    """Install everything else of the lock, exactly as pinned."""
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith(("#", "torch=="))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=layout.root) as rest:
        rest.write("\n".join(pins) + "\n")
        rest.flush()
        steps.run(pip_install(layout, "-r", rest.name))


def compile_all(layout: Layout, steps: Steps) -> None:
    """Compile everything ahead, so that the first server boots as fast as the next, whatever user it runs as.

    It matters most where PYTHONDONTWRITEBYTECODE is set, as in many containers: there no boot would leave bytecode for
    the next. Some packages ship templates that look like Python and do not compile: that is no error.
    """
    code = (
        "import compileall, re, sys;"
        "compileall.compile_dir(sys.argv[1], quiet=2, workers=0, rx=re.compile(r'/tests?/'), maxlevels=99)"
    )
    steps.run([layout.python, "-c", code, layout.venv / "lib"])


def install_shims(layout: Layout) -> None:
    """Copy the shims into the environment, where they act on it alone and nobody has to set a path."""
    (site_packages,) = layout.venv.glob("lib/python*/site-packages")
    shutil.copytree(SHIMS, site_packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def write_models(layout: Layout, steps: Steps) -> None:
    """Write both models beside their place and swap them in, so that a half-written one is never served."""
    fresh = layout.root / "models.new"
    shutil.rmtree(fresh, ignore_errors=True)
    steps.run([layout.python, MODELS, fresh])
    shutil.rmtree(layout.models, ignore_errors=True)
    for file in fresh.rglob("*"):  # safetensors writes for the owner alone, and servers may run as somebody else
        file.chmod(0o755 if file.is_dir() else 0o644)
    fresh.rename(layout.models)


def build(layout: Layout, torch_index: str | None, force: bool) -> None:
    """Build what is missing.

    :raises BuildError: with the reason and the cure; a later call goes on with the part that failed.
    """
    parts = ["packages", "shims", "models"] if force else missing(layout)
    if not parts:
        return
    check_machine(layout)
    steps = Steps(layout.log, total=2 + 4 * ("packages" in parts))
    if "packages" in parts:
        python, version = choose_python()
        say(f"Building SGLang {SGLANG_VERSION} on CPU in {layout.root}")
        count = len(LOCK.read_text().split())
        say(f"  {count} packages, about {DOWNLOAD_MB} MB to download and {ON_DISK_GB} GB on disk; two to four minutes")
        if version != PYTHONS[0]:
            say("  note: the pins were tried on Python {}.{} only; this is {}.{}.".format(*PYTHONS[0], *version))
        parts = ["packages", "shims", "models"]
        record(layout, None)
        layout.log.unlink(missing_ok=True)
        with steps.step(f"virtual environment ({python})"):
            make_environment(layout, steps, python)
        with steps.step(f"torch {TORCH_VERSION}, CPU build"):
            install_torch(layout, steps, torch_index)
        with steps.step(f"SGLang {SGLANG_VERSION} and what it needs, at the exact versions of {LOCK.name}"):
            install_packages(layout, steps)
        with steps.step("compile them"):
            compile_all(layout, steps)
        record(layout, "packages")
    if "shims" in parts:
        install_shims(layout)
    with steps.step("models tiny and mid"):
        write_models(layout, steps)
    with steps.step("import the server once"):
        say(f"        {steps.run([layout.python, '-c', IMPORT_THE_SERVER]).strip().splitlines()[-1]}")
    record(layout, "shims")
    record(layout, "models")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 0 for a ready stack, 1 for none, 2 for a usage error."""
    parser = argparse.ArgumentParser(description="Build the CPU stack: the real SGLang on CPU, and two models for it.")
    parser.add_argument("--dir", type=Path, help="where to build (default: $GPUGUARD_CPU_STACK, else .cpu-stack here)")
    parser.add_argument(
        "--torch-index",
        metavar="URL",
        default=os.environ.get("GPUGUARD_TORCH_INDEX") or None,
        help=f"take torch from this package index, e.g. {TORCH_CPU_INDEX} (default: $GPUGUARD_TORCH_INDEX)",
    )
    parser.add_argument("--force", action="store_true", help="build anew even if the stack is ready")
    parser.add_argument("--check", action="store_true", help="build nothing; exit status 1 if the stack is not ready")
    parser.add_argument("--print-env", action="store_true", help="print shell lines that name a ready stack")
    options = parser.parse_args(arguments)

    layout = layout_of((options.dir or default_folder()).absolute())
    if options.check or options.print_env:
        parts = missing(layout)
        if parts:
            print(f"not ready: {layout.root} ({', '.join(parts)} missing or outdated)", file=sys.stderr)
            return 1
    else:
        try:
            with only_builder(layout):
                build(layout, options.torch_index, options.force)
        except BuildError as error:
            print(f"The CPU stack was not built: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\nInterrupted; the next call builds what is missing.", file=sys.stderr)
            return 130
    if options.print_env:
        print(f"export GPUGUARD_CPU_STACK={shlex.quote(str(layout.root))}")
    else:
        say(f"ready: {layout.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
