"""A real uvicorn over ProxyApp on the loopback, sandboxes kept in memory, upstream servers written by the test."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import uvicorn
import uvloop

from aenv.errors import NotFound
from aenv.orchestrator.models import Route
from aenv.orchestrator.protocol import TokenTest
from aenv.proxy import ProxyApp
from aenv.proxy.server import uvicorn_options

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATIENCE = 20.0
"""Seconds after which a test that waits has failed."""


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The server's own event loop; import this into a module of tests to run them on it."""
    return uvloop.EventLoopPolicy()


@dataclass(frozen=True)
class Known:
    """What the proxy looks at of a sandbox that does not run."""

    auto_resume: bool = False
    traffic_token: str | None = None


class MemorySandboxes:
    """The part of `Sandboxes` that the proxy asks for. A sandbox without a route is paused."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.tokens: dict[str, str] = {}
        self.paused: dict[str, Known] = {"ipaused": Known()}
        self.wake: Callable[[str], Awaitable[None]] | None = None
        """Carried out when one is to be awakened."""
        self.awakened: list[str] = []

    def add(self, sandbox_id: str, address: str = "127.0.0.2", **changes: Any) -> None:
        route = Route(
            sandbox_id=sandbox_id, generation="g1", address=address, traffic_token="tt", public=True, mask_host=None
        )
        self.paused.pop(sandbox_id, None)
        self.routes[sandbox_id] = replace(route, **changes)

    def get(self, sandbox_id: str) -> Known:
        if sandbox_id in self.routes:
            return Known()
        if sandbox_id not in self.paused:
            raise NotFound(f"sandbox {sandbox_id} does not exist")
        return self.paused[sandbox_id]

    def route(self, sandbox_id: str) -> Route | None:
        self.get(sandbox_id)
        return self.routes.get(sandbox_id)

    async def awaken(self, sandbox_id: str) -> Route | None:
        self.awakened.append(sandbox_id)
        if self.wake is not None:
            await self.wake(sandbox_id)
        return self.routes.get(sandbox_id)

    def find_by_envd_token(self, matches: TokenTest) -> str | None:
        return next((sandbox_id for sandbox_id, token in self.tokens.items() if matches(token)), None)


@dataclass
class Node:
    """The running proxy. `accepted` counts connections that reached upstream servers."""

    port: int
    sandboxes: MemorySandboxes
    app: ProxyApp
    stack: contextlib.AsyncExitStack
    accepted: int = 0
    seen: list[bytes] = field(default_factory=list)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def kill(self, sandbox_id: str) -> None:
        """What the orchestrator does when a sandbox ends."""
        del self.sandboxes.routes[sandbox_id]
        self.app.sandbox_gone(sandbox_id)

    def pause(self, sandbox_id: str, **known: Any) -> None:
        """What the orchestrator does when a sandbox is paused."""
        del self.sandboxes.routes[sandbox_id]
        self.sandboxes.paused[sandbox_id] = Known(**known)
        self.app.sandbox_gone(sandbox_id)

    async def upstream(self, handler: Handler, address: str = "127.0.0.2") -> int:
        """Serve `handler` in the place of a sandbox; return its port. A handler that raises fails nothing here."""

        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted += 1
            task = asyncio.current_task()
            assert task is not None
            self.tasks.add(task)
            try:
                await handler(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                self.tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(guarded, address, 0, limit=1 << 20)
        self.stack.callback(server.close)
        return int(server.sockets[0].getsockname()[1])

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        self.stack.callback(writer.close)
        return reader, writer


async def control_plane(scope: Any, receive: Any, send: Any) -> None:
    """A stub that says it was asked."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close"})
        return
    body = b"control " + scope["raw_path"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def running_node(*, stock_server: bool = False) -> AsyncIterator[Node]:
    """With `stock_server`, uvicorn's own protocols: without the extension that breaks connections."""
    sandboxes = MemorySandboxes()
    app = ProxyApp(sandboxes, control_plane, api_key="e2b_platform")  # type: ignore[arg-type]
    options: dict[str, Any] = dict(uvicorn_options())
    if stock_server:
        options |= {"http": "httptools", "ws": "websockets-sansio"}
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", **options))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with contextlib.AsyncExitStack() as stack:
        node = Node(listener.getsockname()[1], sandboxes, app, stack)
        try:
            yield node
        finally:
            await app.aclose()
            server.should_exit = server.force_exit = True
            await serving
            for task in list(node.tasks):
                task.cancel()
            await asyncio.gather(*node.tasks, return_exceptions=True)


# Raw HTTP, as bytes: what a library would tidy up is what these tests are about.


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def json(self) -> Any:
        assert self.all("content-type") == ["application/json"]
        return json.loads(self.body)


class Torn(Exception):
    """The connection ended before the response did; `body` is what came."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self.body = body


def head(method: str, path: str, sandbox: str = "", port: int = 0, *lines: str) -> bytes:
    routing = [f"E2b-Sandbox-Id: {sandbox}", f"E2b-Sandbox-Port: {port}"] if sandbox else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: app.test", *routing, *lines, "", ""]).encode("latin-1")


async def read_head(reader: asyncio.StreamReader) -> Reply:
    raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
    return Reply(int(first.split(" ")[1]), [tuple(line.split(": ", 1)) for line in lines], b"")  # type: ignore[misc]


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk of a chunked body, empty at its end. Raises Torn."""
    try:
        size = int(await asyncio.wait_for(reader.readuntil(b"\r\n"), PATIENCE), 16)
        return (await asyncio.wait_for(reader.readexactly(size + 2), PATIENCE))[:-2]
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Torn(b"") from error


async def read_reply(reader: asyncio.StreamReader, *, bodiless: bool = False) -> Reply:
    """A whole response. Raises Torn when it is cut short."""
    reply = await read_head(reader)
    if bodiless or reply.status in (204, 304):
        return reply
    if reply.all("transfer-encoding") == ["chunked"]:
        body = b""
        try:
            while chunk := await read_chunk(reader):
                body += chunk
        except Torn as torn:
            raise Torn(body) from torn
        reply.body = body
    else:
        try:
            reply.body = await asyncio.wait_for(reader.readexactly(int(reply.all("content-length")[0])), PATIENCE)
        except asyncio.IncompleteReadError as error:
            raise Torn(error.partial) from error
    return reply


async def ask(node: Node, request: bytes, *, bodiless: bool = False) -> Reply:
    """One request on its own connection."""
    reader, writer = await node.connect()
    writer.write(request)
    return await read_reply(reader, bodiless=bodiless)


def answering(response: bytes, node: Node | None = None) -> Handler:
    """A server that reads heads (no bodies) and answers each with these bytes; it notes the heads in `node.seen`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            if node is not None:
                node.seen.append(request)
            writer.write(response)
            await writer.drain()

    return handler


def once(response: bytes) -> Handler:
    """A server that answers the first request with these bytes and closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()

    return handler
