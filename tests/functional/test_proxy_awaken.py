"""Requests to sandboxes that are paused, being paused, or being resumed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from proxy_harness import (
    PATIENCE,
    Node,
    Reply,
    Torn,
    answering,
    ask,
    event_loop_policy,
    head,
    read_chunk,
    read_head,
    read_reply,
    running_node,
)
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from aenv.errors import AenvError, Conflict, GuestError, TooManyRequests

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

__all__ = ["event_loop_policy"]  # a fixture


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running_node() as running:
        running.sandboxes.add("ia")
        yield running


def wake_on(node: Node, *, generation: str = "g2") -> tuple[asyncio.Event, asyncio.Event]:
    """From now on whoever awakens sets the first event, and waits for the second to have the sandbox resumed."""
    waiting, resume = asyncio.Event(), asyncio.Event()

    async def wake(sandbox_id: str) -> None:
        waiting.set()
        await resume.wait()
        node.sandboxes.add(sandbox_id, generation=generation)

    node.sandboxes.wake = wake
    return waiting, resume


async def test_the_first_request_waits_and_is_served(node: Node) -> None:
    port = await node.upstream(answering(OK, node))
    node.pause("ia", auto_resume=True)
    waiting, resume = wake_on(node)
    requests = [asyncio.create_task(ask(node, head("GET", f"/{n}", "ia", port))) for n in range(3)]
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    assert node.accepted == 0
    resume.set()
    replies = await asyncio.wait_for(asyncio.gather(*requests), PATIENCE)
    assert [(reply.status, reply.body) for reply in replies] == [(200, b"ok")] * 3
    assert len(node.seen) == 3


async def test_a_body_is_not_lost_in_the_wait(node: Node) -> None:
    received = asyncio.get_running_loop().create_future()

    async def taking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        received.set_result(await reader.readexactly(100_000))
        writer.write(OK)
        await writer.drain()

    port = await node.upstream(taking)
    node.pause("ia", auto_resume=True)
    waiting, resume = wake_on(node)
    reader, writer = await node.connect()
    writer.write(head("POST", "/", "ia", port, "Content-Length: 100000") + b"x" * 50_000)
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    resume.set()
    writer.write(b"x" * 50_000)
    assert (await read_reply(reader)).body == b"ok"
    assert received.result() == b"x" * 100_000


async def test_a_websocket_wakes_too(node: Node) -> None:
    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    server = await serve(echo, "127.0.0.2", 0)
    node.stack.push_async_callback(server.wait_closed)
    node.stack.callback(server.close)
    port = int(next(iter(server.sockets)).getsockname()[1])
    node.pause("ia", auto_resume=True)
    waiting, resume = wake_on(node)
    headers = {"E2b-Sandbox-Id": "ia", "E2b-Sandbox-Port": str(port)}
    url = f"ws://127.0.0.1:{node.port}/"

    async def talk() -> object:
        async with connect(url, additional_headers=headers, proxy=None) as client:
            await client.send("hello")
            return await client.recv()

    talking = asyncio.create_task(talk())
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    resume.set()
    assert await asyncio.wait_for(talking, PATIENCE) == "hello"

    async with connect(url, additional_headers=headers, proxy=None) as client:
        await client.send("hello")
        await client.recv()
        node.pause("ia", auto_resume=True)  # whatever was under way is broken, not closed
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(client.recv(), PATIENCE)
        assert closed.value.rcvd is None
    node.sandboxes.wake = None
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, additional_headers=headers, proxy=None)
    assert refused.value.response.status_code == 502


async def test_what_does_not_wake_is_not_found(node: Node) -> None:
    for sandbox_id, asked in (("ipaused", ["ipaused"]), ("iunknown", [])):
        node.sandboxes.awakened.clear()
        reply = await ask(node, head("GET", "/health", sandbox_id, 49983))
        assert (reply.status, reply.json) == (
            502,
            {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502},
        )
        assert node.sandboxes.awakened == asked


async def test_the_wait_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.proxy.app.AWAKEN_DEADLINE", 0.05)
    node.pause("ia", auto_resume=True)
    wake_on(node)
    reply = await ask(node, head("GET", "/", "ia", 80))
    assert (reply.status, reply.json["sandboxId"]) == (504, "ia")
    assert "did not resume within 0.05 s" in reply.json["message"]


@pytest.mark.parametrize("error", [TooManyRequests("the node is full"), GuestError("no answer"), Conflict("busy")])
async def test_why_it_did_not_wake_is_told(node: Node, error: AenvError) -> None:
    async def fail(sandbox_id: str) -> None:
        raise error

    node.pause("ia", auto_resume=True)
    node.sandboxes.wake = fail
    reply = await ask(node, head("GET", "/", "ia", 80))
    assert (reply.status, reply.json["message"]) == (error.status, error.message)


async def test_who_may_not_pass_wakes_nobody(node: Node) -> None:
    port = await node.upstream(answering(OK))
    node.pause("ia", auto_resume=True, traffic_token="tt")
    _, resume = wake_on(node)
    resume.set()
    for line in ("X: y", "E2b-Traffic-Access-Token: wrong"):
        assert (await ask(node, head("GET", "/", "ia", port, line))).status == 403
    assert node.sandboxes.awakened == []
    reply = await ask(node, head("GET", "/", "ia", port, "E2b-Traffic-Access-Token: tt"))
    assert (reply.status, node.sandboxes.awakened) == (200, ["ia"])


async def test_a_stream_of_a_sandbox_that_is_paused_breaks_and_wakes_nobody(node: Node) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await reader.read()

    port = await node.upstream(stream)
    reader, writer = await node.connect()
    writer.write(head("GET", "/", "ia", port))
    await read_head(reader)
    assert await read_chunk(reader) == b"first"
    node.pause("ia", auto_resume=True)
    with pytest.raises(Torn):
        await read_chunk(reader)
    assert node.sandboxes.awakened == []


async def asked(node: Node, method: str, *lines: str) -> asyncio.Task[Reply]:
    """A request that is in the sandbox, which does not answer it; the next one it answers."""
    arrived = asyncio.Event()

    async def silent_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node.seen.append(await reader.readuntil(b"\r\n\r\n"))
        if len(node.seen) == 1:
            arrived.set()
            await reader.read()
        writer.write(OK)
        await writer.drain()

    port = await node.upstream(silent_once)
    request = asyncio.create_task(ask(node, head(method, "/", "ia", port, *lines)))
    await asyncio.wait_for(arrived.wait(), PATIENCE)
    return request


async def test_a_question_that_a_pause_cut_off_is_asked_again(node: Node) -> None:
    request = await asked(node, "GET")
    waiting, resume = wake_on(node)
    node.pause("ia", auto_resume=True)
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    resume.set()
    assert (await asyncio.wait_for(request, PATIENCE)).body == b"ok"
    assert len(node.seen) == 2


async def test_a_change_that_a_pause_cut_off_is_not_made_twice(node: Node) -> None:
    request = await asked(node, "POST", "Content-Length: 0")
    node.pause("ia", auto_resume=True)
    reply = await asyncio.wait_for(request, PATIENCE)
    assert reply.json["message"] == "The sandbox was not found"
    assert (len(node.seen), node.sandboxes.awakened) == (1, [])


async def test_a_client_that_leaves_while_it_waits_harms_nobody(node: Node) -> None:
    port = await node.upstream(answering(OK))
    node.pause("ia", auto_resume=True)
    waiting, resume = wake_on(node)
    _, writer = await node.connect()
    writer.write(head("GET", "/", "ia", port))
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    writer.transport.abort()
    resume.set()
    assert (await ask(node, head("GET", "/", "ia", port))).body == b"ok"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_request_under_way_when_the_server_stops_is_told_so(node: Node, method: str) -> None:
    """The sandbox goes on; that it ended would be a lie."""
    request = await asked(node, method, "Content-Length: 0")
    await node.app.aclose()
    reply = await asyncio.wait_for(request, PATIENCE)
    assert (reply.status, "shutting down" in reply.json["message"]) == (503, True)
