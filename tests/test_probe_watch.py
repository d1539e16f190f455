"""How one run of a probe is read: its answer among all that may be printed, its flood, its deadline."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.engines.log import LogReader
from pytest_gpuguard.engines.process import ExitInfo
from pytest_gpuguard.probe_watch import MOST_PRINTED, Watched

NONCE = "0123"
ANSWER = b"gpuguard-probe-0123: " + json.dumps({"answer": {"a": 1}}).encode()


class Process:
    """One that ends as it is told, and prints while it is looked at."""

    def __init__(self, ended: ExitInfo | None = None, unheard: tuple[str, str] | None = None) -> None:
        self.ended, self._unheard = ended, unheard

    def poll(self) -> ExitInfo | None:
        return self.ended

    def unheard(self) -> tuple[str, str] | None:
        return self._unheard

    def pids(self) -> set[int]:
        return set()


ENDED = ExitInfo(0, 0.0)


def watched(tmp_path: Path, printed: bytes, process: Process, limit_s: float = 5.0) -> tuple[Watched, Any]:
    log = tmp_path / "log"
    log.write_bytes(printed)
    one = Watched(log, NONCE, LogReader(None))
    return one, one.wait(process, time.monotonic() + limit_s, limit_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "printed",
    [
        ANSWER + b"\n",
        ANSWER,
        b"progress 100%" + ANSWER + b"\n",
        b"\xff\xfe\0\n" + ANSWER + b"\n",
        ANSWER + b"\n" + ANSWER.replace(b'"a": 1', b'"a": 2') + b"\n",
        b"gpuguard-probe-0123: []\ngpuguard-probe-0123: {broken\n" + ANSWER + b"\n",
        b"x" * 3_000_000 + b"\n" + ANSWER + b"\n",
    ],
)
def test_the_first_answer_with_the_runs_own_number_is_heard(tmp_path: Path, printed: bytes) -> None:
    one, (outcome, _) = watched(tmp_path, printed, Process(ENDED))
    assert outcome == "ready"
    assert one.answer is not None
    assert one.answer["answer"] == {"a": 1}


@pytest.mark.parametrize(
    "printed",
    [
        b"",
        ANSWER.replace(b"0123", b"9999") + b"\n",
        ANSWER.replace(b"-0123", b"") + b"\n",
        b"gpuguard-probe-0123: []\n",
        b'gpuguard-probe-0123: {"answer": 1}\n',
        b'gpuguard-probe-0123: {"answer": {}, "defect": "x"}\n',
    ],
)
def test_anything_else_is_no_answer(tmp_path: Path, printed: bytes) -> None:
    one, (outcome, note) = watched(tmp_path, printed, Process(ENDED))
    assert (one.answer, outcome, note) == (
        None,
        "unknown",
        "it ended with status 0 without an answer, in stage 'start'",
    )


def test_the_line_of_a_failure_is_the_logs_own(tmp_path: Path) -> None:
    printed = b"gpuguard-probe: stage one\nhalf gpuguard-probe: stage two\nTraceback (most recent call last):\n"
    printed += b"ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory\n"
    one, (outcome, _) = watched(tmp_path, printed, Process(ExitInfo(1, 0.0)))
    decisive = one.reader.closed().decisive
    assert outcome == "import.abi"
    assert decisive is not None
    assert decisive.line == 4
    assert one.stage == "two"


def test_who_stands_between_and_is_silent_makes_no_hang(tmp_path: Path) -> None:
    silent = Process(unheard=("infra.boot", "docker run has not answered yet"))
    assert watched(tmp_path, b"", silent, 0.1)[1] == ("infra.boot", "docker run has not answered yet")
    assert watched(tmp_path, b"", Process(), 0.1)[1][0] == "hang.timeout"


def test_a_flood_is_ended_before_it_is_read_and_moves_no_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    _, (outcome, note) = watched(tmp_path, b"y\n" * MOST_PRINTED, Process(), 60.0)
    assert outcome == "unknown"
    assert "printed more than 16 MiB" in note
    assert time.monotonic() - began < 30, "two million lines a second are not all read"

    class Printing(Process):
        def poll(self) -> ExitInfo | None:
            with (tmp_path / "log").open("ab") as log:
                log.write(b"more\n")
            return None

    began = time.monotonic()
    assert watched(tmp_path, b"", Printing(), 0.5)[1][0] == "hang.timeout"
    assert time.monotonic() - began < 5


def test_a_loader_killed_by_the_kernel_is_told_apart(tmp_path: Path) -> None:
    one, (outcome, note) = watched(tmp_path, b"", Process(ExitInfo(-9, 0.0)))
    assert (outcome, one.killed) == ("unknown", True)
    assert "ended by SIGKILL" in note
    assert watched(tmp_path, b"", Process(ExitInfo(None, 0.0, lost=True)))[1][0] == "infra.lost"
