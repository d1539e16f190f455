"""What a reference is compared with, and what it must not be made of or written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_gpuguard.claims.answers import Check
from pytest_gpuguard.cli import main
from pytest_gpuguard.measure.ask import Asker
from pytest_gpuguard.measure.reference import BadReference, agrees, make, read, write
from pytest_gpuguard.measure.replies import base_name
from tests.answers_server import answers_server

TEXT = json.dumps({"text": "one two three " * 10})


def compared(path: Path, served: str, fault: str | None) -> Check:
    with (
        answers_server(fault, model_info={"model_path": served}) as server,
        Asker(server.url, {}, deadline_s=20.0) as asker,
    ):
        return agrees(asker, path)


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["reference", *map(str, args)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with (
        answers_server(model_info={"model_path": "org/Big-70B"}) as server,
        Asker(server.url, {}, deadline_s=20.0) as asker,
    ):
        write(make(asker), tmp_path / "ref.json")
    return tmp_path / "ref.json"


@pytest.mark.parametrize(
    ("fault", "served", "ok"),
    [
        (None, "org/Small-1B", True),
        ("garbage", "org/Small-1B", None),
        ("garbage", "/models/big-70b/", False),
        ("garbage", "/hub/models--org--Big-70B/snapshots/0123abc", False),
    ],
)
def test_another_model_is_not_called_broken(path: Path, fault: str | None, served: str, ok: bool | None) -> None:
    found = compared(path, served, fault)
    assert found.ok is ok
    assert "org/Big-70B" in found.fact
    assert (served in found.fact) is ("Small" in served)
    if ok is None:
        assert found.fact.startswith("the reference is made of org/Big-70B, and this serves org/Small-1B: ")
        assert found.outcome == "ready"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/Name-7B", "name-7b"),
        ("/models/Name-7B/", "name-7b"),
        ("Name-7B", "name-7b"),
        ("/hub/models--org--Name-7B/snapshots/0123abc", "name-7b"),
        ("/hub/models--gpt2/snapshots/0123abc/", "gpt2"),
        ("", ""),
    ],
)
def test_the_base_name_of_a_model(model: str, name: str) -> None:
    assert base_name(model) == name


def test_log_probs_are_not_asked_of_a_server_that_embeds(path: Path) -> None:
    with answers_server("embeds", is_embedding=True) as server, Asker(server.url, {}) as asker:
        assert agrees(asker, path).ok is None
        with pytest.raises(BadReference, match="an embedding or reward server generates no text"):
            make(asker)
        assert server.bodies == []


def test_a_folder_that_is_not_there_is_noticed_before_anything_is_asked(tmp_path: Path) -> None:
    with answers_server() as server:
        done = run(server.url, "-o", tmp_path / "no" / "ref.json")
        assert server.bodies == []
    assert done.exit_code == 2
    assert "there is no folder" in done.output.replace("\n", " ")


def test_the_prompts_are_not_overwritten(tmp_path: Path) -> None:
    texts, alias = tmp_path / "texts.jsonl", tmp_path / "alias.jsonl"
    texts.write_text(TEXT)
    alias.symlink_to(texts)
    with answers_server() as server:
        for output in (texts, alias):
            done = run(server.url, "-o", output, "--prompts", texts, "--force")
            assert done.exit_code == 2
            assert "holds the prompts" in done.output.replace("\n", " ")
    assert texts.read_text() == TEXT


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"text": "half \\ud83d"}', "has half of a surrogate pair"), ("[" * 100_000, "is no JSON")],
)
def test_a_prompt_that_cannot_be_sent_or_read_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(f"{TEXT}\n{line}\n")
    with answers_server() as server:
        done = run(server.url, "-o", tmp_path / "ref.json", "--prompts", texts)
        assert server.bodies == []
    assert done.exit_code == 2
    assert "texts.jsonl:2: " in done.output.replace("\n", "")
    assert message in done.output.replace("\n", " ")


@pytest.mark.parametrize("odd", ["\u2028", "\x85"])
def test_a_line_of_prompts_ends_at_a_line_feed_alone(tmp_path: Path, odd: str) -> None:
    texts = tmp_path / "texts.jsonl"
    text = f"one{odd}two " * 20
    texts.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    with answers_server() as server:
        done = run(server.url, "-o", tmp_path / "ref.json", "--prompts", texts)
    assert done.exit_code == 0, done.output
    assert [one.text for one in read(tmp_path / "ref.json").passages] == [text]


def test_a_model_whose_name_cannot_be_written_leaves_no_file_behind(tmp_path: Path) -> None:
    with answers_server(model_info={"model_path": "half \ud83d"}) as server:
        done = run(server.url, "-o", tmp_path / "ref.json")
    assert done.exit_code == 2
    assert "cannot be written" in done.output.replace("\n", " ")
    assert not list(tmp_path.iterdir())
