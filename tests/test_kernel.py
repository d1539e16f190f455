"""Reading the kernel beside a boot: a fake /dev/kmsg, fake commands, a fake cgroup tree and a fake /proc."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from pytest_gpuguard.facts import kernel
from pytest_gpuguard.facts.kernel import Counter, Evidence, KernelWatch
from pytest_gpuguard.facts.kernel_log import Denied, KernelLog, Paths, kernel_log_denied
from pytest_gpuguard.facts.oom_counters import OomCounters
from tests.needs import need

XID = "NVRM: Xid (PCI:0000:16:00): 79, pid=7, name=python, GPU has fallen off the bus."
KILL = "Out of memory: Killed process 7 (python) total-vm:1kB, anon-rss:1kB"


class Machine:
    """A /dev/kmsg, a /proc and a cgroup tree that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = Paths(folder / "kmsg", folder / "proc", folder / "cgroup", ())
        self.paths.kmsg.write_text("6,1,5,-;an old message\n4,2,6,-;" + KILL.replace("7", "1") + "\n")
        self.write("proc/vmstat", "nr_free_pages 12\noom_kill 3\npswpin 0\n")
        self.belongs("self", "0::/user/ours")

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def say(self, *messages: str) -> None:
        with self.paths.kmsg.open("a") as file:
            for number, message in enumerate(messages):
                file.write(f"4,{number},123456,-;{message}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:16:00.0\n")

    def belongs(self, pid: str | int, *groups: str) -> None:
        self.write(f"proc/{pid}/cgroup", "".join(f"{group}\n" for group in groups))

    def unified(self, group: str, kills: int, name: str = "memory.events") -> None:
        self.write("cgroup/cgroup.controllers", "memory\n")
        self.write(f"cgroup/{group}/{name}", f"low 0\nhigh 0\nmax 4\noom 1\noom_kill {kills}\noom_group_kill 0\n")

    def script(self, name: str, text: str) -> str:
        file = self.write(name, f"#!/bin/sh\n{text}")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    def without_kmsg(self, *commands: str) -> Paths:
        return Paths(self.folder / "absent", self.paths.proc, self.paths.cgroup, commands)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    need(os.name == "posix", "reads the kernel of Linux")
    return Machine(tmp_path)


# ------------------------------------------------------------------------------------------------------------- messages


def test_only_messages_of_the_window_are_read_and_only_those_that_matter(machine: Machine) -> None:
    log = KernelLog(machine.paths)
    assert log.read(0.1) == ()
    machine.say("usb 1-1: new device", XID)
    assert log.read(0.1) == (XID,)
    machine.say(KILL)
    assert log.read(0.1) == (XID, KILL)
    log.close()
    assert log.read(0.1) == (XID, KILL)


def test_escapes_and_records_that_arrive_in_pieces_are_put_together(machine: Machine) -> None:
    log = KernelLog(machine.paths)
    with machine.paths.kmsg.open("a") as file:
        file.write("4,1,5,-;Out of memory: Killed process 7 (a\\x0ab")
        file.flush()
        assert log.read(0.1) == ()
        file.write(") total-vm:1kB\n")
        file.flush()
    assert log.read(0.1) == ("Out of memory: Killed process 7 (a\nb) total-vm:1kB",)


def test_a_flood_of_messages_is_read_in_bounded_time_and_memory(machine: Machine) -> None:
    log = KernelLog(machine.paths)
    machine.say(*[f"{XID} number {number}" for number in range(20_000)])
    began = time.monotonic()
    lines = log.read(0.3)
    assert time.monotonic() - began < 2  # 0.3 s and the last record, on an idle machine
    assert isinstance(lines, tuple)
    assert 0 < len(lines) <= 400


def test_a_log_that_is_closed_meanwhile_is_read_to_the_end_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = KernelLog(machine.paths)
    machine.say(KILL)
    reading, go_on = threading.Event(), threading.Event()
    read = os.read

    def slow(fd: int, size: int) -> bytes:
        if threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(10)
        return read(fd, size)  # EBADF, or somebody else's file, where the descriptor is gone

    monkeypatch.setattr(os, "read", slow)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(log.read(5)))
    closer = threading.Thread(target=log.close)
    reader.start()
    assert reading.wait(10)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go_on.set()
    reader.join(10)
    closer.join(10)
    assert found == [(KILL,)]
    assert log.read(0.1) == (KILL,)


def test_a_log_that_may_not_be_read_is_a_reason_and_no_error(machine: Machine) -> None:
    denied = kernel_log_denied(machine.without_kmsg())
    assert denied == Denied("kernel log", f"{machine.folder / 'absent'}: No such file or directory")
    assert kernel_log_denied(machine.paths) is None


DMESG = """
echo '[    1.000000] {old}'
echo '[   12.500000] booted'
[ -e {flag} ] && echo '[   12.500001] {new}'
exit 0
"""


@pytest.mark.parametrize("name", ["dmesg", "journalctl"])
def test_a_command_stands_in_and_gives_only_what_came_later(machine: Machine, name: str) -> None:
    flag = machine.folder / "later"
    text = XID if name == "dmesg" else f"host kernel: {XID}"
    script = DMESG.format(old=KILL, new=text, flag=flag)
    log = KernelLog(machine.without_kmsg(machine.script(name, script)))
    assert log.denied() is None
    assert log.read(5) == ()
    flag.touch()
    assert log.read(5) == (text,)


def test_the_journal_is_asked_for_the_kernels_messages_since_the_start(machine: Machine) -> None:
    argv = machine.folder / "argv"
    script = machine.script("journalctl", f"echo \"$@\" >> {argv}\necho '[ 1.5] host kernel: x'\n")
    before = int(time.time())
    log = KernelLog(machine.without_kmsg(script))
    assert log.read(5) == ()
    first, second = argv.read_text().splitlines()
    assert "-k" in first.split()
    assert "short-monotonic" in second.split()
    (since,) = [word for word in second.split() if word.startswith("--since=@")]
    assert before <= int(since.removeprefix("--since=@")) <= time.time()


def test_a_command_that_is_refused_or_says_nothing_gives_way_to_the_next(machine: Machine) -> None:
    refused = machine.script("journalctl", "exit 0\n")
    works = machine.script("dmesg", "echo '[ 2.000000] x'\n")
    assert kernel_log_denied(machine.without_kmsg(refused, works)) is None
    forbidden = machine.script(
        "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1\n"
    )
    denied = kernel_log_denied(machine.without_kmsg(refused, forbidden, str(machine.folder / "none")))
    assert denied is not None
    assert denied.why.endswith(
        "absent: No such file or directory; journalctl shows no kernel messages; "
        "dmesg: read kernel buffer failed: Operation not permitted; none: No such file or directory"
    )


def test_a_command_that_hangs_is_not_waited_for(machine: Machine) -> None:
    log = KernelLog(machine.without_kmsg(machine.script("dmesg", "exec sleep 60\n")))
    began = time.monotonic()
    assert isinstance(log.read(0.1), Denied)
    assert time.monotonic() - began < 1


# ------------------------------------------------------------------------------------------------------------- counters


def test_the_host_and_our_own_cgroup_are_counted_from_the_start(machine: Machine) -> None:
    machine.unified("user/ours", 5)
    counters = OomCounters(machine.paths)
    counters.start()
    machine.write("proc/vmstat", "oom_kill 4\n")
    machine.unified("user/ours", 7)
    assert counters.host() == Counter(str(machine.paths.proc / "vmstat"), 3, 4)
    (counter,) = counters.cgroups()
    assert (counter.where, counter.grown) == (str(machine.paths.cgroup / "user/ours/memory.events"), 2)
    assert not counter.shared


def test_the_servers_cgroup_counts_once_it_is_known(machine: Machine) -> None:
    machine.unified("user/ours", 5)
    machine.unified("user/server", 1)
    machine.belongs(77, "0::/user/server")
    counters = OomCounters(machine.paths)
    counters.start()
    counters.note([77, 78])  # 78 is gone already
    machine.unified("user/ours", 6)
    machine.unified("user/server", 2)
    (counter,) = counters.cgroups()
    assert (counter.where, counter.grown) == (str(machine.paths.cgroup / "user/server/memory.events"), 1)
    assert not counter.shared


def test_the_nearest_ancestor_that_counts_is_taken_and_known_to_be_shared(machine: Machine) -> None:
    machine.unified("user", 2)
    counters = OomCounters(machine.paths)
    counters.start()
    machine.unified("user", 3)
    (counter,) = counters.cgroups()
    assert (counter.where, counter.grown) == (str(machine.paths.cgroup / "user/memory.events"), 1)
    assert counter.shared


def test_the_root_of_a_cgroup_namespace_is_the_containers_own(machine: Machine) -> None:
    machine.belongs("self", "0::/")
    machine.unified("", 0)
    counters = OomCounters(machine.paths)
    counters.start()
    assert [counter.shared for counter in counters.cgroups()] == [False]


def test_local_events_do_where_there_are_no_others(machine: Machine) -> None:
    machine.unified("user/ours", 2, "memory.events.local")
    counters = OomCounters(machine.paths)
    counters.start()
    assert [counter.where.rpartition("/")[2] for counter in counters.cgroups()] == ["memory.events.local"]


def test_version_1_of_cgroups_is_read_too(machine: Machine) -> None:
    machine.belongs("self", "4:memory,hugetlb:/docker/abc", "1:cpu:/x", "0::/")
    file = "cgroup/memory/docker/abc/memory.oom_control"
    machine.write(file, "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    counters = OomCounters(machine.paths)
    counters.start()
    machine.write(file, "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert [counter.grown for counter in counters.cgroups()] == [1]


@pytest.mark.parametrize("group", ["0::/../../outside", "nonsense", "0::/no/such/group", ""])
def test_a_cgroup_that_cannot_be_seen_has_no_counter(machine: Machine, group: str) -> None:
    machine.belongs("self", group)
    counters = OomCounters(machine.paths)
    counters.start()
    assert counters.cgroups() == ()


def test_this_machine_can_be_read_whatever_it_is() -> None:
    need(Path("/proc/self/cgroup").exists(), "needs Linux's /proc")
    counters = OomCounters()
    counters.start()
    counters.note([os.getpid()])
    host = counters.host()
    assert host is None or host.grown >= 0
    assert all(counter.grown >= 0 for counter in counters.cgroups())
    kernel_log_denied()


# ---------------------------------------------------------------------------------------------------------------- watch


def test_a_watch_gathers_everything_of_its_window(machine: Machine) -> None:
    machine.unified("user/ours", 0)
    namespace = machine.paths.proc / "self" / "ns"
    namespace.mkdir()
    (namespace / "pid").symlink_to("pid:[4026531836]")
    watch = KernelWatch({"GPU-1": "00000000:16:00.0"}, paths=machine.paths)
    watch.start()
    machine.say(KILL)
    watch.note([7])
    found = watch.collect([7, 8])
    assert found.lines == (KILL,)
    assert found.pids == {7, 8}
    assert found.gpus == {"GPU-1": "00000000:16:00.0"}
    assert found.host_kills is not None
    assert len(found.cgroup_kills) == 1
    assert (found.pids_differ, found.denied, found.events) == (False, (), ())
    machine.say(XID)
    assert watch.collect().lines == (KILL, XID)
    watch.close()
    watch.close()
    assert watch.collect().lines == (KILL, XID)


def test_a_pid_namespace_of_our_own_is_noticed(machine: Machine) -> None:
    namespace = machine.paths.proc / "self" / "ns"
    namespace.mkdir()
    (namespace / "pid").symlink_to("pid:[4026532999]")
    watch = KernelWatch(paths=machine.paths)
    watch.start()
    assert watch.collect().pids_differ
    watch.close()


def test_a_watch_without_any_right_gives_reasons(machine: Machine) -> None:
    paths = Paths(machine.folder / "no-kmsg", machine.folder / "no-proc", machine.folder / "no-cgroup", ())
    watch = KernelWatch(paths=paths)
    watch.start()
    found = watch.collect()
    watch.close()
    assert [denied.what for denied in found.denied] == ["kernel log"]
    assert (found.host_kills, found.cgroup_kills, found.lines) == (None, (), ())


def test_a_watch_that_was_not_started_knows_nothing() -> None:
    assert KernelWatch().collect([1]) == Evidence()


def test_collecting_is_quick_also_where_a_command_hangs(machine: Machine) -> None:
    watch = KernelWatch(paths=machine.without_kmsg(machine.script("dmesg", "exec sleep 60\n")))
    watch.start()
    began = time.monotonic()
    watch.collect()
    took = time.monotonic() - began
    watch.close()
    assert took < kernel.COLLECT_S + 0.5  # a busy machine may add to it
