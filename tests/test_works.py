"""The probe of a server that says it is ready: every fault gives its own check, and nothing sound is called broken."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuguard.claims.answers import Answers, Check, wilson
from pytest_gpuguard.measure.ask import Asker
from pytest_gpuguard.measure.prompts import SHORT, storied, story
from pytest_gpuguard.measure.replies import Failed, read_native, read_openai
from pytest_gpuguard.measure.sanity import Answer
from pytest_gpuguard.measure.works import works
from tests.answers_server import AnswersServer, answers_server


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["text", "finish_reason", "type", "output_token_logprobs", "tokens", "logprobs", "message"])
    return st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4)


def probe(server: AnswersServer, level: str = "short", **more: Any) -> Answers:
    options: dict[str, Any] = {"context": None, "model": None, "alive": server.alive, "deadline_s": 20.0, **more}
    return works(server.url, {}, level, **options)


def test_a_healthy_server_passes_every_check_and_says_what_was_seen() -> None:
    with answers_server() as server:
        found = probe(server)
    assert found.ok is True
    assert found.first_bad is None
    assert [check.name for check in found.checks] == ["prefill", "same prompt again", "long prompt", "burst"]
    plain, again, long, burst = (check.fact for check in found.checks)
    assert "tokens prefilled" in plain
    assert "came from the prefix cache; the same answer" in again
    assert "in chunks of 512" in long
    assert "8 requests of mixed lengths at once" in burst


@pytest.mark.parametrize("fault", ["random", "own_repeat", "no_logprobs", "no_cache", "other_generate", "no_generate"])
def test_what_is_odd_but_not_broken_is_never_called_broken(fault: str) -> None:
    """Nearly uniform logits, tied random embeddings, answers without log-probs, no cache, only /v1/completions."""
    with answers_server(fault) as server:
        found = probe(server)
    assert found.first_bad is None, found.first_bad
    assert found.ok is (None if fault == "own_repeat" else True)


def test_answers_that_each_repeat_in_their_own_way_are_left_open() -> None:
    with answers_server("own_repeat") as server:
        found = probe(server)
    assert found.checks[-1].ok is None
    assert "in its own way, as a model with random weights does" in found.checks[-1].fact


@pytest.mark.parametrize(
    ("fault", "name", "outcome", "fact"),
    [
        ("nan", "prefill", "numerics", "the log-prob of output token 2 is nan"),
        ("null", "prefill", "numerics", "the log-prob of output token 2 is null"),
        ("infinite", "prefill", "numerics", "the log-prob of output token 2 is -inf"),
        ("zeros", "prefill", "numerics", "output tokens are token 0"),
        ("repeat", "burst", "numerics", "different prompts all repeat ' the the"),
        ("cycle", "burst", "numerics", "different prompts all repeat"),
        ("unreadable", "burst", "numerics", "different prompts are unreadable"),
        ("nan_completions", "burst", "numerics", "different prompts all repeat '!!!!"),
        ("second_dies", "same prompt again", "unknown", "the connection broke"),
        ("second_changes", "same prompt again", "numerics", "output token 0 is another one, and no tie"),
        ("second_drifts", "same prompt again", "numerics", "the log-prob of output token 0 changed from"),
        ("long_dies", "long prompt", "unknown", "the connection broke"),
        ("burst_dies", "burst", "unknown", "the connection broke"),
        ("burst_zeros", "burst", "numerics", "output tokens are token 0"),
        ("nan_500", "prefill", "numerics", "answered 500: NaN detected! sampler"),
        ("plain_500", "prefill", "unknown", "answered 500: a nano banana of finance"),
        ("malformed", "prefill", "unknown", 'answered 200 with what is no JSON object: \'{"text": "half an ans\''),
        ("no_text", "prefill", "unknown", "answered without a text"),
        ("error_200", "prefill", "unknown", "answered with an error: something went wrong"),
        ("abort_nan", "prefill", "numerics", "aborted the request: the logits were NaN"),
    ],
)
def test_each_fault_fails_its_own_check(fault: str, name: str, outcome: str, fact: str) -> None:
    with answers_server(fault) as server:
        found = probe(server)
    bad = found.first_bad
    assert bad is not None, found
    assert (bad.name, bad.outcome) == (name, outcome), bad
    assert fact in bad.fact
    assert found.ok is False
    assert found.checks[-1] is bad, "nothing is asked of a server that failed"


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        ("unauthorized", "answered 401: unauthorized"),
        ("no_endpoint", "answered 404: Not Found"),
        ("chat_only", "answered 404: Not Found"),
        ("refuses_all", "answered 400: unknown field `temperature`"),
        ("abort_400", "aborted the request: too long for me"),
    ],
)
def test_a_refusal_is_no_failure(fault: str, fact: str) -> None:
    with answers_server(fault) as server:
        found = probe(server)
    assert found.ok is None
    assert [check.name for check in found.checks] == ["prefill"]
    assert fact in found.checks[0].fact
    assert found.first_open is found.checks[0]


@pytest.mark.parametrize("info", [{"is_embedding": True}, {"model_info": {"is_generation": False}}, {}])
def test_a_server_that_embeds_is_not_judged(info: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "2 + 2 =", "answer": 4}')
    with answers_server("embeds", **info) as server:
        found = probe(server)
        assert [one for _, one in server.bodies if info] == [], "log-probs of an embedding model have killed servers"
        full = probe(server, "full", questions=path)
    for one in (found, full):
        assert one.ok is None
        assert one.checks[0] == Check("prefill", None, one.checks[0].fact)
        assert "an embedding or reward server generates no text" in one.checks[0].fact


def test_information_that_is_nested_too_deeply_to_be_read_is_none() -> None:
    with answers_server("deep_info") as server:
        assert probe(server).ok is True


def test_a_prompt_that_cannot_be_sent_is_refused() -> None:
    with answers_server() as server, Asker(server.url, {}) as asker:
        found = asker.answer("half a pair: \ud83d", 4)
        assert server.bodies == []
    assert isinstance(found, Failed)
    assert found.refused
    assert "the request is no text that can be sent" in found.fact


def test_empty_answers_are_left_open() -> None:
    with answers_server("empty") as server:
        found = probe(server)
    assert found.ok is None
    assert "different prompts are empty" in found.checks[-1].fact


def test_a_tie_that_falls_the_other_way_after_a_cache_hit_is_no_error() -> None:
    with answers_server("second_tie") as server:
        found = probe(server)
    assert found.ok is True
    assert "the answer differs, within what another kernel's rounding does" in found.checks[1].fact


@pytest.mark.parametrize("fault", ["refuses_logprobs", "logprobs_500"])
def test_a_server_that_gives_no_log_probs_is_judged_without(fault: str) -> None:
    with answers_server(fault) as server:
        found = probe(server)
        asked = [body.get("return_logprob", False) for _, body in server.bodies]
    assert found.ok is True
    assert "; without log-probs, for which /generate answered" in found.checks[0].fact
    assert asked.count(True) == 1, "asked once, and not again"


def test_log_probs_are_never_asked_of_speculative_decoding() -> None:
    """Several releases die of it (sglang#17349)."""
    with answers_server("speculative", speculative_algorithm="EAGLE3") as server:
        found = probe(server)
    assert found.ok is True
    assert "speculative decoding may not give them" in found.checks[0].fact


def test_the_same_prompt_is_asked_until_a_rank_has_it_in_its_cache() -> None:
    with answers_server("ranks", dp_size=8) as server:
        found = probe(server)
    assert "came from the prefix cache" in found.checks[1].fact
    with answers_server("no_cache", dp_size=3) as server:
        found = probe(server)
        asked = [body["text"] for _, body in server.bodies]
    assert "the server reports no prefix-cache hit" in found.checks[1].fact
    assert asked.count(asked[0]) == 4


def test_a_server_that_is_probed_again_gets_a_prefill_that_is_in_no_cache() -> None:
    with answers_server() as server:
        probe(server)
        before = dict(server.seen)
        assert probe(server).ok is True
        fresh = [one for one in server.seen if one not in before]
    assert len(fresh) >= 6


def test_a_hang_ends_at_the_deadline() -> None:
    with answers_server("hang") as server:
        started = time.monotonic()
        found = probe(server, deadline_s=0.6)
        took = time.monotonic() - started
    assert found.first_bad == Check("prefill", False, "no answer within 1 s, with the server alive", "hang.timeout")
    assert took < 2.5


def test_a_deadline_that_overtakes_answers_is_no_hang(tmp_path: Path) -> None:
    """The time for all checks is ours; a server that answers one question after the other is not to blame for it."""
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n} and", "answer": n}) for n in range(400)))
    with answers_server("slow") as server:
        found = probe(server, "full", questions=path, deadline_s=6.0)
    assert found.checks[-1].name == "accuracy"
    assert found.ok is None
    assert "questions got no answer: the time for all requests together ran out" in found.checks[-1].fact


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), _nested, max_leaves=12))
def test_no_answer_makes_the_reader_stumble(said: object) -> None:
    for keys in (("text", "meta_info", "output_ids"), ("choices", "usage")):
        body = {"text": "x", **dict.fromkeys(keys, said)}
        for reply in (read_native("p", body), read_openai("p", body)):
            assert isinstance(reply, (Answer, Failed))


def test_a_server_that_dies_without_closing_its_socket_is_not_waited_for() -> None:
    with answers_server("hang_dead") as server:
        started = time.monotonic()
        found = probe(server, deadline_s=60.0)
        took = time.monotonic() - started
    assert found.first_bad == Check("prefill", False, "the server died and gave no answer", "unknown")
    assert took < 2.5


def test_the_headers_carry_the_key() -> None:
    with answers_server(key="k") as server:
        assert probe(server).ok is None
        with_key = works(
            server.url, {"Authorization": "Bearer k"}, context=None, model=None, alive=server.alive, deadline_s=20.0
        )
    assert with_key.ok is True


def test_nothing_listens() -> None:
    with answers_server() as server:
        pass
    found = probe(server)
    assert found.first_bad is not None
    assert found.first_bad.outcome == "unknown"
    assert "the connection broke: ConnectError" in found.first_bad.fact


@pytest.mark.parametrize("context", [64, 128, 300, 700, 2048])
def test_prompts_fit_into_any_context(context: int) -> None:
    with answers_server(context=context) as server:
        found = probe(server)
    assert found.ok is True, found


def test_the_long_prompt_is_halved_when_the_server_takes_less_than_it_says() -> None:
    with answers_server(context=1200) as server:
        found = probe(server, context=4096)
        lengths = [len(body["text"]) for _, body in server.bodies][2:5]
    assert found.checks[2].ok is True
    assert lengths[0] > 1.8 * lengths[1]


def test_the_long_prompt_is_bounded_by_the_kv_pool_and_by_what_the_caller_says() -> None:
    with answers_server(max_total_num_tokens=900, context=100_000) as server:
        found = probe(server)
        longest = max(len(body["text"].split()) for _, body in server.bodies)
    assert found.ok is True
    assert longest < 900
    assert "tokens prefilled in chunks of 512" in found.checks[2].fact
    with answers_server() as server:
        assert ", not more than one chunk of 8192" in probe(server, prefill=8192).checks[2].fact


def test_the_probe_runs_inside_an_event_loop() -> None:
    import asyncio

    async def inside() -> Answers:
        return probe(server)

    with answers_server() as server:
        assert asyncio.run(inside()).ok is True


def test_an_unknown_level_is_an_error() -> None:
    with answers_server() as server, pytest.raises(ValueError, match='"short" or "full", not \'long\''):
        probe(server, "long")


def test_prompts_end_in_different_words_and_share_no_beginning() -> None:
    """Else tied random embeddings would look like a model that ignores its prompts."""
    assert len({text.split()[-1] for text in SHORT}) == len(SHORT)
    assert len({story(400, seed)[:22] for seed in range(20)}) == 20
    for length in (1, 50, 400, 5000):
        assert len(story(length, 3)) == length
        assert len(storied(length, 3, SHORT[0])) <= max(length, len(SHORT[0]))
        assert storied(length, 3, SHORT[0]).endswith(SHORT[0])


def test_answers_sum_up_their_checks() -> None:
    good, bad, unsure = (
        Check("a", True, "fine"),
        Check("b", False, "no", "numerics"),
        Check("c", None, "?"),
    )
    assert Answers("short", ()).ok is None
    assert Answers("short", (good,)).ok is True
    assert Answers("short", (good, unsure)).ok is None
    assert Answers("short", (unsure, bad)).ok is False
    assert Answers("short", (good, bad)).first_bad is bad
    assert Answers("full", (good,), 17, 20).accuracy == 0.85
    assert Answers("full", (good,)).accuracy is None
    assert Answers("full", (good,)).accuracy_interval is None


def test_the_interval_is_wilsons() -> None:
    low, high = wilson(17, 20)
    assert (round(low, 4), round(high, 4)) == (0.6396, 0.9476)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)
