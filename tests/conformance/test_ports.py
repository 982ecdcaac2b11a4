"""Services inside a sandbox, reached as `get_host` says: `{port}-{sandboxID}.{domain}`."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from real_server import RealServer, needs_node, until

pytestmark = [pytest.mark.vm, needs_node]

DOMAIN = "sbx.test"
PORT = 8080


@pytest.fixture(scope="module")
def service(server: RealServer, sandbox: Sandbox) -> Iterator[Sandbox]:
    """A sandbox in which tests/conformance/guest_server.py runs."""
    sandbox.files.write("guest_server.py", Path(__file__).with_name("guest_server.py").read_text())
    handle = sandbox.commands.run("exec python3 guest_server.py", background=True, timeout=0)
    until(lambda: httpx.get(server.url, headers={"Host": host(sandbox)}).status_code == 200, what="the guest's server")
    yield sandbox
    handle.kill()


def host(sandbox: Sandbox, port: int = PORT) -> str:
    told = Sandbox.get_host(sandbox, port)
    assert told.startswith(f"{port}-{sandbox.sandbox_id}.")
    return f"{port}-{sandbox.sandbox_id}.{DOMAIN}"


@pytest.fixture
def http(server: RealServer, service: Sandbox) -> Iterator[httpx.Client]:
    """A client of the service that knows only its host name, as a browser would."""
    with httpx.Client(base_url=server.url, headers={"Host": host(service)}, timeout=30) as client:
        yield client


def test_a_request_arrives_as_it_was_sent(http: httpx.Client, service: Sandbox) -> None:
    told = http.get("/a%2Fb/c?x=1&y=%20", headers={"X-Mine": "yes"}).json()
    assert told["path"] == "/a%2Fb/c?x=1&y=%20"
    assert told["headers"]["host"] == host(service)
    assert told["headers"]["x-mine"] == "yes"


def test_by_headers_and_by_path(server: RealServer, service: Sandbox) -> None:
    by_headers = {"E2b-Sandbox-Id": service.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    told = httpx.get(f"{server.url}/x", headers=by_headers).json()
    assert told["path"] == "/x"
    assert not [name for name in told["headers"] if name.startswith("e2b-sandbox")]
    assert httpx.get(f"{server.url}/proxy/{service.sandbox_id}/{PORT}/y?z=1").json()["path"] == "/y?z=1"


@pytest.mark.parametrize("path", ["/lines", "/events"])
def test_each_piece_arrives_when_it_is_sent(http: httpx.Client, path: str) -> None:
    """The service sends the next piece only when it is told that this one has arrived."""
    expected = [f"line {i}\n" if path == "/lines" else f"data: {i}\n\n" for i in range(3)]
    with http.stream("GET", path) as answer:
        got = []
        for piece in answer.iter_text():
            got.append(piece)
            assert http.get("/next").status_code == 200
    assert got == expected


def test_a_streamed_upload(http: httpx.Client) -> None:
    pieces = (bytes(100_000) for _ in range(100))
    assert http.post("/upload", content=pieces).json()["size"] == 10_000_000


def test_a_closed_port(server: RealServer, sandbox: Sandbox) -> None:
    answer = httpx.get(server.url, headers={"Host": host(sandbox, 8081)})
    assert answer.status_code == 502
    assert answer.json() == {
        "sandboxId": sandbox.sandbox_id,
        "message": "The sandbox is running but port is not open",
        "port": 8081,
        "code": 502,
    }


def test_a_sandbox_that_is_not_there(server: RealServer) -> None:
    answer = httpx.get(server.url, headers={"Host": f"{PORT}-i0000000000000000000.{DOMAIN}"})
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
    assert httpx.get(server.url, headers={"Host": f"70000-i0000000000000000000.{DOMAIN}"}).status_code == 400


def websocket(server: RealServer, sandbox: Sandbox, port: int = PORT) -> connect:
    """To the service by its host name, over this machine's loopback."""
    api = int(server.url.rsplit(":", 1)[1])
    return connect(
        f"ws://{host(sandbox, port)}/ws?a=b",
        host="127.0.0.1",
        port=api,
        subprotocols=["echo.test"],  # type: ignore[list-item]
        max_size=None,
        proxy=None,
    )


async def test_websocket_echo(server: RealServer, service: Sandbox) -> None:
    async with websocket(server, service) as socket:
        assert socket.subprotocol == "echo.test"
        for message in ("text žluť", b"binary \x00\xff", "", "m" * 70_000, b"l" * 1_000_000):
            await socket.send(message)
            assert await socket.recv() == message
        await socket.send(["frag", "ment", "ed"])
        assert await socket.recv() == "fragmented"
        await (await socket.ping(b"payload"))
        await socket.close(4321, "bye")
    assert (socket.close_code, socket.close_reason) == (4321, "bye")


async def test_websocket_to_a_closed_port(server: RealServer, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await websocket(server, sandbox, 8082).__aenter__()
    assert refused.value.response.status_code == 502
    assert json.loads(refused.value.response.body)["port"] == 8082


def test_traffic_that_is_not_public(server: RealServer) -> None:
    private = server.create(network={"allow_public_traffic": False})
    private.commands.run("exec python3 -m http.server 8080 --directory /etc", background=True, timeout=0)
    token = {"E2b-Traffic-Access-Token": private.traffic_access_token or ""}
    url = {"Host": host(private)}
    until(lambda: httpx.get(f"{server.url}/hostname", headers=url | token).status_code == 200)
    refused = httpx.get(f"{server.url}/hostname", headers=url)
    assert (refused.status_code, refused.json()["code"]) == (403, 403)
    assert httpx.get(f"{server.url}/hostname", headers=url | {"E2b-Traffic-Access-Token": "x"}).status_code == 403
    assert private.commands.run("echo exempt").exit_code == 0
    private.kill()
