"""What is made ahead, with real guests: taken by creates, resumes and rollbacks, who find it to be their own."""

from collections.abc import Callable, Iterator

import httpx
import pytest
from e2b import Sandbox
from witness import Witness

from aenv.vmm.process import find
from real_server import RealServer, needs_node, real_server, until

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(300)]

CLOCK = 0.05
"""Seconds that a guest's clock may be off at its first command."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("home"), standby_ready="1", standby_prepared="1") as made:
        yield made
    assert find(made.home) == []
    assert list((made.home / "sandboxes").iterdir()) == []


def steps(answer: httpx.Response) -> set[str]:
    """Of a launch, as the server tells them."""
    assert answer.status_code in (200, 201), answer.text
    return {step.partition(";")[0].strip() for step in answer.headers["server-timing"].split(",")}


def clock(witness: Witness) -> None:
    bounds = [witness.offset() for _ in range(10)]
    assert max(low for low, _ in bounds) <= CLOCK, bounds
    assert min(high for _, high in bounds) >= -CLOCK, bounds


def test_a_create_takes_a_guest_that_waits_and_it_is_nobody_elses(server: RealServer) -> None:
    made: list[str] = []

    def taken() -> bool:
        """What waits is made in a lull, which nobody tells of: create until one was there."""
        answer = server.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
        found = steps(answer)
        made.append(answer.json()["sandboxID"])
        return found == {"greet"}

    until(taken, 120, "a create that takes a guest that waits")
    command = "hostname; cat /proc/sys/kernel/random/uuid /run/aenv/generation"
    told = [server.connect(one).commands.run(command).stdout.split() for one in made[-2:]]
    assert [name for name, *_ in told] == made[-2:]
    assert len({uuid for _, uuid, *_ in told}) == 2
    assert len({generation for _, _, generation in told}) == 2
    clock(Witness.start(server, server.connect(made[-1])))
    for one in made:
        assert server.http.delete(f"/sandboxes/{one}").status_code == 204


@pytest.fixture(scope="module")
def witness(server: RealServer) -> Iterator[Witness]:
    sandbox: Sandbox = server.create()
    yield Witness.start(server, sandbox)
    sandbox.kill()


def on_a_prepared_vmm(witness: Witness, launch: Callable[[], httpx.Response]) -> None:
    """Launch again and again until it was on a VMM that waited; each time nothing that lasts may have changed."""
    before, generations = witness.lasting(), [witness.fresh()["generation"]]

    def taken() -> bool:
        found = steps(launch())
        assert witness.lasting() == before
        told = witness.fresh()
        assert told["hostname"] == witness.id
        assert told["generation"] not in generations
        generations.append(told["generation"])
        return "vmm" not in found

    until(taken, 120, "a launch on a VMM that waits")
    clock(witness)


def test_a_resume_takes_a_vmm_that_waits(server: RealServer, witness: Witness) -> None:
    def resumed() -> httpx.Response:
        witness.pause()
        return server.http.post(f"/sandboxes/{witness.id}/connect", json={"timeout": 600})

    on_a_prepared_vmm(witness, resumed)


def test_a_rollback_takes_one(server: RealServer, witness: Witness) -> None:
    snapshot = witness.api("snapshots", {}, 201)["snapshotID"]
    on_a_prepared_vmm(
        witness, lambda: server.http.post(f"/sandboxes/{witness.id}/rollback", json={"snapshotID": snapshot})
    )


def test_more_than_is_written_over_a_shared_image_is_an_image_of_its_own(server: RealServer) -> None:
    with_much = Witness.start(server, server.create(), memory=48 << 20)
    before = with_much.lasting()
    for _ in range(2):
        with_much.pause()
        with_much.connect()
        assert with_much.lasting() == before
    with_much.delete()


def test_the_server_ends_and_what_was_made_ahead_goes_on(server: RealServer, witness: Witness) -> None:
    """The sandbox runs on a VMM that was made before it wanted one, in a folder that is named after nobody."""
    before = witness.lasting()
    server.kill()
    server.start()
    assert witness.lasting() == before
    server.stop()
    server.start()
    assert witness.lasting() == before
