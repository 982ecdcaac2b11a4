"""One HTTP/1.1 connection into a sandbox. What comes from the other end is hostile: everything kept of it is bounded.

Why not an HTTP library's client: measured beside aiohttp's it costs the same processor time, routing included, and
three things are decided here that a library keeps to itself: which connection a request that must not run twice may
take; that a body read until its connection closes is cut short, not complete, when its sandbox ends; how much of an
endless head or trailer is read. The parser is llhttp, as there.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import cast

import httptools

from aenv.errors import GuestError
from aenv.proxy.pacing import FRAMING_PER_BYTE, Pacer

MAX_OVERHEAD = 256 * 1024
"""Bytes accepted beyond what the body pays for: a response's head with its 1xx responses, chunk framing, trailers."""
HIGH_WATER = 128 * 1024
"""Bytes of body held for a slow reader before reading from the sandbox stops."""


class UpstreamError(GuestError):
    """The exchange with the sandbox's server failed. `started` tells whether a byte of a response had come."""

    def __init__(self, message: str, *, started: bool) -> None:
        super().__init__(message)
        self.started = started


class Connection(asyncio.Protocol):
    """One exchange at a time: `begin`, `write` and `drain` upwards, `head` and `read` downwards, then `reusable`.

    Use from one task upwards and one downwards. `abort` may be called by anyone at any time; every waiting call then
    raises UpstreamError.
    """

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.on_abort: Callable[[], None] | None = None
        """Breaks the client of the present exchange, which may be too slow to be told in any other way."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._pacer = Pacer(self._feed, self._paced)
        self._parser: httptools.HttpResponseParser | None = None
        self._method = ""
        self._request_complete = False
        self._continue: asyncio.Event | None = None
        self._head_complete = self._complete = self._until_eof = self._bodiless = False
        self._keep_alive = False
        self._dirty = False
        self._overhead = 0
        self._started = False
        self._failure: UpstreamError | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._reading_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._writing_paused = False
        self._eof = False

    # The exchange, as its user drives it.

    def begin(self, method: str, head: bytes, *, has_body: bool, expects_continue: bool = False) -> None:
        """Send a request's head; without `has_body` it is complete."""
        self._parser = httptools.HttpResponseParser(self)
        self._method = method
        self._request_complete = not has_body
        self._continue = asyncio.Event() if expects_continue else None
        self.headers = []
        self.status = self._overhead = self._pacer.plain = 0
        self._head_complete = self._complete = self._until_eof = self._bodiless = self._started = False
        self.write(head)

    def write(self, data: bytes) -> None:
        if self._transport is not None and self._failure is None:
            self._transport.write(data)

    def write_chunk(self, data: bytes) -> None:
        """One chunk of a chunked body; an empty one would end it and is not sent."""
        if data and self._transport is not None and self._failure is None:
            self._transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))

    def end_body(self, *, chunked: bool) -> None:
        if chunked:
            self.write(b"0\r\n\r\n")
        self._request_complete = True

    async def drain(self) -> None:
        """Wait until the sandbox has taken enough of what was written; without deadline, both ends may be slow."""
        if self._failure is not None:
            raise self._failure
        if self._writing_paused:
            self._writer = self._loop.create_future()
            await self._writer
        if self._failure is not None:
            raise self._failure

    async def continued(self, seconds: float) -> bool:
        """Whether the body is wanted: on `100 Continue`, or after `seconds`, as some servers just wait for the body.

        Not when the response comes first.
        """
        if self._continue is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._continue.wait()
        return not self._head_complete and self._failure is None

    async def head(self) -> int:
        """The status of the response, with `headers` set; without deadline, the client decides how long it waits."""
        while not self._head_complete:
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """What of the body has come since the last call, at least one byte; empty at its proper end."""
        while not self._chunks:
            if self._complete:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        self._hold()
        return data

    @property
    def finished(self) -> bool:
        """Whether everything of the response has been read: there is no more to wait for."""
        return self._complete and not self._chunks

    @property
    def reusable(self) -> bool:
        return (
            self._complete
            and self._request_complete
            and self._keep_alive
            and not self._until_eof
            and not self._dirty
            and not self._chunks
            and not self._reading_paused
            and not self.closed
        )

    def rest(self) -> None:
        """Keep it for a later exchange. Anything that arrives meanwhile closes it."""
        self._parser = None
        self.on_abort = None
        self.idle_since = self._loop.time()

    @property
    def closed(self) -> bool:
        return self._transport is None or self._failure is not None or self._transport.is_closing()

    def abort(self, why: str, /) -> None:
        """End it at once in both directions, discarding unsent bytes. A response cut short by it calls `on_abort`."""
        cut_short = not self._complete
        self._fail(why)
        if cut_short and self.on_abort is not None:
            self.on_abort()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self._fail("the sandbox sent data that nobody asked for")
            return
        self._started = True
        self._pacer.take(data)

    def _feed(self, data: memoryview) -> None:
        if self._complete or self._parser is None:
            self._dirty = True
            return
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the sandbox changed the protocol without being asked to")
        except httptools.HttpParserError:
            # After the message is complete, what follows only costs the connection.
            if self._complete:
                self._dirty = True
            else:
                self._fail("the sandbox answered with something that is not HTTP")
        if self._overhead > MAX_OVERHEAD:
            self._fail(f"the sandbox sent more than {MAX_OVERHEAD} bytes of headers or chunk framing")

    def _paced(self) -> None:
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        self._hold()
        self._wake()

    def _hold(self) -> None:
        """Read from the sandbox while there is room for it and the parser keeps up."""
        held = self._buffered > HIGH_WATER or self._pacer.behind
        if held is not self._reading_paused and self._transport is not None and not self.closed:
            self._reading_paused = held
            self._transport.pause_reading() if held else self._transport.resume_reading()

    def eof_received(self) -> None:
        self._eof = True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._until_eof and self._head_complete and self._eof and exc is None and self._failure is None:
            self._complete = True
        self._fail("the sandbox closed the connection" + ("" if self._started else " without answering"))
        self._transport = None

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    # The parser's side.

    def on_message_begin(self) -> None:
        if self._complete:
            self._dirty = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._pacer.callbacks += 1
        if not self._head_complete:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            # Informational responses cannot be passed on through ASGI; 100 is what the request body waits for.
            self.headers = []
            if status == 100 and self._continue is not None:
                self._continue.set()
            return
        if not 200 <= status < 600:
            self._fail(f"the sandbox answered with the status {status}")
            return
        self.status = status
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"], [b"identity"]):
            self._fail(f"the sandbox answered in the transfer coding {codings!r}")
            return
        self._bodiless = self._method == "HEAD" or status in (204, 304)
        length = next((int(value) for name, value in self.headers if name == b"content-length"), None)
        self._until_eof = not self._bodiless and length is None and codings != [b"chunked"]
        self._keep_alive = self._parser.should_keep_alive()
        self._head_complete = True
        self._pacer.plain = sys.maxsize if self._until_eof else length or 0
        if self._bodiless:
            self._complete = True
        if self._continue is not None:
            self._continue.set()

    def on_body(self, body: bytes) -> None:
        if self._complete:
            self._dirty = True
            return
        self._pacer.callbacks += 1
        self._overhead = max(0, self._overhead - FRAMING_PER_BYTE * len(body))
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._head_complete and not self._until_eof:
            self._complete = True

    # Waiting.

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._reader = self._loop.create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = UpstreamError(why, started=self._started)
            self._dirty = True
            self._pacer.stop()
            if self._continue is not None:
                self._continue.set()
            if self._transport is not None:
                self._transport.abort()
        self._wake()
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
