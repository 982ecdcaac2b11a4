"""Pause, resume, snapshots, forks and rollbacks through the real API, orchestrator, data plane and proxy; fake VMM.

A fake guest keeps what it knows in memory that the data plane captures and serves again: `boot-id` and `values` tell
whether it is the same guest, and of which moment.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from node_harness import NOTHING, Node, needs_root, rows, running_node, until

from aenv.config import OrchestratorSettings
from aenv.errors import InsufficientStorage
from aenv.images.capturing import StagedCapture
from aenv.images.protocol import Captured
from aenv.lifecycle.events import PauseRequested, ResumeRequested
from aenv.lifecycle.machine import step
from aenv.orchestrator import capture, greeter
from aenv.vmm.fake import FakeVm

pytestmark = needs_root


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(tmp_path) as made:
        yield made


class Guest:
    """A sandbox as its user sees it: its API, and its guest through the proxy."""

    def __init__(self, node: Node, created: dict[str, Any]) -> None:
        self.node = node
        self.id = str(created["sandboxID"])
        self.token = created["envdAccessToken"]

    async def api(self, verb: str, body: Any = None, status: int = 200) -> Any:
        answer = await self.node.http.post(f"/sandboxes/{self.id}/{verb}", json=body)
        assert answer.status_code == status, (verb, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def detail(self) -> Any:
        answer = await self.node.http.get(f"/sandboxes/{self.id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def state(self) -> str:
        return str((await self.detail())["state"])

    async def ask(self, path: str) -> httpx.Response:
        """Through the proxy."""
        headers = {"E2b-Sandbox-Id": self.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": self.token}
        return await self.node.http.get(path, headers=headers)

    async def inside(self, method: str, path: str, content: str | None = None) -> str:
        """As a process in the guest sees it."""
        address = self.node.host.of(self.id).spec.address
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.request(method, f"http://{address}:49983{path}", content=content)
        assert answer.is_success, answer.text
        return answer.text

    async def boot_id(self) -> str:
        return await self.inside("GET", "/boot-id")

    async def keep(self, value: str) -> None:
        await self.inside("POST", "/values/v", value)

    async def kept(self) -> str:
        return await self.inside("GET", "/values/v")

    def folder(self) -> Path:
        return self.node.settings.sandboxes_dir / self.id


async def guest(node: Node, **body: Any) -> Guest:
    return Guest(node, await node.create(**body))


async def children(parent: Guest, answers: list[Any]) -> list[Guest]:
    return [Guest(parent.node, one["sandbox"]) for one in answers]


async def test_a_pause_keeps_the_guest_and_gives_back_what_it_held(node: Node) -> None:
    one = await guest(node, metadata={"k": "v"})
    boot_id = await one.boot_id()
    await one.keep("before the pause")
    await one.api("pause", {}, 204)
    await until(lambda: node.leftovers() == {"vmms": 0, "slots": {}, "folders": [one.id]})
    detail = await one.detail()
    assert (detail["state"], detail["pauseMode"], detail["metadata"]) == ("paused", "full", {"k": "v"})
    gone = await one.ask("/envs")
    assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")

    resumed = await one.api("connect", {"timeout": 100}, 201)
    assert resumed["envdAccessToken"] == one.token
    assert (await one.boot_id(), await one.kept()) == (boot_id, "before the pause")
    init = node.host.of(one.id).guest.inits
    assert len({body["generation"] for body in init if body.get("generation")}) == 2
    assert await one.api("connect", {"timeout": 1}) == resumed
    assert (await node.http.delete(f"/sandboxes/{one.id}")).status_code == 204
    assert node.leftovers() == NOTHING


async def test_each_cycle_keeps_what_is_newest_and_chains_stay_short(node: Node) -> None:
    one = await guest(node)
    boot_id = await one.boot_id()
    for n in range(40):
        await one.keep(str(n))
        await one.api("pause", {}, 204)
        (rest,) = [part for part in one.folder().iterdir() if part.name.startswith("paused-")]
        for kind in ("disk", "memory"):
            assert 1 <= len(list((rest / kind).iterdir())) <= 33
        await one.api("resume", {"timeout": 60}, 201)
        assert await one.kept() == str(n)
    assert await one.boot_id() == boot_id


async def test_a_second_pause_and_a_second_resume_are_told(node: Node) -> None:
    one = await guest(node)
    await one.api("resume", {"timeout": 60}, 409)
    await one.api("pause", {}, 204)
    await one.api("pause", {}, 409)


async def test_concurrent_calls_are_carried_out_one_after_the_other(node: Node) -> None:
    one = await guest(node)
    path = f"/sandboxes/{one.id}"
    pauses = await asyncio.gather(*(node.http.post(f"{path}/pause", json={}) for _ in range(5)))
    assert sorted(answer.status_code for answer in pauses) == [204, 409, 409, 409, 409]
    connects = await asyncio.gather(*(node.http.post(f"/v2{path}/connect") for _ in range(5)))
    assert sorted(answer.status_code for answer in connects) == [200, 200, 200, 200, 201]
    await until(lambda: len(node.host.machines) == 1)
    mixed = await asyncio.gather(
        node.http.post(f"{path}/snapshots", json={}),
        node.http.post(f"{path}/fork", json={"count": 2}),
        node.http.post(f"{path}/pause", json={}),
        node.http.post(f"/v2{path}/connect"),
    )
    assert [answer.status_code // 100 for answer in mixed] == [2, 2, 2, 2], [answer.text for answer in mixed]


async def test_a_resume_right_after_a_pause_waits_for_it(node: Node) -> None:
    one = await guest(node)
    await one.keep("kept")
    await one.api("timeout", {"timeout": 0}, 204)  # pauses, and answers at once
    assert (await node.http.post(f"/v2/sandboxes/{one.id}/connect")).status_code == 201
    assert await one.kept() == "kept"


@pytest.mark.parametrize("fault", ["save_fails", "freeze_hangs"])
async def test_a_pause_that_fails_leaves_it_running(tmp_path: Path, fault: Any) -> None:
    async with running_node(tmp_path, limits=OrchestratorSettings(operation_deadline=1.0)) as node:
        one = await guest(node)
        await one.keep("1")
        node.host.faults.append(fault)
        await one.api("pause", {}, 504 if fault == "freeze_hangs" else 500)
        assert await one.state() == "running"
        assert await one.kept() == "1"
        await one.api("pause", {}, 204)
        await one.api("resume", {"timeout": 60}, 201)
        assert await one.kept() == "1"


@pytest.mark.parametrize("fault", ["load_fails", "dies_at_load", "thaw_fails"])
async def test_a_resume_that_fails_leaves_it_paused(node: Node, fault: Any) -> None:
    one = await guest(node)
    await one.keep("1")
    await one.api("pause", {}, 204)
    node.host.faults.append(fault)
    await one.api("resume", {"timeout": 60}, 500)
    assert await one.state() == "paused"
    # What the failed launch held may not be released yet: the next one has a name and a folder of its own.
    await one.api("resume", {"timeout": 60}, 201)
    assert node.host.of(one.id).spec.sandbox_id == f"{one.id}.2"
    assert await one.kept() == "1"
    await until(lambda: (node.leftovers()["vmms"], len(node.leftovers()["slots"])) == (1, 1))


async def test_memory_saved_by_another_vmm_is_refused_and_its_disk_can_be_booted(node: Node) -> None:
    one = await guest(node)
    boot_id = await one.boot_id()
    await one.api("pause", {}, 204)
    node.host.cpu = "another"
    refused = await one.api("resume", {"timeout": 60}, 409)
    assert "the VMM's cpu" in refused["message"]
    assert await one.state() == "paused"
    await one.api("resume", {"timeout": 60, "memory": False}, 201)
    assert await one.boot_id() != boot_id


async def test_a_pause_of_the_disk_alone(node: Node) -> None:
    one = await guest(node)
    boot_id = await one.boot_id()
    await one.api("pause", {"memory": False}, 204)
    detail = await one.detail()
    assert (detail["state"], detail["pauseMode"]) == ("paused", "filesystem")
    await one.api("resume", {"timeout": 60}, 201)
    assert await one.boot_id() != boot_id


async def test_the_end_of_a_ttl_pauses_unless_told_otherwise(node: Node) -> None:
    kept, ended = await guest(node, timeout=1), await guest(node, timeout=1, autoPause=False)
    await kept.keep("still here")

    async def paused() -> bool:
        return await kept.state() == "paused"

    await until(paused)
    await until(lambda: node.leftovers()["folders"] == [kept.id])
    assert "reason timeout" in (await node.http.get(f"/sandboxes/{ended.id}")).json()["message"]
    await kept.api("connect", {"timeout": 60}, 201)
    assert await kept.kept() == "still here"


async def test_a_request_wakes_what_was_created_with_auto_resume(node: Node) -> None:
    one = await guest(node, timeout=60, autoPause=True, autoResume={"enabled": True})
    await one.keep("asleep")
    await one.api("timeout", {"timeout": 0}, 204)
    answers = await asyncio.gather(*(one.ask("/envs") for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert (await one.state(), await one.kept()) == ("running", "asleep")


async def test_a_snapshot_is_a_template_and_its_source_runs_on(node: Node) -> None:
    one = await guest(node)
    boot_id = await one.boot_id()
    await one.keep("at the snapshot")
    made = await one.api("snapshots", {"name": "work:v1"}, 201)
    assert (made["snapshotID"], made["names"]) == ("work:v1", ["work:v1"])
    unnamed = await one.api("snapshots", {}, 201)
    await one.keep("later")

    other = await guest(node, templateID="work:v1")
    assert (await other.boot_id(), await other.kept()) == (boot_id, "at the snapshot")
    assert other.token != one.token
    assert await one.kept() == "later"
    third = await guest(node, templateID=unnamed["snapshotID"])
    assert await third.kept() == "at the snapshot"

    listed = (await node.http.get("/snapshots", params={"sandboxID": one.id})).json()
    assert [snapshot["snapshotID"] for snapshot in listed] == [unnamed["snapshotID"], "work:v1"]
    assert (await node.http.delete("/templates/work:v1")).status_code == 204
    assert (await node.http.delete("/templates/work:v1")).status_code == 404
    assert await other.kept() == "at the snapshot"
    gone = await node.http.post("/v2/sandboxes", json={"templateID": "work:v1"})
    assert gone.status_code == 404


@pytest.mark.parametrize("doing", ["snapshots", "pause", "rollback", "restart"])
async def test_a_guest_that_was_stopped_and_goes_on_is_told_the_time(node: Node, doing: str) -> None:
    one = await guest(node)
    good = (await one.api("snapshots", {}, 201))["snapshotID"]
    await until(lambda: node.host.of(one.id).guest.times)
    node.host.of(one.id).guest.times.clear()
    if doing == "restart":
        await node.stop()
        await node.start()
    elif doing == "snapshots":
        await one.api("snapshots", {}, 201)
    else:
        node.host.faults.append("save_fails" if doing == "pause" else "load_fails")
        await one.api(doing, {"snapshotID": good} if doing == "rollback" else {}, 500)
    await until(lambda: node.host.of(one.id).guest.times)


async def test_a_guest_that_plays_with_its_mailbox_is_greeted_over_its_network(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(vm: FakeVm, _message: bytes) -> bool:
        await vm.thaw()
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(greeter, "MAILBOX_DEADLINE", 0.1)
    monkeypatch.setattr(FakeVm, "greet", silent)
    one = await guest(node)
    await one.keep("1")
    await one.api("pause", {}, 204)
    await one.api("resume", {"timeout": 300}, 201)
    assert await one.kept() == "1"


async def test_a_snapshot_of_a_paused_sandbox_leaves_it_paused(node: Node) -> None:
    one = await guest(node)
    await one.keep("1")
    await one.api("pause", {}, 204)
    made = await one.api("snapshots", {}, 201)
    (fork,) = await children(one, await one.api("fork", {"count": 1}, 201))
    assert await one.state() == "paused"
    assert await fork.kept() == "1"
    assert await (await guest(node, templateID=made["snapshotID"])).kept() == "1"


async def test_children_of_a_fork_are_alike_and_apart(node: Node) -> None:
    one = await guest(node, metadata={"k": "v"}, envVars={"E": "1"})
    await one.keep("parent")
    made = await children(one, await one.api("fork", {"count": 3}, 201))
    family = [one, *made]
    assert {await member.boot_id() for member in family} == {await one.boot_id()}
    assert len({member.token for member in family}) == len({member.id for member in family}) == 4
    for child in made:
        detail = await child.detail()
        assert (detail["metadata"], detail["templateID"]) == ({"k": "v"}, (await one.detail())["templateID"])
        init = node.host.of(child.id).guest.inits[-1]
        assert (init["hostname"], init["envVars"]["E"]) == (child.id, "1")
        await child.keep(child.id)
    assert [await member.kept() for member in family] == ["parent", *(child.id for child in made)]
    last = [[body for body in node.host.of(member.id).guest.inits if body.get("generation")][-1] for member in family]
    generations = {body["generation"] for body in last}
    assert len(generations) == 4
    assert not [*node.settings.sandboxes_dir.glob("fork-*")]


async def test_each_child_of_a_fork_has_its_own_outcome(node: Node) -> None:
    one = await guest(node)
    node.host.faults.append("load_fails")
    answers = await one.api("fork", {"count": 3}, 201)
    assert sorted(list(answer) for answer in answers) == [["error"], ["sandbox"], ["sandbox"]]
    await until(lambda: len(node.host.machines) == 3)
    refused = await one.api("fork", {"count": 17}, 400)
    assert "max_fork_count" in refused["message"]


async def test_children_need_their_source_no_more_once_it_is_captured(node: Node) -> None:
    one = await guest(node)
    node.host.faults.append("boot_hangs")
    forking = asyncio.create_task(one.api("fork", {"count": 2}, 201))
    await node.host.booting.wait()
    (captured,) = node.settings.sandboxes_dir.glob("fork-*")
    assert (await node.http.delete(f"/sandboxes/{one.id}")).status_code == 204
    assert (captured / "state").exists()
    await until(lambda: len(node.host.machines) == 1)  # the other one

    async def hanging() -> set[str]:
        return {path.name for path in node.settings.sandboxes_dir.iterdir()} - {captured.name} - {*await node.ids()}

    (child,) = await hanging()
    assert (await node.http.delete(f"/sandboxes/{child}")).status_code == 204
    assert sorted(list(answer) for answer in await forking) == [["error"], ["sandbox"]]
    assert not captured.exists()


@pytest.mark.parametrize("verb", ["snapshots", "fork", "pause"])
async def test_a_layer_that_cannot_be_written_leaves_the_source_running(
    node: Node, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A guest that goes on may do so already then."""
    one = await guest(node)
    await one.keep("first")

    async def full(self: StagedCapture) -> Captured:
        await finish(self)
        raise InsufficientStorage("no space left for the layer")

    finish = StagedCapture.finish
    layers = {path.name for path in one.folder().rglob("memory-*")}
    with monkeypatch.context() as patched:
        patched.setattr(StagedCapture, "finish", full)
        await one.api(verb, {}, 507)
    assert await one.state() == "running"
    assert await one.kept() == "first"
    assert {path.name for path in one.folder().rglob("memory-*")} == layers
    assert not [*node.settings.sandboxes_dir.glob("fork-*")]
    await one.keep("second")
    await one.api("pause", None, 204)
    await one.api("connect", {"timeout": 60}, 201)
    assert await one.kept() == "second"


async def test_a_rollback_puts_it_back_in_place(node: Node) -> None:
    one = await guest(node)
    boot_id = await one.boot_id()
    await one.keep("good")
    good = (await one.api("snapshots", {}, 201))["snapshotID"]
    await one.keep("bad")
    back = await one.api("rollback", {"snapshotID": good})
    assert (back["sandboxID"], back["envdAccessToken"]) == (one.id, one.token)
    assert (await one.boot_id(), await one.kept()) == (boot_id, "good")
    await until(lambda: len(node.host.machines) == 1)

    await one.keep("bad again")
    node.host.faults.append("load_fails")
    await one.api("rollback", {"snapshotID": good}, 500)
    assert await one.kept() == "bad again"
    await one.api("pause", {}, 204)
    await one.api("rollback", {"snapshotID": good})
    assert await one.state() == "paused"
    await one.api("resume", {"timeout": 60}, 201)
    assert await one.kept() == "good"

    other = await guest(node)
    await other.api("rollback", {"snapshotID": good}, 404)


@pytest.mark.parametrize("doing", ["pause", "snapshots", "fork"])
async def test_a_delete_goes_through_while_something_else_is_under_way(node: Node, doing: str) -> None:
    one = await guest(node)
    node.host.faults.append("freeze_hangs")
    busy = asyncio.create_task(node.http.post(f"/sandboxes/{one.id}/{doing}", json={}))
    await node.host.freezing.wait()
    assert (await node.http.delete(f"/sandboxes/{one.id}")).status_code == 204
    assert (await busy).status_code == 409
    await until(lambda: node.leftovers() == NOTHING)


async def test_paused_sandboxes_live_through_restarts_of_server_and_host(node: Node) -> None:
    one, lost = await guest(node), await guest(node)
    boot_id = await one.boot_id()
    await one.keep("kept")
    for each in (one, lost):
        await each.api("pause", {}, 204)

    async def durable() -> bool:
        async with rows(node) as store:
            return all(record.rest is not None and record.rest.durable for record in await store.live())

    await until(durable)
    await node.stop()
    async with rows(node) as store:
        for record in await store.live():  # as if the host had been started anew
            assert record.rest is not None
            rest = replace(record.rest, boot_id="an earlier boot", durable=record.id == one.id)
            await store.save(replace(record, rest=rest))
    await node.start()
    assert await one.state() == "paused"
    ended = (await node.http.get(f"/sandboxes/{lost.id}")).json()["message"]
    assert "reason state_lost" in ended
    await one.api("resume", {"timeout": 60}, 201)
    assert (await one.boot_id(), await one.kept()) == (boot_id, "kept")


async def test_what_was_in_flight_when_the_server_died_has_not_happened(node: Node) -> None:
    runs, rests = await guest(node), await guest(node)
    for each in (runs, rests):
        await each.keep("kept")
    await rests.api("pause", {}, 204)
    await node.stop()
    async with rows(node) as store:
        for record in await store.live():
            event = PauseRequested() if record.id == runs.id else ResumeRequested()
            await store.save(replace(record, life=step(record.life, event)[0]))
    half_made = runs.folder() / "paused-half"
    half_made.mkdir()
    await node.start()
    assert (await runs.state(), await rests.state()) == ("running", "paused")
    assert not half_made.exists()
    await runs.api("pause", {}, 204)
    for each in (runs, rests):
        await each.api("resume", {"timeout": 60}, 201)
        assert await each.kept() == "kept"


async def test_a_stop_does_not_wait_for_what_cannot_be_finished(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits=OrchestratorSettings(kill_deadline=0.5)) as node:
        one = await guest(node)
        await one.keep("kept")
        node.host.faults.append("freeze_hangs")
        pausing = asyncio.create_task(node.http.post(f"/sandboxes/{one.id}/pause", json={}))
        await node.host.freezing.wait()
        async with asyncio.timeout(30):
            await node.stop()
        await asyncio.gather(pausing, return_exceptions=True)
        await node.start()
        assert (await one.state(), await one.kept()) == ("running", "kept")


async def test_a_guest_that_brings_nothing_to_its_disk_is_paused_without_memory_only_at_its_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "SYNC_DEADLINE", 0.2)
    one = await guest(node, autoPause=True, autoPauseMemory=False)
    node.host.of(one.id).guest.freeze()  # its daemon answers nobody any more
    refused = await one.api("pause", {"memory": False}, 500)
    assert "pause it with its memory" in refused["message"]
    assert await one.state() == "running"
    await one.api("timeout", {"timeout": 0}, 204)

    async def paused() -> bool:
        return await one.state() == "paused"

    await until(paused)
    assert (await one.detail())["pauseMode"] == "filesystem"
