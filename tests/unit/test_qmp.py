"""The QMP client against a scripted peer on a real Unix socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import DeadlineExceeded, VmmError
from aenv.vmm import qmp
from aenv.vmm.qmp import QmpClient, QmpCommandError

GREETING = {"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": ""}, "capabilities": []}}


class Peer:
    """The server side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        line = await self.reader.readline()
        if not line:
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    async def negotiate(self) -> None:
        self.send(GREETING)
        request = await self.receive()
        assert request["execute"] == "qmp_capabilities"
        self.send({"return": {}, "id": request["id"]})


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def peer(path: Path, script: Script) -> AsyncIterator[Path]:
    """A server that plays `script` for each connection, then keeps it open until the test ends."""
    over = asyncio.Event()
    failures: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(Peer(reader, writer))
            await writer.drain()
            await over.wait()
        except (EOFError, ConnectionError):
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield path
    finally:
        over.set()
        server.close()
        await server.wait_closed()
        assert failures == []


async def test_commands_may_be_answered_out_of_order(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        first, second = await peer.receive(), await peer.receive()
        peer.send({"return": second["execute"], "id": second["id"]})
        peer.send({"return": first["execute"], "id": first["id"]})

    async with peer(tmp_path / "s", script) as path:
        client = await QmpClient.connect(path)
        assert client.version == "10.0.2"
        assert await asyncio.gather(client.execute("one"), client.execute("two")) == ["one", "two"]
        await client.aclose()


async def test_an_error_is_raised_with_its_class(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        request = await peer.receive()
        peer.send({"error": {"class": "CommandNotFound", "desc": "no such"}, "id": request["id"]})

    async with peer(tmp_path / "s", script) as path:
        client = await QmpClient.connect(path)
        with pytest.raises(QmpCommandError, match="no such") as caught:
            await client.execute("nonsense")
        assert caught.value.kind == "CommandNotFound"
        await client.aclose()


async def test_events_between_answers_are_handed_out(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    async def script(peer: Peer) -> None:
        await peer.negotiate()
        peer.send({"event": "STOP", "timestamp": {}})
        request = await peer.receive()
        peer.send({"event": "SHUTDOWN", "data": {"guest": True}})
        peer.send({"return": 1, "id": request["id"]})

    async with peer(tmp_path / "s", script) as path:
        client = await QmpClient.connect(path, on_event=lambda *event: events.append(event))
        assert await client.execute("x") == 1
        assert events == [("STOP", {}), ("SHUTDOWN", {"guest": True})]
        await client.aclose()


async def test_a_command_without_answer_meets_its_deadline_and_the_connection_stays_usable(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        late, request = await peer.receive(), await peer.receive()
        peer.send({"return": "late", "id": late["id"]})
        peer.send({"return": "in time", "id": request["id"]})

    async with peer(tmp_path / "s", script) as path:
        client = await QmpClient.connect(path)
        with pytest.raises(DeadlineExceeded, match="'slow'"):
            await client.execute("slow", deadline=0.01)
        assert await client.execute("next") == "in time"
        await client.aclose()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"x" * (qmp.MAX_LINE + 10) + b"\n", "more than"),
        (b"no json\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"[1]\n", "not an object"),
        (b'{"event":"E"}\n' * (qmp.MAX_LINES_PER_SECOND + 10), "in a second"),
        (b'{"unfinished":', "closed its control"),
    ],
)
async def test_a_hostile_peer_loses_the_connection(tmp_path: Path, data: bytes, complaint: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        await peer.receive()
        peer.writer.write(data)
        await peer.writer.drain()
        if not data.endswith(b"\n"):
            raise EOFError

    async with peer(tmp_path / "s", script) as path:
        client = await QmpClient.connect(path)
        with pytest.raises(VmmError, match=complaint):
            await client.execute("query-status")
        assert complaint in await client.closed
        with pytest.raises(VmmError, match="not sent"):
            await client.execute("query-status")
        await client.aclose()


@pytest.mark.parametrize("odd", [{"id": {}, "return": 1}, {"id": 10**30}, {"return": 1}, {"event": 5}, {"error": 1}])
async def test_odd_messages_are_ignored(tmp_path: Path, odd: dict[str, Any]) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        request = await peer.receive()
        peer.send(odd)
        peer.send({"return": "fine", "id": request["id"]})

    async with peer(tmp_path / "s", script) as path:
        client = await QmpClient.connect(path)
        assert await client.execute("x") == "fine"
        await client.aclose()


async def test_a_peer_that_does_not_greet_meets_the_deadline(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.receive()

    async with peer(tmp_path / "s", script) as path:
        with pytest.raises(DeadlineExceeded, match="did not greet"):
            await QmpClient.connect(path, deadline=0.01)


async def test_a_peer_that_greets_otherwise_is_refused(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        peer.send({"hello": "world"})

    async with peer(tmp_path / "s", script) as path:
        with pytest.raises(VmmError, match="not as QMP"):
            await QmpClient.connect(path)


async def test_no_socket_is_a_vmm_error(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="cannot be reached"):
        await QmpClient.connect(tmp_path / "absent")


async def test_closing_fails_what_is_in_flight_and_is_idempotent(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.negotiate()
        await peer.receive()
        asked.set()

    async with peer(tmp_path / "s", script) as path:
        client = await QmpClient.connect(path)
        command = asyncio.create_task(client.execute("x"))
        await asked.wait()
        await client.aclose()
        await client.aclose()
        with pytest.raises(VmmError, match="closed by us"):
            await command


async def test_a_path_longer_than_a_socket_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / "e"
    deep.mkdir(parents=True)

    async def script(peer: Peer) -> None:
        await peer.negotiate()

    async with peer(tmp_path / "s", script):
        (tmp_path / "s").rename(deep / "s")
        client = await QmpClient.connect(deep / "s")
        await client.aclose()
