"""envd's plain HTTP surface, the Connect protocol's edges, and hostile input."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from envd_fixture import STREAM_TYPE, Envd, frame, frames, running_envd, start_message

pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture
async def envd() -> AsyncIterator[Envd]:
    async with running_envd() as daemon:
        yield daemon


async def init(envd: Envd, **fields: Any) -> httpx.Response:
    return await envd.http.post("/init", json=fields)


async def test_health_needs_no_token(envd: Envd) -> None:
    assert (await init(envd, accessToken="secret")).status_code == 204
    response = await envd.http.get("/health")
    assert (response.status_code, response.content) == (204, b"")


async def test_init_needs_the_token_there_is(envd: Envd) -> None:
    assert (await init(envd, accessToken="parent")).status_code == 204
    for headers in ({}, {"x-access-token": "own"}):
        refused = await envd.http.post("/init", json={"accessToken": "own"}, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (401, 401)
    answer = await envd.http.post("/init", json={"accessToken": "own"}, headers={"x-access-token": "parent"})
    assert answer.status_code == 204
    assert (await envd.http.get("/envs", headers={"x-access-token": "own"})).status_code == 200


async def test_everything_else_needs_the_token(envd: Envd) -> None:
    await init(envd, accessToken="secret")
    for method, path in [
        ("GET", "/envs"),
        ("GET", "/metrics"),
        ("GET", "/nothing"),
        ("POST", "/process.Process/List"),
        ("POST", "/filesystem.Filesystem/Stat"),
    ]:
        for headers in ({}, {"x-access-token": "wrong!"}):
            response = await envd.http.request(method, path, json={}, headers=headers)
            assert response.status_code == 401, path
            assert response.json() == {
                "code": 401,
                "message": "unauthorized access, please provide a valid access token or method signing if supported",
            }
    assert (await envd.http.get("/envs", headers={"x-access-token": "secret"})).status_code == 200


async def test_init_sets_what_processes_see(envd: Envd) -> None:
    await init(envd, envVars={"A": "1", "B": "1"}, sandboxID="isbx", templateID="base", defaultWorkdir="/", unknown=[1])
    await init(envd, envVars={"B": "2"}, volumeMounts=[], hyperloopIP="", lifecycleID="x")
    assert (await envd.http.get("/envs")).json() == {"A": "1", "B": "2"}
    result = await envd.run('echo "$A $B $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID $PWD"', envs={"B": "3"})
    assert result.stdout == b"1 3 true isbx base /\n"


async def test_init_changes_nothing_when_a_part_is_wrong(envd: Envd) -> None:
    for wrong in ({"timestamp": "soon"}, {"entropy": "***"}, {"hostname": "a b"}, {"envVars": {"A": 1}}):
        response = await init(envd, **({"accessToken": "secret"} | wrong))
        assert (response.status_code, response.json()["code"]) == (400, 400), wrong
    assert (await envd.http.post("/init", content=b"{")).status_code == 400
    assert (await envd.http.post("/init")).status_code == 204
    assert (await envd.http.get("/envs")).json() == {}


async def test_metrics(envd: Envd) -> None:
    first = (await envd.http.get("/metrics")).json()
    assert set(first) == {
        *("ts", "cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib"),
        *("mem_total", "mem_used", "mem_cache", "disk_used", "disk_total"),
    }
    assert 0 <= first["cpu_used_pct"] <= 100
    assert 0 < first["mem_used"] < first["mem_total"]
    assert 0 < first["disk_used"] <= first["disk_total"]
    assert first["mem_total_mib"] == first["mem_total"] >> 20


async def test_unknown_paths_and_methods(envd: Envd) -> None:
    response = await envd.http.get("/no/such/path")
    assert (response.status_code, response.json()) == (404, {"code": 404, "message": "no such path: /no/such/path"})
    wrong = await envd.http.get("/process.Process/List")
    assert (wrong.status_code, wrong.json()["code"]) == (405, 405)
    missing = await envd.unary("Explode", {})
    assert (missing.status_code, missing.json()["code"]) == (501, "unimplemented")


async def test_browsers_may_call(envd: Envd) -> None:
    await init(envd, accessToken="secret")
    preflight = await envd.http.options("/process.Process/Start", headers={"origin": "https://x"})
    assert preflight.status_code == 204
    for response in (preflight, await envd.http.get("/envs")):
        assert response.headers["access-control-allow-origin"] == "*"


async def test_unary_calls_answer_errors_in_json(envd: Envd) -> None:
    url = "/process.Process/List"
    cases: list[tuple[bytes, dict[str, str], int, Any]] = [
        (b"{", {}, 400, "invalid_argument"),
        (b"[]", {}, 400, "invalid_argument"),
        (b"{}", {"content-encoding": "gzip"}, 501, "unimplemented"),
        (b"{}", {"connect-timeout-ms": "x"}, 400, "invalid_argument"),
        (b"{}", {"content-type": "application/proto"}, 415, 415),
        (b"{}", {"content-encoding": "identity"}, 200, None),
        (b"", {}, 200, None),
    ]
    for body, extra, status, code in cases:
        headers = {"content-type": "application/json"} | extra
        response = await envd.http.post(url, content=body, headers=headers)
        assert (response.status_code, response.json().get("code")) == (status, code), (body, extra)
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_argument"),
        (b"\0\0", "invalid_argument"),
        (frame(b"{"), "invalid_argument"),
        (frame(b"[]"), "invalid_argument"),
        (frame(b'{"process":1}'), "invalid_argument"),
        (frame({}), "invalid_argument"),
        (frame(start_message("true"))[:-1], "invalid_argument"),
        (frame(start_message("true"), flags=1), "invalid_argument"),
        (frame(start_message("true"), flags=0x40), "invalid_argument"),
        (frame(start_message("true")) * 2, "invalid_argument"),
        (struct.pack(">BI", 0, 0xFFFFFFFF) + b"{}", "resource_exhausted"),
        (b"\xff" * 1000, "invalid_argument"),
    ],
)
async def test_malformed_streams_end_with_an_error(envd: Envd, body: bytes, code: str) -> None:
    async with envd.stream("Start", None, body=body) as stream:
        result = await stream.finish()
    assert result.error is not None
    assert result.error["code"] == code
    assert (await envd.run("echo alive")).stdout == b"alive\n"


async def test_the_wrong_content_type_is_refused(envd: Envd) -> None:
    response = await envd.http.post("/process.Process/Start", json=start_message("true"))
    assert (response.status_code, response.headers["accept-post"]) == (415, STREAM_TYPE)


async def test_deeply_nested_json_is_an_error(envd: Envd) -> None:
    response = await envd.http.post(
        "/process.Process/List", content=b'{"x":' + b"[" * 200_000, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400


async def test_huge_requests_are_refused_without_being_kept(envd: Envd) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    response = await envd.http.post(
        "/process.Process/List", content=endless(), headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["code"]) == (429, "resource_exhausted")
    many = await asyncio.to_thread(raw, envd.port, b"GET /health HTTP/1.1\r\n" + b"X: " + b"y" * 300_000 + b"\r\n\r\n")
    assert many == b"" or many.startswith(b"HTTP/1.1 4")
    assert (await envd.http.get("/health")).status_code == 204


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize(
    ("path", "content_type", "status"),
    [
        ("/process.Process/SendInput", "application/json", 401),
        ("/process.Process/StreamInput", STREAM_TYPE, 401),
        ("/filesystem.Filesystem/Stat", "text/plain", 401),
        ("/init", "application/json", 401),
        ("/nothing", "text/plain", 401),
    ],
)
async def test_a_client_that_sends_first_and_reads_then_sees_why_it_was_refused(
    envd: Envd, path: str, content_type: str, status: int, size: int
) -> None:
    await init(envd, accessToken="secret")
    body = b"x" * (size << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"

    def call() -> bytes:
        with socket.create_connection(("127.0.0.1", envd.port), timeout=20) as connection:
            connection.sendall(head.encode() + body)
            answer = connection.recv(1 << 16)
            # And can go on with the connection.
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            return answer + connection.recv(1 << 16)

    answer = await asyncio.to_thread(call)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"HTTP/1.1 204 " in answer


async def test_a_stream_that_fails_early_ends_with_its_error(envd: Envd) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield struct.pack(">BI", 0, 40 << 20)
        for _ in range(40):
            yield b"x" * (1 << 20)

    for method in ("Start", "StreamInput"):
        answer = await envd.http.post(
            f"/process.Process/{method}", content=body(), headers={"content-type": STREAM_TYPE}
        )
        ((flags, end),) = frames(answer.content)
        assert (flags, end["error"]["code"]) == (2, "resource_exhausted")


async def test_many_large_messages_share_a_bounded_memory(envd: Envd) -> None:
    message = b'{"x":"' + b"y" * (24 << 20) + b'"}'

    async def unary() -> int:
        headers = {"content-type": "application/json"}
        return (await envd.http.post("/process.Process/List", content=message, headers=headers)).status_code

    async def stream() -> int:
        async with envd.stream("Connect", None, body=frame(message)) as opened:
            result = await opened.finish()
        assert result.error is not None
        return 200 if result.error["code"] == "invalid_argument" else 429

    peak = 0
    calls = [asyncio.create_task(call()) for call in (unary, stream) * 6]
    while not all(call.done() for call in calls):
        await asyncio.wait(calls, timeout=0.02)
        peak = max(peak, envd.resident_bytes())
    assert [call.result() for call in calls] == [200] * 12
    assert peak < 160 << 20
    assert envd.resident_bytes() < 6 << 20


async def test_a_message_of_many_small_strings_is_refused(envd: Envd) -> None:
    arguments = b",".join([b'"a"'] * 4_000_000)
    async with envd.stream(
        "Start", None, body=frame(b'{"process":{"cmd":"true","args":[' + arguments + b"]}}")
    ) as opened:
        result = await opened.finish()
    assert result.error is not None
    assert result.error["code"] == "resource_exhausted"
    assert "4000004 strings" in result.error["message"]
    some = await envd.run(["printf", "%s", *["a"] * 100_000])
    assert (len(some.stdout), some.exit_code) == (100_000, 0)


def raw(port: int, data: bytes) -> bytes:
    """Sends bytes and reads until the daemon closes or has answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1 << 16)
        except OSError:
            return b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"POST /init HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /init HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /init HTTP/1.1\r\nContent-Length: 10\r\n\r\n{",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET http://x/%zz%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_garbage_concerns_only_its_connection(envd: Envd, garbage: bytes) -> None:
    await asyncio.to_thread(raw, envd.port, garbage)
    assert (await envd.http.get("/health")).status_code == 204


async def test_stream_input(envd: Envd) -> None:
    async with envd.stream("Start", start_message("cat", stdin=True)) as stream:
        await stream.step()
        process = {"pid": stream.result.pid}

        async def call(*messages: Any) -> list[tuple[int, Any]]:
            async def body() -> AsyncIterator[bytes]:
                for message in messages:
                    yield frame(message)

            response = await envd.http.post(
                "/process.Process/StreamInput", content=body(), headers={"content-type": STREAM_TYPE}
            )
            assert response.status_code == 200
            assert response.headers["content-type"] == STREAM_TYPE
            return frames(response.content)

        data = [{"data": {"input": {"stdin": text}}} for text in ("b25l", "dHdv")]
        start = {"start": {"process": process}}
        assert await call(start, data[0], {"keepalive": {}}, data[1]) == [(0, {}), (2, {})]
        ((flags, end),) = await call(data[0])
        assert (flags, end["error"]["code"]) == (2, "invalid_argument")
        ((flags, end),) = await call({"start": {"process": {"pid": 4_000_000}}})
        assert (flags, end["error"]["code"]) == (2, "not_found")
        await envd.unary("CloseStdin", {"process": process})
        assert (await stream.finish()).stdout == b"onetwo"


async def test_connections_are_kept_and_reused(envd: Envd) -> None:
    def twice() -> list[bytes]:
        with socket.create_connection(("127.0.0.1", envd.port), timeout=20) as connection:
            answers = []
            for _ in range(2):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answers.append(connection.recv(4096))
            return answers

    for answer in await asyncio.to_thread(twice):
        assert answer.startswith(b"HTTP/1.1 204")
        assert b"connection: close" not in answer.lower()


async def test_a_new_generation_cuts_older_connections_but_no_process(envd: Envd) -> None:
    await init(envd, generation="one")
    async with envd.stream("Start", start_message("read x; echo $x", stdin=True)) as stream:
        await stream.step()
        await init(envd, generation="one")
        assert stream.result.pid in await envd.pids()
        await init(envd, generation="two")
        with pytest.raises(httpx.TransportError):
            await stream.step()
    process = {"pid": stream.result.pid}
    async with envd.stream("Connect", {"process": process}) as again:
        await again.step()
        await envd.unary("SendInput", {"process": process, "input": {"stdin": "aGkK"}})
        result = await again.finish()
    assert (result.stdout, result.exit_code) == (b"hi\n", 0)


async def greet(envd: Envd, body: bytes, *headers: str) -> bytes:
    """The whole answer to `POST /init` as the node sends it: at once, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", envd.port)
    lines = ["POST /init HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", *headers, "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_the_nodes_greeting_is_an_init_like_any_other(envd: Envd) -> None:
    assert (await greet(envd, b'{"accessToken": "t", "envVars": {"A": "1"}, "generation": "one"}'))[:13] == (
        b"HTTP/1.1 204 "
    )
    for refused in (await greet(envd, b"{}"), await greet(envd, b"{}", "X-Access-Token: other")):
        assert refused.startswith(b"HTTP/1.1 401 ")
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["code"] == 401
    assert (await greet(envd, b"{", "X-Access-Token: t")).startswith(b"HTTP/1.1 400 ")
    answer = await envd.http.get("/envs", headers={"x-access-token": "t"})
    assert answer.json() == {"A": "1"}
    async with envd.stream("Start", start_message("echo up; exec sleep 60"), {"x-access-token": "t"}) as stream:
        await stream.until(b"up")
        greeting = b'{"generation": "two", "accessToken": "u"}'
        assert (await greet(envd, greeting, "X-Access-Token: t")).startswith(b"HTTP/1.1 204 ")
        with pytest.raises(httpx.TransportError):
            await stream.finish()
    assert (await envd.http.get("/envs", headers={"x-access-token": "u"})).status_code == 200


async def test_a_greeting_in_pieces_is_answered_too(envd: Envd) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", envd.port)
    pieces = (b"POST /in", b"it HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{", b"}")
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        # Another exchange has to come between, so that the daemon has seen the piece alone.
        await envd.wait_healthy()
    assert (await reader.read()).startswith(b"HTTP/1.1 204 ")
    writer.close()


async def test_sync_is_the_hosts_and_wants_the_token(envd: Envd) -> None:
    assert (await envd.http.post("/sync")).status_code == 204
    assert (await envd.http.post("/sync", json={"flush": True})).status_code == 204
    for wrong in (b"{", b"[1]", b'{"flush": "yes"}', b" " * 5000):
        assert (await envd.http.post("/sync", content=wrong)).status_code in (400, 413), wrong
    assert (await envd.http.get("/sync")).status_code == 405
    await init(envd, accessToken="t")
    assert (await envd.http.post("/sync")).status_code == 401
    assert (await envd.http.post("/sync", headers={"x-access-token": "t"})).status_code == 204
