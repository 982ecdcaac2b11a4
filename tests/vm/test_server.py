"""The whole server with real microVMs: its death and restart, the guests' deaths, full disks, networks, leaks."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import CommandExitException, NotEnoughSpaceException, Sandbox

from aenv.vmm.process import find
from disks import stopped
from real_server import NOTHING, RealServer, needs_node, real_server, until

sys.path.insert(0, str(Path(__file__).parent))
from netlab import DNS, HOST_SIDE, INTERNAL_WEB, INTERNET, WEB, World

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """ "The internet" of this module's sandboxes: a namespace on this machine, served by a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = World()
    made.zone["web.test"] = (60, [WEB])
    try:
        asyncio.run_coroutine_threadsafe(made.start(), loop).result(30)
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(made.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, world: World) -> Iterator[RealServer]:
    settings: dict[str, Any] = {
        "network_dns_upstream": DNS,
        "network_allow_internal": INTERNET,
        "orchestrator_on_timeout": "kill",
    }
    with real_server(tmp_path_factory.mktemp("home"), **settings) as made:
        yield made


class Fleet:
    """Running sandboxes that tests hand on to each other, since every boot takes seconds."""

    def __init__(self, server: RealServer) -> None:
        self.server = server
        self.idle: list[str] = []

    def take(self, count: int = 1) -> list[Sandbox]:
        taken, self.idle = self.idle[:count], self.idle[count:]
        new = [self.server.create() for _ in range(count - len(taken))]
        return [*(self.server.connect(sandbox_id) for sandbox_id in taken), *new]

    def put(self, *sandboxes: Sandbox) -> None:
        """Only what is as good as new."""
        self.idle += [sandbox.sandbox_id for sandbox in sandboxes]

    @contextlib.contextmanager
    def borrow(self, count: int = 1) -> Iterator[list[Sandbox]]:
        taken = self.take(count)
        yield taken
        self.put(*taken)


@pytest.fixture(scope="module")
def fleet(server: RealServer) -> Fleet:
    return Fleet(server)


def test_concurrent_creates(server: RealServer, fleet: Fleet) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda i: server.create(envs={"NUMBER": str(i)}), range(8)))
        said = list(threads.map(lambda s: s.commands.run("echo $NUMBER; hostname").stdout.split(), made))
    assert said == [[str(i), sandbox.sandbox_id] for i, sandbox in enumerate(made)]
    assert server.ids() == {sandbox.sandbox_id for sandbox in made}
    tokens = {sandbox._envd_access_token for sandbox in made}
    assert len(tokens) == 8
    fleet.put(*made)


@contextlib.contextmanager
def creating(server: RealServer) -> Iterator[tuple[str, "Future[httpx.Response]"]]:
    """A create under way, for as long as its VMM is held still; the sandbox's id, and its answer to be."""
    before = {found.handle.pid for found in find(server.home)}
    with ThreadPoolExecutor(1) as threads:
        for _ in range(20):  # it may be too quick for us
            future = threads.submit(server.http.post, "/v2/sandboxes", json={"templateID": "base"})
            while not future.done():
                for new in [found for found in find(server.home) if found.handle.pid not in before]:
                    sandbox_id = new.sandbox_id.partition(".")[0]
                    with stopped(new.handle.pid):
                        if sandbox_id not in server.ids():
                            yield sandbox_id, future
                            return
            server.http.delete(f"/sandboxes/{future.result().json()['sandboxID']}")
    pytest.fail("no create was caught under way")


class TestRestart:
    def test_sandboxes_outlive_a_killed_server(self, server: RealServer, fleet: Fleet) -> None:
        one, two, short = fleet.take(3)
        others = server.ids()
        pids = {}
        for sandbox in (one, two):
            sandbox.files.write("before.txt", f"written in {sandbox.sandbox_id}")
            pids[sandbox.sandbox_id] = sandbox.commands.run("exec sleep 1000", background=True, timeout=0).pid
        tokens = [sandbox._envd_access_token for sandbox in (one, two)]
        ends = [server.http.get(f"/sandboxes/{sandbox.sandbox_id}").json()["endAt"] for sandbox in (one, two)]
        vmms = [server.vmm_pid(sandbox.sandbox_id) for sandbox in (one, two)]
        short.set_timeout(2)
        server.kill()
        server.start()

        until(lambda: server.ids() == others - {short.sandbox_id}, 10, "the end of the one whose time was over")
        assert "reason timeout" in server.why_ended(short.sandbox_id)
        assert [server.vmm_pid(sandbox.sandbox_id) for sandbox in (one, two)] == vmms
        again = [server.connect(sandbox.sandbox_id) for sandbox in (one, two)]
        assert [sandbox._envd_access_token for sandbox in again] == tokens
        assert [server.http.get(f"/sandboxes/{sandbox.sandbox_id}").json()["endAt"] for sandbox in again] == ends
        for sandbox in again:
            assert sandbox.files.read("before.txt") == f"written in {sandbox.sandbox_id}"
            assert sandbox.commands.kill(pids[sandbox.sandbox_id])  # it still ran
        # TTLs go on being enforced by the new server, and its deletes release everything.
        again[0].set_timeout(1)
        assert "reason timeout" in server.why_ended(one.sandbox_id)
        until(lambda: one.sandbox_id not in server.leftovers()["folders"], what="its folder's removal")
        fleet.put(two)

    def test_sandboxes_outlive_a_graceful_stop(self, server: RealServer, fleet: Fleet) -> None:
        with fleet.borrow(2) as sandboxes:
            for sandbox in sandboxes:
                sandbox.files.write("stop.txt", sandbox.sandbox_id)
            before = server.ids()
            server.stop()
            assert len(server.slots()["namespaces"]) == len(before)  # the warm pool is gone, theirs are not
            server.start()
            assert server.ids() == before
            for sandbox in sandboxes:
                assert server.connect(sandbox.sandbox_id).files.read("stop.txt") == sandbox.sandbox_id

    def test_a_stop_undoes_a_create_under_way(self, server: RealServer) -> None:
        before = server.leftovers()
        with creating(server) as (_, future):
            server.stop()
            assert server.leftovers() == before
            answer = future.result()
            assert answer.status_code == answer.json()["code"] == 503
        server.start()
        assert server.ids() == set(before["vmms"])


class TestDeaths:
    def test_a_killed_vmm_ends_its_sandbox_only(self, server: RealServer, fleet: Fleet) -> None:
        (victim,) = fleet.take()
        stream = victim.commands.run("sleep 100", background=True)
        with fleet.borrow() as (other,):
            os.kill(server.vmm_pid(victim.sandbox_id), signal.SIGKILL)
            assert "reason vmm_died" in server.why_ended(victim.sandbox_id)
            with pytest.raises(Exception, match=r"(?i)closed|reset|killed|incomplete|end of life"):
                stream.wait()  # it breaks: a clean end would look like success
            assert not victim.is_running()
            assert other.commands.run("echo fine").stdout == "fine\n"

    @pytest.mark.parametrize(
        "command",
        [
            "kill -TERM 1",  # its daemon's orderly way to power off
            "python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x01234567)'",
            "echo c > /proc/sysrq-trigger",
        ],
        ids=["poweroff", "reboot", "panic"],
    )
    def test_a_guest_that_ends_is_an_ended_sandbox(self, server: RealServer, fleet: Fleet, command: str) -> None:
        (sandbox,) = fleet.take()
        sandbox.commands.run(command, background=True, user="root")
        assert "reason vmm_died" in server.why_ended(sandbox.sandbox_id)
        until(lambda: sandbox.sandbox_id not in server.leftovers()["folders"], what="its folder's removal")
        assert sandbox.sandbox_id not in server.leftovers()["vmms"]

    def test_the_daemon_cannot_be_killed_from_inside(self, server: RealServer, fleet: Fleet) -> None:
        with fleet.borrow() as (sandbox,):
            script = "for s in KILL STOP SEGV ABRT HUP USR1; do kill -$s 1; done; echo sent"
            assert sandbox.commands.run(script, user="root").stdout == "sent\n"
            assert sandbox.commands.run("cat /proc/1/comm").stdout == "init\n"
            assert sandbox.is_running()


class TestFullDisks:
    def test_a_guest_fills_its_own_disk(self, server: RealServer, fleet: Fleet) -> None:
        with fleet.borrow() as (sandbox,):
            free = "df --output=avail -B1 /home/user | tail -n 1"
            sandbox.commands.run(f"fallocate -l $(( $({free}) - (4 << 20) )) most", user="root", timeout=120)
            with pytest.raises(CommandExitException, match="No space left on device"):
                sandbox.commands.run("dd if=/dev/zero of=rest bs=1M count=8 status=none")
            with pytest.raises(NotEnoughSpaceException):
                sandbox.files.write("upload", bytes(8 << 20))
            assert not sandbox.files.exists("upload")
            sandbox.commands.run("rm most rest", user="root")
            sandbox.files.write("upload", bytes(8 << 20))
            sandbox.files.remove("upload")

    def test_the_hosts_disk_is_full(self, server: RealServer, tmp_path: Path) -> None:
        templates = sum(path.stat().st_blocks * 512 for path in (server.home / "templates").rglob("*"))
        size = templates + (48 << 20)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "tmpfs", tmp_path], check=True)
        try:
            with real_server(tmp_path) as small:
                sandbox = small.create()
                with pytest.raises(CommandExitException, match=r"(?i)input/output error|read-only"):
                    sandbox.commands.run("dd if=/dev/zero of=big bs=1M count=100 conv=fsync status=none", timeout=120)
                fill(tmp_path / "filler")

                refused = small.http.post("/v2/sandboxes", json={"templateID": "base"})
                assert refused.status_code == 507, refused.text
                assert refused.json()["code"] == 507
                assert "space" in refused.json()["message"]
                assert small.ids() == {sandbox.sandbox_id}
                assert small.leftovers()["folders"] == small.leftovers()["vmms"] == [sandbox.sandbox_id]
                assert sandbox.is_running()

                assert sandbox.kill()
                assert small.leftovers() == NOTHING
                (tmp_path / "filler").unlink()
                after = small.create()
                assert after.commands.run("echo works").stdout == "works\n"
        finally:
            subprocess.run(["umount", "--lazy", tmp_path], check=True)


def fill(path: Path) -> None:
    """To the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


class TestNetwork:
    def test_internet_access_is_as_said(self, server: RealServer, fleet: Fleet) -> None:
        with fleet.borrow() as (open_one,):
            assert resolves(open_one, "web.test") == WEB
            assert reachable(open_one, [(WEB, 80), (INTERNAL_WEB, 80)]) == [(WEB, 80)]
        closed = server.create(allow_internet_access=False)
        assert resolves(closed, "web.test") == ""
        assert reachable(closed, [(WEB, 80), (DNS, 53), (INTERNAL_WEB, 80)]) == []
        closed.kill()

    def test_neither_the_host_nor_other_sandboxes_are_reached(self, server: RealServer, fleet: Fleet) -> None:
        with fleet.borrow(2) as (one, two), socket.create_server(("0.0.0.0", 0)) as on_host:
            two.commands.run("exec python3 -m http.server 8000", background=True, timeout=0, cwd="/tmp")
            indexes = [server.layout.index_of_netns(name) for name in server.slots()["namespaces"]]
            slots = [str(server.layout.slot_address(index)) for index in indexes if index is not None]
            served = until(lambda: [address for address in slots if listens(address, 8000)], what="the guest's server")
            assert len(served) == 1  # from the host it is reached
            hosts = ["169.254.0.22", HOST_SIDE, *(str(server.layout.host_address(i)) for i in indexes if i is not None)]
            port, api = on_host.getsockname()[1], int(server.url.rsplit(":", 1)[1])
            tried = [(served[0], 8000), *((host, p) for host in hosts for p in (port, api))]
            assert reachable(one, tried) == []
            two.commands.run("pkill -f http.server")


def reachable(sandbox: Sandbox, targets: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those to which a TCP connection can be made from inside, and on which a byte comes back."""
    script = "\n".join(
        f"(timeout 3 bash -c 'exec 3<>/dev/tcp/{address}/{port} && printf \"\\n\" >&3 && echo {address} {port}') &"
        for address, port in targets
    )
    lines = sandbox.commands.run(f"{{ {script}\nwait; }} 2>/dev/null").stdout.splitlines()
    return [(address, int(port)) for address, port in sorted(line.split() for line in lines)]


def resolves(sandbox: Sandbox, name: str) -> str:
    words = sandbox.commands.run(f"timeout 10 getent ahostsv4 {name} || true").stdout.split()
    return words[0] if words else ""


def listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True


class TestChurn:
    @pytest.mark.timeout(600)
    def test_create_and_delete_leave_nothing(self, server: RealServer) -> None:
        before, slots = server.leftovers(), len(server.slots()["namespaces"])

        def cycle(_: int) -> None:
            created = server.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 120})
            assert created.status_code == 201, created.text
            sandbox_id = created.json()["sandboxID"]
            inside = server.http.get("/health", headers={"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"})
            assert inside.status_code == 204
            assert server.http.delete(f"/sandboxes/{sandbox_id}").status_code == 204
            assert sandbox_id not in server.ids()

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(cycle, range(6)))  # the pools of threads and connections have their size now
            descriptors, resident = server.descriptors(), server.resident()
            list(threads.map(cycle, range(24)))
        assert server.leftovers() == before
        until(lambda: len(server.slots()["namespaces"]) <= slots, what="the network slots' removal")
        assert len(server.slots()["links"]) == len(server.slots()["namespaces"])
        until(lambda: server.descriptors() <= descriptors, what="the closing of descriptors")
        assert server.resident() <= resident + 8

    def test_a_delete_during_the_creation(self, server: RealServer) -> None:
        before = server.leftovers()
        with creating(server) as (sandbox_id, future):
            assert server.http.delete(f"/sandboxes/{sandbox_id}").status_code == 204
            answer = future.result()
        assert answer.status_code == answer.json()["code"] == 409
        assert server.leftovers() == before
        assert "reason killed" in server.why_ended(sandbox_id)

    def test_a_ttl_ends_a_sandbox_within_a_second(self, server: RealServer, fleet: Fleet) -> None:
        (sandbox,) = fleet.take()
        sandbox.set_timeout(2)
        end = datetime.fromisoformat(server.http.get(f"/sandboxes/{sandbox.sandbox_id}").json()["endAt"])
        message = server.why_ended(sandbox.sandbox_id)
        ended = datetime.fromisoformat(message.split("it ended at ")[1].split(",")[0])
        assert -0.01 <= (ended - end).total_seconds() < 1  # timers and messages have whole milliseconds
        assert "reason timeout" in message
        assert not sandbox.is_running()
