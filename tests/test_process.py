"""A booted server as its holder sees it: what it says of the tree, and that its end is the end of all of it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_gpuguard.engines.process import CommandNotStarted, LogNotWritable, ServerProcess
from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.warden import descendants
from tests import trees
from tests.trees import LAW_S, ROOT, holder, marked, script, seconds_until_gone, server, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are booted on Linux only")

Boot = Callable[..., ServerProcess]


@pytest.fixture
def mark() -> Iterator[str]:
    word = trees.new_mark()
    yield word
    trees.sweep(word)


@pytest.fixture
def boot(tmp_path: Path, mark: str) -> Iterator[Boot]:
    """Start a server (by default: and wait until it says that it is up); it is stopped at the end."""
    started: list[ServerProcess] = []

    def start(argv: list[str], name: str = "server", up: bool = True, fds: tuple[int, ...] = ()) -> ServerProcess:
        log = tmp_path / f"{name}.log"
        process = ServerProcess.start(argv, {**os.environ, trees.MARK: mark}, None, log, pass_fds=fds)
        started.append(process)
        if up:
            wait_until(lambda: "up" in log.read_text())
        return process

    yield start
    for process in started:
        process.stop(0)


def test_a_server_runs_and_stops_cleanly(tmp_path: Path, boot: Boot, mark: str) -> None:
    process = boot(server(tmp_path, "plain"))
    assert process.alive
    assert process.poll() is None
    assert process.pid in process.pids()
    assert process.warden_pid not in process.pids()
    assert len(process.pids()) == 2
    assert process.rss_bytes() > 2 * (1 << 20)
    report = process.stop()
    assert report.clean
    assert report.killed == 0
    assert report.seconds < LAW_S
    assert process.stop() is report
    assert not process.alive
    assert process.pids() == set()
    info = process.poll()
    assert info is not None
    assert (info.code, info.lost) == (-15, False)
    assert not marked(mark)
    assert not os.path.exists(f"/proc/{process.warden_pid}")


def test_pids_include_children_in_other_sessions_and_orphans(tmp_path: Path, boot: Boot) -> None:
    code = (
        "child('os.fork() and os._exit(0); ' + SLEEP, start_new_session=True); print('up', flush=True); time.sleep(600)"
    )
    process = boot(script(tmp_path, "orphans", code))
    wait_until(lambda: any(proc.ppid == process.warden_pid for proc in descendants(process.warden_pid).values()))

    def alive() -> set[int]:
        return {pid for pid, proc in descendants(process.warden_pid).items() if not proc.dead}

    # the fork that only exists to orphan its child is there for a moment
    wait_until(lambda: len(alive()) == 2 and process.pids() == alive())


def test_a_term_proof_tree_is_killed_and_counted(tmp_path: Path, boot: Boot, mark: str) -> None:
    process = boot(server(tmp_path, "term-proof"))
    wait_until(lambda: len(process.pids()) == 6)
    report = process.stop(grace=0.5)
    assert not report.clean
    assert report.killed == 6
    assert report.survivors == ()
    assert 0.4 < report.seconds < LAW_S
    assert not marked(mark)


def test_the_exit_of_the_server_is_seen_without_blocking(tmp_path: Path, boot: Boot) -> None:
    process = boot(script(tmp_path, "ends", "print('up', flush=True); time.sleep(0.3); sys.exit(5)"))
    began = time.monotonic()
    process.poll()
    assert time.monotonic() - began < 0.2
    info = process.wait(30)
    assert info is not None
    assert info.code == 5
    assert process.stop().clean


def test_a_command_that_cannot_be_started_says_so_and_leaves_nothing(tmp_path: Path, boot: Boot, mark: str) -> None:
    with pytest.raises(CommandNotStarted, match=r"no-such-engine.*No such file or directory.*PATH"):
        boot(["no-such-engine", "--port", "1"])
    with pytest.raises(ValueError, match="argv is empty"):
        boot([])
    assert not marked(mark)


def test_an_unwritable_log_says_so_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogNotWritable, match=r"log cannot be written .*nothing was started"):
        ServerProcess.start(["true"], None, None, tmp_path / "file" / "server.log")
    with pytest.raises(LogNotWritable):
        ServerProcess.start(["true"], None, None, tmp_path)


def test_environment_working_directory_and_log_are_what_was_asked(tmp_path: Path) -> None:
    # more than a pipe holds, and not all of it UTF-8
    env = {"PATH": os.environ["PATH"], **{f"WORD{i}": "é \udcff\n" * 20_000 for i in range(4)}}
    code = "import os; word = os.environb[b'WORD3']; print(sorted(os.environ), os.getcwd(), len(word), word[:4])"
    log = tmp_path / "new" / "folder" / "server.log"
    process = ServerProcess.start([sys.executable, "-S", "-c", code], env, tmp_path, log)
    assert process.wait(30) is not None
    process.stop()
    text = log.read_text()
    names, _, rest = text.partition("] ")
    assert "HOME" not in names
    assert "'WORD0', 'WORD1', 'WORD2', 'WORD3'" in names
    assert rest == f"{tmp_path} 100000 b'\\xc3\\xa9 \\xff'\n"


def test_two_servers_do_not_keep_each_other_alive(tmp_path: Path, boot: Boot) -> None:
    first = boot(server(tmp_path, "plain"), "first")
    second = boot(server(tmp_path, "plain"), "second")
    third = boot(server(tmp_path, "plain"), "third")

    def pipes(pid: int) -> set[str]:
        found = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                pass
        return {target for target in found if target.startswith("pipe:")}

    for a, b in ((first, second), (second, third), (first, third)):
        assert not pipes(a.warden_pid) & pipes(b.warden_pid)
        assert not pipes(a.warden_pid) & pipes(b.pid)
        assert not pipes(b.warden_pid) & pipes(a.pid)
    pid = first.warden_pid
    gone = first.pids()
    first._finalizer()  # what happens when the object is dropped
    wait_until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), LAW_S)
    assert all(not os.path.exists(f"/proc/{p}") for p in gone)
    assert second.alive
    assert third.alive


def test_a_dropped_server_ends(tmp_path: Path, boot: Boot, mark: str) -> None:
    env = {**os.environ, trees.MARK: mark}
    held = [ServerProcess.start(server(tmp_path, "own-sessions"), env, None, tmp_path / "log")]
    assert marked(mark)
    with pytest.warns(ResourceWarning):
        held.clear()
    assert seconds_until_gone(mark) <= LAW_S


def test_kill_9_of_the_warden_is_noticed_and_stop_cleans_up(tmp_path: Path, boot: Boot, mark: str) -> None:
    # children that have scrubbed their environment are known from an earlier look, the others by their marker
    code = """
for env in (None, {"PATH": "/usr/bin:/bin"}):
    child(PROOF + SLEEP, start_new_session=True, env=env)
print("up", flush=True); time.sleep(600)"""
    process = boot(script(tmp_path, "lost", code))
    wait_until(lambda: len(process.pids()) == 3)
    pids = process.pids()
    os.kill(process.warden_pid, signal.SIGKILL)
    info = process.wait(30)
    assert info is not None
    assert info.lost
    wait_until(lambda: process.pid not in process.pids())
    assert len(process.pids()) == 2
    report = process.stop()
    assert not report.clean
    assert report.killed == 2
    assert report.survivors == ()
    assert all(not os.path.exists(f"/proc/{pid}/exe") for pid in pids)
    assert not marked(mark)


def test_a_stopped_warden_does_not_hold_up_the_end(
    tmp_path: Path, boot: Boot, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpuguard.engines.process._MARGIN_S", 0.5)
    process = boot(server(tmp_path, "term-proof"))
    wait_until(lambda: len(process.pids()) == 6)
    os.kill(process.warden_pid, signal.SIGSTOP)
    report = process.stop(grace=0.1)
    assert report.killed == 6
    assert report.survivors == ()
    assert not marked(mark)
    assert not os.path.exists(f"/proc/{process.warden_pid}")


def test_an_interrupt_while_starting_leaves_nothing(tmp_path: Path, mark: str) -> None:
    argv = server(tmp_path, "own-sessions")
    interrupted = 0
    for delay in (0.001, 0.003, 0.006, 0.01, 0.02, 0.03, 0.045):
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        process = None
        try:
            timer.start()
            process = ServerProcess.start(argv, {**os.environ, trees.MARK: mark}, None, tmp_path / "log")
            time.sleep(1)
        except KeyboardInterrupt:
            interrupted += process is None
        finally:
            timer.join()
        if process is not None:
            process.stop(0)
    gc.collect()
    assert interrupted, "no interrupt came in time: this test proves nothing"
    assert seconds_until_gone(mark) <= LAW_S


def test_an_interrupt_while_stopping_kills_at_once(tmp_path: Path, boot: Boot, mark: str) -> None:
    process = boot(server(tmp_path, "term-proof"))
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.stop(grace=300)
    assert seconds_until_gone(mark) <= LAW_S
    assert not process.stop().clean


LISTENS = """
import socket
child('''
import socket
sockets = []
for family, host, port in %r:
    s = socket.socket(family); s.bind((host, port)); s.listen(); sockets.append(s)
print("up", flush=True); time.sleep(600)
''', start_new_session=True)
time.sleep(600)
"""


def test_it_knows_whether_a_port_is_the_servers_own(tmp_path: Path, boot: Boot) -> None:
    with socket.socket() as foreign, socket.socket() as one, socket.socket() as every:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        ports = []
        for probe in (one, every):
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        one.close()
        every.close()
        addresses = [(int(socket.AF_INET), "127.0.0.1", ports[0]), (int(socket.AF_INET6), "::", ports[1])]
        process = boot(script(tmp_path, "listens", LISTENS % (addresses,)))
        assert process.owns_port(ports[0])
        assert process.owns_port(ports[0], "127.0.0.1")
        assert process.owns_port(ports[0], "localhost")
        assert process.owns_port(ports[0], "0.0.0.0")
        assert not process.owns_port(ports[0], "127.0.0.2")
        assert not process.owns_port(ports[0], "::1")
        assert process.owns_port(ports[1], "127.0.0.1")
        assert process.owns_port(ports[1], "::1")
        assert not process.owns_port(foreign.getsockname()[1])
        assert not process.owns_port(1)


def test_a_lock_that_the_tree_inherits_is_free_only_when_the_tree_is_gone(
    tmp_path: Path, mark: str, boot: Boot
) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    locks = Locks(directory=folder)
    fd = locks.attempt("gpu")
    assert fd is not None
    process = boot(server(tmp_path, "term-proof"), fds=(fd,))
    os.close(fd)
    assert locks.attempt("gpu") is None
    process._finalizer()  # our death, as the warden sees it
    while (again := locks.attempt("gpu")) is None:
        time.sleep(0.002)
    assert not marked(mark, "GPUGUARD_BOOT")
    os.close(again)


def test_a_lock_outlives_a_killed_warden_as_long_as_the_main_process_can_use_the_gpu(
    tmp_path: Path, mark: str, boot: Boot
) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    locks = Locks(directory=folder)
    fd = locks.attempt("gpu")
    assert fd is not None
    process = boot(
        script(tmp_path, "forks", 'os.fork() or os.setsid(); print("up", flush=True); time.sleep(600)'), fds=(fd,)
    )
    os.close(fd)
    wait_until(lambda: len(process.pids()) == 2)
    os.kill(process.warden_pid, signal.SIGKILL)
    wait_until(lambda: process.pid not in process.pids())
    assert len(process.pids()) == 1
    assert locks.attempt("gpu") is None
    process.stop()
    again = locks.attempt("gpu")
    assert again is not None
    os.close(again)


def test_kill_9_of_a_holder_with_two_servers(tmp_path: Path, mark: str) -> None:
    first = holder(tmp_path, server(tmp_path, "plain"), mark)
    second = holder(tmp_path, server(tmp_path, "own-sessions"), mark)
    for process in (first, second):
        assert process.stdout is not None
        process.stdout.readline()
    first.kill()
    second.kill()
    first.communicate()
    second.communicate()
    assert seconds_until_gone(mark) <= LAW_S


ELSEWHERE = """
import sys
class NoPosix:
    def find_spec(self, name, *rest):
        if name in ("fcntl", "pwd", "grp", "resource", "termios", "httpx", "rich", "pynvml", "psutil", "filelock"):
            raise ImportError(name)
sys.meta_path.insert(0, NoPosix())
sys.platform = "win32"
import pytest_gpuguard.engines.process as p, pytest_gpuguard.lease.gpus as g, pytest_gpuguard.lease.ports as o
import pytest_gpuguard.lease.slots as s, pytest_gpuguard.lease.clean, pytest_gpuguard.lease.warden
boot, gpus = lambda: p.ServerProcess.start(["x"], None, None, "x"), lambda: g.lease_gpus(["a"], 1)
for what in (boot, gpus, o.lease_ports, s.lease_slot):
    try:
        what()
    except RuntimeError as error:
        print(type(error).__name__, error)
"""


def test_elsewhere_everything_can_be_imported_and_says_linux_only() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, env=env)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("UnsupportedPlatform Linux only: ") for line in lines)
