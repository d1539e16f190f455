"""What having us installed costs a run that has no claims, and what we never import at all."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pytest_gpuguard
from pytest_gpuguard.probes import launch

PACKAGE = Path(pytest_gpuguard.__file__).parent
HEAVY = ("httpx", "rich", "pynvml", "psutil", "filelock", "torch", "sglang", "click", "sqlalchemy")


def run(script: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "collected", ["", "def test_plain(): ...", "import pytest\n@pytest.mark.skip\ndef test(): ..."]
)
def test_a_run_without_claims_loads_nothing_heavy(tmp_path: Path, collected: str) -> None:
    if collected:
        (tmp_path / "test_it.py").write_text(collected)
    quiet = (
        "'-p', 'no:cacheprovider', '-p', 'no:anyio', '-p', 'no:hypothesispytest', '-p', 'no:randomly', '-p', 'no:xdist'"
    )
    text = run(
        f"""
        import sys, pytest
        code = pytest.main(["-q", {quiet}, {"'--co'" if not collected else "'.'"}])
        assert code == {0 if collected else 5}, code
        assert "pytest_gpuguard.plugin" in sys.modules, "the plugin is not even active"
        print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
        print("OURS", sorted(name for name in sys.modules if name.startswith("pytest_gpuguard")))
        """,
        tmp_path,
    )
    assert "LOADED []" in text
    for ours in ("run", "session", "boots", "evaluate", "engines", "lease", "facts", "diagnose", "report.terminal"):
        assert f"'pytest_gpuguard.{ours}" not in text


def test_nothing_of_ours_ever_imports_torch_or_an_engine() -> None:
    """The controller has no CUDA context: what a stack knows is asked in its own python."""
    banned = {"torch", "sglang", "vllm", "transformers", "flashinfer", "cupy", "numba", "triton"}
    found = []
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 40
    for file in files:
        tree = ast.parse(file.read_text())
        # Probes run in the stack's python and not here; they too import such things in functions only.
        nodes = ast.walk(tree) if file.parent.name != "probes" else iter(tree.body)
        for node in nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in ("import_module", "__import__"):
                    names = [str(node.args[0].value)]
            found += [f"{file.name}: {name}" for name in names if name.split(".")[0] in banned]
    assert found == []


def test_no_probe_is_ever_imported_here(tmp_path: Path) -> None:
    """They are read as text. What they begin with (faulthandler, timers, exits) is not for this process."""
    scripts = {f"pytest_gpuguard.probes.{name}" for name in launch.shipped()}
    assert len(scripts) > 10
    code = "import sys, pytest_gpuguard.plugin, pytest_gpuguard.probing, pytest_gpuguard.cli_preflight"
    loaded = run(f"{code}\nprint(*sorted(name for name in sys.modules if '.probes' in name))", tmp_path).split()
    assert loaded == ["pytest_gpuguard.probes", "pytest_gpuguard.probes.launch"]
    assert not scripts & set(loaded)


def test_where_there_is_no_fcntl_all_can_be_imported_and_a_boot_says_linux_only(tmp_path: Path) -> None:
    """Windows and macOS can collect, read logs and judge; what needs Linux says so when it is asked for."""
    text = run(
        """
        import sys, pkgutil, importlib, socket, subprocess, tempfile, multiprocessing, pytest, sqlalchemy  # with theirs
        for name in ("fcntl", "pynvml"):
            sys.modules[name] = None
        sys.platform = "somethingelse"
        import pytest_gpuguard
        for module in pkgutil.walk_packages(pytest_gpuguard.__path__, "pytest_gpuguard."):
            if not module.name.endswith(("nvml_child", "stack_probe", "__main__")):
                importlib.import_module(module.name)
        from pytest_gpuguard.facts.lease import UnsupportedPlatform
        from pytest_gpuguard.lease.gpus import lease_gpus
        from pytest_gpuguard.lease.ports import lease_ports
        from pytest_gpuguard.lease.slots import lease_slot
        from pytest_gpuguard.engines.process import ServerProcess
        for ask in (
            lambda: lease_gpus(["GPU-1"], 1),
            lambda: lease_ports(),
            lambda: lease_slot(),
            lambda: ServerProcess.start(["true"], None, None, "log"),
        ):
            try:
                ask()
            except UnsupportedPlatform as error:
                print("SAID", str(error).startswith("Linux only: "))
        """,
        tmp_path,
    )
    assert text.splitlines() == ["SAID True"] * 4
