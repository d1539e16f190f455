"""One streamed request: cuts server-sent events, counts the tokens in them, and says what was wrong.

Events are only searched for their count: SGLang repeats the whole text in each, and parsing it all would make the
meter slow where replies are long. It must never raise for what a server sends.
"""

from __future__ import annotations

import json
import re
import time
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import httpx

#: Within a JSON string the closing quote would be escaped, so this occurs as a key only.
_COUNT: Final = b'"completion_tokens":'
_NUMBER: Final = re.compile(rb"\s*(\d+)")
_LONGEST_QUOTE: Final = 200


class BadStream(Exception):
    """The server sent what is no stream of tokens; the text says what, in one line."""


@dataclass(slots=True)
class Reply:
    """What became of one request. Times are ``time.monotonic()``; counts are tokens."""

    started: float
    first: float | None = None
    ended: float = 0.0
    tokens: int = 0
    events: int = 0
    #: Tokens were counted as one per event, because events did not say.
    by_events: bool = False
    usage: int | None = None
    prompt: int | None = None
    cached: int | None = None
    failed: str | None = None


class Arrivals:
    """When how many tokens arrived, in the order of arrival, over all requests of this process."""

    def __init__(self) -> None:
        self.times = array("d")
        self.tokens = array("i")
        #: Seconds since the request's previous event; -1 for its first one.
        self.gaps = array("f")

    def add(self, now: float, tokens: int, gap: float) -> None:
        """``tokens`` arrived in one event."""
        self.times.append(now)
        self.tokens.append(tokens)
        self.gaps.append(gap)

    def between(self, start: float, end: float) -> tuple[array[int], array[float]]:
        """(tokens, gaps) of the events after ``start`` and up to ``end``."""
        first, last = bisect_right(self.times, start), bisect_right(self.times, end)
        return self.tokens[first:last], self.gaps[first:last]

    def forget(self, until: float) -> None:
        """Drop what arrived up to ``until``."""
        cut = bisect_right(self.times, until)
        del self.times[:cut], self.tokens[:cut], self.gaps[:cut]


class Events:
    """Cuts a stream of bytes into the data of its events (text/event-stream, one ``data:`` line each)."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that ``chunk`` completes."""
        if self.rest:
            chunk = self.rest + chunk
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        end = chunk.rfind(b"\n\n")
        if end < 0:
            self.rest = chunk
            return []
        self.rest = chunk[end + 2 :]
        found = []
        for block in chunk[:end].split(b"\n\n"):
            if block.startswith(b"data:") and b"\n" not in block:
                found.append(block[5:].strip())
            else:  # comments and named fields
                lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
                found += [b"\n".join(lines)] if lines else []
        return found


async def stream(client: httpx.AsyncClient, path: str, body: bytes, arrivals: Arrivals) -> Reply:
    """Send ``body`` and read its stream to the end; arrivals are noted as they come. Never raises for the server."""
    import httpx

    reply = Reply(time.monotonic())
    try:
        async with client.stream("POST", path, content=body) as answer:
            if answer.status_code != 200:
                raise BadStream(f"HTTP {answer.status_code} from {path}: {quote(await answer.aread())}")
            await _read(answer, reply, arrivals)
    except BadStream as bad:
        reply.failed = str(bad)
    except httpx.TimeoutException as error:
        reply.failed = f"time-out ({type(error).__name__}) {_where(reply)}: {error}"
    except httpx.ConnectError as error:
        reply.failed = f"no connection to {client.base_url}: {error or type(error).__name__}"
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
        reply.failed = f"broken {_where(reply)}: {type(error).__name__}: {quote(str(error).encode())}"
    reply.ended = time.monotonic()
    return reply


async def _read(answer: httpx.Response, reply: Reply, arrivals: Arrivals) -> None:
    events = Events()
    previous = reply.started
    last, done = b"", False
    async for chunk in answer.aiter_raw():
        now = time.monotonic()
        for data in events.feed(chunk):
            if data == b"[DONE]":
                done = True
                continue
            if not last:
                parse(data)  # the first and the last event are looked at whole, those between only for their count
            last = data
            count = count_tokens(data, reply)
            new = count - reply.tokens
            if new < 0:
                raise BadStream(f"the server's token count fell from {reply.tokens} to {count}")
            if new == 0:
                continue
            arrivals.add(now, new, now - previous if reply.events else -1.0)
            reply.first = reply.first if reply.events else now
            reply.tokens, reply.events, previous = count, reply.events + 1, now
    if events.rest.strip() and (last or events.rest.lstrip().startswith(b"data:")):
        raise BadStream(f"the stream ended {_where(reply)} within an event: {quote(events.rest)}")
    if not last:
        raise BadStream(f"HTTP 200 from {answer.url.path}, but no events of a stream: {quote(events.rest)}")
    if not done:
        raise BadStream(f"the stream ended {_where(reply)} without [DONE]")
    _conclude(parse(last), reply)


def count_tokens(data: bytes, reply: Reply) -> int:
    """Tokens of the reply up to this event: the server's count, else one more per event that carries some."""
    at = data.rfind(_COUNT)
    if at >= 0 and data[:1] == b"{" and data[-1:] == b"}":
        number = _NUMBER.match(data, at + len(_COUNT))
        if number:
            if reply.by_events:  # only the last event of an OpenAI stream has the sum: see _conclude
                return reply.tokens
            return int(number[1])
    event = parse(data)
    choices = event.get("choices")
    if choices == []:
        return reply.tokens
    reply.by_events = True
    return reply.tokens + 1


def parse(data: bytes) -> dict[str, Any]:
    """The event as an object. Raises BadStream when it is none, or the server reports an error in it."""
    try:
        event = json.loads(data)
    except ValueError:
        raise BadStream(f"malformed event: {quote(data)}") from None
    if not isinstance(event, dict):
        raise BadStream(f"malformed event, no object: {quote(data)}")
    if event.get("error"):
        raise BadStream(f"the server reported an error in the stream: {quote(json.dumps(event['error']).encode())}")
    return event


def _conclude(event: dict[str, Any], reply: Reply) -> None:
    """Take the server's own sums from the last event."""
    meta = event.get("meta_info")
    sums = meta if isinstance(meta, dict) else event.get("usage")
    if not isinstance(sums, dict):
        return
    reason = sums.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise BadStream(f"the server aborted the request: {quote(str(reason.get('message')).encode())}")
    details = sums.get("prompt_tokens_details")
    reply.usage = _whole(sums.get("completion_tokens"))
    reply.prompt = _whole(sums.get("prompt_tokens"))
    reply.cached = _whole(
        sums.get("cached_tokens", details.get("cached_tokens") if isinstance(details, dict) else None)
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _where(reply: Reply) -> str:
    return f"in mid-stream after {reply.tokens} tokens" if reply.tokens else "before the first token"


def quote(raw: bytes) -> str:
    """The start of ``raw`` in one line; "nothing" when it is empty."""
    text = " ".join(raw[: 2 * _LONGEST_QUOTE].decode(errors="replace").split())
    return (text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…") or "nothing"
