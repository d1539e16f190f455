"""Fixtures that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester", "tests.docker.fixtures", "tests.probed", "tests.standin.fixtures"]

HERE = Path(__file__).parent
#: For the runs that tests start: plugins of ours alone, which is also a second less each.
PLAIN = "-p no:randomly -p no:hypothesispytest -p no:anyio"

# Hundreds of processes are started here that import the same modules: compiling them anew would take a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python whose ``sglang`` is the stand-in of tests/fake_stack: a stack that boots in a tenth of a second."""
    folder = tmp_path_factory.mktemp("fake-stack") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "fake_stack.pth").write_text(f"{HERE / 'fake_stack'}\n")
    return folder / "bin" / "python"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder: a config.json is all that the stand-in wants."""
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks and caches of the tests are their own: they neither wait for, nor disturb, real runs on this machine."""
    # A folder of locks for each test: stand-in GPUs have the same UUIDs, and quarantines last.
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
    monkeypatch.setenv("GPUGUARD_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The command lines of the stand-in servers that were booted so far, in order."""
    return _lines_of(tmp_path / "boots", "FAKE_SGLANG_BOOTS", monkeypatch)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What tests of a run wrote into the file ``EVENTS``, one line each."""
    return _lines_of(tmp_path / "events", "EVENTS", monkeypatch)


def _lines_of(file: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setenv(variable, str(file))
    return lambda: file.read_text().splitlines() if file.exists() else []


Run = Callable[..., pytest.RunResult]


def own_ports() -> str:
    """A range of ports for the runs that this worker starts: lock folders differ, so ranges must too."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = 19968 + 1024 * (os.getppid() % 2 * 4 + int(worker) % 4)  # up to 28159: others have those above
    return f"{first}-{first + 1023}"


@pytest.fixture
def claims(pytester: pytest.Pytester, fake_python: Path, model: Path) -> Run:
    """Runs pytest, in a process of its own, over a file of claims against the stand-in stack.

    In the source ``MODEL`` is a model folder and everything of ours is imported. Returns pytest's result.
    """
    head = textwrap.dedent(
        f"""
        import pytest
        from pytest_gpuguard import *
        MODEL = {str(model)!r}
        CPU = "--device cpu"
        """
    )

    def run(
        source: str, *args: str, stack: str | None = None, ini: str = "", name: str = "test_claims"
    ) -> pytest.RunResult:
        pytester.makepyfile(**{name: head + textwrap.dedent(source)})
        ini = textwrap.dedent(ini)
        ports = "" if "gpuguard_ports" in ini else f"gpuguard_ports = {own_ports()}\n"
        pytester.makeini(f"[pytest]\naddopts = {PLAIN}\n{ports}{ini}")
        given = ["--gpuguard-stack", f"fake={stack or fake_python}"] if stack != "" else []
        return pytester.runpytest_subprocess(*given, *args, timeout=120)

    return run


#: Tests in which speeds are measured: not while a real server has all cores.
TIMED = ("test_comparing", "test_measuring", "test_meter", "test_gather", "test_device_check", "test_false_verdicts")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real servers first: one worker boots them one after the other, and the others must not wait for it at the end.

    What measures speeds comes last, when they are done.
    """

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("real_server") is not None:
            return 0
        return 2 if item.path.stem.startswith(TIMED) else 1

    items.sort(key=place)
