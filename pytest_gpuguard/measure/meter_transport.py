"""The way of a request over the network, for httpx: plain HTTP/1.1 on asyncio, without layers between two tokens.

httpx's own transport spends most of the meter's time per event in its layers. It must stay a transport and no more: all
that is not about bytes is httpx's.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator
from typing import Final

import httpx

from .meter_pulse import Pulse

_LONGEST_HEAD: Final = 65536
#: A request that gets nothing for so long is lost, whatever becomes of the others.
_MOST_S: Final = 1800.0
#: int() would also take a sign, blanks and underscores.
_CHUNK_SIZE: Final = re.compile(rb"[0-9a-fA-F]{1,16}")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_NO_BODY: Final = (204, 304)


#: Bytes land here and are copied at once. asyncio's plain protocol would allocate 256 KiB for each read, which took
#: twice as long as the read itself.
_LANDING: Final = memoryview(bytearray(262144))


class Connection(asyncio.BufferedProtocol):
    """One connection: what came in and was not read yet, and whether it is over.

    It waits for as long as ``pulse`` says that the server speaks to somebody, but for ``most_s`` at most.
    """

    def __init__(self, pulse: Pulse, most_s: float) -> None:
        self._pulse, self._most_s = pulse, most_s
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.heard = False
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by asyncio."""
        return _LANDING

    def buffer_updated(self, nbytes: int) -> None:
        """Called by asyncio."""
        self._parts.append(bytes(_LANDING[:nbytes]))
        self.heard = True
        self._pulse.beat()
        self._wake()

    def eof_received(self) -> None:
        """Called by asyncio: nothing more will come."""
        self.closed = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self, silence_s: float) -> bytes:
        """What has come; b"" at the end. Raises httpx.ReadTimeout when the server is silent for ``silence_s``."""
        if not self._parts and not self.closed:
            loop = asyncio.get_running_loop()
            self._since = time.monotonic()
            if self._timer is None:  # one timer, set anew only when it rings: a timer for each read would cost more
                self._timer = loop.call_later(min(silence_s, self._most_s), self._ring, silence_s)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._parts:
            return b""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _ring(self, silence_s: float) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # not waiting: the next read sets a timer
        now = time.monotonic()
        left = max(self._since, self._pulse.last()) + silence_s - now
        most = self._since + self._most_s - now
        if left <= 0:
            self._waiter.set_exception(httpx.ReadTimeout(f"nothing came for {silence_s:g} s"))
        elif most <= 0:
            self._waiter.set_exception(
                httpx.ReadTimeout(f"nothing came for {self._most_s:g} s, although other requests were answered")
            )
        else:
            self._timer = asyncio.get_running_loop().call_later(min(left, most), self._ring, silence_s)

    def close(self) -> None:
        """Let go of it."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self.transport is not None:
            self.transport.abort()


class Body(httpx.AsyncByteStream):
    """The body of an answer as it comes; the connection goes back to ``idle`` when the body was read to its end.

    Raises httpx.RemoteProtocolError for a head that does not say where the body ends.
    """

    def __init__(
        self,
        connection: Connection,
        idle: list[Connection],
        answer: tuple[int, httpx.Headers, bytes],
        silence_s: float,
    ) -> None:
        status, headers, self._rest = answer
        self._connection, self._idle, self._silence_s = connection, idle, silence_s
        coding = headers.get("transfer-encoding")
        if coding is not None and coding.lower() != "chunked":
            raise httpx.RemoteProtocolError(f"unknown transfer-encoding: {coding[:80]!r}")
        self._chunked = coding is not None and status not in _NO_BODY
        self._left = 0 if status in _NO_BODY else None if self._chunked else _length(headers)
        self._keep = headers.get("connection", "").lower() != "close"
        self._whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._chunked:
            async for chunk in self._chunks():
                yield chunk
            return
        data = self._rest
        while True:
            if self._left is not None:
                if len(data) > self._left:  # more than was announced: nobody asked for it
                    data, self._keep = data[: self._left], False
                self._left -= len(data)
            if data:
                yield data
            if self._left == 0:
                break
            data = await self._connection.read(self._silence_s)
            if not data:
                if self._left is not None:
                    raise httpx.RemoteProtocolError("the connection was closed within the body")
                return
        self._whole = True

    async def _chunks(self) -> AsyncIterator[bytes]:
        data = self._rest
        while True:
            at, payloads = 0, []
            while (end := data.find(b"\r\n", at)) >= 0:
                digits = data[at:end].split(b";")[0].strip(b" \t")
                if not _CHUNK_SIZE.fullmatch(digits):
                    raise httpx.RemoteProtocolError("malformed chunk in the body")
                size = int(digits, 16)
                after = end + 2 + size
                if len(data) < after + 2:
                    break
                if size == 0:
                    self._whole = data[after:] == b"\r\n"  # trailers: not worth keeping the connection
                    break
                if data[after : after + 2] != b"\r\n":
                    raise httpx.RemoteProtocolError("malformed chunk in the body: longer than its size")
                payloads.append(data[end + 2 : after])
                at = after + 2
            if end < 0 and len(data) - at > _LONGEST_HEAD:
                raise httpx.RemoteProtocolError("malformed chunk in the body: its size does not end")
            if payloads:
                yield payloads[0] if len(payloads) == 1 else b"".join(payloads)
            if self._whole or (end >= 0 and size == 0 and len(data) >= after + 2):
                return
            more = await self._connection.read(self._silence_s)
            if not more:
                raise httpx.RemoteProtocolError("the connection was closed within the stream")
            data = data[at:] + more

    async def aclose(self) -> None:
        """Keep the connection, or close it where more may come on it."""
        if self._whole and self._keep and not self._connection.closed:
            self._idle.append(self._connection)
        else:
            self._connection.close()


class Transport(httpx.AsyncBaseTransport):
    """Connections to one server, kept between requests. Certificates are not verified.

    The server has failed once it has sent nothing for ``silence_s``, over all connections of ``pulse``; a request that
    gets nothing waits for ``most_s`` at most.
    """

    def __init__(self, silence_s: float, pulse: Pulse | None = None, most_s: float = _MOST_S) -> None:
        self._silence_s, self._most_s, self._pulse = silence_s, max(silence_s, most_s), pulse or Pulse()
        self._idle: list[Connection] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``; the answer's body streams."""
        sent = _head(request) + await request.aread()
        while True:
            connection, used = await self._connect(request.url)
            try:
                assert connection.transport is not None
                connection.transport.write(sent)
                answer = await self._answer(connection)
                body = Body(connection, self._idle, answer, self._silence_s)
                return httpx.Response(answer[0], headers=answer[1], stream=body)
            except httpx.RemoteProtocolError:
                connection.close()
                if not used or connection.heard:  # else the server had closed a kept connection: not its answer
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connect(self, url: httpx.URL) -> tuple[Connection, bool]:
        """A connection, and whether it was used before."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                connection.heard = False
                return connection, True
            connection.close()
        secure = url.scheme == "https"
        if url.scheme not in ("http", "https"):
            raise httpx.UnsupportedProtocol(f"{url} is no http or https address")
        context = ssl.create_default_context() if secure else None
        if context is not None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        loop = asyncio.get_running_loop()
        port = url.port or (443 if secure else 80)
        opening = loop.create_connection(lambda: Connection(self._pulse, self._most_s), url.host, port, ssl=context)
        try:
            _, opened = await asyncio.wait_for(opening, self._silence_s)
        except asyncio.TimeoutError:
            raise httpx.ConnectTimeout(f"no connection for {self._silence_s:g} s") from None
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return opened, False

    async def _answer(self, connection: Connection) -> tuple[int, httpx.Headers, bytes]:
        data = b""
        while True:
            while (end := data.find(b"\r\n\r\n")) < 0:
                more = await connection.read(self._silence_s)
                if not more:
                    raise httpx.RemoteProtocolError("the connection was closed without an answer")
                data += more
                if len(data) > _LONGEST_HEAD and b"\r\n\r\n" not in data:  # what follows a head may be long
                    raise httpx.RemoteProtocolError("the head of the answer does not end")
            line, *fields = data[:end].split(b"\r\n")
            words = line.split(b" ", 2)
            if not line.startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
                raise httpx.RemoteProtocolError(f"no answer of HTTP: {line[:80]!r}")
            data = data[end + 4 :]
            if int(words[1]) >= 200:
                pairs = [field.partition(b":") for field in fields]
                return int(words[1]), httpx.Headers([(name.strip(), value.strip()) for name, _, value in pairs]), data

    async def aclose(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _length(headers: httpx.Headers) -> int | None:
    """The announced length of a body; None where it ends with the connection."""
    announced = headers.get("content-length")
    if announced is None:
        return None
    lengths = {length.strip() for length in announced.split(",")}  # the same one twice does no harm
    if len(lengths) != 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
        raise httpx.RemoteProtocolError(f"malformed content-length: {announced[:80]!r}")
    return int(lengths.pop())


def _head(request: httpx.Request) -> bytes:
    fields = b"".join(b"%b: %b\r\n" % field for field in request.headers.raw)
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), request.url.raw_path, fields)
