"""When an answer is nonsense, row by row and by property."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuguard.measure.sanity import Answer, broken, changed, degenerate, doubtful, repetitive


def answer(
    prompt: str = "p", ids: tuple[int, ...] = (), logprobs: tuple[float | None, ...] = (), text: str = "x"
) -> Answer:
    return Answer(prompt, text, ids, logprobs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_log_prob_that_is_no_number_is_broken(value: float | None) -> None:
    assert broken(answer(ids=(5, 6), logprobs=(-1.0, value))) is not None
    assert broken(answer(ids=(5, 6), logprobs=(-1.0, -30.0))) is None


def test_token_zero_alone_is_broken_but_not_in_a_few_tokens_or_among_others() -> None:
    assert broken(answer(ids=(0,) * 8)) is not None
    assert broken(answer(ids=(0,) * 7)) is None
    assert broken(answer(ids=(0,) * 9 + (4,))) is None
    assert broken(answer(ids=(5,) * 12)) is None


def test_one_cycle_over_different_prompts_is_degenerate_wherever_it_begins() -> None:
    turned = [(1, 2, 3) * 4, (2, 3, 1) * 4, (3, 1, 2) * 4]
    assert degenerate([answer(str(n), ids) for n, ids in enumerate(turned)]) is not None
    assert degenerate([answer("same", ids) for ids in turned]) is None, "one prompt is no evidence"
    assert degenerate([answer(str(n), ids) for n, ids in enumerate(turned[:2])]) is None, "two are not either"


def test_one_answer_with_something_to_say_clears_all() -> None:
    stuck = [answer(str(n), (7,) * 12) for n in range(9)]
    assert degenerate(stuck) is not None
    assert degenerate([*stuck, answer("other", tuple(range(12)))]) is None
    assert doubtful([*stuck, answer("other", tuple(range(12)))]) is None


def test_short_answers_are_not_judged() -> None:
    assert degenerate([answer(str(n), (7,) * 4) for n in range(9)]) is None
    assert not repetitive(answer(ids=(7,) * 4))


def test_a_period_of_five_is_no_short_cycle() -> None:
    assert repetitive(answer(ids=(1, 2, 3, 4) * 3))
    assert not repetitive(answer(ids=(1, 2, 3, 4, 5) * 3))


def test_text_alone_is_judged_by_characters() -> None:
    assert degenerate([answer(str(n), text="!" * 30) for n in range(3)]) is not None
    assert degenerate([answer(str(n), text="\ufffd" * 10 + "\x00" * 20) for n in range(3)]) is not None
    assert degenerate([answer(str(n), text=f"{n} is a fine number, and so is its square") for n in range(3)]) is None


def test_unreadable_needs_every_answer() -> None:
    garbled = [answer(str(n), tuple(range(n, n + 12)), text="\ufffd\x01") for n in range(3)]
    assert degenerate(garbled) is not None
    assert degenerate([*garbled, answer("9", tuple(range(12)), text="\ufffdab")]) is None


def test_blank_lines_are_readable() -> None:
    """Some models begin every answer with them, and the request was for a few tokens."""
    blank = [answer(str(n), tuple(range(n, n + 12)), text="\n\n\t\r\n") for n in range(3)]
    assert degenerate(blank) is None


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        (((1, -0.1), (2, -0.2)), ((1, -0.1), (2, -0.2)), False),
        (((1, -0.1), (2, -0.2)), ((1, -0.4), (2, -0.9)), False),
        (((1, -0.1),), ((1, -1.4),), True),
        (((1, -0.7),), ((2, -0.8),), False),
        (((1, -0.02),), ((2, -0.03),), True),
        (((1, -6.1),), ((2, -6.2),), False),
        (((1, -0.02),), ((2, -0.7),), False),  # the second was unsure: what the first chose may have been next to it
        (((1, -0.1), (2, -0.1)), ((1, -0.1),), False),
    ],
)
def test_a_changed_answer_is_told_from_a_tie(
    first: tuple[tuple[int, float], ...], second: tuple[tuple[int, float], ...], differs: bool
) -> None:
    one, two = (
        answer(ids=tuple(i for i, _ in said), logprobs=tuple(value for _, value in said)) for said in (first, second)
    )
    assert (changed(one, two) is not None) is differs
    assert (changed(two, one) is not None) is differs


def test_without_log_probs_nothing_is_said_to_have_changed() -> None:
    assert changed(answer(ids=(1, 2)), answer(ids=(3, 4))) is None


PROBABILITIES = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=8).map(lambda p: [x / sum(p) for x in p])


@given(PROBABILITIES, st.lists(st.floats(-0.25, 0.25), min_size=8, max_size=8))
def test_noise_on_logits_never_looks_like_a_change(probabilities: list[float], shift: list[float]) -> None:
    """A shift of every logit by up to a quarter moves log-probs by less than TOLERANCE."""
    moved = [math.log(p) + s for p, s in zip(probabilities, shift, strict=False)]
    norm = math.log(sum(map(math.exp, moved)))
    before, after = [math.log(p) for p in probabilities], [x - norm for x in moved]
    a, b = (max(range(len(x)), key=x.__getitem__) for x in (before, after))
    assert changed(answer(ids=(a,), logprobs=(before[a],)), answer(ids=(b,), logprobs=(after[b],))) is None


@given(st.text(max_size=60), st.lists(st.integers(0, 9), max_size=20), st.lists(st.none() | st.floats(), max_size=20))
def test_no_answer_makes_the_rules_stumble(text: str, ids: list[int], logprobs: list[float | None]) -> None:
    one = Answer("a", text, tuple(ids), tuple(logprobs))
    broken(one), repetitive(one), changed(one, one)
    degenerate([one] * 3), doubtful([one] * 3)
