"""Guests made ahead of creates, on the fake VMM."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from node_harness import NOTHING, Node, needs_root, rows, running_node, until

from aenv.config import StandbySettings

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
