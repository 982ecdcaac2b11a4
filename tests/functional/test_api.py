"""Every endpoint of this version, over in-memory sandboxes."""

import json
import subprocess
import sys
from pathlib import Path

import api_fakes
import pytest
from api_fakes import Api, close, failed
from structlog.testing import capture_logs

from aenv.api import later
from aenv.api.app import create_app
from aenv.config import ApiSettings, OrchestratorSettings, Settings
from aenv.errors import Conflict, DeadlineExceeded, InsufficientStorage, TooManyRequests, Unavailable, VmmError

UNKNOWN = "i99999999999999999999"


@pytest.fixture(scope="module")
def shared() -> Api:
    return api_fakes.make()


@pytest.fixture
def api(shared: Api) -> Api:
    shared.sandboxes.clear()
    return shared


# The key.


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/sandboxes"),
        ("GET", "/no/such/path"),
        ("PUT", "/sandboxes"),
        ("POST", "/sandboxes/x/fork"),
        ("GET", "/%FF"),
        ("GET", "/he%61lth"),
        ("GET", "/health/"),
        ("GET", "/v2/sandboxes?limit=0"),
    ],
)
async def test_the_key_precedes_everything(api, method, target):
    failed(await api.call(method, target, key=None), 401, "X-API-Key")
    failed(await api.call(method, target, key="e2b_" + "0" * 40), 401, "Wrong API key")
    assert (await api.call(method, target)).status != 401


async def test_the_key_precedes_reading_the_body(api):
    failed(await api.call("POST", "/v2/sandboxes", [b"{nonsense"] * 10, key="wrong"), 401)
    assert api.chunks_read == 0


async def test_two_keys_of_which_one_is_wrong(api):
    failed(await api.call("GET", "/sandboxes", headers=[("X-API-Key", "other")]), 401)


@pytest.mark.parametrize("key", ["", "é", "e2b_", api_fakes.KEY + "0", api_fakes.KEY[:-1]])
async def test_nearly_a_key(api, key):
    failed(await api.call("GET", "/sandboxes", key=key), 401)


async def test_health_and_the_document_are_open(api):
    health = await api.call("GET", "/health", key=None)
    assert (health.status, health.json()) == (200, {"status": "ok"})
    assert (await api.call("HEAD", "/health", key=None)).status == 200
    assert (await api.call("GET", "/openapi.json", key=None)).json()["openapi"].startswith("3.1")


# Create.


async def test_create_v2(api):
    answer = await api.json("POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"a": "b"}, "unknown": 1})
    assert answer.status == 201
    assert answer.json() == {
        "templateID": "tplbase",
        "sandboxID": "i00000000000000000001",
        "clientID": "aenv",
        "envdVersion": "0.6.13",
        "alias": "base",
        "envdAccessToken": "envd-i00000000000000000001",
        "trafficAccessToken": None,
        "domain": None,
    }
    assert answer.headers["server-timing"] == "guest;dur=1234.56, init;dur=7"
    assert api.sandboxes.specs[0].timeout == 300


async def test_create_v1(api):
    answer = await api.json("POST", "/sandboxes", {"templateID": "base", "secure": False})
    assert answer.status == 201
    assert "envdAccessToken" not in answer.json()
    assert api.sandboxes.specs[0].timeout == 15


async def test_the_domain_is_told_when_there_is_one():
    api = api_fakes.make(domain="sbx.example.test:8443")
    identifier = await api.create()
    assert (await api.call("GET", f"/sandboxes/{identifier}")).json()["domain"] == "sbx.example.test:8443"
    answer = await api.json("POST", f"/v2/sandboxes/{identifier}/connect")
    assert answer.json()["domain"] == "sbx.example.test:8443"


async def test_private_traffic_has_a_token(api):
    answer = await api.json("POST", "/v2/sandboxes", {"templateID": "base", "network": {"allowPublicTraffic": False}})
    assert answer.json()["trafficAccessToken"].startswith("traffic-")


async def test_idempotency(api):
    body = {"templateID": "base"}
    header = {"headers": [("Idempotency-Key", "abc-1")]}
    first = await api.json("POST", "/v2/sandboxes", body, **header)
    assert (await api.json("POST", "/v2/sandboxes", body, **header)).json() == first.json()
    assert len(api.sandboxes.running) == 1
    failed(await api.json("POST", "/v2/sandboxes", {**body, "timeout": 5}, **header), 409)
    for key in ("", "A", "a" * 256):
        answer = await api.json("POST", "/v2/sandboxes", body, headers=[("Idempotency-Key", key)])
        failed(answer, 400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b'{"templateID":"\xff"}', 400, "not valid JSON"),
        (b'{"templateID":"b","metadata":{"a":"\\ud800"}}', 400, "not valid JSON"),
        (b"[" * 100_000, 400, "recursion"),
        (b"[]", 400, "object"),
        (b"{}", 400, "templateID is required"),
        (b'{"templateID":"base","timeout":"5"}', 400, 'timeout must be a valid integer, not "5"'),
        (b'{"templateID":"base","timeout":0}', 400, "Timeout must be greater than 0"),
        (b'{"templateID":"base","timeout":2592001}', 400, "Timeout cannot be greater than 720 hours"),
        (b'{"templateID":"base","metadata":{"a":1}}', 400, "metadata"),
        (b'{"templateID":"base","envVars":{"A=":"b"}}', 400, "envVars"),
        (b'{"templateID":"nope"}', 404, "template 'nope' not found"),
        (b'{"templateID":""}', 400, "Invalid template reference"),
        (b'{"templateID":"base","autoPauseMemory":false}', 400, "autoPause"),
        (b'{"templateID":"base","autoPause":"yes"}', 400, "autoPause must be a valid boolean"),
    ],
)
async def test_creates_that_fail_make_nothing(api, body, status, part):
    for path in ("/v2/sandboxes", "/sandboxes"):
        failed(await api.call("POST", path, body), status, part)
    assert api.sandboxes.specs == []


async def test_a_long_value_is_not_thrown_back(api):
    answer = await api.json("POST", "/v2/sandboxes", {"templateID": "b" * 100_000})
    failed(answer, 404, "template 'bbb")
    assert len(answer.body) < 1100


async def test_any_content_type_that_parses(api):
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded", "nonsense"):
        headers = [("Content-Type", kind), ("Content-Encoding", "identity")]
        assert (await api.call("POST", "/v2/sandboxes", b'{"templateID":"base"}', headers=headers)).status == 201


async def test_a_10_mb_metadata_value_is_refused_unread(api):
    body = json.dumps({"templateID": "base", "metadata": {"k": "v" * 10_000_000}}).encode()
    chunks = [body[start : start + 65536] for start in range(0, len(body), 65536)]
    failed(await api.call("POST", "/v2/sandboxes", chunks), 413, "1048576 bytes")
    assert api.chunks_read == 17
    length = [("Content-Length", str(len(body)))]
    failed(await api.call("POST", "/v2/sandboxes", chunks, headers=length), 413)
    assert api.chunks_read == 0


async def test_metadata_over_its_own_limit(api):
    failed(
        await api.json("POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"k": "v" * 65536}}),
        400,
        "metadata has 65537 bytes of keys and values; the limit is 65536",
    )


# List.


async def test_a_listing_has_all_required_fields(api):
    await api.create(metadata={"a": "b"})
    answer = await api.call("GET", "/v2/sandboxes")
    [item] = answer.json()
    assert (answer.headers["x-total-running"], answer.headers.get("x-next-token")) == ("1", None)
    assert close(item.pop("startedAt"), 0)
    assert close(item.pop("endAt"), 300)
    assert item == {
        "templateID": "tplbase",
        "sandboxID": "i00000000000000000001",
        "clientID": "aenv",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 8192,
        "state": "running",
        "envdVersion": "0.6.13",
        "alias": "base",
        "metadata": {"a": "b"},
    }
    assert [entry["sandboxID"] for entry in (await api.call("GET", "/sandboxes")).json()] == ["i00000000000000000001"]


async def test_pages_in_both_orders(api):
    created = [await api.create() for _ in range(5)]
    for order, expected in (("asc", created), ("desc", created[::-1])):
        seen, token = [], ""
        while True:
            answer = await api.call("GET", f"/v2/sandboxes?limit=2&order={order}&nextToken={token}")
            seen += [item["sandboxID"] for item in answer.json()]
            assert answer.headers["x-total-running"] == "5"
            if (token := answer.headers.get("x-next-token")) is None:
                break
        assert seen == expected


async def test_a_token_of_another_query(api):
    for _ in range(3):
        await api.create()
    token = (await api.call("GET", "/v2/sandboxes?limit=1")).headers["x-next-token"]
    failed(await api.call("GET", f"/v2/sandboxes?limit=1&order=asc&nextToken={token}"), 400, "next token")
    failed(await api.call("GET", "/v2/sandboxes?nextToken=nonsense"), 400, "next token")


async def test_filters(api):
    first = await api.create(metadata={"k a": "v/1", "b": "c"})
    second = await api.create(templateID="ns/name:tag", metadata={"b": "c"})

    async def ids(query: str) -> list[str]:
        return [item["sandboxID"] for item in (await api.call("GET", f"/v2/sandboxes?order=asc&{query}")).json()]

    assert await ids("metadata=k%252520a%3Dv%252F1%26b%3Dc") == [first]
    assert await ids("metadata=b%3Dc") == [first, second]
    assert await ids("state=running%2Cpaused") == await ids("state=running,paused") == [first, second]
    assert await ids("state=paused") == []
    assert await ids("template=ns%2Fname%3Atag") == await ids("template=tplother") == [second]
    assert await ids("template=unknown") == []
    started = (await api.call("GET", f"/sandboxes/{second}")).json()["startedAt"]
    assert await ids(f"startedAfter={started}") == [second]
    assert await ids("startedAfter=" + started.replace("Z", "%2B00:00")) == [second]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=",
        "order=up",
        "state=dead",
        "startedAfter=now",
        "metadata=x",
        "template=%FF",
    ],
)
async def test_queries_that_mean_nothing(api, query):
    failed(await api.call("GET", f"/v2/sandboxes?{query}"), 400)


async def test_the_legacy_listing_has_no_pages(api):
    for number in range(130):
        await api.create(metadata={"even": str(number % 2 == 0)})
    assert len((await api.call("GET", "/sandboxes")).json()) == 130
    assert len((await api.call("GET", "/sandboxes?metadata=even%3DTrue")).json()) == 65


# One sandbox.


async def test_details(api):
    network = {"allowOut": ["1.1.1.1"], "denyOut": ["0.0.0.0/0"]}
    identifier = await api.create(network=network, allow_internet_access=True)
    body = (await api.call("GET", f"/sandboxes/{identifier}")).json()
    assert body["network"] == network
    assert body["allowInternetAccess"] is True
    assert body["lifecycle"] == {"autoResume": False, "onTimeout": "pause"}
    assert "pauseMode" not in body
    assert "parentID" not in body
    assert body["envdAccessToken"] == f"envd-{identifier}"
    plain = (await api.call("GET", f"/sandboxes/{await api.create()}")).json()
    assert plain["allowInternetAccess"] is None
    assert "network" not in plain


async def test_the_legacy_form_of_an_id(api):
    identifier = await api.create()
    answer = await api.call("GET", f"/sandboxes/{identifier}-aenv")
    assert answer.json()["sandboxID"] == identifier


async def test_delete(api):
    identifier = await api.create()
    answer = await api.call("DELETE", f"/sandboxes/{identifier}")
    assert (answer.status, answer.body) == (204, b"")
    failed(await api.call("DELETE", f"/sandboxes/{identifier}"), 404, f'Sandbox "{identifier}" doesn\'t exist')


async def test_timeout_shortens_and_lengthens_and_ends(api):
    identifier = await api.create(timeout=100, autoPause=False)
    for seconds in (10, 200):
        assert (await api.json("POST", f"/sandboxes/{identifier}/timeout", {"timeout": seconds})).status == 204
        assert close((await api.call("GET", f"/sandboxes/{identifier}")).json()["endAt"], seconds)
    failed(await api.json("POST", f"/sandboxes/{identifier}/timeout", {"timeout": 10**9}), 400, "720 hours")
    failed(await api.json("POST", f"/sandboxes/{identifier}/timeout", {}), 400, "timeout is required")
    failed(await api.json("POST", f"/sandboxes/{identifier}/timeout"), 400, "not valid JSON")
    assert (await api.json("POST", f"/sandboxes/{identifier}/timeout", {"timeout": -5})).status == 204
    assert api.sandboxes.running == {}


async def test_refreshes_never_shorten(api):
    identifier = await api.create(timeout=100)
    for body, expected in ((None, 100), ({"duration": 0}, 100), ({"duration": 3600}, 3600)):
        assert (await api.json("POST", f"/sandboxes/{identifier}/refreshes", body)).status == 204
        assert close((await api.call("GET", f"/sandboxes/{identifier}")).json()["endAt"], expected)
    for duration in (-1, 3601):
        failed(await api.json("POST", f"/sandboxes/{identifier}/refreshes", {"duration": duration}), 400, "duration")


@pytest.mark.parametrize("identifier", [UNKNOWN, "..", "%2E%2E%2Fetc", "a%00b", "%E2%82%AC", "x" * 5000])
@pytest.mark.parametrize(
    ("method", "suffix", "body"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/timeout", {"timeout": 5}),
        ("POST", "/refreshes", {}),
        ("POST", "/connect", {"timeout": 5}),
        ("POST", "/resume", None),
        ("POST", "/pause", None),
        ("POST", "/pause", {"requireHealthyGuest": True}),
        ("POST", "/fork", {}),
        ("POST", "/snapshots", {}),
        ("POST", "/rollback", {"snapshotID": "x"}),
    ],
)
async def test_unknown_sandboxes(api, identifier, method, suffix, body):
    answer = await api.json(method, f"/sandboxes/{identifier}{suffix}", body)
    failed(answer, 404, "doesn't exist or you don't have access to it")
    assert len(answer.body) < 300


# Templates.


async def test_templates(api):
    listed = (await api.call("GET", "/templates")).json()
    assert [item["templateID"] for item in listed] == ["tplbase", "tplother"]
    assert listed[0]["createdBy"] is None
    assert listed[0]["lastSpawnedAt"] is None
    assert [item["templateID"] for item in (await api.call("GET", "/default-templates")).json()] == ["tplbase"]
    details = (await api.call("GET", "/templates/base")).json()
    assert details == {**listed[0], "builds": details["builds"]}
    assert details["builds"][0]["buildID"] == listed[0]["buildID"]


async def test_template_pages(api):
    first = await api.call("GET", "/v2/templates?limit=1")
    second = await api.call("GET", f"/v2/templates?limit=1&nextToken={first.headers['x-next-token']}")
    assert [item["templateID"] for answer in (first, second) for item in answer.json()] == ["tplbase", "tplother"]
    assert "x-next-token" not in second.headers
    failed(await api.call("GET", "/v2/templates?nextToken=x"), 400)
    failed(await api.call("GET", "/v2/templates?limit=0"), 400)


@pytest.mark.parametrize("alias", ["ns%2Fname%3Atag", "ns%2fname:tag", "tplother", "other"])
async def test_alias_lookup(api, alias):
    answer = await api.call("GET", f"/templates/aliases/{alias}")
    assert (answer.status, answer.json()) == (200, {"templateID": "tplother", "public": True})


async def test_unknown_aliases(api):
    failed(await api.call("GET", "/templates/aliases/nope"), 404, "template 'nope' not found")
    failed(await api.call("GET", "/templates/aliases/tags"), 404, "template 'tags' not found")
    failed(await api.call("GET", "/templates/aliases/ns/name"), 404, "No such endpoint")
    failed(await api.call("GET", "/templates/nope"), 404)


# What is not there, and what goes wrong behind the API.


@pytest.mark.parametrize(
    ("endpoint", "what"), [(endpoint, what) for what, endpoints in later.LATER.items() for endpoint in endpoints]
)
async def test_what_later_versions_add_says_so(api, endpoint, what):
    method, path = endpoint.split(" ")
    for filled in (path.replace("{", "").replace("}", ""), path.replace("{", "a%2F").replace("}", "%3Ab")):
        answer = await api.call(method, filled, [b"{nonsense"] * 3)
        failed(answer, 501, what)
        assert api.chunks_read == 0


@pytest.mark.parametrize(
    "target", ["/", "", "//", "/v2", "/sandboxes/", "/sandboxes//", "/sandboxes/a/b", "/../health", "/docs"]
)
async def test_unknown_paths(api, target):
    failed(await api.call("GET", target), 404)


async def test_wrong_methods_name_the_right_ones(api):
    answer = await api.call("PUT", "/sandboxes/x")
    failed(answer, 405, "DELETE, GET")
    assert answer.headers["allow"] == "DELETE, GET"


async def test_urls_that_are_not_text(api):
    failed(await api.call("GET", b"/sandboxes/%FF"), 400, "UTF-8")
    failed(await api.call("GET", b"/v2/sandboxes?metadata=%FF"), 400, "UTF-8")
    failed(await api.call("GET", b"/v2/sandboxes?metadata=\xff"), 400, "UTF-8")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TooManyRequests("full"), 429),
        (Conflict("busy"), 409),
        (Unavailable("closing"), 503),
        (DeadlineExceeded("late"), 504),
        (InsufficientStorage("disk"), 507),
        (VmmError("QEMU ended"), 500),
    ],
)
async def test_errors_keep_their_status_and_text(api, error, status):
    api.sandboxes.fail = error
    failed(await api.json("POST", "/v2/sandboxes", {"templateID": "base"}), status, error.message)


async def test_the_unexpected_is_an_incident_and_leaks_nothing(api):
    api.sandboxes.fail = RuntimeError("secret detail")
    with capture_logs() as logs:
        answer = await api.json("POST", "/v2/sandboxes", {"templateID": "base"})
    failed(answer, 500, "incident")
    assert b"secret" not in answer.body
    [entry] = [entry for entry in logs if entry["event"] == "unexpected error"]
    assert entry["incident"] in answer.json()["message"]


@pytest.mark.parametrize("style", ["console", "json"])
def test_the_log_of_an_incident_has_the_traceback_without_the_values(style):
    script = f"""
import asyncio, structlog, api_fakes
from aenv.config import LogSettings
from aenv.observability import logs
logs.configure(LogSettings(format={style!r}))
api = api_fakes.make()
api.sandboxes.fail = RuntimeError("broken")
body = {{"templateID": "base", "envVars": {{"TOKEN": "s3cr3t"}}}}
print(asyncio.run(api.json("POST", "/v2/sandboxes", body)).status)
"""
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "500\n"
    assert "RuntimeError: broken" in done.stderr
    assert "s3cr3t" not in done.stderr


async def test_limits_come_from_the_settings():
    settings = Settings(
        api=ApiSettings(max_body_bytes=100), orchestrator=OrchestratorSettings(max_timeout=3600, max_metadata_bytes=10)
    )
    api = api_fakes.make(settings)
    failed(await api.json("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 3601}), 400, "1 hours")
    failed(await api.json("POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"k": "v" * 10}}), 400, "is 10")
    failed(await api.json("POST", "/v2/sandboxes", {"templateID": "b" * 100}), 413, "100 bytes")


async def test_two_apps_share_nothing():
    one, other = api_fakes.make(), api_fakes.make()
    await one.create()
    assert (await other.call("GET", "/sandboxes")).json() == []
    third = create_app(
        sandboxes=one.sandboxes, templates=one.sandboxes.templates, settings=Settings(), api_key="another"
    )
    failed(await Api(one.sandboxes, third).call("GET", "/sandboxes"), 401)
