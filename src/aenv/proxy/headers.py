"""What crosses the proxy: the request head sent into a sandbox, the response headers sent back. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from aenv.errors import BadRequest
from aenv.proxy.routing import ID_HEADERS, PORT_HEADERS, TRAFFIC_TOKEN_HEADER, Headers

# RFC 9110 7.6.1, and the obsolete ones still seen.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_FORWARDED = HOP_BY_HOP | {*ID_HEADERS, *PORT_HEADERS, TRAFFIC_TOKEN_HEADER, b"expect", b"host"}
_REWRITTEN = frozenset((b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-prefix"))
# A Connection header may name further headers to drop, but not those that say where the message ends or whose it is.
_KEPT_WHEN_NAMED = frozenset((b"content-length", b"host"))
_BODILESS = frozenset((204, 304))


@dataclass(frozen=True, slots=True)
class Request:
    """A request to be sent into a sandbox. `target` is path and query, raw."""

    method: str
    target: bytes
    port: int
    prefix: bytes
    headers: Headers
    client: str | None
    scheme: str
    mask_host: str | None
    api_key: bytes | None

    def holds_key(self, text: bytes) -> bool:
        """Whether the platform's API key is in it, wherever: in a list, as a bearer token, in a cookie."""
        return self.api_key is not None and self.api_key in text


@dataclass(frozen=True, slots=True)
class Framing:
    """How the request's body comes: `length` bytes, or `chunked`; neither means there is none."""

    length: bool = False
    chunked: bool = False
    expects_continue: bool = False

    @property
    def has_body(self) -> bool:
        return self.length or self.chunked


def framing(headers: Headers) -> Framing:
    length = chunked = expects = False
    for name, value in headers:
        if name == b"content-length":
            length = value.strip() != b"0"
        elif name == b"transfer-encoding":
            chunked = True
        elif name == b"expect":
            expects = value.lower() == b"100-continue"
    return Framing(length=length and not chunked, chunked=chunked, expects_continue=expects and (length or chunked))


def forwarded(request: Request) -> list[tuple[bytes, bytes]]:
    """The end-to-end headers, Host first.

    `X-Access-Token` goes to every port: a code interpreter on its own port uses it to ask envd. It opens nothing but
    the sandbox it is sent to. The platform's own API key opens everything, so no header that holds it goes in.
    """
    named = _named_by_connection(request.headers)
    host = b""
    kept: list[tuple[bytes, bytes]] = []
    rewritten: dict[bytes, bytes] = {}
    for name, value in request.headers:
        if request.holds_key(value):
            continue
        if name in _NOT_FORWARDED or name in named:
            if name == b"host":
                host = value
            continue
        if name in _REWRITTEN:
            before = rewritten.get(name)
            rewritten[name] = value if before is None else before + b", " + value
            continue
        kept.append((name, value))
    _add_forwarding(request, host, rewritten)
    if request.mask_host is not None:
        host = request.mask_host.replace("${PORT}", str(request.port)).encode("latin-1", "replace")
    return [(b"host", host or b"localhost:%d" % request.port), *kept, *rewritten.items()]


def request_head(request: Request, body: Framing) -> bytes:
    """The bytes of request line and headers. Raises BadRequest when a part could be read as the end of another, or the
    target holds the platform's API key."""
    refuse_key_in_target(request)
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("latin-1"), request.target)]
    lines += [b"%b: %b" % header for header in forwarded(request)]
    if body.chunked:
        lines = [line for line in lines if not line.startswith(b"content-length:")]
        lines.append(b"transfer-encoding: chunked")
    if body.expects_continue:
        lines.append(b"expect: 100-continue")
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
        raise BadRequest("the request has a line break or a zero byte inside a header; remove it")
    if lines[0].count(b" ") != 2:
        raise BadRequest("the request target has a space; percent-encode it")
    return head + b"\r\n\r\n"


def refuse_key_in_target(request: Request) -> None:
    """Raises BadRequest: a target cannot be relieved of the key as headers can, and servers log it."""
    if request.holds_key(request.target):
        raise BadRequest("the URL holds the platform's API key, which no sandbox may see; send it in no request to one")


def response_headers(status: int, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The end-to-end headers of a response. The server writes the framing, from Content-Length when it is there; a
    status without a body loses that, as the server would wait for the body."""
    headers = list(headers)
    named = _named_by_connection(headers)
    bodiless = status in _BODILESS
    return [
        (name, value)
        for name, value in headers
        if name not in HOP_BY_HOP and name not in named and not (bodiless and name == b"content-length")
    ]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            break
    else:
        return frozenset()
    tokens = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return frozenset(tokens - _KEPT_WHEN_NAMED)


def _add_forwarding(request: Request, host: bytes, rewritten: dict[bytes, bytes]) -> None:
    """A proxy in front (which ended TLS) knows protocol and host better; every proxy appends the address it saw."""
    if request.client:
        client = request.client.encode("latin-1", "replace")
        before = rewritten.get(b"x-forwarded-for")
        rewritten[b"x-forwarded-for"] = client if before is None else before + b", " + client
    rewritten.setdefault(b"x-forwarded-proto", request.scheme.encode())
    if host:
        rewritten.setdefault(b"x-forwarded-host", host)
    if request.prefix:
        rewritten[b"x-forwarded-prefix"] = rewritten.get(b"x-forwarded-prefix", b"") + request.prefix
