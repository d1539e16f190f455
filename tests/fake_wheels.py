"""Stacks for the tests of probes: environments with packages of a few lines, and libraries that gcc really links.

What goes wrong in them goes wrong by itself: the loader, the interpreter and the tools write their own messages.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from .conftest import PLAIN

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "suites" / "preflight"
PROBES = ROOT / "pytest_gpuguard" / "probes"

#: One entry's header as nvcc 13.0 writes it: kind, version, header size, payload, …, architecture, …, flags.
_SUFFIX = {"": 0, "a": 0x100000, "f": 0x200000}

#: A compiled module that is empty: what Python.h would declare of it.
EXTENSION = """\
static struct { long head[2]; void *init; long index; void *copy; const char *name, *doc; long size; void *rest[5]; }
    gpuguard_module = {{1}, 0, 0, 0, "_C", 0, -1};
extern void *PyModule_Create2(void *, int);
void *PyInit__C(void) { return PyModule_Create2(&gpuguard_module, 1013); }
"""


class FakeStack:
    """A python of its own, with nothing installed but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / name / "site-packages"
        self.site.mkdir(parents=True)
        self.python = folder / "bin" / "python"
        self.python.parent.mkdir()
        self.python.symlink_to(os.path.realpath(sys.executable))
        home = Path(os.path.realpath(sys.executable)).parent
        (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")

    def file(self, path: str, text: str = "") -> Path:
        """A file in site-packages."""
        target = self.site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def tool(self, path: str, script: str) -> Path:
        """A program of a few lines of shell, anywhere in site-packages."""
        target = self.file(path, "#!/bin/sh\n" + script)
        target.chmod(0o755)
        return target

    def wheel(self, name: str, version: str, *requires: str) -> None:
        """What pip leaves of an installed distribution; an older version of it is gone."""
        plain = name.replace("-", "_")
        for old in self.site.glob(f"{plain}-*.dist-info"):
            shutil.rmtree(old)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        self.file(f"{plain}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")

    def torch(self, version: str = "2.14.1+cu130", cuda: str | None = "13.0", source: str = "", *requires: str) -> None:
        """A torch that can be imported, and knows of no operator."""
        self.wheel("torch", version, *requires)
        self.file("torch/version.py", f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\n")
        self.file("torch/__init__.py", f"from . import version\n__version__ = {version!r}\nOPS = []\n{source}")
        self.file("torch/_C.py", "def _dispatch_get_all_op_names():\n    import torch\n    return torch.OPS\n")
        with (self.site / "torch" / "__init__.py").open("a") as file:
            file.write("from . import _C\n")

    def computes(self) -> None:
        """Its torch multiplies small matrices, as if on a GPU: tests/fake_torch.py."""
        self.file("torch/__init__.py", (Path(__file__).parent / "fake_torch.py").read_text())

    def library(self, path: str, source: str = "int gpuguard_unused;", *flags: str) -> Path:
        """A shared library that gcc links, with that soname unless ``flags`` name another."""
        target = self.site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return link(target, source, *flags)

    def probe(self, name: str, args: Mapping[str, Any] | None = None, sms: Iterable[str] = (), **env: str) -> Answer:
        """Run a shipped probe by hand, as a rig of such cards would, without a lease."""
        rig = [{"uuid": f"GPU-{index}", "name": "a card", "sm": sm} for index, sm in enumerate(sms)]
        return run_probe(self.python, name, args, rig, **env)


class Answer:
    """How a probe that was run by hand ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.text = done.stdout + done.stderr
        last = [line for line in done.stdout.splitlines() if line.startswith("gpuguard-probe: {")]
        self.told: dict[str, Any] = json.loads(last[-1].partition(": ")[2]) if last else {}
        self.data: dict[str, Any] = self.told.get("answer", {})
        self.defect: list[str] | None = self.told.get("defect")
        self.absent: list[str] | None = self.told.get("absent")
        self.ok = bool(last) and self.defect is None and self.absent is None


def run_probe(
    python: Path | str,
    name: str,
    args: Mapping[str, Any] | None = None,
    rig: Sequence[Mapping[str, Any]] = (),
    gpus: Sequence[str] = (),
    driver: str | None = None,
    driver_cuda: str | None = None,
    **env: str,
) -> Answer:
    """Run a shipped probe in a python, as docs tell to do it by hand."""
    facts = {"driver": driver, "driver_cuda": driver_cuda}
    order = {"args": dict(args or {}), "rig": list(rig), "gpus": list(gpus), **facts}
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "TRITON_"))}
    surroundings.update(PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", **env)
    surroundings["GPUGUARD_PROBE"] = json.dumps(order)
    argv = [str(python), str(PROBES / f"{name}.py")]
    return Answer(subprocess.run(argv, env=surroundings, capture_output=True, text=True, timeout=60))


def outcome(answer: Answer, kind: str, *texts: str) -> None:
    """It ended with a defect of that kind, whose line has these texts."""
    assert answer.defect is not None, answer.text
    assert answer.defect[0] == kind
    for text in texts:
        assert text in answer.defect[1], answer.defect


def link(target: Path, source: str, *flags: str) -> Path:
    """Link C source into a shared library."""
    file = target.with_suffix(".c")
    file.write_text(source)
    soname = [] if any("-soname" in one for one in flags) else [f"-Wl,-soname,{target.name}"]
    done = subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O0", "-w", *soname, "-o", str(target), str(file), *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file.unlink()
    return target


def needing(folder: Path, soname: str) -> tuple[str, ...]:
    """Flags that make a library ask for ``soname``, which is not there when it is loaded."""
    folder.mkdir(exist_ok=True)
    link(folder / soname, "int gpuguard_there;")
    return ("-Wl,--no-as-needed", f"-L{folder}", f"-l:{soname}")


def fat_binary(*targets: str) -> bytes:
    """A container of GPU code as a compiled library holds it: "sm_120a" is a cubin, "compute_90" is PTX."""
    entries = b""
    for target in targets:
        kind, _, number = target.partition("_")
        suffix = number[-1] if number[-1] in "af" else ""
        payload = b"\x7fELF" + bytes(60)
        header = struct.pack("<HHIQ", 2 if kind == "sm" else 1, 0x101, 64, len(payload)) + bytes(12)
        header += struct.pack("<I", int(number.rstrip("af"))) + bytes(8) + struct.pack("<Q", 0x11 | _SUFFIX[suffix])
        entries += header + bytes(64 - len(header)) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def with_code(*containers: bytes) -> str:
    """C source of a library that carries these containers where nvcc puts them."""
    data = b"".join(one + bytes(-len(one) % 8) for one in containers)
    body = ",".join(map(str, data))
    return f'const unsigned char gpuguard_code[] __attribute__((section(".nv_fatbin"), aligned(8), used)) = {{{body}}};'


# ---------------------------------------------------------------------------------------------------- shipped claims


def run_suite(pytester: pytest.Pytester, python: Path, *tests: str) -> dict[str, str]:
    """What is said of tests of the shipped pre-flight, by their nodes: verdict, outcome, and the decisive line."""
    pytester.makeini(f"[pytest]\naddopts = {PLAIN} -p no:cacheprovider\nmarkers = premerge")
    pytester.makeconftest(TELLS)
    for file in SUITE.glob("test_*.py"):
        shutil.copy(file, pytester.path)
    result = pytester.runpytest_subprocess(*tests, "--gpuguard-stack", f"fake={python}", timeout=120)
    return dict(line[len("SAID ") :].split(" is ", 1) for line in result.outlines if line.startswith("SAID "))


#: Prints every verdict in whole: the report's lines are cut where they are long.
TELLS = """
def pytest_terminal_summary(terminalreporter):
    found = [one for reports in terminalreporter.stats.values() for one in reports]
    for data in filter(None, (getattr(one, "gpuguard", None) for one in found)):
        text = (data["decisive"] or {}).get("text") or data["fact"]
        terminalreporter.write_line(f"SAID {data['nodeid']} is {data['verdict']} {data['outcome']} {text}")
"""


def node_of(claim: str) -> str:
    """The node of a shipped claim by its id; parameters follow in brackets."""
    named, bracket, parameter = claim.partition("[")
    for file in SUITE.glob("test_*.py"):
        _, found, rest = file.read_text().partition(f'id="{named}"')
        if found:
            name = rest.partition("\ndef ")[2].partition("(")[0]
            return f"{file.name}::{name}{bracket}{parameter}"
    raise AssertionError(f"no claim {named}")
