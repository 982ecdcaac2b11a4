"""The node's client of a guest's daemon, against guests that send what they like."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aenv.errors import GuestError
from aenv.guest.envd import ENVD_PORT, GuestClient

ADDRESS = "127.88.9.1"


@asynccontextmanager
async def guest(body: bytes, *headers: str) -> AsyncIterator[list[bytes]]:
    """A guest that gives this answer; the heads of the requests it got."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        writer.close()

    async with await asyncio.start_server(serve, ADDRESS, ENVD_PORT):
        yield heads


@pytest.fixture
async def client() -> AsyncIterator[GuestClient]:
    made = GuestClient()
    yield made
    await made.aclose()


async def test_figures_come_back(client: GuestClient) -> None:
    async with guest(b'{"cpu": 1}') as heads:
        assert await client.metrics(ADDRESS, "token") == {"cpu": 1}
    assert b"accept-encoding: identity" in heads[0].lower()


@pytest.mark.parametrize(
    "body", [b"x" * 70_000, b"[" * 60_000, b"[]", b"\xff", b'{"a"'], ids=["long", "deep", "list", "bytes", "half"]
)
async def test_an_answer_of_another_kind_is_the_guests_error(client: GuestClient, body: bytes) -> None:
    async with guest(body):
        with pytest.raises(GuestError):
            await client.metrics(ADDRESS, None)


async def test_nothing_a_guest_sends_is_decompressed(client: GuestClient) -> None:
    async with guest(gzip.compress(json.dumps({"cpu": 1}).encode()), "Content-Encoding: gzip"):
        with pytest.raises(GuestError, match="not JSON"):
            await client.metrics(ADDRESS, None)
