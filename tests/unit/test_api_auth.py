"""The key in front of the control plane."""

import pytest
from starlette.types import Message, Receive, Scope, Send

from aenv.api.auth import RequireKey


async def status(*values: bytes) -> int:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    scope = {"type": "http", "method": "GET", "raw_path": b"/x", "headers": [(b"x-api-key", value) for value in values]}
    await RequireKey(inner, api_key="e2b_k")(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize("value", [b"e2b_k", b"e2b_k ", b"e2b_k\t", b" \te2b_k \t"])
async def test_white_space_around_the_key_is_no_part_of_it(value: bytes) -> None:
    assert await status(value) == 200


@pytest.mark.parametrize("values", [(), (b"",), (b"e2b_",), (b"e2b_k, x",), (b"e2b_k\n",), (b"e2b_k", b"other")])
async def test_anything_else_is_refused(values: tuple[bytes, ...]) -> None:
    assert await status(*values) == 401
