"""Whatever is sent: no 500, and every failure is `{code, message}` with the status in `code`."""

import json
from typing import Any
from urllib.parse import quote

import api_fakes
import pytest
from api_fakes import Answer, Api
from hypothesis import given, settings
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.dictionaries(st.text(), st.text(), max_size=3)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "templateID": st.just("base") | st.text(),
    "timeout": st.integers(-1, 10**9),
    "autoPause": st.booleans(),
    "autoPauseMemory": st.booleans(),
    "autoResume": st.fixed_dictionaries({"enabled": st.booleans()}),
    "secure": st.booleans(),
    "allow_internet_access": st.booleans(),
    "network": st.fixed_dictionaries(
        {},
        optional={
            "allowOut": st.lists(st.text() | st.ip_addresses().map(str), max_size=3),
            "denyOut": st.lists(st.just("0.0.0.0/0") | st.text(), max_size=3),
            "allowPublicTraffic": st.booleans() | st.none(),
            "maskRequestHost": st.text(),
            "rules": JSON,
        },
    ),
    "metadata": TEXTS,
    "envVars": TEXTS,
    "mcp": JSON,
    "iam": JSON,
    "volumeMounts": st.lists(st.fixed_dictionaries({"name": st.text(), "path": st.text()}), max_size=2),
}
# Mostly right, here and there wrong: what gets furthest in.
CREATES = st.fixed_dictionaries({}, optional={name: good | JSON for name, good in FIELDS.items()})
SEGMENTS = st.sampled_from(
    ["sandboxes", "v2", "templates", "aliases", "connect", "timeout", "base", "health", "snapshots", "fork", "pause"]
)
TEXT_SEGMENTS = st.text().map(lambda text: quote(text, safe="", errors="surrogatepass"))
METHODS = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "X"])


@pytest.fixture(scope="module")
def api() -> Api:
    return api_fakes.make()


def acceptable(answer: Answer) -> None:
    assert answer.status < 500 or answer.status == 501, answer
    if answer.status >= 400:
        body = answer.json()
        assert body["code"] == answer.status
        assert 0 < len(body["message"]) <= 1001
        assert answer.headers["content-type"] == "application/json"


# No deadline per example: this is about answers, not about a busy machine's speed.
@settings(deadline=None)
@given(CREATES, st.sampled_from(["/v2/sandboxes", "/sandboxes"]))
async def test_creates(api: Api, body: object, path: str) -> None:
    api.sandboxes.clear()
    answer = await api.json("POST", path, body)
    acceptable(answer)
    assert (answer.status == 201) == bool(api.sandboxes.running)
    if answer.status == 201:
        identifier = answer.json()["sandboxID"]
        assert (await api.call("GET", f"/sandboxes/{identifier}")).status == 200
        assert [item["sandboxID"] for item in (await api.call("GET", "/v2/sandboxes")).json()] == [identifier]


@settings(deadline=None)
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
async def test_bodies_of_any_bytes(api: Api, body: bytes) -> None:
    api.sandboxes.clear()
    identifier = await api.create()
    calls = ("connect", "pause", "resume", "fork", "snapshots", "rollback", "refreshes", "timeout")
    for path in ("", *(f"/{identifier}/{call}" for call in calls)):
        acceptable(await api.call("POST", f"/sandboxes{path}", body))
        acceptable(await api.call("POST", f"/v2/sandboxes{path}", body))


STATES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "pause": {"memory": st.booleans(), "requireHealthyGuest": st.booleans()},
    "resume": {"timeout": st.integers(-1, 10**9), "autoPause": st.booleans(), "memory": st.booleans()},
    "connect": {"timeout": st.integers(-1, 10**9), "memory": st.booleans()},
    "fork": {"timeout": st.integers(-1, 10**9), "count": st.integers(-1, 20)},
    "snapshots": {"name": st.text(max_size=9), "memory": st.booleans()},
    "rollback": {"snapshotID": st.just("tsnap1:default") | st.text()},
}
CALLS = st.sampled_from(sorted(STATES)).flatmap(
    lambda call: st.tuples(
        st.just(call),
        st.fixed_dictionaries({}, optional={name: good | JSON for name, good in STATES[call].items()}),
    )
)


@settings(deadline=None)
@given(st.lists(CALLS, max_size=8))
async def test_calls_in_any_order(api: Api, calls: list[tuple[str, object]]) -> None:
    api.sandboxes.clear()
    identifier = await api.create()
    for call, body in calls:
        answer = await api.json("POST", f"/sandboxes/{identifier}/{call}", body)
        acceptable(answer)
        if call == "fork" and answer.status == 201:
            assert all(len(result) == 1 for result in answer.json())
    shown = (await api.call("GET", f"/sandboxes/{identifier}")).json()
    assert (shown["state"] == "paused") == ("pauseMode" in shown)
    assert (await api.call("GET", "/snapshots")).status == 200


@settings(deadline=None)
@given(st.text())
async def test_deleting_any_snapshot(api: Api, name: str) -> None:
    answer = await api.call("DELETE", f"/templates/{quote(name, safe='', errors='surrogatepass')}")
    acceptable(answer)
    assert answer.status in (400, 403, 404)


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(
            ["metadata", "state", "order", "startedAfter", "template", "nextToken", "limit", "sandboxID", "name"]
        ),
        st.text() | st.integers().map(str) | st.datetimes().map(str),
    )
)
async def test_queries_of_any_text(api: Api, query: dict[str, str]) -> None:
    api.sandboxes.clear()
    await api.create()
    encoded = "&".join(f"{key}={quote(value, errors='surrogatepass')}" for key, value in query.items())
    for path in ("/v2/sandboxes", "/sandboxes", "/v2/templates", "/templates/base", "/snapshots"):
        acceptable(await api.call("GET", f"{path}?{encoded}"))


@settings(deadline=None)
@given(
    METHODS,
    st.lists(SEGMENTS | TEXT_SEGMENTS, max_size=4),
    st.binary(),
)
async def test_paths_and_queries_of_any_bytes(api: Api, method: str, segments: list[str], query: bytes) -> None:
    api.sandboxes.clear()
    target = ("/" + "/".join(segments)).encode() + b"?" + query.replace(b"#", b"")
    answer = await api.call(method, target, b"{}")
    if method != "HEAD":
        acceptable(answer)


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=255, exclude_characters="\r\n")))
async def test_headers_of_any_text(api: Api, value: str) -> None:
    api.sandboxes.clear()
    headers = [(name, value) for name in ("Idempotency-Key", "Content-Length", "Content-Type", "Accept", "Host")]
    acceptable(await api.json("POST", "/v2/sandboxes", {"templateID": "base"}, headers=headers))
