"""Where requests on the shared port go, and what crosses the proxy."""

import base64
import hashlib
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import BadRequest
from aenv.proxy.headers import Framing, Request, forwarded, framing, request_head, response_headers
from aenv.proxy.routing import ENVD_PORT, Preflight, SandboxTarget, SignedFile, Target, decide

KEY = (b"x-api-key", b"e2b_0")


def host(value: str) -> tuple[bytes, bytes]:
    return (b"host", value.encode())


def to(path: bytes, *headers: tuple[bytes, bytes], method: str = "GET", query: bytes = b"") -> Target:
    return decide(method, path, query, headers)


@pytest.mark.parametrize("spelling", ["e2b", "x-agentenv"])
def test_headers_name_sandbox_and_port(spelling: str) -> None:
    id_header, port_header = f"{spelling}-sandbox-id".encode(), f"{spelling}-sandbox-port".encode()
    assert to(b"/x", (id_header, b"iabc"), (port_header, b"8080")) == SandboxTarget("iabc", 8080, b"/x")
    assert to(b"/x", (id_header, b"iabc")) == SandboxTarget("iabc", ENVD_PORT, b"/x")
    assert to(b"/x", (port_header, b"8080")) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("8080-iabc.sandbox.test", ("iabc", 8080)),
        ("8080-iabc.sandbox.test:8443", ("iabc", 8080)),
        ("8080-IABC.Sandbox.Test", ("iabc", 8080)),
        ("49983-iabc-client1.sandbox.test", ("iabc", 49983)),
        ("1-iabc.localhost", ("iabc", 1)),
        ("65535-iabc.10-0-0-5.sslip.io", ("iabc", 65535)),
    ],
)
def test_hosts_name_port_and_sandbox(name: str, expected: tuple[str, int]) -> None:
    assert to(b"/sandboxes", host(name), KEY) == SandboxTarget(*expected, b"/sandboxes")


@pytest.mark.parametrize(
    "name",
    [
        "localhost:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "api.test",
        "10-0-0-5.sslip.io",
        "my-host.test",
        "",
        "8080-iabc",
    ],
)
def test_other_hosts_leave_it_to_the_headers(name: str) -> None:
    assert to(b"/x", host(name)) is None
    assert to(b"/x", host(name), (b"e2b-sandbox-id", b"iabc")) == SandboxTarget("iabc", ENVD_PORT, b"/x")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/proxy/iabc/8080/a%2Fb/../c//d", (8080, b"/a%2Fb/../c//d")),
        (b"/proxy/iabc/8080/", (8080, b"/")),
        (b"/proxy/iabc/8080", (8080, b"/")),
        (b"/proxy/iabc-client/8080//proxy/x", (8080, b"//proxy/x")),
    ],
)
def test_the_path_prefix_is_cut_off_and_the_rest_kept(path: bytes, expected: tuple[int, bytes]) -> None:
    target = to(path)
    assert isinstance(target, SandboxTarget)
    assert (target.sandbox_id, target.port, target.path) == ("iabc", *expected)
    assert path.startswith(target.prefix)


def test_headers_win_over_the_path_prefix() -> None:
    assert to(b"/proxy/iabc/1/x", (b"e2b-sandbox-id", b"iother")) == SandboxTarget(
        "iother", ENVD_PORT, b"/proxy/iabc/1/x"
    )


@pytest.mark.parametrize("path", [b"/sandboxes", b"/v2/sandboxes/iabc/connect", b"/templates/x", b"/v3/templates"])
def test_an_api_key_on_an_api_path_is_for_the_control_plane(path: bytes) -> None:
    sandbox = (b"e2b-sandbox-id", b"iabc")
    assert to(path, sandbox, KEY) is None
    assert to(path, sandbox) == SandboxTarget("iabc", ENVD_PORT, path)


@pytest.mark.parametrize("path", [b"/health", b"/sandboxesx", b"/files", b"/x/sandboxes"])
def test_an_api_key_elsewhere_changes_nothing(path: bytes) -> None:
    assert to(path, (b"e2b-sandbox-id", b"iabc"), KEY) == SandboxTarget("iabc", ENVD_PORT, path)
    assert to(path, KEY) is None


@pytest.mark.parametrize(
    "port", [b"0", b"65536", b"99999", b"", b"-1", b"+80", b"8_0", b"80 ", b"0x50", b"\xd9\xa3", b"9" * 99]
)
def test_a_bad_port_is_refused_wherever_it_stands(port: bytes) -> None:
    with pytest.raises(BadRequest, match="is not a port"):
        to(b"/", (b"e2b-sandbox-id", b"iabc"), (b"e2b-sandbox-port", port))
    with pytest.raises(BadRequest, match="is not a port"):
        to(b"/proxy/iabc/%b/" % port)
    if port.isdigit():
        with pytest.raises(BadRequest, match="is not a port"):
            to(b"/", (b"host", port + b"-iabc.test"))


@pytest.mark.parametrize("sandbox_id", [b"", b"-x", b"a/b", b"a b", b"IABC", b"..", b"\xff", b"a\r\nb", b"a" * 65])
def test_a_bad_id_is_refused(sandbox_id: bytes) -> None:
    with pytest.raises(BadRequest, match="is not a sandbox id"):
        to(b"/", (b"e2b-sandbox-id", sandbox_id))


@pytest.mark.parametrize("name", ["8080-.test", "8080--.test", "8080-a_b.test"])
def test_a_host_with_a_bad_id_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="is not a sandbox id"):
        to(b"/", host(name))


@pytest.mark.parametrize(
    "headers",
    [
        [(b"e2b-sandbox-id", b"ia"), (b"x-agentenv-sandbox-id", b"ib")],
        [host("8080-ia.test"), (b"e2b-sandbox-id", b"ib")],
        [host("8080-ia.test"), (b"x-agentenv-sandbox-id", b"ib"), KEY],
        [host("8080-ia.test"), (b"e2b-sandbox-id", b"ia"), (b"x-agentenv-sandbox-id", b"ib")],
    ],
)
def test_two_ways_of_naming_different_sandboxes_are_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(BadRequest, match="different sandboxes"):
        to(b"/", *headers)


def test_two_ways_of_naming_the_same_sandbox_are_fine() -> None:
    headers = (host("8080-ia-client.test"), (b"e2b-sandbox-id", b"ia"), (b"e2b-sandbox-port", b"49983"))
    assert to(b"/", *headers) == SandboxTarget("ia", 8080, b"/")


def test_contradicting_routing_headers_are_refused() -> None:
    with pytest.raises(BadRequest, match="given twice"):
        to(b"/", (b"e2b-sandbox-id", b"ia"), (b"e2b-sandbox-id", b"ib"))
    assert to(b"/", (b"e2b-sandbox-id", b"ia"), (b"e2b-sandbox-id", b"ia")) == SandboxTarget("ia", ENVD_PORT, b"/")


@pytest.mark.parametrize(
    "path",
    [
        b"/health",
        b"/files",
        b"/metrics",
        b"/envs",
        b"/process.Process/Start",
        b"/filesystem.Filesystem/ListDir",
    ],
)
def test_what_envd_has_for_everybody(path: bytes) -> None:
    assert not SandboxTarget("i", ENVD_PORT, path).internal


@pytest.mark.parametrize(
    "path",
    [
        *(b"/init", b"/init/", b"//init", b"/./init", b"/x/../init", b"/%69nit", b"/INIT", b"/%2finit", b"\\init"),
        *(b"/shutdown", b"//shutdown", b"/%73hutdown", b"/SHUTDOWN", b"/x/../shutdown", b"http://h/shutdown"),
        *(b"/health/../init", b"/files/../init", b"/files/x", b"/health\n", b"/health/", b"/Health", b"/he%61lth"),
        *(b"/process.Process/../init", b"/process.Process/", b"/process.Process/Start/x", b"/processXProcess/Start"),
        *(b"/", b"*", b"", b"/added-later", b"/health#/init", b"/health\0"),
    ],
)
def test_nothing_else_of_envd_is_reachable(path: bytes) -> None:
    """envd answers the node itself, which the proxy's connections seem to be, without a token."""
    assert SandboxTarget("i", ENVD_PORT, path).internal
    assert not SandboxTarget("i", 8080, path).internal


def signature(path: str, operation: str, user: str, token: str, expiration: str = "") -> str:
    text = f"{path}:{operation}:{user}:{token}" + (f":{expiration}" if expiration else "")
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.mark.parametrize(("method", "operation"), [("GET", "read"), ("HEAD", "read"), ("POST", "write")])
@pytest.mark.parametrize("expiration", ["", "1900000000"])
def test_a_signed_file_url_finds_its_sandbox(method: str, operation: str, expiration: str) -> None:
    path, user = "/home/user/a b+ü.txt", "root"
    query = f"path={quote(path)}&username={user}&signature={quote(signature(path, operation, user, 'tok', expiration))}"
    query += f"&signature_expiration={expiration}" if expiration else ""
    target = to(b"/files", method=method, query=query.encode())
    assert isinstance(target, SignedFile)
    assert target.matches("tok")
    assert not target.matches("other")
    wrong = to(b"/files", method="POST" if operation == "read" else "GET", query=query.encode())
    assert isinstance(wrong, SignedFile)
    assert not wrong.matches("tok")


def test_a_file_url_with_an_id_or_without_signature_is_no_signed_one() -> None:
    assert to(b"/files", query=b"path=x") is None
    assert to(b"/files", (b"e2b-sandbox-id", b"ia"), query=b"signature=v1_x") == SandboxTarget(
        "ia", ENVD_PORT, b"/files"
    )


def test_a_preflight_for_routing_headers_is_answered_without_a_sandbox() -> None:
    asked = (b"access-control-request-headers", b"E2b-Sandbox-Id,x-access-token")
    assert to(b"/files", asked, method="OPTIONS") == Preflight(asked[1])
    assert to(b"/files", (b"access-control-request-headers", b"x-api-key"), method="OPTIONS") is None
    assert to(b"/proxy/ia/1/", asked, method="OPTIONS") == SandboxTarget("ia", 1, b"/", b"/proxy/ia/1")


_BYTES = st.binary(max_size=40)
_TEXT = st.from_regex(rb"[a-z0-9A-Z./:%_-]{0,30}", fullmatch=True)
_NAMES = st.sampled_from(
    [
        b"host",
        b"e2b-sandbox-id",
        b"e2b-sandbox-port",
        b"x-agentenv-sandbox-id",
        b"x-agentenv-sandbox-port",
        b"x-api-key",
    ]
)


@given(
    method=st.sampled_from(["GET", "POST", "OPTIONS"]),
    path=st.one_of(_BYTES, _TEXT.map(lambda text: b"/proxy/" + text), st.just(b"/files")),
    query=st.one_of(_BYTES, _BYTES.map(lambda raw: b"path=%b&signature=%b" % (raw, raw))),
    headers=st.lists(st.tuples(_NAMES, st.one_of(_BYTES, _TEXT)), max_size=5),
)
def test_any_input_is_decided_or_refused(
    method: str, path: bytes, query: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    try:
        target = decide(method, path, query, headers)
    except BadRequest:
        return
    if isinstance(target, SandboxTarget):
        assert 1 <= target.port <= 65535
        assert target.sandbox_id.isascii()
        assert target.sandbox_id.isalnum()
        assert target.prefix + target.path in (path, path + b"/")
        assert target.internal in (True, False)
    elif isinstance(target, SignedFile):
        assert not target.matches("token")


def request(*headers: tuple[bytes, bytes], **changes: object) -> Request:
    values: dict[str, object] = {
        "method": "GET",
        "target": b"/x",
        "port": 8080,
        "prefix": b"",
        "headers": headers,
        "client": "192.0.2.1",
        "scheme": "http",
        "mask_host": None,
        "api_key": b"secret",
    }
    return Request(**(values | changes))  # type: ignore[arg-type]


def test_what_is_not_for_the_sandbox_is_taken_out() -> None:
    sent = (
        host("app.test"),
        (b"connection", b"keep-alive, X-Drop, content-length"),
        (b"x-drop", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"e2b-sandbox-id", b"i"),
        (b"e2b-sandbox-port", b"1"),
        (b"x-agentenv-sandbox-id", b"i"),
        (b"x-agentenv-sandbox-port", b"1"),
        (b"e2b-traffic-access-token", b"t"),
        (b"x-api-key", b"secret"),
        (b"content-length", b"3"),
        (b"x-access-token", b"a"),
        (b"cookie", b"a=1"),
        (b"cookie", b"b=2"),
    )
    assert forwarded(request(*sent)) == [
        host("app.test"),
        (b"content-length", b"3"),
        (b"x-access-token", b"a"),
        (b"cookie", b"a=1"),
        (b"cookie", b"b=2"),
        (b"x-forwarded-for", b"192.0.2.1"),
        (b"x-forwarded-proto", b"http"),
        (b"x-forwarded-host", b"app.test"),
    ]


@pytest.mark.parametrize("name", [b"x-api-key", b"authorization", b"cookie", b"x-forwarded-host", b"host", b"x-own"])
@pytest.mark.parametrize("value", [b"%s", b"%s ", b"%s\t", b" %s", b"%s, x", b"x, %s", b"Bearer %s", b"a=1; key=%s"])
def test_the_platforms_api_key_never_goes_into_a_sandbox(name: bytes, value: bytes) -> None:
    key = b"e2b_" + b"0" * 40
    sent = request((name, value % key), (b"x-other", b"1"), api_key=key)
    assert (b"x-other", b"1") in forwarded(sent)
    assert key not in request_head(sent, Framing())
    with pytest.raises(BadRequest, match="API key"):
        request_head(request(target=b"/x?key=" + key, api_key=key), Framing())


def test_an_api_key_of_the_sandboxs_own_application_passes() -> None:
    assert (b"x-api-key", b"theirs") in forwarded(request((b"x-api-key", b"theirs")))


def test_forwarding_headers_of_a_front_proxy_are_extended() -> None:
    sent = [(b"x-forwarded-for", b"198.51.100.7"), (b"x-forwarded-proto", b"https"), (b"x-forwarded-host", b"pub.test")]
    result = dict(forwarded(request(host("inner"), *sent, prefix=b"/proxy/i/8080")))
    assert result[b"x-forwarded-for"] == b"198.51.100.7, 192.0.2.1"
    assert result[b"x-forwarded-proto"] == b"https"
    assert result[b"x-forwarded-host"] == b"pub.test"
    assert result[b"x-forwarded-prefix"] == b"/proxy/i/8080"


def test_the_host_can_be_masked() -> None:
    assert forwarded(request(host("app.test"), mask_host="localhost:${PORT}"))[0] == host("localhost:8080")
    assert forwarded(request())[0] == host("localhost:8080")


@pytest.mark.parametrize(
    "bad",
    [
        request((b"x", b"a\r\nb: c")),
        request((b"x", b"a\nb")),
        request((b"x", b"a\0b")),
        request(target=b"/a b"),
        request(target=b"/a\r\nx"),
        request(mask_host="a\r\nb"),
        request(method="GET /"),
    ],
)
def test_nothing_can_be_smuggled_into_the_head(bad: Request) -> None:
    with pytest.raises(BadRequest):
        request_head(bad, Framing())


def test_framing_of_the_request_body() -> None:
    assert framing([]) == Framing()
    assert framing([(b"content-length", b"0")]) == Framing()
    assert framing([(b"content-length", b"5")]) == Framing(length=True)
    assert framing([(b"transfer-encoding", b"chunked")]) == Framing(chunked=True)
    assert framing([(b"expect", b"100-Continue"), (b"content-length", b"5")]).expects_continue
    assert not framing([(b"expect", b"100-continue")]).expects_continue
    head = request_head(request((b"content-length", b"9"), method="POST"), Framing(chunked=True))
    assert b"content-length" not in head
    assert b"\r\ntransfer-encoding: chunked\r\n" in head


def test_response_headers() -> None:
    sent = [
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"connection", b"close, x-own"),
        (b"x-own", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"3"),
    ]
    assert response_headers(200, sent) == [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-length", b"3")]
    assert (b"content-length", b"3") not in response_headers(304, sent)
