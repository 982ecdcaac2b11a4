"""WebSockets through the proxy."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from proxy_harness import PATIENCE, Node, answering, ask, event_loop_policy, head, once, running_node
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from aenv.proxy.server import _Handshake

__all__ = ["event_loop_policy"]  # a fixture


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running_node() as running:
        running.sandboxes.add("ia")
        yield running


async def upstream(node: Node, handler: Callable[[ServerConnection], Awaitable[None]], **options: Any) -> int:
    server = await serve(handler, "127.0.0.2", 0, max_size=None, **options)
    node.stack.push_async_callback(server.wait_closed)
    node.stack.callback(server.close)
    return int(next(iter(server.sockets)).getsockname()[1])


def dial(node: Node, port: int, path: str = "/", **options: Any) -> connect:
    headers = {"E2b-Sandbox-Id": "ia", "E2b-Sandbox-Port": str(port)} | options.pop("headers", {})
    return connect(
        f"ws://127.0.0.1:{node.port}{path}", additional_headers=headers, max_size=None, proxy=None, **options
    )


async def echo(socket: ServerConnection) -> None:
    async for message in socket:
        await socket.send(message)


async def closing(socket: ClientConnection | ServerConnection) -> ConnectionClosed:
    """How it ends, messages before that left aside."""
    try:
        while True:
            await asyncio.wait_for(socket.recv(), PATIENCE)
    except ConnectionClosed as closed:
        return closed


async def test_messages_of_both_kinds_and_any_size(node: Node) -> None:
    async with dial(node, await upstream(node, echo)) as client:
        for message in ("text é", b"\x00\xff", "", b"", "x" * 300_000, bytes(5 << 20)):
            await client.send(message)
            assert await client.recv() == message
        await client.send(iter(["frag", "men", "ted"]))
        assert await client.recv() == "fragmented"


async def test_handshake_headers_path_and_subprotocol(node: Node) -> None:
    seen: dict[str, Any] = {}

    async def handler(socket: ServerConnection) -> None:
        assert socket.request is not None
        seen.update(path=socket.request.path, headers=socket.request.headers)
        await socket.send(socket.subprotocol or "none")

    async def cookie(socket: ServerConnection, request: Any, response: Any) -> None:
        response.headers["Set-Cookie"] = "a=1"

    port = await upstream(node, handler, subprotocols=[Subprotocol("v2"), Subprotocol("v1")], process_response=cookie)
    offered = [Subprotocol("v1"), Subprotocol("v2")]
    sent = {"Authorization": "Bearer x", "X-API-Key": "e2b_platform ", "Cookie": "key=e2b_platform"}
    with_key = [Subprotocol("e2b_platform"), *offered]
    async with dial(node, port, "/a%2Fb//c?d=%20", subprotocols=with_key, origin="http://o", headers=sent) as client:
        assert client.subprotocol == await client.recv()
        assert client.response is not None
        assert client.response.headers["Set-Cookie"] == "a=1"
    assert seen["path"] == "/a%2Fb//c?d=%20"
    headers = seen["headers"]
    assert (headers["Origin"], headers["Authorization"]) == ("http://o", "Bearer x")
    assert headers["Host"] == f"127.0.0.1:{node.port}"
    assert "e2b_platform" not in str(headers)
    assert headers["X-Forwarded-Proto"] == "http"
    assert not [name for name in headers if "sandbox" in name.lower() or "api-key" in name.lower()]
    url = f"ws://127.0.0.1:{node.port}/proxy/ia/{port}/x"
    async with connect(url, subprotocols=offered[:1], proxy=None) as client:
        assert await client.recv() == "v1"
    assert seen["path"] == "/x"


@pytest.mark.parametrize(("code", "reason"), [(1000, "done"), (1001, ""), (3456, "own"), (4999, "é"), (1011, "broke")])
async def test_close_codes_from_the_sandbox(node: Node, code: int, reason: str) -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.close(code, reason)

    async with dial(node, await upstream(node, handler)) as client:
        closed = (await closing(client)).rcvd
        assert closed is not None
        assert (closed.code, closed.reason) == (code, reason)


@pytest.mark.parametrize(("code", "reason"), [(1000, "done"), (3456, "own"), (1001, "")])
async def test_close_codes_from_the_client(node: Node, code: int, reason: str) -> None:
    result: asyncio.Future[ConnectionClosed] = asyncio.get_running_loop().create_future()

    async def handler(socket: ServerConnection) -> None:
        result.set_result(await closing(socket))

    async with dial(node, await upstream(node, handler)) as client:
        await client.close(code, reason)
    closed = (await asyncio.wait_for(result, PATIENCE)).rcvd
    assert closed is not None
    assert (closed.code, closed.reason) == (code, reason)


async def test_a_client_that_vanishes_is_seen_in_the_sandbox(node: Node) -> None:
    result: asyncio.Future[ConnectionClosed] = asyncio.get_running_loop().create_future()

    async def handler(socket: ServerConnection) -> None:
        await socket.send("hi")
        result.set_result(await closing(socket))

    async with dial(node, await upstream(node, handler)) as client:
        await client.recv()
        client.transport.abort()
    assert (await asyncio.wait_for(result, PATIENCE)).rcvd is None


async def test_pings_are_answered_on_both_sides(node: Node) -> None:
    async def handler(socket: ServerConnection) -> None:
        await (await socket.ping())
        await socket.send("ponged")
        await socket.wait_closed()

    async with dial(node, await upstream(node, handler)) as client:
        assert await client.recv() == "ponged"
        await asyncio.wait_for(await client.ping(), PATIENCE)


async def test_a_killed_sandbox_breaks_the_connection(node: Node) -> None:
    async with dial(node, await upstream(node, echo)) as client:
        await client.send("a")
        await client.recv()
        node.kill("ia")
        assert (await closing(client)).rcvd is None


async def test_a_sandbox_that_breaks_off_breaks_the_client(node: Node) -> None:
    async def handler(socket: ServerConnection) -> None:
        socket.transport.abort()

    async with dial(node, await upstream(node, handler)) as client:
        assert (await closing(client)).rcvd is None


async def refused(node: Node, port: int, **options: Any) -> tuple[int, Any]:
    with pytest.raises(InvalidStatus) as caught:
        async with dial(node, port, **options):
            pass
    response = caught.value.response
    assert response.headers["Content-Type"].startswith("application/json")
    return response.status_code, json.loads(response.body or b"")


async def test_refused_handshakes_say_why(node: Node) -> None:
    closed = await node.upstream(echo, "127.0.0.9")  # type: ignore[arg-type]
    message = "The sandbox is running but port is not open"
    expected = {"sandboxId": "ia", "message": message, "port": closed, "code": 502}
    assert await refused(node, closed) == (502, expected)
    status, body = await refused(node, closed, headers={"E2b-Sandbox-Id": "igone"})
    assert (status, body["message"]) == (502, "The sandbox was not found")
    status, body = await refused(node, closed, path="/?key=e2b_platform")
    assert (status, body["code"]) == (400, 400)
    status, body = await refused(node, 0)
    assert (status, body["code"]) == (400, 400)
    node.sandboxes.add("ia", public=False)
    status, body = await refused(node, closed)
    assert (status, body["code"]) == (403, 403)


async def test_the_sandboxs_own_refusal_is_passed_on(node: Node) -> None:
    response = (
        b'HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: 9\r\nX-Own: 1\r\n\r\n{"no": 1}'
    )
    assert await refused(node, await node.upstream(answering(response))) == (401, {"no": 1})


@pytest.mark.parametrize("garbage", [b"", b"\x00\x01garbage\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\n\r\n"])
async def test_what_is_no_websocket_server_becomes_a_json_502(node: Node, garbage: bytes) -> None:
    status, body = await refused(node, await node.upstream(once(garbage)))
    assert (status, body["code"]) == (502, 502)


async def test_a_violation_of_the_protocol_closes_with_its_code(node: Node) -> None:
    async def handler(socket: ServerConnection) -> None:
        socket.transport.write(b"\x81\x02\xff\xff")  # a text frame that is not UTF-8
        await socket.wait_closed()

    async with dial(node, await upstream(node, handler)) as client:
        closed = (await closing(client)).rcvd
        assert closed is not None
        assert closed.code == 1007


async def test_a_slow_client_holds_the_sandbox_back(node: Node) -> None:
    sent = 0
    stuck = asyncio.Event()

    async def flood(socket: ServerConnection) -> None:
        nonlocal sent
        for _ in range(128):
            try:
                await asyncio.wait_for(asyncio.shield(sending := asyncio.ensure_future(socket.send(bytes(1 << 20)))), 1)
            except TimeoutError:
                stuck.set()
                await sending
            sent += 1

    port = await upstream(node, flood, ping_interval=None)
    async with dial(node, port, max_queue=1, ping_interval=None) as client:
        await asyncio.wait_for(stuck.wait(), PATIENCE)
        assert sent < 64
        for _ in range(128):
            assert len(await asyncio.wait_for(client.recv(), PATIENCE)) == 1 << 20


HANDSHAKE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head("GET", "/v2/sandboxes", "", 0, *HANDSHAKE), 404),
        (head("GET", "/", "ia", 1, *HANDSHAKE[:3], "Sec-WebSocket-Key: !"), 400),
        (head("GET", "/", "ia", 1, *HANDSHAKE[:2]), 400),
        (head("POST", "/", "ia", 1, *HANDSHAKE), 405),
        (head("GET", "/", "ia", 1, *HANDSHAKE, "Content-Length: 1"), 400),
        (head("GET", "/" + "p" * 9000, "ia", 1, *HANDSHAKE), 414),
        (head("GET", "/", "ia", 1, *HANDSHAKE, "X-Large: " + "v" * 9000), 431),
        (head("GET", "/", "ia", 1, *HANDSHAKE, *("X-Many: v" for _ in range(200))), 431),
        (head("GET", "/init", "ia", 49983, *HANDSHAKE), 404),
        (head("GET", "http://h/init", "ia", 49983, *HANDSHAKE), 404),
    ],
)
async def test_what_is_refused_before_a_sandbox_is_asked(
    node: Node, request_head: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reply = await ask(node, request_head)
    assert (reply.status, reply.json["code"]) == (status, status)
    assert reply.json["message"]
    assert [record for record in caplog.records if record.name != "asyncio"] == []


@pytest.mark.parametrize("sender", ["client", "sandbox"])
async def test_tiny_frames_do_not_hold_up_others(node: Node, sender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, calls, most, total = 20_000, 0, 0, 0
    received = _Handshake.events_received if sender == "client" else ClientProtocol.events_received

    def turn() -> None:
        nonlocal calls
        calls = 0

    def counted(self: Any) -> list[Any]:
        nonlocal calls, most, total
        events = received(self)
        if calls == 0:
            asyncio.get_running_loop().call_soon(turn)
        calls += len(events)
        total += len(events)
        most = max(most, calls)
        return events

    async def handler(socket: ServerConnection) -> None:
        if sender == "sandbox":
            socket.transport.write(b"\x82\x01x" * count)
        for _ in range(count if sender == "client" else 1):
            await socket.recv()

    # Subclasses: the test's own two ends parse in the same loop, with the same classes.
    if sender == "sandbox":
        counting: Any = type("Counting", (ClientProtocol,), {"events_received": counted})
        monkeypatch.setattr("aenv.proxy.websocket.ClientProtocol", counting)
    else:
        monkeypatch.setattr("aenv.proxy.server._Handshake.events_received", counted)
    async with dial(node, await upstream(node, handler)) as client:
        if sender == "client":
            client.transport.write(b"\x82\x81\0\0\0\0x" * count)
        else:
            await client.send("go on")
        assert (await closing(client)).rcvd is not None
    assert total >= count
    assert most <= 2000
