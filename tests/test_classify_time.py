# ruff: noqa: E501  (log lines are as long as they are)
"""No line takes long, however hostile; a pattern that could is refused before it is used."""

from __future__ import annotations

import random
import time
from functools import reduce
from operator import or_

import pytest

from pytest_gpuguard.diagnose.backtracking import PatternError, compile_bounded
from pytest_gpuguard.diagnose.lines import LINE_LIMIT
from pytest_gpuguard.diagnose.signatures import SignatureError, load_signatures, parse_signatures
from pytest_gpuguard.diagnose.spellings import load_spellings
from pytest_gpuguard.engines.log import LogReader

#: Seconds of processor time for one line of 64 KiB: several times what a slow machine needs.
MOST_S = 0.5
#: And on average.
USUAL_S = 0.08

SET = load_signatures(None)
SAID = [{*one.any, *one.exclude} for one in SET.all()] + [{*one.any} for one in SET.requests]
SAID += [{*SET.deaths, *SET.advice, *SET.dumps, *SET.stops, *SET.mild}, {line.literal for line in SET.phases}]
SAID += [{rule.literal, rule.starts} for rule in load_spellings().rules]
LITERALS = sorted(reduce(or_, SAID) - {""})
OPENERS = [
    "[", "(", "{", "({[", "[[", "a%b ", " % ", "SM90 ", "requires SM", "0%| 1/", "(a pid=1) ", '{"level":"ERROR","message":"x",',
    '{"level":"ERROR","message":[', '{"a":', "[2026-01-02 03:04:05 TP0] ", 'File "x", line 1, in f ', "a.b:", "A.Error", "ValueError: ",
    "\x1b[0m", "#033[", "eyJhbcdefgh.", "://a:b@", "api_key=", "Bearer aaaaaa ", "x=1,", "\"'", "assert a % b == 0 ", "KeyError: 'a.b",
    "quantization not supported ", "must be multiple of ", "major versions [9, 10", "No such file or directory: '", "1:2:3 ", "../", "\\",
]  # fmt: skip
PREFIXES = (
    "",
    "RuntimeError: ",
    "[2026-01-02 03:04:05 TP0] ",
    "ERROR 01-15 10:00:03 [a.py:1] ",
    "n:1:1 [0] NCCL WARN ",
)


def hostile(part: str, prefix: str) -> bytes:
    """A line of 64 KiB of one thing."""
    return (prefix + part * (LINE_LIMIT // len(part) + 1)).encode()[:LINE_LIMIT] + b"\n"


def seconds(line: bytes, *, within: bool) -> float:
    """The processor time that a line costs, its part in the reading and in the tail included."""
    reader = LogReader(engine=None)
    if within:
        reader.feed(b"[2026-01-02 03:04:05 TP0] Scheduler hit an exception: Traceback (most recent call last):\n")
    started = time.process_time()
    reader.feed(line)
    reader.reading()
    reader.tail(1)
    return time.process_time() - started


def slowest(parts: list[str]) -> None:
    """Every part is tried, each behind the next prefix."""
    spent = []
    for number, part in enumerate(parts):
        prefix = PREFIXES[number % len(PREFIXES)]
        spent.append((seconds(hostile(part, prefix), within=number % 2 == 1), part, prefix))
    assert max(spent)[0] < MOST_S, max(spent)
    assert sum(one for one, *_ in spent) < USUAL_S * len(spent)


def test_a_line_of_one_character_takes_no_time() -> None:
    slowest([*map(chr, [9, 27, *range(32, 127, 2)]), "é", "█", "\U0001f600"])


def test_a_line_that_begins_everything_takes_no_time() -> None:
    slowest(OPENERS)


@pytest.mark.parametrize("gap", ["", " "], ids=["joined", "apart"])
def test_a_line_of_a_signature_s_words_takes_no_time(gap: str) -> None:
    rng = random.Random(gap)
    slowest([literal + gap for literal in rng.sample(LITERALS, min(90, len(LITERALS)))])


@pytest.mark.parametrize("signature", SET.all(), ids=lambda one: one.id)
def test_no_signature_takes_long(signature: object) -> None:
    from pytest_gpuguard.diagnose.signature import Signature

    assert isinstance(signature, Signature)
    if signature.pattern is None and signature.frame is None:
        return
    for literal in signature.any[:3]:
        text = literal * (LINE_LIMIT // len(literal))
        started = time.process_time()
        signature.matches(text, text[:16_000])
        assert time.process_time() - started < MOST_S


def test_a_thousand_lines_of_a_broken_program_are_read_at_once() -> None:
    rng = random.Random(1)
    reader = LogReader(engine=None)
    started = time.process_time()
    for _ in range(1000):
        reader.feed((rng.choice(PREFIXES) + " ".join(rng.choice(LITERALS) for _ in range(8)) + "\n").encode())
    assert time.process_time() - started < 5


# --- patterns ---------------------------------------------------------------------------------------------------------

SIGNATURE = """\
[[signature]]
id = "mine"
outcome = "hardware"
why = "it says so"
any = ["it"]
sources = ["a/b.py"]
"""

SLOW = [
    r"(?:\w\w|\w){0,100}!",
    r"(?:a|a){0,100}!",
    r"(?:a|aa){0,50}!",
    r"(?:ab?|a){0,100}!",
    r"(?:a|b|ab){1,90}!",
    r"(?:(?:\w){1,20}){1,20}!",
    r"(\w{1,3}|\d{1,3}){1,5}!",
    r"(?=(?:a|aa){0,50}!)x",
    r"(?: a{0,5}a{0,5}){0,8}!",
    r"(?:\w{0,9},?){1,20}!",
    r"(?:(a)|\1b|ab){0,40}!",
    r"(a)?(?(1)(?:b|bb){0,40}|c)!",
    r"(?:ab|a.){0,60}!",
    r".{0,90}.{0,90}!",
]


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_whose_work_multiplies_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"nested quantifiers|too much backtracking"):
        compile_bounded(pattern)
    text = SIGNATURE + f"pattern = '''{pattern}'''\n"
    with pytest.raises(SignatureError, match=r"x\.toml:7: signature mine: "):
        parse_signatures({"x.toml": text})


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?: [A-Z_]{2,12}\d{1,5}){0,8}",
        r"(?:[A-Za-z_]\w{0,60}\.){0,8}Error",
        r"(?:foo|bar|baz){0,20}!",
        r"(?:\w\w){0,50}!",
        r"(?:--[a-z]{1,20} ){1,9}",
        r"\[[\d, ]{0,80}\]",
        r"(?i)(?:unknown|unsupported).{0,30}quanti[sz]ation",
        r"(?:a{1,3},){2,6}$",
    ],
)
def test_a_pattern_that_parts_its_rounds_is_taken(pattern: str) -> None:
    assert compile_bounded(pattern).pattern == pattern


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    found = ""
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        if depth and kind < 0.3:
            part = f"(?:{random_pattern(rng, depth - 1)})"
        elif depth and kind < 0.5:
            part = f"(?:{random_pattern(rng, depth - 1)}|{rng.choice(('', random_pattern(rng, depth - 1)))})"
        else:
            part = rng.choice(("a", "b", r"\w", "[ab]", ".", r"\d", r"\s", "[^a]"))
        found += part + rng.choice(("", "", "?", "{0,3}", "{1,20}", "{2,5}", "{0,60}", "{3}", "{0,3}?"))
    return found


def test_whatever_pattern_is_taken_is_fast() -> None:
    rng = random.Random(7)
    taken = 0
    for _ in range(400):
        try:
            pattern = compile_bounded(random_pattern(rng) + "!")
        except PatternError:
            continue
        taken += 1
        for text in ("a" * 1000, "ab" * 500, "a1 b" * 250):
            started = time.process_time()
            pattern.search(text)
            assert time.process_time() - started < MOST_S, pattern.pattern
    assert taken > 100
