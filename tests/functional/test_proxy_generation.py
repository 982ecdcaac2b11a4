"""Connections belong to one generation of one sandbox; when it ends, its clients see a break, never an end."""

import asyncio
import ctypes
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from proxy_harness import (
    PATIENCE,
    Handler,
    Node,
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

from aenv.proxy.liveness import is_dead
from aenv.proxy.upstream import Generation

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

__all__ = ["event_loop_policy"]  # a fixture


@pytest.fixture(params=[False, True], ids=["own-protocol", "stock-uvicorn"])
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with running_node(stock_server=request.param) as running:
        running.sandboxes.add("ia")
        yield running


async def get(node: Node, port: int, sandbox: str = "ia") -> bytes:
    return (await ask(node, head("GET", "/", sandbox, port))).body


async def test_a_connection_is_used_again_within_its_generation(node: Node) -> None:
    port = await node.upstream(answering(OK))
    assert [await get(node, port) for _ in range(3)] == [b"ok"] * 3
    assert node.accepted == 1


async def test_connections_into_a_sandbox_notice_a_path_that_is_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keepalives a stream whose packets are dropped hangs for ever."""
    opened: list[asyncio.Transport] = []
    real = Generation.open

    async def opening(self: Generation, port: int, protocol: Any) -> Any:
        opened.append((made := await real(self, port, protocol))[0])
        return made

    monkeypatch.setattr(Generation, "open", opening)
    await get(node, await node.upstream(answering(OK)))
    own = opened[0].get_extra_info("socket")
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert [own.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [15, 5, 3]


def blackhole(peer: socket.socket) -> None:
    """Have the kernel drop whatever arrives for it, unseen: what a dead path looks like from the other end."""
    program = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # one instruction: return 0 bytes
    so_attach_filter = 26
    peer.setsockopt(socket.SOL_SOCKET, so_attach_filter, struct.pack("@HP", 1, ctypes.addressof(program)))


async def test_a_path_that_is_gone_with_data_under_way_breaks_the_stream(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.proxy.liveness.SILENCE", 0.5)
    monkeypatch.setattr("aenv.proxy.upstream.IDLE_SECONDS", 0.5)

    async def streaming(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        peer = writer.get_extra_info("socket")
        await writer.drain()
        await gone.wait()
        blackhole(peer)
        dead.set()
        await asyncio.Event().wait()

    gone, dead = asyncio.Event(), asyncio.Event()
    port = await node.upstream(streaming)
    reader, writer = await node.connect()
    writer.write(head("POST", "/", "ia", port, "Transfer-Encoding: chunked"))
    assert (await read_head(reader)).status == 200
    gone.set()
    await asyncio.wait_for(dead.wait(), PATIENCE)
    writer.write(b"1\r\nx\r\n")
    with pytest.raises(Torn):
        await read_chunk(reader)


async def test_a_sandbox_that_is_slow_to_read_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.proxy.liveness.SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, *listener.getsockname())
        peer, _ = listener.accept()  # and never reads
        try:
            transport.write(bytes(64 << 20))
            for _ in range(10):
                await asyncio.sleep(0.1)  # nothing happens that could be awaited
                assert not is_dead(transport)
            assert transport.get_write_buffer_size() > 0
        finally:
            transport.abort()
            peer.close()


async def test_and_never_beyond_it(node: Node) -> None:
    port = await node.upstream(answering(OK))
    await get(node, port)
    node.sandboxes.add("ia", generation="g2")
    await get(node, port)
    assert node.accepted == 2
    node.sandboxes.add("ib", generation="g2")  # another sandbox at the same address
    await get(node, port, "ib")
    assert node.accepted == 3


async def test_an_idle_connection_of_an_old_generation_is_closed_at_once(node: Node) -> None:
    closed = asyncio.Event()

    async def watching(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answering(OK)(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            closed.set()

    port = await node.upstream(watching)
    await get(node, port)
    node.app.sandbox_gone("ia")
    await asyncio.wait_for(closed.wait(), PATIENCE)


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nfirst",
        b"HTTP/1.1 200 OK\r\n\r\nfirst",
    ],
    ids=["chunked", "length", "until-close"],
)
async def test_a_killed_sandbox_breaks_its_streams_then_answers_502(node: Node, start: bytes) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        await reader.read()

    port = await node.upstream(stream)
    reader, writer = await node.connect()
    writer.write(head("GET", "/", "ia", port))
    reply = await read_head(reader)
    if b"Length" in start:
        assert await reader.readexactly(5) == b"first"
        node.kill("ia")
        rest = await asyncio.wait_for(_rest(reader), PATIENCE)
        assert len(rest) < 995
    else:
        assert reply.all("transfer-encoding") == ["chunked"]
        assert await read_chunk(reader) == b"first"
        node.kill("ia")
        with pytest.raises(Torn):
            await read_chunk(reader)
    reply = await ask(node, head("GET", "/health", "ia", 49983))
    assert (reply.status, reply.json["message"]) == (502, "The sandbox was not found")


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_a_stream_ends_with_its_generation(node: Node) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"GET /stream" not in await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await reader.read()

    port = await node.upstream(stream)
    reader, writer = await node.connect()
    writer.write(head("GET", "/stream", "ia", port))
    await read_head(reader)
    assert await read_chunk(reader) == b"first"
    node.sandboxes.add("ia", generation="g2")
    assert await get(node, port) == b"ok"  # this lookup is what shows the change
    with pytest.raises(Torn):
        await read_chunk(reader)


async def test_a_request_that_waits_for_a_killed_sandbox_is_answered(node: Node) -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    port = await node.upstream(silent)
    request = asyncio.create_task(ask(node, head("POST", "/", "ia", port, "Content-Length: 9") + b"half"))
    await asyncio.wait_for(asked.wait(), PATIENCE)
    node.kill("ia")
    reply = await request
    assert (reply.status, reply.json["message"]) == (502, "The sandbox was not found")


async def test_a_connection_attempt_ends_with_the_sandbox(node: Node) -> None:
    """A listener whose queue is full accepts nothing: the attempt would last until its deadline."""

    full = socket.socket()
    full.bind(("127.0.0.2", 0))
    full.listen(0)
    port = full.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.2", port))
        fillers.append(filler)
    request = asyncio.create_task(ask(node, head("GET", "/", "ia", port)))
    try:
        done, _ = await asyncio.wait((request,), timeout=0.5)
        assert not done
        node.kill("ia")
        reply = await asyncio.wait_for(request, 5)
        assert (reply.status, reply.json["message"]) == (502, "The sandbox was not found")
    finally:
        for opened in (full, *fillers):
            opened.close()


def closing_after(node: Node, answers: int) -> Handler:
    """A server that closes each connection at the request after `answers` of them, as one that timed out just then."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(answers):
            node.seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK)
        node.seen.append(await reader.readuntil(b"\r\n\r\n"))

    return handler


async def test_a_stale_connection_is_replaced_once_for_what_may_be_repeated(node: Node) -> None:
    port = await node.upstream(closing_after(node, 1))
    assert await get(node, port) == b"ok"
    assert await get(node, port) == b"ok"
    assert (node.accepted, len(node.seen)) == (2, 3)


async def test_and_not_for_what_may_not(node: Node) -> None:
    port = await node.upstream(closing_after(node, 1))
    assert await get(node, port) == b"ok"
    reply = await ask(node, head("POST", "/", "ia", port, "Content-Length: 0"))
    assert (reply.status, reply.json["port"]) == (502, port)
    assert len(node.seen) == 2


async def test_a_fresh_connection_that_fails_is_not_repeated(node: Node) -> None:
    port = await node.upstream(closing_after(node, 0))
    assert (await ask(node, head("GET", "/", "ia", port))).status == 502
    assert node.accepted == 1


async def test_data_nobody_asked_for_never_answers_a_later_request(node: Node) -> None:
    async def poisoned(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
        await reader.read()

    port = await node.upstream(poisoned)
    assert [await get(node, port) for _ in range(3)] == [b"ok"] * 3
    assert node.accepted == 3


@pytest.mark.parametrize("node", [False], indirect=True, ids=["own-protocol"])
async def test_a_kill_reaches_a_client_that_reads_nothing(node: Node) -> None:
    """Its send buffer is full, so nothing but an abort can tell it."""
    stuck = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            try:
                await asyncio.wait_for(writer.drain(), 1)
            except TimeoutError:
                stuck.set()
                await writer.drain()

    port = await node.upstream(flood)
    reader, writer = await node.connect(limit=1 << 16)
    writer.write(head("GET", "/", "ia", port))
    await asyncio.wait_for(stuck.wait(), PATIENCE)
    node.kill("ia")
    with pytest.raises((Torn, ConnectionError)):
        await _read_to_the_end(reader)


async def _read_to_the_end(reader: asyncio.StreamReader) -> None:
    await read_head(reader)
    while await read_chunk(reader):
        pass


async def test_after_close_nothing_is_accepted(node: Node) -> None:
    port = await node.upstream(answering(OK))
    await get(node, port)
    await node.app.aclose()
    reply = await ask(node, head("GET", "/", "ia", port))
    assert (reply.status, reply.json["code"]) == (503, 503)


async def test_keep_alive_of_the_client_spans_sandboxes(node: Node) -> None:
    """One client connection, several sandboxes and the control plane in turn."""
    first = await node.upstream(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1"))
    second = await node.upstream(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2"), "127.0.0.3")
    node.sandboxes.add("ib", "127.0.0.3")
    reader, writer = await node.connect()
    bodies = []
    for sandbox, port in (("ia", first), ("ib", second), ("", 0), ("igone", 1), ("ia", first)):
        writer.write(head("GET", "/health", sandbox, port))
        bodies.append((await read_reply(reader)).body)
    assert bodies[:3] == [b"1", b"2", b"control /health"]
    assert b"was not found" in bodies[3]
    assert bodies[4] == b"1"


async def test_idle_connections_are_closed_in_time(node: Node) -> None:
    closed = asyncio.Event()

    async def watching(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answering(OK)(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            closed.set()

    port = await node.upstream(watching)
    await get(node, port)
    generation = Generation(node.sandboxes.routes["ia"])
    connection = await generation.connect(port)
    connection.begin("GET", b"GET / HTTP/1.1\r\n\r\n", has_body=False)
    assert (await connection.head(), await connection.read()) == (200, b"ok")
    generation.give_back(port, connection)
    now = asyncio.get_running_loop().time()
    generation.drop_idle(now - 10)
    assert not generation.unused
    generation.drop_idle(now + 10)
    assert generation.unused
    await asyncio.wait_for(closed.wait(), PATIENCE)
