"""Reference log-probs: made, written, read strictly, compared; and the command that makes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuguard.claims.answers import Check
from pytest_gpuguard.cli import main
from pytest_gpuguard.measure.ask import Asker
from pytest_gpuguard.measure.prompts import REFERENCE
from pytest_gpuguard.measure.reference import (
    LIMIT_NATS,
    BadReference,
    Difference,
    Passage,
    Reference,
    agrees,
    compare,
    make,
    read,
    write,
)
from pytest_gpuguard.measure.works import works
from tests.answers_server import AnswersServer, answers_server


def made(server: AnswersServer) -> Reference:
    with Asker(server.url, {}, deadline_s=20.0) as asker:
        return make(asker)


def checked(server: AnswersServer, path: Path) -> Check:
    with Asker(server.url, {}, alive=server.alive, deadline_s=20.0) as asker:
        return agrees(asker, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with answers_server() as server:
        write(made(server), tmp_path / "ref.json")
    return tmp_path / "ref.json"


def test_a_reference_comes_back_as_it_was_written(tmp_path: Path) -> None:
    with answers_server() as server:
        reference = made(server)
    write(reference, tmp_path / "ref.json")
    again = read(tmp_path / "ref.json")
    assert (again.model, again.engine, again.engine_version) == ("/models/stand-in", "sglang", "0.5.23")
    assert [one.text for one in again.passages] == list(REFERENCE)
    assert again.passages[0].logprobs[0] is None
    assert compare(again, reference.passages).mean_abs < 1e-6
    assert [one.name for one in tmp_path.iterdir()] == ["ref.json"]


def test_the_same_over_completions(tmp_path: Path) -> None:
    with answers_server("no_generate") as server:
        over_completions = made(server)
    with answers_server() as server:
        native = made(server)
    assert (over_completions.engine, over_completions.engine_version) == ("vllm", "0.19.0")
    assert over_completions.passages == native.passages


def test_the_same_stack_agrees_and_another_precision_does(path: Path) -> None:
    with answers_server() as server:
        same = checked(server, path)
    with answers_server("drifted") as server:
        drifted = checked(server, path)
    assert same.ok is True
    assert "differ by 0.000 nats in the mean (limit 0.85), KL at least 0.0000 per token" in same.fact
    assert "reference of /models/stand-in, sglang 0.5.23, " in same.fact
    assert drifted.ok is True


def test_garbage_does_not_agree(path: Path) -> None:
    with answers_server("garbage") as server:
        found = checked(server, path)
    assert (found.ok, found.outcome) == (False, "numerics")


@pytest.mark.parametrize(
    ("fault", "ok", "outcome", "fact"),
    [
        ("nan", False, "numerics", "the log-prob of token 3 is nan, and no number (in 'Water boils"),
        ("null", False, "numerics", "the log-prob of token 3 is null, and no number"),
        ("plain_500", False, "unknown", "answered 500"),
        ("malformed", False, "unknown", "what is no JSON object"),
        ("speculative", False, "unknown", "the connection broke"),
        ("no_logprobs", None, "ready", "the server gives no token ids with the log-probs of a prompt"),
        ("refuses_logprobs", None, "ready", "the server gives no log-probs of a prompt: /generate answered 400"),
        ("unauthorized", None, "ready", "answered 401"),
        ("no_endpoint", None, "ready", "answered 404"),
    ],
)
def test_faults_of_the_server(path: Path, fault: str, ok: bool | None, outcome: str, fact: str) -> None:
    with answers_server(fault) as server:
        found = checked(server, path)
    assert (found.ok, found.outcome) == (ok, outcome), found
    assert fact in found.fact


def test_speculative_decoding_is_not_asked_for_log_probs(path: Path, tmp_path: Path) -> None:
    with answers_server("speculative", speculative_algorithm="EAGLE3") as server:
        found = checked(server, path)
        done = run(server.url, "-o", tmp_path / "other.json")
        assert server.alive()
    assert found.ok is None
    assert done.exit_code == 2
    assert "without --speculative-algorithm" in done.output.replace("\n", " ")


def test_another_tokenizer_cannot_be_compared(path: Path) -> None:
    said = json.loads(path.read_text())
    said["passages"][2]["ids"][1] += 1
    path.write_text(json.dumps(said))
    with answers_server() as server:
        found = checked(server, path)
    assert found.ok is None
    assert "makes other tokens of 'Die Sonne" in found.fact
    assert "make a reference of this one" in found.fact


def test_the_full_form_compares(path: Path) -> None:
    for fault, ok in ((None, True), ("garbage", False)):
        with answers_server(fault) as server:
            found = works(
                server.url, {}, "full", context=None, model=None, alive=server.alive, reference=path, deadline_s=30.0
            )
        assert found.checks[-1].name == "reference"
        assert found.ok is ok
    with answers_server("garbage") as server:
        short = works(server.url, {}, context=None, model=None, alive=server.alive, reference=path, deadline_s=30.0)
    assert short.ok is True, "the short form compares with nothing"


def _changed(said: dict[str, Any], *keys: Any, to: Any) -> dict[str, Any]:
    inner: Any = said
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return said


@pytest.mark.parametrize(
    ("keys", "to", "message"),
    [
        (("format",), "other", 'is no reference ("format" is not "gpuguard-reference")'),
        (("version",), 2, "has version 2, and 1 is read here"),
        (("extra",), 1, "the key 'extra' is unknown"),
        (("model",), None, "'model' is no text"),
        (("engine",), 3, "'engine' is neither text nor null"),
        (("passages",), [], "there are no passages"),
        (("passages", 0), [], "passage 0: is no object with text, ids and logprobs"),
        (("passages", 1, "text"), 1, "passage 1: text is a text"),
        (("passages", 1, "ids"), [1], "passage 1: has 1 ids and"),
        (("passages", 1, "ids", 0), -1, "passage 1: -1 is no token id"),
        (("passages", 1, "ids", 0), True, "passage 1: True is no token id"),
        (("passages", 1, "logprobs", 2), None, "passage 1: the log-prob of token 2 is null"),
        (("passages", 1, "logprobs", 2), math.nan, "passage 1: the log-prob of token 2 is nan"),
        (("passages", 1, "logprobs", 2), "-1", "passage 1: the log-prob of token 2 is -1"),
        (("passages",), [{"text": "a", "ids": [1, 2], "logprobs": [None, -1.0]}], "has only 1 log-probs"),
    ],
)
def test_a_file_is_read_strictly(path: Path, keys: tuple[Any, ...], to: Any, message: str) -> None:
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), *keys, to=to)))
    with pytest.raises(BadReference) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "make it again with: gpuguard reference" in str(caught.value)


def test_a_missing_key_and_files_that_are_none(path: Path, tmp_path: Path) -> None:
    said = json.loads(path.read_text())
    del said["made"]
    path.write_text(json.dumps(said))
    with pytest.raises(BadReference, match="the key 'made' is missing"):
        read(path)
    for text, message in (("{", "cannot be read"), ("[]", "is no reference"), ("", "cannot be read")):
        path.write_text(text)
        with pytest.raises(BadReference, match=message):
            read(path)
    with pytest.raises(BadReference, match="there is no such reference; make it again with"):
        read(tmp_path / "absent")


def _reference(values: list[float]) -> Reference:
    return Reference("m", None, None, "now", (Passage("t", tuple(range(len(values) + 1)), (None, *values)),))


def _compared(before: list[float], after: list[float]) -> Difference:
    return compare(_reference(before), _reference(after).passages)


def test_the_difference_in_figures() -> None:
    found = _compared([math.log(0.5)] * 20, [math.log(0.25)] * 20)
    assert found.mean_abs == pytest.approx(math.log(2))
    assert found.gain == pytest.approx(-math.log(2))
    assert found.kl_at_least == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
    assert found.sound


def test_the_limit_parts_a_known_bad_kernel_from_a_sound_one() -> None:
    """Differences as of a mean KL divergence of 0.035 and 9.33: of that mean, with the variance of twice of it."""
    for divergence, sound in ((0.035, True), (9.33, False)):
        spread = math.sqrt(2 * divergence)
        steps = [spread * math.sqrt(2) * math.cos(math.pi * (n + 0.5) / 200) for n in range(200)]
        found = _compared([-12.0] * 200, [-12.0 - divergence + step for step in steps])
        assert found.sound is sound
        assert not 0.5 < found.mean_abs / LIMIT_NATS < 2, "far from the limit on both sides"


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=20, max_size=40))
def test_the_bound_of_the_divergence_is_never_negative_and_zero_for_the_same(pairs: list[tuple[float, float]]) -> None:
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    assert _compared(before, after).kl_at_least >= 0
    same = _compared(before, before)
    assert same.kl_at_least == pytest.approx(0, abs=1e-9)
    assert same.mean_abs == 0


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=6),
    st.integers(min_value=0, max_value=5),
)
def test_the_bound_is_below_the_divergence_over_all_tokens(weights: list[tuple[float, float]], at: int) -> None:
    p = [a / sum(x for x, _ in weights) for a, _ in weights]
    q = [b / sum(x for _, x in weights) for _, b in weights]
    at %= len(p)
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert _compared([math.log(p[at])] * 20, [math.log(q[at])] * 20).kl_at_least <= whole + 1e-9


def run(*args: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner(env=env or {}).invoke(main, ["reference", *map(str, args)])


def test_the_command_writes_a_reference(tmp_path: Path) -> None:
    with answers_server() as server:
        done = run(server.url, "-o", tmp_path / "ref.json", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert list(said) == ["file", "model", "engine", "engine_version", "made", "passages", "tokens", "mean_logprob"]
    assert (said["passages"], said["engine_version"], said["model"]) == (8, "0.5.23", "/models/stand-in")
    assert read(tmp_path / "ref.json").tokens == said["tokens"]


def test_the_command_for_people(tmp_path: Path) -> None:
    with answers_server() as server:
        done = run(server.url + "/", "-o", tmp_path / "ref.json")
    assert done.exit_code == 0, done.output
    assert "tokens of 8 texts, /models/stand-in, sglang 0.5.23" in done.output
    assert "nats per token" in done.output


def test_a_reference_is_not_replaced_unasked(path: Path) -> None:
    before = path.read_text()
    with answers_server("garbage") as server:
        done = run(server.url, "-o", path)
        assert done.exit_code == 2
        assert "--force replaces it" in done.output
        assert path.read_text() == before
        assert run(server.url, "-o", path, "--force").exit_code == 0
    assert path.read_text() != before


def test_the_command_takes_a_key_from_the_environment(tmp_path: Path) -> None:
    with answers_server(key="secret-7") as server:
        output = tmp_path / "ref.json"
        assert run(server.url, "-o", output).exit_code == 2
        unset = run(server.url, "-o", output, "--api-key-env", "GPUGUARD_TEST_KEY")
        assert unset.exit_code == 2
        assert "holds no key" in unset.output
        done = run(
            server.url, "-o", output, "--api-key-env", "GPUGUARD_TEST_KEY", env={"GPUGUARD_TEST_KEY": "secret-7"}
        )
    assert done.exit_code == 0, done.output
    assert "secret-7" not in done.output + output.read_text()


def test_the_command_takes_texts_of_its_own(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "one two three " * 10}) + "\n\n" + json.dumps({"text": "vier fünf"}) + "\n")
    with answers_server() as server:
        done = run(server.url, "-o", tmp_path / "ref.json", "--prompts", texts)
        assert done.exit_code == 0, done.output
        assert [one.text for one in read(tmp_path / "ref.json").passages][1] == "vier fünf"
        for line, message in (
            ("{", "is no JSON"),
            ('{"prompt": "a"}', 'a line is {"text"'),
            ('{"text": " "}', "not empty"),
        ):
            texts.write_text('{"text": "fine"}\n' + line)
            bad = run(server.url, "-o", tmp_path / "other.json", "--prompts", texts)
            assert bad.exit_code == 2
            assert f"{texts.name}:2: " in bad.output.replace("\n", "")
            assert message in bad.output
        texts.write_text('{"text": "too short"}')
        short = run(server.url, "-o", tmp_path / "other.json", "--prompts", texts)
    assert short.exit_code == 2
    assert "too few for a reference" in short.output
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://", "http://x:y"])
def test_a_url_that_is_none(tmp_path: Path, url: str) -> None:
    done = run(url, "-o", tmp_path / "ref.json")
    assert done.exit_code == 2
    assert "URL is of the form" in done.output


@pytest.mark.parametrize(("fault", "message"), [("nan", "is nan, and no number"), ("plain_500", "answered 500")])
def test_no_reference_is_made_of_a_broken_server(tmp_path: Path, fault: str, message: str) -> None:
    with answers_server(fault) as server:
        done = run(server.url, "-o", tmp_path / "ref.json")
    assert done.exit_code == 2
    assert message in done.output
    assert not list(tmp_path.iterdir())


def test_nothing_listens(tmp_path: Path) -> None:
    with answers_server() as server:
        pass
    done = run(server.url, "-o", tmp_path / "ref.json")
    assert done.exit_code == 2
    assert "ConnectError" in done.output


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with answers_server() as server:
        done = run(server.url, "-o", tmp_path / "no" / "ref.json")
    assert done.exit_code == 2
    assert "cannot be written" in done.output
