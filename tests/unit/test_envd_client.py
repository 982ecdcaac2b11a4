"""The node's client of a guest's daemon, against guests that send what they like."""

import asyncio
import base64
import gzip
import itertools
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from aenv.errors import DeadlineExceeded, GuestError
from aenv.guest.envd import CLOCK_EXCHANGE, CLOCK_TRIES, ENVD_PORT, GuestClient, GuestInit, healthy

ADDRESS = "127.88.9.1"
DONE = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
INIT = GuestInit(
    sandbox_id="i1",
    template_id="t1",
    generation="g1",
    hostname="i1",
    access_token="new",
    env_vars={"A": "1"},
    default_user="user",
    default_workdir="/home/user",
)


@dataclass
class Guest:
    """What it was asked: head and body of each request."""

    heads: list[bytes] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@asynccontextmanager
async def guest(*answers: Sequence[bytes | float] | None) -> AsyncIterator[Guest]:
    """A guest that gives the answers in turn, piece by piece, the last one again and again. None stays silent; a number
    is seconds until the next piece."""
    asked = Guest()
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
        body = await reader.readexactly(length)
        answer = answers[min(len(asked.heads), len(answers) - 1)]
        asked.heads.append(head)
        asked.bodies.append(json.loads(body) if body else None)
        if answer is None:
            await over.wait()
        for piece in answer or ():
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, ADDRESS, ENVD_PORT):
        try:
            yield asked
        finally:
            over.set()


def answer(body: bytes, *headers: str) -> list[bytes]:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return ["\r\n".join(lines).encode() + body]


@pytest.fixture
async def client() -> AsyncIterator[GuestClient]:
    made = GuestClient()
    yield made
    await made.aclose()


async def test_figures_come_back(client: GuestClient) -> None:
    async with guest(answer(b'{"cpu": 1}')) as asked:
        assert await client.metrics(ADDRESS, "token") == {"cpu": 1}
    assert b"\r\nX-Access-Token: token\r\n" in asked.heads[0]


async def test_an_answer_may_come_byte_by_byte(client: GuestClient) -> None:
    (whole,) = answer(b'{"cpu": 1}')
    async with guest([bytes([byte]) for byte in whole]):
        assert await client.metrics(ADDRESS, None) == {"cpu": 1}


@pytest.mark.parametrize(
    "body", [b"x" * 70_000, b"[" * 60_000, b"[]", b"\xff", b'{"a"'], ids=["long", "deep", "list", "bytes", "half"]
)
async def test_an_answer_of_another_kind_is_the_guests_error(client: GuestClient, body: bytes) -> None:
    async with guest(answer(body)):
        with pytest.raises(GuestError):
            await client.metrics(ADDRESS, None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 2\r\n\r\n{}",
        b"HTTP/1.1 \xb2\xb2\xb2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
    ids=["nothing", "half a head", "half a body", "another protocol", "short status", "odd digits", "long head"],
)
async def test_an_answer_that_is_no_answer_is_the_guests_error(client: GuestClient, raw: bytes) -> None:
    async with guest([raw]):
        with pytest.raises(GuestError):
            await client.metrics(ADDRESS, None)
        assert not await healthy(ADDRESS)


async def test_nothing_a_guest_sends_is_decompressed(client: GuestClient) -> None:
    async with guest(answer(gzip.compress(json.dumps({"cpu": 1}).encode()), "Content-Encoding: gzip")):
        with pytest.raises(GuestError, match="not JSON"):
            await client.metrics(ADDRESS, None)


async def test_health_is_any_success() -> None:
    async with guest([DONE], answer(b""), [b"HTTP/1.1 503 No\r\n\r\n"]):
        assert await healthy(ADDRESS)
        assert await healthy(ADDRESS)
        assert not await healthy(ADDRESS)
    assert not await healthy(ADDRESS)


async def test_a_greeting_is_repeated_until_it_is_answered_each_time_with_fresh_entropy(client: GuestClient) -> None:
    async with guest([], [b"HTTP/1.1 "], [DONE]) as asked:
        await client.greet(ADDRESS, INIT, "old", deadline=10)
    bodies = greetings(asked)
    assert len(bodies) == 3
    assert all(b"\r\nX-Access-Token: old\r\n" in head for head in asked.heads[:3])
    assert {body["generation"] for body in bodies} == {"g1"}
    assert {len(base64.b64decode(body["entropy"])) for body in bodies} == {64}
    assert len({body["entropy"] for body in bodies}) == 3


def greetings(asked: Guest) -> list[Any]:
    """Without those that say the time alone, which a busy machine may need."""
    return [body for body in asked.bodies if "generation" in body]


async def test_a_guest_that_answers_late_is_told_the_time_again(client: GuestClient) -> None:
    """Its clock was set somewhere between the question and the answer."""
    late = 2 * CLOCK_EXCHANGE
    async with guest([late, DONE]) as asked:
        await client.greet(ADDRESS, INIT, "old", deadline=10)
    assert len(greetings(asked)) == 1
    assert [list(body) for body in asked.bodies[1:]] == [["timestamp", "toGeneration"]] * CLOCK_TRIES
    assert all(b"\r\nX-Access-Token: new\r\n" in head for head in asked.heads[1:])
    said = [datetime.fromisoformat(body["timestamp"]) for body in asked.bodies]
    assert all((after - before).total_seconds() >= late for before, after in itertools.pairwise(said))


async def test_a_greeting_waits_for_a_guest_that_does_not_listen_yet(client: GuestClient) -> None:
    greeting = asyncio.create_task(client.greet(ADDRESS, INIT, None, deadline=10))
    await asyncio.sleep(0)
    async with guest([DONE]) as asked:
        await greeting
    assert len(greetings(asked)) == 1


async def test_a_guest_that_takes_no_connection_costs_a_bounded_number_of_them(client: GuestClient) -> None:
    with socket.create_server((ADDRESS, ENVD_PORT), backlog=0) as silent:
        silent.setblocking(False)
        with pytest.raises(DeadlineExceeded, match=ADDRESS):
            await client.greet(ADDRESS, INIT, None, deadline=0.3)
        taken = 0
        while True:
            try:
                silent.accept()[0].close()
            except BlockingIOError:
                break
            taken += 1
    assert taken <= 2


async def test_a_greeting_that_is_refused_is_not_repeated(client: GuestClient) -> None:
    async with guest([b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 5\r\n\r\nwrong"]) as asked:
        with pytest.raises(GuestError, match="401 to POST /init: wrong"):
            await client.greet(ADDRESS, INIT, "old", deadline=10)
    assert len(asked.heads) == 1


async def test_a_greeting_has_an_end(client: GuestClient) -> None:
    async with guest(None):
        with pytest.raises(DeadlineExceeded, match=rf"{ADDRESS}:{ENVD_PORT} did not answer within 0\.1 s"):
            await client.greet(ADDRESS, INIT, None, deadline=0.1)


async def test_the_guest_is_asked_to_write_out(client: GuestClient) -> None:
    async with guest([DONE]) as asked:
        await client.sync(ADDRESS, "t", 10)
    assert {head.split(b"\r\n")[0] for head in asked.heads} == {b"POST /sync HTTP/1.1"}
    assert asked.bodies == [{"flush": True}]


async def test_a_guest_that_does_not_sync_is_not_waited_for(client: GuestClient) -> None:
    async with guest(None):
        with pytest.raises(GuestError, match=r"POST /sync within 0\.1 s"):
            await client.sync(ADDRESS, None, 0.1)
    with pytest.raises(GuestError, match=r"POST /sync within 0\.1 s"):
        await client.sync(ADDRESS, None, 0.1)


async def test_a_guest_is_told_the_time_alone(client: GuestClient) -> None:
    async with guest([DONE]) as asked:
        await client.tell_time(ADDRESS, "g", "t", 10)
    assert {tuple(body) for body in asked.bodies} == {("timestamp", "toGeneration")}
    assert {body["toGeneration"] for body in asked.bodies} == {"g"}
    assert b"\r\nX-Access-Token: t\r\n" in asked.heads[0]
    async with guest(None):
        with pytest.raises(DeadlineExceeded):
            await client.tell_time(ADDRESS, "g", None, 0.1)
