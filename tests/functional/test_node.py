"""The lifecycle of sandboxes through the real API, orchestrator and proxy, on the fake VMM."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import KEY, NOTHING, Node, needs_root, rows, running_node, until

from aenv.config import OrchestratorSettings
from aenv.orchestrator import runner

pytestmark = needs_root


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(tmp_path) as made:
        yield made


async def test_create_answers_when_token_and_environment_are_applied(node: Node) -> None:
    created = await node.create(envVars={"BOTH": "create", "MINE": "2"}, metadata={"k": "v"})
    init = node.host.of(created["sandboxID"]).guest.inits[0]
    assert init["accessToken"] == created["envdAccessToken"]
    assert init["envVars"] == {"FROM_TEMPLATE": "1", "BOTH": "create", "MINE": "2"}
    assert init["hostname"] == created["sandboxID"]
    assert (await node.health(created["sandboxID"])).status_code == 204
    details = (await node.http.get(f"/sandboxes/{created['sandboxID']}")).json()
    assert (details["state"], details["metadata"], details["alias"]) == ("running", {"k": "v"}, "base")


async def test_delete_leaves_nothing_and_says_so_afterwards(node: Node) -> None:
    sandbox_id = (await node.create())["sandboxID"]
    assert (await node.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    assert node.leftovers() == NOTHING
    assert await node.ids() == []
    assert (await node.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 404
    gone = await node.http.get(f"/sandboxes/{sandbox_id}")
    assert gone.status_code == 404
    assert "reason killed" in gone.json()["message"]
    dead = await node.health(sandbox_id)
    assert dead.status_code == 502
    assert dead.json() == {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}


async def test_a_ttl_ends_the_sandbox_on_time_and_gives_the_reason(node: Node) -> None:
    began = time.monotonic()
    sandbox_id = (await node.create(timeout=1, autoPause=False))["sandboxID"]
    await until(lambda: node.leftovers() == NOTHING)
    assert 0.9 <= time.monotonic() - began <= 2.5
    assert "reason timeout" in (await node.http.get(f"/sandboxes/{sandbox_id}")).json()["message"]


async def test_a_timeout_can_be_shortened_and_lengthened_and_connect_never_shortens(node: Node) -> None:
    sandbox_id = (await node.create(timeout=60, autoPause=False))["sandboxID"]
    path = f"/sandboxes/{sandbox_id}"
    end = (await node.http.get(path)).json()["endAt"]
    assert (await node.http.post(f"/v2{path}/connect", json={"timeout": 5})).status_code == 200
    assert (await node.http.get(path)).json()["endAt"] == end
    assert (await node.http.post(f"{path}/timeout", json={"timeout": 5})).status_code == 204
    shorter = (await node.http.get(path)).json()["endAt"]
    assert shorter < end
    assert (await node.http.post(f"{path}/refreshes", json={"duration": 100})).status_code == 204
    assert (await node.http.get(path)).json()["endAt"] > end
    assert (await node.http.post(f"{path}/timeout", json={"timeout": 0})).status_code == 204
    await until(lambda: node.leftovers() == NOTHING)


async def test_the_same_key_and_body_give_the_same_sandbox_however_concurrent(node: Node) -> None:
    async def create() -> str:
        answer = await node.http.post("/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "k-1"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["sandboxID"])

    ids = await asyncio.gather(*(create() for _ in range(10)))
    assert len(set(ids)) == 1
    assert await node.ids() == [ids[0]]
    other = await node.http.post(
        "/v2/sandboxes", json={"templateID": "base", "timeout": 77}, headers={"Idempotency-Key": "k-1"}
    )
    assert other.status_code == 409


@pytest.mark.parametrize("fault", ["boot_fails", "dies_at_boot"])
async def test_a_failed_create_leaves_nothing_and_its_key_free(node: Node, fault: str) -> None:
    node.host.faults.append(fault)  # type: ignore[arg-type]
    request = {"json": {"templateID": "base"}, "headers": {"Idempotency-Key": "again"}}
    failed = await node.http.post("/v2/sandboxes", **request)  # type: ignore[arg-type]
    assert failed.status_code == 500
    assert failed.json()["code"] == 500
    await until(lambda: node.leftovers() == NOTHING)
    assert (await node.http.post("/v2/sandboxes", **request)).status_code == 201  # type: ignore[arg-type]


async def test_a_guest_that_never_answers_is_ended_at_the_deadline_with_its_console(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits=OrchestratorSettings(boot_deadline=0.5)) as node:
        node.host.faults.append("never_ready")
        failed = await node.http.post("/v2/sandboxes", json={"templateID": "base"})
        assert failed.status_code == 504
        assert "did not answer within 0.5 s" in failed.json()["message"]
        assert "fake guest" in failed.json()["message"]
        await until(lambda: node.leftovers() == NOTHING)


async def test_creates_beyond_the_boot_concurrency_wait_and_then_fail_as_unavailable(tmp_path: Path) -> None:
    limits = OrchestratorSettings(boot_concurrency=1, create_deadline=0.5)
    async with running_node(tmp_path, limits=limits) as node:
        node.host.faults.append("boot_hangs")
        answers = await asyncio.gather(
            *(node.http.post("/v2/sandboxes", json={"templateID": "base"}) for _ in range(2))
        )
        assert sorted(answer.status_code for answer in answers) == [503, 503]
        await until(lambda: node.leftovers() == NOTHING)
        assert (await node.http.post("/v2/sandboxes", json={"templateID": "base"})).status_code == 201


async def test_limits_of_the_node_are_429_and_change_nothing(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits=OrchestratorSettings(max_sandboxes=2)) as node:
        await asyncio.gather(node.create(), node.create())
        full = await node.http.post("/v2/sandboxes", json={"templateID": "base"})
        assert full.status_code == 429
        assert "max_sandboxes" in full.json()["message"]
        assert len(await node.ids()) == 2
    async with running_node(tmp_path / "second", max_slots=1) as node:
        await node.create()
        assert (await node.http.post("/v2/sandboxes", json={"templateID": "base"})).status_code == 429
        await until(lambda: len(node.leftovers()["folders"]) == 1)


async def test_a_vmm_that_dies_ends_its_sandbox_and_no_other(node: Node) -> None:
    dying, living = [(await node.create())["sandboxID"] for _ in range(2)]
    await node.host.crash(dying)
    await until(lambda: len(node.leftovers()["folders"]) == 1)
    assert await node.ids() == [living]
    message = (await node.http.get(f"/sandboxes/{dying}")).json()["message"]
    assert "reason vmm_died (the VMM was killed by signal 9)" in message
    assert (await node.health(living)).status_code == 204


async def test_a_request_under_way_in_a_sandbox_that_is_killed_is_answered_at_once(node: Node) -> None:
    sandbox_id = (await node.create())["sandboxID"]
    guest = node.host.of(sandbox_id).guest
    token = guest.access_token or ""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rsplit(":", 1)[1]))
    # The body is announced and never finished, so the guest is waiting in the middle of the request.
    writer.write(
        f"POST /files HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {sandbox_id}\r\nX-Access-Token: {token}\r\n"
        "Content-Length: 100000\r\n\r\nfirst bytes".encode()
    )
    await until(lambda: guest.connections)
    await node.http.delete(f"/sandboxes/{sandbox_id}")
    async with asyncio.timeout(5):
        assert b" 502 " in await reader.readline()
    writer.close()


async def test_unsecured_sandboxes_have_no_token(node: Node) -> None:
    answer = await node.http.post("/sandboxes", json={"templateID": "base", "secure": False})
    assert answer.status_code == 201
    assert "envdAccessToken" not in answer.json()
    assert node.host.of(answer.json()["sandboxID"]).guest.access_token is None


async def test_private_ports_need_the_traffic_token(node: Node) -> None:
    created = await node.create(network={"allowPublicTraffic": False})
    headers = {"E2b-Sandbox-Id": created["sandboxID"], "E2b-Sandbox-Port": "8080"}
    assert (await node.http.get("/", headers=headers)).status_code == 403
    headers["E2b-Traffic-Access-Token"] = created["trafficAccessToken"]
    closed = await node.http.get("/", headers=headers)
    assert (closed.status_code, closed.json()["port"]) == (502, 8080)


async def test_listing_pages_filters_and_counts(node: Node) -> None:
    created = [(await node.create(metadata={"n": str(n), "all": "yes"}))["sandboxID"] for n in range(5)]
    first = await node.http.get("/v2/sandboxes", params={"limit": 2})
    assert [row["sandboxID"] for row in first.json()] == created[:-3:-1]
    assert first.headers["x-total-running"] == "5"
    second = await node.http.get("/v2/sandboxes", params={"limit": 2, "nextToken": first.headers["x-next-token"]})
    assert [row["sandboxID"] for row in second.json()] == [created[2], created[1]]
    foreign = await node.http.get(
        "/v2/sandboxes", params={"limit": 2, "order": "asc", "nextToken": first.headers["x-next-token"]}
    )
    assert foreign.status_code == 400
    one = await node.http.get("/v2/sandboxes", params={"metadata": "n=3&all=yes"})
    assert [row["sandboxID"] for row in one.json()] == [created[3]]
    for template, count in (("base", 5), ("tbase", 5), ("nosuch", 0), ("a b!", 0)):
        assert len((await node.http.get("/v2/sandboxes", params={"template": template})).json()) == count


async def test_the_key_comes_before_everything(node: Node) -> None:
    for key in ({}, {"X-API-Key": KEY + "0"}):
        for method, path in (("GET", "/v2/sandboxes"), ("DELETE", "/sandboxes/nosuch"), ("POST", "/v2/sandboxes")):
            answer = await node.http.request(method, path, headers={"X-API-Key": "", **key})
            assert answer.status_code == 401
            assert answer.json()["code"] == 401


async def test_a_hundred_concurrent_lives_leave_nothing(node: Node) -> None:
    async def live() -> None:
        sandbox_id = (await node.create())["sandboxID"]
        assert (await node.health(sandbox_id)).status_code == 204
        assert (await node.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204

    await asyncio.gather(*(live() for _ in range(100)))
    assert node.leftovers() == NOTHING


async def test_a_create_deleted_while_a_thread_makes_its_folder_leaves_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling `to_thread` does not stop the thread: what it makes afterwards, nobody would remove."""
    made: list[str] = []
    entered, go_on = threading.Event(), threading.Event()
    real = Path.mkdir

    def slow(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.parent.name == "sandboxes":
            made.append(self.name)
            entered.set()
            go_on.wait(10)
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", slow)
    creating = asyncio.create_task(node.http.post("/v2/sandboxes", json={"templateID": "base"}))
    await asyncio.to_thread(entered.wait, 10)
    deleting = asyncio.create_task(node.http.delete(f"/sandboxes/{made[0]}"))
    assert (await creating).status_code == 409  # answered at once; only the delete waits for the thread
    go_on.set()
    assert (await deleting).status_code == 204
    assert node.leftovers() == NOTHING


async def test_a_folder_that_cannot_be_removed_is_said_and_removed_at_the_next_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox_id = (await node.create())["sandboxID"]
    real, tries = os.rmdir, 0

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal tries
        if str(path).endswith(sandbox_id):
            tries += 1
            raise OSError(errno.EIO, "Input/output error")
        real(path, *args, **kwargs)

    monkeypatch.setattr(runner, "RELEASE_RETRIES", (0.01, 0.01))
    monkeypatch.setattr(os, "rmdir", refuse)
    assert (await node.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    assert tries == 3
    await node.stop()
    async with rows(node) as store:
        last = (await store.events(sandbox_id))[-1]
    assert last.event == "TornDown"
    assert "Input/output error" in last.detail
    monkeypatch.undo()
    await node.start()
    assert node.leftovers() == NOTHING
