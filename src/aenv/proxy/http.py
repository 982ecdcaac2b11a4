"""One HTTP request into a sandbox and its response back, streamed both ways as the bytes come."""

import asyncio
from dataclasses import dataclass

from aenv.proxy.asgi import Receive, Scope, Send, abort_of, break_client
from aenv.proxy.connection import Connection, UpstreamError
from aenv.proxy.headers import Framing, response_headers
from aenv.proxy.upstream import Ended, Generation

CONTINUE_SECONDS = 1.0
"""How long a request's body waits for the sandbox's `100 Continue` (RFC 9110 10.1.1: not indefinitely)."""

_IDEMPOTENT = frozenset(("GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"))


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is to be sent, ready: the request's head in bytes, and how its body follows."""

    method: str
    port: int
    head: bytes
    body: Framing

    @property
    def repeatable(self) -> bool:
        """Whether it may be carried out twice, as far as the client's method tells."""
        return self.method in _IDEMPOTENT and not self.body.has_body


async def forward(scope: Scope, receive: Receive, send: Send, exchange: Exchange, generation: Generation) -> None:
    """Carry the exchange out.

    Raises PortNotOpen, Unreachable, Ended or UpstreamError while nothing was sent to the client; afterwards a failure
    breaks the client's connection.
    """
    # A request that changes something takes no connection the sandbox may be about to close, as it cannot be repeated.
    connection = generation.take_idle(exchange.port, fresh=not exchange.repeatable)
    if connection is not None:
        try:
            return await _attempt(scope, receive, send, exchange, generation, connection)
        except UpstreamError as error:
            if error.started or not exchange.repeatable or generation.ended:
                raise
    connection = await generation.connect(exchange.port)
    return await _attempt(scope, receive, send, exchange, generation, connection)


async def _attempt(
    scope: Scope, receive: Receive, send: Send, exchange: Exchange, generation: Generation, connection: Connection
) -> None:
    body = exchange.body
    upload = _Upload(receive, connection, body)
    started = False
    connection.begin(exchange.method, exchange.head, has_body=body.has_body, expects_continue=body.expects_continue)
    sending = asyncio.create_task(upload.run())
    try:
        status = await connection.head()
        started = True
        connection.on_abort = abort_of(scope)
        await _send_response(send, connection, status, upload)
    except UpstreamError as error:
        if upload.client_left:
            return
        if not started and generation.ended and exchange.repeatable:
            raise Ended from error
        if not started:
            raise
        await break_client(scope, receive)
    finally:
        connection.on_abort = None
        generation.give_back(exchange.port, connection)
        sending.cancel()
        await asyncio.wait((sending,))


async def _send_response(send: Send, connection: Connection, status: int, upload: "_Upload") -> None:
    headers = response_headers(status, connection.headers)
    if upload.withheld:
        # The client was not told to send its body and may or may not do so: its connection cannot be read further.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    upload.answered.set()
    finished = False
    while not finished:
        data = await connection.read()
        finished = connection.finished
        await send({"type": "http.response.body", "body": data, "more_body": not finished})


class _Upload:
    """The client's side of an exchange: its body, then the watch for its leaving, which ends the exchange at once."""

    def __init__(self, receive: Receive, connection: Connection, body: Framing) -> None:
        self.client_left = False
        self.withheld = body.expects_continue
        """Whether the client still waits to be told to send its body."""
        self.answered = asyncio.Event()
        self._receive = receive
        self._connection = connection
        self._body = body

    async def run(self) -> None:
        try:
            here = await self._send_body()
            while here:
                here = (await self._receive())["type"] != "http.disconnect"
        except UpstreamError:
            return  # Whoever waits for the response learns the same.
        except Exception:
            self._connection.abort("the client's side failed")
            raise
        self.client_left = True
        self._connection.abort("the client left")

    async def _send_body(self) -> bool:
        """Whether the client was there to the end of its body."""
        connection, body = self._connection, self._body
        if not body.has_body:
            return True
        if body.expects_continue and not await connection.continued(CONTINUE_SECONDS):
            await self.answered.wait()  # To ask the server for anything earlier would tell the client to go on.
            return True
        self.withheld = False
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return False
            if body.chunked:
                connection.write_chunk(message.get("body", b""))
            else:
                connection.write(message.get("body", b""))
            await connection.drain()
            more = message.get("more_body", False)
        connection.end_body(chunked=body.chunked)
        return True
