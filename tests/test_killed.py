"""kill -9 of pytest itself, at several moments: nothing that it started is alive five seconds later."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import own_ports

WITHIN_S = 5.0


def started_by(marker: str) -> list[psutil.Process]:
    """Every process of this test, in whatever session: its environment carries the marker."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GPUGUARD_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("moment", ["booting", "ready", "stopping"])
def test_kill_9_of_pytest_leaves_nothing_behind(
    tmp_path: Path, fake_python: Path, model: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The server ignores SIGTERM, and so does its child, which is in a session of its own."""
    marker = f"{os.getpid()}-{moment}"
    boots = tmp_path / "boots"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ngpuguard_ports = {own_ports()}\ngpuguard_grace = 30s\n")
    (tmp_path / "test_claims.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from pytest_gpuguard import serves\n"
        f"@serves('sglang', {str(model)!r}, '--device cpu')\n"
        "def test_it(server):\n"
        "    Path('ready').touch()\n"
        f"    time.sleep({60 if moment == 'ready' else 0})\n"
        "    Path('body-done').touch()\n"
    )
    monkeypatch.setenv("GPUGUARD_TEST_MARKER", marker)
    monkeypatch.setenv("FAKE_SGLANG", "proof")
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(boots))
    monkeypatch.setenv("FAKE_SGLANG_DELAY", "20" if moment == "booting" else "0.02")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--gpuguard-stack=fake={fake_python}"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    monkeypatch.delenv("GPUGUARD_TEST_MARKER")
    try:
        sign = {"booting": boots, "ready": tmp_path / "ready", "stopping": tmp_path / "body-done"}[moment]
        assert wait_for(sign.exists, 60), "the run did not get there"
        time.sleep(0.5)
        assert run.poll() is None
        assert len(started_by(marker)) >= 4, "pytest, warden, server and its child"
        run.kill()
        run.wait()
        killed = time.monotonic()
        gone = wait_for(lambda: not started_by(marker), 15)
        seconds = time.monotonic() - killed
        assert gone, started_by(marker)
        assert seconds <= WITHIN_S
    finally:
        run.kill()
        for process in started_by(marker):
            process.kill()
