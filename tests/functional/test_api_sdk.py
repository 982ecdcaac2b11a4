"""The official Python SDK, and raw HTTP, against the API served on loopback."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import api_fakes
import pytest
import uvicorn
from e2b import AsyncSandbox, NotFoundException, SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, RateLimitException, ServiceBusyException

from aenv.errors import TooManyRequests


@pytest.fixture
async def served() -> AsyncIterator[tuple[api_fakes.Api, int]]:
    api = api_fakes.make()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api.app, log_level="warning", lifespan="off"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        try:
            yield api, listener.getsockname()[1]
        finally:
            server.should_exit = True


@pytest.fixture
def sdk(served: tuple[api_fakes.Api, int]) -> dict[str, object]:
    return {"api_url": f"http://127.0.0.1:{served[1]}", "api_key": api_fakes.KEY, "retries": 0}


async def test_a_sandbox_from_create_to_kill(served, sdk):
    api, _ = served
    sandbox = await AsyncSandbox.create(
        "base",
        timeout=120,
        metadata={"k a": "v/1"},
        envs={"A": "b"},
        allow_internet_access=False,
        network={"allow_out": ["1.1.1.1"], "deny_out": ["0.0.0.0/0"], "allow_public_traffic": False},
        **sdk,
    )
    [spec] = api.sandboxes.specs
    assert (spec.timeout, spec.metadata, spec.env_vars) == (120, {"k a": "v/1"}, {"A": "b"})
    assert (spec.egress.internet, spec.egress.allow_out, spec.egress.deny_out) == (False, ("1.1.1.1",), ("0.0.0.0/0",))
    assert sandbox.traffic_access_token == f"traffic-{sandbox.sandbox_id}"

    info = await sandbox.get_info()
    assert (info.sandbox_id, info.template_id, info.name) == (sandbox.sandbox_id, "tplbase", "base")
    assert (info.state, info.cpu_count, info.memory_mb) == (SandboxState.RUNNING, 2, 512)
    assert info.metadata == {"k a": "v/1"}

    await sandbox.set_timeout(10)
    assert (await sandbox.get_info()).end_at < datetime.now(UTC) + timedelta(seconds=15)
    again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=500, **sdk)
    assert again.sandbox_id == sandbox.sandbox_id
    end_at = (await again.get_info()).end_at
    assert end_at > datetime.now(UTC) + timedelta(seconds=400)
    await again.connect(timeout=5)
    assert (await again.get_info()).end_at == end_at

    assert await sandbox.kill() is True
    assert await AsyncSandbox.kill(sandbox.sandbox_id, **sdk) is False
    with pytest.raises(NotFoundException):
        await AsyncSandbox.connect(sandbox.sandbox_id, **sdk)


async def test_pages_and_filters(served, sdk):
    api, _ = served
    created = [await api.create(metadata={"k a": "v/1+ü", "n": str(number)}) for number in range(5)]
    await api.create(metadata={"other": "x"})
    query = SandboxQuery(metadata={"k a": "v/1+ü"}, state=[SandboxState.RUNNING, SandboxState.PAUSED])
    pages = AsyncSandbox.list(query=query, limit=2, order="asc", **sdk)
    seen = []
    sizes = []
    while pages.has_next:
        items = await pages.next_items()
        sizes.append(len(items))
        seen += [item.sandbox_id for item in items]
    assert (seen, sizes) == (created, [2, 2, 1])


async def test_started_after_is_inclusive(served, sdk):
    api, _ = served
    await api.create()
    identifier = await api.create()
    started = (await AsyncSandbox.get_info(identifier, **sdk)).started_at
    items = await AsyncSandbox.list(query=SandboxQuery(started_after=started, template="base"), **sdk).next_items()
    assert [item.sandbox_id for item in items] == [identifier]


async def test_idempotency_key(served, sdk):
    api, _ = served
    first = await AsyncSandbox.create("base", idempotency_key="abc-1", **sdk)
    second = await AsyncSandbox.create("base", idempotency_key="abc-1", **sdk)
    assert first.sandbox_id == second.sandbox_id
    assert len(api.sandboxes.running) == 1


async def test_failures_as_the_sdk_sees_them(sdk):
    with pytest.raises(AuthenticationException):
        await AsyncSandbox.create("base", **{**sdk, "api_key": "e2b_00"})
    with pytest.raises(SandboxException, match="404: template 'nope' not found"):
        await AsyncSandbox.create("nope", **sdk)
    with pytest.raises(SandboxException, match="Timeout must be greater than 0"):
        await AsyncSandbox.create("base", timeout=-1, **sdk)
    sandbox = await AsyncSandbox.create("base", **sdk)
    with pytest.raises(SandboxException, match="501"):
        await sandbox.get_metrics()
    with pytest.raises(SandboxException, match="400: count must be 1 to 16"):
        await sandbox.fork(count=20)
    with pytest.raises(SandboxException, match="400: 'a b' is no name"):
        await sandbox.create_snapshot(name="a b")
    unknown = "i99999999999999999999"
    for call in (AsyncSandbox.pause, AsyncSandbox.connect, AsyncSandbox.fork, AsyncSandbox.create_snapshot):
        with pytest.raises(NotFoundException):
            await call(unknown, **sdk)


async def test_a_lifecycle(served, sdk):
    api, _ = served
    lifecycle = {"on_timeout": {"action": "pause", "mode": "filesystem"}}
    sandbox = await AsyncSandbox.create("base", lifecycle=lifecycle, **sdk)
    assert api.sandboxes.specs[0].keep_memory is False
    assert (await sandbox.get_info()).lifecycle == {"on_timeout": "pause", "auto_resume": False}
    waking = await AsyncSandbox.create("base", lifecycle={"on_timeout": "pause", "auto_resume": True}, **sdk)
    assert (await waking.get_info()).lifecycle == {"on_timeout": "pause", "auto_resume": True}
    ended = await AsyncSandbox.create("base", lifecycle={"on_timeout": "kill"}, **sdk)
    assert (await ended.get_info()).lifecycle == {"on_timeout": "kill", "auto_resume": False}


async def test_pause_and_connect(served, sdk):
    api, _ = served
    sandbox = await AsyncSandbox.create("base", timeout=500, **sdk)
    assert await sandbox.pause() is True
    assert await AsyncSandbox.pause(sandbox.sandbox_id, **sdk) is False
    assert (await sandbox.get_info()).state == SandboxState.PAUSED
    again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=50, **sdk)
    assert again.sandbox_id == sandbox.sandbox_id
    assert (await again.get_info()).state == SandboxState.RUNNING
    assert await sandbox.pause(mode="filesystem") is True
    await sandbox.connect(on_resume="reboot")
    assert api.sandboxes.resumes == [(50, True), (300, False)]
    api.sandboxes.address = "127.0.0.3"  # nothing listens there
    with pytest.raises(ServiceBusyException):
        await sandbox.pause(strict=True)


async def test_fork(served, sdk):
    api, _ = served
    sandbox = await AsyncSandbox.create("base", **sdk)
    api.sandboxes.children_fail = TooManyRequests("this node is full")
    one, failure, two = await sandbox.fork(count=3, timeout=60)
    assert isinstance(failure, RateLimitException)
    assert len({sandbox.sandbox_id, one.sandbox_id, two.sandbox_id}) == 3
    assert (await two.get_info()).end_at < datetime.now(UTC) + timedelta(seconds=65)
    [child] = await AsyncSandbox.fork(sandbox.sandbox_id, **sdk)
    assert await child.kill() is True


async def test_snapshots(served, sdk):
    sandbox = await AsyncSandbox.create("base", **sdk)
    unnamed = await sandbox.create_snapshot()
    named = await AsyncSandbox.create_snapshot(sandbox.sandbox_id, name="team/snap:v1", **sdk)
    assert (named.snapshot_id, named.names) == ("team/snap:v1", ["team/snap:v1"])

    async def listed(**query) -> list[str]:
        pages, found = AsyncSandbox.list_snapshots(**query, limit=1, **sdk), []
        while pages.has_next:
            found += [item.snapshot_id for item in await pages.next_items()]
        return found

    assert await listed() == [named.snapshot_id, unnamed.snapshot_id]
    assert await listed(sandbox_id=sandbox.sandbox_id, name="team/snap:v1") == [named.snapshot_id]
    made = await AsyncSandbox.create(named.snapshot_id, **sdk)
    assert await made.kill()
    for snapshot in (named, unnamed):
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **sdk) is True
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **sdk) is False
    assert await listed() == []


async def test_a_10_mb_body_is_answered_and_the_connection_lives_on(served):
    _, port = served
    body = json.dumps({"templateID": "base", "metadata": {"k": "v" * 10_000_000}}).encode()
    head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {api_fakes.KEY}\r\n"
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for sent in (
        f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body,
        f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk + b"0\r\n\r\n",
    ):
        async with asyncio.timeout(30):
            writer.write(sent)
            answer, _ = await asyncio.gather(reader.readuntil(b"}"), writer.drain())
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'{"code":413,"message":"The body is larger than the limit of 1048576 bytes"}' in answer
    writer.close()


async def test_a_chunked_body_as_javascript_sends_it(served):
    api, port = served
    body = b'{"templateID":"base","metadata":{"k":"v"}}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {api_fakes.KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode() + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 201")
    assert api.sandboxes.specs[0].metadata == {"k": "v"}
    writer.close()
