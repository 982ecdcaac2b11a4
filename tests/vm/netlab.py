"""A small world of network namespaces for the tests of the real network. Nothing here touches a public address.

guest namespace (stands in for a microVM: opens the slot's tap as a VMM does)
  -> slot -> host -> world namespace (198.18.n.0/24 as "the internet", 10.99.n.0/24 as somebody's internal network)
"""

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from pyroute2 import IPRoute

from aenv.network import namespace
from aenv.network.layout import GUEST_MAC, NETNS_DIRECTORY, TAP
from aenv.network.protocol import GATEWAY_ADDRESS, GUEST_ADDRESS, Slot

N = os.getpid() % 250
INTERNET = f"198.18.{N}.0/24"
HOST_SIDE, WEB, OTHER_WEB, DNS = (f"198.18.{N}.{i}" for i in (1, 2, 3, 53))
INTERNAL_WEB = f"10.99.{N}.2"
TUNSETIFF = 0x400454CA
TAP_FLAGS = 0x0002 | 0x1000 | 0x4000  # tap, no packet information, vnet header: what QEMU asks for


def inside(path: Path, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket belongs to the namespace it was made in, wherever it is used afterwards."""
    with namespace.inside(path):
        made = make()
    made.setblocking(False)
    return made


def open_tap(path: Path, name: str) -> int:
    with namespace.inside(path):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_FLAGS))
    return descriptor


class Guest:
    """The address, card and routes of a microVM, joined to the slot's tap by a thread that carries frames.

    Made and closed in a worker thread: synchronous netlink does not run beside a running event loop.
    """

    def __init__(self, slot: Slot, mac: str = GUEST_MAC, address: str = GUEST_ADDRESS) -> None:
        self.path = NETNS_DIRECTORY / f"aetest-guest-{N}-{slot.index}"
        with namespace.created(self.path):
            namespace.sysctl("ipv6/conf/all/disable_ipv6", "1")
            self._own = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(self._own, TUNSETIFF, struct.pack("16sH22x", b"eth0", TAP_FLAGS))
            with IPRoute() as route:
                (link,), (loopback,) = route.link_lookup(ifname="eth0"), route.link_lookup(ifname="lo")
                route.link("set", index=link, address=mac)
                route.link("set", index=link, state="up")
                route.link("set", index=loopback, state="up")
                route.addr("add", index=link, address=address, prefixlen=30)
                route.route("add", dst="default", gateway=GATEWAY_ADDRESS)
        self._tap = open_tap(slot.netns, TAP)
        self._stop, self._stopped = os.pipe()
        self._pump = threading.Thread(target=self._carry, daemon=True)
        self._pump.start()

    def close(self) -> None:
        os.close(self._stopped)
        self._pump.join(5)
        for descriptor in (self._own, self._tap, self._stop):
            os.close(descriptor)
        namespace.remove(self.path)

    def tcp(self) -> socket.socket:
        return inside(self.path, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))

    def udp(self) -> socket.socket:
        return inside(self.path, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

    async def connect(self, address: str, port: int) -> socket.socket:
        """Raises OSError at once where a rule rejects, TimeoutError where packets vanish."""
        sock = self.tcp()
        try:
            async with asyncio.timeout(1.5):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except BaseException:
            sock.close()
            raise
        return sock

    async def reaches(self, address: str, port: int) -> bool:
        try:
            (await self.connect(address, port)).close()
        except (OSError, TimeoutError):
            return False
        return True

    async def resolve(self, name: str, rdtype: str = "A") -> dns.message.Message:
        query = dns.message.make_query(name, rdtype)
        sock, loop = self.udp(), asyncio.get_running_loop()
        with sock:
            async with asyncio.timeout(5):
                await loop.sock_sendto(sock, query.to_wire(), (GATEWAY_ADDRESS, 53))
                return dns.message.from_wire((await loop.sock_recvfrom(sock, 4096))[0])

    def _carry(self) -> None:
        to = {self._own: self._tap, self._tap: self._own}
        while True:
            ready, _, _ = select.select([self._own, self._tap, self._stop], [], [])
            if self._stop in ready:
                return
            for descriptor in ready:
                with contextlib.suppress(OSError):  # the slot went away, or its link is down
                    os.write(to[descriptor], os.read(descriptor, 1 << 16))


class World:
    """Echo servers on port 80 of WEB, OTHER_WEB and INTERNAL_WEB, and a DNS server that says what `zone` says."""

    def __init__(self) -> None:
        self.path = NETNS_DIRECTORY / f"aetest-world-{N}"
        self._link = f"aetestw{N}"
        self.zone: dict[str, tuple[int, list[str]]] = {}
        self.asked: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._dns: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self._build)
        for address in (WEB, OTHER_WEB, INTERNAL_WEB):
            sock = inside(self.path, lambda address=address: socket.create_server((address, 80)))
            self._servers.append(await asyncio.start_server(self._echo, sock=sock))
        udp = self.udp(DNS, 53)
        loop = asyncio.get_running_loop()
        self._dns, _ = await loop.create_datagram_endpoint(lambda: _Zone(self), sock=udp)

    async def aclose(self) -> None:
        if self._dns is not None:
            self._dns.abort()
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.to_thread(self._remove)

    def _build(self) -> None:
        with namespace.created(self.path) as host, IPRoute() as route:
            route.link("add", ifname="eth0", kind="veth", peer={"ifname": self._link, "net_ns_fd": host})
            (link,), (loopback,) = route.link_lookup(ifname="eth0"), route.link_lookup(ifname="lo")
            for address in (WEB, OTHER_WEB, DNS, INTERNAL_WEB):
                route.addr("add", index=link, address=address, prefixlen=24)
            route.link("set", index=link, state="up")
            route.link("set", index=loopback, state="up")
        with IPRoute() as route:
            (link,) = route.link_lookup(ifname=self._link)
            route.addr("add", index=link, address=HOST_SIDE, prefixlen=24)
            route.addr("add", index=link, address=f"10.99.{N}.1", prefixlen=24)
            route.link("set", index=link, state="up")

    def _remove(self) -> None:
        with IPRoute() as route:
            for link in route.link_lookup(ifname=self._link):
                route.link("del", index=link)
        namespace.remove(self.path)

    def udp(self, address: str, port: int) -> socket.socket:
        sock = inside(self.path, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sock.bind((address, port))
        return sock

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()


class _Zone(asyncio.DatagramProtocol):
    def __init__(self, world: World) -> None:
        self._world = world

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        name = query.question[0].name
        self._world.asked.append(name.to_text(omit_final_dot=True))
        reply = dns.message.make_response(query)
        if entry := self._world.zone.get(self._world.asked[-1]):
            reply.answer.append(dns.rrset.from_text(name, entry[0], "IN", "A", *entry[1]))
        else:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(reply.to_wire(), addr)
