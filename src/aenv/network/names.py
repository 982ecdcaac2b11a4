"""What the resolver does with one DNS message under a policy. Pure; guests and the servers asked are hostile."""

from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from dns.message import Message

from aenv.network.policy import CompiledPolicy, name_mark

MAX_QUERY_BYTES = 1232
"""A question with EDNS needs 300; 1232 is the common EDNS size that is never fragmented."""
MAX_TTL = 3600
"""Seconds. No server decides for days what a sandbox may reach; the guest is told the same bound."""
MAX_ADDRESSES = 64
"""Of one answer."""

_NO_DATA = frozenset({dns.rdatatype.AAAA, dns.rdatatype.HTTPS, dns.rdatatype.SVCB})
"""Answered empty: sandboxes have no IPv6, and the address hints of service records would go past the address rules."""
_META = frozenset({dns.rdatatype.ANY, dns.rdatatype.AXFR, dns.rdatatype.IXFR, dns.rdatatype.MAILA, dns.rdatatype.MAILB})


@dataclass(frozen=True, slots=True)
class Forward:
    """A question to pass on: `query` is ours, with an id of its own and nothing of the guest's but the question."""

    request: Message
    query: Message
    name: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply for the guest, and the addresses (with their TTLs) that must be open for `mark` before it is sent."""

    reply: Message
    addresses: dict[IPv4Address, int] = field(default_factory=dict)
    mark: int = 0


def judge(wire: bytes, policy: CompiledPolicy) -> Forward | Message | None:
    """A question to forward, a reply to give at once, or None for what deserves no reply."""
    if len(wire) > MAX_QUERY_BYTES:
        return None
    try:
        request = dns.message.from_wire(wire)
    except dns.exception.DNSException:
        return None
    if request.flags & dns.flags.QR:
        return None
    if request.opcode() != dns.opcode.QUERY:
        return _reply(request, dns.rcode.NOTIMP)
    if len(request.question) != 1:
        return _reply(request, dns.rcode.FORMERR)
    question = request.question[0]
    name = question.name.to_text(omit_final_dot=True).lower()
    if not policy.resolve_all and policy.rule_for(name) is None:
        # Nothing leaves the host: a query is a message to whoever runs the name's servers.
        return _reply(request, dns.rcode.REFUSED)
    if question.rdclass != dns.rdataclass.IN or question.rdtype in _META or dns.rdatatype.is_metatype(question.rdtype):
        return _reply(request, dns.rcode.REFUSED)
    if question.rdtype in _NO_DATA:
        return _reply(request, dns.rcode.NOERROR)
    query = dns.message.make_query(question.name, question.rdtype, use_edns=0, payload=MAX_QUERY_BYTES)
    return Forward(request, query, name)


def answer(
    forward: Forward, response: Message, policy: CompiledPolicy, is_internal: Callable[[IPv4Address], bool]
) -> Answer:
    """What the guest is told of `response`: the records that answer its question through the chain of aliases, less
    internal addresses (DNS rebinding), and no other section."""
    rule = policy.rule_for(forward.name)
    if rule is None and not policy.resolve_all:  # the policy changed meanwhile
        return Answer(_reply(forward.request, dns.rcode.REFUSED))
    if not isinstance(response, dns.message.QueryMessage):
        return failure(forward)
    try:
        chain = response.resolve_chaining()
    except dns.exception.DNSException:
        return failure(forward)
    reply = _reply(forward.request, response.rcode())
    addresses: dict[IPv4Address, int] = {}
    for rrset in [*chain.cnames, *([chain.answer] if chain.answer is not None else [])]:
        kept = dns.rrset.RRset(rrset.name, rrset.rdclass, rrset.rdtype)
        kept.update_ttl(min(rrset.ttl, MAX_TTL))
        for record in rrset:
            if rrset.rdtype == dns.rdatatype.A:
                address = IPv4Address(record.address)
                if is_internal(address) or len(addresses) >= MAX_ADDRESSES:
                    continue
                addresses[address] = kept.ttl
            kept.add(record)
        if kept:
            reply.answer.append(kept)
    if rule is None:
        return Answer(reply)
    return Answer(reply, addresses, name_mark(rule))


def failure(forward: Forward) -> Answer:
    """SERVFAIL: the upstream did not answer, or not sensibly."""
    return Answer(_reply(forward.request, dns.rcode.SERVFAIL))


def encode(reply: Message, *, udp: bool) -> bytes:
    """Over UDP at most what the guest said it takes, and 1232 bytes; then truncated, so that it asks over TCP."""
    if not udp:
        return reply.to_wire(max_size=65535, prefer_truncation=True)
    return reply.to_wire(max_size=min(max(reply.request_payload, 512), MAX_QUERY_BYTES), prefer_truncation=True)


def _reply(request: Message, rcode: dns.rcode.Rcode) -> Message:
    reply = dns.message.make_response(request, recursion_available=True, our_payload=MAX_QUERY_BYTES)
    reply.set_rcode(rcode)
    return reply
