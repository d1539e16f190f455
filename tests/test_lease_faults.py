"""What can go wrong with a lease during a run, from end to end: the verdict, and what is left behind.

After every test no process of the run lives, no lock is held, and a bystander that notes every signal has met none.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.facts.holders import host_pids
from pytest_gpuguard.lease.flocks import LeaseTimeout, Locks
from pytest_gpuguard.lease.gpus import lease_gpus
from pytest_gpuguard.lease.quarantine import put, quarantined
from tests import trees
from tests.needs import need, need_tool
from tests.test_gpu_lease import HOLDS, Nobody, nobody, other_holder, python
from tests.trees import marked, wait_until

__all__ = ["nobody"]  # the fixture
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases are for Linux only")

Run = Any
FakeRigs = Any

BYSTANDER = """
import os, signal, sys, time
def note(number, frame):
    os.write(1, b"signal %d\\n" % number)
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, note)
print("up", flush=True)
while True:
    time.sleep(600)
"""


def lock_folder() -> Path:
    """The folder of this test's locks."""
    return Path(os.environ["GPUGUARD_LOCK_DIR"])


@pytest.fixture(autouse=True)
def aftermath(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Nothing lives, nothing is held, nobody was signalled. It is the bystander, in our own process group."""
    with subprocess.Popen([sys.executable, "-S", "-c", BYSTANDER], stdout=subprocess.PIPE, text=True) as bystander:
        assert bystander.stdout is not None
        assert bystander.stdout.readline() == "up\n"
        mark, folder = trees.new_mark(), lock_folder()
        monkeypatch.setenv(trees.MARK, mark)
        try:
            yield bystander
            left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(mark)}
            assert left == {}
            names = [path.name.removesuffix(".lock") for path in folder.glob("*.lock")] if folder.exists() else []
            assert Locks(directory=folder).holders(names) == ()
            assert [name for name in names if name.startswith("gpu-wait-")] == []
            assert bystander.poll() is None
        finally:
            trees.sweep(mark)
            bystander.kill()
            assert bystander.stdout.read() == ""


@pytest.fixture
def boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """CUDA_VISIBLE_DEVICES of every server that was booted so far."""
    file = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(file))
    return lambda: re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", file.read_text()) if file.exists() else []


def verdicts(result: pytest.RunResult) -> dict[str, str]:
    """Test → verdict, by the lines under "claims"."""
    text = result.stdout.str().rpartition(" claims =")[2].partition("\ngpuguard: ")[0]
    return {test: verdict for verdict, test in re.findall(r"^([A-Z_]+) +\S*::(test_\w+) ", text, re.MULTILINE)}


def when(there: Callable[[], object], then: Callable[[], object]) -> threading.Thread:
    """A thread that does something once something is so."""

    def wait() -> None:
        wait_until(there, 60)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def somebody_waits() -> bool:
    """Whether there is somebody in the queue for GPUs."""
    return bool(list(lock_folder().glob("gpu-wait-*")))


ONE = """
    @needs_gpus(1)
    @serves("sglang", MODEL)
    def test_it(): ...
"""
IN_TURN = f"""
    import os, sys
    from pathlib import Path

    def shared():
        sys.path.insert(0, {str(trees.ROOT)!r})
        from tests.standin import standin
        return standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"]))

    @needs_gpus(1)
    @serves("sglang", MODEL)
    def test_first(server):
        FIRST

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 1024")
    def test_second(server): ...
"""
ON_CPU_FIRST = IN_TURN.replace('needs_gpus(1)\n    @serves("sglang", MODEL)', 'serves("sglang", MODEL, CPU)').replace(
    "needs_gpus(1)", "needs_gpus(2)"
)
QUICK = "gpuguard_reclaim = 500ms\ngpuguard_grace = 500ms"
HOLD_ALL = {"test_first": "HOLDS", "test_second": "HOLDS"}


def in_turn(first: str = "pass", source: str = IN_TURN) -> str:
    """Two claims, with something that happens while the first server is up."""
    return source.replace("FIRST", first)


def test_a_server_and_its_child_that_resist_leave_no_process_no_memory_and_no_lock(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG", "proof")
    monkeypatch.setenv("FAKE_SGLANG_MEMORY", "20")
    all_of_it = "assert sum(one.bytes for one in shared().gpu[0].process if one.pid) == 40 << 30"
    result = claims(in_turn(all_of_it), ini=QUICK)
    result.assert_outcomes(passed=2)
    assert verdicts(result) == HOLD_ALL
    assert boots() == ["0", "0"]
    assert Locks(directory=lock_folder()).record(f"gpu-{rig.uuid(0)}")["ended"] == "clean"
    assert quarantined(lock_folder()) == {}


@pytest.mark.parametrize("hidden", [False, True], ids=["pid shown", "pid hidden"])
def test_memory_that_outlives_the_server_is_a_leak_and_the_next_claim_gets_another_gpu(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any, hidden: bool
) -> None:
    need(host_pids(), "in a container nobody is blamed")
    rig = fake_rig(n=2)
    rig.shared.hide_processes = hidden
    rig.apply(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG_MEMORY", "20")
    monkeypatch.setenv("FAKE_SGLANG_STICKY", "1")
    result = claims(in_turn(), ini=QUICK)
    who = "no process is reported for it" if hidden else r"pid \d+ \(not visible from here"
    for gpu, test in enumerate(HOLD_ALL):
        uuid = rig.uuid(gpu)
        told = rf"ERROR at teardown of {test} _(?s:.)*memory did not come back: {uuid} has 20\.00 GiB in use: {who}"
        assert re.search(told, result.stdout.str())
        assert f"::{test}" in str(quarantined(lock_folder())[uuid])
    assert verdicts(result) == HOLD_ALL
    result.assert_outcomes(passed=2, errors=2)
    assert result.ret == 1
    assert boots() == ["0", "1"]


def test_a_stranger_on_a_gpu_is_named_and_neither_signalled_nor_blamed(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, aftermath: subprocess.Popen[str]
) -> None:
    """It came while our server was up, and has its memory beside it; its command has line breaks."""
    need(host_pids(), "in a container nobody can be told apart")
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    rig.alloc(0, 0, aftermath.pid)
    result = claims(in_turn("shared().gpu[0].process[0].bytes = 9 << 30"), ini=QUICK)
    text = result.stdout.str()
    dirty = rf"{rig.uuid(0)} has 9\.00 GiB in use: pid {aftermath.pid} \(\S+ -S -c import os, signal, sys, time def"
    assert re.search(rf"memory did not come back: {dirty}.*\(somebody else uses it now\)", text), text
    assert re.search(rf"not clean before the boot: {dirty}.*\(1 of 1 GPUs wanted\)", text), text
    assert verdicts(result) == {"test_first": "HOLDS", "test_second": "INFRA"}
    assert quarantined(lock_folder()) == {}


def test_a_gpu_that_is_lost_while_a_server_is_up_is_named_and_the_next_claim_gets_another_one(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any
) -> None:
    rig = fake_rig(n=2)
    rig.apply(monkeypatch)
    result = claims(in_turn("shared().gpu[0].lost = 1"), ini=QUICK)
    assert verdicts(result)["test_second"] == "HOLDS"
    assert boots() == ["0", "1"]
    (shut,) = quarantined(lock_folder()).values()
    assert (shut.uuid, shut.outcome) == (rig.uuid(0), "hardware")
    assert "fell off the bus" in result.stdout.str()
    assert result.ret == 1


@pytest.mark.parametrize("what", ["lost", "hang"])
def test_a_gpu_that_stops_answering_before_it_is_handed_out_is_put_in_quarantine_and_another_one_taken(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any, pytester: pytest.Pytester, what: str
) -> None:
    rig = fake_rig(n=3)
    rig.apply(monkeypatch)
    pytester.makeconftest(
        "from pytest_gpuguard.facts.nvml import NvmlChild\n"
        "NvmlChild.__init__.__defaults__ = (None, 1.0, 20.0)  # seconds for an answer: 10 else\n"
    )
    result = claims(in_turn(f"shared().gpu[0].{what} = 1", ON_CPU_FIRST))
    assert verdicts(result) == HOLD_ALL
    assert len(boots()) == 2
    (shut,) = quarantined(lock_folder()).values()
    assert (shut.uuid, shut.outcome) == (rig.uuid(0), "hardware")
    assert ("did not answer within 1 s" if what == "hang" else "fell off the bus") in shut.reason
    assert result.ret == 0


def test_a_driver_that_breaks_as_a_whole_before_the_hand_out_is_infra_and_no_gpu_is_blamed(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any
) -> None:
    fake_rig(n=3).apply(monkeypatch)
    result = claims(in_turn("[setattr(one, 'lost', 1) for one in shared().gpu]", ON_CPU_FIRST))
    assert verdicts(result) == {"test_first": "HOLDS", "test_second": "INFRA"}
    result.stdout.fnmatch_lines(["INFRA *test_second *hardware*lost*"])
    assert quarantined(lock_folder()) == {}
    assert len(boots()) == 1
    assert result.ret == 1


def test_a_failure_of_a_boot_whose_locks_were_removed_says_nothing(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, boots: Any
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG", "weights_oom")
    monkeypatch.setenv("FAKE_SGLANG_DELAY", "1")
    folder = lock_folder()
    thread = when((tmp_path / "boots").exists, lambda: shutil.rmtree(folder))
    result = claims(ONE.replace("    def", '    @ooms("weights")\n    def'))
    thread.join()
    assert len(boots()) == 1
    assert verdicts(result) == {"test_it": "INFRA"}
    result.stdout.fnmatch_lines(["*infra.lease: the lock folder or its files were removed during the boot*"])
    result.stdout.fnmatch_lines(["*what the boot itself showed: oom.weights*"])
    assert result.ret == 1


def test_who_waits_when_the_lock_folder_is_removed_is_told(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, boots: Any
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    folder = lock_folder()
    holder = other_holder(folder, rig.uuid(0))
    thread = when(somebody_waits, lambda: shutil.rmtree(folder))
    result = claims(ONE)
    thread.join()
    holder.communicate("end\n")
    assert verdicts(result) == {"test_it": "INFRA"}
    result.stdout.fnmatch_lines(["*infra.lease: The lock folder * was removed*"])
    assert boots() == []
    assert result.ret == 1


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """A lock folder on a file system of its own, with these mount options."""
    need(os.geteuid() == 0, "only root can mount a file system")
    mount, folder = need_tool("mount"), tmp_path / "tiny"
    folder.mkdir()

    def make(options: str) -> Path:
        command = [mount, "-t", "tmpfs", "-o", f"mode=1777,{options}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        need(done.returncode == 0, f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        monkeypatch.setenv("GPUGUARD_LOCK_DIR", str(folder))
        return folder

    yield make
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_disk_keeps_nobody_from_a_free_gpu(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path]
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    folder = tiny("size=16k")
    with pytest.raises(OSError, match="No space"):
        (folder / "filler").write_bytes(b"x" * (1 << 20))
    assert verdicts(claims(ONE)) == {"test_it": "HOLDS"}
    holder = other_holder(folder, rig.uuid(0))
    result = claims(ONE)  # and a place in the queue takes room
    holder.communicate("end\n")
    assert verdicts(result) == {"test_it": "INFRA"}
    result.stdout.fnmatch_lines(["*No place in the queue for GPUs: *No space left on device. Make room there.*"])
    assert result.ret == 1


def test_a_disk_without_room_for_another_file_is_infra_that_says_so(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path], boots: Any
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    tiny("nr_inodes=2")
    result = claims(ONE)
    assert verdicts(result) == {"test_it": "INFRA"}
    result.stdout.fnmatch_lines(["*The lock file * cannot be opened: No space left on device. Make room there*"])
    assert boots() == []
    assert result.ret == 1


def test_a_clock_that_jumps_changes_neither_a_wait_nor_a_verdict(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    pytester.makeconftest(
        """
        import random, time

        real = time.time
        time.time = lambda: real() + random.choice([-400, -1, 0, 1, 400]) * 86400
        """
    )
    holder = other_holder(lock_folder(), rig.uuid(0))

    def end_later() -> None:
        time.sleep(1.5)
        holder.communicate("end\n")

    thread = when(somebody_waits, end_later)
    began = time.monotonic()
    result = claims(in_turn(), "--gpuguard-wait", "60")
    thread.join()
    assert verdicts(result) == HOLD_ALL
    result.assert_outcomes(passed=2)
    assert time.monotonic() - began < 60


def test_a_wait_that_is_over_names_who_has_the_gpus_and_who_waits_before_us(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    holder = other_holder(lock_folder(), rig.uuid(0))
    waits = HOLDS.replace("other.py::test", "waits.py::test").replace("int(sys.argv[2])", "int(sys.argv[2]), 100")
    waiter = python(waits, str(lock_folder()), "1", rig.uuid(0))
    wait_until(somebody_waits)
    result = claims(ONE, "--gpuguard-wait", "1")
    holder.communicate("end\n")
    waiter.communicate("end\n")
    assert verdicts(result) == {"test_it": "INFRA"}
    assert re.search(
        rf"gpu-{rig.uuid(0)}: held by \S+, pid {holder.pid}, other\.py::test, since 20[^;]*; "
        rf"gpu-queue: 1 GPU\(s\) wanted before us by \S+, pid {waiter.pid}, waits\.py::test, since 20",
        result.stdout.str(),
    )
    assert result.ret == 1


def test_an_exclusive_claim_waits_for_the_whole_box_and_nobody_gets_a_gpu_beside_it(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rig = fake_rig(n=3)
    rig.apply(monkeypatch)
    folder, uuids = lock_folder(), [rig.uuid(index) for index in range(3)]
    holder = other_holder(folder, uuids[2])
    seen: list[str] = []

    def watch() -> None:
        time.sleep(0.5)
        seen.append("running" if (tmp_path / "up").exists() else "waiting")
        holder.communicate("end\n")
        wait_until((tmp_path / "up").exists, 60)
        for uuid in uuids:
            try:
                lease_gpus([uuid], 1, directory=folder).release()
                seen.append("leased")
            except LeaseTimeout as error:
                seen.append(str(error.holders[0].test).rpartition("::")[2])
        (tmp_path / "go").touch()

    thread = when(somebody_waits, watch)
    result = claims(
        f"""
        import time
        from pathlib import Path

        @needs_gpus(1, exclusive=True)
        @serves("sglang", MODEL)
        def test_alone(server):
            assert len(server.observation.gpus) == 1
            Path({str(tmp_path)!r}, "up").touch()
            until = time.monotonic() + 60
            while not Path({str(tmp_path)!r}, "go").exists() and time.monotonic() < until:
                time.sleep(0.02)
        """
    )
    thread.join()
    result.assert_outcomes(passed=1)
    assert seen == ["waiting", "test_alone", "test_alone", "test_alone"]


PROTECTED = Path("/proc/sys/fs/protected_regular")


@pytest.fixture
def protected() -> Iterator[None]:
    """The kernel refuses to open others' files in sticky folders with O_CREAT, as systemd sets it."""
    try:
        before = PROTECTED.read_text()
        PROTECTED.write_text("2")
    except OSError:
        before = ""
    need(before, "fs.protected_regular cannot be set here")
    yield
    PROTECTED.write_text(before)


TAKES_TURNS = """
import sys
from pathlib import Path
from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.gpus import lease_gpus
from pytest_gpuguard.lease.quarantine import lift, put
folder = Path(sys.argv[1])
for line in sys.stdin:
    lease = lease_gpus(["GPU-1", "GPU-2"], 2, 50, directory=folder)
    print("held", flush=True)
    sys.stdin.readline()
    lease.end("clean")
    put(Locks(directory=folder), "GPU-3", "infra.dirty_gpu", "by the other user")
    print(lift(folder, "GPU-4"), flush=True)
"""


@pytest.mark.usefixtures("protected")
def test_two_users_share_gpus_although_the_kernel_protects_files_of_others(nobody: Nobody) -> None:
    put(Locks(directory=nobody.folder), "GPU-4", "infra.dirty_gpu", "ours")
    process = nobody.python(TAKES_TURNS)
    assert process.stdin is not None
    assert process.stdout is not None
    for lifted in (True, False):
        with lease_gpus(["GPU-2"], 1, 50, directory=nobody.folder):
            process.stdin.write("go\n")
            process.stdin.flush()
            wait_until(lambda: list(nobody.folder.glob("gpu-wait-*")))
        assert process.stdout.readline() == "held\n"
        with pytest.raises(LeaseTimeout) as caught:
            lease_gpus(["GPU-1"], 1, directory=nobody.folder)
        assert caught.value.holders[0].user == "nobody"
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{lifted}\n"
        assert set(quarantined(nobody.folder)) == {"GPU-3"}
    process.send_signal(signal.SIGKILL)
    process.communicate()
