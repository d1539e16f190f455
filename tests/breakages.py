"""Running shipped claims of suites/blackwell against stand-ins that have one of the known breakages, or none.

The claims are run as they are shipped, in a copy of their folder, by a pytest of their own; what comes out is read from
its report and never from what a stand-in was told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.standin.fixtures import FakeRigFactory

from .conftest import PLAIN, own_ports

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "suites" / "blackwell"
UPGRADES, SILENT, SERVICE = "test_upgrades.py", "test_silent.py", "test_service.py"
HOLDS, WORSE, BETTER = "HOLDS", "CONTRADICTED (worse)", "CONTRADICTED (better)"

#: Verdict, and what was said of it, by the test's name.
Verdicts = dict[str, tuple[str, str]]
Judge = Callable[..., Verdicts]


@pytest.fixture(scope="session")
def stack_with_breakages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python whose ``sglang`` is tests/breakage_server.py, as 0.5.23, with a FlashInfer of its time."""
    folder = tmp_path_factory.mktemp("breakages")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "sglang").mkdir()
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").write_text("from tests.breakage_server import main\n\nmain()\n")
    (site / "ours.pth").write_text(f"{ROOT}\n")
    for name, version in (("sglang", "0.5.23"), ("flashinfer_python", "0.6.17")):
        (site / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    return folder / "venv" / "bin" / "python"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """The suite as it is shipped, in a folder where runs may write."""
    shutil.copytree(SUITE, tmp_path / "run" / "blackwell", ignore=shutil.ignore_patterns("__pycache__", ".gpuguard"))
    shutil.copy(SUITE.parent / "conftest.py", tmp_path / "run" / "conftest.py")
    (tmp_path / "run" / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "run" / "blackwell"


@pytest.fixture
def judged(suite: Path, stack_with_breakages: Path, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Boots the stand-in with a breakage, "" for none, on eight SM120 cards of the NVML stand-in."""
    fake_rig(n=8).apply(monkeypatch)
    models = "\n".join(f"{one.name} = {one}" for one in (suite / "architectures").iterdir())

    def judge(symptom: str, file: str, *tests: str, **env: str) -> Verdicts:
        arguments = [f"--gpuguard-stack=upgraded={stack_with_breakages}", "-o", f"gpuguard_models={models}"]
        return _verdicts(suite, file, tests, arguments, {"BREAKAGE": symptom, **env})

    return judge


@pytest.fixture
def rehearsed(suite: Path) -> Judge:
    """Boots the stand-in of a simulated rig, which lives by the gates of a release."""

    def judge(release: str, file: str, *tests: str) -> Verdicts:
        arguments = ["--gpuguard-rig=sim:rtx-pro-6000-server:8", f"--gpuguard-stack=one=sim:sglang=={release}"]
        return _verdicts(suite, file, tests, arguments, {})

    return judge


def _verdicts(suite: Path, file: str, tests: Sequence[str], arguments: Sequence[str], env: dict[str, str]) -> Verdicts:
    names = [f"blackwell/{file}::{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", *PLAIN.split(), "-p", "no:cacheprovider", *names]
    command += [f"--gpuguard-ports={_ports()}", "--gpuguard-ledger=ledger.db", "--junitxml=report.xml", *arguments]
    env = {**os.environ, **env}
    done = subprocess.run(command, cwd=suite.parent, env=env, capture_output=True, text=True, timeout=110)
    assert (suite.parent / "report.xml").exists(), done.stdout + done.stderr
    found: Verdicts = {}
    for case in ElementTree.parse(suite.parent / "report.xml").iter("testcase"):
        told = {str(one.get("name")): str(one.get("value")) for one in case.iter("property")}
        said = " ".join([told.get("gpuguard_outcome", ""), told.get("gpuguard_fact", ""), done.stdout])
        found[str(case.get("name"))] = (told["gpuguard_verdict"], said)
    assert set(found) == set(tests), done.stdout + done.stderr
    return found


def _ports() -> str:
    """The upper half of this worker's range: others begin at its lower end, and their lock folders are not ours."""
    first = int(own_ports().partition("-")[0]) + 512
    return f"{first}-{first + 511}"
