# ruff: noqa: E501  (log lines are as long as they are)
"""Any bytes are read without an exception, and passing over lines that repeat never changes what a log says."""

from __future__ import annotations

import json
import random
import re

import pytest

from pytest_gpuguard.claims.observation import LogReading
from pytest_gpuguard.claims.outcome import OUTCOMES, PHASES
from pytest_gpuguard.diagnose import Classifier, classify_text
from pytest_gpuguard.diagnose.intake import Intake
from pytest_gpuguard.diagnose.lines import LineSplitter
from pytest_gpuguard.engines.log import TAIL_CHARS, LogReader
from tests.laws import example, given, settings, st
from tests.log_decoys import DECOYS, OTHERS, REQUESTS, SURVIVED
from tests.log_failures import FAILING
from tests.log_samples import HEALTHY
from tests.test_classify_outcomes import CASES, DIED, LOADED, OOM, SERVING
from tests.test_log_spellings import RULES

ENGINES = ("sglang", "vllm", None)
SEEDS = st.integers(0, 1 << 32)

#: Every line of every small log, to be mixed and changed.
LINES = list(
    dict.fromkeys(
        [line for _, log in HEALTHY.values() for line in log]
        + [line for text in (DECOYS | SURVIVED | OTHERS | REQUESTS).values() for line in text.split("\n")]
        + [line for one in FAILING.values() for blocks in one.processes for block in blocks for line in block]
        + [line for _, _, log in CASES.values() for line in log.split("\n")]
        + [rule.example for rule in RULES]
    )
)


def by_hand(data: bytes, engine: str | None) -> LogReading:
    """The reading of a classifier that is given every line."""
    classifier, splitter = Classifier(engine), LineSplitter()
    for line in splitter.feed(data) + splitter.close():
        classifier.feed(line)
    classifier.close()
    return classifier.reading()


def in_chunks(data: bytes, engine: str | None, rng: random.Random) -> LogReading:
    """The reading of chunks of any size."""
    classifier = Classifier(engine)
    intake, at = Intake(classifier), 0
    while at < len(data):
        size = rng.choice((1, 7, 100, 1000, 100_000))
        intake.feed(data[at : at + size])
        at += size
    intake.close()
    return classifier.reading()


def sensible(reading: LogReading) -> None:
    """A reading has an outcome of the list, and a failure the line that decides it."""
    assert reading.outcome in OUTCOMES
    assert reading.phase in PHASES
    assert (reading.decisive is None) == (reading.outcome in ("ready", "starting"))


# --- any bytes --------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=600), st.sampled_from(ENGINES))
@settings(derandomize=True, max_examples=150)
def test_any_bytes_are_read(data: bytes, engine: str | None) -> None:
    sensible(classify_text(data, engine))


def broken(rng: random.Random) -> bytes:
    """A log to which everything bad has happened: bytes flipped, lines lost, doubled, shuffled, joined, coloured."""
    lines = [rng.choice(LINES) for _ in range(rng.randrange(1, 30))]
    if rng.random() < 0.5:
        lines[:0] = rng.choice(list(HEALTHY.values()))[1][: rng.randrange(20)]
    if rng.random() < 0.3:
        rng.shuffle(lines)
    ends = rng.choice(
        ((b"\n",), (b"\n", b"\r\n"), (b"\n", b"\r", b"", b"\x00", b"\x1b[0m\n", b"\xff\n", b"\x0c", b"\xe2\x80"))
    )
    data = bytearray()
    for line in lines:
        raw = line.encode()
        if rng.random() < 0.1:
            raw = raw * rng.randrange(2, 200)
        if rng.random() < 0.1:
            raw = b"\x1b[36m" + raw[: rng.randrange(len(raw) + 1)] + b"\x1b[0m"
        data += raw + rng.choice(ends)
    for _ in range(rng.choice((0, 0, 1, 20))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@given(SEEDS, st.sampled_from(ENGINES))
@settings(derandomize=True, max_examples=120)
def test_a_broken_log_is_read_and_any_chunks_of_it_alike(seed: int, engine: str | None) -> None:
    rng = random.Random(seed)
    data = broken(rng)
    reading = by_hand(data, engine)
    sensible(reading)
    assert in_chunks(data, engine, rng) == reading


@pytest.mark.parametrize(
    "line",
    [
        '{"level":"ERROR","message":' + "[" * 60_000,
        '{"level":"ERROR","message":' + "[" * 900 + "]" * 900 + "}",
        '{"a":' * 12_000 + '"level":"ERROR"',
        '{"level":"ERROR","message":{"text":1},"fields":[]}',
        '{"level":"ERROR","fields":{"message":"CUDA out of memory"},"n":' + "9" * 6_000 + "}",
        '{"level":"ERROR","message":"\\ud800\\u0000"}',
        '{"level":"FATAL","message":null,"msg":"","event":"x"}',
        '{"level":"error"',
        "[]",
        "GPU KV cache size: , tokens",
        "INFO 01-15 10:00:03 [x.py:1] GPU KV cache size: ,,1,,2 tokens",
        "100%|" + "#" * 100 + "| 99999999999/1 [00:00]",
        "[2026-01-02 03:04:05" + " TP0" * 9 + "] Load weight end. avail mem=-.-1 GB, mem usage=--1 GB",
        "[2026-01-02 03:04:05] server_args=ServerArgs(" + "(" * 30_000,
        "\u2028\u0085\x1c ValueError: \x00",
    ],
    ids=lambda line: line[:30].encode("ascii", "replace").decode(),
)
def test_a_hostile_line_is_read(line: str) -> None:
    for engine in ENGINES:
        sensible(classify_text(f"{line}\n{DIED}{line}\n{line}", engine))


TRACE = '  File "/x/model_runner.py", line 3, in load_model\n    self.f()\ntorch.OutOfMemoryError: CUDA out of memory.'


@pytest.mark.parametrize(
    "record",
    [
        {"level": "ERROR", "message": f"Scheduler hit an exception: Traceback (most recent call last):\n{TRACE}"},
        {
            "level": "ERROR",
            "message": "Scheduler hit an exception",
            "exc_info": f"Traceback (most recent call last):\n{TRACE}",
        },
    ],
    ids=["in the message", "beside it"],
)
def test_a_record_of_json_may_hold_a_whole_traceback(record: dict[str, str]) -> None:
    reading = classify_text(f"{json.dumps(record)}\n")
    assert (reading.outcome, reading.fatal) == ("oom.weights", True)
    assert reading.decisive is not None
    assert (reading.decisive.line, reading.decisive.text) == (1, "torch.OutOfMemoryError: CUDA out of memory.")
    assert classify_text(f"{json.dumps(record | {'level': 'INFO'})}\n").outcome == "starting"


# --- lines that are passed over ---------------------------------------------------------------------------------------

#: An answer's status is no count: "200 OK" is the only one of its words.
_DIGITS = re.compile(r'(" \d{3} )|(\d+)')


def other_numbers(line: str, rng: random.Random) -> str:
    """The line with other digits, as many of them or not."""
    widths = rng.random() < 0.3

    def number(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        width = rng.randrange(0, 6) if widths else len(match[2])
        return "".join(rng.choice("0123456789") for _ in range(width))

    return _DIGITS.sub(number, line)


def repeating(rng: random.Random) -> bytes:
    """A log that repeats a few lines with other numbers."""
    kinds = [rng.choice(LINES) for _ in range(rng.choice((2, 4, 8)))] + rng.choice(list(HEALTHY.values()))[1][-4:]
    if rng.random() < 0.5:
        kinds = rng.choice(list(HEALTHY.values()))[1] + kinds
    lines: list[str] = []
    for _ in range(rng.choice((20, 60))):
        line = rng.choice(kinds)
        lines += [line if rng.random() < 0.4 else other_numbers(line, rng)] * rng.choice((1, 1, 2, 3))
    return "\n".join(lines).encode() + rng.choice((b"", b"\n"))


@given(SEEDS, st.sampled_from(ENGINES))
@settings(derandomize=True, max_examples=200)
def test_passing_over_lines_changes_no_reading(seed: int, engine: str | None) -> None:
    rng = random.Random(seed)
    data = repeating(rng)
    assert in_chunks(data, engine, rng) == by_hand(data, engine)


def serving(rng: random.Random, count: int) -> list[str]:
    """Lines that serving engines print by the million."""
    found = []
    for _ in range(count):
        stamp = f"[2026-01-02 03:{rng.randrange(60):02}:{rng.randrange(60):02} TP{rng.randrange(8)}] "
        numbers = f"#running-req: {rng.randrange(200)}, #token: {rng.randrange(90_000)}, token usage: 0.{rng.randrange(99):02}"
        ip = f"10.0.{rng.randrange(256)}.{rng.randrange(256)}:{rng.randrange(1024, 65_536)}"
        found.append(
            rng.choice(
                (
                    f"{stamp}Decode batch. {numbers}, gen throughput (token/s): {rng.random() * 999:.2f}, #queue-req: 0",
                    f"{stamp}Prefill batch, #new-seq: 1, #new-token: {rng.randrange(9_000)}, {numbers}",
                    f'{stamp[:20]}] INFO:     {ip} - "POST /generate HTTP/1.1" 200 OK',
                    f'{stamp[:20]}] INFO:     {ip} - "GET /health HTTP/1.1" 503 Service Unavailable',
                )
            )
        )
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_long_log_reads_like_every_line_of_it(seed: int) -> None:
    rng = random.Random(seed)
    parts = [
        *HEALTHY["sglang 0.4.6"][1],
        *serving(rng, 1500),
        *(SURVIVED | REQUESTS)[rng.choice(sorted(REQUESTS))].split("\n"),
        *serving(rng, 700),
        *HEALTHY["sglang 0.4.6"][1][: rng.randrange(60)],  # it was started again
        *serving(rng, 700),
        *(DIED + OOM).split("\n"),
        *serving(rng, 300),
    ]
    data = "\n".join(parts).encode() + b"\n"
    reading = by_hand(data, "sglang")
    assert (reading.outcome, reading.lines) == ("oom.runtime", len(parts))
    for engine in ("sglang", None):
        assert in_chunks(data, engine, rng) == by_hand(data, engine)


def judged(data: bytes) -> int:
    """How many lines the classifier is given when the log comes in one chunk."""

    class Counting(Classifier):
        count = 0

        def _judge(self, number: int, text: str) -> None:
            self.count += 1
            super()._judge(number, text)

    classifier = Counting("sglang")
    Intake(classifier).feed(data)
    return classifier.count


def test_most_lines_of_a_serving_engine_are_passed_over() -> None:
    lines = serving(random.Random(0), 8000)
    data = (SERVING + "\n".join(lines) + "\n").encode()
    assert judged(data) < len(lines) / 4
    failed = (SERVING + REQUESTS["vllm's"] + "\n" + "\n" * 4096 + "\n".join(lines) + "\n").encode()
    assert judged(failed) < len(lines) / 4 + 4200  # an old traceback does not stay open


def test_the_end_of_a_cut_line_is_no_line() -> None:
    quoted = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    intake = Intake(classifier := Classifier("vllm"))
    for _ in range(3):
        intake.feed(b"INFO 01-15 10:00:03 [x.py:1] somebody wrote: ")
        intake.feed(quoted.encode() + b"\n")
    intake.feed(quoted.encode() + b"\n")
    intake.close()
    assert classifier.reading().outcome == "unsupported.arch"


@example(0, 1)
@given(SEEDS, st.integers(0, 500))
@settings(derandomize=True, max_examples=25)
def test_the_tail_holds_passed_over_lines_too(seed: int, count: int) -> None:
    rng = random.Random(seed)
    lines = [*LOADED.splitlines(), *SERVING.splitlines(), *serving(rng, rng.randrange(900)), rng.choice(LINES)]
    data = "\n".join(lines).encode() + b"\n"
    reader, at = LogReader(), 0
    while at < len(data):
        size = rng.choice((1, 100, 5000, 100_000))
        reader.feed(data[at : at + size])
        at += size
    reader.closed()
    wanted = lines[-min(count, 400) :] if count else []
    assert list(reader.tail(count)) == [line[:TAIL_CHARS] for line in wanted]
    assert reader.reading().lines == len(lines)
