"""A pytest run has the production unit stopped before its first boot on GPUs, and started again however it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import own_ports

Run = Any
FakeRigs = Any


def ini(said: Path, vacate: str = "echo down") -> str:
    return f"""
    gpuguard_vacate = sh -c '{vacate} >> {said}'
    gpuguard_restore = sh -c 'echo up >> {said}'
    """


def test_the_unit_is_stopped_once_for_boots_on_gpus_and_started_at_the_end(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    said = tmp_path / "said"
    result = claims(
        f"""
        from pathlib import Path
        def said():
            return Path({str(said)!r}).read_text().split() if Path({str(said)!r}).exists() else []

        @serves("sglang", MODEL, CPU)
        def test_cpu():
            assert said() == []

        @needs_gpus(1)
        @serves("sglang", MODEL)
        def test_one():
            assert said() == ["down"]

        @needs_gpus(2)
        def test_two(gpus):
            assert said() == ["down"]
        """,
        ini=ini(said),
    )
    result.assert_outcomes(passed=3)
    assert said.read_text().split() == ["down", "up"]


def test_a_unit_that_cannot_be_stopped_is_infra_with_what_its_command_said(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    said = tmp_path / "said"
    result = claims(
        """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        @ooms("weights")
        def test_one(): ...
        """,
        ini=ini(said, "echo no such unit >&2; exit 5"),
    )
    result.stdout.fnmatch_lines(["INFRA *test_one *infra.lease: The production unit could not be vacated*"])
    result.stdout.fnmatch_lines(["*no such unit*"])
    assert said.read_text().split() == ["up"]  # it may have been half stopped


def test_after_kill_9_of_pytest_the_unit_is_started_when_the_server_is_gone(
    fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_python: Path, model: Path
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    said = tmp_path / "said"
    text = "\n".join(line.strip() for line in ini(said).splitlines())
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ngpuguard_ports = {own_ports()}\n{text}")
    (tmp_path / "test_claims.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from pytest_gpuguard import needs_gpus, serves\n"
        "@needs_gpus(1)\n"
        f"@serves('sglang', {str(model)!r})\n"
        "def test_it(server):\n"
        "    Path('ready').touch()\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--gpuguard-stack=fake={fake_python}"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        assert said.read_text().split() == ["down"]
        run.kill()
        run.wait()
        until = time.monotonic() + 50
        while said.read_text().split() != ["down", "up"]:
            assert time.monotonic() < until, said.read_text()
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
