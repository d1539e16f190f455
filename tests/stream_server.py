"""A stand-in streaming server of known speed: /generate, /v1/completions and /v1/models, over plain asyncio.

Run as a process of its own; prints its port. Every token is due at a fixed time after the request came, so that the
true rate of a closed loop is known: concurrency × output tokens / (ttft + (output tokens − 1) × itl). ``/truth?A&B``
tells how many tokens were sent between two monotonic times, ``/asked`` the bodies of the first requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAULTS = (
    *("mid", "truncated", "malformed", "no-usage", "404", "500", "silent", "silent-mid", "fewer", "error-event"),
    *("no-done", "falling", "html", "abort", "wrong-usage", "422"),
)


@contextmanager
def stand_in(*options: str) -> Iterator[str]:
    """A server in a process of its own with the options given; gives its URL."""
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Server:
    """Answers at the speed, and with the faults, that the arguments name."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.random = random.Random(args.seed)
        self.times, self.counts = array("d"), array("i")
        self.asked: list[Any] = []
        self.requests = 0
        self.prefixes: set[tuple[int, ...]] = set()
        self.gate: asyncio.Semaphore | None = asyncio.Semaphore(args.slots) if args.slots else None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while await self.one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *rest = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in rest)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        came = time.monotonic()
        _, target, _ = line.split(" ")
        path, _, query = target.partition("?")
        if path == "/truth":
            start, end = (bisect_right(self.times, float(value)) for value in query.split("&"))
            return await reply(writer, 200, sum(self.counts[start:end]))
        if path == "/asked":
            return await reply(writer, 200, self.asked)
        if path == "/v1/models":
            return await reply(writer, 200, {"data": [{"id": "stand-in"}]})
        self.requests += 1
        past = self.requests - self.args.fault_after
        fault = self.args.fault if past == 1 or (past > 1 and not self.args.fault_once) else ""
        if self.args.api_key and headers.get("authorization") != f"Bearer {self.args.api_key}":
            return await reply(writer, 401, {"error": "Unauthorized"})
        if fault == "404" or path not in ("/generate", "/v1/completions"):
            return await reply(writer, 404, {"detail": "Not Found"})
        if fault == "500":
            return await reply(writer, 500, {"error": {"message": "scheduler\nis gone"}})
        if fault == "422":  # as frameworks do, with all of the input in it
            return await reply(writer, 422, {"detail": [{"msg": "Field required", "input": "x" * 200_000}]})
        if fault == "html":
            return await reply(writer, 200, "<html>hello</html>")
        body = json.loads(raw)
        if len(self.asked) < 2000:
            self.asked.append(body)
        if self.gate is None:
            return await self.generate(writer, path, body, fault, came)
        async with self.gate:
            return await self.generate(writer, path, body, fault, time.monotonic())

    def cached(self, ids: list[int]) -> int:
        """Tokens that a prefix cache would have had, in eighths of the prompt; the prompt enters it."""
        cuts = [tuple(ids[: len(ids) * part // 8]) for part in range(1, 8)]
        hit = max((len(cut) for cut in cuts if cut in self.prefixes), default=0)
        self.prefixes.update(cuts)
        return hit

    async def generate(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], fault: str, came: float
    ) -> bool:
        """Stream one reply, token by token as they are due."""
        args, native = self.args, path == "/generate"
        ids = body.get("input_ids") or list(body.get("text", "").encode()) if native else body["prompt"]
        asked = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        total = max(1, asked - 5) if fault == "fewer" else asked
        fails_at = max(1, total // 2)
        render = Native(ids, self.cached(ids), args, fault) if native else OpenAI(ids, body, args, fault)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if fault == "silent":
            await asyncio.sleep(3600)
        due, sent = came + args.ttft * self.noise(), 0
        while sent < total:
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            new = min(args.per_event, total - sent)
            sent += new
            if sent >= fails_at and fault in ("mid", "truncated", "malformed", "silent-mid", "error-event", "falling"):
                return await self.fail(writer, fault, render.event(sent, False))
            self.times.append(time.monotonic())
            self.counts.append(new)
            chunk(writer, render.event(sent, sent == total))
            if wait <= 0 or args.flush:
                await writer.drain()
            if writer.is_closing():
                raise ConnectionError
            due += args.itl * new * self.noise()
        for last in render.ends():
            chunk(writer, last)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def noise(self) -> float:
        """A factor with mean 1."""
        return max(0.0, self.random.gauss(1.0, self.args.noise)) if self.args.noise else 1.0

    async def fail(self, writer: asyncio.StreamWriter, fault: str, event: bytes) -> bool:
        """Go wrong in the middle of a stream."""
        if fault == "silent-mid":
            await asyncio.sleep(3600)
        if fault == "truncated":
            chunk(writer, event[: len(event) // 2])
        elif fault == "malformed":
            chunk(writer, b'data: {"text": "abc", oops\n\n')
        elif fault == "error-event":
            chunk(writer, b'data: {"error": {"message": "out of KV cache"}}\n\n')
        elif fault == "falling":
            chunk(writer, b'data: {"text": "abc", "meta_info": {"completion_tokens": 1}}\n\n')
        if fault != "mid":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return False


class Native:
    """Events of SGLang's /generate: text and ids so far, and the counts."""

    def __init__(self, ids: list[int], cached: int, args: argparse.Namespace, fault: str) -> None:
        self.prompt, self.cached, self.args, self.fault = len(ids), cached, args, fault
        self.text, self.ids, self.sent = "", "", 0

    def event(self, sent: int, last: bool) -> bytes:
        new = sent - self.sent
        self.sent = sent
        self.text += " word" * new
        self.ids += ", 1234" * new
        reason = "null"
        if last:
            kind = "abort" if self.fault == "abort" else "length"
            reason = f'{{"type": "{kind}", "length": {sent}, "message": "KV cache full"}}'
        counts = f'"prompt_tokens": {self.prompt}, "completion_tokens": {sent}, "cached_tokens": {self.cached}, '
        if self.fault == "no-usage":
            counts = ""
        meta = f'{{"id": "0123456789abcdef", "finish_reason": {reason}, {counts}"e2e_latency": null}}'
        text = f'{{"text": "{self.text}", "output_ids": [{self.ids[2:]}], "meta_info": {meta}}}'
        return frame(text, self.args.crlf)

    def ends(self) -> list[bytes]:
        return [] if self.fault == "no-done" else [frame("[DONE]", self.args.crlf)]


class OpenAI:
    """Events of /v1/completions: the new text, and usage where it was asked for."""

    def __init__(self, ids: list[int], body: dict[str, Any], args: argparse.Namespace, fault: str) -> None:
        options = body.get("stream_options") or {}
        self.usage = bool(options.get("include_usage")) and fault != "no-usage"
        self.always = self.usage and bool(options.get("continuous_usage_stats")) and not args.no_continuous_usage
        self.prompt, self.args, self.sent, self.fault = len(ids), args, 0, fault

    def counts(self) -> str:
        sent = self.sent + 7 * (self.fault == "wrong-usage")
        return f'{{"prompt_tokens": {self.prompt}, "total_tokens": {self.prompt + sent}, "completion_tokens": {sent}}}'

    def event(self, sent: int, last: bool) -> bytes:
        text = " word" * (sent - self.sent)
        self.sent = sent
        choice = f'{{"index": 0, "text": "{text}", "logprobs": null, "finish_reason": {json.dumps(last or None)}}}'
        usage = self.counts() if self.always else "null"
        return frame(f'{{"id": "cmpl-1", "choices": [{choice}], "usage": {usage}}}', self.args.crlf)

    def ends(self) -> list[bytes]:
        ends = [frame(f'{{"id": "cmpl-1", "choices": [], "usage": {self.counts()}}}', self.args.crlf)]
        return (ends if self.usage else []) + Native.ends(self)  # type: ignore[arg-type]


def frame(text: str, crlf: bool) -> bytes:
    """One server-sent event."""
    return b"data: %b%b" % (text.encode(), b"\r\n\r\n" if crlf else b"\n\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One chunk of the body."""
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def reply(writer: asyncio.StreamWriter, status: int, content: Any) -> bool:
    """A whole answer."""
    data = json.dumps(content).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
    writer.write(head + data)
    await writer.drain()
    return True


async def main() -> None:
    """Serve until killed, or until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.0, help="seconds from request to first token")
    parser.add_argument("--itl", type=float, default=0.0, help="seconds per further token")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of each time, as a share of it")
    parser.add_argument("--slots", type=int, default=0, help="requests served at once; the others wait")
    parser.add_argument("--per-event", type=int, default=1, help="tokens in one event")
    parser.add_argument("--no-continuous-usage", action="store_true")
    parser.add_argument("--crlf", action="store_true")
    parser.add_argument("--flush", action="store_true", help="give way after each event also when it was due")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--fault", choices=("", *FAULTS), default="")
    parser.add_argument("--fault-after", type=int, default=0, help="so many requests are served well")
    parser.add_argument("--fault-once", action="store_true", help="and only one badly")
    parser.add_argument("--seed", type=int, default=0)
    server = Server(parser.parse_args())
    listening = await asyncio.start_server(server.serve, "127.0.0.1", server.args.port, limit=2**24, backlog=1024)
    print(listening.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
