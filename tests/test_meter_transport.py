"""Answers of HTTP as they may come, and the connections that they come over."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from pytest_gpuguard.measure.meter_pulse import Pulse, shared_memory
from pytest_gpuguard.measure.meter_transport import Connection, Transport

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def exchange(
    answer: bytes, size: int = 1_000_000, *, end: bool = True, times: int = 1, silence_s: float = 5.0
) -> tuple[list[bytes], list[bytes], int]:
    """(bodies, requests, connections) when a server sends ``answer`` in pieces of ``size`` bytes to each request."""
    requests: list[bytes] = []
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                requests.append(head + await reader.readexactly(2))
                for at in range(0, len(answer), size):
                    writer.write(answer[at : at + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                if end:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def run() -> list[bytes]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        bodies = []
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=Transport(silence_s)) as client:
            for _ in range(times):
                async with client.stream("POST", "/x?y=1", content=b"{}", headers={"a": "b"}) as got:
                    bodies.append(b"".join([chunk async for chunk in got.aiter_raw()]))
        server.close()
        return bodies

    return asyncio.run(run()), requests, connections


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1_000_000])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"3\r\nabc\r\nA;name=x\r\n0123456789\r\n0\r\n\r\n", b"abc0123456789"),
        (CHUNKED + b"1\r\n\r\r\n0\r\nTrailer: 1\r\n\r\n", b"\r"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd", b"abcd"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-length: 4\r\n\r\nabcd", b"abcd"),
        (CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", b"x"),
    ],
)
def test_the_body_is_the_same_however_the_bytes_are_cut(answer: bytes, body: bytes, size: int) -> None:
    bodies, requests, _ = exchange(answer, size)
    assert bodies == [body]
    assert requests[0].startswith(b"POST /x?y=1 HTTP/1.1\r\n")
    assert b"\r\na: b\r\n" in requests[0]
    assert b"\r\nContent-Length: 2\r\n" in requests[0]
    assert requests[0].endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize(
    ("answer", "connections"),
    [
        (CHUNKED + b"1\r\nx\r\n0\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\nx", 3),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx and more", 3),
    ],
)
def test_a_connection_is_used_again_unless_the_server_says_no(answer: bytes, connections: int) -> None:
    bodies, _, opened = exchange(answer, end=False, times=3)
    assert bodies == [b"x"] * 3
    assert opened == connections


def test_a_connection_that_was_closed_meanwhile_is_not_used_again() -> None:
    bodies, _, opened = exchange(CHUNKED + b"1\r\nx\r\n0\r\n\r\n", end=True, times=5)
    assert bodies == [b"x"] * 5
    assert opened == 5


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (CHUNKED + b"9\r\nabc", "the connection was closed within the stream"),
        (CHUNKED + b"3\r\nabc\r\n", "the connection was closed within the stream"),
        (CHUNKED + b"zz\r\nabc\r\n", "malformed chunk"),
        (CHUNKED + b"-44\r\nabcdef\r\n0\r\n\r\n", "malformed chunk"),
        (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", "malformed chunk"),
        (CHUNKED + b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n", "malformed chunk"),
        (CHUNKED + b"3\r\nabcXX0\r\n\r\n", "malformed chunk in the body: longer than its size"),
        (CHUNKED + b"1" * 70000, "malformed chunk in the body: its size does not end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\nabc", "malformed content-length: 'x'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nabc", "malformed content-length: '-1'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc", "malformed content-length: '3, 4'"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            "unknown transfer-encoding: 'identity, chunked'",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", "the connection was closed within the body"),
        (b"", "the connection was closed without an answer"),
        (b"SSH-2.0-x\r\n\r\n", "no answer of HTTP: b'SSH-2.0-x'"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000, "the head of the answer does not end"),
    ],
)
def test_what_is_no_answer_is_named(answer: bytes, says: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match=says):
        exchange(answer)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_some_answers_have_no_body(status: bytes) -> None:
    answer = b"HTTP/1.1 " + status + b"\r\ncontent-length: 5\r\n\r\n"
    assert exchange(answer, end=False, times=2) == ([b""] * 2, [ANY, ANY], 1)


def test_what_follows_a_head_may_come_with_it_and_be_long() -> None:
    async def run() -> tuple[int, httpx.Headers, bytes]:
        connection = Connection(Pulse(), 9.0)
        raw = CHUNKED + b"x" * 200_000
        connection.get_buffer(-1)[: len(raw)] = raw
        connection.buffer_updated(len(raw))
        return await Transport(1.0)._answer(connection)

    status, headers, rest = asyncio.run(run())
    assert (status, dict(headers)) == (200, {"transfer-encoding": "chunked"})
    assert rest == b"x" * 200_000


@pytest.mark.parametrize("answer", [b"", CHUNKED, CHUNKED + b"1\r\nx\r\n"])
def test_silence_ends(answer: bytes) -> None:
    called = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        exchange(answer, end=False, silence_s=0.3)
    assert 0.25 < time.monotonic() - called < 3


def test_words_now_and_then_are_no_silence() -> None:
    async def run() -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(CHUNKED)
            for _ in range(6):
                await asyncio.sleep(0.2)
                writer.write(b"1\r\nx\r\n")
            writer.write(b"0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(transport=Transport(0.6)) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/")
        server.close()
        return answer.content

    assert asyncio.run(run()) == b"xxxxxx"


def _one_waits(transport: Transport) -> bytes:
    """What a request gets that waits for 1.2 s, while another one is sent a byte every 0.1 s."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        if head.startswith(b"GET /waits"):
            await asyncio.sleep(1.2)
        else:
            for _ in range(14):
                await asyncio.sleep(0.1)
                writer.write(b"1\r\nx\r\n")
        writer.write(b"1\r\ny\r\n0\r\n\r\n")
        writer.close()

    async def run() -> bytes:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, transport=transport) as client:
            other = asyncio.create_task(client.get("/speaks"))
            try:
                return (await client.get("/waits")).content
            finally:
                await other
                server.close()

    return asyncio.run(run())


def test_a_server_that_speaks_to_others_is_not_silent() -> None:
    assert _one_waits(Transport(0.6)) == b"y"


def test_a_request_that_is_lost_ends_all_the_same() -> None:
    with pytest.raises(httpx.ReadTimeout, match=r"nothing came for 0\.8 s, although other requests were answered"):
        _one_waits(Transport(0.6, most_s=0.8))


def test_the_pulse_of_all_processes_is_one() -> None:
    shared = shared_memory(2)
    pulses = [Pulse(os.dup(shared), own) for own in range(2)]
    os.close(shared)
    assert pulses[0].last() == 0
    before = time.monotonic()
    pulses[1].beat()
    assert pulses[0].last() == pulses[1].last() >= before
    pulses[0].beat()
    assert pulses[1].last() > before


def test_the_pulse_needs_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    pulse = Pulse(shared_memory(1))
    pulse.beat()
    assert pulse.last() > 0


def _fails(act: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(transport=Transport(1.0)) as client:
            await act(client)

    asyncio.run(run())


def test_no_other_scheme() -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        _fails(lambda client: client.get("ftp://127.0.0.1/"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_with_a_certificate_that_nobody_knows(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=stand-in"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"186A0\r\n" + b"x" * 100_000 + b"\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> bytes:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(transport=Transport(10.0)) as client:
            answer = await client.get(f"https://localhost:{port}/")
        server.close()
        return answer.content

    assert asyncio.run(run()) == b"x" * 100_000


def test_no_tls_where_there_is_none() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.write(b"hello" * 100), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(transport=Transport(2.0)) as client:
            await client.get(f"https://127.0.0.1:{port}/")

    with pytest.raises(httpx.ConnectError):
        asyncio.run(run())
