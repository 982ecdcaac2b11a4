"""Making and removing one slot: namespace, tap, veth pair, addresses, routes, rules. Blocking: for a worker thread.

guest 169.254.0.21 -- tap0 169.254.0.22 [slot's namespace] eth0 <cidr>.2 -- aenv<tag><index> <cidr>.1 [host]
"""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

from aenv.errors import NetworkError
from aenv.network import namespace, nft, rules
from aenv.network.layout import GATEWAY_MAC, GUEST_MAC, NETNS_DIRECTORY, TAP, UID_TABLE, UPLINK, Layout
from aenv.network.policy import CompiledPolicy
from aenv.network.protocol import GATEWAY_ADDRESS, GUEST_ADDRESS

DNS_PORT = 53

_SLOT_SYSCTLS = (
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("ipv4/ip_forward", "1"),
    ("ipv4/conf/all/rp_filter", "1"),
    ("ipv4/conf/all/accept_redirects", "0"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    ("ipv4/conf/all/accept_source_route", "0"),
    ("ipv4/conf/all/arp_ignore", "1"),
)


class IndexTaken(NetworkError):
    """Another home on this machine holds the address or the user of this index: use the next."""


@dataclass(frozen=True)
class SlotSockets:
    """Where the resolver listens for one guest: 169.254.0.22 port 53 inside the slot's namespace."""

    udp: socket.socket
    tcp: socket.socket

    def close(self) -> None:
        self.udp.close()
        self.tcp.close()


@dataclass(frozen=True)
class Found:
    """What `prepare` met: slots it removed, and indexes whose addresses or users another home holds."""

    removed: frozenset[int]
    foreign: frozenset[int]


class Slots:
    """The kernel's side of a home's slots. Every method blocks for tens of milliseconds.

    Methods on one slot must not overlap, except that `apply` and `open` may be overtaken by `remove` and then fail.
    """

    def __init__(self, layout: Layout, internal: tuple[IPv4Network, ...]) -> None:
        self._layout = layout
        self._internal = internal

    def prepare(self, in_use: frozenset[int]) -> "Found":
        """Make the host ready and remove every slot of this home that is not `in_use`.

        Raises NetworkError.
        """
        with _mapped("prepare the host's network"):
            namespace.prepare(NETNS_DIRECTORY)
            # Forwarding between the veths and the uplink. Written only if needed: writing resets other settings.
            if Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() != "1":
                namespace.sysctl("ipv4/ip_forward", "1")
            leftovers = self.existing() - in_use
            nft.apply(rules.host_ruleset(self._layout, self._internal, sorted(in_use)))
            self._remove(leftovers)
            return Found(removed=frozenset(leftovers), foreign=frozenset(self._claimed() - in_use))

    def existing(self) -> set[int]:
        """The indexes of this home's slots: what has a namespace or a link on the host."""
        names = (self._layout.index_of_netns(entry.name) for entry in NETNS_DIRECTORY.glob("aenv-*"))
        with IPRoute() as host:
            links = [self._layout.index_of_link(link.get("ifname")) for link in host.get_links()]
        return {index for index in [*names, *links] if index is not None}

    def create(self, index: int, policy: CompiledPolicy) -> SlotSockets:
        """Make slot `index` with `policy` in force. On an error nothing of it is left.

        Raises IndexTaken or NetworkError.
        """
        try:
            with _mapped(f"create network slot {index}"), namespace.created(self._layout.netns(index)) as host:
                return self._build(index, policy, host)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._remove({index})
            raise

    def adopt(self, index: int, policy: CompiledPolicy) -> SlotSockets:
        """Take over slot `index` of a previous server and put `policy` in force. Raises NetworkError."""
        with _mapped(f"adopt network slot {index}"), namespace.inside(self._layout.netns(index)):
            with IPRoute() as slot:
                _link_index(slot, TAP)
                address = str(self._layout.slot_address(index))
                if not list(slot.get_addr(index=_link_index(slot, UPLINK), address=address)):
                    raise NetworkError(f"it does not have the address {address}; was network.cidr changed?")
            nft.apply(rules.slot_ruleset(self._layout, index, self._internal, policy, fresh=False))
            return SlotSockets(*namespace.listening_sockets(GATEWAY_ADDRESS, DNS_PORT))

    def apply(self, index: int, policy: CompiledPolicy) -> None:
        """Replace the policy of slot `index`. Raises NetworkError; then the old one stays in force."""
        self._in_slot(index, "change the policy of", lambda: nft.apply(rules.policy_change(policy)))

    def open(self, index: int, addresses: dict[IPv4Address, int], known: frozenset[IPv4Address], mark: int) -> None:
        """Open `addresses` (seconds each) for a domain rule; those in `known` are open already and are renewed."""

        def change() -> None:
            for address in known:
                with contextlib.suppress(NetworkError):  # expired in the meantime
                    nft.apply(rules.close_address(address))
            nft.apply(rules.open_addresses(addresses, mark))

        self._in_slot(index, "open addresses in", change)

    def remove(self, indexes: Collection[int]) -> None:
        """Remove slots, or what there is of them. A process left inside one keeps nothing that leads anywhere.

        Many at once cost little more than one: the kernel waits a grace period (20 ms) per batch. Raises NetworkError.
        """
        with _mapped(f"remove network slots {', '.join(map(str, sorted(indexes)))}"):
            self._remove(indexes)

    def restore_table(self) -> bool:
        """Make the host's table, holding every slot there is, if it is gone; whether it was. Raises NetworkError."""
        with _mapped("restore the host's table"):
            if self._layout.table in nft.tables():
                return False
            nft.apply(rules.host_ruleset(self._layout, self._internal, sorted(self.existing())))
            return True

    def remove_table(self) -> None:
        """Remove the host's table. Raises NetworkError."""
        with _mapped("remove the host's table"):
            nft.apply(rules.drop_table(self._layout.table))

    def _build(self, index: int, policy: CompiledPolicy, host_namespace: int) -> SlotSockets:
        layout = self._layout
        for name, value in _SLOT_SYSCTLS:
            namespace.sysctl(name, value)
        namespace.add_tap(TAP, layout.uid(index))
        # The rules stand before anything is connected.
        nft.apply(rules.slot_ruleset(layout, index, self._internal, policy, fresh=True))
        with IPRoute() as slot:
            peer = {"ifname": layout.link(index), "net_ns_fd": host_namespace}
            slot.link("add", ifname=UPLINK, kind="veth", peer=peer)
            tap, uplink = _link_index(slot, TAP), _link_index(slot, UPLINK)
            slot.link("set", index=tap, address=GATEWAY_MAC)
            slot.addr("add", index=tap, address=GATEWAY_ADDRESS, prefixlen=30)
            slot.addr("add", index=uplink, address=str(layout.slot_address(index)), prefixlen=30)
            for link in (tap, uplink):
                slot.link("set", index=link, state="up")
            # Without ARP the guest cannot claim another address, and its first packet need not wait.
            slot.neigh("add", dst=GUEST_ADDRESS, lladdr=GUEST_MAC, ifindex=tap, state="permanent")
            with self._on_host(host_namespace):
                self._connect_host(index)
            slot.route("add", dst="default", gateway=str(layout.host_address(index)))
        return SlotSockets(*namespace.listening_sockets(GATEWAY_ADDRESS, DNS_PORT))

    def _connect_host(self, index: int) -> None:
        layout = self._layout
        link = layout.link(index)
        namespace.sysctl(f"ipv6/conf/{link}/disable_ipv6", "1")
        namespace.sysctl(f"ipv4/conf/{link}/forwarding", "1")
        namespace.sysctl(f"ipv4/conf/{link}/rp_filter", "1")
        namespace.sysctl(f"ipv4/conf/{link}/accept_redirects", "0")
        namespace.sysctl(f"ipv4/conf/{link}/send_redirects", "0")
        gateway, address = str(layout.host_address(index)), str(layout.slot_address(index))
        with IPRoute() as host:
            number = _link_index(host, link)
            host.addr("add", index=number, address=gateway, prefixlen=32)
            host.link("set", index=number, state="up")
            # Exclusive adds: these routes are the claims to the index among all homes on the machine, and end with the
            # link. The second leads nowhere, see UID_TABLE: two VMMs of one user could stop and read each other.
            claim = {"oif": number, "scope": "link"}
            try:
                host.route("add", dst=f"{address}/32", prefsrc=gateway, **claim)
                host.route("add", dst=layout.uid_claim(index), table=UID_TABLE, **claim)
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise
                raise IndexTaken(
                    f"another home holds {address} or user {layout.uid(index)}, network slot {index}"
                ) from error
        nft.apply([rules.host_slots(layout, [index], "add")])

    def _remove(self, indexes: Collection[int]) -> None:
        layout = self._layout
        if indexes:  # From here on nothing of them arrives. Only an entry that exists can be deleted: add first.
            nft.apply([rules.host_slots(layout, indexes, verb) for verb in ("add", "delete")])
        doomed = {layout.link(index): index for index in indexes}
        with IPRoute() as host:
            found = {link["index"]: doomed[name] for link in host.get_links() if (name := link.get("ifname")) in doomed}
            # While the links are there their addresses can be no other home's, and so neither can the connections.
            self._forget_connections(index for number, index in found.items() if self._holds(host, number, index))
            for number in found:
                host.link("set", index=number, group=layout.link_group)
            if found:
                # Deleting one end of a veth deletes both, also when a process holds the namespace; the tap goes too.
                host.link("del", index=0, group=layout.link_group)
        for index in indexes:
            namespace.remove(layout.netns(index))

    def _holds(self, host: IPRoute, link: int, index: int) -> bool:
        """Whether the slot's address is claimed by this link; a slot that was never finished may have lost it."""
        try:
            (route,) = host.route("get", dst=str(self._layout.slot_address(index)))
        except NetlinkError:  # no way there at all
            return False
        return bool(route.get_attr("RTA_OIF") == link)

    def _forget_connections(self, indexes: Iterable[int]) -> None:
        """Clear them from the host's table of connections; a slot's own goes with its namespace."""
        with NFCTSocket() as conntrack:
            for index in indexes:
                conntrack.flush(mark=self._layout.mark(index), mark_mask=0xFFFFFFFF)

    def _claimed(self) -> set[int]:
        """Indexes whose address or user is held by some home's slot."""
        found = set()
        with IPRoute() as host:
            for route in host.get_routes(family=socket.AF_INET):
                if route["dst_len"] == 32:
                    taken = route.get_attr("RTA_TABLE") == UID_TABLE
                    index_of = self._layout.index_of_uid_claim if taken else self._layout.index_of_address
                    found.add(index_of(route.get("dst")))
        return {index for index in found if index is not None}

    def _in_slot(self, index: int, doing: str, change: Callable[[], None]) -> None:
        with _mapped(f"{doing} network slot {index}"), namespace.inside(self._layout.netns(index)):
            change()

    @contextlib.contextmanager
    def _on_host(self, host_namespace: int) -> Iterator[None]:
        with namespace.inside(Path(f"/proc/self/fd/{host_namespace}")):
            yield


def _link_index(route: IPRoute, name: str) -> int:
    found: list[int] = list(route.link_lookup(ifname=name))
    if not found:
        raise NetworkError(f"the interface {name} is missing")
    return found[0]


@contextlib.contextmanager
def _mapped(doing: str) -> Iterator[None]:
    """Errors of the kernel become NetworkError, with the advice that fits."""
    try:
        yield
    except IndexTaken:
        raise
    except NetworkError as error:
        raise NetworkError(f"could not {doing}: {error.message}") from error
    except NetlinkError as error:
        raise NetworkError(f"could not {doing}: {os.strerror(abs(error.code))}{_advice(error.code)}") from error
    except OSError as error:
        raise NetworkError(f"could not {doing}: {error}{_advice(error.errno)}") from error


def _advice(code: int | None) -> str:
    return "; the server needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN" if code in (errno.EPERM, errno.EACCES) else ""
