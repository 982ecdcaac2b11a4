"""How uvicorn must run for the proxy: options, and two protocols that add what stock uvicorn lacks."""

import asyncio
import json
import logging
from typing import Any, TypedDict

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Response
from websockets.protocol import Event
from websockets.server import ServerProtocol
from websockets.typing import StatusLike

from aenv.proxy.asgi import ABORT
from aenv.proxy.connection import MAX_OVERHEAD
from aenv.proxy.pacing import FRAMING_PER_BYTE, Pacer
from aenv.proxy.websocket import MAX_MESSAGE

KEEP_ALIVE_SECONDS = 330
"""Longer than the clients' (300 s in the E2B SDKs): the side that sends the next request must close first."""


HEAD_SECONDS = 30.0
"""For a request's head to come whole, from the connection's start or the head's first byte."""
MAX_TARGET = 65535
"""Bytes of a request's target; the parser's limit."""
FRAME_SLICE = 2 * 1024
FRAME_CALLBACKS = 10
HEAD_CALLBACKS = 20
"""A WebSocket frame or a request's head costs about as much as this many of the parser's cheapest callbacks."""

# Callers without a key cause what uvicorn and websockets log on lower levels: a line per malformed or refused request.
_log = logging.getLogger("aenv.proxy.server")
_log.setLevel(logging.ERROR)
_handshakes = logging.getLogger("aenv.proxy.handshakes")
_handshakes.setLevel(logging.CRITICAL)


class HttpProtocol(HttpToolsProtocol):
    """Lets the application break the connection, bounds a request's head in size and time and the work of a turn, and
    refuses malformed requests in JSON."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log
        self.url = b""
        self._overhead = 0
        self._in_message = False
        self._head_deadline: asyncio.TimerHandle | None = None
        self._pacer = Pacer(self._feed, self._paced)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._extensions: dict[str, Any] = {ABORT: {"abort": transport.abort}}
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pacer.stop()
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pacer.take(data)

    def _feed(self, data: memoryview) -> None:
        # Counted against the bytes of body until the message's end: an endless head, chunk framing, or trailers.
        self._overhead += len(data)
        super().data_received(data)  # type: ignore[arg-type]  # The parser takes any buffer.
        if self._pacer.stopped:
            return
        if self._overhead > MAX_OVERHEAD:
            if not self._refuse_target():
                self._refuse(431, f"the request's headers or chunk framing are larger than {MAX_OVERHEAD} bytes")
        elif not self._in_message and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def _paced(self) -> None:
        self.flow.hold(self._pacer.behind)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        self._pacer.callbacks += 1
        if not self._in_message:  # Trailers are no headers (RFC 9110 6.5.1).
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_message = True
        self._head_is_there()
        self._pacer.callbacks += HEAD_CALLBACKS
        self._pacer.plain = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pacer.callbacks += 1
        self._overhead = max(0, self._overhead - FRAMING_PER_BYTE * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._overhead = 0
        self._in_message = False
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._pacer.stop()  # What follows the handshake without waiting for its answer is dropped.
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        if not self._refuse_target():
            self._refuse(400, "this is not an HTTP/1.1 request: its head could not be parsed")

    def _unsupported_upgrade_warning(self) -> None:
        # The request is answered without the upgrade; its parser reads nothing after it.
        self.cycle.keep_alive = False

    def _expect_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_there(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self) -> None:
        if self._overhead:
            self._refuse(408, f"the request's head did not come whole within {HEAD_SECONDS:g} s")
        else:
            self.transport.close()

    def _refuse_target(self) -> bool:
        too_long = len(self.url) > MAX_TARGET
        if too_long:
            self._refuse(414, f"the request's path and query are longer than {MAX_TARGET} bytes")
        return too_long

    def _refuse(self, status: int, message: str) -> None:
        self._pacer.stop()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # An answer now would be read as part of the one under way.
            return
        body = refusal(status, message)
        head = (
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Flow(FlowControl):
    """uvicorn's, with a second reason to read no more: what was read is not parsed yet."""

    _held = False

    def hold(self, held: bool) -> None:
        if held is not self._held:
            self._held = held
            if not self.read_paused and not self._transport.is_closing():
                self._transport.pause_reading() if held else self._transport.resume_reading()

    def pause_reading(self) -> None:
        if self._held:
            self.read_paused = True
        else:
            super().pause_reading()

    def resume_reading(self) -> None:
        if self._held:
            self.read_paused = False
        else:
            super().resume_reading()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Lets the application break the connection, bounds the work of a turn, and refuses handshakes in JSON."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log
        self._pacer = Pacer(self._feed, self._paced, size=FRAME_SLICE)
        self.conn = self._handshake = _Handshake(self._pacer, self.config.ws_max_size)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pacer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pacer.take(data)
        self._paced()

    def _feed(self, data: memoryview) -> None:
        if self.transport.is_closing():
            return
        super().data_received(bytes(data))
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A head that websockets does not parse, although httptools did: its limits are lower.
            self._pacer.stop()
            output = [part for part in self.conn.data_to_send() if part]
            self.transport.write(b"".join(output) or self._handshake.malformed())
            self.transport.close()

    def _paced(self) -> None:
        """Read no more while the parser is behind; `receive` reads on once the application has taken all."""
        if self._pacer.behind and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()
        elif self.read_paused and self.queue.empty() and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await self.queue.get()
        self._paced()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # It was refused; uvicorn would log it as not answered.

    async def run_asgi(self) -> None:
        self.scope["extensions"][ABORT] = {"abort": self.transport.abort}
        await super().run_asgi()


class _Handshake(ServerProtocol):
    def __init__(self, pacer: Pacer, max_size: int) -> None:
        super().__init__(max_size=max_size, logger=_handshakes)
        self._pacer = pacer

    def events_received(self) -> list[Event]:
        events = super().events_received()
        self._pacer.callbacks += FRAME_CALLBACKS * len(events)
        return events

    def reject(self, status: StatusLike, text: str) -> Response:
        response = super().reject(status, text)
        body = refusal(response.status_code, text.strip() or "no WebSocket is accepted here")
        del response.headers["Content-Type"], response.headers["Content-Length"]
        response.headers.update({"content-type": "application/json", "content-length": str(len(body))})
        response.body = body
        return response

    def malformed(self) -> bytes:
        """The answer to a head that is no handshake."""
        return self.reject(400, "this is not a WebSocket handshake: its head could not be parsed").serialize()


def refusal(status: int, message: str) -> bytes:
    return json.dumps({"code": status, "message": message}).encode()


class Options(TypedDict):
    """Keyword arguments of `uvicorn.Config`."""

    loop: Any
    http: Any
    ws: Any
    timeout_keep_alive: int
    access_log: bool
    server_header: bool
    date_header: bool
    proxy_headers: bool
    ws_max_size: int
    ws_per_message_deflate: bool
    ws_ping_interval: float
    ws_ping_timeout: float | None


def uvicorn_options() -> Options:
    """What the proxy relies on. Host, port, lifespan and shutdown are the caller's.

    No Server and Date of our own beside the sandbox's; no trust in X-Forwarded-*; pings that keep a path open but never
    cut a client that is slow to answer.
    """
    return {
        "loop": "uvloop",
        "http": HttpProtocol,
        "ws": WebSocketProtocol,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "ws_max_size": MAX_MESSAGE,
        "ws_per_message_deflate": False,
        "ws_ping_interval": 30.0,
        "ws_ping_timeout": None,
    }
