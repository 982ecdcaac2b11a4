"""Names and addresses of a node's slots, computed from the slot's index. Pure."""

import hashlib
import ipaddress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from aenv.config import Settings
from aenv.errors import ConfigError
from aenv.network.protocol import Slot

NETNS_DIRECTORY = Path("/run/netns")
"""Where iproute2 keeps named network namespaces, so that `ip netns` shows ours."""
LINK_PREFIX = "aenv"
"""Every host-side veth of every home on the machine begins with this; nftables rules match on it."""
TAP = "tap0"
UPLINK = "eth0"
"""The veth end inside the slot's namespace."""
GUEST_MAC = "02:ae:00:00:00:15"
"""Locally administered, the same in every sandbox, so that a restored guest keeps its network card."""
GATEWAY_MAC = "02:ae:00:00:00:16"
"""Of every slot's tap: a restored guest still knows the gateway by the address it had in the slot it was saved in."""

_LINK_NAME_LIMIT = 15
"""IFNAMSIZ less the final NUL: four letters, six of the tag, five digits of the index."""

UID_TABLE = 0x61656E76
"""A routing table that no rule consults ("aenv" in ASCII): its routes say which users are taken, by which link."""


@dataclass(frozen=True)
class Layout:
    """`tag` tells the homes on one machine apart; `cidr` is cut into /30s: host side .1, slot side .2 of each.

    All homes share the host's kernel, so every name in it is either marked with the tag (table, links, link group,
    namespaces) or claimed by a route through the slot's link that only one home can have: the slot's address, and the
    user of its VMM. What else belongs to a slot (its connections' mark) is computed from a claimed value, never from
    the index, which every home counts from 0.
    """

    tag: str
    cidr: IPv4Network
    uid_base: int

    @classmethod
    def of(cls, settings: Settings) -> "Layout":
        """Raises ConfigError when `network.cidr` is no IPv4 network of at least one /30."""
        text = settings.network.cidr
        try:
            cidr = IPv4Network(text)
        except ValueError as error:
            raise ConfigError(
                f"network.cidr = {text!r}: must be an IPv4 network such as 10.213.0.0/16: {error}"
            ) from None
        if not 14 <= cidr.prefixlen <= 30:
            raise ConfigError(f"network.cidr = {text!r}: the prefix must be between /14 and /30")
        tag = hashlib.sha256(str(settings.home.resolve()).encode()).hexdigest()[:6]
        return cls(tag, cidr, settings.vmm.uid_base)

    @cached_property
    def size(self) -> int:
        """How many slots `cidr` has room for."""
        return min(1 << (30 - self.cidr.prefixlen), 100_000)

    @property
    def table(self) -> str:
        """The host's nftables table of this home."""
        return f"aenv_{self.tag}"

    @property
    def link_prefix(self) -> str:
        return f"{LINK_PREFIX}{self.tag}"

    @property
    def link_group(self) -> int:
        """The group of links about to be removed together."""
        return int(self.tag, 16) | 1 << 24

    @property
    def netns_prefix(self) -> str:
        return f"aenv-{self.tag}-"

    def link(self, index: int) -> str:
        """The veth end on the host."""
        return f"{self.link_prefix}{index}"

    def netns(self, index: int) -> Path:
        return NETNS_DIRECTORY / f"{self.netns_prefix}{index}"

    def host_address(self, index: int) -> IPv4Address:
        return self.cidr.network_address + 4 * index + 1

    def slot_address(self, index: int) -> IPv4Address:
        return self.cidr.network_address + 4 * index + 2

    def index_of_address(self, address: str) -> int | None:
        """The slot whose outside address this is."""
        offset = int(IPv4Address(address)) - int(self.cidr.network_address)
        return offset // 4 if offset % 4 == 2 and 0 <= offset // 4 < self.size else None

    def uid(self, index: int) -> int:
        """Who may open the slot's tap: the user its VMM runs as."""
        return self.uid_base + index

    def uid_claim(self, index: int) -> str:
        """The destination in UID_TABLE that stands for the user: its number written as an address."""
        return f"{IPv4Address(self.uid(index))}/32"

    def index_of_uid_claim(self, address: str) -> int | None:
        index = int(IPv4Address(address)) - self.uid_base
        return index if 0 <= index < self.size else None

    def mark(self, index: int) -> int:
        """The conntrack mark, on the host, of a slot's connections: its address, which no other home can have."""
        return int(self.slot_address(index))

    def slot(self, index: int) -> Slot:
        return Slot(index=index, netns=self.netns(index), tap=TAP, mac=GUEST_MAC, address=str(self.slot_address(index)))

    def index_of_netns(self, name: str) -> int | None:
        return _index(name, self.netns_prefix)

    def index_of_link(self, name: str) -> int | None:
        return _index(name, self.link_prefix)


def _index(name: str, prefix: str) -> int | None:
    digits = name.removeprefix(prefix)
    return int(digits) if name.startswith(prefix) and digits.isascii() and digits.isdigit() else None


INTERNAL = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
"""What is not the public internet: the IANA special-purpose registry, multicast and the reserved top."""

ALWAYS_INTERNAL = tuple(
    ipaddress.IPv4Network(text) for text in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")
)
"""What `network.allow_internal` cannot open: this host, link-local with the cloud metadata services, multicast."""


def internal_ranges(cidr: IPv4Network, allow_internal: tuple[str, ...]) -> tuple[IPv4Network, ...]:
    """The ranges no sandbox may reach. Raises ConfigError for an entry of `allow_internal` that is no IPv4 CIDR."""
    ranges: list[IPv4Network] = list(INTERNAL)
    for text in allow_internal:
        try:
            opened = IPv4Network(text)
        except ValueError as error:
            raise ConfigError(f"network.allow_internal: {text!r} is not an IPv4 CIDR: {error}") from None
        ranges = [part for network in ranges for part in _without(network, opened)]
    return tuple(ipaddress.collapse_addresses([*ranges, *ALWAYS_INTERNAL, cidr]))


def _without(network: IPv4Network, opened: IPv4Network) -> list[IPv4Network]:
    if network.subnet_of(opened):
        return []
    return list(network.address_exclude(opened)) if opened.subnet_of(network) else [network]
