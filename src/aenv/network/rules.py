"""The nftables rules, as libnftables-json(5) commands. Pure.

The rules never change after they are made: a policy is the contents of the sets `allow`, `deny` and `rules`, replaced
in one transaction, and the map `names` holds what the resolver has opened.

Every packet of a connection is judged, not only its first, so that a new policy also ends what is open:
* by `ct original ip daddr`, the address the guest asked for, which is the same for every packet of the connection;
* a connection opened through a name bears that domain rule's mark, so it outlives the address's TTL (`names` entries
  expire), and ends when the rule leaves the policy;
* TCP is judged on the guest's side only: its next segment or acknowledgement is answered with a reset, so the program
  in the guest learns of it at once. Other protocols are judged in both directions.
"""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from aenv.network.layout import GUEST_MAC, LINK_PREFIX, TAP, UPLINK, Layout
from aenv.network.nft import Command
from aenv.network.policy import CompiledPolicy
from aenv.network.protocol import GATEWAY_ADDRESS, GUEST_ADDRESS

SLOT_TABLE = "aenv"
MAX_CONNECTIONS = 8192
"""A guest's tracked connections outwards; without a bound one guest could fill the host's connection table."""
MAX_NAME_ADDRESSES = 4096
"""Addresses opened by names at one time in one sandbox."""
MAX_DNS_PACKETS = 500
"""Per second, to the resolver from one guest; more are dropped before they cost anything in user space."""

Expression = dict[str, Any]

ACCEPT: Expression = {"accept": None}
DROP: Expression = {"drop": None}
MASQUERADE: Expression = {"masquerade": None}


def slot_ruleset(
    layout: Layout, index: int, internal: Iterable[IPv4Network], policy: CompiledPolicy, *, fresh: bool
) -> list[Command]:
    """The whole table of a slot's namespace; unless `fresh` (ten times faster) it replaces what was there.

    On adoption the addresses opened by names are forgotten with it; connections through them go on, by their marks.
    """
    table = _Table(SLOT_TABLE)
    address, host = str(layout.slot_address(index)), str(layout.host_address(index))
    for name in ("internal", "allow", "deny"):
        table.set(name, type="ipv4_addr", flags=["interval"])
    table.set("rules", type="mark")
    table.map("names", type="ipv4_addr", map="mark", flags=["timeout"], size=MAX_NAME_ADDRESSES)
    table.fill("internal", _networks(internal))
    table.fill("names", [])

    from_guest, to_guest = _is("iifname", TAP), _is("oifname", TAP)
    from_host, to_host = _is("iifname", UPLINK), _is("oifname", UPLINK)
    replies_to_host = _flag(_ct("status"), "dnat")  # only the host's own connections are translated to the guest
    reply, tcp = _eq(_ct("direction"), "reply"), _eq(_meta("l4proto"), "tcp")

    table.chain("spoofed", hook="prerouting", type="filter", prio=-300, policy="accept")
    table.rule("spoofed", _eq(_meta("nfproto"), "ipv6"), DROP)
    table.rule("spoofed", from_guest, _ne(_field("ether", "saddr"), GUEST_MAC), DROP)
    table.rule("spoofed", from_guest, _ne(_field("ip", "saddr"), GUEST_ADDRESS), DROP)
    table.rule("spoofed", from_host, _ne(_field("ip", "daddr"), address), DROP)

    table.chain("egress")
    asked = {"ct": {"key": "ip daddr", "dir": "original"}}
    mark_rules = _eq(_ct("mark"), "@rules")
    table.rule("egress", _eq(asked, "@internal"), {"goto": {"target": "refuse"}})
    table.rule("egress", _eq(asked, "@allow"), ACCEPT)
    table.rule("egress", mark_rules, ACCEPT)
    table.rule("egress", {"mangle": {"key": _ct("mark"), "value": {"map": {"key": asked, "data": "@names"}}}})
    table.rule("egress", mark_rules, ACCEPT)
    table.rule("egress", _eq(asked, "@deny"), {"goto": {"target": "refuse"}})
    table.rule("egress", ACCEPT)

    table.chain("refuse")
    table.rule("refuse", tcp, {"reject": {"type": "tcp reset"}})
    table.rule("refuse", {"reject": {"type": "icmp", "expr": "admin-prohibited"}})

    table.chain("forward", hook="forward", type="filter", prio=0, policy="drop")
    new = _flag(_ct("state"), "new")
    table.rule("forward", _flag(_ct("state"), "invalid"), DROP)
    table.rule("forward", replies_to_host, ACCEPT)
    table.rule("forward", from_guest, to_host, new, {"ct count": {"val": MAX_CONNECTIONS, "inv": True}}, DROP)
    table.rule("forward", from_guest, to_host, {"jump": {"target": "egress"}})
    table.rule("forward", from_host, to_guest, reply, tcp, ACCEPT)
    table.rule("forward", from_host, to_guest, reply, {"jump": {"target": "egress"}})

    # Of this namespace the guest reaches the resolver alone; the host reaches nothing (all is translated to the guest).
    table.chain("input", hook="input", type="filter", prio=0, policy="drop")
    within_rate = {"limit": {"rate": MAX_DNS_PACKETS, "per": "second", "burst": MAX_DNS_PACKETS}}
    to_resolver = (from_guest, _eq(_field("ip", "daddr"), GATEWAY_ADDRESS))
    for protocol in ("udp", "tcp"):
        table.rule("input", *to_resolver, _eq(_field(protocol, "dport"), 53), within_rate, ACCEPT)
        table.rule("input", *to_resolver, _eq(_field(protocol, "dport"), 53), DROP)
    table.rule("input", from_guest, {"goto": {"target": "refuse"}})

    # A VMM that has been taken over sits in this namespace: it may speak to its guest and to nobody else.
    table.chain("output", hook="output", type="filter", prio=0, policy="drop")
    table.rule("output", to_guest, ACCEPT)

    table.chain("inbound", hook="prerouting", type="nat", prio=-100, policy="accept")
    inbound = (from_host, _eq(_field("ip", "saddr"), host), _eq(_field("ip", "daddr"), address))
    table.rule("inbound", *inbound, {"dnat": {"family": "ip", "addr": GUEST_ADDRESS}})
    table.chain("translate", hook="postrouting", type="nat", prio=100, policy="accept")
    table.rule("translate", to_host, {"snat": {"family": "ip", "addr": address}})
    # The guest sees the host as its gateway: nothing of the slot shows, so nothing changes for it on a resume.
    table.rule("translate", to_guest, replies_to_host, {"snat": {"family": "ip", "addr": GATEWAY_ADDRESS}})
    commands = [*table.commands(), *policy_change(policy)]
    return [command for command in commands if "flush" not in command] if fresh else commands


def policy_change(policy: CompiledPolicy) -> list[Command]:
    """Replace the policy of a slot."""
    table = _Table(SLOT_TABLE)
    table.fill("allow", _networks(policy.allow))
    table.fill("deny", _networks(policy.deny))
    table.fill("rules", list(policy.marks))
    return table.contents


def open_addresses(addresses: Mapping[IPv4Address, int], mark: int) -> list[Command]:
    """Open `addresses`, none of them open now, each for that many seconds, for the domain rule of `mark`."""
    return [
        _element("add", "names", [[{"elem": {"val": str(address), "timeout": ttl}}, mark]])
        for address, ttl in addresses.items()
    ]


def close_address(address: IPv4Address) -> list[Command]:
    """Undo `open_addresses` for new connections. The mark in the key is a form: nftables goes by the address."""
    return [_element("delete", "names", [[str(address), 1]])]


def host_ruleset(layout: Layout, internal: Iterable[IPv4Network], slots: Iterable[int]) -> list[Command]:
    """The host's table of this home: the second line behind the slots' own rules, and the way out.

    Guests reach no address of this host, whatever it listens on and whatever later rules (Docker's, say) would
    translate it to; no sandbox of any home; nothing internal; and nobody but this host opens connections to them.
    """
    table = _Table(layout.table)
    table.set("internal", type="ipv4_addr", flags=["interval"])
    table.map("slots", type="ipv4_addr", map="mark", size=layout.size)
    table.fill("internal", _networks(internal))
    table.fill("slots", [[str(layout.slot_address(index)), layout.mark(index)] for index in slots])

    from_slot, to_slot = _is("iifname", f"{layout.link_prefix}*"), _is("oifname", f"{layout.link_prefix}*")
    to_any_slot = _is("oifname", f"{LINK_PREFIX}*")
    replying = _eq(_ct("direction"), "reply")
    source = _field("ip", "saddr")

    table.chain("arriving", hook="prerouting", type="filter", prio=-150, policy="accept")
    table.rule("arriving", _ne(_meta("iifname"), f"{layout.link_prefix}*"), ACCEPT)
    table.rule("arriving", _eq(_meta("nfproto"), "ipv6"), DROP)
    # The mark finds a slot's connections again when it is given back.
    marking = {"mangle": {"key": _ct("mark"), "value": {"map": {"key": source, "data": "@slots"}}}}
    table.rule("arriving", marking, {"goto": {"target": "known"}})
    table.rule("arriving", DROP)  # a slot that is being removed, or a source that is no slot's
    table.chain("known")
    table.rule("known", replying, ACCEPT)
    table.rule("known", _ne({"fib": {"result": "type", "flags": ["daddr"]}}, "unicast"), DROP)

    table.chain("forward", hook="forward", type="filter", prio=-10, policy="accept")
    table.rule("forward", from_slot, to_any_slot, DROP)
    table.rule("forward", from_slot, _eq(_field("ip", "daddr"), "@internal"), DROP)
    table.rule("forward", to_slot, replying, ACCEPT)
    table.rule("forward", to_slot, DROP)

    table.chain("translate", hook="postrouting", type="nat", prio=100, policy="accept")
    cidr = {"prefix": {"addr": str(layout.cidr.network_address), "len": layout.cidr.prefixlen}}
    table.rule("translate", _eq(source, cidr), _ne(_meta("oifname"), f"{LINK_PREFIX}*"), MASQUERADE)
    return table.commands()


def host_slots(layout: Layout, indexes: Iterable[int], verb: str) -> Command:
    """`add` slots to the host's table or `delete` them."""
    elements = [[str(layout.slot_address(index)), layout.mark(index)] for index in indexes]
    return _element(verb, "slots", elements, table=layout.table)


def drop_table(name: str) -> list[Command]:
    table = {"table": {"family": "inet", "name": name}}
    return [{"add": table}, {"delete": table}]


class _Table:
    """Collects the commands that make one `inet` table anew, whether or not it exists."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._declared: list[Command] = []
        self._rules: list[Command] = []
        self.contents: list[Command] = []

    def set(self, name: str, **attributes: Any) -> None:
        self._declared.append(self._add("set", name=name, **attributes))

    def map(self, name: str, **attributes: Any) -> None:
        self._declared.append(self._add("map", name=name, **attributes))

    def chain(self, name: str, **attributes: Any) -> None:
        self._declared.append(self._add("chain", name=name, **attributes))
        self._declared.append({"flush": {"chain": {"family": "inet", "table": self._name, "name": name}}})

    def rule(self, chain: str, *expressions: Expression) -> None:
        self._rules.append(self._add("rule", chain=chain, expr=list(expressions)))

    def fill(self, name: str, elements: list[Any]) -> None:
        """Replace the contents of a set or map."""
        kind = "map" if name in ("names", "slots") else "set"
        self.contents.append({"flush": {kind: {"family": "inet", "table": self._name, "name": name}}})
        if elements:
            self.contents.append(_element("add", name, elements, table=self._name))

    def commands(self) -> list[Command]:
        table = {"add": {"table": {"family": "inet", "name": self._name}}}
        return [table, *self._declared, *self.contents, *self._rules]

    def _add(self, kind: str, **attributes: Any) -> Command:
        return {"add": {kind: {"family": "inet", "table": self._name, **attributes}}}


def _element(verb: str, name: str, elements: list[Any], *, table: str = SLOT_TABLE) -> Command:
    return {verb: {"element": {"family": "inet", "table": table, "name": name, "elem": elements}}}


def _networks(networks: Iterable[IPv4Network]) -> list[Any]:
    return [{"prefix": {"addr": str(network.network_address), "len": network.prefixlen}} for network in networks]


def _meta(key: str) -> Expression:
    return {"meta": {"key": key}}


def _ct(key: str) -> Expression:
    return {"ct": {"key": key}}


def _field(protocol: str, field: str) -> Expression:
    return {"payload": {"protocol": protocol, "field": field}}


def _eq(left: Expression, right: Any) -> Expression:
    return {"match": {"op": "==", "left": left, "right": right}}


def _ne(left: Expression, right: Any) -> Expression:
    return {"match": {"op": "!=", "left": left, "right": right}}


def _flag(left: Expression, flag: str) -> Expression:
    return {"match": {"op": "in", "left": left, "right": flag}}


def _is(key: str, name: str) -> Expression:
    return _eq(_meta(key), name)
