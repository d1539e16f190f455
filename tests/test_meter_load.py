"""What is asked of a server, prompts, and what a window is summed up from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_gpuguard.measure.load import FIRST_ID, LAST_ID, Bodies, Load, Prompts, Spread
from pytest_gpuguard.measure.meter import Meter
from pytest_gpuguard.measure.meter_doubts import doubts_of
from pytest_gpuguard.measure.stream import Reply


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number, at least 1: 0"),
        ({"concurrency": True}, "concurrency must be a whole number, at least 1: True"),
        ({"input_len": -5}, "input_len must be a whole number, at least 1: -5"),
        ({"output_len": 0}, "output_len must be a whole number, at least 1: 0"),
        ({"output_len": 1.5}, "output_len must be a whole number, at least 1: 1.5"),
        ({"api": "chat"}, "api must be one of completions, generate: 'chat'"),
    ],
)
def test_a_load_that_means_nothing_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Load(**wrong)


def test_a_meter_without_processes_or_patience_is_refused() -> None:
    with pytest.raises(ValueError, match="processes must be at least 1"):
        Meter("http://127.0.0.1:1", {}, Load(), processes=0)
    with pytest.raises(ValueError, match="silence_s must be above 0"):
        Meter("http://127.0.0.1:1", {}, Load(), silence_s=0)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 128])
@pytest.mark.parametrize("cached", [False, True])
def test_prompts_have_their_length_and_ids_that_every_tokenizer_has(length: int, cached: bool) -> None:
    prompts = Prompts(Load(input_len=length, cached=cached))
    for number in (0, 1, 17, 10**9):
        ids = prompts.ids(number)
        assert len(ids) == length
        assert all(FIRST_ID <= one <= LAST_ID for one in ids)


def test_prompts_come_from_the_seed_alone() -> None:
    load = Load(seed=7)
    assert [Prompts(load).ids(number) for number in range(9)] == [Prompts(load).ids(number) for number in range(9)]
    assert Prompts(load).ids(0) != Prompts(Load(seed=8)).ids(0)
    # The tails differ too: no part of another seed's prompt is the same from its beginning on.
    assert Prompts(load).ids(0)[3:] != Prompts(Load(seed=8)).ids(0)[3:]


def test_new_prompts_differ_in_their_first_token() -> None:
    prompts = Prompts(Load(input_len=64))
    assert len({prompts.ids(number)[0] for number in range(1000, 1241)}) == 241
    several = [tuple(prompts.ids(number)) for number in range(5000)]
    assert len(set(several)) == 5000
    assert len({one[:3] for one in several}) == 5000


def test_cached_prompts_share_all_but_the_last_tokens() -> None:
    prompts = Prompts(Load(input_len=64, cached=True))
    several = [prompts.ids(number) for number in range(100)]
    assert len({tuple(one[:61]) for one in several}) == 1
    assert len({tuple(one) for one in several}) == 100


def test_requests_ask_for_fixed_lengths_without_chance() -> None:
    load = Load(input_len=5, output_len=9)
    native = json.loads(Bodies(load).body(3))
    assert native.pop("input_ids") == Prompts(load).ids(3)
    assert native == {"stream": True, "sampling_params": {"max_new_tokens": 9, "temperature": 0.0, "ignore_eos": True}}
    openai = json.loads(Bodies(Load(input_len=5, output_len=9, api="completions"), "a-model").body(3))
    assert openai.pop("prompt") == Prompts(load).ids(3)
    assert openai == {
        "model": "a-model",
        "max_tokens": 9,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_spread_counts_how_often() -> None:
    assert Spread.of([]) is None
    assert Spread.of([(2.0, 1)]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([(1.0, 99), (5.0, 1)]) == Spread(1.04, 1.0, 1.0)
    assert Spread.of([(5.0, 2), (1.0, 98)]) == Spread(1.08, 1.0, 5.0)


def reply(**fields: Any) -> Reply:
    return Reply(**{"started": 0.0, "tokens": 64, "usage": 64, "prompt": 128, "cached": 0, **fields})


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([reply()], ()),
        ([reply(cached=None, prompt=None)], ()),
        ([reply(), reply(usage=None)], ("usage missing in 1 of 2 replies: one token per event was counted",)),
        (
            [reply(tokens=32, by_events=True)],
            ("counted tokens differ from the server's usage in 1 of 1 replies: 32 (one per event) and 64",),
        ),
        (
            [reply(usage=40, tokens=40), reply(usage=42, tokens=42), reply()],
            ("2 of 3 replies had another number of tokens than asked: 40 to 42, not 64",),
        ),
        ([reply(prompt=129)], ("the server counts 129 input tokens, 128 were sent",)),
        (
            [reply(cached=64), reply(cached=64)],
            ("the prefix cache gave 50% of the input tokens although every prompt was to be new: give another seed",),
        ),
        ([reply(cached=1)], ()),
    ],
)
def test_doubts(replies: list[Reply], says: tuple[str, ...]) -> None:
    assert doubts_of(Load(), replies, 0.1, 0.0) == says


def test_the_few_tokens_that_prompts_may_share_by_accident_are_not_doubted() -> None:
    assert doubts_of(Load(input_len=8), [reply(prompt=8, cached=2)], 0.1, 0.0) == ()
    assert doubts_of(Load(input_len=2, cached=True), [reply(prompt=2, cached=0)], 0.1, 0.0) == ()


def test_a_prefix_cache_that_gives_nothing_is_doubted_where_it_was_asked_for() -> None:
    load = Load(cached=True)
    assert "no input tokens from its prefix cache" in doubts_of(load, [reply()], 0.1, 0.0)[0]
    assert doubts_of(load, [reply(cached=120)], 0.1, 0.0) == ()


def test_a_busy_or_starved_meter_is_doubted() -> None:
    assert doubts_of(Load(), [reply()], 0.631, 0.0) == ("the meter itself was 63% busy: figures are a lower bound",)
    assert doubts_of(Load(), [reply()], 0.49, 0.019) == ()
    assert "woke up 25 ms late on average" in doubts_of(Load(), [reply()], 0.2, 0.025)[0]
