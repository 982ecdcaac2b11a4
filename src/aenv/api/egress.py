"""The `network` object of a create as an EgressPolicy. Pure."""

import re
from collections.abc import Collection
from ipaddress import IPv4Network, IPv6Network

from aenv.api.errors import shorten
from aenv.api.wire import SandboxNetworkConfig
from aenv.errors import BadRequest, NotYetAvailable
from aenv.network.protocol import EgressPolicy

ALL_TRAFFIC = "0.0.0.0/0"

MAX_RULES = 1000
"""Entries of each list: every one becomes a firewall element or a resolver rule, and nobody writes more by hand."""

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# The last label is not a number: what looks like an address but is none must not pass as a name.
_DOMAIN = re.compile(rf"(?:\*\.)?(?:{_LABEL}\.)*(?!\d+$){_LABEL}")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")


def policy(network: SandboxNetworkConfig | None, allow_internet_access: bool | None) -> EgressPolicy:
    """Addresses come out as CIDRs without host bits, names in lower case.

    Raises BadRequest naming the entry, and NotYetAvailable for what this version cannot enforce.
    """
    internet = allow_internet_access is not False
    if network is None:
        return EgressPolicy(internet=internet)
    allow = _entries(network.allowOut or (), "allowOut", domains=True)
    deny = _entries(network.denyOut or (), "denyOut", domains=False)
    if internet and ALL_TRAFFIC not in deny and any(_address(entry) is None for entry in allow):
        raise BadRequest(
            "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all "
            "other traffic."
        )
    if network.maskRequestHost is not None:
        _check_host(network.maskRequestHost)
    for name in ("dnsServers", "egressProxy", "rules", "httpsPorts"):
        if getattr(network, name):
            raise NotYetAvailable(f"network.{name} is not available yet; create the sandbox without it")
    return EgressPolicy(internet=internet, allow_out=allow, deny_out=deny)


def _entries(given: Collection[str], field: str, *, domains: bool) -> tuple[str, ...]:
    if len(given) > MAX_RULES:
        raise BadRequest(f"network.{field} has {len(given)} entries; the limit is {MAX_RULES}")
    return tuple(dict.fromkeys(_entry(text, field, domains=domains) for text in given))


def _entry(text: str, field: str, *, domains: bool) -> str:
    if (address := _address(text)) is not None:
        return address
    shown = shorten(text)
    if _is_ipv6(text):
        raise BadRequest(f"network.{field}: {shown!r} is IPv6, which sandboxes do not have; give IPv4 addresses")
    name = text.lower().removesuffix(".")
    if len(name) > 253 or not _DOMAIN.fullmatch(name):
        kinds = (
            "an IPv4 address, a CIDR or a domain (example.com, *.example.com)" if domains else "an IPv4 address or CIDR"
        )
        raise BadRequest(f"network.{field}: {shown!r} is not {kinds}")
    if not domains:
        raise BadRequest(f"network.{field}: {shown!r} is a domain; only IPv4 addresses and CIDRs can be denied")
    return name


def _address(text: str) -> str | None:
    """A single address stays as it is; a network loses its host bits; None for anything else."""
    try:
        network = IPv4Network(text, strict=False)
    except ValueError:
        return None
    return str(network) if "/" in text else str(network.network_address)


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Network(text, strict=False)
    except ValueError:
        return False
    return True


def _check_host(mask: str) -> None:
    """It becomes a header of every request into the sandbox."""
    if len(mask) > 255 or not _HOST.fullmatch(mask.replace("${PORT}", "0")):
        raise BadRequest(
            f"network.maskRequestHost: {shorten(mask)!r} is not a host; write one such as 'localhost:${{PORT}}'"
        )
