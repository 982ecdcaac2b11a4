"""How uvicorn must run for the proxy: options, and two protocols that add what stock uvicorn lacks."""

import json
from typing import Any, TypedDict

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from aenv.proxy.asgi import ABORT
from aenv.proxy.connection import MAX_OVERHEAD
from aenv.proxy.websocket import MAX_MESSAGE

KEEP_ALIVE_SECONDS = 330
"""Longer than the clients' (300 s in the E2B SDKs): the side that sends the next request must close first."""


class HttpProtocol(HttpToolsProtocol):
    """Lets the application break the connection, bounds the head of a request, and refuses malformed ones in JSON."""

    _overhead = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._extensions: dict[str, Any] = {ABORT: {"abort": transport.abort}}

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def data_received(self, data: bytes) -> None:
        # Counted until the next byte of body or end of message: an endless head, or endless trailers.
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_OVERHEAD and not self.transport.is_closing():
            self._refuse(431, f"the request's headers are larger than {MAX_OVERHEAD} bytes")

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._overhead = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP/1.1 request: its head could not be parsed")

    def _unsupported_upgrade_warning(self) -> None:
        # The request is answered without the upgrade; its parser reads nothing after it.
        self.cycle.keep_alive = False

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # An answer now would be read as part of the one under way.
            return
        body = json.dumps({"code": status, "message": message}).encode()
        head = (
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Lets the application break the connection."""

    async def run_asgi(self) -> None:
        self.scope["extensions"][ABORT] = {"abort": self.transport.abort}
        await super().run_asgi()


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
