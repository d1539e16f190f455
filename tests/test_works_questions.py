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
        ({"question": "a", "answer": "b", "max_tokens": 8.5}, '"max_tokens" is a positive whole number, not 8.5'),
        ('{"question": "a", "answer": NaN}', '"answer" is missing, empty, or neither text nor number'),
        ('{"question": "a\\ud83d", "answer": "b"}', "has half of a surrogate pair, which cannot be sent"),
        ("[" * 100_000, "is no JSON: "),
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


@pytest.mark.parametrize("odd", ["\u2028", "\x85"])
def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": f"a{odd}b", "answer": "c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_questions(path)[0].text == f"a{odd}b"


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
        ("number", "5", "答案是5", True),
        ("number", "5", "共5个", True),
        ("number", "5", "It is __5__", True),
        ("number", "5", "It is _5_.", True),
        ("number", "5", "step_5", False),
        ("number", "42", "That makes USD42", True),
        ("number", "4090", "an RTX4090", False),
        ("number", "1e-7", "0.0000001", True),
        ("number", "1e-7", "It is 1E-07.", True),
        ("number", "1E-7", "7", False),
        ("number", "1.5e-3", "about 1.5e\u22123", True),
        ("number", "1e16", "10000000000000000", True),
        ("number", "10000000000000001", "10000000000000000", False),
        ("number", "2", "1e5000000000 and 2", True),
        ("exact", "Paris", "<think>\nLyon?\n</think>\n\nParis", True),
        ("contains", "Paris", "<think>Paris? No.</think>\n\nLyon", False),
        ("contains", "Paris", "<think>It may be Paris", False),
        ("number", "5", "a </think> 6 </think> 5", True),
        ("contains", "巴黎", "法国的首都是巴黎。", True),
        ("contains", "巴黎", "法国的首都是里昂。", False),
        ("contains", "Tokyo", "首都はTokyoです", True),
        ("contains", "서울", "수도는 서울입니다", True),
        ("contains", "Рим", "Римский", False),
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


ANIMALS = ("a cat", "a dog", "a cow", "a hen")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is a dog.", "B"),
        ("The correct answer: a dog", "B"),
        ("**Answer**: the dog", "B"),
        ("The answer is a bit tricky, but it is B.", "B"),
        ("I think the answer is a dog, so B.", "B"),
        ("The answer: a dog. **B**", "B"),
        ("B. A dog. The other answer a student may give is C", "B"),
        ("The answer is b.", "B"),
        ("the answer is (b) a dog", "B"),
        ("b) a dog", "B"),
        ("e.g. a dog? I say C", "C"),
        ("The answer is A because cats purr", "A"),
        ("The answer is $\\boxed{\\text{B}}$", "B"),
        ("The answer is a catfish", None),
        ("A Dog", "B"),
        ("答案是B。", "B"),
        ("B、狗", "B"),
        ("我选B因为它叫", "B"),
        ("<think>The answer is A.</think>The answer is B.", "B"),
    ],
)
def test_an_article_is_no_letter_and_a_choice_may_be_named_by_its_text(text: str, letter: str | None) -> None:
    assert [one for one in "ABCD" if right(Question("q", one, "choice", ANIMALS), text)] == ([letter] if letter else [])


def test_choices_that_begin_alike_are_told_apart() -> None:
    choices = ("4", "4.5", "C++", "C")
    for text, letter in (("4.", "A"), ("4.5", "B"), ("C++.", "C"), ("C", "C"), ("4.7", None)):
        said = f"The answer is {text}"
        assert [one for one in "ABCD" if right(Question("q", one, "choice", choices), said)] == [letter][: bool(letter)]


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


def _choice(content: str | None, finish: str = "stop") -> dict[str, Any]:
    return {"message": {"content": content, "reasoning_content": "Hm."}, "finish_reason": finish}


THOUGHT = _choice("<think>1? 99? </think>It is 4.")


@pytest.mark.parametrize(
    ("cut", "others"),
    [
        (_choice(None, "length"), THOUGHT),
        (_choice("<think>Let me see: 7", "length"), _choice("4")),
        (_choice("Let me see: 7", "length"), THOUGHT),  # the template began the thinking
    ],
)
def test_answers_that_were_cut_while_the_model_thought_are_undecided(
    tmp_path: Path, cut: dict[str, Any], others: dict[str, Any]
) -> None:
    names = [f"{n}: 2 + 2?" for n in range(40)]
    path = written(tmp_path, *({"question": one, "answer": 4} for one in names))
    for many, score in ((2, (38, 38)), (3, (None, None))):
        choices = {one: cut if at < many else others for at, one in enumerate(names)}
        with answers_server(choices=choices) as server:
            found = probe(server, path)
        assert (found.correct, found.total) == score
        if many == 2:
            assert "; 2 more were cut before they began, and are not counted" in found.checks[-1].fact
        else:
            assert found.checks[-1].ok is None
            assert found.checks[-1].fact == (
                "3 of 40 answers were cut at their max_tokens before they began: raise max_tokens"
            )


def test_answers_that_were_all_cut_may_be_thoughts(tmp_path: Path) -> None:
    names = [f"{n}: 2 + 2?" for n in range(5)]
    path = written(tmp_path, *({"question": one, "answer": 4} for one in names))
    with answers_server(choices={one: _choice(f"Let me see: {one} is 7", "length") for one in names}) as server:
        found = probe(server, path)
    assert (found.accuracy, found.checks[-1].ok) == (None, None)
    assert found.checks[-1].fact == ("all 5 answers were cut at their max_tokens: raise it, or the model never ends")


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
