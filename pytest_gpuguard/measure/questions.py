"""Accuracy over a local file of questions, judged by fixed rules: no model, no network, the same verdict every time.

It must not guess what a file means: a line that it does not understand is an error with file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal, cast

from ..claims.answers import Check, wilson
from .ask import CHAT, Asker
from .prompts import is_sendable
from .replies import Failed, Reply, read_openai
from .sanity import Answer, broken, degenerate

Match = Literal["exact", "number", "contains", "choice"]
MATCHES: Final = ("exact", "number", "contains", "choice")
#: Output tokens of one answer, unless the file says otherwise.
MAX_TOKENS: Final = 256
_CONCURRENCY: Final = 8
_LETTERS: Final = "ABCDEFGHIJ"
_KEYS: Final = frozenset({"prompt", "question", "answer", "choices", "match", "max_tokens"})
#: More answers than this share that were cut before they began, and nothing is said about the others.
_MOST_CUT: Final = 0.05
_THOUGHT: Final = "</think>"
#: Scripts whose words no blank parts, or that hang particles on a word: Thai to Myanmar, Khmer, Chinese, Japanese,
#: Korean. A word of another script ends where one of these begins.
_UNPARTED: Final = (
    r"\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    r"\uff66-\uffdc\U00020000-\U0003ffff"
)
#: One character of a word of any other script.
_WORD: Final = rf"[^\W{_UNPARTED}]"
_PART: Final = rf"[^\W_{_UNPARTED}]"
_NUMBER: Final = re.compile(
    # Before a number may stand the code of a currency, or an underscore that is no part of a name.
    rf"(?:(?<!{_PART})(?<!{_PART}_)(?<!\.)|(?<=USD|EUR|GBP|CHF|CNY|RMB|JPY|INR|KRW))"
    rf"[-+−]?(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+−]?\d{{1,4}}(?!{_PART}))?"
)
_SAID: Final = re.compile(r"\b(?i:answer)(\s+is\b)?(?:[\s*]*([:：]))?|答案\s*([是为為:：])?\s*[:：]?")
_MARKUP: Final = r"[\s:：*(（\[{\"'“`$]*(?:\\[(\[]\s*)?(?:\\(?:boxed|text|mathbf)\{\s*)*"
#: A small letter is one only where nothing follows it: "a" is an article.
_SMALL: Final = r"([a-j])(?=\s*$|[,;:!?)\]}*]|\.(?!\S))"
_LETTER: Final = rf"(?:([A-J])(?!{_WORD}|['’]\w)|{_SMALL})"
_SAID_LETTER: Final = re.compile(_MARKUP + _LETTER)
_FIRST_LETTER: Final = re.compile(rf"\W*(?!\S\s+[a-z]){_LETTER}")
_LONE_LETTER: Final = re.compile(rf"(?<!{_WORD})([A-J])(?!{_WORD}|['’]\w|\s+[a-z])")


class QuestionError(ValueError):
    """A file of questions cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question. ``chat``: asked through the chat template, as a "question"; a "prompt" is continued as it is."""

    text: str
    answer: str
    match: Match
    choices: tuple[str, ...] = ()
    chat: bool = True
    max_tokens: int = MAX_TOKENS


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSON Lines file.

    A line is an object with "question" or "prompt", "answer", and maybe "choices" (a list of texts), "match" ("exact",
    "number", "contains" or "choice"; by default "choice" with choices, "number" for an answer that is one, else
    "contains") and "max_tokens". A line with "max_tokens" alone sets it for the lines after it. Raises QuestionError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionError(f"{path}: the questions cannot be read: {error}") from None
    found: list[Question] = []
    tokens = MAX_TOKENS
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line, parse_float=Decimal)
            if not isinstance(said, dict):
                raise QuestionError('is no JSON object, such as {"question": "…", "answer": "…"}')
            if said.keys() == {"max_tokens"}:
                tokens = _positive(said["max_tokens"])
                continue
            found.append(_question(said, tokens))
        except QuestionError as error:
            raise QuestionError(f"{path}:{number}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise QuestionError(f"{path}:{number}: is no JSON: {error}") from None
    if not found:
        raise QuestionError(f'{path}: there is no question in it; a line is {{"question": "…", "answer": "…"}}')
    return found


def _question(said: dict[str, Any], tokens: int) -> Question:
    unknown = sorted(said.keys() - _KEYS)
    if unknown:
        raise QuestionError(f"unknown key {unknown[0]!r}; there are {', '.join(sorted(_KEYS))}")
    if ("prompt" in said) == ("question" in said):
        raise QuestionError('give one of "question" and "prompt"')
    chat = "question" in said
    text, answer = said["question" if chat else "prompt"], said.get("answer")
    if not isinstance(text, str) or not text.strip():
        raise QuestionError("the question is empty, or no text")
    if not is_sendable(text):
        raise QuestionError("the question has half of a surrogate pair, which cannot be sent")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, Decimal)) or not str(answer).strip():
        raise QuestionError('"answer" is missing, empty, or neither text nor number')
    answer = str(answer).strip()
    choices = said.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(one, str) and one.strip() for one in choices):
        raise QuestionError('"choices" is a list of texts')
    if choices and not 2 <= len(choices) <= len(_LETTERS):
        raise QuestionError(f"there are {len(choices)} choices: 2 to {len(_LETTERS)} can be told apart by a letter")
    match = said.get(
        "match", "choice" if choices else "number" if number_in(answer) == answer.replace(",", "") else "contains"
    )
    if match not in MATCHES:
        raise QuestionError(f'"match" is one of {", ".join(MATCHES)}, not {match!r}')
    if (match == "choice") != bool(choices):
        raise QuestionError('"choices" and "match": "choice" go together')
    if match == "number" and number_in(answer) is None:
        raise QuestionError(f'the answer {answer!r} has no number, but "match" is "number"')
    if match == "choice":
        letters = _LETTERS[: len(choices)]
        by_text = [letter for letter, one in zip(letters, choices, strict=False) if _plain(one) == _plain(answer)]
        if len(by_text) > 1:
            raise QuestionError(f"two choices are {answer!r}")
        answer = by_text[0] if by_text else answer.upper()
        if len(answer) != 1 or answer not in letters:
            raise QuestionError(
                f"the answer {said['answer']!r} is none of the choices, nor a letter {letters[0]} to {letters[-1]}"
            )
    tokens = _positive(said["max_tokens"]) if "max_tokens" in said else tokens
    return Question(text, answer, cast(Match, match), tuple(choices), chat, tokens)


def _positive(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shown = str(value) if isinstance(value, Decimal) else repr(value)
        raise QuestionError(f'"max_tokens" is a positive whole number, not {shown}')
    return value


def asked(question: Question) -> str:
    """The text that is sent: choices get letters, and are asked for by them."""
    if not question.choices:
        return question.text
    lines = [f"{letter}. {one}" for letter, one in zip(_LETTERS, question.choices, strict=False)]
    closing = "Answer with the letter of the right choice." if question.chat else "Answer:"
    return "\n".join([question.text, *lines, closing])


def right(question: Question, text: str) -> bool:
    """Whether this text answers the question rightly.

    What a model thinks aloud, up to the last ``</think>``, is no part of its answer. "exact": the same text but for
    case, blanks and a full stop at the end. "number": the last number in the text has the same value (thousands may be
    parted by commas). "contains": the answer stands in it as words, or in Chinese and its like anywhere. "choice": the
    choice whose text it is, else the letter or the choice after the last "answer is", else a letter that the text
    begins with, else the last that stands alone.
    """
    text = _answering(text)
    if question.match == "exact":
        return _plain(text) == _plain(question.answer)
    if question.match == "number":
        said = number_in(text)
        wanted = number_in(question.answer)
        return said is not None and wanted is not None and Decimal(said) == Decimal(wanted)
    if question.match == "contains":
        return _stands_in(_plain(question.answer), _plain(text))
    return _letter(text, question.choices) == question.answer


def number_in(text: str) -> str | None:
    """The last number in a text, without commas; None when it has none."""
    found = _NUMBER.findall(text)
    return str(found[-1]).replace(",", "").replace("−", "-") if found else None


def _letter(text: str, choices: tuple[str, ...]) -> str | None:
    letters = _LETTERS[: len(choices)]
    same = [letter for letter, one in zip(letters, choices, strict=True) if _plain(one) == _plain(text)]
    if len(same) == 1:
        return same[0]
    enough = 2 * max(map(len, choices)) + 100  # a model that says "answer" for ever must not take for ever
    for one in reversed(list(_SAID.finditer(text))):
        found = _after(text[one.end() : one.end() + enough], choices, named=one.lastindex is not None)
        if found is not None:
            return found
    first = _FIRST_LETTER.match(text)
    for letter in ((first[1] or first[2]).upper() if first else "", *_LONE_LETTER.findall(text)[-1:]):
        if letter and letter in letters:
            return str(letter)
    return None


def _after(rest: str, choices: tuple[str, ...], named: bool) -> str | None:
    """The letter of the choice that this begins with, by its letter or, when ``named``, by its text."""
    line = _bare(re.sub(rf"^{_MARKUP}", "", rest))
    by_text = [
        (len(_bare(one)), letter)
        for letter, one in zip(_LETTERS, choices, strict=False)
        if re.match(re.escape(_bare(one)) + _end(_bare(one)) + r"(?!\.\d)", line)
    ]
    # "C++" is no C: a text that is longer than a letter says more than the letter does.
    size, letter = max(by_text, default=(0, ""))
    if named and size > 1 and [one for one, _ in by_text].count(size) == 1:
        return letter
    said = _SAID_LETTER.match(rest)
    if said is not None and (found := (said[1] or said[2]).upper()) in _LETTERS[: len(choices)]:
        return found
    return letter if named and len(by_text) == 1 else None


def _bare(text: str) -> str:
    """Without the article at its beginning."""
    return re.sub(r"^(?:the|an?)\s+", "", _plain(text))


def _stands_in(words: str, text: str) -> bool:
    start = "" if re.match(f"[{_UNPARTED}]", words) else rf"(?<!{_WORD})"
    return re.search(f"{start}{re.escape(words)}{_end(words)}", text) is not None


def _end(words: str) -> str:
    """The pattern of where these words may end."""
    return "" if re.search(f"[{_UNPARTED}]$", words) else f"(?!{_WORD})"


def _answering(text: str) -> str:
    """What is answered, without what was thought before; nothing when the thinking does not end."""
    before, ended, after = text.rpartition(_THOUGHT)
    return after if ended or not after.lstrip().startswith("<think>") else before


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def accuracy(asker: Asker, path: Path) -> tuple[Check, tuple[int, int] | None]:
    """Ask all questions of a file, eight at once and greedily: the check, and how many of how many were right.

    The check is ``ok`` once all were answered: what accuracy is enough, the claim says.
    """
    name = "accuracy"
    try:
        questions = read_questions(path)
    except QuestionError as error:
        return Check(name, None, str(error)), None
    chat = any(one.chat for one in questions) and _has_chat(asker)
    replies = asker.together([_job(asker, one, chat) for one in questions], _CONCURRENCY)
    failed = [one for one in replies if isinstance(one, Failed)]
    if failed:
        real = [one for one in failed if not one.refused]
        first = (real or failed)[0]
        fact = f"{len(failed)} of {len(replies)} questions got no answer: {first.fact}"
        return Check(name, False if real else None, fact, first.outcome if real else "ready"), None
    answers = [one for one in replies if isinstance(one, Answer)]
    why = next(filter(None, map(broken, answers)), None) or degenerate(answers)
    if why is not None:
        return Check(name, False, why, "numerics"), None
    thinks = any(_THOUGHT in one.text for one in answers)
    begun = [
        (question, one)
        for question, one in zip(questions, answers, strict=True)
        if not one.cut or (_answering(one.text).strip() and (_THOUGHT in one.text or not (thinks and question.chat)))
    ]
    asked_in_chat = [one for question, one in zip(questions, answers, strict=True) if question.chat and chat]
    if asked_in_chat and all(one.cut for one in asked_in_chat):
        # Where the template opens the thinking, nothing in a text that was cut tells it from an answer.
        fact = f"all {len(asked_in_chat)} answers were cut at their max_tokens: raise it, or the model never ends"
        return Check(name, None, fact), None
    unbegun = len(answers) - len(begun)
    if unbegun > _MOST_CUT * len(answers):
        fact = f"{unbegun} of {len(answers)} answers were cut at their max_tokens before they began: raise max_tokens"
        return Check(name, None, fact), None
    correct = sum(right(question, one.text) for question, one in begun)
    cut = sum(one.cut for _, one in begun)
    fact = accuracy_fact(correct, len(begun))
    how = "" if chat or not any(one.chat for one in questions) else ", without a chat template"
    if cut:
        how += f"; {cut} answers were cut at their max_tokens"
    if unbegun:
        how += f"; {unbegun} more were cut before they began, and are not counted"
    return Check(name, True, f"{fact}{how}"), (correct, len(begun))


def accuracy_fact(correct: int, total: int) -> str:
    """Share of right answers, with how sure it is."""
    low, high = wilson(correct, total)
    share = f"{correct / total:.3f} (95 % interval {low:.3f} to {high:.3f})"
    return f"{correct} of {total} questions answered rightly: {share}"


def _job(asker: Asker, question: Question, chat: bool) -> Callable[[], Reply]:
    def job() -> Reply:
        if not (question.chat and chat):
            return asker.answer_here(asked(question), question.max_tokens)
        text = asked(question)
        said = asker.post(CHAT, _chat(asker, text, question.max_tokens))
        return said if isinstance(said, Failed) else read_openai(text, said)

    return job


def _chat(asker: Asker, text: str, tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": asker.model(), "messages": [message], "max_tokens": tokens, "temperature": 0}


def _has_chat(asker: Asker) -> bool:
    """Whether the server takes chats: base models have no template, and some servers no such endpoint."""
    said = asker.together([lambda: _tried(asker)])[0]
    return not (isinstance(said, Failed) and said.refused)


def _tried(asker: Asker) -> Reply:
    said = asker.post(CHAT, _chat(asker, "Say yes.", 1))
    return said if isinstance(said, Failed) else read_openai("Say yes.", said)
