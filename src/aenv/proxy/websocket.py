"""A client's WebSocket joined to one in a sandbox, message by message. Each side's pings are answered at its end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidState, InvalidStatus
from websockets.frames import EXTERNAL_CLOSE_CODES, Close, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from aenv.proxy.asgi import Receive, Scope, Send, abort_of, break_client
from aenv.proxy.connection import UpstreamError
from aenv.proxy.headers import HOP_BY_HOP, Request, forwarded, refuse_key_in_target
from aenv.proxy.pacing import BREATHER
from aenv.proxy.upstream import Ended, Generation

HANDSHAKE_DEADLINE = 30.0
CLOSE_DEADLINE = 5.0
MAX_MESSAGE = 16 << 20
"""Bytes of one message; ASGI passes messages whole."""
READ_SIZE = 64 * 1024
SLICE = 2 * 1024
"""Bytes parsed at a time; the smallest frames take 2."""
MOST_FRAMES = 100
"""Frames passed on before others get their turn, as each costs some 20 us."""
NO_CODE = 1005
"""Stands for a close frame without a code (RFC 6455 7.1.5)."""


class Refused(UpstreamError):
    """The sandbox's server answered the handshake with an ordinary response, which is the client's to see."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"the handshake was answered with {response.status_code}", started=True)
        self.status_code = response.status_code
        self.headers = end_to_end(response)
        self.body = bytes(response.body or b"")


class Tunnel:
    """The sandbox's side: a connection that speaks WebSocket. End it with `abort`, which may come at any time."""

    def __init__(
        self, transport: asyncio.Transport, stream: asyncio.StreamReaderProtocol, reader: asyncio.StreamReader
    ):
        self.on_abort: Callable[[], None] | None = None
        """Breaks the client, which may be too slow to be told in any other way."""
        self.headers: list[tuple[bytes, bytes]] = []
        self._transport = transport
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, stream, reader, asyncio.get_running_loop())
        self._protocol: ClientProtocol
        self._frames: list[object] = []
        self._unparsed = memoryview(b"")

    @property
    def subprotocol(self) -> str | None:
        return self._protocol.subprotocol

    @property
    def close(self) -> Close | None:
        """How this side was closed, or what its violation of the protocol calls for; None when it broke off."""
        return self._protocol.close_rcvd or self._protocol.close_sent

    def abort(self, why: str, /) -> None:
        self._transport.abort()
        if self.on_abort is not None:
            self.on_abort()

    async def handshake(self, request: Request, subprotocols: list[str], address: str) -> None:
        """Raises Refused, or UpstreamError when what answers is no WebSocket server."""
        path, _, query = request.target.decode("latin-1").partition("?")
        uri = WebSocketURI(False, address, request.port, path, query)
        offered = [Subprotocol(name) for name in subprotocols if not request.holds_key(name.encode("latin-1"))] or None
        protocol = self._protocol = ClientProtocol(uri, subprotocols=offered, max_size=MAX_MESSAGE)
        opening = protocol.connect()
        headers = Headers()
        for name, value in forwarded(request):
            if not name.startswith(b"sec-websocket-"):
                headers[name.decode("latin-1")] = value.decode("latin-1")
        del opening.headers["Host"]
        headers.update(opening.headers)
        opening.headers = headers
        protocol.send_request(opening)
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE):
                await self._flush()
                while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
                    await self._feed()
        except TimeoutError:
            raise UpstreamError(f"no WebSocket handshake within {HANDSHAKE_DEADLINE:g} s", started=False) from None
        if isinstance(protocol.handshake_exc, InvalidStatus):
            raise Refused(protocol.handshake_exc.response)
        if protocol.handshake_exc is not None:
            raise UpstreamError(f"the WebSocket handshake failed: {protocol.handshake_exc}", started=True)
        for event in protocol.events_received():
            if isinstance(event, Response):
                self.headers = end_to_end(event)
            else:
                self._frames.append(event)

    async def messages(self) -> AsyncIterator[str | bytes]:
        """Whole messages until this side closes or breaks off."""
        parts = bytearray()
        text = False
        dense = 0
        while True:
            frames, self._frames = self._frames, []
            for frame in frames:
                if not isinstance(frame, Frame) or frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                    continue
                if frame.opcode is not Opcode.CONT:
                    text = frame.opcode is Opcode.TEXT
                parts += frame.data
                if not frame.fin:
                    continue
                data = bytes(parts)
                parts.clear()
                try:
                    message = data.decode() if text else data
                except UnicodeDecodeError:
                    self._protocol.fail(1007, "text that is not UTF-8")
                    await self._flush()
                    return
                yield message
            if self._protocol.close_rcvd is not None or self._protocol.parser_exc is not None:
                return
            dense += len(frames)
            if dense > MOST_FRAMES:
                dense = 0
                await asyncio.sleep(BREATHER)
            await self._feed()
            self._frames = list(self._protocol.events_received())

    async def send(self, message: str | bytes) -> None:
        if isinstance(message, str):
            self._protocol.send_text(message.encode())
        else:
            self._protocol.send_binary(message)
        await self._flush()

    async def send_close(self, code: int, reason: str) -> None:
        """Start closing; the sandbox's own close then ends `messages`. A code that cannot be sent stands for none."""
        if code in EXTERNAL_CLOSE_CODES or 3000 <= code < 5000:
            self._protocol.send_close(code, reason)
        else:
            self._protocol.send_close()
        await self._flush()

    async def _feed(self) -> None:
        if not self._unparsed:
            with contextlib.suppress(OSError):  # The same as an end without a close.
                self._unparsed = memoryview(await self._reader.read(READ_SIZE))
        if self._unparsed:
            data, self._unparsed = self._unparsed[:SLICE], self._unparsed[SLICE:]
            self._protocol.receive_data(bytes(data))
        elif not self._protocol.reader.eof:
            self._protocol.receive_eof()
        await self._flush()

    async def _flush(self) -> None:
        """Write what the protocol has to say. Its half-close is left out: the connection is dropped right after."""
        if output := [data for data in self._protocol.data_to_send() if data]:
            self._writer.writelines(output)
        try:
            await self._writer.drain()
        except OSError:
            return  # The reading side learns the same.


def end_to_end(response: Response) -> list[tuple[bytes, bytes]]:
    """A handshake response's headers that are not about this one connection."""
    named = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in response.headers.raw_items()]
    return [
        (name, value)
        for name, value in named
        if name not in HOP_BY_HOP and name != b"content-length" and not name.startswith(b"sec-websocket-")
    ]


async def join(scope: Scope, receive: Receive, send: Send, request: Request, generation: Generation) -> None:
    """Open the sandbox's side, accept the client's, and carry messages and close codes until either ends.

    The client's "websocket.connect" has been received. Raises BadRequest, PortNotOpen, Unreachable, Ended, Refused or
    UpstreamError while its handshake is unanswered; afterwards a sandbox's side that breaks off breaks the client's.
    """
    refuse_key_in_target(request)
    reader = asyncio.StreamReader(limit=READ_SIZE)
    transport, stream = await generation.open(request.port, lambda: asyncio.StreamReaderProtocol(reader))
    tunnel = Tunnel(transport, stream, reader)
    generation.track(tunnel, transport)
    try:
        try:
            await tunnel.handshake(request, scope.get("subprotocols", []), generation.route.address)
        except UpstreamError as error:
            if generation.ended and not isinstance(error, Refused):
                raise Ended from error
            raise
        await send({"type": "websocket.accept", "subprotocol": tunnel.subprotocol, "headers": tunnel.headers})
        tunnel.on_abort = abort_of(scope)
        upwards = _Upwards(receive, tunnel)
        sending = asyncio.create_task(upwards.run())
        try:
            async for message in tunnel.messages():
                if not upwards.client_left:
                    await _send(send, message, upwards)
        finally:
            upwards.stop_waiting()
            sending.cancel()
            await asyncio.wait((sending,))
        if upwards.client_left:
            return
        if (close := tunnel.close) is None:
            await break_client(scope, receive)
        else:
            code = 1000 if close.code == NO_CODE else close.code
            await send({"type": "websocket.close", "code": code, "reason": close.reason})
    finally:
        generation.untrack(tunnel)
        tunnel.on_abort = None
        transport.abort() if tunnel.close is None else transport.close()


async def _send(send: Send, message: str | bytes, upwards: "_Upwards") -> None:
    try:
        await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
    except OSError:
        # How servers say that the client has left. Whether it closed properly is in what it sent last.
        upwards.leave()


class _Upwards:
    """From the client into the sandbox, the client's close last."""

    def __init__(self, receive: Receive, tunnel: Tunnel) -> None:
        self.client_left = False
        self._receive = receive
        self._tunnel = tunnel
        self._deadline: asyncio.TimerHandle | None = None

    def leave(self) -> None:
        """The client is gone: the sandbox's side has a moment left to close."""
        self.client_left = True
        self._tunnel.on_abort = None
        self.stop_waiting()
        self._deadline = asyncio.get_running_loop().call_later(CLOSE_DEADLINE, self._tunnel.abort, "the client left")

    def stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    async def run(self) -> None:
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                text = message.get("text")
                await self._tunnel.send(message.get("bytes") or b"" if text is None else text)
            self.leave()
            # A client that closed properly gives a reason, if only an empty one; one that vanished gives none.
            if message.get("reason") is None:
                self._tunnel.abort("the client left")
            else:
                await self._tunnel.send_close(message.get("code", NO_CODE), message["reason"])
        except InvalidState:
            return  # The sandbox has closed its side; whoever reads it tells the client.
        except Exception:
            self._tunnel.abort("the client's side failed")
            raise
