"""GPU leases, slots and the folder of their locks: all or nothing, among processes and among users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pytest_gpuguard.lease import dirs, fifo, flocks
from pytest_gpuguard.lease.dirs import LockDirError, lock_dir, usable
from pytest_gpuguard.lease.fifo import ASLEEP_S, MOST_PASSED
from pytest_gpuguard.lease.flocks import Holder, LeaseDeadlock, LeaseTimeout, Locks
from pytest_gpuguard.lease.gpus import lease_gpus
from pytest_gpuguard.lease.slots import CPU_SERVER, lease_slot
from tests.needs import need
from tests.trees import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks are for Linux only")

A, B, C, D = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abcd")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "locks"
    path.mkdir()
    return path


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


HOLDS = """
import sys
from pathlib import Path
from pytest_gpuguard.lease.gpus import lease_gpus
lease = lease_gpus(sys.argv[3:], int(sys.argv[2]), test="other.py::test", directory=Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def other_holder(folder: Path, *uuids: str) -> subprocess.Popen[str]:
    process = python(HOLDS, str(folder), str(len(uuids)), *uuids)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def other_waiter(folder: Path, *uuids: str) -> subprocess.Popen[str]:
    """A process that wants all of these; it is in the queue when this returns."""
    process = python(HOLDS.replace("int(sys.argv[2])", "int(sys.argv[2]), 50"), str(folder), str(len(uuids)), *uuids)
    deadline = time.monotonic() + 30
    while not list(folder.glob("gpu-wait-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


def test_the_first_free_ones_are_taken_in_the_order_of_preference(folder: Path) -> None:
    with lease_gpus([C, A, B, D], 2, directory=folder) as first:
        assert first.uuids == (C, A)
        assert len(first.fds) == 2
        with lease_gpus([A, B, C, D], 2, directory=folder) as second:
            assert second.uuids == (B, D)
    assert first.released
    assert len(first.fds) == 0
    with lease_gpus([B, B, A], 2, directory=folder) as third:
        assert third.uuids == (B, A)
    with pytest.raises(ValueError, match="2 of 1 candidate GPUs cannot be leased"):
        lease_gpus([A, A], 2, directory=folder)


def test_all_or_nothing(folder: Path) -> None:
    with lease_gpus([A], 1, directory=folder):
        with pytest.raises(LeaseTimeout):
            lease_gpus([A, B, C], 3, directory=folder)
        with lease_gpus([B, C], 2, directory=folder) as rest:  # nothing of B and C stayed with the one that failed
            assert rest.uuids == (B, C)


def test_a_timeout_names_the_holders(folder: Path) -> None:
    process = other_holder(folder, A)
    with pytest.raises(LeaseTimeout) as caught:
        lease_gpus([A, B], 2, wait_s=0.6, directory=folder)
    error = caught.value
    assert error.waited_s >= 0.6
    (holder,) = error.holders
    assert holder.pid == process.pid
    assert holder.test == "other.py::test"
    assert holder.host
    assert f"pid {process.pid}, other.py::test, since 20" in str(error)
    assert "--gpuguard-wait" in str(error)
    process.communicate("end\n")


def test_a_waiter_is_told_who_is_in_the_way_and_served_when_it_is_free(folder: Path) -> None:
    process = other_holder(folder, A)
    told: list[tuple[Sequence[Holder], float]] = []
    threading.Timer(0.5, process.communicate, ["end\n"]).start()
    with lease_gpus([A], 1, 50, lambda holders, waited: told.append((holders, waited)), directory=folder) as lease:
        assert lease.uuids == (A,)
    assert len(told) == 1
    assert [holder.pid for holder in told[0][0]] == [process.pid]


def test_kill_9_frees_the_lease_but_not_what_an_heir_holds(folder: Path) -> None:
    process = other_holder(folder, A)
    process.kill()
    process.communicate()
    lease = lease_gpus([A], 1, test="mine.py::test", directory=folder)
    with subprocess.Popen(["sleep", "60"], pass_fds=lease.fds) as heir:
        lease.release()
        with pytest.raises(LeaseTimeout, match=r"mine\.py::test"):
            lease_gpus([A], 1, directory=folder)
        heir.kill()
        heir.wait()
        lease_gpus([A], 1, directory=folder).release()


def test_a_record_of_a_dead_holder_is_shown_as_such(folder: Path) -> None:
    leaves = (
        "import subprocess; print(subprocess.Popen(['sleep', '60'], pass_fds=lease.fds, stdout=-3).pid, flush=True)"
    )
    code = HOLDS.replace("sys.stdin.readline()", leaves)
    process = python(code, str(folder), "1", A)
    heir = int(process.communicate()[0].split()[1])
    with pytest.raises(LeaseTimeout, match=r"\(gone; what it started still holds the lock\)"):
        lease_gpus([A], 1, directory=folder)
    os.kill(heir, signal.SIGKILL)


WORKER = """
import json, random, sys, time
from pathlib import Path
from pytest_gpuguard.lease.gpus import lease_gpus
folder, n, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
uuids = [f"GPU-{i}" for i in range(8)]
rounds, longest = 0, 0.0
end = time.monotonic() + seconds
while time.monotonic() < end:
    random.shuffle(uuids)
    began = time.monotonic()
    with lease_gpus(uuids, n, 100, directory=folder) as lease:
        longest = max(longest, time.monotonic() - began)
        flags = [open(folder / f"{uuid}.in-use", "x") for uuid in lease.uuids]  # "x": fails if somebody else has it
        time.sleep(random.uniform(0, 0.03))
        for flag in flags:
            flag.close()
            Path(flag.name).unlink()
    rounds += 1
print(json.dumps([rounds, longest]))
"""


def test_big_and_small_leases_contend_without_deadlock_overlap_or_starvation(folder: Path) -> None:
    workers = [python(WORKER, str(folder), str(n), "4") for n in (1, 1, 1, 4, 4, 8)]
    results = [json.loads(worker.communicate(timeout=200)[0]) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers)
    assert all(rounds >= 1 for rounds, _ in results), results


def waiting(folder: Path, n: int, uuids: Sequence[str], served: list[str], name: str) -> threading.Thread:
    """A thread that wants ``n`` of the GPUs; it is in the queue when this returns, or has been served."""

    def want() -> None:
        with lease_gpus(uuids, n, 50, test=name, directory=folder):
            served.append(name)

    before = len(list(folder.glob("gpu-wait-*")))
    thread = threading.Thread(target=want)
    thread.start()
    deadline = time.monotonic() + 30
    while len(list(folder.glob("gpu-wait-*"))) == before and name not in served and time.monotonic() < deadline:
        time.sleep(0.01)
    return thread


def test_who_waits_for_busy_gpus_does_not_block_other_gpus(folder: Path) -> None:
    process = other_holder(folder, A)
    served: list[str] = []
    thread = waiting(folder, 2, [A, B], served, "big")
    with lease_gpus([C, D], 2, directory=folder) as others:
        assert others.uuids == (C, D)
    assert served == []
    process.communicate("end\n")
    thread.join(50)
    assert served == ["big"]


def test_equal_waiters_are_served_in_their_order_and_not_overtaken(folder: Path) -> None:
    process = other_holder(folder, A)
    served: list[str] = []
    threads = [waiting(folder, 1, [A], served, f"{number}") for number in range(4)]
    with pytest.raises(LeaseTimeout, match=r"gpu-queue: 1 GPU\(s\) wanted before us by .*, 0, since 20") as caught:
        lease_gpus([A], 1, directory=folder)
    assert [holder.test for holder in caught.value.holders] == ["other.py::test", "0", "1", "2", "3"]
    process.communicate("end\n")
    for thread in threads:
        thread.join(50)
    assert served == ["0", "1", "2", "3"]
    assert list(folder.glob("gpu-wait-*")) == []


def test_a_big_request_is_passed_by_smaller_ones_a_few_times_and_not_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fifo, "LATE_S", 0.0)
    process = other_holder(folder, A)
    served: list[str] = []
    thread = waiting(folder, 4, [A, B, C, D], served, "big")
    for _ in range(MOST_PASSED):
        lease_gpus([A, B, C, D], 1, directory=folder).release()
    with pytest.raises(LeaseTimeout, match=r"4 GPU\(s\) wanted before us"):
        lease_gpus([A, B, C, D], 1, directory=folder)
    process.communicate("end\n")
    thread.join(50)
    assert served == ["big"]


def test_a_big_request_is_not_passed_more_often_by_smaller_ones_that_queue_behind_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first of the queue it calls them itself: its own looks must not forget how often it was passed."""
    monkeypatch.setattr(fifo, "LATE_S", 0.0)
    long, short = other_holder(folder, A), other_holder(folder, B)
    served: list[str] = []
    threads = [waiting(folder, 2, [A, B], served, "big")]
    threads += [waiting(folder, 1, [A, B], served, f"{number}") for number in range(MOST_PASSED + 3)]
    short.communicate("end\n")
    deadline = time.monotonic() + 30
    while len(served) < MOST_PASSED and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(2.5)  # each of them looks by itself once a second
    assert served == [f"{number}" for number in range(MOST_PASSED)]
    long.communicate("end\n")
    for thread in threads:
        thread.join(50)
    assert served[MOST_PASSED] == "big"
    assert len(served) == MOST_PASSED + 4


def test_a_waiter_that_is_stopped_holds_nobody_up_and_keeps_its_place(folder: Path) -> None:
    process = other_holder(folder, A)
    sleeper = other_waiter(folder, A, B)
    sleeper.send_signal(signal.SIGSTOP)
    with pytest.raises(LeaseTimeout):  # for some seconds it may only be busy
        lease_gpus([A, B], 2, directory=folder)
    process.communicate("end\n")
    with lease_gpus([A, B], 2, 10 * ASLEEP_S, directory=folder):
        sleeper.send_signal(signal.SIGCONT)
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == "held\n"
    sleeper.communicate("end\n")


def test_a_killed_waiter_leaves_the_queue_by_itself(folder: Path) -> None:
    process = other_holder(folder, A)
    killed = other_waiter(folder, A)
    served: list[str] = []
    thread = waiting(folder, 1, [A], served, "next")
    killed.kill()
    killed.communicate()
    process.communicate("end\n")
    thread.join(50)
    assert served == ["next"]
    assert list(folder.glob("gpu-wait-*")) == []


def test_a_test_that_waits_for_its_own_gpus_is_told_at_once(folder: Path) -> None:
    with lease_gpus([A, B], 2, directory=folder):
        began = time.monotonic()
        with pytest.raises(LeaseDeadlock, match=r"can never become free while this test keeps the GPUs that it has"):
            lease_gpus([A, B, C], 2, 60, directory=folder)
        assert time.monotonic() - began < 30


CIRCLE = """
import sys
from pathlib import Path
from pytest_gpuguard.lease.flocks import LeaseDeadlock
from pytest_gpuguard.lease.gpus import lease_gpus
folder, mine, theirs = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
first = lease_gpus([mine], 1, directory=folder)
print("first", flush=True)
sys.stdin.readline()
try:
    lease_gpus([theirs], 1, 60, directory=folder)
    print("both", flush=True)
except LeaseDeadlock as error:
    print("deadlock", flush=True)
"""


def test_two_tests_that_wait_for_each_other_do_not_wait_for_ever(folder: Path) -> None:
    one, other = python(CIRCLE, str(folder), A, B), python(CIRCLE, str(folder), B, A)
    for process in (one, other):
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
    for process in (one, other):
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(process.communicate(timeout=50)[0] for process in (one, other))
    assert said == ["both\n", "deadlock\n"]


def test_a_queue_whose_book_was_torn_goes_on(folder: Path) -> None:
    process = other_holder(folder, A)
    served: list[str] = []
    threads = [waiting(folder, 1, [A], served, f"{number}") for number in range(2)]
    (folder / "gpu-book.lock").write_text('{"next": 1, "pas')
    threads.append(waiting(folder, 1, [A], served, "2"))
    process.communicate("end\n")
    for thread in threads:
        thread.join(50)
    assert served == ["0", "1", "2"]


def test_a_lock_folder_that_vanishes_while_somebody_waits_is_an_error_that_says_so(folder: Path) -> None:
    process = other_holder(folder, A)

    def vanish() -> None:
        # At once: file by file, the lock that is gone first would be a free GPU.
        shutil.rmtree(folder.rename(folder.with_name("gone")))

    threading.Timer(0.3, vanish).start()
    with pytest.raises(LockDirError, match=r"was removed: who holds which GPU cannot be told any more"):
        lease_gpus([A], 1, 60, directory=folder)
    process.communicate("end\n")


def test_a_lease_knows_when_its_locks_were_removed(folder: Path) -> None:
    with lease_gpus([A], 1, directory=folder) as lease:
        assert lease.intact
        shutil.rmtree(folder)
        assert not lease.intact


def test_the_next_one_is_told_how_the_lease_before_ended(folder: Path) -> None:
    first = lease_gpus([A], 1, test="first", directory=folder)
    assert first.previous == {A: {}}
    first.end("clean")
    second = lease_gpus([A], 1, directory=folder)
    assert second.previous[A]["ended"] == "clean"
    second.give_back()
    third = lease_gpus([A], 1, test="third", directory=folder)
    assert third.previous[A]["ended"] == "clean"  # the second one has not used it
    third.release()
    fourth = lease_gpus([A], 1, directory=folder)
    assert "ended" not in fourth.previous[A]
    assert fourth.previous[A]["test"] == "third"
    fourth.release()


def test_who_gave_gpus_back_is_still_named_while_what_it_started_holds_the_locks(folder: Path) -> None:
    lease = lease_gpus([A], 1, test="mine.py::test", directory=folder)
    with subprocess.Popen(["sleep", "60"], pass_fds=lease.fds) as heir:  # SIGKILL has not ended it
        lease.end("dirty")
        with pytest.raises(LeaseTimeout, match=rf"pid {os.getpid()}, mine\.py::test, since 20"):
            lease_gpus([A], 1, directory=folder)
        heir.kill()
        heir.wait()
    with lease_gpus([A], 1, directory=folder) as after:
        assert after.previous[A]["ended"] == "dirty"
        assert after.previous[A]["test"] == "mine.py::test"


def test_a_planted_file_with_a_second_name_is_not_written_to(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.link(victim, folder / "gpu-GPU-1.lock")
    os.mkfifo(folder / "gpu-GPU-2.lock")
    for uuid in ("GPU-1", "GPU-2"):
        with pytest.raises(LockDirError, match="cannot be opened"):
            lease_gpus([uuid], 1, directory=folder)
    assert victim.read_text() == "precious"


def test_a_slot_has_one_holder(folder: Path) -> None:
    with lease_slot(directory=folder, test="a.py::a") as slot:
        assert slot.name == CPU_SERVER
        with pytest.raises(LeaseTimeout, match=r"slot 'cpu-server' did not become free(.|\n)*a\.py::a"):
            lease_slot(directory=folder)
        lease_slot("another", directory=folder).release()
    lease_slot(directory=folder).release()
    with pytest.raises(ValueError, match="not a slot name"):
        lease_slot("../etc", directory=folder)


def test_a_lock_file_that_a_cleaner_removed_is_not_trusted(folder: Path) -> None:
    locks = Locks(directory=folder)
    old = locks.attempt("x")
    assert old is not None
    (folder / "x.lock").unlink()
    new = locks.attempt("x")
    assert new is not None
    assert locks.attempt("x") is None
    os.close(old)
    assert locks.attempt("x") is None
    os.close(new)


def test_a_holder_that_proc_hides_is_not_said_to_be_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid, for a process of another user."""
    process = other_holder(folder, A)
    monkeypatch.setattr(flocks, "read_proc", lambda pid: None)
    (holder,) = Locks(directory=folder).holders([f"gpu-{A}"])
    assert holder.lives
    assert f"pid {process.pid} (not visible from here), other.py::test" in str(holder)
    process.communicate("end\n")
    assert not holder.lives
    assert "(gone; what it started still holds the lock)" in str(holder)
    assert not Holder("x").lives


def test_descriptors_are_closed_on_exec(folder: Path) -> None:
    with lease_gpus([A], 1, directory=folder) as lease:
        assert not any(map(os.get_inheritable, lease.fds))


class Nobody:
    """A second Unix user, with a folder that both can use and a copy of the package that it can read."""

    def __init__(self, above: Path) -> None:
        above.chmod(0o755)
        self.folder = usable(above / "locks")
        self._code = above / "code"
        shutil.copytree(ROOT / "pytest_gpuguard", self._code / "pytest_gpuguard")
        for path in (self._code, *self._code.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        self._python = next(filter(self._can_run, (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3")), "")
        need(self._python, "the user nobody can run no Python ≥ 3.10 here")

    def _can_run(self, program: str) -> bool:
        try:
            return self._popen([program, "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]).wait() == 0
        except OSError:
            return False

    def _popen(self, argv: list[str], stdio: int | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            argv,
            text=True,
            stdin=stdio,
            stdout=stdio,
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self._code), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def python(self, code: str) -> subprocess.Popen[str]:
        return self._popen([self._python, "-S", "-c", code, str(self.folder)], subprocess.PIPE)


@pytest.fixture
def nobody() -> Iterator[Nobody]:
    need(os.geteuid() == 0, "only root can become a second Unix user")
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        yield Nobody(Path(above))


SECOND_USER = """
import os, sys
from pathlib import Path
from pytest_gpuguard.lease.flocks import LeaseTimeout
from pytest_gpuguard.lease.gpus import lease_gpus
os.umask(0o077)
folder = Path(sys.argv[1])
try:
    lease_gpus(["GPU-1"], 1, directory=folder)
except LeaseTimeout as error:
    print(error.holders[0].user, flush=True)
sys.stdin.readline()
lease = lease_gpus(["GPU-1", "GPU-2"], 2, 50, directory=folder)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_second_unix_user_excludes_and_is_excluded(nobody: Nobody) -> None:
    assert stat.S_IMODE(nobody.folder.stat().st_mode) == 0o1777
    mine = lease_gpus(["GPU-1"], 1, directory=nobody.folder)
    process = nobody.python(SECOND_USER)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "root\n"
    mine.release()
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LeaseTimeout) as caught:
        lease_gpus(["GPU-2"], 1, directory=nobody.folder)
    assert caught.value.holders[0].pid == process.pid
    assert caught.value.holders[0].user == "nobody"
    process.communicate("end\n")
    lease_gpus(["GPU-1", "GPU-2"], 2, directory=nobody.folder).release()


READ_ONLY = """
import sys
from pathlib import Path
from pytest_gpuguard.lease.flocks import Locks
print(Locks(directory=Path(sys.argv[1])).attempt("x") is not None, flush=True)
sys.stdin.readline()
"""


def test_a_lock_file_that_the_second_user_may_only_read_still_locks(nobody: Nobody) -> None:
    (nobody.folder / "x.lock").write_text("")
    (nobody.folder / "x.lock").chmod(0o444)
    process = nobody.python(READ_ONLY)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    locks = Locks(directory=nobody.folder)
    assert locks.attempt("x") is None
    assert locks.holders(["x"]) == (Holder("x"),)
    assert "no readable record" in str(Holder("x"))
    process.communicate("end\n")


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dirs.ENV, str(tmp_path / "mine"))
    umask = os.umask(0o077)
    try:
        assert lock_dir() == tmp_path / "mine"
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o1777
    monkeypatch.delenv(dirs.ENV)
    monkeypatch.setattr(dirs, "DEFAULTS", (str(tmp_path / "nowhere" / "a"), str(tmp_path / "b")))
    assert lock_dir() == tmp_path / "b"
    (tmp_path / "b").chmod(0o755)  # as if its maker had died before the chmod
    assert stat.S_IMODE(lock_dir().stat().st_mode) == 0o1777
    monkeypatch.setattr(dirs, "DEFAULTS", (str(tmp_path / "a"), str(tmp_path / "b")))
    assert lock_dir() == tmp_path / "a"


def test_two_first_runs_get_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has made it between our look and our mkdir."""
    monkeypatch.delenv(dirs.ENV, raising=False)
    monkeypatch.setattr(dirs, "DEFAULTS", (str(tmp_path / "a"), str(tmp_path / "b")))
    make = dirs._make

    def made_by_both(path: Path) -> None:
        make(path)
        make(path)

    monkeypatch.setattr(dirs, "_make", made_by_both)
    assert lock_dir() == tmp_path / "a"
    assert not (tmp_path / "b").exists()


def test_folders_that_cannot_be_trusted_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name, reason in (("link", "symbolic link"), ("file", "not a folder"), ("no/where", "cannot be made")):
        with pytest.raises(LockDirError, match=rf"{reason}(.|\n)*{dirs.ENV}"):
            usable(tmp_path / name)
    need(os.geteuid() == 0, "only root can give a folder to another user")
    (tmp_path / "foreign").mkdir()
    os.chown(tmp_path / "foreign", 65534, 65534)
    (tmp_path / "foreign").chmod(0o777)
    with pytest.raises(LockDirError, match=r"uid 65534 and is not sticky .*chmod 1777"):
        usable(tmp_path / "foreign")
    (tmp_path / "foreign").chmod(0o1777)
    with pytest.raises(LockDirError, match=r"belongs to uid 65534, who can remove .*chown root"):
        usable(tmp_path / "foreign")
    os.chown(tmp_path / "foreign", 0, 0)
    assert usable(tmp_path / "foreign") == tmp_path / "foreign"


def test_a_default_folder_that_another_user_made_first_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(os.geteuid() == 0, "only root can give a folder to another user")
    monkeypatch.delenv(dirs.ENV, raising=False)
    monkeypatch.setattr(dirs, "DEFAULTS", (str(tmp_path / "none" / "a"), str(tmp_path / "b")))
    usable(tmp_path / "b")
    os.chown(tmp_path / "b", 65534, 65534)
    assert lock_dir() == usable(tmp_path / "b") == tmp_path / "b"


def test_a_folder_whose_owner_has_no_number_here_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the machine's own /run/lock/gpuguard looks in a container with users of its own."""
    need(os.geteuid() == 0, "only root can give a folder to another user")
    monkeypatch.setattr(dirs, "_all_uids", lambda: False)
    usable(tmp_path / "a")
    os.chown(tmp_path / "a", 65534, 65534)
    assert usable(tmp_path / "a") == tmp_path / "a"


def test_a_planted_symlink_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "gpu-GPU-1.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(LockDirError, match="cannot be opened"):
        lease_gpus(["GPU-1"], 1, directory=folder)
    assert not (tmp_path / "victim").exists()


def test_who_is_stopped_with_the_book_open_holds_nobody_up(folder: Path) -> None:
    held = Locks(directory=folder).attempt("gpu-book")  # as a process has it that got SIGSTOP just then
    assert held is not None
    process = other_holder(folder, A)
    served: list[str] = []
    threads = [waiting(folder, 1, [A], served, f"{number}") for number in range(2)]
    process.communicate("end\n")
    for thread in threads:
        thread.join(50)
    assert sorted(served) == ["0", "1"]
    os.close(held)
