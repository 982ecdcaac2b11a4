"""Copies of one guest must not be taken for each other: creates of one template, children of a fork, a resumed sandbox.

Every copy begins with the same memory, so whatever the node does not make its own at a launch is the same in all of
them: the kernel's random numbers, the clock of the moment it was saved at, the hostname, the ports of connections.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2b import Sandbox
from witness import Witness

from real_server import RealServer, needs_node, real_server

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(240)]

CLOCK = 0.05
"""Seconds that a guest's clock may be off at its first command."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def source(server: RealServer) -> Iterator[Witness]:
    sandbox = server.create()
    yield Witness.start(server, sandbox)
    sandbox.kill()


@pytest.fixture(scope="module")
def family(source: Witness) -> Iterator[list[Witness]]:
    """A sandbox and three copies of it, which nobody has asked anything."""
    source.lasting()  # the kernel makes up its boot id when it is first read
    children = source.fork(3)
    yield [source, *children]
    for child in children:
        child.delete()


def test_children_of_a_fork_share_what_lasts(family: list[Witness]) -> None:
    first, *others = [one.lasting() for one in family]
    assert others == [first] * 3


def test_children_of_a_fork_share_nothing_that_is_to_be_their_own(family: list[Witness]) -> None:
    """A process that was running before the fork sees it too."""
    told = [one.fresh() for one in family]
    for what in told[0]:
        assert len({str(one[what]) for one in told}) == len(family), what
    for one, said in zip(family, told, strict=True):
        assert said["hostname"] == said["/etc/hostname"] == one.id


def test_tokens_are_their_own(server: RealServer, family: list[Witness]) -> None:
    tokens = {one.id: one.detail()["envdAccessToken"] for one in family}
    assert len(set(tokens.values())) == len(family)
    for one in family:
        for other, token in tokens.items():
            headers = {"E2b-Sandbox-Id": one.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}
            answer = server.http.get("/envs", headers=headers)
            assert (answer.status_code == 200) == (other == one.id), (one.id, other, answer.text)


FRESH = (
    "cat /proc/sys/kernel/random/uuid; head -c 32 /dev/urandom | base64; hostname; cat /run/aenv/generation; echo; "
    "python3 -c 'import os, secrets, uuid; print(os.urandom(32).hex(), secrets.token_hex(32), uuid.uuid4())'; "
    'python3 -c \'import socket; s = socket.socket(); s.setblocking(False); s.connect_ex(("192.0.2.1", 443)); '
    "print(s.getsockname()[1])'; mktemp"
)


def test_creates_of_one_template_share_nothing_that_is_to_be_their_own(server: RealServer) -> None:
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: server.create(), range(3)))
        told = list(threads.map(lambda sandbox: sandbox.commands.run(FRESH).stdout.split(), made))
    boots = {sandbox.commands.run("stat -c %.9Y /dev/shm").stdout for sandbox in made}
    assert len(boots) == 1  # one and the same boot made it: what differs does so by our doing
    for each in zip(*told, strict=True):
        assert len(set(each)) == len(made), told
    assert [said[2] for said in told] == [sandbox.sandbox_id for sandbox in made]
    for sandbox in made:
        sandbox.kill()


def check_clock(witness: Witness) -> None:
    """The first answer must allow for a right clock; more of them, which are quicker, say it to the millisecond."""
    bounds = [witness.offset() for _ in range(10)]
    lowest, highest = max(low for low, _ in bounds), min(high for _, high in bounds)
    assert bounds[0][0] <= CLOCK, bounds
    assert bounds[0][1] >= -CLOCK, bounds
    assert lowest <= CLOCK, bounds
    assert highest >= -CLOCK, bounds


def pass_time(seconds: float) -> None:
    """Let the host's clock move on: what a guest that goes on from where it was would be late by."""
    time.sleep(seconds)


def test_the_clock_after_a_fork_and_a_create(server: RealServer, source: Witness) -> None:
    sandbox = server.create()  # the template was saved long before
    check_clock(Witness.start(server, sandbox))
    snapshot = source.api("snapshots", {}, 201)["snapshotID"]
    pass_time(1)
    later = Sandbox.create(snapshot, timeout=60, **server.sdk)
    check_clock(source.of(later.sandbox_id))
    for child in source.fork(2):
        check_clock(child)
        child.delete()
    check_clock(source)
    assert later.kill()
    assert sandbox.kill()


def test_the_clock_random_numbers_and_ports_after_a_pause(source: Witness) -> None:
    lasting, fresh = source.lasting(), source.fresh()
    source.pause()
    pass_time(2)
    source.connect()
    check_clock(source)
    assert source.lasting() == lasting
    again = source.fresh()
    for what in again:
        if "hostname" in what:
            assert again[what] == fresh[what]
        else:
            assert again[what] != fresh[what], what


def test_a_launch_of_one_state_twice_differs(source: Witness) -> None:
    """A rollback repeats the memory, and so what the kernel would have drawn next; it must not repeat the draw."""
    snapshot = source.api("snapshots", {}, 201)["snapshotID"]
    told = []
    for _ in range(2):
        source.api("rollback", {"snapshotID": snapshot})
        told.append(source.fresh())
    for what in told[0]:
        assert (told[0][what] == told[1][what]) == ("hostname" in what), what
