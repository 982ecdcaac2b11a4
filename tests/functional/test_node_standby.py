"""What is made ahead of creates, resumes and rollbacks, on the fake VMM."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from node_harness import NOTHING, Node, needs_root, rows, running_node, until

from aenv.config import StandbySettings
from aenv.orchestrator import launcher, standby
from aenv.orchestrator.record import RunRecord

pytestmark = needs_root


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(tmp_path, standby=StandbySettings(ready=2, prepared=1)) as made:
        yield made


def waiting(node: Node) -> int:
    return len(node.host.machines)


async def test_a_create_takes_a_guest_that_waits_and_another_is_made(node: Node) -> None:
    await node.create()
    await until(lambda: waiting(node) == 3)  # one create lately: one ready, one prepared
    before = {machine.spec.sandbox_id.partition(".")[0] for machine in node.host.machines.values()}
    created = await node.create(envVars={"MINE": "2"}, metadata={"k": "v"})
    assert created["sandboxID"] in before
    init = node.host.of(created["sandboxID"]).guest.inits[-1]
    assert (init["accessToken"], init["hostname"]) == (created["envdAccessToken"], created["sandboxID"])
    assert init["envVars"]["MINE"] == "2"
    await until(lambda: waiting(node) == 5)  # two of two ready, one prepared
    assert len(await node.ids()) == 2


async def test_what_waits_is_shown_to_nobody_and_ends_with_the_server(node: Node) -> None:
    sandbox_id = (await node.create())["sandboxID"]
    await until(lambda: waiting(node) == 3)
    assert await node.ids() == [sandbox_id]
    other = next(m.spec.sandbox_id for m in node.host.machines.values() if not m.spec.sandbox_id.startswith(sandbox_id))
    assert (await node.http.get(f"/sandboxes/{other.partition('.')[0]}")).status_code == 404
    await node.http.delete(f"/sandboxes/{sandbox_id}")
    await node.stop()
    assert node.leftovers() == NOTHING


async def test_one_that_dies_waiting_is_replaced(node: Node) -> None:
    first = (await node.create())["sandboxID"]
    await until(lambda: waiting(node) == 3)
    for machine in list(node.host.machines.values()):
        if not machine.spec.sandbox_id.startswith(first):
            await node.host.crash(machine.spec.sandbox_id.partition(".")[0])
    await until(lambda: waiting(node) == 3)
    assert (await node.health((await node.create())["sandboxID"])).status_code == 204


async def test_a_policy_of_its_own_is_in_force_before_it_is_handed_out(node: Node) -> None:
    await node.create()
    await until(lambda: waiting(node) == 3)
    closed = await node.create(allow_internet_access=False)
    policies = {index: policy.internet for index, policy in node.network.policies.items()}
    async with rows(node) as store:
        record = next(record for record in await store.live() if record.id == closed["sandboxID"])
    assert record.run is not None
    assert [index for index, internet in policies.items() if not internet] == [record.run.slot]


async def test_a_failure_to_make_one_harms_nobody_and_is_not_repeated_in_a_loop(node: Node) -> None:
    node.host.faults.extend(["boot_fails"] * 1)
    answer = await node.http.post("/v2/sandboxes", json={"templateID": "base"})
    assert answer.status_code == 500
    await node.create()
    await until(lambda: waiting(node) == 3)
    node.host.faults.extend(["load_fails"] * 50)
    created = await asyncio.gather(*(node.http.post("/v2/sandboxes", json={"templateID": "base"}) for _ in range(3)))
    assert all(answer.status_code in (201, 500) for answer in created)
    assert len(node.host.faults) > 40, "failures follow each other without a pause"
    node.host.faults.clear()
    assert (await node.health((await node.create())["sandboxID"])).status_code == 204


async def test_a_guest_that_dies_as_it_is_claimed_costs_the_create_only_time(node: Node) -> None:
    await node.create()
    await until(lambda: waiting(node) == 3)
    node.host.faults.extend(["load_fails"])
    ready = await node.create()  # the one that was ready
    prepared = await node.create()  # the one that was prepared, and cannot load its state
    for created in (ready, prepared):
        assert (await node.health(created["sandboxID"])).status_code == 204


async def api(node: Node, sandbox_id: str, verb: str, body: object = None, status: int = 200) -> Any:
    answer = await node.http.post(f"/sandboxes/{sandbox_id}/{verb}", json=body)
    assert answer.status_code == status, (verb, answer.status_code, answer.text)
    return answer.json() if answer.content else None


async def remembered(node: Node, created: dict[str, Any], value: str | None = None) -> str:
    """What the guest of a sandbox keeps in its memory, after `value` was put there."""
    address = node.host.machines[(await run_of(node, created["sandboxID"])).vm].spec.address
    async with httpx.AsyncClient(base_url=f"http://{address}:49983", trust_env=False) as guest:
        if value is not None:
            assert (await guest.post("/values/v", content=value)).is_success
        return (await guest.get("/values/v")).text


async def run_of(node: Node, sandbox_id: str) -> RunRecord:
    async with rows(node) as store:
        (record,) = [record for record in await store.live() if record.id == sandbox_id]
    assert record.run is not None
    return record.run


@pytest.fixture
async def prepared(tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(tmp_path, standby=StandbySettings(ready=0, prepared=1)) as made:
        yield made


async def pause_and_resume(node: Node, sandbox_id: str) -> None:
    await api(node, sandbox_id, "pause", status=204)
    await api(node, sandbox_id, "resume", {"timeout": 300}, status=201)


async def made_ahead(node: Node, sandbox_id: str) -> bool:
    """Whether the sandbox is on a VMM that was made before it wanted one."""
    return not (await run_of(node, sandbox_id)).name.startswith(sandbox_id)


async def test_a_resume_takes_the_vmm_that_waits_for_any_guest_of_its_template(prepared: Node) -> None:
    created = await prepared.create()
    sandbox_id = created["sandboxID"]
    for value in ("one", "two", "three"):
        await until(lambda: waiting(prepared) == 2)  # the sandbox, and one that waits
        await remembered(prepared, created, value)
        before = {handle for handle, machine in prepared.host.machines.items() if machine.phase == "waiting"}
        await pause_and_resume(prepared, sandbox_id)
        assert (await run_of(prepared, sandbox_id)).vm in before
        assert await remembered(prepared, created) == value


async def test_a_sandbox_on_a_vmm_made_ahead_survives_the_server_and_leaves_nothing(prepared: Node) -> None:
    created = await prepared.create()
    sandbox_id = created["sandboxID"]
    await until(lambda: waiting(prepared) == 2)
    await remembered(prepared, created, "kept")
    await pause_and_resume(prepared, sandbox_id)
    run = await run_of(prepared, sandbox_id)
    assert await made_ahead(prepared, sandbox_id)
    await prepared.stop()
    await prepared.start()
    assert (await run_of(prepared, sandbox_id)).vm == run.vm
    assert await remembered(prepared, created) == "kept"
    await api(prepared, sandbox_id, "pause", status=204)
    await until(lambda: [folder.name for folder in prepared.settings.sandboxes_dir.iterdir()] == [sandbox_id])
    await api(prepared, sandbox_id, "resume", {"timeout": 300}, status=201)
    assert await remembered(prepared, created) == "kept"
    assert (await prepared.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    await prepared.stop()
    assert prepared.leftovers() == NOTHING


async def test_one_of_no_use_costs_the_resume_only_time(prepared: Node) -> None:
    created = await prepared.create()
    await remembered(prepared, created, "kept")
    await until(lambda: waiting(prepared) == 2)
    prepared.host.faults.extend(["load_fails"])
    await pause_and_resume(prepared, created["sandboxID"])
    assert not await made_ahead(prepared, created["sandboxID"])
    assert await remembered(prepared, created) == "kept"


async def test_a_policy_of_its_own_is_in_force_on_a_vmm_made_ahead(prepared: Node) -> None:
    created = await prepared.create(allow_internet_access=False)
    await until(lambda: waiting(prepared) == 2)
    await pause_and_resume(prepared, created["sandboxID"])
    assert await made_ahead(prepared, created["sandboxID"])
    run = await run_of(prepared, created["sandboxID"])
    assert not prepared.network.policies[run.slot].internet


async def test_a_rollback_takes_it_too(prepared: Node) -> None:
    created = await prepared.create()
    sandbox_id = created["sandboxID"]
    await remembered(prepared, created, "then")
    snapshot = (await api(prepared, sandbox_id, "snapshots", {}, status=201))["snapshotID"]
    for _ in range(2):
        await remembered(prepared, created, "later")
        await until(lambda: waiting(prepared) == 2)
        await api(prepared, sandbox_id, "rollback", {"snapshotID": snapshot})
        assert await remembered(prepared, created) == "then"
        assert await made_ahead(prepared, sandbox_id)


async def test_much_changed_memory_is_an_image_of_its_own(prepared: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    created = await prepared.create()
    sandbox_id = created["sandboxID"]
    await until(lambda: waiting(prepared) == 2)
    monkeypatch.setattr(launcher, "MOST_CHANGED", 0)
    await remembered(prepared, created, "kept")
    template_image = (await run_of(prepared, sandbox_id)).image
    await pause_and_resume(prepared, sandbox_id)
    run = await run_of(prepared, sandbox_id)
    assert run.image != template_image
    assert run.mapped == len(run.memory) == 2
    assert await remembered(prepared, created) == "kept"
    monkeypatch.undo()
    await pause_and_resume(prepared, sandbox_id)  # what it mapped is an image like any other
    run = await run_of(prepared, sandbox_id)
    assert (run.mapped, len(run.memory)) == (2, 3)
    assert await remembered(prepared, created) == "kept"


async def test_a_launch_that_hangs_keeps_nobody_from_being_prepared_for(
    prepared: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "QUIET", 0.1)
    sandbox_id = (await prepared.create())["sandboxID"]
    snapshot = (await api(prepared, sandbox_id, "snapshots", {}, status=201))["snapshotID"]
    await until(lambda: waiting(prepared) == 2)
    prepared.host.faults.append("freeze_hangs")
    hanging = asyncio.create_task(
        prepared.http.post(f"/sandboxes/{sandbox_id}/rollback", json={"snapshotID": snapshot})
    )
    async with asyncio.timeout(10):
        await prepared.host.freezing.wait()
    await prepared.create()  # takes the one that waits
    await until(lambda: waiting(prepared) == 3)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
