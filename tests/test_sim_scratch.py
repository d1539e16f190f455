"""The folder of a rehearsal: its own, and what killed rehearsals left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_gpuguard.sim.scratch import scratch_folder


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def ended() -> int:
    """The pid of a process that is gone."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_the_folder_of_a_killed_rehearsal_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / f"gpuguard-sim-{ended()}-abc"
    (left / "sim-memory").mkdir(parents=True)
    (left / "sim-memory" / "0").write_text("1")
    own = scratch_folder()
    assert not left.exists()
    assert own.parent == tmp_path
    assert f"-{os.getpid()}-" in own.name


def test_folders_of_living_processes_and_of_others_stay(tmp_path: Path) -> None:
    living = tmp_path / f"gpuguard-sim-{os.getpid()}-abc"
    strange = tmp_path / "gpuguard-sim-mine"
    target = tmp_path / "elsewhere"
    link = tmp_path / f"gpuguard-sim-{ended()}-link"
    for folder in (living, strange, target):
        folder.mkdir()
    link.symlink_to(target)
    scratch_folder()
    assert living.exists()
    assert strange.exists()
    assert link.is_symlink()
    assert target.exists()
