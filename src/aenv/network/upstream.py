"""The servers that the sandboxes' resolver asks: those of the settings, else the host's own."""

import asyncio
import time
from ipaddress import ip_address
from pathlib import Path

import dns.asyncbackend
import dns.asyncquery
import dns.exception
from dns.message import Message

from aenv.errors import ConfigError, NetworkError

RESOLV_CONF = Path("/etc/resolv.conf")
_RELOAD_SECONDS = 5.0
_ATTEMPT_SECONDS = 2.0
_MAX_SERVERS = 3

Server = tuple[str, int]


class Upstream:
    """Asks one server after another, each question from a port and with an id of its own."""

    def __init__(self, configured: tuple[str, ...], resolv_conf: Path = RESOLV_CONF) -> None:
        """`configured`: ``address``, ``address:port`` or ``[IPv6]:port``. Raises ConfigError."""
        self._configured = tuple(parse_server(text) for text in configured)
        self._resolv_conf = resolv_conf
        self._host: tuple[Server, ...] = ()
        self._read_at = -_RELOAD_SECONDS

    async def ask(self, query: Message) -> Message:
        """Over UDP, then TCP for a truncated answer. Raises NetworkError when no server answers."""
        servers = self._configured or await self._host_servers()
        reason = "there is no upstream server; set network.dns_upstream"
        for address, port in servers[:_MAX_SERVERS]:
            try:
                async with asyncio.timeout(2 * _ATTEMPT_SECONDS):
                    response, _ = await dns.asyncquery.udp_with_fallback(
                        query,
                        address,
                        timeout=_ATTEMPT_SECONDS,
                        port=port,
                        ignore_unexpected=True,
                        ignore_errors=True,
                        backend=dns.asyncbackend.get_backend("asyncio"),
                    )
                return response
            except (dns.exception.DNSException, OSError, EOFError, TimeoutError) as error:
                reason = f"{address} port {port}: {error}"
        raise NetworkError(f"no upstream DNS server answered: {reason}")

    async def _host_servers(self) -> tuple[Server, ...]:
        """The host's resolv.conf changes with its leases; it is read again when a question comes some seconds later."""
        now = time.monotonic()
        if now - self._read_at >= _RELOAD_SECONDS:
            self._read_at = now
            try:
                text = await asyncio.to_thread(self._resolv_conf.read_text)
            except OSError:
                return self._host
            self._host = tuple((address, 53) for address in nameservers(text))
        return self._host


def nameservers(resolv_conf: str) -> list[str]:
    """The addresses of the `nameserver` lines, in order; what is no address is passed over, as libc does."""
    found = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                ip_address(words[1])
            except ValueError:
                continue
            found.append(words[1])
    return found


def parse_server(text: str) -> Server:
    """Raises ConfigError."""
    host, port = text, "53"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        number = int(port)
        if not 0 < number < 65536:
            raise ValueError("port out of range")
        return str(ip_address(host)), number
    except ValueError as error:
        raise ConfigError(
            f"network.dns_upstream: {text!r} must be an IP address, with a port if it is not 53: {error}"
        ) from None
