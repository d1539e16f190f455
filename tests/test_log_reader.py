"""The live reader: any chunking, any bytes, constant memory, progress bars, and when a failure is announced."""

from __future__ import annotations

import itertools
import time

import pytest

from pytest_gpuguard.claims.observation import LogReading
from pytest_gpuguard.diagnose.lines import LINE_LIMIT, Line, LineSplitter
from pytest_gpuguard.engines.log import LogReader, Progress

from .laws import given, settings, st

FAILING = (
    b"[2026-01-02 03:04:05 TP0] Load weight begin. avail mem=94.00 GB\r\n"
    b"Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]\r"
    b"Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.9it/s]\r"
    b"Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:02<00:00,  1.9it/s]\n"
    b"\xff\xfe broken \xe2\x82 bytes\n"
    b"[2026-01-02 03:04:15 TP0] Load weight end. type=M, avail mem=2.00 GB, mem usage=92.00 GB.\n"
    b"[2026-01-02 03:04:16 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    b'  File "/x/sglang/srt/model_executor/model_runner.py", line 741, in init_memory_pool\n'
    b"    raise RuntimeError(\n"
    b"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
    b"Current value: mem_fraction_static=0.85\n\n"
    b"[2026-01-02 03:04:17] Received sigquit from a child process. It usually means the child failed."
)


def read(data: bytes, cuts: list[int]) -> LogReading:
    reader = LogReader()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        reader.feed(data[start:end])
    return reader.closed()


WHOLE = read(FAILING, [])


def test_the_reading_names_the_cause() -> None:
    assert (WHOLE.outcome, WHOLE.phase, WHOLE.fatal) == ("oom.kv_pool", "kv_pool", True)
    assert WHOLE.decisive is not None
    assert (WHOLE.decisive.line, WHOLE.decisive.text[:31]) == (8, "RuntimeError: Not enough memory")
    assert (WHOLE.lines, WHOLE.memory.mem_fraction_static) == (10, 0.85)
    assert any("sigquit" in text for text in WHOLE.consequences)


@given(st.lists(st.integers(min_value=0), max_size=12))
@settings(max_examples=150, deadline=None)
def test_cutting_the_stream_differently_changes_nothing(cuts: list[int]) -> None:
    assert read(FAILING, cuts) == WHOLE


def test_one_byte_at_a_time_changes_nothing() -> None:
    assert read(FAILING, list(range(len(FAILING)))) == WHOLE


@given(st.binary(max_size=400), st.lists(st.integers(min_value=0), max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_and_any_cut_of_them_alike(data: bytes, cuts: list[int]) -> None:
    assert read(data, cuts) == read(data, [])


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\r\n", b"50%| 1/2", b"\xf0\x9f"]), max_size=12))
@settings(deadline=None)
def test_lines_are_cut_alike_whatever_the_chunks(parts: list[bytes]) -> None:
    whole = LineSplitter()
    expected = whole.feed(b"".join(parts)) + whole.close()
    single = LineSplitter()
    lines: list[Line] = []
    for byte in b"".join(parts):
        lines += single.feed(bytes([byte]))
    assert lines + single.close() == expected


def test_events_come_as_the_lines_do() -> None:
    reader = LogReader()
    events = [event for line in FAILING.splitlines(keepends=True) for event in reader.feed(line)]
    kinds = [event.kind for event in events]
    assert kinds.index("phase") < kinds.index("progress") < kinds.index("fatal")
    fatal = next(event for event in events if event.kind == "fatal")
    assert (fatal.phase, fatal.line) == ("kv_pool", 8)
    assert fatal.text.startswith("RuntimeError: Not enough memory")


def test_a_failure_is_announced_with_its_exception_and_not_before() -> None:
    reader = LogReader()
    head, decisive = FAILING.split(b"RuntimeError: ", 1)
    before = reader.feed(head)
    assert [event.kind for event in before if event.kind == "fatal"] == []
    assert reader.in_traceback
    assert not reader.reading().fatal
    line = b"RuntimeError: " + decisive.split(b"\n")[0] + b"\n"
    assert [event.kind for event in reader.feed(line)] == ["fatal"]
    assert reader.reading().fatal
    assert not reader.in_traceback


def test_a_better_cause_from_another_rank_is_announced_again() -> None:
    reader = LogReader()
    peer = reader.feed(
        b"[2026-01-02 03:04:05 TP0] Load weight begin. avail mem=94.00 GB\n"
        b"[2026-01-02 03:04:06 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        b"RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:2000\n"
    )
    assert [event.kind for event in peer][-1] == "fatal"
    assert reader.reading().outcome == "indeterminate.peer_died"
    cause = reader.feed(
        b"[2026-01-02 03:04:06 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB.\n"
    )
    assert [(event.kind, event.line) for event in cause] == [("fatal", 5)]
    assert (reader.reading().outcome, reader.reading().fatal) == ("oom.weights", True)


def test_progress_bars_update_and_are_no_lines() -> None:
    reader = LogReader()
    assert reader.progress == Progress("start")
    reader.feed(b"[2026-01-02 03:04:05] Load weight begin. avail mem=1.00 GB\n")
    seen = []
    for done in range(5):
        bar = f"\rLoading safetensors checkpoint shards: {done * 25:3d}% Completed | {done}/4 [00:00<00:01]"
        reader.feed(bar.encode())
        seen.append((reader.progress.done, reader.progress.total))
    # A piece is complete when the next carriage return comes.
    assert seen == [(None, None), (0, 4), (1, 4), (2, 4), (3, 4)]
    reader.feed(b"\n")
    assert reader.progress == Progress("weights", "Loading safetensors checkpoint shards", 4, 4)
    assert reader.reading().lines == 2
    reader.feed(b"[2026-01-02 03:04:05] Load weight end. avail mem=1.00 GB\n")
    assert reader.progress == Progress("kv_pool")
    reader.feed(b"Capturing batches (avail_mem=2.90 GB): 100%|##########| 23/23 [00:08<00:00,  2.59it/s]\n")
    assert (reader.progress.done, reader.progress.total) == (23, 23)


def test_a_log_line_right_behind_a_bar_is_read() -> None:
    reader = LogReader()
    reader.feed(
        b"\rLoading shards:  50% Completed | 1/2 [00:01<00:01][2026-01-02 03:04:06 TP3] Scheduler hit an exception: "
        b"Traceback (most recent call last):\nValueError: what nobody knows\n"
    )
    reading = reader.reading()
    assert (reading.outcome, reading.fatal) == ("unknown", True)
    assert reading.decisive is not None
    assert reading.decisive.text == "ValueError: what nobody knows"


def test_a_percentage_in_a_log_line_is_no_bar() -> None:
    reader = LogReader()
    reader.feed(b"[2026-01-02 03:04:05] load 50% | 3/4 done\n[2026-01-02 03:04:05] Load weight begin. avail mem=1 GB\n")
    assert reader.progress == Progress("weights")


def test_a_line_of_a_megabyte_is_judged_on_its_head() -> None:
    reader = LogReader()
    started = time.monotonic()
    reader.feed(b"x" * 1_000_000)
    assert len(reader._intake._splitter._buffer) == LINE_LIMIT
    reader.feed(b"\n[2026-01-02 03:04:05] " + b"server_args=ServerArgs(" + b"y" * 1_000_000 + b"\n")
    reader.feed(b"[2026-01-02 03:04:05] The server is fired up and ready to roll!\n")
    assert time.monotonic() - started < 5
    assert (reader.reading().outcome, reader.reading().lines) == ("ready", 3)


def test_the_last_line_needs_no_line_end() -> None:
    reader = LogReader()
    reader.feed(b"launch_server.py: error: unrecognized arguments: --nope")
    assert reader.reading().outcome == "starting"
    assert reader.closed().outcome == "bad.args"
    assert reader.closed() == reader.reading()


def test_an_exception_is_fatal_only_once_the_output_has_ended() -> None:
    reader = LogReader()
    reader.feed(b'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: so it is\n')
    assert (reader.reading().outcome, reader.reading().fatal) == ("unknown", False)
    assert (reader.closed().outcome, reader.closed().fatal) == ("unknown", True)


def test_what_the_boot_survived_is_forgotten() -> None:
    reader = LogReader()
    reader.feed(
        b'Traceback (most recent call last):\n  File "x.py", line 1, in f\n'
        b"ImportError: libfoo.so.1: cannot open shared object file: No such file or directory\n"
    )
    assert reader.reading().outcome == "import.abi"
    reader.feed(b"[2026-01-02 03:04:05] Load weight begin. avail mem=1.00 GB\n")
    assert reader.closed().outcome == "starting"


def test_the_tail_has_no_secrets() -> None:
    reader = LogReader()
    for number in range(500):
        reader.feed(b"line %d\n" % number)
    reader.feed(b"[2026-01-02 03:04:05] server_args=ServerArgs(api_key='sesame-open', hf_token=hf_abcdefghijklmnop)\n")
    tail = reader.tail(3)
    assert tail[:2] == ("line 498", "line 499")
    assert "sesame" not in tail[2]
    assert "hf_abc" not in tail[2]
    assert len(reader.tail(10_000)) == 400
    assert reader.tail(0) == ()


def test_ranks_and_blocks_are_bounded() -> None:
    reader = LogReader()
    for number in range(3000):
        reader.feed(b"[2026-01-02 03:04:05 TP%d] Load weight begin. avail mem=1.00 GB\n" % number)
        reader.feed(b"[rank%d]: Traceback (most recent call last):\n" % number)
    boot = reader._classifier._boot
    assert len(boot.store.ranks) <= 1024
    assert len(boot._rank_phase) <= 1024
    assert len(reader._classifier._tracebacks._open) <= 64


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b"(a pid=1) " * 6_000,
        b"CUDA out of memory " * 3_000,
        b"only SM" * 9_000,
        b"requires " * 7_000 + b"SM",
        b"error: argument " * 4_000,
        b"0%|" * 20_000,
        b"a.b" * 20_000 + b"Error",
        b"/dev/shm " * 7_000,
        b"ImportError: " * 4_000 + b"undefined symbol",
        b"[2026-01-02 03:04:05 TP0" + b" TP0" * 15_000,
        b"api_key=" * 8_000,
        b"\x1b[0m" * 16_000,
        b"AssertionError: assert " + b"a " * 30_000 + b"% b",
        b"must be " * 8_000 + b"multiple of",
    ],
    ids=lambda line: line[:12].decode("latin-1"),
)
def test_no_line_takes_long(line: bytes) -> None:
    reader = LogReader(engine=None)
    started = time.monotonic()
    reader.feed(b"[2026-01-02 03:04:05 TP0] Scheduler hit an exception: Traceback (most recent call last):\n")
    reader.feed(line + b"\n" + line + b"\n[2026-01-02 03:04:05] " + line + b"\nRuntimeError: " + line + b"\n")
    reader.reading()
    reader.tail()
    assert time.monotonic() - started < 5


def test_a_taken_http_port_is_fatal_at_once_because_sglang_never_exits_of_it() -> None:
    reader = LogReader()
    reader.feed(b"[2026-01-01 00:00:00] Memory pool end. avail mem=90.50 GB\n")
    reader.feed(
        b"[2026-01-01 00:00:01] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): "
        b"address already in use\n"
    )
    assert reader.reading().outcome == "port.in_use"
    assert reader.reading().fatal
