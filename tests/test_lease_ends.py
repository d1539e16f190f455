"""How a lease ends: what a boot that came to nothing leaves for the next one, and a run whose locks were taken away."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.gpus import lease_gpus
from pytest_gpuguard.lease.ports import SIZE, lease_ports
from tests.conftest import own_ports
from tests.test_lease_faults import ONE, aftermath, boots, in_turn, lock_folder, verdicts, when

__all__ = ["aftermath", "boots"]  # the fixtures
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases are for Linux only")

Run = Any
FakeRigs = Any


def test_a_server_that_was_up_when_its_locks_were_removed_proves_nothing(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have used the same GPUs beside it, whatever it answered."""
    fake_rig(n=1).apply(monkeypatch)
    remove = 'import shutil; shutil.rmtree(os.environ["GPUGUARD_LOCK_DIR"])'
    result = claims(in_turn(remove))
    assert verdicts(result)["test_first"] == "INFRA"
    result.stdout.fnmatch_lines(["*infra.lease: the lock folder or its files were removed*showed: ready)*"])
    assert result.ret == 1


def test_a_server_that_came_up_without_its_locks_proves_nothing(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, boots: Any
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG_DELAY", "1")
    folder = lock_folder()
    thread = when((tmp_path / "boots").exists, lambda: shutil.rmtree(folder))
    result = claims(ONE)
    thread.join()
    assert verdicts(result) == {"test_it": "INFRA"}
    assert result.ret == 1


@pytest.mark.parametrize("why", ["no ports", "no log"])
def test_gpus_that_no_server_was_started_on_are_given_back_as_they_were(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, boots: Any, why: str
) -> None:
    """Else the next one would wait for the memory of a killed holder."""
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    folder, first = lock_folder(), int(own_ports().partition("-")[0])
    lease_gpus([rig.uuid(0)], 1, test="before.py::test", directory=folder).end("clean")
    (tmp_path / "file").touch()
    ini = f"gpuguard_ports = {first}-{first + SIZE - 1}"
    with lease_ports(first, first + SIZE - 1, directory=folder) as ports:
        if why == "no log":
            ports.release()
        result = claims(ONE, "--gpuguard-log-dir", str(tmp_path / "file" / "logs"), ini=ini)
    assert verdicts(result) == {"test_it": "INFRA"}
    result.stdout.fnmatch_lines(["*No block of*" if why == "no ports" else "*--gpuguard-log-dir*"])
    assert boots() == []
    told = Locks(directory=folder).record(f"gpu-{rig.uuid(0)}")
    assert (told["ended"], told["test"]) == ("clean", "before.py::test")


def test_gpus_that_a_server_was_started_on_are_not_said_to_be_given_back_when_pytest_is_interrupted(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester, boots: Any
) -> None:
    """Nobody has looked whether its memory came back: the next one waits for it."""
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    pytester.makeconftest(
        """
        from pytest_gpuguard.engines.boot import Boot

        def interrupt(self, now):
            raise KeyboardInterrupt

        Boot._deadline = interrupt
        """
    )
    monkeypatch.setenv("FAKE_SGLANG_DELAY", "1")
    result = claims(ONE)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    told = Locks(directory=lock_folder()).record(f"gpu-{rig.uuid(0)}")
    assert "ended" not in told
    assert told["test"].endswith("::test_it")
