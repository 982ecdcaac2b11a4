import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request

from aenv.api.body import Bodies
from aenv.api.wire import NewSandboxV2
from aenv.errors import BadRequest, PayloadTooLarge


def request(receive, **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw}, receive)


async def never():
    await asyncio.Event().wait()


async def test_a_declared_length_over_the_limit_is_refused_unread():
    read = Bodies(10).required(NewSandboxV2)
    with pytest.raises(PayloadTooLarge, match="limit of 10 bytes"):
        await read(request(never, content_length="11"))


async def test_a_body_that_does_not_end_is_refused_at_the_limit():
    sent = 0

    async def endless():
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": b"x" * 4, "more_body": True}

    with pytest.raises(PayloadTooLarge):
        await Bodies(10).required(NewSandboxV2)(request(endless))
    assert sent == 3


async def test_a_body_that_does_not_come_ends_at_the_deadline():
    with pytest.raises(BadRequest, match="did not arrive"):
        await Bodies(10, deadline=0.01).required(NewSandboxV2)(request(never))


async def test_a_client_that_leaves():
    async def leave():
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await Bodies(10).required(NewSandboxV2)(request(leave))
