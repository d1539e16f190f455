"""``gpuguard explain --follow``: a log that grows, is cut, is replaced, and ends."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from pytest_gpuguard.logs import Follower, Reading, _Text

from .boot_logs import F7, FAILED, KIMI, NO_ROOM, READY, STAMP, dies, loading
from .gpuguard_command import Running, called, on_a_terminal, ran

Capture = pytest.CaptureFixture[str]

BEGIN, *_ = KIMI.splitlines(keepends=True)
REST = KIMI.removeprefix(BEGIN)
DEATH = dies(F7)
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n'


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text("")
    return path


def test_phases_are_told_as_they_come_and_a_failure_is_explained_and_ends_it(log: Path) -> None:
    with Running("explain", "--follow", log) as follower:
        append(log, BEGIN)
        assert follower.until("line ") == "line 1: args"
        append(log, REST)
        follower.until("line 2: weights")
        follower.until("line 10: kv_pool")
        append(log, DEATH)
        first = follower.until("oom.kv_pool")
        assert first == f"{log}: oom.kv_pool in phase kv_pool (sglang)"
        code, rest = follower.rest()
        assert code == 0
        assert any(line.startswith("  cure: --mem-fraction-static between 0.83 and 0.85") for line in rest)
        assert any(line.startswith("  after it: Received sigquit") for line in rest)  # what came after it counts too
        assert follower.error() == ""


def test_a_server_that_is_ready_is_told_once_and_followed_on(log: Path) -> None:
    append(log, READY)
    with Running("explain", "--follow", log) as follower:
        follower.until("line 11: ready")
        append(log, f"{STAMP}] a line of no meaning\n")
        append(log, dies("RuntimeError: CUDA error: an illegal memory access was encountered", ""))
        follower.until(": illegal_memory in phase serving")
        assert [line for line in follower.lines if line.endswith(": ready")] == ["line 11: ready"]
        assert follower.rest()[0] == 0


def test_ctrl_c_explains_all_that_was_read_and_is_no_failure(log: Path) -> None:
    """Also a traceback that the engine may still survive, and a line without its end."""
    append(log, loading([""], 94.0))
    with Running("explain", "--follow", log) as follower:
        follower.until("line 1: weights")
        append(
            log, 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nModuleNotFoundError: No mo'
        )
        append(log, "dule named 'deep_ep'")
        time.sleep(0.6)
        follower.process.send_signal(signal.SIGINT)
        code, rest = follower.rest()
        assert (code, follower.error()) == (0, "")
        assert "starting" not in rest[0]
        assert any("ModuleNotFoundError: No module named 'deep_ep'" in line for line in rest)


def test_ctrl_c_before_anything_was_written_is_no_failure(log: Path) -> None:
    with Running("explain", "--follow", log) as follower:
        deadline = time.monotonic() + 30
        while not any(one.path == str(log) for one in psutil.Process(follower.process.pid).open_files()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        follower.process.send_signal(signal.SIGINT)
        code, rest = follower.rest()
        assert (code, follower.error()) == (0, "")
        assert rest[0].startswith(f"{log}: starting")


def test_a_file_in_utf_16_is_followed_however_its_bytes_come(tmp_path: Path) -> None:
    """As PowerShell writes it: also its mark, and a character, may come in two parts."""
    data = ("\ufeff" + FAILED).encode("utf-16-le")
    for step in (1, 3, 997):
        parts = [b"", *(data[start : start + step] for start in range(0, len(data), step))]
        text = _Text("x")
        assert b"".join(map(text.feed, parts)) == FAILED.encode()
    log = tmp_path / "x.log"
    log.write_bytes(data[:1])
    with Running("explain", "--follow", log) as follower:
        time.sleep(0.5)
        with log.open("ab") as stream:
            stream.write(data[1:4001])
        follower.until("weights")
        with log.open("ab") as stream:
            stream.write(data[4001:])
        follower.until(f"{log}: oom.kv_pool in phase kv_pool (sglang)")
        assert follower.rest()[0] == 0


def test_a_file_that_is_cut_starts_afresh(log: Path) -> None:
    append(log, KIMI)
    with Running("explain", "--follow", log) as follower:
        follower.until("line 10: kv_pool")
        log.write_text(BEGIN)
        follower.until("line 1: args")
        append(log, loading([""], 61.0) + dies(NO_ROOM, ""))
        follower.until("oom.kv_pool")
        _, rest = follower.rest()
        assert any(line.split() == ["free", "before", "the", "weights", "61.00"] for line in rest)
        assert not any("94.00" in line for line in rest)


def test_a_file_that_is_replaced_is_read_to_its_end_and_the_new_one_from_its_start(log: Path, tmp_path: Path) -> None:
    append(log, BEGIN)
    with Running("explain", "--follow", log) as follower:
        follower.until("line 1: args")
        old = tmp_path / "server.log.1"
        log.rename(old)
        time.sleep(0.5)  # there is none for a while
        append(old, REST)
        follower.until("line 10: kv_pool")
        log.write_text(loading([""], 61.0))
        follower.until("line 1: weights")
        append(log, dies(NO_ROOM, ""))
        follower.until("oom.kv_pool")
        assert follower.rest()[0] == 0


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_failure_is_explained_also_when_the_next_server_already_writes(log: Path, tmp_path: Path, how: str) -> None:
    """As under a supervisor that starts the server again at once."""
    append(log, KIMI)
    with Running("explain", "--follow", "--json", log) as follower:
        follower.until('"phase": "kv_pool"')
        append(log, DEATH)
        follower.until("oom.kv_pool")  # it has been read, and is not quiet yet
        if how == "replaced":
            log.rename(tmp_path / "server.log.1")
        log.write_text(BEGIN)
        code, rest = follower.rest()
        assert code == 0
        assert [one for one in rest if json.loads(one)["outcome"] != "oom.kv_pool"] == []


def test_what_is_written_last_before_a_file_is_replaced_counts(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, KIMI)

    def rotate(seconds: float) -> None:
        monkeypatch.undo()
        append(log, DEATH)
        log.rename(tmp_path / "server.log.1")
        log.write_text(BEGIN)

    monkeypatch.setattr("pytest_gpuguard.logs.time.sleep", rotate)
    follower = Follower(str(log), Reading())
    for _ in follower:
        pass
    assert follower.close().outcome == "oom.kv_pool"


def test_json_is_one_object_for_each_change_the_last_of_them_complete(log: Path) -> None:
    with Running("explain", "--follow", "--json", log) as follower:
        append(log, BEGIN)
        said = json.loads(follower.until("{"))
        assert (said["outcome"], said["phase"], said["lines"]) == ("starting", "args", 1)
        append(log, "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.60it/s]\r")
        append(log, REST)
        assert json.loads(follower.until("{"))["phase"] in ("weights", "kv_pool")
        append(log, DEATH)
        code, rest = follower.rest()
        assert code == 0
        objects = [json.loads(line) for line in rest]
        assert [one["outcome"] for one in objects[-1:]] == ["oom.kv_pool"]
        assert objects[-1]["lines"] == len(FAILED.splitlines())
        assert objects[-1]["remedies"]
        assert objects[-1]["consequences"]
        assert len(objects) <= 3


def test_json_under_ctrl_c_ends_with_all_that_was_read(log: Path) -> None:
    append(log, loading([""], 94.0))
    with Running("explain", "--follow", "--json", log) as follower:
        follower.until("{")
        append(log, TRACEBACK + "KeyError: 12")
        time.sleep(0.6)
        follower.process.send_signal(signal.SIGINT)
        code, rest = follower.rest()
        assert code == 0
        assert [json.loads(line)["outcome"] for line in rest] == ["unknown"]


def test_standard_input_is_followed_and_a_failure_ends_it_though_it_stays_open() -> None:
    with Running("explain", "--follow", "-", stdin=subprocess.PIPE) as follower:
        stdin = follower.process.stdin
        assert stdin is not None
        stdin.write(KIMI)
        stdin.flush()
        follower.until("line 10: kv_pool")
        stdin.write(DEATH)
        stdin.flush()
        follower.until("-: oom.kv_pool in phase kv_pool")
        assert follower.rest()[0] == 0
        stdin.close()


def test_standard_input_that_ends_is_explained() -> None:
    done = ran("explain", "--follow", "-", input=KIMI.encode())
    assert (done.code, done.err) == (0, "")
    assert "-: starting: healthy so far, in phase kv_pool (sglang, 17 lines)" in done.out
    done = ran("explain", "--follow", "-", input=b"")
    assert (done.code, done.err, done.out) == (2, "-: the log is empty\n", "")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "No such file or directory"),
        (gzip.compress(FAILED.encode()), "a gzip file does not grow line by line: explain it without --follow"),
        (bytes(range(256)) * 20, "this is binary data, not a log"),
    ],
    ids=["missing", "gzip", "binary"],
)
def test_what_cannot_be_followed_exits_2_with_the_cause(
    content: bytes | None, cause: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "x.log"
    if content is not None:
        path.write_bytes(content)
    done = called(capsys, "explain", "--follow", path)
    assert (done.code, done.err, done.out) == (2, f"{path}: {cause}\n", "")


def test_only_one_log_is_followed_and_no_folder(log: Path, tmp_path: Path, capsys: Capture) -> None:
    done = called(capsys, "explain", "--follow", log, log)
    assert (done.code, done.out) == (2, "")
    assert "--follow takes one log" in done.err
    done = called(capsys, "explain", "--follow", tmp_path)
    assert (done.code, done.err) == (2, f"{tmp_path}: Is a directory\n")


def test_a_terminal_sees_how_far_it_is_on_one_line(log: Path) -> None:
    bar = "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.60it/s]\n"
    append(log, BEGIN + loading([" TP0"], 94.0) + bar + DEATH)
    code, text = on_a_terminal("explain", "--follow", log)
    assert code == 0
    assert "\r\x1b[2Kweights: 1 of 2" in text
    assert text.index("weights: 1 of 2") < text.index("oom.kv_pool in phase")


def test_following_a_quiet_log_costs_next_to_nothing(log: Path) -> None:
    append(log, READY)
    with Running("explain", "--follow", log) as follower:
        follower.until("line 11: ready")
        process = psutil.Process(follower.process.pid)
        time.sleep(0.5)
        before = sum(process.cpu_times()[:2])
        time.sleep(3)
        assert sum(process.cpu_times()[:2]) - before <= 0.15  # 5 % of one core
        os.kill(follower.process.pid, signal.SIGINT)
        assert follower.rest()[0] == 0
