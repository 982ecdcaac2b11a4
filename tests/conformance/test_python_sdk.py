"""Sandboxes through the official Python SDK: their life, lists, and what a wrong use is told."""

import uuid
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from e2b import (
    AuthenticationException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
)

from real_server import KEY, RealServer, needs_node, until

pytestmark = [pytest.mark.vm, needs_node]


def left(sandbox: Sandbox) -> float:
    return (sandbox.get_info().end_at - datetime.now(UTC)).total_seconds()


def test_info(server: RealServer, sandbox: Sandbox) -> None:
    info = sandbox.get_info()
    assert (info.sandbox_id, info.name, info.state) == (sandbox.sandbox_id, "base", SandboxState.RUNNING)
    assert info.metadata == {"purpose": "shared"}
    assert info.started_at < datetime.now(UTC) < info.end_at
    assert (info.cpu_count, info.memory_mb) == (
        int(sandbox.commands.run("nproc").stdout),
        512,
    )
    assert info.envd_version == "0.6.13"
    assert sandbox.is_running()


def test_the_time_to_live(server: RealServer) -> None:
    sandbox = server.create(timeout=120, lifecycle={"on_timeout": "kill"})
    assert 100 < left(sandbox) <= 120
    sandbox.set_timeout(60)
    assert 50 < left(sandbox) <= 60
    Sandbox.connect(sandbox.sandbox_id, timeout=10, **server.sdk)
    assert 50 < left(sandbox) <= 60  # connecting never shortens
    Sandbox.connect(sandbox.sandbox_id, timeout=300, **server.sdk)
    assert 250 < left(sandbox) <= 300
    sandbox.set_timeout(1)
    Sandbox.set_timeout(sandbox.sandbox_id, 30, **server.sdk)
    assert sandbox.is_running()
    sandbox.set_timeout(1)
    until(lambda: not sandbox.is_running(), 10, "the end")
    assert "reason timeout" in server.why_ended(sandbox.sandbox_id)
    with pytest.raises(NotFoundException):
        sandbox.get_info()
    with pytest.raises(NotFoundException):
        sandbox.set_timeout(60)
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **server.sdk)
    with pytest.raises(SandboxException, match=r"not found|end of life"):
        sandbox.commands.run("true")
    with pytest.raises(SandboxException):
        sandbox.files.read("/etc/hostname")


def test_a_sandbox_that_has_never_been(server: RealServer) -> None:
    with pytest.raises(NotFoundException):
        Sandbox.connect("i" + "0" * 20, **server.sdk)
    assert Sandbox.kill("i" + "0" * 20, **server.sdk) is False


def test_an_idempotency_key_makes_one_sandbox(server: RealServer) -> None:
    key = str(uuid.uuid4())
    one, same = (server.create(idempotency_key=key) for _ in range(2))
    assert one.sandbox_id == same.sandbox_id
    with pytest.raises(SandboxException, match="409"):
        server.create(idempotency_key=key, envs={"OTHER": "request"})
    with one:
        assert one.commands.run("echo in a with statement").exit_code == 0
    assert not same.is_running()


def test_lists(server: RealServer, sandbox: Sandbox) -> None:
    """Over one live sandbox and one of its own; pages of one."""
    before = datetime.now(UTC)
    odd = {"k a": "v/1", "&": "ž=%2F"}
    other = server.create(metadata={"purpose": "listed", **odd})

    def ids(**options: object) -> list[str]:
        paginator = Sandbox.list(**{"limit": 1, **options}, **server.sdk)  # type: ignore[arg-type]
        found: list[str] = []
        while paginator.has_next:
            found += [info.sandbox_id for info in paginator.next_items()]
        return found

    assert ids() == [other.sandbox_id, sandbox.sandbox_id]
    assert ids(query=SandboxQuery(metadata=odd)) == [other.sandbox_id]
    assert ids(query=SandboxQuery(metadata={"purpose": "shared"})) == [sandbox.sandbox_id]
    assert ids(query=SandboxQuery(metadata={"purpose": "shared", "k a": "v/1"})) == []
    assert ids(query=SandboxQuery(state=[SandboxState.PAUSED])) == []
    everything = SandboxQuery(state=[SandboxState.RUNNING, SandboxState.PAUSED])
    assert ids(query=everything, limit=100) == [other.sandbox_id, sandbox.sandbox_id]
    raw = httpx.Client(base_url=server.url, headers={"X-API-Key": KEY})
    with raw:
        after = raw.get("/v2/sandboxes", params={"startedAfter": before.isoformat()})
        assert [row["sandboxID"] for row in after.json()] == [other.sandbox_id]
        assert raw.get("/v2/sandboxes", params={"order": "asc"}).json()[0]["sandboxID"] == sandbox.sandbox_id
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        assert raw.get("/v2/sandboxes", params={"startedAfter": later}).json() == []
    assert other.kill()
    assert ids() == [sandbox.sandbox_id]


def test_refusals(server: RealServer) -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create("base", **(server.sdk | {"api_key": "e2b_" + "0" * 40}))
    with pytest.raises((NotFoundException, SandboxException), match="no-such-template"):
        Sandbox.create("no-such-template", **server.sdk)
    with pytest.raises(SandboxException, match="imeout"):
        Sandbox.create("base", timeout=0, **server.sdk)


def test_a_wrong_access_token_opens_nothing(server: RealServer, sandbox: Sandbox) -> None:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    for token in ({}, {"X-Access-Token": "0" * 64}):
        for method, path in (("POST", "/process.Process/List"), ("GET", "/files?path=/etc/hostname"), ("GET", "/envs")):
            answer = httpx.request(method, server.url + path, headers=headers | token)
            assert answer.status_code == 401, (path, token)
            assert answer.json()["code"] == 401
    assert httpx.post(f"{server.url}/init", headers=headers, json={}).status_code == 404


def test_a_template_without_an_mcp_gateway(server: RealServer) -> None:
    before = server.ids()
    with pytest.raises(SandboxException, match="MCP gateway"):
        server.create(mcp={})
    assert server.ids() == before  # the SDK has ended it


def test_what_comes_later_says_so(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="501"):
        sandbox.get_metrics()
    assert sandbox.is_running()


def test_git(sandbox: Sandbox) -> None:
    script = (
        "rm -rf repo && git init -q repo && cd repo && touch f && git add f && git -c user.name=a -c user.email=a@b.c"
    )
    sandbox.commands.run(f"{script} commit -qm first")
    assert sandbox.commands.run("git log --format=%s", cwd="repo").stdout == "first\n"
