"""A production unit is stopped for the first run that needs its GPUs and started after the last one, whoever is killed.

Real processes and real commands, which append words to a file, throughout.
"""

from __future__ import annotations

import ast
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.lease import keeper
from pytest_gpuguard.lease.dirs import LockDirError, usable
from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.production import Production, ProductionError
from tests import trees
from tests.needs import need
from tests.trees import LAW_S, ROOT, marked, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks and keepers are for Linux only")

RUN = """
import json, os, resource, signal, subprocess, sys
from pathlib import Path
from pytest_gpuguard.lease.production import Production, ProductionError
given = json.loads(sys.argv[1])
if given.get("no_disk"):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
production = Production(given["vacate"], given["restore"], Path(given["log"]), timeout_s=given["timeout_s"],
                        directory=Path(given["folder"]), test="a.py::test_it")
def say(what):
    print(json.dumps(what), flush=True)
def vacate():
    try:
        production.vacate()
        say("vacated")
    except ProductionError as error:
        say(["failed", str(error), production.fds])
    except KeyboardInterrupt:
        say("interrupted")
vacate()
while line := sys.stdin.readline():
    word, *more = line.split()
    try:
        if word == "vacate":
            vacate()
        elif word == "heir":
            say(subprocess.Popen(["sleep", "600"], pass_fds=production.fds, start_new_session=True).pid)
        elif word == "boot":
            from pytest_gpuguard.engines.process import ServerProcess
            server = ServerProcess.start(more, None, None, given["log"] + ".server", production.fds)
            say(server.pid)
        elif word == "restore":
            say(production.restore(float(more[0])))
    except KeyboardInterrupt:
        say("interrupted")
"""


class Unit:
    """A make-believe production unit, the runs that use its GPUs, and the words that its commands leave."""

    def __init__(self, tmp_path: Path, mark: str) -> None:
        self.folder = tmp_path / "locks"
        self.folder.mkdir()
        self.words_file = tmp_path / "words"
        self.log = tmp_path / "hooks.log"
        self.mark = mark
        self.runs: list[Run] = []

    def command(self, word: str, then: str = "true") -> list[str]:
        return ["sh", "-c", f"echo {word} >> {shlex.quote(str(self.words_file))}; {then}"]

    def given(self, **changed: Any) -> dict[str, Any]:
        plain = {"vacate": self.command("vacate"), "restore": self.command("restore"), "timeout_s": 60}
        return {**plain, "log": str(self.log), "folder": str(self.folder), **changed}

    def run(self, **changed: Any) -> Run:
        run = Run(self.given(**changed), self.mark)
        self.runs.append(run)
        return run

    def here(self, **changed: Any) -> Production:
        """The unit as this very process sees it."""
        given = self.given(**changed)
        folder, log = Path(given["folder"]), Path(given["log"])
        return Production(given["vacate"], given["restore"], log, timeout_s=given["timeout_s"], directory=folder)

    @property
    def words(self) -> list[str]:
        return self.words_file.read_text().split() if self.words_file.exists() else []

    def keepers(self) -> list[int]:
        return sorted(marked(self.mark, f"{keeper.ENV}="))

    def kill_keeper(self) -> None:
        (pid,) = self.keepers()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: keeper.start_time(pid) is None)  # with all its files closed

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "production.lock").read_bytes()))

    def wait_words(self, *words: str, limit: float = 50.0) -> None:
        wait_until(lambda: self.words == list(words), limit)


class Run:
    """A process like pytest that uses the unit's GPUs."""

    def __init__(self, given: dict[str, Any], mark: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, json.dumps(given)],
            env={**os.environ, trees.MARK: mark, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> Any:
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    unit = Unit(tmp_path, trees.new_mark())
    yield unit
    for run in unit.runs:
        run.close()
    trees.sweep(unit.mark)


@pytest.fixture
def ours(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> Unit:
    """The unit with this process as a run: what it starts carries the mark too."""
    monkeypatch.setenv(trees.MARK, unit.mark)
    return unit


# ------------------------------------------------------------------------------------------------------------ counting


def test_three_runs_vacate_once_and_the_last_one_restores_once(unit: Unit) -> None:
    runs = [unit.run() for _ in range(3)]
    assert [run.hear() for run in runs] == ["vacated"] * 3
    assert unit.words == ["vacate"]
    assert runs[0].ask("vacate") == "vacated"
    for run in runs[:2]:
        began = time.monotonic()
        assert run.ask("restore 50") is None
        assert time.monotonic() - began < 10  # it does not wait for the others
    time.sleep(1)
    assert unit.words == ["vacate"]
    assert runs[2].ask("restore 50") is None
    wait_until(lambda: not unit.keepers())
    assert unit.words == ["vacate", "restore"]
    assert unit.record()["vacated"] == []


def test_a_run_may_vacate_again_after_it_has_restored(ours: Unit) -> None:
    production = ours.here()
    assert production.fds == ()
    assert production.restore(0) is None
    for times in (1, 2):
        production.vacate()
        production.vacate()
        assert len(production.fds) == 2
        assert not any(map(os.get_inheritable, production.fds))
        assert production.restore(50) is None
        assert production.restore(50) is None
        assert production.fds == ()
        assert ours.words == ["vacate", "restore"] * times
    assert not ours.keepers()


def test_a_run_that_arrives_while_the_unit_is_started_waits_and_stops_it_again(unit: Unit) -> None:
    slow = unit.command("restore-begins", f"sleep 1.5; echo restore-ends >> {unit.words_file}")
    first = unit.run(restore=slow)
    assert first.hear() == "vacated"
    first.kill()
    unit.wait_words("vacate", "restore-begins")
    second = unit.run(restore=slow)
    assert second.hear() == "vacated"
    assert unit.words == ["vacate", "restore-begins", "restore-ends", "vacate"]
    assert second.ask("restore 50") is None


def test_the_unit_is_not_started_while_somebody_else_is_in_the_door(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    door = Locks(directory=unit.folder).attempt(keeper.DOOR)
    assert door is not None
    run.kill()
    time.sleep(1)
    assert unit.words == ["vacate"]
    os.close(door)
    unit.wait_words("vacate", "restore", limit=LAW_S)


def test_a_run_that_arrives_while_the_unit_is_stopped_waits_until_it_is(unit: Unit) -> None:
    slow = unit.command("vacate-begins", f"sleep 1.5; echo vacate-ends >> {unit.words_file}")
    first = unit.run(vacate=slow)
    unit.wait_words("vacate-begins")
    second = unit.run(vacate=slow)
    assert second.hear() == "vacated"
    assert unit.words == ["vacate-begins", "vacate-ends"]
    assert first.hear() == "vacated"


def test_runs_with_other_commands_have_another_unit_and_each_is_restored_after_the_last_run(unit: Unit) -> None:
    one = unit.run()
    two = unit.run(vacate=unit.command("vacate-b"), restore=unit.command("restore-b"))
    assert sorted([one.hear(), two.hear()]) == ["vacated"] * 2
    assert sorted(unit.words) == ["vacate", "vacate-b"]
    assert one.ask("restore 50") is None
    time.sleep(0.5)
    assert len(unit.words) == 2
    two.kill()
    wait_until(lambda: sorted(unit.words) == ["restore", "restore-b", "vacate", "vacate-b"])


# ------------------------------------------------------------------------------------------------------------- kill -9


def test_kill_9_of_the_run_restores_within_five_seconds(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    assert len(unit.keepers()) == 1
    run.kill()
    unit.wait_words("vacate", "restore", limit=LAW_S)
    wait_until(lambda: not unit.keepers())


def test_after_kill_9_of_the_run_its_heir_still_holds_the_unit(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    heir = run.ask("heir")
    run.kill()
    time.sleep(1.5)
    assert unit.words == ["vacate"]
    os.kill(heir, signal.SIGKILL)
    unit.wait_words("vacate", "restore", limit=LAW_S)


def test_after_kill_9_of_the_run_the_unit_comes_back_when_its_servers_are_gone(unit: Unit, tmp_path: Path) -> None:
    said = tmp_path / "hooks.log.server"
    proof = trees.server(tmp_path, "term-proof")
    look = f"ls /proc/$(cat {tmp_path}/pid) >/dev/null 2>&1 && echo too-early >> {unit.words_file}; true"
    run = unit.run(restore=unit.command("restore", look))
    assert run.hear() == "vacated"
    (tmp_path / "pid").write_text(str(run.ask("boot " + " ".join(proof))))
    wait_until(lambda: said.exists() and "up" in said.read_text())
    run.kill()
    wait_until(lambda: "restore" in unit.words, limit=2 * LAW_S)
    wait_until(lambda: not unit.keepers())
    assert unit.words == ["vacate", "restore"]


def test_kill_9_of_the_run_while_the_unit_is_stopped_restores_when_that_is_done(unit: Unit) -> None:
    unit.run(vacate=unit.command("begin", f"sleep 1; echo end >> {unit.words_file}"))
    unit.wait_words("begin")
    unit.runs[0].kill()
    unit.wait_words("begin", "end", "restore")


def test_an_interrupt_while_the_unit_is_stopped_restores_it(unit: Unit) -> None:
    run = unit.run(vacate=unit.command("begin", f"sleep 1; echo end >> {unit.words_file}"))
    unit.wait_words("begin")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.hear() == "interrupted"
    assert run.ask("vacate") == "vacated"  # the next test of this run needs it
    assert unit.words == ["begin", "end", "restore", "begin", "end"]
    assert run.ask("restore 50") is None
    assert unit.words == ["begin", "end", "restore", "begin", "end", "restore"]


def test_interrupts_of_the_terminal_do_not_reach_the_keeper(unit: Unit) -> None:
    run = unit.run(restore=unit.command("begin", f"sleep 1; echo end >> {unit.words_file}"))
    assert run.hear() == "vacated"
    (pid,) = unit.keepers()
    assert os.getsid(pid) == pid
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGTSTP):
        os.kill(pid, number)
    run.tell("restore 50")
    unit.wait_words("vacate", "begin")
    os.killpg(run.process.pid, signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(pid, number)
    assert run.hear() == "interrupted"
    unit.wait_words("vacate", "begin", "end")
    assert run.ask("restore 50") is None


def test_a_killed_keeper_is_replaced_at_the_end_of_the_run(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    unit.kill_keeper()
    assert run.ask("restore 50") is None
    assert unit.words == ["vacate", "restore"]


def test_a_killed_keeper_is_replaced_at_the_next_boot_too(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    unit.kill_keeper()
    assert run.ask("vacate") == "vacated"
    wait_until(lambda: len(unit.keepers()) == 1)
    run.kill()
    unit.wait_words("vacate", "restore", limit=LAW_S)


def test_a_killed_keeper_does_not_let_another_run_start_the_unit(unit: Unit) -> None:
    first = unit.run()
    assert first.hear() == "vacated"
    unit.kill_keeper()
    second = unit.run()
    assert second.hear() == "vacated"
    second.kill()
    time.sleep(1)
    assert unit.words == ["vacate"]
    assert first.ask("restore 50") is None
    wait_until(lambda: not unit.keepers())
    assert unit.words == ["vacate", "restore"]


def test_a_keeper_killed_while_it_stops_the_unit_fails_the_vacating_and_the_unit_comes_back(unit: Unit) -> None:
    run = unit.run(vacate=unit.command("begin", f"sleep 1; echo end >> {unit.words_file}"))
    unit.wait_words("begin")
    unit.kill_keeper()
    _, said, fds = run.hear()
    assert "was killed while it ran `sh -c" in said
    assert fds == []
    assert run.ask("restore 50") is None
    assert unit.words == ["begin", "end", "restore"]


def test_a_keeper_killed_while_it_starts_the_unit_is_replaced(unit: Unit) -> None:
    run = unit.run(restore=unit.command("begin", f"sleep 1; echo end >> {unit.words_file}"))
    assert run.hear() == "vacated"
    run.tell("restore 50")
    unit.wait_words("vacate", "begin")
    unit.kill_keeper()
    assert run.hear() is None
    assert unit.words == ["vacate", "begin", "end", "begin", "end"]


def test_when_run_and_keeper_are_killed_the_next_run_restores(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    unit.kill_keeper()
    run.kill()
    time.sleep(0.5)
    assert unit.words == ["vacate"]
    assert len(unit.record()["vacated"]) == 1
    following = unit.run()
    assert following.hear() == "vacated"
    assert unit.words == ["vacate", "vacate"]
    assert following.ask("restore 50") is None
    assert unit.words == ["vacate", "vacate", "restore"]


def test_a_keeper_that_is_killed_again_and_again_is_told(ours: Unit) -> None:
    production = ours.here()
    production.vacate()
    for _ in range(2):
        ours.kill_keeper()
        production.vacate()
    ours.kill_keeper()
    said = production.restore(50)
    assert said is not None
    assert "NOT RESTORED: its keeper was killed 3 times. Run `sh -c" in said
    assert production.restore(50) == said


# -------------------------------------------------------------------------------------------------- commands that fail


def test_a_vacate_that_fails_is_told_with_its_last_lines_and_the_unit_is_started_at_once(ours: Unit) -> None:
    production = ours.here(vacate=ours.command("vacate", "echo no such unit >&2; exit 5"))
    with pytest.raises(ProductionError) as caught:
        production.vacate()
    said = str(caught.value)
    assert re.search(r"could not be vacated: `sh -c .*` ended with exit status 5\n  no such unit\n", said)
    assert "The unit was started again" in said
    assert "gpuguard_vacate" in said
    assert str(ours.log) in said
    assert ours.words == ["vacate", "restore"]
    assert production.fds == ()
    other = ours.here(vacate=["true"])
    other.vacate()  # the lock is free at once, not only when the run that failed has ended
    assert other.restore(50) is None
    assert ours.words == ["vacate", "restore", "restore"]
    with pytest.raises(ProductionError, match="no such unit"):
        production.vacate()
    assert ours.words == ["vacate", "restore", "restore"], (
        "it must not be stopped and started for every test of the run"
    )
    assert production.restore(50) is None
    assert Locks(directory=ours.folder).holders(["production", keeper.DOOR]) == ()
    assert not ours.keepers()


def test_a_vacate_that_hangs_is_ended_with_its_group_and_nothing_else(ours: Unit, tmp_path: Path) -> None:
    proof = "trap '' TERM; setsid sleep 600 & echo $! > other; sleep 600 & echo $! > same; wait; wait; wait"
    script = f"cd {tmp_path}; {proof}"
    production = ours.here(vacate=ours.command("vacate", script), timeout_s=1)
    began = time.monotonic()
    with pytest.raises(ProductionError, match="did not end within 1 s and was ended"):
        production.vacate()
    assert 1 <= time.monotonic() - began < 20
    assert ours.words == ["vacate", "restore"]
    assert keeper.start_time(int((tmp_path / "same").read_text())) is None
    assert keeper.start_time(int((tmp_path / "other").read_text())) is not None
    assert production.restore(50) is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no-such-command-at-all"], "`no-such-command-at-all` cannot be started: No such file or directory"),
        (["/"], "`/` cannot be started: Permission denied"),
        (["a\0b"], "cannot be started: embedded null byte"),
        (["sh", "-c", "kill -9 $$"], "was ended by signal 9"),
    ],
)
def test_a_vacate_that_cannot_run_is_told(ours: Unit, argv: list[str], said: str) -> None:
    production = ours.here(vacate=argv)
    with pytest.raises(ProductionError, match=re.escape(said)):
        production.vacate()
    assert ours.words == ["restore"]


def test_a_vacate_that_fails_beside_another_run_does_not_start_the_unit_under_it(unit: Unit) -> None:
    first = unit.run()
    assert first.hear() == "vacated"
    second = unit.run(vacate=unit.command("bad", "exit 1"), restore=unit.command("restore-b"))
    _, said, _ = second.hear()
    assert "started again when nobody uses its GPUs any more" in said
    assert second.ask("restore 50") is None
    time.sleep(0.5)
    assert unit.words == ["vacate", "bad"]
    assert first.ask("restore 50") is None
    wait_until(lambda: sorted(unit.words) == ["bad", "restore", "restore-b", "vacate"])


def test_a_restore_that_fails_is_tried_twice_and_told_and_left_to_the_next_run(ours: Unit) -> None:
    production = ours.here(restore=ours.command("bad", f"echo no GPU; test -e {ours.log}.cured"))
    production.vacate()
    began = time.monotonic()
    said = production.restore(50)
    assert time.monotonic() - began >= keeper.RETRY_S
    assert said is not None
    assert re.match(
        r"THE PRODUCTION UNIT WAS NOT RESTORED: `sh -c .*` ended with exit status 1\n  no GPU\nRun `sh", said
    )
    assert str(ours.log) in said
    assert production.restore(50) == said
    assert ours.words == ["vacate", "bad", "bad"]
    assert len(ours.record()["vacated"]) == 1
    assert ours.log.read_text().count("ended with exit status 1") == 2
    Path(f"{ours.log}.cured").touch()
    production.vacate()
    assert production.restore(50) is None
    assert ours.words == ["vacate", "bad", "bad", "vacate", "bad"]


def test_a_restore_that_fails_once_is_no_problem(ours: Unit, tmp_path: Path) -> None:
    production = ours.here(restore=ours.command("restore", f"mkdir {tmp_path}/a || mkdir {tmp_path}/b"))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    production.vacate()
    assert production.restore(0) is not None  # it is under way
    wait_until(lambda: "ended with exit status 1" in ours.log.read_text())
    (tmp_path / "a").rmdir()
    assert production.restore(50) is None
    assert ours.words == ["vacate", "restore", "restore"]


def test_a_failed_vacate_whose_restore_fails_says_that_the_unit_may_be_down(ours: Unit) -> None:
    production = ours.here(vacate=ours.command("vacate", "exit 1"), restore=ours.command("restore", "exit 2"))
    with pytest.raises(ProductionError, match=r"IT MAY BE DOWN: .* ended with exit status 2"):
        production.vacate()
    assert "NOT RESTORED" in str(production.restore(50))


def test_what_a_command_leaves_running_is_neither_waited_for_nor_ended(ours: Unit, tmp_path: Path) -> None:
    production = ours.here(restore=ours.command("restore", f"sleep 600 & echo $! > {tmp_path}/daemon"))
    production.vacate()
    began = time.monotonic()
    assert production.restore(50) is None
    assert time.monotonic() - began < 20
    assert keeper.start_time(int((tmp_path / "daemon").read_text())) is not None


def test_secrets_of_a_command_do_not_reach_the_message(ours: Unit) -> None:
    production = ours.here(vacate=ours.command("vacate", "echo password=hunter22; exit 1; curl -H 'Bearer abcdefgh'"))
    with pytest.raises(ProductionError) as caught:
        production.vacate()
    assert "hunter22" not in str(caught.value)
    assert "abcdefgh" not in str(caught.value)


def test_commands_run_as_a_shell_would_start_them(ours: Unit, tmp_path: Path) -> None:
    code = (
        "import os, sys; print([l.split()[1] for l in open('/proc/self/status') if l[:6] in ('SigBlk', 'SigIgn')], "
        "sorted(os.listdir('/proc/self/fd')), os.getcwd(), sys.stdin.read(), '" + keeper.ENV + "' in os.environ)"
    )
    production = ours.here(vacate=[sys.executable, "-S", "-c", code])
    production.vacate()
    assert production.restore(50) is None
    line = next(line for line in ours.log.read_text().splitlines() if line.startswith("["))
    blocked, ignored = ast.literal_eval(line[: line.index("]") + 1])
    assert int(blocked, 16) == 0
    assert int(ignored, 16) & ~(1 << 12 | 1 << 24) == 0  # Python itself ignores SIGPIPE and SIGXFSZ
    assert line.endswith(f"['0', '1', '2', '3'] {os.getcwd()}  False")  # 3 lists the others


# ------------------------------------------------------------------------------------------------------- rough grounds


def test_the_keeper_holds_nothing_of_the_run_but_its_locks(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    (pid,) = unit.keepers()
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 6)
    found = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert found.pop(0) == found.pop(2) == "/dev/null"
    assert found.pop(1).startswith("pipe:")
    assert sorted(name.partition("[")[0] for name in found.values()) == sorted(
        [str(unit.folder / "production.lock"), str(unit.log), "pipe:"]
    )
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_the_keeper_closes_what_it_inherits_by_mistake(ours: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    start: Any = subprocess.Popen
    read, write = os.pipe()

    def careless(*args: Any, pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = start(*args, pass_fds=[*pass_fds, write], **options)
        return process

    production = ours.here()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", careless)
        production.vacate()
    os.close(write)
    assert os.read(read, 1) == b""  # else it waits for ever: the keeper lives as long as we do
    os.close(read)
    assert production.restore(50) is None


def test_restore_names_what_still_holds_the_unit_and_may_be_called_again(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    heir = run.ask("heir")
    began = time.monotonic()
    assert f"still there (pid {heir})" in run.ask("restore 0.5")
    assert time.monotonic() - began < 10
    os.kill(heir, signal.SIGKILL)
    assert run.ask("restore 50") is None
    assert unit.words == ["vacate", "restore"]


@pytest.mark.parametrize("lost", ["emptied", "of another boot", "made clean by a stranger"])
def test_a_record_that_is_lost_does_not_lose_the_restore(unit: Unit, lost: str) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    file = unit.folder / "production.lock"
    if lost == "emptied":
        os.truncate(file, 0)
    elif lost == "of another boot":
        file.write_text(json.dumps({**unit.record(), "boot": "another", "vacated": []}))
    else:
        file.write_text("{}")
    assert run.ask("restore 50") is None
    assert unit.words == ["vacate", "restore"]


def test_a_record_of_another_boot_is_void(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    (unit.folder / "production.lock").write_text(json.dumps({**unit.record(), "boot": "another"}))
    second = unit.run()  # beside the first, by the lock; but what the file says is of no use
    assert second.hear() == "vacated"
    assert unit.words == ["vacate", "vacate"]


def test_a_lock_folder_that_vanishes_does_not_lose_the_restore(unit: Unit) -> None:
    run = unit.run()
    assert run.hear() == "vacated"
    shutil.rmtree(unit.folder)
    assert run.ask("restore 50") is None
    assert unit.words == ["vacate", "restore"]


def test_after_the_lock_folder_was_emptied_the_unit_is_not_started_under_a_later_run(unit: Unit) -> None:
    first = unit.run()
    assert first.hear() == "vacated"
    for file in unit.folder.iterdir():
        file.unlink()
    second = unit.run()
    assert second.hear() == "vacated"
    first.kill()
    time.sleep(1)
    assert unit.words == ["vacate", "vacate"]
    assert second.ask("restore 50") is None
    wait_until(lambda: not unit.keepers())
    assert set(unit.words[2:]) == {"restore"}


def test_a_full_disk_does_not_keep_the_unit_from_being_restored(unit: Unit, tmp_path: Path) -> None:
    given = {name: ["mkdir", str(tmp_path / name)] for name in ("vacate", "restore")}
    run = unit.run(**given, no_disk=True)
    assert run.hear() == "vacated"
    assert (tmp_path / "vacate").is_dir()
    assert (unit.folder / "production.lock").read_bytes() == b""
    run.kill()
    wait_until((tmp_path / "restore").is_dir, LAW_S)


def test_a_full_disk_does_not_hide_what_a_failing_command_printed(ours: Unit) -> None:
    full = ours.here(vacate=ours.command("vacate", "echo out of luck || exit 0; exit 1"), log="/dev/full")
    with pytest.raises(ProductionError, match=r"\n  out of luck\n"):
        full.vacate()
    assert full.restore(50) is None


@pytest.mark.parametrize("shape", ["a folder", "below a file"])
def test_a_log_that_cannot_be_written_is_no_reason_not_to_restore(ours: Unit, tmp_path: Path, shape: str) -> None:
    (tmp_path / "file").touch()
    log = tmp_path if shape == "a folder" else tmp_path / "file" / "log"
    production = ours.here(log=str(log))
    production.vacate()
    assert production.restore(50) is None
    assert ours.words == ["vacate", "restore"]
    failing = ours.here(log=str(log), vacate=ours.command("vacate", "echo out of luck; exit 1"))
    with pytest.raises(ProductionError, match=r"\n  out of luck\n"):
        failing.vacate()


def test_the_log_tells_when_what_was_run_and_is_for_its_owner_only(ours: Unit, tmp_path: Path) -> None:
    production = ours.here(log=str(tmp_path / "new" / "log"), vacate=["echo", "stopping", "it"], restore=["true"])
    production.vacate()
    assert production.restore(50) is None
    log = tmp_path / "new" / "log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    lines = log.read_text().splitlines()
    head = (
        rf"=== \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{{4}} vacate: echo stopping it \(keeper \d+ of pid {os.getpid()}\)"
    )
    assert re.fullmatch(head, lines[0])
    assert lines[1] == "stopping it"
    assert [re.sub(r"=== \S+ \S+ (.*) \(keeper.*", r"\1", line) for line in lines[2:]] == [
        "vacate: done",
        "restore: true",
        "restore: done",
    ]


def test_a_planted_lock_file_is_refused(ours: Unit, tmp_path: Path) -> None:
    (ours.folder / "production.lock").symlink_to(tmp_path / "victim")
    production = ours.here()
    with pytest.raises(LockDirError, match="cannot be opened"):
        production.vacate()
    assert not (tmp_path / "victim").exists()
    assert production.restore(50) is None
    assert ours.words == []
    assert Locks(directory=ours.folder).holders([keeper.DOOR]) == ()


def test_a_keeper_that_cannot_be_started_is_told_and_stops_nothing(ours: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    production = ours.here()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(ProductionError, match=r"cannot be started: .*/no/such/python"):
            production.vacate()
    assert production.restore(50) is None
    assert ours.words == []
    production.vacate()
    assert production.restore(50) is None


def test_lock_files_are_open_to_every_user(ours: Unit) -> None:
    umask = os.umask(0o077)
    try:
        production = ours.here()
        production.vacate()
        (ours.folder / f"{keeper.DOOR}.lock").unlink()  # the keeper makes it anew
        assert production.restore(50) is None
    finally:
        os.umask(umask)
    for name in ("production", keeper.DOOR):
        assert stat.S_IMODE((ours.folder / f"{name}.lock").stat().st_mode) == 0o666


SECOND_USER = """
import sys
from pathlib import Path
from pytest_gpuguard.lease.production import Production
folder = Path(sys.argv[1])
words = ["sh", "-c", f"echo $0-$(id -un) >> {folder}/words"]
production = Production([*words, "vacate"], [*words, "restore"], folder / "nobody.log", timeout_s=60, directory=folder)
production.vacate()
print("vacated", flush=True)
sys.stdin.readline()
print(production.restore(50), flush=True)
"""


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    need(os.geteuid() == 0, "only root can become a second Unix user")
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        Path(above).chmod(0o755)
        code = Path(above) / "code"
        shutil.copytree(ROOT / "pytest_gpuguard", code / "pytest_gpuguard")
        for path in (code, *code.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield usable(Path(above) / "locks")


def as_nobody(folder: Path) -> subprocess.Popen[str]:
    """A second user's run. Its Python must be one that it can reach."""

    def start(argv: Sequence[str]) -> subprocess.Popen[str]:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder.parent / "code"), "PYTHONDONTWRITEBYTECODE": "1"}
        pipe = subprocess.PIPE
        who = pwd.getpwnam("nobody")
        return subprocess.Popen(
            argv,
            text=True,
            stdin=pipe,
            stdout=pipe,
            env=env,
            cwd="/",
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=[],
        )

    for program in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        try:
            probe = start([program, "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 10))"])
        except OSError:
            continue
        probe.communicate()
        if probe.returncode == 0:
            return start([program, "-S", "-c", SECOND_USER, str(folder)])
    need(False, "the user nobody can run no Python ≥ 3.10 here")
    raise AssertionError


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
def test_a_second_unix_user_shares_the_vacated_unit(
    shared_folder: Path, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if read_only:  # then each user vacates, because nobody can write down that it is done, and each restores
        (shared_folder / "production.lock").touch()
        (shared_folder / "production.lock").chmod(0o444)
    words = shared_folder / "words"
    words.touch()
    words.chmod(0o666)
    other = as_nobody(shared_folder)
    assert other.stdout is not None
    assert other.stdout.readline() == "vacated\n"
    command = ["sh", "-c", f"echo $0-$(id -un) >> {shared_folder}/words"]
    mine = Production(
        [*command, "vacate"], [*command, "restore"], shared_folder / "log", timeout_s=60, directory=shared_folder
    )
    mine.vacate()
    assert words.read_text().split() == ["vacate-nobody", *(["vacate-root"] if read_only else [])]
    assert other.communicate("end\n")[0] == "None\n"
    time.sleep(0.5)
    assert "restore" not in words.read_text()
    assert mine.restore(50) is None
    if read_only:
        wait_until(lambda: words.read_text().count("restore") == 2)
        assert {"restore-nobody", "restore-root"} <= set(words.read_text().split())
    else:
        wait_until(lambda: words.read_text().count("restore") == 1)
        time.sleep(0.5)
        assert words.read_text().count("restore") == 1


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_settings_are_words_and_one_needs_the_other(pytester: pytest.Pytester) -> None:
    from pytest_gpuguard.options import read_config

    def read(*lines: str) -> Any:
        pytester.makeini("\n".join(["[pytest]", *lines]))
        return read_config(pytester.parseconfig())

    stop, start = "gpuguard_vacate = sudo systemctl stop a.service", "gpuguard_restore = sh -c 'a | b'"
    plain, both = read(), read(stop, start, "gpuguard_hook_timeout = 2m")
    assert (plain.vacate, plain.restore, plain.hook_timeout_s) == ((), (), 600)
    assert both.vacate == ("sudo", "systemctl", "stop", "a.service")
    assert both.restore == ("sh", "-c", "a | b")
    assert both.hook_timeout_s == 120
    for lines, said in (
        ([stop], "gpuguard_restore: .* so add the command that starts it again, such as gpuguard_restore = "),
        ([start], "gpuguard_vacate: .* so add the command that stops it before, such as gpuguard_vacate = "),
        ([stop, "gpuguard_restore = sh -c 'a"], "gpuguard_restore: .* is no command: No closing quotation"),
        ([stop, start, "gpuguard_hook_timeout = soon"], "hook-timeout: 'soon' is not a duration"),
    ):
        with pytest.raises(pytest.UsageError, match=said):
            read(*lines)


def test_a_production_unit_needs_both_commands(tmp_path: Path) -> None:
    for vacate, restore in (([], ["true"]), (["true"], [])):
        with pytest.raises(ValueError, match="needs both commands"):
            Production(vacate, restore, tmp_path / "log", timeout_s=1)
