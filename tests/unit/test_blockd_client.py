"""The client of aenv-blockd's control socket, against a server that follows (or breaks) the protocol."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import DeadlineExceeded, ImageError, InsufficientStorage, NotFound
from aenv.images.client import MAX_LINE, Attached, BlockdClient, ControlError, Layer, Made

Handler = Callable[["Peer", dict[str, Any]], Awaitable[None]]


class Peer:
    """The daemon's end of one connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


class Daemon:
    """A socket server; `handle` is called for each request, in order, on its connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.handle: Handler = echo
        self._server: asyncio.Server | None = None
        self._peers: list[Peer] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_LINE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        peer = Peer(writer)
        self._peers.append(peer)
        try:
            while line := await reader.readline():
                request = json.loads(line)
                self.requests.append(request)
                await self.handle(peer, request)
        finally:
            writer.close()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for peer in self._peers:
            peer.writer.close()
        await self._server.wait_closed()


async def echo(peer: Peer, request: dict[str, Any]) -> None:
    peer.send(id=request["id"], ok={"op": request["op"]})


async def silent(peer: Peer, request: dict[str, Any]) -> None:
    pass


def answering(**ok: Any) -> Handler:
    async def handle(peer: Peer, request: dict[str, Any]) -> None:
        peer.send(id=request["id"], ok=ok)

    return handle


def refusing(code: str) -> Handler:
    async def handle(peer: Peer, request: dict[str, Any]) -> None:
        peer.send(id=request["id"], error={"code": code, "message": "layer /x: no"})

    return handle


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    made = Daemon(tmp_path / "control.sock")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[BlockdClient]:
    made = BlockdClient(daemon.path)
    yield made
    await made.aclose()


async def test_answers_in_any_order_reach_their_callers(daemon: Daemon, client: BlockdClient) -> None:
    held: list[dict[str, Any]] = []

    async def backwards(peer: Peer, request: dict[str, Any]) -> None:
        held.append(request)
        if len(held) == 3:
            for one in reversed(held):
                peer.send(id=one["id"], ok={"image": one["image"]})

    daemon.handle = backwards
    answers = await asyncio.gather(*(client.call("stat", image=name) for name in ("a", "b", "c")))
    assert [answer["image"] for answer in answers] == ["a", "b", "c"]
    assert daemon.connections == 1


async def test_attach_says_all_it_was_told(daemon: Daemon, client: BlockdClient) -> None:
    daemon.handle = answering(path="/m/i", target="fuse", size=4096, layers=2, extents=7, fallback="no ublk", more=1)
    layers = [Layer(path=Path("/l/a")), Layer(url="https://o/b", headers={"x": "y"}, size=9, digest="sha256:00")]
    got = await client.attach("i", layers, upper=Path("/s/u"), owner=7, size=4096)
    assert got == Attached(path=Path("/m/i"), target="fuse", size=4096, layers=2, extents=7, fallback="no ublk")
    assert daemon.requests[0] == {
        "id": 1,
        "op": "attach",
        "image": "i",
        "layers": [
            {"path": "/l/a"},
            {"url": "https://o/b", "headers": {"x": "y"}, "size": 9, "digest": "sha256:00"},
        ],
        "upper": {"dir": "/s/u", "mode": "log"},
        "size": 4096,
        "target": "auto",
        "owner": {"uid": 7, "gid": 7},
    }


async def test_a_blank_disk_is_attached_without_layers_and_bound_to_them(daemon: Daemon, client: BlockdClient) -> None:
    daemon.handle = answering(path="/m/i", target="fuse", size=4096, layers=0, extents=0)
    await client.attach("i", [], upper=Path("/s/u"), size=4096, blank=True)
    daemon.handle = answering(path="/m/i", target="fuse", size=4096, layers=1, extents=3)
    bound = await client.bind("i", [Layer(path=Path("/l/a"))], size=4096)
    assert bound == Attached(path=Path("/m/i"), target="fuse", size=4096, layers=1, extents=3)
    assert daemon.requests == [
        {"id": 1, "op": "attach", "image": "i", "layers": [], "size": 4096, "target": "auto"}
        | {"upper": {"dir": "/s/u", "mode": "log"}, "blank": True},
        {"id": 2, "op": "bind", "image": "i", "layers": [{"path": "/l/a"}], "size": 4096},
    ]


async def test_version_names_its_targets(daemon: Daemon, client: BlockdClient) -> None:
    targets = {"fuse": {"available": True}, "ublk": {"available": False, "reason": "no /dev/ublk-control"}}
    daemon.handle = answering(version="0.1.0", pid=7, mount="/m", targets=targets)
    info = await client.version()
    assert (info.pid, info.mount) == (7, Path("/m"))
    assert info.targets["fuse"].available
    assert info.targets["ublk"].reason == "no /dev/ublk-control"


async def test_a_run_of_an_image_is_compacted(daemon: Daemon, client: BlockdClient) -> None:
    daemon.handle = answering(bytes=9, extents=1)
    assert await client.compact(Path("/o"), image="i", run=(0, 2)) == Made(bytes=9, extents=1)
    request = daemon.requests[0]
    assert (request["image"], request["from"], request["to"], request["output"]) == ("i", 0, 2, "/o")
    assert "layers" not in request


@pytest.mark.parametrize(
    ("code", "error"),
    [("not_found", NotFound), ("no_space", InsufficientStorage), ("busy", ControlError), ("corrupt", ImageError)],
)
async def test_errors_are_ours(daemon: Daemon, client: BlockdClient, code: str, error: type[Exception]) -> None:
    daemon.handle = refusing(code)
    with pytest.raises(error, match="layer /x: no") as caught:
        await client.detach("i")
    if isinstance(caught.value, ControlError):
        assert caught.value.code == code


async def test_a_missed_deadline_spoils_nothing(daemon: Daemon, client: BlockdClient) -> None:
    daemon.handle = silent
    with pytest.raises(DeadlineExceeded, match=r"`stat` within 0\.05 s"):
        await client.stat("i", deadline=0.05)

    async def late_first(peer: Peer, request: dict[str, Any]) -> None:
        peer.send(id=1, ok={"late": True})
        await echo(peer, request)

    daemon.handle = late_first
    assert await client.call("list") == {"op": "list"}
    assert daemon.connections == 1


async def test_a_lost_connection_fails_the_calls_on_it_and_is_made_anew(daemon: Daemon, client: BlockdClient) -> None:
    async def hang_up(peer: Peer, request: dict[str, Any]) -> None:
        if request["op"] == "second":
            peer.writer.close()

    daemon.handle = hang_up
    lost = await asyncio.gather(client.call("first"), client.call("second"), return_exceptions=True)
    assert [type(error) for error in lost] == [ImageError, ImageError]
    daemon.handle = echo
    assert await client.call("list") == {"op": "list"}
    assert daemon.connections == 2
    assert [request["op"] for request in daemon.requests] == ["first", "second", "list"]


@pytest.mark.parametrize("line", [b"[]\n", b"{\n", b"[" * 10**5 + b"\n", b"x" * (MAX_LINE + 2) + b"\n"])
async def test_what_is_no_answer_ends_the_connection(daemon: Daemon, client: BlockdClient, line: bytes) -> None:
    async def garbage(peer: Peer, request: dict[str, Any]) -> None:
        peer.writer.write(line)

    daemon.handle = garbage
    with pytest.raises(ImageError, match="did not answer"):
        await client.call("list")
    daemon.handle = echo
    await client.call("list")


@pytest.mark.parametrize("answer", [{}, {"path": "/m/i"}])
async def test_an_answer_that_lacks_something_is_refused(
    daemon: Daemon, client: BlockdClient, answer: dict[str, Any]
) -> None:
    daemon.handle = answering(**answer)
    with pytest.raises(ImageError, match="version does not fit"):
        await client.attach("i", [])


async def test_events_reach_the_listener(daemon: Daemon) -> None:
    seen: asyncio.Queue[Any] = asyncio.Queue()

    async def ask(peer: Peer, request: dict[str, Any]) -> None:
        peer.send(event="credentials", url="https://o/b")
        await echo(peer, request)

    daemon.handle = ask
    client = BlockdClient(daemon.path, on_event=seen.put_nowait)
    await client.call("list")
    assert await seen.get() == {"event": "credentials", "url": "https://o/b"}
    await client.aclose()


async def test_too_long_a_request_is_not_sent(daemon: Daemon, client: BlockdClient) -> None:
    with pytest.raises(ImageError, match="accepts 1048576"):
        await client.attach("i", [Layer(path=Path("/" + "x" * 1000)) for _ in range(1200)])
    assert await client.call("list") == {"op": "list"}
    assert len(daemon.requests) == 1


async def test_no_daemon_is_an_image_error(tmp_path: Path) -> None:
    client = BlockdClient(tmp_path / "none.sock")
    with pytest.raises(ImageError, match=r"cannot be reached at .*none\.sock"):
        await client.version()


async def test_long_paths_are_no_problem(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    short = Daemon(tmp_path / "s.sock")
    await short.start()
    (tmp_path / "s.sock").rename(folder / "s.sock")
    client = BlockdClient(folder / "s.sock")
    assert await client.call("list") == {"op": "list"}
    await client.aclose()
    await short.stop()


async def test_closing_fails_what_is_under_way(daemon: Daemon, client: BlockdClient) -> None:
    sent = asyncio.Event()

    async def note(peer: Peer, request: dict[str, Any]) -> None:
        sent.set()

    daemon.handle = note
    calling = asyncio.create_task(client.call("list"))
    await sent.wait()
    await client.aclose()
    with pytest.raises(ImageError, match="connection was closed"):
        await calling
