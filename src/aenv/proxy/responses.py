"""The proxy's own answers: always JSON, always readable by a browser's script. Bodies: the E2B proxy error contract."""

import json
from dataclasses import dataclass

from aenv.errors import AenvError
from aenv.proxy.asgi import Scope, Send
from aenv.proxy.headers import framing
from aenv.proxy.routing import ENVD_PORT

_CORS = ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*"))


@dataclass(frozen=True, slots=True)
class Answer:
    """`sandbox_id` and `port` are named in the body where the request had them."""

    status: int
    message: str
    sandbox_id: str | None = None
    port: int | None = None

    @property
    def body(self) -> bytes:
        content: dict[str, object] = {} if self.sandbox_id is None else {"sandboxId": self.sandbox_id}
        content["message"] = self.message
        if self.port is not None:
            content["port"] = self.port
        return json.dumps(content | {"code": self.status}, separators=(",", ":")).encode()


# Clients look for the words of these two to tell a dead sandbox from a closed port.
def sandbox_not_found(sandbox_id: str) -> Answer:
    return Answer(502, "The sandbox was not found", sandbox_id)


def asleep(sandbox_id: str, seconds: float) -> Answer:
    return Answer(504, f"The sandbox was not running and did not resume within {seconds:g} s", sandbox_id)


def port_not_open(sandbox_id: str, port: int) -> Answer:
    return Answer(502, "The sandbox is running but port is not open", sandbox_id, port)


def bad_gateway(sandbox_id: str, port: int, why: str) -> Answer:
    return Answer(502, f"The sandbox is running but its port {port} did not answer properly: {why}", sandbox_id, port)


def token_missing(sandbox_id: str, port: int) -> Answer:
    message = "This sandbox is not public: send its traffic access token in the header e2b-traffic-access-token"
    return Answer(403, message, sandbox_id, port)


def internal_route(sandbox_id: str) -> Answer:
    return Answer(404, "The sandbox's daemon has no such route for callers from outside", sandbox_id, ENVD_PORT)


def of_error(error: AenvError, sandbox_id: str | None = None) -> Answer:
    return Answer(error.status, error.message, sandbox_id)


async def send_answer(scope: Scope, send: Send, answer: Answer) -> None:
    """Answer a request, or refuse a WebSocket's handshake, with it."""
    headers = [(b"content-type", b"application/json"), *_CORS]
    if scope["type"] == "http":
        if framing(scope["headers"]).expects_continue:
            # The client was not told to send its body and may or may not do so: its connection cannot be read further.
            headers.append((b"connection", b"close"))
        await _respond(send, "http.response", answer.status, headers, answer.body)
    else:
        await send_refusal(scope, send, answer.status, headers, answer.body)


async def send_refusal(scope: Scope, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Refuse a WebSocket's handshake with a whole response, where the server can send one; else with its own 403."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await _respond(send, "websocket.http.response", status, headers, body)
    else:
        await send({"type": "websocket.close"})


async def _respond(send: Send, kind: str, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body, "more_body": False})


async def send_preflight(send: Send, request_headers: bytes) -> None:
    """Allow a browser to send a request with routing headers; the sandbox it names is known only from that one."""
    headers = [
        (b"access-control-allow-origin", b"*"),
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
        (b"access-control-allow-headers", request_headers),
        (b"access-control-max-age", b"7200"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
