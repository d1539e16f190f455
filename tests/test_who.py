"""``gpuguard who``: what the lock folder and NVML say together, and quarantines that are lifted."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard import cli_who
from pytest_gpuguard.claims.gpuset import GpuChoice
from pytest_gpuguard.facts.faults import HARDWARE, HostFault
from pytest_gpuguard.facts.nvml import NvmlChild
from pytest_gpuguard.lease.book import Book
from pytest_gpuguard.lease.fifo import ASLEEP_S, Request
from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.gpus import lease_gpus
from pytest_gpuguard.lease.ports import lease_ports
from pytest_gpuguard.lease.quarantine import put, quarantined
from pytest_gpuguard.lease.slots import CPU_SERVER, lease_slot
from pytest_gpuguard.lease.survey import survey
from tests.gpuguard_command import called, ran
from tests.standin.fixtures import FakeRig, FakeRigFactory
from tests.trees import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks are for Linux only")

GIB = 1 << 30
TEST = "tests/test_a.py::test_fits"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "locks"
    path.mkdir()
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(path))
    return path


@pytest.fixture
def fake(fake_rig: FakeRigFactory, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRig:
    rig = fake_rig(4)
    rig.apply(monkeypatch)
    return rig


@pytest.fixture
def holder(fake: FakeRig, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that leases GPU 1 until it is killed."""
    script = (
        "import sys, time; from pathlib import Path; from pytest_gpuguard.lease.gpus import lease_gpus\n"
        "lease = lease_gpus([sys.argv[1]], 1, test=sys.argv[3], directory=Path(sys.argv[2]))\n"
        "print('leased', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, fake.uuid(1), str(folder), TEST]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "leased\n"
        yield process
        process.kill()


def text(capsys: pytest.CaptureFixture[str]) -> str:
    done = called(capsys, "who")
    assert (done.code, done.err) == (0, "")
    return done.out


def data(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    done = called(capsys, "who", "--json")
    assert (done.code, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_the_first_line_tells_the_folder_and_how_containers_get_it(
    fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text(capsys).splitlines()[0] == f"lock folder: {folder}  containers: -v {folder}:{folder}"


def test_notes_on_the_folder_come_next(
    fake: FakeRig, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pytest_gpuguard.lease.mounts.findings", lambda folder: [f"{folder.name} is \x1bodd"])
    assert text(capsys).splitlines()[1] == r"locks is \x1bodd"
    assert data(capsys)["notes"] == ["locks is \x1bodd"]


def test_gpus_come_in_the_order_of_their_indices_also_hidden_ones(
    fake: FakeRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    gpus = data(capsys)["gpus"]
    assert [(one["index"], one["uuid"], one["state"]) for one in gpus] == [
        (index, fake.uuid(index), "free") for index in range(4)
    ]
    assert f"GPU 3 (NVIDIA RTX PRO 6000 Blackwell Server Edition, {fake.uuid(3)}): free\n" in text(capsys)


def test_a_leased_gpu_names_user_pid_test_and_since_and_what_nvml_says(
    fake: FakeRig, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake.hold(1, 12 * GIB)
    said = text(capsys)
    user = data(capsys)["gpus"][1]["holder"]["user"]
    assert re.search(rf"{fake.uuid(1)}\): leased by {user}, pid {holder.pid}, {TEST}, since \d{{4}}-", said)
    assert re.search(rf"  1[23]\.\d\d GiB in use\n    pid {server.pid} \(.*time.sleep.*\).*: 12\.00 GiB\n", said)
    assert "nobody leased it" not in said
    gpu = data(capsys)["gpus"][1]
    assert gpu["state"] == "leased"
    assert gpu["holder"]["pid"] == holder.pid
    assert gpu["holder"]["test"] == TEST
    assert gpu["holder"]["lives"] is True
    assert abs(gpu["holder"]["since"] - time.time()) < 300
    assert [(one["pid"], one["used_gib"]) for one in gpu["processes"]] == [(server.pid, 12.0)]
    assert 12 <= gpu["used_gib"] < 13.5
    assert gpu["quarantine"] is gpu["fault"] is None


def test_memory_that_nobody_leased_is_told(fake: FakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    server = fake.hold(2, 3 * GIB)
    said = text(capsys)
    assert said.count("and nobody leased it") == 1
    assert re.search(
        rf"{fake.uuid(2)}\): free\n  \d\.\d\d GiB in use, and nobody leased it\n    pid {server.pid} ", said
    )
    assert data(capsys)["gpus"][2]["state"] == "free"


def test_waiters_come_in_their_order_with_what_they_want(
    fake: FakeRig, folder: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    uuids = [fake.uuid(0), fake.uuid(1)]
    leases = []
    waiter = threading.Thread(
        target=lambda: leases.append(lease_gpus(uuids, 2, 60, test="tests/b.py::test_both", directory=folder))
    )
    waiter.start()
    try:
        until = time.monotonic() + 30
        while not survey(folder).waiting and time.monotonic() < until:
            time.sleep(0.02)
        said, found = text(capsys), data(capsys)
    finally:
        holder.kill()
        waiter.join(60)
        for lease in leases:
            lease.release()
    assert re.search(rf"\nwaiting 1: .*, pid {os.getpid()}, tests/b.py::test_both, since .*: wants 2 of 2 GPUs\n", said)
    (one,) = found["waiting"]
    assert (one["pid"], one["test"], one["wants"], one["uuids"]) == (os.getpid(), "tests/b.py::test_both", 2, uuids)
    assert (one["holds"], one["passed"], one["asleep"], one["lives"]) == ([], 0, False, True)


def test_slots_and_ports_that_are_taken_are_told(
    fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lease_slot(CPU_SERVER, 1, test=TEST, directory=folder), lease_ports(test=TEST, directory=folder) as ports:
        said, found = text(capsys), data(capsys)
    assert f"slot {CPU_SERVER}: taken by " in said
    assert re.search(rf"ports \d+-\d+: taken by .*{TEST}", said)
    slot, block = found["taken"]
    assert (slot["what"], slot["ports"], slot["holder"]["pid"]) == (CPU_SERVER, None, os.getpid())
    assert block["ports"]["base"] <= ports.base < block["ports"]["base"] + block["ports"]["size"]
    assert found["production"] is None


def test_a_quarantine_is_told_with_its_reason_until_it_is_cleared(
    fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Locks(TEST, folder), fake.uuid(2), "infra.dirty_gpu", "40.00 GiB did not come back")
    said = text(capsys)
    assert re.search(
        rf"{fake.uuid(2)}\): in quarantine since [\d: -]+: 40.00 GiB did not come back, noticed in {TEST}\n", said
    )
    gpu = data(capsys)["gpus"][2]
    assert gpu["state"] == "quarantine"
    assert gpu["quarantine"]["reason"] == "40.00 GiB did not come back"
    assert set(gpu["quarantine"]) == {"outcome", "reason", "since", "user", "pid", "test"}
    done = called(capsys, "who", "--clear", fake.uuid(2))
    assert done.code == 0
    assert done.out.startswith(f"{fake.uuid(2)} is handed out again")
    assert quarantined(folder) == {}
    assert data(capsys)["gpus"][2]["state"] == "free"
    again = called(capsys, "who", "--clear", fake.uuid(2))
    assert (again.code, again.out) == (1, f"{fake.uuid(2)} was not in quarantine\n")


def test_a_quarantine_is_cleared_by_index_or_by_the_beginning_of_a_uuid(
    fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in (0, 3):
        put(Locks(TEST, folder), fake.uuid(index), "infra.dirty_gpu", "stuck")
    beginning = next(
        fake.uuid(0)[:size]
        for size in range(4, 41)
        if not any(fake.uuid(other).startswith(fake.uuid(0)[:size]) for other in (1, 2, 3))
    )
    assert called(capsys, "who", "--clear", "3", "--clear", beginning).code == 0
    assert quarantined(folder) == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GPU-ffffffff-0000", "there is no such GPU"),
        ("4", "there is no such GPU"),
        ("", "there is no such GPU"),
        ("GPU-", "several GPUs begin so"),
    ],
)
def test_an_unknown_or_ambiguous_gpu_exits_2_and_clears_nothing(
    name: str, message: str, fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Locks(TEST, folder), fake.uuid(1), "infra.dirty_gpu", "stuck")
    done = called(capsys, "who", "--clear", fake.uuid(1), "--clear", name)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert list(quarantined(folder)) == [fake.uuid(1)]


def test_a_quarantine_that_cannot_be_lifted_exits_2_with_the_reason(
    fake: FakeRig, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Locks(TEST, folder), fake.uuid(1), "infra.dirty_gpu", "stuck")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    done = called(capsys, "who", "--clear", fake.uuid(1))
    assert done.code == 2
    assert "Read-only file system" in " ".join(done.err.split())


def test_clear_does_not_go_with_json(fake: FakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "who", "--json", "--clear", fake.uuid(1)).code == 2


@pytest.mark.parametrize("trouble", ["lose", "hang"])
def test_a_broken_gpu_shows_its_fault_and_hides_no_other(
    trouble: str, fake: FakeRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_who, "_DEADLINE_S", 2.0)
    fake.hold(3, 5 * GIB)
    getattr(fake, trouble)(1)
    found = data(capsys)
    broken = [one for one in found["gpus"] if one["fault"] is not None]
    assert len(broken) == 1
    assert re.search("lost" if trouble == "lose" else "did not answer", broken[0]["fault"])
    sound = {one["uuid"]: one for one in found["gpus"] if one["fault"] is None}
    assert set(sound) == {fake.uuid(0), fake.uuid(2), fake.uuid(3)}
    assert sound[fake.uuid(3)]["used_gib"] >= 5
    assert len(sound[fake.uuid(3)]["processes"]) == 1


def test_a_gpu_that_breaks_when_its_processes_are_asked_for_shows_its_fault(
    fake: FakeRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = NvmlChild.processes

    def asked(self: NvmlChild, uuids: list[str]) -> dict[str, list[tuple[int, int | None]]]:
        if uuids == [fake.uuid(1)]:
            raise HostFault(HARDWARE, "it fell off the bus", "See dmesg", uuids[0])
        return ask(self, uuids)

    monkeypatch.setattr(NvmlChild, "processes", asked)
    assert [one["fault"] for one in data(capsys)["gpus"]] == [None, "it fell off the bus", None, None]
    assert "  fault: it fell off the bus\n" in text(capsys)


def test_an_index_is_refused_while_a_gpu_does_not_say_where_it_sits(
    fake: FakeRig, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_who, "_DEADLINE_S", 2.0)
    put(Locks(TEST, folder), fake.uuid(2), "infra.dirty_gpu", "stuck")
    fake.hang(0)
    assert "the indices of the others may be too small" in " ".join(data(capsys)["notes"])
    done = called(capsys, "who", "--clear", "1")
    assert done.code == 2
    assert "give the UUID" in " ".join(done.err.split())
    assert list(quarantined(folder)) == [fake.uuid(2)]


def test_without_nvml_the_lock_folder_tells_alone(
    fake: FakeRig,
    folder: Path,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(Locks(TEST, folder), fake.uuid(3), "infra.dirty_gpu", "stuck")
    monkeypatch.setattr("pytest_gpuguard.facts.nvml.binding_folder", lambda: None)
    found = data(capsys)
    assert {one["uuid"]: (one["state"], one["index"], one["name"]) for one in found["gpus"]} == {
        fake.uuid(1): ("leased", None, None),
        fake.uuid(3): ("quarantine", None, None),
    }
    assert "nvidia-ml-py is missing" in " ".join(found["notes"])
    assert f"GPU {fake.uuid(1)}: leased by " in text(capsys)
    assert called(capsys, "who", "--clear", fake.uuid(3)).code == 0


def test_a_driver_mismatch_is_a_note(fake: FakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    fake.mismatch()
    found = data(capsys)
    assert found["gpus"] == []
    assert "driver.mismatch" in " ".join(found["notes"])


def test_mig_devices_are_told_apart_from_their_gpu(fake: FakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    devices = fake.partition(1, ("MIG 1g.24gb", 24064), ("MIG 1g.24gb", 24064))
    fake.leak(1, 20 * GIB)
    gpus = data(capsys)["gpus"]
    assert [(one["index"], one["uuid"]) for one in gpus[1:4]] == [(1, fake.uuid(1)), (1, devices[0]), (1, devices[1])]
    assert f"(MIG 1g.24gb, {devices[1]}): free" in text(capsys)


def test_the_file_of_a_gpu_that_was_here_once_is_not_shown_as_a_free_gpu(
    fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lease_gpus(["GPU-gone"], 1, directory=folder).release()
    assert "GPU-gone" not in text(capsys)


def test_production_is_told(fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boot = Locks("", folder).signature()["boot"]
    record = {"boot": boot, "vacated": ["x"], "by": "ann", "at": "2026-01-01 10:00:00"}
    (folder / "production.lock").write_text(json.dumps(record))
    assert "production unit: stopped by ann at 2026-01-01 10:00:00, and nobody is left to start it" in text(capsys)
    assert data(capsys)["production"] == {
        "held": False,
        "stopped": True,
        "changing": None,
        "by": "ann",
        "at": "2026-01-01 10:00:00",
    }


def test_a_look_changes_nothing_and_makes_no_folder(
    fake: FakeRig, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text(capsys)
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(folder / "none"))
    assert len(data(capsys)["gpus"]) == 4
    assert not (folder / "none").exists()


def test_the_keys_of_the_json(fake: FakeRig, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys)
    assert list(found) == ["folder", "notes", "gpus", "waiting", "taken", "production"]
    assert set(found["gpus"][1]) == {
        *("index", "uuid", "name", "state", "holder", "quarantine", "used_gib", "fault", "processes")
    }
    assert set(found["gpus"][1]["holder"]) == {"user", "pid", "host", "test", "since", "lives"}


def test_it_runs_in_a_process_of_its_own(fake: FakeRig, folder: Path) -> None:
    done = ran("who", env=fake.environ(GPUGUARD_LOCK_DIR=str(folder)))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"lock folder: {folder}")


def test_a_mig_device_of_a_leased_gpu_is_leased_by_the_lock_of_the_whole(
    fake: FakeRig, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (device,) = fake.partition(1, ("MIG 1g.24gb", 24064))
    fake.shared.gpu[1].mig_device[0].used = 8 * GIB
    rows = {one["uuid"]: one for one in data(capsys)["gpus"]}
    assert rows[device]["state"] == "leased"
    assert rows[device]["holder"]["pid"] == holder.pid
    assert "nobody leased it" not in text(capsys)


def test_memory_that_a_gpu_shares_with_the_host_is_nobodys_stray(
    fake: FakeRig, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.shared.gpu[0].memory_unsupported = 1
    assert data(capsys)["gpus"][0]["used_gib"] is None
    assert "nobody leased it" not in text(capsys)


def test_keys_on_somebody_elses_command_line_are_masked(fake: FakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import time; time.sleep(600)"
    with subprocess.Popen(
        ["python", "-c", code, "--api-key", "sk-first", "--token=second"], executable=sys.executable
    ) as server:
        try:
            fake.alloc(0, 3 * GIB, server.pid)
            until = time.monotonic() + 30
            while "api-key" not in (said := text(capsys)) and time.monotonic() < until:
                pass  # it was not yet executed
        finally:
            server.kill()
    assert f"pid {server.pid} (" in said
    assert "--api-key <redacted> --token=<" in said  # then it is cut
    assert "first" not in said
    assert "second" not in said


def test_a_folder_that_no_run_would_use_is_told_with_the_reason(
    fake: FakeRig, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "link").symlink_to(folder)
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(folder / "link"))
    assert "is a symbolic link" in data(capsys)["notes"][0]
    monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(folder / "none"))
    assert "not there yet" in data(capsys)["notes"][0]


def test_every_key_of_the_json_is_documented(
    fake: FakeRig, folder: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.hold(1, 2 * GIB)
    put(Locks(TEST, folder), fake.uuid(2), "infra.dirty_gpu", "stuck")
    (folder / "production.lock").write_text("{}")
    process = waiting(folder, fake.uuid(1))
    try:
        with lease_ports(test=TEST, directory=folder):
            found = data(capsys)
    finally:
        process.kill()
        process.communicate()
    assert found["waiting"]
    text = (ROOT / "docs" / "leases.md").read_text(encoding="utf-8")
    assert [key for key in sorted(keys(found)) if f"`{key}`" not in text] == []


def keys(value: Any) -> set[str]:
    """All names in a JSON value, those in its values too."""
    if isinstance(value, dict):
        return {*value, *(key for one in value.values() for key in keys(one))}
    return {key for one in value for key in keys(one)} if isinstance(value, list) else set()


WAITS = """
import sys
from pathlib import Path
from pytest_gpuguard.lease.gpus import lease_gpus
lease_gpus(sys.argv[2:], len(sys.argv) - 2, 600, lambda *_: print("waits", flush=True), directory=Path(sys.argv[1]))
print("leased", flush=True)
"""


def waiting(folder: Path, *uuids: str) -> subprocess.Popen[str]:
    """Another process that waits for these GPUs, which are held."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(folder), *uuids], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    until = time.monotonic() + 30
    while not survey(folder).waiting and time.monotonic() < until:
        time.sleep(0.02)
    return process


def test_a_waiter_that_is_stopped_is_told(
    fake: FakeRig, folder: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    process = waiting(folder, fake.uuid(1))
    try:
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 10 * ASLEEP_S
        while not survey(folder).waiting[0].asleep and time.monotonic() < until:
            time.sleep(0.1)
        assert "asleep (its process is stopped)" in text(capsys)
        (one,) = survey(folder).waiting
        assert (one.holder.pid, one.asleep) == (process.pid, True)
    finally:
        process.kill()
        process.communicate()


def test_what_a_killed_holder_has_started_still_holds_and_is_told_so(
    fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import subprocess, sys; from pathlib import Path; from pytest_gpuguard.lease.gpus import lease_gpus\n"
        "lease = lease_gpus([sys.argv[1]], 1, directory=Path(sys.argv[2]))\n"
        "heir = subprocess.Popen(['sleep', '600'], pass_fds=lease.fds)\n"
        "print(heir.pid, flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, fake.uuid(0), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    heir = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        said, found = text(capsys), data(capsys)["gpus"][0]
    finally:
        os.kill(heir, signal.SIGKILL)
        process.communicate()
    assert f"pid {process.pid} (gone; what it started still holds the lock)" in said
    assert (found["state"], found["holder"]["lives"]) == ("leased", False)


GARBAGE = (
    b"",
    b"\xff\x00\xfe",
    b"[]",
    b'{"pid": "1; x", "since": "soon", "user": 7, "test": {}, "wants": "all", "vacated": 3, "reason": [1]}',
    b'{"pid": -1, "since": 1e300, "start_time": 1e9, "host": null, "boot": []}',
    b"00000000000001000.000\n{}",
    b'00000000000001000.000\n{"candidates": [1, {}], "apart": [[1]], "wants": 1, "holds": 3}',
)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_the_folder_breaks_nothing(
    garbage: bytes, fake: FakeRig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: tuple[str, ...] = (
        "gpu-GPU-x.lock",
        "gpu-wait-000000000001.lock",
        "gpu-book.lock",
        "slot-x.lock",
        "ports-64.lock",
    )
    names += ("ports-x.lock", "production.lock", "quarantine-GPU-y.json", "ports-99999999999.lock", "gpu-.lock")
    held = []
    for name in names:
        (folder / name).write_bytes(garbage)
        held.append(os.open(folder / name, os.O_RDONLY))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    os.mkfifo(folder / "gpu-GPU-pipe.lock")
    (folder / "gpu-GPU-folder.lock").mkdir()
    (folder / "gpu-GPU-link.lock").symlink_to("/nowhere")
    try:
        assert f"GPU 3 (NVIDIA RTX PRO 6000 Blackwell Server Edition, {fake.uuid(3)}): free" in text(capsys)
        assert "GPU GPU-x: leased by " in text(capsys)
        assert [one["uuid"] for one in data(capsys)["gpus"][:4]] == [fake.uuid(index) for index in range(4)]
    finally:
        for fd in held:
            os.close(fd)


def test_who_looks_all_the_time_costs_no_waiter_its_place_and_no_holder_its_gpu(folder: Path) -> None:
    looks = threading.Event()

    def look() -> None:
        while not looks.is_set():
            survey(folder, ["GPU-1"])

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for one in lookers:
        one.start()
    code = (
        "import sys; from pathlib import Path; from pytest_gpuguard.lease.gpus import lease_gpus\n"
        "for _ in range(40): lease_gpus(['GPU-1'], 1, 120, directory=Path(sys.argv[1])).release()"
    )
    try:
        runs = [
            subprocess.Popen([sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, text=True, cwd=ROOT)
            for _ in range(3)
        ]
        said = [one.communicate(timeout=300)[1] for one in runs]
    finally:
        looks.set()
        for one in lookers:
            one.join()
    assert said == ["", "", ""]
    assert [one.returncode for one in runs] == [0, 0, 0]


def test_a_look_at_the_moment_somebody_queues_up_costs_nobody_a_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chmod, looker = os.fchmod, []

    def looked_at(fd: int, mode: int) -> None:
        chmod(fd, mode)
        looker.append(os.open(os.readlink(f"/proc/self/fd/{fd}"), os.O_RDONLY))
        fcntl.flock(looker[-1], fcntl.LOCK_SH)

    def sleep(seconds: float) -> None:
        while looker:
            os.close(looker.pop())  # it has seen enough

    book = Book(Locks("", folder))
    with book:
        monkeypatch.setattr(os, "fchmod", looked_at)
        monkeypatch.setattr(time, "sleep", sleep)
        ticket = book.queue_up(Request(0, 1, GpuChoice(("GPU-1",))))
    monkeypatch.undo()
    assert [one.uuids for one in survey(folder).waiting] == [("GPU-1",)]
    ticket.tear()
    book.close()
    assert survey(folder).waiting == ()
