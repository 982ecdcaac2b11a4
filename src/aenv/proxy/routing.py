"""Where a request on the shared port goes: the control plane, or a port of a sandbox. Pure.

The ways into a sandbox, first match wins (formats: the E2B client's URL rules):

1. host ``{port}-{sandboxID}.{domain}``, any domain;
2. the header pair ``E2b-Sandbox-Id`` / ``E2b-Sandbox-Port`` or ``X-AgentENV-Sandbox-Id`` / ``-Port``;
3. the path ``/proxy/{sandboxID}/{port}/...``, whose prefix is cut off;
4. a signed file URL ``/files?...&signature=v1_...`` that names no sandbox: its signature tells which.

Host and headers that name different sandboxes are refused. The path is no claim beside them: it is the sandbox's own.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qs

from aenv.errors import BadRequest
from aenv.orchestrator.protocol import TokenTest

ENVD_PORT = 49983

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI gives them: names in lower case, in order, repeated ones kept apart."""

ID_HEADERS = (b"e2b-sandbox-id", b"x-agentenv-sandbox-id")
PORT_HEADERS = (b"e2b-sandbox-port", b"x-agentenv-sandbox-port")
TRAFFIC_TOKEN_HEADER = b"e2b-traffic-access-token"
_ROUTING = frozenset((*ID_HEADERS, *PORT_HEADERS, b"host", b"x-api-key"))

# Older clients send sandbox headers on control-plane calls too; with an API key these paths are the control plane's.
# Not /health: that is envd's as well, and is asked for there with sandbox headers.
_API_PATH = re.compile(
    rb"/(?:v\d+/)?(?:sandboxes|templates|default-templates|snapshots|volumes|volumecontent|secrets|teams|nodes"
    rb"|api-keys|access-tokens|events)(?:/|$)"
)
_SANDBOX_HOST = re.compile(rb"(\d+)-([^.]*)\.")
# `10-0-0-5.sslip.io` is how wildcard resolvers spell an address, not port 10 of a sandbox.
_ADDRESS_HOST = re.compile(rb"\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}\.")
_SANDBOX_ID = re.compile(r"[a-z0-9]{1,64}")
_PROXY_PATH = re.compile(rb"/proxy/([^/]*)/([^/]*)(/.*|$)", re.DOTALL)
# All that envd has for callers other than the node itself. envd compares paths byte for byte, and so must this: another
# spelling is another path, which it does not have.
_ENVD_PATH = re.compile(rb"/(?:health|files|metrics|envs|(?:process\.Process|filesystem\.Filesystem)/[A-Za-z]+)")


@dataclass(frozen=True, slots=True)
class SandboxTarget:
    """`path` is what the sandbox is asked for, byte for byte; `prefix` what was cut off before it."""

    sandbox_id: str
    port: int
    path: bytes
    prefix: bytes = b""

    @property
    def internal(self) -> bool:
        """Whether this asks envd for anything but what it has for everybody: its other routes are the node's own."""
        return self.port == ENVD_PORT and _ENVD_PATH.fullmatch(self.path) is None


@dataclass(frozen=True, slots=True)
class SignedFile:
    """A file URL without a sandbox: it belongs to the one whose envd token satisfies `matches`."""

    path: bytes
    matches: TokenTest


@dataclass(frozen=True, slots=True)
class Preflight:
    """A browser's CORS question about a request that will carry routing headers; no sandbox can be asked yet."""

    request_headers: bytes


Target = SandboxTarget | SignedFile | Preflight | None
"""None: the control plane."""


def decide(method: str, path: bytes, query: bytes, headers: Headers) -> Target:
    """Decide from the raw path (without query). Raises BadRequest for a sandbox address that is malformed."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ROUTING and found.setdefault(name, value) != value:
            raise BadRequest(f"the header {name.decode()} is given twice with different values; send it once")
    host = found.get(b"host", b"").lower()
    named: list[SandboxTarget] = []
    if (match := _SANDBOX_HOST.match(host)) and not _ADDRESS_HOST.match(host):
        named.append(SandboxTarget(_sandbox_id(match[2]), _port(match[1]), path))
    elif b"x-api-key" in found and _API_PATH.match(path):
        return None
    for id_header, port_header in zip(ID_HEADERS, PORT_HEADERS, strict=True):
        if id_header in found:
            port = _port(found[port_header]) if port_header in found else ENVD_PORT
            named.append(SandboxTarget(_sandbox_id(found[id_header]), port, path))
    if named:
        if any(other.sandbox_id != named[0].sandbox_id for other in named):
            ids = " and ".join(dict.fromkeys(target.sandbox_id for target in named))
            raise BadRequest(f"host and headers name different sandboxes ({ids}); send the request to one of them")
        return named[0]
    if match := _PROXY_PATH.match(path):
        return SandboxTarget(_sandbox_id(match[1]), _port(match[2]), match[3] or b"/", path[: match.end(2)])
    if path == b"/files" and (matches := _signature_test(method, query, headers)):
        return SignedFile(path, matches)
    return _preflight(headers) if method == "OPTIONS" else None


def _sandbox_id(raw: bytes) -> str:
    # Clients of the first API version append "-<clientID>".
    sandbox_id = raw.decode("latin-1").partition("-")[0]
    if not _SANDBOX_ID.fullmatch(sandbox_id):
        raise BadRequest(f"{raw.decode('latin-1')!r} is not a sandbox id; ids are lower-case letters and digits")
    return sandbox_id


def _port(raw: bytes) -> int:
    # bytes.isdigit() is ASCII only; int() alone would take "+80", "8_0" and other scripts' digits.
    if raw.isdigit() and len(raw) <= 5 and 1 <= (port := int(raw)) <= 65535:
        return port
    raise BadRequest(f"{raw.decode('latin-1')!r} is not a port; use a number from 1 to 65535")


def _signature_test(method: str, query: bytes, headers: Headers) -> TokenTest | None:
    if b"signature=" not in query:
        return None
    fields = {name: values[0] for name, values in parse_qs(query.decode("latin-1"), keep_blank_values=True).items()}
    signature = fields.get("signature", "")
    if method == "OPTIONS":
        method = next((v.decode("latin-1") for k, v in headers if k == b"access-control-request-method"), method)
    operation = "read" if method in ("GET", "HEAD") else "write"
    start = f"{fields.get('path', '')}:{operation}:{fields.get('username', '')}:"
    end = f":{fields['signature_expiration']}" if "signature_expiration" in fields else ""

    def matches(token: str, /) -> bool:
        digest = hashlib.sha256(f"{start}{token}{end}".encode()).digest()
        expected = "v1_" + base64.b64encode(digest).decode().rstrip("=")
        return hmac.compare_digest(expected.encode(), signature.encode())

    return matches


def _preflight(headers: Headers) -> Preflight | None:
    for name, value in headers:
        if name == b"access-control-request-headers" and any(header in value.lower() for header in ID_HEADERS):
            return Preflight(value)
    return None
