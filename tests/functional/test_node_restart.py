"""The server ends, gracefully or not, and starts again: the node is the truth."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from node_harness import NOTHING, Node, needs_root, rows, running_node, until

from aenv.errors import DeadlineExceeded
from aenv.lifecycle.events import CreateRequested, DeleteRequested, Launched
from aenv.lifecycle.machine import replay
from aenv.lifecycle.states import EndReason
from aenv.orchestrator import unwritten
from aenv.orchestrator.record import Record
from aenv.orchestrator.store import Store
from aenv.vmm.fake import FakeVmm

pytestmark = needs_root


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(tmp_path) as made:
        yield made


async def test_running_sandboxes_live_through_a_restart(node: Node) -> None:
    created = [await node.create(timeout=60) for _ in range(3)]
    await node.stop()
    assert len(node.host.machines) == 3
    await node.start()
    assert sorted(await node.ids()) == sorted(one["sandboxID"] for one in created)
    for one in created:
        assert (await node.health(one["sandboxID"])).status_code == 204
        again = await node.http.post(f"/v2/sandboxes/{one['sandboxID']}/connect", json={"timeout": 60})
        assert again.json()["envdAccessToken"] == one["envdAccessToken"]
    for one in created:
        await node.http.delete(f"/sandboxes/{one['sandboxID']}")
    assert node.leftovers() == NOTHING


async def test_a_ttl_that_passed_while_the_server_was_down_is_enforced_at_the_start(node: Node) -> None:
    sandbox_id = (await node.create(timeout=1, autoPause=False))["sandboxID"]
    await node.stop()
    await asyncio.sleep(1.1)  # the TTL is a matter of the clock: there is nothing to wait for
    await node.start()
    await until(lambda: node.leftovers() == NOTHING)
    assert "reason timeout" in (await node.http.get(f"/sandboxes/{sandbox_id}")).json()["message"]


async def test_a_vmm_that_died_while_the_server_was_down_ends_its_sandbox_with_a_reason(node: Node) -> None:
    dead, alive = [(await node.create())["sandboxID"] for _ in range(2)]
    await node.stop()
    await node.host.crash(dead)
    await node.start()
    assert await node.ids() == [alive]
    message = (await node.http.get(f"/sandboxes/{dead}")).json()["message"]
    assert "reason server_restart (its VMM could not be taken over" in message
    await until(lambda: len(node.leftovers()["folders"]) == 1)


async def test_a_create_under_way_is_undone_by_a_graceful_stop(node: Node) -> None:
    node.host.faults.append("boot_hangs")
    creating = asyncio.create_task(node.http.post("/v2/sandboxes", json={"templateID": "base"}))
    await node.host.booting.wait()
    await node.stop()
    await asyncio.gather(creating, return_exceptions=True)
    assert node.leftovers() == NOTHING


@pytest.mark.parametrize("position", ["creating", "running", "killing"])
@pytest.mark.parametrize("rebooted", [False, True])
async def test_every_row_that_a_killed_server_can_leave_is_ended_with_a_reason(
    node: Node, position: str, rebooted: bool
) -> None:
    """What `kill -9` leaves is a row in some position, and maybe a VMM, a slot and a folder."""
    sandbox_id = (await node.create(timeout=60))["sandboxID"]
    await node.stop()
    log = {
        "creating": [CreateRequested()],
        "running": [CreateRequested(), Launched()],
        "killing": [CreateRequested(), Launched(), DeleteRequested()],
    }[position]
    async with rows(node) as store:
        (record,) = await store.live()
        changed: Record = replace(record, life=replay(log))
        if rebooted:
            assert record.run is not None
            changed = replace(changed, run=replace(record.run, boot_id="another"))
        await store.save(changed)
    await node.start()
    if position == "running" and not rebooted:
        assert await node.ids() == [sandbox_id]
        return
    await until(lambda: node.leftovers() == NOTHING)
    assert await node.ids() == []
    reason = {"killing": EndReason.KILLED}.get(
        position, EndReason.HOST_RESTART if rebooted else EndReason.SERVER_RESTART
    )
    assert f"reason {reason}" in (await node.http.get(f"/sandboxes/{sandbox_id}")).json()["message"]


async def test_vmms_and_folders_without_a_row_are_removed(node: Node) -> None:
    await node.create()
    await node.stop()
    node.settings.state_db.unlink()
    for extra in node.home.glob("state.db-*"):
        extra.unlink()
    (node.settings.sandboxes_dir / "stray").mkdir()
    await node.start()
    assert node.leftovers() == NOTHING


async def test_a_retried_create_after_the_server_died_in_the_middle_makes_one_sandbox(node: Node) -> None:
    request = {"json": {"templateID": "base"}, "headers": {"Idempotency-Key": "retry"}}
    first = (await node.http.post("/v2/sandboxes", **request)).json()["sandboxID"]  # type: ignore[arg-type]
    await node.stop()
    async with rows(node) as store:
        (record,) = await store.live()
        await store.save(replace(record, life=replay([CreateRequested()]), run=None))
    await node.start()
    await until(lambda: node.leftovers() == NOTHING)
    answer = await node.http.post("/v2/sandboxes", **request)  # type: ignore[arg-type]
    assert answer.status_code == 201
    assert answer.json()["sandboxID"] != first
    assert len(await node.ids()) == 1


async def test_the_story_of_a_sandbox_replays_to_its_life(node: Node) -> None:
    from aenv.lifecycle.events import EVENTS

    sandbox_id = (await node.create())["sandboxID"]
    await node.http.delete(f"/sandboxes/{sandbox_id}")
    await node.stop()
    async with rows(node) as store:
        (record,) = await store.recently_ended(10)
        story = [EVENTS[line.event](line.detail) for line in await store.events(sandbox_id)]
    assert record.id == sandbox_id
    assert replay(story) == record.life
    await node.start()


async def test_a_damaged_state_database_is_refused_not_replaced(node: Node) -> None:
    await node.stop()
    node.settings.state_db.write_bytes(b"not a database" * 100)
    with pytest.raises(Exception, match="state database"):
        await node.start()
    assert node.settings.state_db.read_bytes().startswith(b"not a database")


async def test_vmms_that_do_not_answer_are_waited_for_together(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A VMM that was stopped, or broken into, takes its whole deadline."""
    for _ in range(4):
        await node.create()
    await node.stop()
    together = asyncio.Barrier(4)

    async def silent(self: FakeVmm, spec: object, handle: object) -> None:
        async with asyncio.timeout(10):
            await together.wait()
        raise DeadlineExceeded("did not greet us")

    monkeypatch.setattr(FakeVmm, "adopt", silent)
    await node.start()
    await until(lambda: node.leftovers() == NOTHING)


async def test_an_end_that_a_full_disk_kept_from_being_written_is_written_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwritten, "FIRST_PAUSE", 0.01)
    sandbox_id = (await node.create())["sandboxID"]
    real, full, refused = Store._transaction, True, asyncio.Event()
    loop = asyncio.get_running_loop()

    @contextmanager
    def transaction(self: Store) -> Iterator[sqlite3.Connection]:
        with real(self) as db:
            yield db
            if full:
                loop.call_soon_threadsafe(refused.set)
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error

    monkeypatch.setattr(Store, "_transaction", transaction)
    assert (await node.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    refused.clear()
    await asyncio.wait_for(refused.wait(), 10)  # it is tried again
    full = False

    async def written() -> bool:
        async with rows(node) as store:
            return not await store.live()

    await until(written)
    await node.stop()
    await node.start()
    assert "reason killed" in (await node.http.get(f"/sandboxes/{sandbox_id}")).json()["message"]
    await node.stop()
    async with rows(node) as store:
        story = [line.event for line in await store.events(sandbox_id)]
    assert story == ["CreateRequested", "Launched", "DeleteRequested", "TornDown"]
    await node.start()


async def test_an_end_is_also_tried_once_more_when_the_server_stops(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwritten, "FIRST_PAUSE", 3600.0)
    sandbox_id = (await node.create())["sandboxID"]
    with monkeypatch.context() as patched:

        def broken(self: Store) -> Iterator[sqlite3.Connection]:
            raise sqlite3.OperationalError("disk I/O error")

        patched.setattr(Store, "_transaction", broken)
        assert (await node.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    await node.stop()
    await node.start()
    assert "reason killed" in (await node.http.get(f"/sandboxes/{sandbox_id}")).json()["message"]
