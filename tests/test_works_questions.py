"""Local questions: the file, the rules by which answers are judged, and the accuracy of a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.answers import Answers
from pytest_gpuguard.measure.questions import Question, QuestionError, accuracy_fact, asked, read_questions, right
from pytest_gpuguard.measure.works import works
from tests.answers_server import AnswersServer, answers_server


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines), encoding="utf-8")
    return path


def probe(server: AnswersServer, questions: Path) -> Answers:
    return works(
        server.url,
        {},
        "full",
        context=None,
        model=None,
        alive=server.alive,
        questions=questions,
        deadline_s=30.0,
    )


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"question": "2 + 2?", "answer": 4},
        "",
        {"max_tokens": 32},
        {"prompt": "The capital of Italy is", "answer": "Rome"},
        {"question": "Which is a fruit?", "choices": ["stone", "apple"], "answer": "apple", "max_tokens": 8},
        {"question": "Which?", "choices": ["stone", "apple"], "answer": "a"},
        {"question": "How much?", "answer": "1,200"},
        {"question": "Say yes", "answer": "yes", "match": "exact"},
    )
    assert read_questions(path) == [
        Question("2 + 2?", "4", "number"),
        Question("The capital of Italy is", "Rome", "contains", chat=False, max_tokens=32),
        Question("Which is a fruit?", "B", "choice", ("stone", "apple"), max_tokens=8),
        Question("Which?", "A", "choice", ("stone", "apple"), max_tokens=32),
        Question("How much?", "1,200", "number", max_tokens=32),
        Question("Say yes", "yes", "exact", max_tokens=32),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("[1]", "is no JSON object, such as"),
        ({"question": "a", "answer": "b", "anser": "c"}, "unknown key 'anser'; there are answer, choices"),
        ({"question": "a", "prompt": "a", "answer": "b"}, 'give one of "question" and "prompt"'),
        ({"answer": "b"}, 'give one of "question" and "prompt"'),
        ({"question": " ", "answer": "b"}, "the question is empty, or no text"),
        ({"question": "a"}, '"answer" is missing, empty'),
        ({"question": "a", "answer": True}, '"answer" is missing, empty, or neither text nor number'),
        ({"question": "a", "answer": "b", "match": "fuzzy"}, '"match" is one of exact, number, contains, choice'),
        ({"question": "a", "answer": "b", "match": ["exact"]}, '"match" is one of exact, number, contains, choice'),
        ({"question": "a", "answer": "b", "match": "number"}, "has no number"),
        ({"question": "a", "answer": "b", "match": "choice"}, '"choices" and "match": "choice" go together'),
        ({"question": "a", "answer": "b", "choices": "cd"}, '"choices" is a list of texts'),
        ({"question": "a", "answer": "b", "choices": ["c"]}, "there are 1 choices: 2 to 10"),
        ({"question": "a", "answer": "c", "choices": ["d", "e"]}, "is none of the choices, nor a letter A to B"),
        ({"question": "a", "answer": "d", "choices": ["d", "D"]}, "two choices are 'd'"),
        ({"question": "a", "answer": "b", "max_tokens": 0}, '"max_tokens" is a positive whole number, not 0'),
        ({"max_tokens": "many"}, "\"max_tokens\" is a positive whole number, not 'many'"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    path = written(tmp_path, {"question": "a", "answer": "b"}, "", line)
    with pytest.raises(QuestionError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


def test_a_file_without_questions_or_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match="there is no question in it"):
        read_questions(written(tmp_path, ""))
    with pytest.raises(QuestionError, match="the questions cannot be read"):
        read_questions(tmp_path / "absent.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuestionError, match="the questions cannot be read"):
        read_questions(tmp_path / "bytes")


CHOICES = ("stone", "apple", "a bus")


@pytest.mark.parametrize(
    ("match", "answer", "text", "is_right"),
    [
        ("number", "42", "12 + 30 = 42.", True),
        ("number", "42", "It is 42, not 43", False),
        ("number", "42", "**42.0**", True),
        ("number", "1,200", "about 1200", True),
        ("number", "1200", "That makes $1,200.00", True),
        ("number", "-3", "The result is -3", True),
        ("number", "3", "5-3", True),
        ("number", "-3", "The result is −3", True),
        ("number", "7", "model w7", False),
        ("number", "7", "", False),
        ("exact", "Rome", " rome.\n", True),
        ("exact", "Rome", "It is Rome", False),
        ("contains", "Rome", "It is ROME, of course", True),
        ("contains", "Rome", "Romeo", False),
        ("contains", "C++", "C++ is a language", True),
        ("choice", "B", "B", True),
        ("choice", "B", "(B) apple", True),
        ("choice", "B", "The answer is B.", True),
        ("choice", "B", "A is wrong. The answer: **B**", True),
        ("choice", "B", "A good question! I choose B", True),
        ("choice", "A", "A good question! I choose B", False),
        ("choice", "B", "Apple", True),
        ("choice", "C", "a bus.", True),
        ("choice", "B", "no idea", False),
        ("choice", "B", "", False),
    ],
)
def test_answers_are_judged_by_fixed_rules(match: Any, answer: str, text: str, is_right: bool) -> None:
    choices = CHOICES if match == "choice" else ()
    assert right(Question("q", answer, match, choices), text) is is_right


def test_choices_are_asked_by_letter() -> None:
    assert asked(Question("Which?", "B", "choice", ("x", "y"))) == (
        "Which?\nA. x\nB. y\nAnswer with the letter of the right choice."
    )
    assert asked(Question("Which?", "B", "choice", ("x", "y"), chat=False)) == "Which?\nA. x\nB. y\nAnswer:"


def test_the_accuracy_of_a_server_is_told_with_its_interval(tmp_path: Path) -> None:
    lines = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(20)]
    replies = {f"{n} + 1?": f"It is {n + 1 if n < 17 else 99}." for n in range(20)}
    with answers_server(replies=replies) as server:
        found = probe(server, written(tmp_path, *lines))
    assert (found.correct, found.total, found.accuracy) == (17, 20, 0.85)
    assert found.ok is True
    assert found.checks[-1].fact == "17 of 20 questions answered rightly: 0.850 (95 % interval 0.640 to 0.948)"
    assert accuracy_fact(20, 20).endswith("1.000 (95 % interval 0.839 to 1.000)")


@pytest.mark.parametrize(("fault", "asked_at"), [(None, "/v1/chat/completions"), ("no_chat", "/generate")])
def test_prompts_are_continued_and_questions_go_through_the_chat_template_if_there_is_one(
    tmp_path: Path, fault: str | None, asked_at: str
) -> None:
    replies = {"Italy's capital is": "Rome of course", "Which town?": "Rome"}
    path = written(
        tmp_path, {"prompt": "Italy's capital is", "answer": "Rome"}, {"question": "Which town?", "answer": "Rome"}
    )
    with answers_server(fault, replies=replies) as server:
        found = probe(server, path)
        asked = {one: where for where, body in server.bodies for one in replies if f'"{one}"' in json.dumps(body)}
    assert found.accuracy == 1.0
    assert asked == {"Italy's capital is": "/generate", "Which town?": asked_at}
    assert ("without a chat template" in found.checks[-1].fact) is (fault is not None)


def test_accuracy_is_not_known_when_questions_fail(tmp_path: Path) -> None:
    too_long = {"prompt": "word " * 5000, "answer": "x"}
    with answers_server() as server:
        found = probe(server, written(tmp_path, {"prompt": "short", "answer": "x"}, too_long))
    assert found.accuracy is None
    assert found.ok is None
    assert "1 of 2 questions got no answer: /generate answered 400" in found.checks[-1].fact
    with answers_server() as server:
        found = probe(server, tmp_path / "absent.jsonl")
    assert found.checks[-1].ok is None
    assert "cannot be read" in found.checks[-1].fact
