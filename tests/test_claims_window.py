"""Windows of versions: which stacks are inside, which two windows can meet, and what is no window at all."""

from __future__ import annotations

from itertools import product

import pytest

from pytest_gpuguard.claims.errors import ClaimError
from pytest_gpuguard.claims.window import canonical, is_build, parse_window, release_of, satisfies, specifiers
from tests.laws import example, given, settings, st


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.5.15", "0.5.15"),
        ("0.5.15.dev1+g1a2b3c", "0.5.15"),
        ("0.5.15rc2", "0.5.15"),
        ("0.5.6.post2", "0.5.6"),
        ("2.9.1+cpu", "2.9.1"),
        ("v0.6.0-nightly-20260101", "0.6.0"),
        ("1!2.0", "2.0"),
        ("580.105.08", "580.105.8"),
        ("main", None),
        ("", None),
    ],
)
def test_a_build_counts_as_its_release(version: str, release: str | None) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize(
    ("version", "spec", "inside"),
    [
        ("0.5.15", ">=0.5.15", True),
        ("0.5.15.dev1", ">=0.5.15", True),
        ("0.5.15rc1", ">=0.5.15", True),
        ("0.5.14.dev9", ">=0.5.15", False),
        ("0.6.0.dev1", "<0.6", False),
        ("0.6.0rc1", "<0.6.0", False),
        ("0.5.6.post2", "<=0.5.6", True),
        ("0.5.6.post2", ">0.5.6", False),
        ("0.5.6.post2", "==0.5.6", True),
        ("2.9.1+cpu", "==2.9.1", True),
        ("0.5.9.post1", ">=0.5.6,<0.5.10", True),
        ("580.105.08", ">=580", True),
        ("main", ">=0", False),
    ],
)
def test_a_range_takes_builds_as_their_release(version: str, spec: str, inside: bool) -> None:
    assert satisfies(version, spec) is inside


@pytest.mark.parametrize(
    ("version", "spec", "inside"),
    [
        ("0.6.7.post2", ">=0.6.7.post2", True),
        ("0.6.7.post1", ">=0.6.7.post2", False),
        ("0.6.7", ">=0.6.7.post2", False),
        ("0.6.8.dev1", ">=0.6.7.post2", True),
        ("0.6.7.post2", "==0.6.7.post2", True),
        ("0.6.7.post3", ">=0.6.7.post2,<0.6.7", False),
        ("0.5.15rc2", ">=0.5.15rc1", True),
        ("0.5.15.dev1", ">=0.5.15rc1", False),
        ("2.9.1+cpu", "==2.9.1+cpu", True),
        ("2.9.1+cu130", "==2.9.1+cpu", False),
        ("2.9.1", "==2.9.1+cpu", False),
    ],
)
def test_a_range_that_names_a_build_is_compared_exactly(version: str, spec: str, inside: bool) -> None:
    assert satisfies(version, spec) is inside


@pytest.mark.parametrize(
    ("version", "build"), [("0.5.15.dev1", True), ("1rc1", True), ("1.post1", True), ("1+x", True)]
)
def test_dev_rc_post_and_local_are_builds(version: str, build: bool) -> None:
    assert is_build(version) is build


@pytest.mark.parametrize("version", ["0.5.15", "580.105.08", "main"])
def test_a_release_and_a_word_are_no_builds(version: str) -> None:
    assert not is_build(version)


STACK = {"sglang": "0.5.15.dev3", "cuda": "13.0", "flashinfer-python": "0.6.9", "driver": "580.105.08"}


@pytest.mark.parametrize(
    ("when", "inside"),
    [
        ("sglang>=0.5.15", True),
        ("sglang >= 0.5.15, < 0.6", True),
        ("sglang>=0.5.15 and cuda>=13", True),
        ("sglang>=0.5.15 and cuda<13", False),
        ("sglang<0.5.15 and cuda>=13", False),
        ("sglang>=0.5.15; driver>=580", True),
        ("Flashinfer_Python>=0.6.9", True),
        ("sglang>=0.5 and sglang<0.5.10", False),
        ("vllm>=0", False),
        ("vllm!=0.11", False),
    ],
)
def test_a_stack_is_inside_when_every_term_matches(when: str, inside: bool) -> None:
    assert parse_window(when).matches(STACK.get) is inside


def test_a_window_says_which_builds_it_compared_as_releases() -> None:
    assert parse_window("sglang>=0.5 and cuda>=13").inexact(STACK.get) == ("sglang 0.5.15.dev3 compared as 0.5.15",)
    assert parse_window("sglang>=0.5.15.dev2").inexact(STACK.get) == ()
    assert parse_window("vllm>=0.5").inexact(STACK.get) == ()


def test_a_window_reads_as_it_was_written() -> None:
    assert str(parse_window(" sglang>=0.5.15 and cuda>=13 ")) == "sglang>=0.5.15 and cuda>=13"


def test_names_are_spelt_as_pep_503_says() -> None:
    assert canonical("Flashinfer._Python") == "flashinfer-python"


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("", 'is not a window: write when="sglang>=0.5.15"'),
        ("  ", "is not a window"),
        (["sglang>=0.5"], "is not a window"),
        (0.5, "is not a window"),
        ("sglang", "'sglang' is not a term"),
        ("sglang and cuda>=13", "'sglang' is not a term"),
        ("sglang>=0.5 and", "'>=0.5 and' is not a version range"),
        ("sglang=>0.5", "is not a term"),
        ("sglang>=new", "'>=new' is not a version range"),
        ("sglang>=0.5 or cuda>=13", "is not a version range: write ranges such as '>=0.5.6,<0.5.8'"),
        ("sglang==0.5=", "is not a version range"),
        ("sglang===0.5", "===0.5 cannot be compared by release; use ==, !=, ~=, <, <=, > or >="),
        ("sglang>=1!0.5", "cannot be compared by release"),
    ],
)
def test_what_is_no_window_is_refused(when: str, said: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        parse_window(when)
    assert said in str(refusal.value)


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ClaimError, match="is not a version range"):
        specifiers("")


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        ("sglang<0.6", "sglang>=0.6", False),
        ("sglang<=0.6", "sglang>=0.6", True),
        ("sglang>0.6", "sglang<0.6.1", True),
        ("sglang>0.6", "sglang<0.6.0.0.0.0.0.1", True),
        ("sglang>=0.5.15", "sglang>=0.5.6,<0.5.8", False),
        ("sglang==0.5.*", "sglang>=0.5.99", True),
        ("sglang~=0.5.6", "sglang>=0.6", False),
        ("sglang!=0.5", "sglang==0.5", False),
        ("sglang!=0.5.*", "sglang>=0.5,<0.6", False),
        ("sglang>=0.5", "cuda>=13", True),
        ("sglang>=0.5 and cuda<13", "sglang>=0.5 and cuda>=13", False),
        ("sglang<0.5 and cuda>=13", "sglang>=0.5 and cuda>=13", False),
        ("sglang<0", "sglang<1", False),
        ("sglang==0.5.6.post2", "sglang==0.5.6.post2", True),
        ("sglang>0.5.6.post1,<0.5.6.post3", "sglang>=0.5.6.post2", True),
        ("sglang<0.5.6.post1", "sglang>=0.5.6.post1", False),
    ],
)
def test_two_windows_overlap_when_one_stack_can_be_in_both(first: str, second: str, meet: bool) -> None:
    assert parse_window(first).overlaps(parse_window(second)) is meet
    assert parse_window(second).overlaps(parse_window(first)) is meet


# Boundaries are drawn from 0 to 2 and of up to three numbers; the grid has a number between and beyond all of them.
_NUMBERS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
_PLAIN = st.tuples(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), _NUMBERS).map("".join)
_STARRED = st.tuples(st.sampled_from(["==", "!="]), _NUMBERS, st.just(".*")).map("".join)
_COMPATIBLE = _NUMBERS.filter(lambda text: "." in text).map(lambda text: f"~={text}")
_RANGES = st.lists(_PLAIN | _STARRED | _COMPATIBLE, min_size=1, max_size=3).map(",".join)
_GRID = [f"{a}.{b}.{c}.{d}" for a, b, c, d in product(range(4), range(4), range(4), range(2))]


@given(_RANGES, _RANGES)
@example(">1", "<1.0.1")
@example("!=0", "<0.0.1")
@settings(max_examples=200)
def test_overlap_agrees_with_trying_every_release(first: str, second: str) -> None:
    met = any(satisfies(version, first) and satisfies(version, second) for version in _GRID)
    assert parse_window(f"sglang{first}").overlaps(parse_window(f"sglang{second}")) is met


@given(_RANGES, st.sampled_from(_GRID), st.sampled_from([".dev1", "rc1", ".post1", "+cpu", ".dev1+g1"]))
def test_a_build_is_inside_exactly_when_its_release_is(spec: str, version: str, suffix: str) -> None:
    assert satisfies(version + suffix, spec) is satisfies(version, spec)
