"""An egress policy, checked and compiled: which networks, which names. Pure.

Everything a policy says becomes the contents of three nftables sets (`rules.py` holds the fixed rules over them) and
one question for the resolver: may this name be asked for?
"""

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Network

from aenv.errors import BadRequest
from aenv.network.protocol import EgressPolicy

MAX_ENTRIES = 1000
"""Of `allow_out` and of `deny_out`, each."""

EVERYTHING = (IPv4Network("0.0.0.0/1"), IPv4Network("128.0.0.0/1"))
"""0.0.0.0/0 in two halves: nftables interval sets of some versions take no prefix of length 0."""

_ALL = IPv4Network("0.0.0.0/0")
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """`allow` and `deny` are disjointly collapsed networks, allow judged first; what neither holds is allowed.

    `names` are lower-case domains (``example.com``, ``*.example.com``) opened as they are resolved.
    `resolve_all` tells whether the resolver answers any name, or only those of `names`.
    """

    allow: tuple[IPv4Network, ...]
    deny: tuple[IPv4Network, ...]
    names: frozenset[str]
    resolve_all: bool

    def rule_for(self, name: str) -> str | None:
        """The entry of `names` that covers `name` (lower case, no final dot). ``*.`` covers any depth, not the apex."""
        if name in self.names:
            return name
        labels = name.split(".")
        wildcards = ("*." + ".".join(labels[i:]) for i in range(1, len(labels)))
        return next((wildcard for wildcard in wildcards if wildcard in self.names), None)

    @property
    def marks(self) -> tuple[int, ...]:
        return tuple(sorted(name_mark(name) for name in self.names))


def compile_policy(policy: EgressPolicy) -> CompiledPolicy:
    """Raises BadRequest naming the entry and what it must be."""
    allow: list[IPv4Network] = []
    names: set[str] = set()
    for field, entries in (("allowOut", policy.allow_out), ("denyOut", policy.deny_out)):
        if len(entries) > MAX_ENTRIES:
            raise BadRequest(f"{field} has {len(entries)} entries; at most {MAX_ENTRIES} are possible.")
    for text in policy.allow_out:
        network = _network(text)
        if network is None:
            names.add(_domain(text))
        elif isinstance(network, IPv4Network):
            allow.append(network)
        else:
            raise BadRequest(f"allowOut: {text!r} is IPv6, which sandboxes do not have; use IPv4.")
    deny: list[IPv4Network] = []
    for text in policy.deny_out:
        network = _network(text)
        if network is None:
            raise BadRequest(f"denyOut: {text!r} is not an IP address or CIDR.")
        if isinstance(network, IPv4Network):  # IPv6 is denied whatever the policy says
            deny.append(network)
    collapsed = tuple(ipaddress.collapse_addresses(deny))
    denies_all = not policy.internet or collapsed == (_ALL,)
    if names and not denies_all:
        raise BadRequest(
            "When specifying allowed domains in allow out, "
            "you must include 'ALL_TRAFFIC' in deny out to block all other traffic."
        )
    allowed = tuple(ipaddress.collapse_addresses(allow))
    return CompiledPolicy(
        allow=EVERYTHING if allowed == (_ALL,) else allowed,
        deny=EVERYTHING if denies_all else collapsed,
        names=frozenset(names),
        resolve_all=not denies_all or allowed == (_ALL,),
    )


def name_mark(rule: str) -> int:
    """The conntrack mark of connections opened through a domain rule: 32 bits of its hash, never 0 (unmarked)."""
    return int.from_bytes(hashlib.sha256(rule.encode()).digest()[:4]) | 1


def _network(text: str) -> IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        return None


def _domain(text: str) -> str:
    name = text.strip().lower().removesuffix(".")
    labels = name.removeprefix("*.").split(".")
    # A last label of digits alone is a mistyped address, not a domain.
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise BadRequest(
            f"allowOut: {text!r} is not an IP address, CIDR, domain (example.com) or wildcard (*.example.com); "
            "internationalised names are written in their xn-- form."
        )
    return name
