"""The Connect client against a sandbox that sends anything."""

import struct
from collections.abc import AsyncIterator

import httpx
import pytest

from aenv.errors import GuestError
from aenv.guest.connect import END_STREAM, ConnectClient, ConnectError

HOSTILE = [b"", b"{", b"[1]", b"null", b"[" * 10**5, b"\xff\xfe"]


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 7000):
        yield content[at : at + 7000]


def client(status: int, content: bytes) -> ConnectClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=pieces(content)))
    return ConnectClient(httpx.AsyncClient(transport=transport), "http://sandbox", {})


def envelope(flags: int, content: bytes) -> bytes:
    return struct.pack(">BI", flags, len(content)) + content


async def messages(content: bytes) -> list[object]:
    return [message async for message in client(200, content).stream("/a.B/C", {})]


@pytest.mark.parametrize("content", HOSTILE)
async def test_an_answer_that_is_no_object_is_a_guest_error(content: bytes) -> None:
    with pytest.raises(GuestError, match="not"):
        await client(200, content).unary("/a.B/C", {})


@pytest.mark.parametrize("content", [*HOSTILE, b'{"code": [], "message": {}}'])
async def test_a_refusal_in_any_form_is_a_connect_error(content: bytes) -> None:
    with pytest.raises(ConnectError):
        await client(500, content).unary("/a.B/C", {})


@pytest.mark.parametrize("content", HOSTILE[1:])
async def test_a_streamed_message_that_is_no_object_is_a_guest_error(content: bytes) -> None:
    with pytest.raises(GuestError, match="not"):
        await messages(envelope(0, content))


@pytest.mark.parametrize("error", [b"7", b"[1]", b'{"code": [], "message": 1}', b'"x"'])
async def test_the_end_of_a_stream_may_hold_any_error(error: bytes) -> None:
    with pytest.raises(ConnectError):
        await messages(envelope(END_STREAM, b'{"error": ' + error + b"}"))


async def test_messages_come_until_the_end_of_the_stream() -> None:
    assert await messages(envelope(0, b'{"a": 1}') + envelope(0, b"") + envelope(END_STREAM, b"{}")) == [{"a": 1}, {}]
    with pytest.raises(GuestError, match="without its end"):
        await messages(envelope(0, b'{"a": 1}'))
