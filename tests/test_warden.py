"""The warden ends the whole tree, whoever dies first and however the tree resists. Real processes throughout."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.lease import warden
from tests import trees
from tests.trees import LAW_S, holder, marked, script, seconds_until_gone, server, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="wardens are for Linux")


@pytest.fixture
def mark() -> Iterator[str]:
    word = trees.new_mark()
    yield word
    trees.sweep(word)


class Talk:
    """A warden that is talked to by hand."""

    def __init__(
        self, log: Path, argv: list[str], mark: str, *, text: bool = False, options: tuple[str, ...] = ()
    ) -> None:
        program = ["-c", Path(warden.__file__).read_text()] if text else [warden.__file__]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", *program, "--log", str(log), *options, "--", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, trees.MARK: mark},
            start_new_session=True,
        )
        self.log = log

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait_up(self, text: str = "up") -> None:
        wait_until(lambda: self.log.exists() and text in self.log.read_text())

    def close(self) -> None:
        self.process.wait(50)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("after", ["start", "up"])
@pytest.mark.parametrize("shape", list(trees.SHAPES))
def test_kill_9_of_the_holder_at_a_random_moment(tmp_path: Path, mark: str, shape: str, after: str) -> None:
    process = holder(tmp_path, server(tmp_path, shape), mark)
    log = tmp_path / "server.log"
    if after == "up":
        wait_until(lambda: log.exists() and "up" in log.read_text())
    time.sleep(random.uniform(0.0, 1.0))
    process.kill()
    process.communicate()
    assert seconds_until_gone(mark) <= LAW_S


def test_a_holder_that_ends_without_stopping_its_server_leaves_nothing(tmp_path: Path, mark: str) -> None:
    for mode in ("exit", "late-exit"):
        process = holder(tmp_path, server(tmp_path, "term-proof"), mark, mode)
        process.communicate(timeout=50)
        assert process.returncode == 0
        assert seconds_until_gone(mark) <= LAW_S


def test_a_forked_child_of_the_holder_that_keeps_the_pipe_open_does_not_keep_the_tree(
    tmp_path: Path, mark: str
) -> None:
    process = holder(tmp_path, server(tmp_path, "own-sessions"), mark, "fork")
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    wait_until(lambda: len(marked(mark, "IN_TREE")) >= 4)
    process.kill()
    process.wait()
    assert seconds_until_gone(mark, "IN_TREE") <= LAW_S
    left = marked(mark)
    assert left, "the forked child should have survived, or this test proves nothing"
    assert not {int(pid) for pid in pids} & set(left)
    trees.sweep(mark)
    process.stdout.close()


def test_an_interrupt_from_the_terminal_reaches_the_holder_only(tmp_path: Path, mark: str) -> None:
    process = holder(tmp_path, server(tmp_path, "plain"), mark)
    assert process.stdout is not None
    pid, warden_pid = map(int, process.stdout.readline().split())
    assert process.stdout.readline() == "waiting\n"
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
    assert {pid, warden_pid} <= set(marked(mark))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(warden_pid, number)
    time.sleep(0.3)
    assert {pid, warden_pid} <= set(marked(mark))
    process.kill()
    process.communicate()
    assert seconds_until_gone(mark) <= LAW_S


def test_terminating_the_warden_is_like_the_holders_death(tmp_path: Path, mark: str) -> None:
    talk = Talk(tmp_path / "log", server(tmp_path, "term-proof"), mark)
    talk.wait_up()
    talk.process.terminate()
    assert seconds_until_gone(mark) <= LAW_S
    talk.close()


def test_kill_9_of_the_warden_takes_the_main_process_along(tmp_path: Path, mark: str) -> None:
    talk = Talk(tmp_path / "log", script(tmp_path, "alone", 'print("up", flush=True); time.sleep(600)'), mark)
    talk.wait_up()
    talk.process.kill()
    assert seconds_until_gone(mark) <= LAW_S
    talk.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -2),
    ],
)
def test_the_exit_code_is_reported(tmp_path: Path, mark: str, code: str, expected: int) -> None:
    talk = Talk(
        tmp_path / "log", script(tmp_path, "ends", "signal.signal(signal.SIGINT, signal.SIG_DFL); " + code), mark
    )
    started, ended, gone = talk.hear(), talk.hear(), talk.hear()
    assert (started["event"], ended["event"], gone["event"]) == ("started", "exit", "gone")
    assert started["warden"] == talk.process.pid
    assert started["start_time"] > 0
    assert (ended["pid"], ended["code"]) == (started["pid"], expected)
    assert abs(ended["t"] - time.time()) < 50
    assert gone["leftovers"] == 0
    talk.close()
    assert talk.process.returncode == 0


def test_signals_and_their_mask_are_as_a_shell_would_give_them(tmp_path: Path, mark: str) -> None:
    code = 'print([l.split()[1] for l in open("/proc/self/status") if l[:6] in ("SigBlk", "SigIgn")], flush=True)'
    talk = Talk(tmp_path / "log", [sys.executable, "-S", "-c", code], mark)
    talk.close()
    blocked, ignored = ast.literal_eval((tmp_path / "log").read_text())
    assert int(blocked, 16) == 0
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25) at its start
    assert int(ignored, 16) & ~(1 << 12 | 1 << 24) == 0


def test_a_command_that_cannot_be_started_is_reported(tmp_path: Path, mark: str) -> None:
    plain = tmp_path / "not-executable"
    plain.write_text("#!/bin/sh\n")
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF\0\0")
    broken.chmod(0o755)
    for argv, options, reason in (
        (["no-such-command-at-all"], (), "No such file or directory"),
        ([str(plain)], (), "Permission denied"),
        ([str(broken)], (), "Exec format error"),
        ([sys.executable], ("--cwd", str(tmp_path / "nowhere")), "nowhere"),
    ):
        talk = Talk(tmp_path / "log", argv, mark, options=options)
        event = talk.hear()
        assert event["event"] == "error"
        assert argv[0] in event["message"]
        assert reason in event["message"]
        talk.close()
        assert talk.process.returncode == 1


def test_stdout_and_stderr_are_one_log_in_order_and_it_is_appended_to(tmp_path: Path, mark: str) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "for i in range(50): os.write(1 + i % 2, b'%d\\n' % i)\nprint(sys.stdin.read() == '')"
    talk = Talk(log, script(tmp_path, "talks", code), mark)
    talk.close()
    assert log.read_text().split() == ["before", *map(str, range(50)), "True"]


DRAINS = """
import threading
worker = child('''
signal.signal(signal.SIGTERM, lambda *a: (print("worker got TERM", flush=True), sys.exit(1)))
print("up", flush=True)
sys.stdin.read()
print("worker drained", flush=True)
''', stdin=subprocess.PIPE, start_new_session=True)
def drain(*_):
    time.sleep(0.5)
    worker.stdin.close()
    worker.wait()
    print("main drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
while True: time.sleep(1)
"""


def test_an_ordinary_stop_lets_the_main_process_drain_its_children(tmp_path: Path, mark: str) -> None:
    talk = Talk(tmp_path / "log", script(tmp_path, "drains", DRAINS), mark)
    talk.wait_up()
    talk.say("TERM 30")
    assert [talk.hear()["event"] for _ in range(2)] == ["started", "exit"]
    assert talk.hear()["leftovers"] == 0
    assert (tmp_path / "log").read_text().splitlines() == ["up", "worker drained", "main drained"]
    talk.close()


def test_orphans_of_a_main_process_that_ends_at_once_get_term_and_then_kill(tmp_path: Path, mark: str) -> None:
    code = """
child('signal.signal(signal.SIGTERM, lambda *a: (print("orphan got TERM", flush=True), sys.exit(0)))\\n' + SLEEP)
child(PROOF + SLEEP, start_new_session=True)
time.sleep(0.5); print("up", flush=True); time.sleep(600)"""
    talk = Talk(tmp_path / "log", script(tmp_path, "boots", code), mark)
    talk.wait_up()
    talk.say("TERM 30")
    began = time.monotonic()
    assert talk.hear()["event"] == "started"
    assert talk.hear()["code"] == -15
    assert talk.hear()["leftovers"] == 1
    assert 1.5 < time.monotonic() - began <= LAW_S
    assert "orphan got TERM" in (tmp_path / "log").read_text()
    talk.process.wait(50)  # it said "gone" with its last breath
    assert not marked(mark)
    talk.close()


def test_a_server_that_dies_by_itself_takes_its_orphans_along(tmp_path: Path, mark: str) -> None:
    code = "child(PROOF + SLEEP, start_new_session=True); child(SLEEP); time.sleep(0.5); sys.exit(7)"
    talk = Talk(tmp_path / "log", script(tmp_path, "dies", code), mark)
    assert talk.hear()["event"] == "started"
    assert talk.hear()["code"] == 7
    assert talk.hear() == {"event": "gone", "leftovers": 1, "t": pytest.approx(time.time(), abs=50)}
    talk.process.wait(50)  # it said "gone" with its last breath
    assert not marked(mark)
    talk.close()


def test_a_term_proof_main_process_is_killed_after_the_grace_and_at_once_when_told(tmp_path: Path, mark: str) -> None:
    for order, least, most in (("TERM 1", 0.9, 4.0), ("KILL", 0.0, 2.0)):
        talk = Talk(tmp_path / f"log {order}", server(tmp_path, "term-proof"), mark)
        talk.wait_up()
        wait_until(lambda: len(marked(mark)) >= 7)  # the warden, the server, five below it
        began = time.monotonic()
        talk.say(order)
        assert talk.hear()["event"] == "started"
        assert talk.hear()["code"] == -9
        assert talk.hear()["leftovers"] == 6
        assert least <= time.monotonic() - began <= most
        talk.close()


def test_the_holders_death_cuts_a_long_grace_short(tmp_path: Path, mark: str) -> None:
    talk = Talk(tmp_path / "log", server(tmp_path, "term-proof"), mark)
    talk.wait_up()
    talk.say("TERM 600")
    time.sleep(0.2)
    talk.hang_up()
    assert seconds_until_gone(mark) <= LAW_S
    talk.close()


def test_it_runs_as_text_and_needs_nothing_newer_than_python_3_8(tmp_path: Path, mark: str) -> None:
    ast.parse(Path(warden.__file__).read_text(), feature_version=(3, 8))
    talk = Talk(tmp_path / "log", server(tmp_path, "plain"), mark, text=True)
    talk.wait_up()
    talk.hang_up()
    assert seconds_until_gone(mark) <= LAW_S
    talk.close()


def test_an_idle_warden_costs_next_to_nothing(tmp_path: Path, mark: str) -> None:
    talk = Talk(tmp_path / "log", server(tmp_path, "plain"), mark)
    talk.wait_up()

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{talk.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(3)
    assert ticks() - before <= 0.1 * 3 * os.sysconf("SC_CLK_TCK")  # ten times the usual 1 %
    talk.say("KILL")
    talk.close()


def test_it_reacts_at_once(tmp_path: Path, mark: str) -> None:
    talk = Talk(tmp_path / "log", server(tmp_path, "plain"), mark)
    talk.wait_up()
    began = time.monotonic()
    talk.say("KILL")
    while talk.hear()["event"] != "gone":
        pass
    assert time.monotonic() - began < 0.5  # ten times the usual 0.05
    talk.close()


def test_a_signal_never_reaches_another_process_with_the_same_pid() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        now = warden.read_proc(sleeper.pid)
        assert now is not None
        assert not warden.send_signal(now._replace(start=now.start - 1), signal.SIGKILL)
        warden.kill_groups([now._replace(start=now.start - 1)], set())
        assert sleeper.poll() is None
        assert warden.send_signal(now, signal.SIGKILL)
        assert sleeper.wait() == -9
        assert not warden.send_signal(now, signal.SIGKILL)
