"""The real network against namespaces of our own: what a guest can and cannot reach, and that nothing is left."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import dns.rcode
import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from aenv.config import NetworkSettings, Settings, VmmSettings
from aenv.errors import BadRequest, NetworkError, TooManyRequests
from aenv.network import namespace, nft, rules
from aenv.network.layout import NETNS_DIRECTORY, Layout
from aenv.network.policy import compile_policy
from aenv.network.pool import SlotPool
from aenv.network.protocol import EgressPolicy, Slot
from aenv.network.slots import IndexTaken, Slots

sys.path.insert(0, str(Path(__file__).parent))
from netlab import DNS, HOST_SIDE, INTERNAL_WEB, INTERNET, OTHER_WEB, WEB, Guest, World, inside

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

ALL = "0.0.0.0/0"
CIDR = "10.214.0.0/20"


def settings(home: Path, **network: object) -> Settings:
    defaults = NetworkSettings(cidr=CIDR, pool_size=1, max_slots=16, dns_upstream=(DNS,), allow_internal=(INTERNET,))
    return Settings(home=home, network=replace(defaults, **network))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    try:
        await made.start()
        yield made
    finally:
        await made.aclose()


@contextlib.asynccontextmanager
async def running(configured: Settings, **in_use: EgressPolicy) -> AsyncIterator[SlotPool]:
    pool = SlotPool(configured)
    try:
        await pool.start({int(index): policy for index, policy in in_use.items()})
        yield pool
    finally:
        for lease in list(pool._used.values()):
            await pool.release(lease.slot)
        await pool.aclose()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[SlotPool]:
    async with running(settings(tmp_path)) as made:
        yield made


@contextlib.asynccontextmanager
async def guest_in(slot: Slot, **options: str) -> AsyncIterator[Guest]:
    guest = await asyncio.to_thread(Guest, slot, **options)
    try:
        yield guest
    finally:
        await asyncio.to_thread(guest.close)


async def exchange(sock: socket.socket) -> bytes:
    """Send a byte to an echo server and wait for what comes."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(3):
        await loop.sock_sendall(sock, b"x")
        return await loop.sock_recv(sock, 1)


async def answers(sock: socket.socket) -> bool:
    try:
        return await exchange(sock) == b"x"
    except (OSError, TimeoutError):
        return False


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


Footprint = tuple[list[str], list[str], bool]


async def footprint(layout: Layout) -> Footprint:
    """Namespaces, host links and the table of a home."""
    return await asyncio.to_thread(_footprint, layout)


def _footprint(layout: Layout) -> Footprint:
    with IPRoute() as route:
        links = [link.get("ifname") for link in route.get_links()]
    return (
        sorted(path.name for path in NETNS_DIRECTORY.glob(f"{layout.netns_prefix}*")),
        sorted(name for name in links if name.startswith(layout.link_prefix)),
        layout.table in nft.tables(),
    )


async def test_host_reaches_the_guest_and_the_guest_the_world(world: World, pool: SlotPool) -> None:
    slot = await pool.acquire(EgressPolicy())
    async with guest_in(slot) as guest:
        server = guest.tcp()
        server.bind(("0.0.0.0", 49983))
        server.listen()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(slot.address, 49983)
            accepted, peer = await loop.sock_accept(server)
            await loop.sock_sendall(accepted, b"hello")
            assert await reader.readexactly(5) == b"hello"
        assert peer[0] == "169.254.0.22"  # the host is the gateway, in every slot
        writer.transport.abort()
        accepted.close()
        server.close()
        with await guest.connect(WEB, 80) as sock:
            assert await answers(sock)


async def test_internal_ranges_host_and_metadata_are_denied(world: World, pool: SlotPool) -> None:
    slot = await pool.acquire(EgressPolicy(allow_out=(ALL,)))
    async with guest_in(slot) as guest:
        on_host = socket.create_server(("0.0.0.0", 0))
        port = on_host.getsockname()[1]
        host_side = str(pool._layout.host_address(slot.index))
        for address in (HOST_SIDE, host_side, "169.254.0.22", "127.0.0.1", "192.0.2.2"):
            assert not await guest.reaches(address, port), address
        for address in (INTERNAL_WEB, "169.254.169.254", "100.64.0.1"):
            with pytest.raises(ConnectionRefusedError):  # told at once, not left waiting
                await guest.connect(address, 80)
        assert await guest.reaches(WEB, 80)
        on_host.close()


async def test_allow_internal_opens_a_range_but_never_the_host(world: World, tmp_path: Path) -> None:
    async with running(settings(tmp_path, allow_internal=("10.0.0.0/8", INTERNET))) as pool:
        first, second = await pool.acquire(EgressPolicy()), await pool.acquire(EgressPolicy())
        async with guest_in(first) as guest, guest_in(second) as neighbour:
            on_host = socket.create_server(("0.0.0.0", 0))
            served = neighbour.tcp()
            served.bind(("0.0.0.0", 80))
            served.listen()
            assert await guest.reaches(INTERNAL_WEB, 80)
            assert not await guest.reaches(second.address, 80)
            for index in (first.index, second.index):
                assert not await guest.reaches(str(pool._layout.host_address(index)), on_host.getsockname()[1])
            with contextlib.closing(socket.create_connection((second.address, 80), timeout=3)):
                pass  # it does listen: the host reaches it
            served.close()
            on_host.close()


async def test_other_sandboxes_are_denied_across_homes(world: World, tmp_path: Path) -> None:
    async with running(settings(tmp_path / "a", allow_internal=("10.0.0.0/8",))) as one:
        async with running(settings(tmp_path / "b")) as other:
            first, second = await one.acquire(EgressPolicy()), await other.acquire(EgressPolicy())
            assert first.address != second.address
            assert first.index != second.index  # users and marks are the index's
            async with guest_in(first) as guest, guest_in(second) as neighbour:
                served = neighbour.tcp()
                served.bind(("0.0.0.0", 80))
                served.listen()
                assert not await guest.reaches(second.address, 80)
                with contextlib.closing(socket.create_connection((second.address, 80), timeout=3)):
                    pass
                served.close()
        async with guest_in(first) as guest:  # the other home's end took nothing of this one
            assert not await guest.reaches(INTERNAL_WEB, 81)
            assert await guest.reaches(INTERNAL_WEB, 80)


class Call:
    """A connection of the host to a server in the guest, as the proxy has them."""

    def __init__(self, guest: Guest, slot: Slot) -> None:
        self._server, self._address = guest.tcp(), slot.address
        self._server.bind(("0.0.0.0", 49983))
        self._server.listen()

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            self._reader, self._writer = await asyncio.open_connection(self._address, 49983)
            self._accepted, _ = await loop.sock_accept(self._server)

    async def guest_speaks(self) -> None:
        """Raises TimeoutError when what the guest sends first does not arrive."""
        async with asyncio.timeout(5):
            await asyncio.get_running_loop().sock_sendall(self._accepted, b"x")
            assert await self._reader.readexactly(1) == b"x"

    def close(self) -> None:
        self._writer.transport.abort()
        self._accepted.close()
        self._server.close()


async def test_homes_side_by_side_leave_each_others_connections_alone(world: World, tmp_path: Path) -> None:
    """Their ranges of addresses and users differ, so their indexes are the same."""
    beside = replace(settings(tmp_path / "b", cidr="10.221.0.0/24", pool_size=0), vmm=VmmSettings(uid_base=3_000_000))
    async with running(settings(tmp_path / "a", cidr="10.220.0.0/24", pool_size=0)) as one, running(beside) as other:
        indexes = set()
        kept = await one.acquire(EgressPolicy())
        async with guest_in(kept) as guest:
            call = Call(guest, kept)
            await call.connect()
            with await guest.connect(WEB, 80) as outwards:
                for _ in range(2):
                    taken = [await other.acquire(EgressPolicy()) for _ in range(10)]
                    indexes |= {slot.index for slot in taken}
                    for slot in taken:
                        await other.release(slot)
                    await call.guest_speaks()
                    assert await answers(outwards)
            call.close()
        assert kept.index in indexes


async def test_a_user_is_one_slot_s_among_all_homes(tmp_path: Path) -> None:
    """Two indexes in each range, so two users for both homes: who finds none is told, and gets one when it is free."""
    async with (
        running(settings(tmp_path / "a", cidr="10.220.0.0/29", pool_size=0)) as one,
        running(settings(tmp_path / "b", cidr="10.221.0.0/29", pool_size=0)) as other,
    ):
        first, second = await one.acquire(EgressPolicy()), await other.acquire(EgressPolicy())
        assert {first.index, second.index} == {0, 1}
        for pool in (one, other):
            with pytest.raises(NetworkError, match=r"another home holds .* user"):
                await pool.acquire(EgressPolicy())
        await other.release(second)
        assert (await one.acquire(EgressPolicy())).index == second.index


async def test_a_late_removal_spares_the_next_home_at_the_address(world: World, tmp_path: Path) -> None:
    """Both homes have the same range. A slot that never got its address, or lost it, says nothing of who has it now."""
    async with running(settings(tmp_path / "a", pool_size=0)) as one:
        slot = await one.acquire(EgressPolicy())
        other = Slots(Layout.of(settings(tmp_path / "b")), ())
        await asyncio.to_thread(other.prepare, frozenset())
        async with guest_in(slot) as guest:
            with await guest.connect(WEB, 80) as outwards:
                with pytest.raises(IndexTaken):
                    await asyncio.to_thread(other.create, slot.index, compile_policy(EgressPolicy()))
                await asyncio.to_thread(other.remove, [slot.index])
                assert await answers(outwards)
        await asyncio.to_thread(other.remove_table)


async def first_heard(outer: socket.socket, slot: Slot) -> bytes:
    """An honest guest sends a datagram; which is the first that the world gets?"""
    loop = asyncio.get_running_loop()
    async with guest_in(slot) as guest:
        with guest.udp() as honest:
            honest.connect((WEB, 9999))
            async with asyncio.timeout(5):
                await loop.sock_sendall(honest, b"honest")
                return await loop.sock_recv(outer, 100)


async def test_a_spoofed_card_or_source_sends_nothing(world: World, pool: SlotPool) -> None:
    slot, loop = await pool.acquire(EgressPolicy()), asyncio.get_running_loop()
    with world.udp(WEB, 9999) as outer:
        for options in ({"mac": "02:00:00:00:00:01"}, {"address": "169.254.0.20"}):
            async with guest_in(slot, **options) as guest:
                with guest.udp() as spoofed:
                    spoofed.connect((WEB, 9999))
                    await loop.sock_sendall(spoofed, b"spoofed")
        assert await first_heard(outer, slot) == b"honest"


async def test_a_vmm_that_was_taken_over_sends_nothing(world: World, pool: SlotPool) -> None:
    slot = await pool.acquire(EgressPolicy())
    # What it may do it does from the slot's own namespace, with the slot's address.
    with world.udp(WEB, 9999) as outer, inside(slot.netns, lambda: socket.socket(type=socket.SOCK_DGRAM)) as vmm:
        with contextlib.suppress(PermissionError):  # the kernel tells it so
            vmm.connect((WEB, 9999))
            await asyncio.get_running_loop().sock_sendall(vmm, b"from the VMM")
        assert await first_heard(outer, slot) == b"honest"


async def test_no_internet_means_no_dns_either(world: World, pool: SlotPool) -> None:
    slot = await pool.acquire(EgressPolicy(internet=False))
    world.zone["secret.example.com"] = (60, [WEB])
    async with guest_in(slot) as guest:
        with pytest.raises(ConnectionRefusedError):
            await guest.connect(WEB, 80)
        assert (await guest.resolve("secret.example.com")).rcode() == dns.rcode.REFUSED
        assert world.asked == []


async def test_addresses_and_ranges(world: World, pool: SlotPool) -> None:
    slot = await pool.acquire(EgressPolicy(internet=False, allow_out=(WEB,)))
    async with guest_in(slot) as guest:
        assert await guest.reaches(WEB, 80)
        assert not await guest.reaches(OTHER_WEB, 80)
        await pool.apply(slot, EgressPolicy(deny_out=(INTERNET,), allow_out=(OTHER_WEB,)))  # allow beats deny
        assert not await guest.reaches(WEB, 80)
        assert await guest.reaches(OTHER_WEB, 80)
        await pool.apply(slot, EgressPolicy())
        assert await guest.reaches(WEB, 80)


async def test_domain_opens_only_its_addresses(world: World, pool: SlotPool) -> None:
    world.zone["api.example.com"] = (30, [WEB, INTERNAL_WEB])
    world.zone["evil.example.org"] = (30, [OTHER_WEB])
    slot = await pool.acquire(EgressPolicy(allow_out=("*.example.com",), deny_out=(ALL,)))
    async with guest_in(slot) as guest:
        assert not await guest.reaches(WEB, 80)  # not resolved yet: an address literal slips past no list
        reply = await guest.resolve("api.example.com")
        assert [record.address for record in reply.answer[0]] == [WEB]  # the internal one is rebinding
        assert await guest.reaches(WEB, 80)
        assert not await guest.reaches(OTHER_WEB, 80)
        assert (await guest.resolve("evil.example.org")).rcode() == dns.rcode.REFUSED
        assert world.asked == ["api.example.com"]
        assert (await guest.resolve("api.example.com", "AAAA")).answer == []
        assert (await guest.resolve("gone.example.com")).rcode() == dns.rcode.NXDOMAIN


async def test_an_address_moves_from_one_name_to_another(world: World, pool: SlotPool) -> None:
    world.zone["a.example.com"] = world.zone["b.example.com"] = (30, [WEB])
    both = EgressPolicy(allow_out=("a.example.com", "b.example.com"), deny_out=(ALL,))
    slot = await pool.acquire(both)
    async with guest_in(slot) as guest:
        await guest.resolve("a.example.com")
        await guest.resolve("b.example.com")
        await pool.apply(slot, replace(both, allow_out=("b.example.com",)))
        assert await guest.reaches(WEB, 80)
        await pool.apply(slot, replace(both, allow_out=("c.example.com",)))
        assert not await guest.reaches(WEB, 80)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EgressPolicy(), EgressPolicy(internet=False)),
        (EgressPolicy(), EgressPolicy(deny_out=(WEB,))),
        (EgressPolicy(internet=False, allow_out=(WEB,)), EgressPolicy(internet=False, allow_out=(OTHER_WEB,))),
        (
            EgressPolicy(deny_out=(ALL,), allow_out=("api.example.com",)),
            EgressPolicy(deny_out=(ALL,), allow_out=("other.example.com",)),
        ),
    ],
    ids=["internet", "deny", "allow", "domain"],
)
async def test_a_live_change_ends_open_connections(
    world: World, pool: SlotPool, before: EgressPolicy, after: EgressPolicy
) -> None:
    world.zone["api.example.com"] = (30, [WEB])
    slot = await pool.acquire(before)
    async with guest_in(slot) as guest:
        if before.allow_out == ("api.example.com",):
            await guest.resolve("api.example.com")
        with await guest.connect(WEB, 80) as sock:
            assert await answers(sock)
            await pool.apply(slot, replace(before, allow_out=(*before.allow_out, "198.18.255.255")))
            assert await answers(sock)  # a change that still allows it leaves it alone
            await pool.apply(slot, after)
            with pytest.raises(ConnectionResetError):
                await exchange(sock)


async def test_a_live_change_also_stops_what_streams_in(world: World, pool: SlotPool) -> None:
    slot, loop = await pool.acquire(EgressPolicy()), asyncio.get_running_loop()
    async with guest_in(slot) as guest:
        with guest.udp() as inner, world.udp(WEB, 9999) as outer:
            inner.connect((WEB, 9999))
            async with asyncio.timeout(5):
                await loop.sock_sendall(inner, b"subscribe")
                _, peer = await loop.sock_recvfrom(outer, 100)
                await loop.sock_sendto(outer, b"one", peer)
                assert await loop.sock_recv(inner, 100) == b"one"
            await pool.apply(slot, EgressPolicy(deny_out=(WEB,)))
            await loop.sock_sendto(outer, b"two", peer)
            await pool.apply(slot, EgressPolicy())
            await loop.sock_sendto(outer, b"three", peer)
            async with asyncio.timeout(5):
                assert await loop.sock_recv(inner, 100) == b"three"


async def test_connections_are_forgotten_with_the_slot(world: World, pool: SlotPool) -> None:
    def tracked() -> int:
        with NFCTSocket() as conntrack:
            flows = conntrack.dump(tuple_orig=NFCTAttrTuple(saddr=slot.address))
            return len(list(flows))

    slot = await pool.acquire(EgressPolicy())
    async with guest_in(slot) as guest:
        with await guest.connect(WEB, 80) as sock:
            assert await answers(sock)
            assert await asyncio.to_thread(tracked) == 1
            await pool.release(slot)
            assert await asyncio.to_thread(tracked) == 0


async def test_a_connection_outlives_the_address_s_time(world: World, pool: SlotPool) -> None:
    world.zone["api.example.com"] = (1, [WEB])
    slot = await pool.acquire(EgressPolicy(deny_out=(ALL,), allow_out=("api.example.com",)))
    async with guest_in(slot) as guest:
        await guest.resolve("api.example.com")
        with await guest.connect(WEB, 80) as sock:
            with namespace.inside(slot.netns):
                nft.apply([{"flush": {"map": {"family": "inet", "table": "aenv", "name": "names"}}}])
            assert not await guest.reaches(WEB, 80)
            assert await answers(sock)


async def test_dns_over_tcp_and_rate_bound(world: World, pool: SlotPool) -> None:
    world.zone["api.example.com"] = (30, [WEB])
    slot = await pool.acquire(EgressPolicy())
    async with guest_in(slot) as guest:
        import dns.message

        wire = dns.message.make_query("api.example.com", "A").to_wire()
        loop = asyncio.get_running_loop()
        with await guest.connect("169.254.0.22", 53) as sock:
            async with asyncio.timeout(5):
                await loop.sock_sendall(sock, len(wire).to_bytes(2) + wire)
                length = int.from_bytes(await loop.sock_recv(sock, 2))
                reply = dns.message.from_wire(await loop.sock_recv(sock, length))
            assert reply.answer[0][0].address == WEB
        before = len(world.asked)
        with guest.udp() as flood:
            for _ in range(2000):
                await loop.sock_sendto(flood, wire, ("169.254.0.22", 53))
        async with asyncio.timeout(20):
            while True:  # the budget fills again
                with contextlib.suppress(TimeoutError):
                    await guest.resolve("after.example.com")
                    break
        assert "after.example.com" in world.asked
        assert len(world.asked) - before < 500


async def test_a_slot_that_is_given_back_knows_nothing(world: World, pool: SlotPool) -> None:
    slot = await pool.acquire(EgressPolicy(internet=False))
    async with guest_in(slot):
        await pool.release(slot)
        await pool.release(slot)  # idempotent
    assert not slot.netns.exists() or pool._idle
    with pytest.raises(NetworkError):
        await pool.apply(slot, EgressPolicy())
    again = await pool.acquire(EgressPolicy())
    await pool.release(slot)  # a late second release must not hit the next user
    async with guest_in(again) as guest:
        assert await guest.reaches(WEB, 80)


async def test_full_and_bad_policies(pool: SlotPool) -> None:
    with pytest.raises(BadRequest):
        await pool.acquire(EgressPolicy(allow_out=("example.com",)))
    for _ in range(16):
        await pool.acquire(EgressPolicy())
    with pytest.raises(TooManyRequests):
        await pool.acquire(EgressPolicy())


async def test_a_cancelled_acquire_leaks_nothing(tmp_path: Path) -> None:
    async with running(settings(tmp_path, pool_size=0, max_slots=2)) as pool:
        for _ in range(6):
            task = asyncio.create_task(pool.acquire(EgressPolicy(internet=False)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert [await pool.acquire(EgressPolicy()) for _ in range(2)]
    assert await footprint(pool._layout) == ([], [], False)


async def test_500_cycles_leave_nothing(tmp_path: Path) -> None:
    before = descriptors()
    async with running(settings(tmp_path, pool_size=4)) as pool:

        async def cycle(times: int) -> None:
            for n in range(times):
                slot = await pool.acquire(EgressPolicy(internet=n % 2 == 0))
                await pool.release(slot)

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(cycle(100))
        assert descriptors() < before + 30
    assert await footprint(pool._layout) == ([], [], False)


KILLED = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_network_real import settings, EgressPolicy, SlotPool
async def main():
    pool = SlotPool(settings(Path(sys.argv[1]), pool_size=3))
    await pool.start({})
    slots = [await pool.acquire(EgressPolicy(internet=False)) for _ in range(3)]
    print(*(slot.index for slot in slots), flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""


async def test_after_kill_9_slots_are_adopted_or_removed(world: World, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    kept, *_ = (int(index) for index in done.stdout.split())
    layout = Layout.of(settings(tmp_path))
    assert len((await footprint(layout))[0]) >= 3
    async with running(settings(tmp_path, pool_size=0), **{str(kept): EgressPolicy(), "15": EgressPolicy()}) as pool:
        slot = pool.adopted(kept)
        with pytest.raises(NetworkError):
            pool.adopted(15)
        assert (await footprint(layout))[:2] == ([slot.netns.name], [layout.link(kept)])
        world.zone["api.example.com"] = (30, [WEB])
        async with guest_in(slot) as guest:
            assert await guest.reaches(WEB, 80)  # the policy given at start is in force, not the old one
            assert (await guest.resolve("api.example.com")).answer
    assert await footprint(layout) == ([], [], False)


async def test_half_made_slots_are_removed(tmp_path: Path) -> None:
    layout = Layout.of(settings(tmp_path))

    def die_half_way() -> None:
        layout.netns(3).touch()  # a name without a namespace: killed before the mount
        with IPRoute() as route:  # a link without a namespace: its name was removed, then the server died
            route.link("add", ifname=layout.link(4), kind="veth", peer={"ifname": f"{layout.link(4)[4:]}p"})

    await asyncio.to_thread(die_half_way)
    async with running(settings(tmp_path, pool_size=0)):
        assert (await footprint(layout))[:2] == ([], [])


async def test_a_slot_of_another_cidr_is_not_adopted(tmp_path: Path) -> None:
    first = SlotPool(settings(tmp_path))
    await first.start({})
    slot = await first.acquire(EgressPolicy())
    await first.aclose()
    moved = settings(tmp_path, cidr="10.216.0.0/24")
    async with running(moved, **{str(slot.index): EgressPolicy(), "5000": EgressPolicy()}) as pool:
        for index in (slot.index, 5000):
            with pytest.raises(NetworkError, match="adopted"):
                pool.adopted(index)
    assert await footprint(first._layout) == ([], [], False)


async def test_a_flushed_host_table_comes_back(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.network.pool.GUARD_SECONDS", 0.05)
    async with running(settings(tmp_path)) as pool:
        slot = await pool.acquire(EgressPolicy())
        await asyncio.to_thread(nft.apply, rules.drop_table(pool._layout.table))
        async with guest_in(slot) as guest, asyncio.timeout(10):
            while pool._layout.table not in await asyncio.to_thread(nft.tables):  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)
            while not await guest.reaches(WEB, 80):
                pass


async def test_aclose_keeps_slots_in_use(world: World, tmp_path: Path) -> None:
    first = SlotPool(settings(tmp_path))
    await first.start({})
    slot = await first.acquire(EgressPolicy())
    await first.aclose()
    async with guest_in(slot) as guest:
        assert await guest.reaches(WEB, 80)
        async with running(settings(tmp_path), **{str(slot.index): EgressPolicy()}) as second:
            assert second.adopted(slot.index).address == slot.address
            assert await guest.reaches(WEB, 80)
    assert await footprint(first._layout) == ([], [], False)


async def test_the_tap_opens_for_its_user_alone(pool: SlotPool) -> None:
    slot = await pool.acquire(EgressPolicy())
    # The device itself may be root's alone (no udev): a VMM gets it opened, and attaches as its own user.
    program = (
        "import fcntl, os, struct, sys;"
        "tun = os.open('/dev/net/tun', os.O_RDWR);"
        "os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]));"
        "fcntl.ioctl(tun, 0x400454CA, struct.pack('16sH22x', b'tap0', 0x5002))"
    )
    for uid, works in ((pool._layout.uid(slot.index), True), (pool._layout.uid(slot.index + 1), False)):
        command = ["nsenter", f"--net={slot.netns}", sys.executable, "-c", program, str(uid)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
        assert (done.returncode == 0) == works, done.stderr
        assert works or "PermissionError" in done.stderr
