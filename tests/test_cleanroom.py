"""GPUs are handed out clean and come back clean, and who is to blame when they do not: with made-up readings."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.gpuset import GpuChoice
from pytest_gpuguard.facts import holders
from pytest_gpuguard.facts.faults import HARDWARE, HostFault, NvmlTimeout, nvml_fault
from pytest_gpuguard.lease import clean
from pytest_gpuguard.lease.clean import GIB, CleanRoom, Dirt
from pytest_gpuguard.lease.cleanroom import NotClean, hand_out, take_back
from pytest_gpuguard.lease.dirs import LockDirError
from pytest_gpuguard.lease.flocks import LeaseTimeout, Locks
from pytest_gpuguard.lease.gpus import GpuLease, lease_gpus
from pytest_gpuguard.lease.quarantine import lift, put, quarantined
from pytest_gpuguard.lease.warden import read_proc
from tests.test_gpu_lease import Nobody, nobody

__all__ = ["nobody"]  # the fixture
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks are for Linux only")

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"
GONE = 1 << 22  # above every pid


class Driver:
    """What the driver would say: bytes or a fault by GPU, and the processes on it. All else is clean."""

    def __init__(self) -> None:
        self.used: dict[str, int | HostFault | Callable[[], int | HostFault] | None] = {}
        self.on: dict[str, list[tuple[int, int | None]]] = {}
        self.mute: set[str] = set()  # does not tell the processes of these
        self.asked: list[str] = []

    def read(self, uuids: Sequence[str]) -> Mapping[str, int | HostFault | None]:
        self.asked += uuids
        found = {uuid: self.used.get(uuid, 0) for uuid in uuids}
        return {uuid: one() if callable(one) else one for uuid, one in found.items()}

    def processes(self, uuids: Sequence[str]) -> Mapping[str, list[tuple[int, int | None]]]:
        if self.mute.intersection(uuids):
            raise HostFault(HARDWARE, "NVML failed", "See dmesg")
        return {uuid: self.on.get(uuid, []) for uuid in uuids}

    def room(self, reclaim_s: float = 0.2) -> CleanRoom:
        return CleanRoom(self.read, self.processes, reclaim_s=reclaim_s, poll_s=0.02)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(clean, "host_pids", lambda: True)  # the tests may run in a container
    return Driver()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "locks"
    path.mkdir()
    return path


@pytest.fixture
def stranger() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def out(driver: Driver, folder: Path, n: int = 1, *uuids: str, reclaim_s: float = 0.2, wait_s: float = 0.0) -> GpuLease:
    choice = GpuChoice(uuids or (A, B, C, D))
    return hand_out(choice, n, driver.room(reclaim_s), wait_s, test="mine.py::test", directory=folder)


def nothing_held(folder: Path, *uuids: str) -> bool:
    with lease_gpus(uuids or (A, B, C, D), len(uuids) or 4, directory=folder) as lease:
        lease.give_back()
    return True


def killed(folder: Path, *uuids: str) -> None:
    """Leave the records of a holder that was killed."""
    lease_gpus(uuids, len(uuids), test="killed.py::test", directory=folder).release()


def record(folder: Path, uuid: str) -> dict[str, Any]:
    return Locks(directory=folder).record(f"gpu-{uuid}")


LOST = nvml_fault("NVMLError_GpuIsLost", 15, A)
HANGS = NvmlTimeout("memory of GPU-a", 10.0)


def answers_later(times: int = 1, fault: HostFault = HANGS) -> Callable[[], int | HostFault]:
    """A GPU that is clean, and does not answer so often before it says so."""
    left = [fault] * times
    return lambda: left.pop() if left else 0


def test_clean_gpus_are_handed_out_at_once_and_in_the_order_of_preference(driver: Driver, folder: Path) -> None:
    driver.used = {A: GIB, B: None}  # up to the baseline, and a device without such a reading
    began = time.monotonic()
    with out(driver, folder, 2, B, A, C, reclaim_s=60) as lease:
        assert lease.uuids == (B, A)
    assert time.monotonic() - began < 5
    assert driver.asked == [B, A]
    assert quarantined(folder) == {}


def test_a_driver_that_is_late_is_waited_for_where_nobody_is_seen_to_have_the_memory(
    driver: Driver, folder: Path
) -> None:
    free_at = time.monotonic() + 0.3
    driver.used = {A: lambda: 5 * GIB if time.monotonic() < free_at else 0}
    driver.on = {A: [(GONE, 5 * GIB)]}
    with out(driver, folder, 1, A, B, reclaim_s=60) as lease:
        assert lease.uuids == (A,)
    assert time.monotonic() >= free_at
    assert quarantined(folder) == {}


def test_a_gpu_that_a_stranger_uses_is_left_to_it_and_another_one_is_taken(
    driver: Driver, folder: Path, stranger: int
) -> None:
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    began = time.monotonic()
    with out(driver, folder, 2, A, B, C, reclaim_s=60) as lease:
        assert lease.uuids == (B, C)
    assert time.monotonic() - began < 5  # nobody waits for a stranger where there is another GPU
    assert quarantined(folder) == {}
    assert nothing_held(folder)


def test_without_another_gpu_the_stranger_is_waited_for_and_then_named(
    driver: Driver, folder: Path, stranger: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "proc" / str(stranger)
    fake.mkdir(parents=True)
    (fake / "cmdline").write_bytes(b"python\0-m\0sglang.launch_server\0")
    (fake / "cgroup").write_text("0::/system.slice/sglang.service\n")
    described = holders.describe_pid
    monkeypatch.setattr(holders, "describe_pid", lambda pid: described(pid, tmp_path / "proc"))
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    with pytest.raises(NotClean) as caught:
        out(driver, folder, 2, A, B)
    assert caught.value.outcome == "infra.dirty_gpu"
    assert str(caught.value) == (
        f"not clean before the boot: {A} has 5.00 GiB in use: pid {stranger} (python -m sglang.launch_server), "
        "unit sglang.service (2 of 2 GPUs wanted)"
    )
    container = "ab12" * 16
    (fake / "cgroup").write_text(f"0::/system.slice/docker-{container}.scope\n")
    with pytest.raises(NotClean, match=r"container ab12ab12ab12 \(1 of 1 GPUs wanted\)"):
        out(driver, folder, 1, A)
    assert quarantined(folder) == {}
    assert nothing_held(folder, A, B)


def test_a_stranger_that_ends_in_time_is_no_reason_to_fail(driver: Driver, folder: Path, stranger: int) -> None:
    free_at = time.monotonic() + 0.3
    driver.used = {A: lambda: 5 * GIB if time.monotonic() < free_at else 0}
    driver.on = {A: [(stranger, 5 * GIB)]}
    out(driver, folder, 1, A, reclaim_s=60).release()
    assert time.monotonic() >= free_at


def test_after_a_killed_holder_the_driver_is_waited_for_although_another_gpu_is_free(
    driver: Driver, folder: Path, stranger: int
) -> None:
    killed(folder, A)
    free_at = time.monotonic() + 0.3
    driver.used = {A: lambda: 5 * GIB if time.monotonic() < free_at else 0}
    driver.on = {A: [(stranger, 5 * GIB)]}
    with out(driver, folder, 1, A, B, reclaim_s=60) as lease:
        assert lease.uuids == (A,)


def test_what_a_killed_holder_left_for_good_is_put_in_quarantine(driver: Driver, folder: Path) -> None:
    killed(folder, A)
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(GONE, 5 * GIB)]}
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
    (one,) = quarantined(folder).values()
    assert (one.uuid, one.outcome, one.test) == (A, "infra.dirty_gpu", "mine.py::test")
    assert one.reason.startswith(f"5.00 GiB in use: pid {GONE} (not visible from here")
    assert "ended" not in record(folder, A)  # who looks next still sees that nobody gave it back


def test_a_stranger_that_came_after_a_killed_holder_is_not_to_blame(
    driver: Driver, folder: Path, stranger: int
) -> None:
    killed(folder, A)
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
    assert quarantined(folder) == {}


def test_a_gpu_that_is_busy_without_a_process_is_put_in_quarantine(driver: Driver, folder: Path) -> None:
    driver.used = {A: 5 * GIB}
    with pytest.raises(NotClean, match=r"5\.00 GiB in use: no process is reported for it"):
        out(driver, folder, 1, A)
    assert set(quarantined(folder)) == {A}
    assert nothing_held(folder, A)


def test_in_a_container_nobody_is_blamed_but_what_a_killed_holder_left_is_kept_away(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "host_pids", lambda: False)
    driver.used = {A: 5 * GIB}
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
        lease.end("clean")
    assert quarantined(folder) == {}
    killed(folder, A)
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
    assert set(quarantined(folder)) == {A}


@pytest.mark.parametrize("fault", [LOST, NvmlTimeout("memory of GPU-a", 10.0)], ids=["lost", "hanging"])
def test_a_gpu_that_does_not_answer_is_put_in_quarantine_and_another_one_taken(
    driver: Driver, folder: Path, fault: HostFault
) -> None:
    driver.used = {A: fault}
    with out(driver, folder, 2, A, B, C, reclaim_s=60) as lease:
        assert lease.uuids == (B, C)
    (one,) = quarantined(folder).values()
    assert (one.uuid, one.outcome) == (A, HARDWARE)
    assert fault.cause in one.reason
    with pytest.raises(NotClean) as caught:
        out(driver, folder, 1, A)
    assert caught.value.outcome == HARDWARE
    assert "is in quarantine since" in str(caught.value)
    assert "gpuguard who --clear" in str(caught.value)


def test_the_only_gpu_of_a_claim_that_does_not_answer_is_compared_with_another_one(
    driver: Driver, folder: Path
) -> None:
    driver.used = {A: LOST}
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
    assert set(quarantined(folder)) == {A}
    assert driver.asked == [A, B, B]


@pytest.mark.parametrize("fault", [LOST, HANGS], ids=["lost", "hanging"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_when_no_gpu_answers_nvml_is_broken_and_no_gpu_is_blamed(
    driver: Driver, folder: Path, n: int, fault: HostFault
) -> None:
    driver.used = dict.fromkeys((A, B, C, D), fault)
    with pytest.raises(HostFault, match=re.escape(fault.cause)):
        out(driver, folder, n)
    assert quarantined(folder) == {}
    assert nothing_held(folder)


@pytest.mark.parametrize("others", [0, 1], ids=["one", "all"])
def test_without_another_gpu_one_that_misses_an_answer_is_asked_again(
    driver: Driver, folder: Path, others: int
) -> None:
    driver.used = {A: answers_later(2), B: answers_later(others)}
    with out(driver, folder, 2, A, B, reclaim_s=60) as lease:
        assert lease.uuids == (A, B)
    assert quarantined(folder) == {}


def test_without_another_gpu_one_that_never_answers_is_put_in_quarantine(driver: Driver, folder: Path) -> None:
    driver.used = {A: HANGS}
    with pytest.raises(NotClean, match=r"did not answer within 10 s"):
        out(driver, folder, 2, A, B)
    assert {uuid: one.outcome for uuid, one in quarantined(folder).items()} == {A: HARDWARE}


def test_whose_memory_it_is_may_be_unknown_and_then_no_gpu_is_blamed(driver: Driver, folder: Path) -> None:
    driver.used = {A: 5 * GIB, B: 5 * GIB}
    driver.mute = {A}
    with out(driver, folder, 1, A, C) as lease:
        assert lease.uuids == (C,)
    with pytest.raises(NotClean, match=rf"{A} has 5\.00 GiB in use: the driver could not be asked by whom \(1 of 1"):
        out(driver, folder, 1, A)
    assert quarantined(folder) == {}
    with pytest.raises(NotClean, match="no process is reported for it"):  # each GPU is asked apart
        out(driver, folder, 2, A, B)
    assert set(quarantined(folder)) == {B}


def test_what_a_killed_holder_left_is_kept_away_although_nobody_can_be_asked_whose_it_is(
    driver: Driver, folder: Path
) -> None:
    killed(folder, A)
    driver.used = {A: 5 * GIB}
    driver.mute = {A}
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
    assert set(quarantined(folder)) == {A}


def test_a_stranger_that_proc_hides_is_a_stranger(
    driver: Driver, folder: Path, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with hidepid, for a process of another user."""
    monkeypatch.setattr(clean, "read_proc", lambda pid: None)
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
    lease = lease_gpus([A], 1, directory=folder)
    told = take_back(lease, driver.room(), "after m stopped", ours={stranger: 1})
    assert told is not None
    assert told.endswith("(somebody else uses it now)")
    assert quarantined(folder) == {}
    for nobody_there in (GONE, 0, 1 << 40):
        assert not Dirt(A, 5 * GIB, processes=((nobody_there, None),)).strangers()


def test_a_quarantined_gpu_is_never_handed_out_until_that_is_lifted(driver: Driver, folder: Path) -> None:
    put(Locks("first.py::test", folder), A, "infra.dirty_gpu", "5.00 GiB in use")
    for _ in range(3):
        with out(driver, folder, 1, A, B) as lease:
            assert lease.uuids == (B,)
    with pytest.raises(NotClean, match=r"GPU-a is in quarantine since .*5\.00 GiB in use, noticed in first\.py::test"):
        out(driver, folder, 2, A, B)
    assert A not in driver.asked
    assert lift(folder, A)
    assert not lift(folder, A)
    with out(driver, folder, 2, A, B) as lease:
        assert lease.uuids == (A, B)


def test_a_quarantine_ends_with_the_boot_of_the_machine(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(Locks(directory=folder), A, "infra.dirty_gpu", "5.00 GiB in use")
    monkeypatch.setattr("pytest_gpuguard.lease.quarantine.boot_id", lambda: "another boot")
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (A,)


def test_a_killed_holder_of_another_boot_of_the_machine_is_forgotten(
    driver: Driver, folder: Path, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(folder, A)
    monkeypatch.setattr("pytest_gpuguard.lease.cleanroom.boot_id", lambda: "another boot")
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    began = time.monotonic()
    with out(driver, folder, 1, A, B, reclaim_s=60) as lease:
        assert lease.uuids == (B,)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("text", [b"", b"\xff\xfe{", b"[1]", b'{"uuid": ', b"[" * 60000])
def test_a_quarantine_that_cannot_be_read_counts(driver: Driver, folder: Path, text: bytes) -> None:
    (folder / f"quarantine-{A}.json").write_bytes(text)
    with out(driver, folder, 1, A, B) as lease:
        assert lease.uuids == (B,)
    with pytest.raises(NotClean, match="its record cannot be read"):
        out(driver, folder, 1, A)
    assert lift(folder, A)
    out(driver, folder, 1, A).release()


def test_a_quarantine_may_not_make_up_outcomes(driver: Driver, folder: Path) -> None:
    (folder / f"quarantine-{A}.json").write_text('{"outcome": "ready", "since": "x"}')
    with pytest.raises(NotClean) as caught:
        out(driver, folder, 1, A)
    assert caught.value.outcome == "infra.dirty_gpu"


def test_a_quarantine_that_another_user_may_not_read_counts(nobody: Nobody) -> None:
    put(Locks(directory=nobody.folder), A, "infra.dirty_gpu", "5.00 GiB in use")
    (nobody.folder / f"quarantine-{A}.json").chmod(0o600)
    process = nobody.python(OF_ANOTHER_USER)
    assert process.communicate("go\n", timeout=50)[0].startswith(f"{A}\n")


def test_a_lost_gpu_without_another_one_is_a_fault_of_the_hardware(driver: Driver, folder: Path) -> None:
    driver.used = {A: LOST}
    for _ in range(2):  # when it is found, and when it is in quarantine
        with pytest.raises(NotClean, match=r"fell off the bus.* lifts a quarantine") as caught:
            out(driver, folder, 1, A)
        assert caught.value.outcome == HARDWARE


OF_ANOTHER_USER = """
import sys
from pathlib import Path
from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.quarantine import lift, put, quarantined
folder = Path(sys.argv[1])
print(*quarantined(folder), flush=True)
put(Locks(directory=folder), "GPU-b", "infra.dirty_gpu", "mine")
sys.stdin.readline()
print(lift(folder, "GPU-a"), *quarantined(folder), flush=True)
"""


def test_a_quarantine_is_there_for_every_user_and_every_user_may_lift_it(driver: Driver, nobody: Nobody) -> None:
    put(Locks(directory=nobody.folder), A, "infra.dirty_gpu", "5.00 GiB in use")
    process = nobody.python(OF_ANOTHER_USER)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == f"{A}\n"
    while B not in quarantined(nobody.folder):
        time.sleep(0.01)
    with out(driver, nobody.folder, 1, A, B, C) as lease:
        assert lease.uuids == (C,)
    assert process.communicate("go\n")[0] == f"True {B}\n"
    assert lift(nobody.folder, B)
    assert quarantined(nobody.folder) == {}


def test_an_interrupted_wait_for_the_driver_gives_the_gpus_back_as_they_were(driver: Driver, folder: Path) -> None:
    killed(folder, A)
    left = record(folder, A)

    def interrupt() -> int:
        if len(driver.asked) > 3:
            raise KeyboardInterrupt
        return 5 * GIB

    driver.used = {A: interrupt}
    with pytest.raises(KeyboardInterrupt):
        out(driver, folder, 1, A, reclaim_s=60)
    assert record(folder, A) == left
    assert nothing_held(folder, A)
    assert quarantined(folder) == {}


def test_what_comes_before_the_look_is_done_with_the_gpus_in_hand_and_its_failure_gives_them_back(
    driver: Driver, folder: Path
) -> None:
    def vacate() -> None:
        assert driver.asked == []
        with pytest.raises(LeaseTimeout):
            lease_gpus([A], 1, directory=folder)
        raise RuntimeError("the unit did not stop")

    with pytest.raises(RuntimeError, match="did not stop"):
        hand_out(GpuChoice((A,)), 1, driver.room(), 0, directory=folder, before_look=vacate)
    assert driver.asked == []
    assert nothing_held(folder, A)


def test_a_timeout_tells_which_free_gpus_were_not_taken(driver: Driver, folder: Path, stranger: int) -> None:
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    with (
        lease_gpus([B], 1, test="other.py::test", directory=folder),
        pytest.raises(LeaseTimeout, match=r"other\.py::test(.|\n)*Not taken: GPU-a has 5\.00 GiB in use: pid"),
    ):
        out(driver, folder, 1, A, B, wait_s=0.3)
    assert nothing_held(folder, A, B)


def test_gpus_that_come_back_clean_leave_a_record_that_says_so(driver: Driver, folder: Path) -> None:
    free_at = time.monotonic() + 0.3
    lease = out(driver, folder, 2, A, B)
    driver.used = {A: lambda: 5 * GIB if time.monotonic() < free_at else 0}
    assert take_back(lease, driver.room(60), "after m stopped") is None
    assert lease.released
    assert record(folder, A)["ended"] == record(folder, B)["ended"] == "clean"


def test_memory_that_only_the_boots_own_processes_have_is_its_leak(driver: Driver, folder: Path, stranger: int) -> None:
    lease = out(driver, folder, 2, A, B)
    ours = read_proc(stranger)  # a process of the boot that could not be ended
    assert ours is not None
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    told = take_back(lease, driver.room(), "after m stopped", test="a.py::t", ours={ours.pid: ours.start})
    assert told is not None
    assert told.startswith(f"after m stopped, memory did not come back: {A} has 5.00 GiB in use: pid {stranger} (")
    assert "somebody else" not in told
    (one,) = quarantined(folder).values()
    assert (one.uuid, one.test) == (A, "a.py::t")
    assert one.reason.startswith("after m stopped: 5.00 GiB in use")
    assert record(folder, A)["ended"] == "dirty"
    assert nothing_held(folder, A, B)


@pytest.mark.parametrize("reused", [False, True], ids=["another pid", "the pid of one of ours, reused"])
def test_a_stranger_that_has_the_memory_after_a_boot_is_named_and_nobody_is_blamed(
    driver: Driver, folder: Path, stranger: int, reused: bool
) -> None:
    lease = out(driver, folder, 1, A)
    it = read_proc(stranger)
    assert it is not None
    driver.used = {A: 5 * GIB}
    driver.on = {A: [(stranger, 5 * GIB)]}
    ours = {stranger: it.start - 1} if reused else {GONE: 1}
    told = take_back(lease, driver.room(), "after m stopped", ours=ours)
    assert told is not None
    assert f"pid {stranger} (" in told
    assert told.endswith("(somebody else uses it now)")
    assert quarantined(folder) == {}


def test_a_gpu_that_was_lost_during_a_boot_is_put_in_quarantine(driver: Driver, folder: Path) -> None:
    lease = out(driver, folder, 2, A, B)
    driver.used = {A: LOST}
    began = time.monotonic()
    told = take_back(lease, driver.room(60), "after m stopped")
    assert time.monotonic() - began < 5
    assert told is not None
    assert "it fell off the bus" in told
    assert {uuid: one.outcome for uuid, one in quarantined(folder).items()} == {A: HARDWARE}
    assert record(folder, B)["ended"] == "dirty"
    assert nothing_held(folder, A, B)


def test_a_gpu_that_misses_an_answer_after_a_boot_is_asked_again(driver: Driver, folder: Path) -> None:
    lease = out(driver, folder, 2, A, B)
    driver.used = {A: answers_later(2), B: answers_later(1)}
    assert take_back(lease, driver.room(60), "after m stopped", others=(A, B, C)) is None
    assert quarantined(folder) == {}
    assert record(folder, A)["ended"] == "clean"


def test_a_gpu_that_never_answers_after_a_boot_is_put_in_quarantine(driver: Driver, folder: Path) -> None:
    lease = out(driver, folder, 1, A)
    driver.used = {A: HANGS}
    told = take_back(lease, driver.room(), "after m stopped", others=(A, B))
    assert told is not None
    assert "did not answer within 10 s" in told
    assert {uuid: one.outcome for uuid, one in quarantined(folder).items()} == {A: HARDWARE}
    assert record(folder, A)["ended"] == "dirty"


@pytest.mark.parametrize("fault", [LOST, HANGS], ids=["lost", "hanging"])
def test_when_another_gpu_does_not_answer_either_after_a_boot_no_gpu_is_blamed(
    driver: Driver, folder: Path, fault: HostFault
) -> None:
    lease = out(driver, folder, 1, A)
    driver.used = {A: fault, B: fault}
    with pytest.raises(HostFault, match=re.escape(fault.cause)):
        take_back(lease, driver.room(), "after m stopped", others=(A, B))
    assert lease.released
    assert quarantined(folder) == {}
    assert "ended" not in record(folder, A)  # what is in its memory is not known: the next one waits for it


def test_whose_memory_it_is_after_a_boot_may_be_unknown_and_is_told_without_blame(driver: Driver, folder: Path) -> None:
    lease = out(driver, folder, 1, A)
    driver.used = {A: 5 * GIB}
    driver.mute = {A}
    told = take_back(lease, driver.room(), "after m stopped")
    assert told is not None
    assert told.endswith(f"{A} has 5.00 GiB in use: the driver could not be asked by whom")
    assert quarantined(folder) == {}
    assert record(folder, A)["ended"] == "dirty"


def test_when_a_quarantine_cannot_be_written_the_lease_is_over_and_the_next_one_is_warned(
    driver: Driver, folder: Path
) -> None:
    lease = out(driver, folder, 1, A)
    driver.used = {A: 5 * GIB}
    (folder / f"quarantine-{A}.json").mkdir()
    with pytest.raises(LockDirError, match="should be in quarantine"):
        take_back(lease, driver.room(), "after m stopped")
    assert lease.released
    assert "ended" not in record(folder, A)


def test_a_zombie_has_no_memory(driver: Driver) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        for _ in range(1000):
            now = read_proc(process.pid)
            if now is None or now.dead:
                break
            time.sleep(0.01)
        assert not Dirt(A, 5 * GIB, processes=((process.pid, None),)).strangers()


def test_two_that_hand_out_at_once_never_get_the_same_gpu_while_one_of_them_waits_for_the_driver(
    driver: Driver, folder: Path
) -> None:
    killed(folder, A, B)
    free_at = time.monotonic() + 0.5
    driver.used = dict.fromkeys((A, B), lambda: 5 * GIB if time.monotonic() < free_at else 0)
    got: list[str] = []

    def want() -> None:
        with out(driver, folder, 1, A, B, reclaim_s=60, wait_s=60) as lease:
            got.extend(lease.uuids)
            time.sleep(0.2)

    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == [A, B]
