"""The resolver against guests and upstream servers that misbehave, over loopback sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address
from pathlib import Path

import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
import uvloop
from dns.message import Message
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import ConfigError, NetworkError
from aenv.network import names, resolver
from aenv.network.policy import CompiledPolicy, compile_policy, name_mark
from aenv.network.protocol import EgressPolicy
from aenv.network.resolver import Resolver
from aenv.network.slots import SlotSockets
from aenv.network.upstream import Upstream, nameservers, parse_server

OPEN = compile_policy(EgressPolicy())
CLOSED = compile_policy(EgressPolicy(internet=False))
NAMES = compile_policy(EgressPolicy(internet=False, allow_out=("api.example.com", "*.example.org")))


def internal(address: IPv4Address) -> bool:
    return address.is_private


def question(name: str = "api.example.com", rdtype: str = "A", **options: object) -> bytes:
    return dns.message.make_query(name, rdtype, **options).to_wire()  # type: ignore[arg-type]


def forwarded(policy: CompiledPolicy, name: str = "api.example.com", rdtype: str = "A") -> names.Forward:
    verdict = names.judge(question(name, rdtype), policy)
    assert isinstance(verdict, names.Forward)
    return verdict


def response(query: Message, *records: str, rcode: dns.rcode.Rcode = dns.rcode.NOERROR) -> Message:
    reply = dns.message.make_response(query)
    reply.set_rcode(rcode)
    for record in records:
        reply.answer.append(dns.rrset.from_text(*record.split(" ", 4)))
    return dns.message.from_wire(reply.to_wire(max_size=65535))


# What is judged without asking anybody.


def rcode_of(wire: bytes, policy: CompiledPolicy) -> dns.rcode.Rcode:
    verdict = names.judge(wire, policy)
    assert isinstance(verdict, Message)
    assert verdict.answer == []
    return verdict.rcode()


def test_nothing_is_forwarded_under_a_closed_policy() -> None:
    for rdtype in ("A", "AAAA", "TXT", "MX", "HTTPS", "NULL"):
        assert rcode_of(question("x.example.com", rdtype), CLOSED) == dns.rcode.REFUSED


def test_only_names_of_the_list_are_forwarded() -> None:
    assert forwarded(NAMES, "API.example.com").name == "api.example.com"
    assert forwarded(NAMES, "a.b.example.org", "TXT").name == "a.b.example.org"
    for name in ("example.com", "x.api.example.com", "example.org", "."):
        assert rcode_of(question(name), NAMES) == dns.rcode.REFUSED


@pytest.mark.parametrize("rdtype", ["AAAA", "HTTPS", "SVCB"])
def test_ways_around_the_address_rules_are_answered_empty(rdtype: str) -> None:
    assert rcode_of(question(rdtype=rdtype), OPEN) == dns.rcode.NOERROR


@pytest.mark.parametrize("rdtype", ["ANY", "AXFR", "IXFR", "TSIG", "OPT"])
def test_meta_questions_are_refused(rdtype: str) -> None:
    assert rcode_of(question(rdtype=rdtype), OPEN) == dns.rcode.REFUSED


def test_other_classes_and_operations() -> None:
    assert rcode_of(dns.message.make_query("version.bind", "TXT", "CH").to_wire(), OPEN) == dns.rcode.REFUSED
    update = dns.message.make_query("example.com", "A")
    update.set_opcode(dns.opcode.NOTIFY)
    assert rcode_of(update.to_wire(), OPEN) == dns.rcode.NOTIMP
    two = dns.message.make_query("example.com", "A")
    two.question *= 2
    assert rcode_of(two.to_wire(), OPEN) == dns.rcode.FORMERR
    assert names.judge(response(dns.message.make_query("a.b", "A")).to_wire(), OPEN) is None
    assert names.judge(question() + bytes(2000), OPEN) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(wire: bytes) -> None:
    names.judge(wire, OPEN)


@given(st.integers(0, 200), st.integers(0, 255))
def test_damaged_questions_are_survived(position: int, value: int) -> None:
    wire = bytearray(question(use_edns=0))
    wire[position % len(wire)] = value
    names.judge(bytes(wire), OPEN)


def test_nothing_of_the_guest_s_message_but_the_question_goes_on() -> None:
    wire = dns.message.make_query("api.example.com", "A", use_edns=0, options=[], ednsflags=dns.flags.DO)
    wire.additional.append(dns.rrset.from_text("leak.example.net.", 1, "IN", "TXT", "secret"))
    verdict = names.judge(wire.to_wire(), OPEN)
    assert isinstance(verdict, names.Forward)
    assert verdict.query.additional == []
    assert verdict.query.ednsflags == 0
    ids = {forwarded(OPEN).query.id for _ in range(20)}
    assert len(ids) > 10


# What of an answer reaches the guest.


def test_addresses_of_an_allowed_name_are_opened_for_their_time() -> None:
    forward = forwarded(NAMES)
    found = names.answer(
        forward,
        response(forward.query, "api.example.com. 99999 IN CNAME cdn.net.", "cdn.net. 30 IN A 1.2.3.4"),
        NAMES,
        internal,
    )
    assert found.addresses == {IPv4Address("1.2.3.4"): 30}
    assert found.mark == name_mark("api.example.com")
    assert [rrset.ttl for rrset in found.reply.answer] == [names.MAX_TTL, 30]


def test_records_off_the_chain_and_internal_addresses_are_dropped() -> None:
    forward = forwarded(NAMES)
    found = names.answer(
        forward,
        response(
            forward.query,
            "api.example.com. 30 IN A 10.0.0.1",
            "api.example.com. 30 IN A 1.2.3.4",
            "evil.example.net. 30 IN A 6.6.6.6",
        ),
        NAMES,
        internal,
    )
    assert list(found.addresses) == [IPv4Address("1.2.3.4")]
    assert [record.address for rrset in found.reply.answer for record in rrset] == ["1.2.3.4"]


def test_an_open_policy_opens_nothing_and_still_hides_internal_addresses() -> None:
    forward = forwarded(OPEN)
    found = names.answer(forward, response(forward.query, "api.example.com. 30 IN A 192.168.0.1"), OPEN, internal)
    assert (found.addresses, found.reply.answer) == ({}, [])


def test_the_policy_of_the_moment_of_the_answer_counts() -> None:
    forward = forwarded(NAMES)
    found = names.answer(forward, response(forward.query, "api.example.com. 30 IN A 1.2.3.4"), CLOSED, internal)
    assert found.reply.rcode() == dns.rcode.REFUSED
    assert (found.addresses, found.reply.answer) == ({}, [])


def test_alias_loops_and_contradictions_are_failures() -> None:
    forward = forwarded(NAMES)
    loop = response(forward.query, "api.example.com. 5 IN CNAME b.net.", "b.net. 5 IN CNAME api.example.com.")
    assert names.answer(forward, loop, NAMES, internal).reply.rcode() == dns.rcode.SERVFAIL
    both = response(forward.query, "api.example.com. 5 IN A 1.2.3.4", rcode=dns.rcode.NXDOMAIN)
    assert names.answer(forward, both, NAMES, internal).addresses == {}


def test_the_number_of_addresses_is_bounded() -> None:
    forward = forwarded(NAMES)
    records = [f"api.example.com. 30 IN A 1.2.3.{n}" for n in range(1, 200)]
    assert len(names.answer(forward, response(forward.query, *records), NAMES, internal).addresses) == (
        names.MAX_ADDRESSES
    )


def test_large_answers_are_truncated_over_udp_to_what_the_guest_takes() -> None:
    forward = forwarded(OPEN, rdtype="TXT")
    reply = names.answer(
        forward,
        response(forward.query, *[f"api.example.com. 30 IN TXT {'x' * 200}{n}" for n in range(9)]),
        OPEN,
        internal,
    ).reply
    short = dns.message.from_wire(names.encode(reply, udp=True))
    assert short.flags & dns.flags.TC
    assert len(names.encode(reply, udp=True)) <= 512
    assert len(dns.message.from_wire(names.encode(reply, udp=False)).answer[0]) == 9


# The service, over sockets.


class Upstreams(asyncio.DatagramProtocol):
    """A server that answers as `reply` says; None is silence."""

    def __init__(self, reply: Callable[[Message], Message | None]) -> None:
        self.reply = reply
        self.queries: list[Message] = []

    async def start(self) -> str:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        self.transport = transport
        return f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.queries.append(dns.message.from_wire(data))
        if reply := self.reply(self.queries[-1]):
            self.transport.sendto(reply.to_wire(), addr)


class Node:
    """A resolver with one slot, whose guest asks over loopback."""

    def __init__(self) -> None:
        self.opened: list[tuple[dict[IPv4Address, int], frozenset[IPv4Address], int]] = []
        self.fail = False

    async def start(self, upstream: str, policy: CompiledPolicy) -> None:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        tcp = socket.socket()
        for sock in (udp, tcp):
            sock.setblocking(False)
            sock.bind(("127.0.0.1", 0))
        tcp.listen()
        self.udp, self.tcp = udp.getsockname(), tcp.getsockname()
        self.resolver = Resolver(Upstream((upstream,)), internal, self._open)
        await self.resolver.serve(1, SlotSockets(udp, tcp), policy)

    async def _open(self, index: int, new: dict[IPv4Address, int], known: frozenset[IPv4Address], mark: int) -> None:
        if self.fail:
            raise NetworkError("the kernel says no")
        self.opened.append((new, known, mark))

    async def ask(self, wire: bytes, wait: float = 5) -> Message:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(wait):
                sock.connect(self.udp)
                await loop.sock_sendall(sock, wire)  # uvloop has no sock_sendto
                return dns.message.from_wire(await loop.sock_recv(sock, 65535))


def one_address(query: Message) -> Message:
    return response(query, f"{query.question[0].name} 30 IN A 1.2.3.4")


@pytest.fixture
async def upstream() -> AsyncIterator[Upstreams]:
    made = Upstreams(one_address)
    made.address = await made.start()  # type: ignore[attr-defined]
    yield made
    made.transport.abort()


@pytest.fixture
async def node(upstream: Upstreams) -> AsyncIterator[Node]:
    made = Node()
    await made.start(upstream.address, NAMES)  # type: ignore[attr-defined]
    yield made
    await made.resolver.aclose()


async def test_addresses_are_open_before_the_answer_arrives_and_once_only(node: Node) -> None:
    assert (await node.ask(question())).answer
    assert (await node.ask(question())).answer
    address = IPv4Address("1.2.3.4")
    assert node.opened == [({address: 30 + resolver.GRACE_SECONDS}, frozenset(), name_mark("api.example.com"))]
    await node.ask(question("x.example.org"))
    assert node.opened[1][1:] == (frozenset({address}), name_mark("*.example.org"))


async def test_an_address_that_cannot_be_opened_is_not_told(node: Node) -> None:
    node.fail = True
    reply = await node.ask(question())
    assert (reply.rcode(), reply.answer) == (dns.rcode.SERVFAIL, [])


async def test_refused_names_reach_no_server(node: Node, upstream: Upstreams) -> None:
    assert (await node.ask(question("a.evil.net"))).rcode() == dns.rcode.REFUSED
    node.resolver.update(1, CLOSED)
    assert (await node.ask(question())).rcode() == dns.rcode.REFUSED
    assert upstream.queries == []


async def test_a_forged_answer_is_not_taken(node: Node, upstream: Upstreams) -> None:
    def forge(query: Message) -> Message:
        wrong = one_address(query)
        wrong.id ^= 1
        upstream.transport.sendto(wrong.to_wire(), ("127.0.0.1", 9))
        return wrong

    upstream.reply = forge
    reply = await node.ask(question(), wait=10)
    assert (reply.rcode(), node.opened) == (dns.rcode.SERVFAIL, [])


async def test_a_silent_server_costs_a_bounded_number_of_questions(node: Node, upstream: Upstreams) -> None:
    upstream.reply = lambda query: None
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        for n in range(150):
            await loop.sock_sendto(sock, question(f"n{n}.example.org"), node.udp)
        for _ in range(resolver.MAX_IN_FLIGHT):  # each is told that it failed; the rest were dropped
            async with asyncio.timeout(10):
                assert dns.message.from_wire(await loop.sock_recv(sock, 4096)).rcode() == dns.rcode.SERVFAIL
    assert len(upstream.queries) == resolver.MAX_IN_FLIGHT


async def test_garbage_gets_no_reply_and_does_no_harm(node: Node) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        for wire in (b"", b"x", bytes(12), bytes(2000), question()[:-3]):
            await loop.sock_sendto(sock, wire, node.udp)
    assert (await node.ask(question())).answer


async def test_tcp_one_question_after_another(node: Node) -> None:
    reader, writer = await asyncio.open_connection(*node.tcp)
    wire = question()
    writer.write((len(wire).to_bytes(2) + wire) * 3)
    async with asyncio.timeout(5):
        for _ in range(3):
            length = int.from_bytes(await reader.readexactly(2))
            assert dns.message.from_wire(await reader.readexactly(length)).answer
        writer.write((5000).to_bytes(2) + bytes(5000))
        assert await reader.read() == b""  # an oversized message ends the connection
    writer.transport.abort()


async def test_tcp_connections_are_bounded_and_end_with_the_slot(node: Node) -> None:
    held = [await asyncio.open_connection(*node.tcp) for _ in range(resolver.MAX_CONNECTIONS)]
    wire = question()
    for reader, writer in held:  # each is being served
        writer.write(len(wire).to_bytes(2) + wire)
        async with asyncio.timeout(5):
            await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
    reader, writer = await asyncio.open_connection(*node.tcp)
    async with asyncio.timeout(5):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        await node.resolver.stop(1)
        for reader, _ in held:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await reader.readexactly(1)
    for _, writer in held:
        writer.transport.abort()


def test_the_budget_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(resolver.time, "monotonic", lambda: now)
    budget = resolver._Budget()
    assert sum(budget.take() for _ in range(1000)) == resolver.BURST
    now += 0.5
    assert sum(budget.take() for _ in range(1000)) == resolver.QUESTIONS_PER_SECOND // 2


def test_it_works_on_uvloop_which_the_server_runs_on() -> None:
    async def main() -> None:
        upstream, node = Upstreams(one_address), Node()
        await node.start(await upstream.start(), NAMES)
        assert (await node.ask(question())).answer
        reader, writer = await asyncio.open_connection(*node.tcp)
        wire = question()
        writer.write(len(wire).to_bytes(2) + wire)
        async with asyncio.timeout(5):
            await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        await node.resolver.aclose()
        writer.transport.abort()
        upstream.transport.abort()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# Whom it asks.


def test_servers_of_the_settings() -> None:
    assert parse_server("1.1.1.1") == ("1.1.1.1", 53)
    assert parse_server("1.1.1.1:5353") == ("1.1.1.1", 5353)
    assert parse_server("2606:4700::1111") == ("2606:4700::1111", 53)
    assert parse_server("[::1]:54") == ("::1", 54)
    for text in ("", "dns.example.com", "1.1.1.1:0", "1.1.1.1:x", "[::1]:70000"):
        with pytest.raises(ConfigError, match=r"network\.dns_upstream"):
            parse_server(text)


async def test_the_host_s_servers(tmp_path: Path) -> None:
    assert nameservers("# x\nsearch a\nnameserver 1.2.3.4\nnameserver bad\n nameserver ::1 \n") == ["1.2.3.4", "::1"]
    with pytest.raises(NetworkError, match="dns_upstream"):
        await Upstream((), tmp_path / "missing").ask(dns.message.make_query("a.b", "A"))


async def test_the_next_server_is_asked_when_one_is_dead(upstream: Upstreams) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    servers = Upstream((f"127.0.0.1:{port}", upstream.address))  # type: ignore[attr-defined]
    assert (await servers.ask(dns.message.make_query("a.b", "A"))).answer
