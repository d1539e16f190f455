"""Whether answers are degenerate: NaN log-probs, nothing but token 0, the same short cycle whatever was asked.

Pure. It must not call a model broken that merely has little to say. A model with random weights repeats itself too: of
192 untrained Llamas (vocabularies of 512 and 32,000, one to four layers, tied and untied embeddings) 21 did so on all
of eight prompts, but none of them in the same way on all. So repetition counts only when different prompts, which end
in different words, all lead to the same one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log1p
from typing import Final

#: Fewer tokens than this show no habit.
_ENOUGH: Final = 8
#: So many different prompts make a habit the model's rather than a prompt's.
_PROMPTS: Final = 3
_LONGEST_CYCLE: Final = 4
#: The same in characters, where an endpoint gives text alone: a token is one to about four.
_ENOUGH_TEXT: Final = 12
_LONGEST_CYCLE_TEXT: Final = 16
#: By how much kernels may move the log-prob of a chosen token, in nats. A cached and an uncached prefill run different
#: kernels (another split of the sum) and differ by hundredths in bf16, by tenths where a router or FP4 amplifies it.
TOLERANCE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt. ``ids`` and ``logprobs`` (nats) are empty where the server does not give them."""

    prompt: str
    text: str
    ids: tuple[Hashable, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cut: bool = False


def broken(answer: Answer) -> str | None:
    """Why this answer alone proves that the model's numbers are wrong, or None.

    A server writes NaN as ``NaN`` or ``null``, by its JSON library. Greedy choice among NaN, or among logits that a
    NaN filter made equal, is token 0.
    """
    for number, value in enumerate(answer.logprobs):
        if value is None:
            return f"the log-prob of output token {number} is null, which is how a NaN is written"
        if not isfinite(value):
            return f"the log-prob of output token {number} is {value}"
    if len(answer.ids) >= _ENOUGH and all(one == 0 and isinstance(one, int) for one in answer.ids):
        return f"all {len(answer.ids)} output tokens are token 0, as of NaN logits"
    return None


def degenerate(answers: Sequence[Answer]) -> str | None:
    """Why these answers to different prompts together prove that the output is nonsense, or None."""
    judged = [one for one in _by_prompt(answers) if _long_enough(one)]
    if len(judged) < _PROMPTS:
        return None
    units = [_cycle(one) for one in judged]
    if None not in units and len(set(units)) == 1:
        return f"the answers to {len(judged)} different prompts all repeat {_shown(judged[0])}"
    if all(_unreadable(one.text) for one in judged):
        return f"the answers to {len(judged)} different prompts are unreadable, such as {judged[0].text[:20]!r}"
    return None


def doubtful(answers: Sequence[Answer]) -> str | None:
    """Why nothing can be said from these answers, though nothing is proven: every one repeats itself, or is empty."""
    different = _by_prompt(answers)
    if len(different) >= _PROMPTS and not any(one.text or one.ids for one in different):
        return f"the answers to {len(different)} different prompts are empty"
    judged = [one for one in different if _long_enough(one)]
    if len(judged) >= _PROMPTS and all(_cycle(one) is not None for one in judged):
        return (
            f"each of {len(judged)} answers repeats itself in its own way, as a model with random weights does, "
            "and a broken attention too"
        )
    return None


def repetitive(answer: Answer) -> bool:
    """Whether an answer is one token, or a cycle of up to four, from its beginning to its end."""
    return _long_enough(answer) and _cycle(answer) is not None


def changed(first: Answer, second: Answer) -> str | None:
    """Why two greedy answers to one prompt differ by more than other kernels explain, or None.

    Until the answers part, both saw the same tokens, so the log-probs there must agree within ``TOLERANCE``. Where they
    part, either choice must have been possible for the other too: if one gave its own token a probability p, what the
    other chose had at most 1 - p, and must not have come to more than that by over ``TOLERANCE``. Without log-probs
    nothing is said, for a tie may fall either way. (Which tokens follow after they part means nothing.)
    """
    ids = list(zip(first.ids, second.ids, strict=False))
    a, b = first.logprobs, second.logprobs
    for number, ((x, y), left, right) in enumerate(zip(ids, a, b, strict=False)):
        if left is None or right is None:
            return None
        if x == y:
            if abs(left - right) > TOLERANCE:
                return f"the log-prob of output token {number} changed from {left:.2f} to {right:.2f}"
            continue
        if right - _log_rest(left) > TOLERANCE and left - _log_rest(right) > TOLERANCE:
            before, now = exp(min(left, 0.0)), exp(min(right, 0.0))
            return (
                f"output token {number} is another one, and no tie: probability {before:.2f} for {x!r} before, "
                f"{now:.2f} for {y!r} now"
            )
        return None
    return None


def _log_rest(logprob: float) -> float:
    """log(1 - p): the most that any other token had."""
    return log1p(-min(exp(min(logprob, 0.0)), 1 - 1e-9))


def _by_prompt(answers: Sequence[Answer]) -> list[Answer]:
    return list({one.prompt: one for one in answers}.values())


def _long_enough(answer: Answer) -> bool:
    return len(answer.ids) >= _ENOUGH if answer.ids else len(answer.text) >= _ENOUGH_TEXT


def _cycle(answer: Answer) -> tuple[Hashable, ...] | None:
    """What is repeated from the beginning to the end, turned so that it begins with its smallest, or None."""
    items: Sequence[Hashable] = answer.ids or answer.text
    longest = _LONGEST_CYCLE if answer.ids else min(_LONGEST_CYCLE_TEXT, len(items) // 3)
    for period in range(1, min(longest, len(items) // 2) + 1):
        if all(items[at] == items[at - period] for at in range(period, len(items))):
            unit = tuple(items[:period])
            return min((unit[at:] + unit[:at] for at in range(period)), key=repr)
    return None


def _shown(answer: Answer) -> str:
    return f"{answer.text[:24]!r}" if answer.text else f"tokens {list(answer.ids[:_LONGEST_CYCLE])}"


def _unreadable(text: str) -> bool:
    """Whether it is replacement and control characters alone (or tokens that decode to nothing). Blanks are neither."""
    if text and text.isspace():
        return False
    return all(char == "\ufffd" or unicodedata.category(char) in ("Cc", "Cf", "Cn", "Co", "Cs") for char in text)
