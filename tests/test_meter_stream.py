"""Server-sent events, and the tokens in them."""

from __future__ import annotations

import pytest

from pytest_gpuguard.measure.stream import Arrivals, BadStream, Events, Reply, count_tokens, parse, quote


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_the_same_however_the_bytes_are_cut(size: int, end: bytes) -> None:
    raw = b"data: {}|: a comment||event: x|data:one|id: 3||data: two||: only a comment||data: [DONE]||".replace(
        b"|", end
    )
    raw = raw.replace(b"{}" + end, b"{}" + end + end)
    events = Events()
    found = [data for at in range(0, len(raw), size) for data in events.feed(raw[at : at + size])]
    assert found == [b"{}", b"one", b"two", b"[DONE]"]
    assert events.rest.strip() == b""


def test_an_event_that_did_not_end_remains() -> None:
    events = Events()
    assert events.feed(b"data: 1\n\ndata: 2") == [b"1"]
    assert events.rest == b"data: 2"


def test_the_servers_count_is_taken() -> None:
    reply = Reply(0.0)
    assert count_tokens(b'{"text": "a b", "meta_info": {"completion_tokens": 12, "x": 1}}', reply) == 12
    assert count_tokens(b'{"choices": [{}], "usage": {"completion_tokens":3}}', reply) == 3
    assert not reply.by_events


def test_a_count_within_the_text_is_text() -> None:
    event = b'{"text": "\\"completion_tokens\\": 99 \\"completion_tokens\\":99", "meta_info": {"completion_tokens": 5}}'
    assert count_tokens(event, Reply(0.0)) == 5
    reply = Reply(0.0, tokens=2)
    assert count_tokens(b'{"text": "\\"completion_tokens\\": 99"}', reply) == 3
    assert reply.by_events


def test_without_the_servers_count_each_event_that_carries_text_is_a_token() -> None:
    reply = Reply(0.0)
    for number in range(1, 4):
        reply.tokens = count_tokens(b'{"choices": [{"text": "a"}], "usage": null}', reply)
        assert reply.tokens == number
    # the last event of such a stream has the sum: that is for comparison, and no jump of the count
    assert count_tokens(b'{"choices": [], "usage": {"completion_tokens": 9}}', reply) == 3


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (b'{"text": "abc", oops', 'malformed event: {"text": "abc", oops'),
        (b"[1, 2]", r"malformed event, no object: \[1, 2\]"),
        (b'{"error": {"message": "out of\\nKV"}}', "the server reported an error in the stream: .*out of"),
    ],
)
def test_what_is_no_event_is_named(event: bytes, says: str) -> None:
    with pytest.raises(BadStream, match=says):
        count_tokens(event, Reply(0.0))
    with pytest.raises(BadStream, match=says):
        parse(event)


def test_quotes_are_one_short_line() -> None:
    assert quote(b" a\n  b\xff ") == "a b\ufffd"
    assert quote(b"") == "nothing"
    assert len(quote(b"x" * 5000)) == 201


def test_arrivals_are_counted_between_two_times() -> None:
    arrivals = Arrivals()
    for now in range(1, 8):
        arrivals.add(float(now), now, 0.5)
    tokens, gaps = arrivals.between(2.0, 5.0)
    assert list(tokens) == [3, 4, 5]  # after the one boundary, up to and with the other
    assert len(gaps) == 3
    arrivals.forget(6.0)
    assert list(arrivals.tokens) == [7]
    assert len(arrivals.times) == len(arrivals.gaps) == 1
