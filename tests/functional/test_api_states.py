"""Pausing, resuming, forks, snapshots and rollbacks over the API, on in-memory sandboxes."""

from urllib.parse import quote

import api_fakes
import pytest
from api_fakes import Api, close, failed

from aenv.config import OrchestratorSettings, Settings
from aenv.errors import Conflict, TooManyRequests, VmmError


@pytest.fixture(scope="module")
def shared() -> Api:
    return api_fakes.make()


@pytest.fixture
def api(shared: Api) -> Api:
    shared.sandboxes.clear()
    return shared


async def detail(api: Api, identifier: str) -> dict[str, object]:
    found: dict[str, object] = (await api.call("GET", f"/sandboxes/{identifier}")).json()
    return found


# What is asked for at creation.


@pytest.mark.parametrize("default", ["pause", "kill"])
async def test_what_an_omitted_auto_pause_means_is_a_setting(default):
    api = api_fakes.make(Settings(orchestrator=OrchestratorSettings(on_timeout=default)))
    for given, expected in (({}, default), ({"autoPause": True}, "pause"), ({"autoPause": False}, "kill")):
        identifier = await api.create(**given)
        assert (await detail(api, identifier))["lifecycle"] == {"autoResume": False, "onTimeout": expected}


async def test_what_the_spec_gets(api):
    await api.create(autoPause=True, autoPauseMemory=False)
    await api.create(autoPause=True, autoResume={"enabled": True})
    one, two = api.sandboxes.specs
    assert (one.on_timeout, one.keep_memory, one.auto_resume) == ("pause", False, False)
    assert (two.on_timeout, two.keep_memory, two.auto_resume) == ("pause", True, True)


# Pause and resume.


@pytest.mark.parametrize(
    ("body", "mode"), [(None, "full"), ({}, "full"), ({"memory": True}, "full"), ({"memory": False}, "filesystem")]
)
async def test_pause(api, body, mode):
    identifier = await api.create()
    answer = await api.json("POST", f"/sandboxes/{identifier}/pause", body)
    assert (answer.status, answer.body) == (204, b"")
    shown = await detail(api, identifier)
    assert (shown["state"], shown["pauseMode"]) == ("paused", mode)
    failed(await api.json("POST", f"/sandboxes/{identifier}/pause", body), 409, "paused already")


async def test_a_strict_pause_of_a_guest_that_does_not_answer(api):
    identifier = await api.create()
    api.sandboxes.address = "127.0.0.3"  # nothing listens there
    answer = await api.json("POST", f"/sandboxes/{identifier}/pause", {"requireHealthyGuest": True})
    failed(answer, 503, "does not answer")
    assert answer.headers["should-retry"] == "false"
    assert (await detail(api, identifier))["state"] == "running"
    assert (await api.json("POST", f"/sandboxes/{identifier}/pause")).status == 204
    failed(await api.json("POST", f"/sandboxes/{identifier}/pause", {"requireHealthyGuest": True}), 409)


@pytest.mark.parametrize(
    ("body", "seconds", "memory"),
    [(None, 15, True), ({}, 15, True), ({"timeout": 60, "autoPause": True}, 60, True), ({"memory": False}, 15, False)],
)
async def test_resume(api, body, seconds, memory):
    identifier = await api.create(timeout=1000)
    failed(await api.json("POST", f"/sandboxes/{identifier}/resume", body), 409, "running already")
    assert close((await detail(api, identifier))["endAt"], 1000)
    await api.json("POST", f"/sandboxes/{identifier}/pause")
    answer = await api.json("POST", f"/sandboxes/{identifier}/resume", body)
    assert (answer.status, answer.json()["sandboxID"]) == (201, identifier)
    assert answer.json()["envdAccessToken"] == f"envd-{identifier}"
    assert answer.headers["server-timing"] == "guest;dur=1234.56, init;dur=7"
    assert api.sandboxes.resumes == [(seconds, memory)]
    shown = await detail(api, identifier)
    assert shown["state"] == "running"
    assert "pauseMode" not in shown
    assert close(shown["endAt"], seconds)


@pytest.mark.parametrize("path", ["/v2/sandboxes/{}/connect", "/sandboxes/{}/connect"])
async def test_connect_to_a_running_sandbox_never_shortens(api, path):
    identifier = await api.create(timeout=100)
    for seconds, expected in ((5, 100), (400, 400)):
        answer = await api.json("POST", path.format(identifier), {"timeout": seconds, "memory": False})
        assert answer.status == 200
        assert answer.json()["envdAccessToken"] == f"envd-{identifier}"
        assert close((await detail(api, identifier))["endAt"], expected)
    assert api.sandboxes.resumes == []
    failed(await api.json("POST", path.format(identifier), {"timeout": 0}), 400, "Timeout must be greater than 0")
    failed(await api.json("POST", path.format(identifier), {"timeout": 10**9}), 400, "720 hours")


@pytest.mark.parametrize("path", ["/v2/sandboxes/{}/connect", "/sandboxes/{}/connect"])
@pytest.mark.parametrize(("fields", "memory"), [({}, True), ({"memory": None}, True), ({"memory": False}, False)])
async def test_connect_to_a_paused_sandbox_resumes_it(api, path, fields, memory):
    identifier = await api.create(timeout=1000, autoPause=True)
    await api.json("POST", f"/sandboxes/{identifier}/pause")
    answer = await api.json("POST", path.format(identifier), {"timeout": 50, **fields})
    assert (answer.status, answer.json()["sandboxID"]) == (201, identifier)
    assert "server-timing" in answer.headers
    assert api.sandboxes.resumes == [(50, memory)]
    shown = await detail(api, identifier)
    assert close(shown["endAt"], 50)
    assert shown["lifecycle"]["onTimeout"] == "pause"


async def test_the_body_of_connect_is_optional_in_v2_alone(api):
    identifier = await api.create(timeout=100)
    assert (await api.json("POST", f"/v2/sandboxes/{identifier}/connect")).status == 200
    assert close((await detail(api, identifier))["endAt"], 300)
    await api.json("POST", f"/sandboxes/{identifier}/pause")
    assert (await api.json("POST", f"/v2/sandboxes/{identifier}/connect")).status == 201
    assert api.sandboxes.resumes == [(300, True)]
    failed(await api.json("POST", f"/sandboxes/{identifier}/connect"), 400)
    failed(await api.json("POST", f"/sandboxes/{identifier}/connect", {}), 400, "timeout is required")


async def test_a_timeout_of_nothing_pauses_what_is_to_be_paused(api):
    identifier = await api.create()
    assert (await api.json("POST", f"/sandboxes/{identifier}/timeout", {"timeout": 0})).status == 204
    assert (await detail(api, identifier))["state"] == "paused"


async def test_listings_of_the_paused(api):
    running, paused = await api.create(), await api.create()
    await api.json("POST", f"/sandboxes/{paused}/pause")

    async def ids(path: str) -> list[str]:
        answer = await api.call("GET", path)
        assert answer.headers.get("x-total-running", "1") == "1"
        return [item["sandboxID"] for item in answer.json()]

    assert await ids("/v2/sandboxes") == await ids("/v2/sandboxes?state=paused,running") == [paused, running]
    assert await ids("/v2/sandboxes?state=paused") == [paused]
    assert await ids("/v2/sandboxes?state=running") == await ids("/sandboxes") == [running]
    assert (await api.call("DELETE", f"/sandboxes/{paused}")).status == 204
    assert await ids("/v2/sandboxes") == [running]


# Forks.


async def test_a_fork_makes_one_child_of_15_seconds_unless_told_otherwise(api):
    identifier = await api.create(metadata={"a": "b"}, timeout=1000)
    for body in (None, {}, {"count": None, "timeout": None}):
        answer = await api.json("POST", f"/sandboxes/{identifier}/fork", body)
        [result] = answer.json()
        child = result["sandbox"]["sandboxID"]
        assert (answer.status, list(result)) == (201, ["sandbox"])
        assert result["sandbox"]["envdAccessToken"] == f"envd-{child}"
        shown = await detail(api, child)
        assert close(shown["endAt"], 15)
        assert (shown["parentID"], shown["metadata"]) == (identifier, {"a": "b"})
        listed = (await api.call("GET", "/v2/sandboxes?limit=1")).json()
        assert [(item["sandboxID"], item["parentID"]) for item in listed] == [(child, identifier)]


async def test_children_succeed_and_fail_one_by_one(api):
    identifier = await api.create()
    api.sandboxes.children_fail = TooManyRequests("this node is full")
    answer = await api.json("POST", f"/sandboxes/{identifier}/fork", {"count": 4, "timeout": 60})
    results = answer.json()
    assert answer.status == 201
    assert [list(result) for result in results] == [["sandbox"], ["error"]] * 2
    assert results[1]["error"] == {"code": 429, "message": "this node is full"}


async def test_the_number_of_children_is_bounded(api):
    identifier = await api.create()
    assert len((await api.json("POST", f"/sandboxes/{identifier}/fork", {"count": 16})).json()) == 16
    for count in (0, -1, 17, 10**30):
        answer = await api.json("POST", f"/sandboxes/{identifier}/fork", {"count": count})
        failed(answer, 400, "count must be 1 to 16 (orchestrator.max_fork_count), not ")
    for count in ("2", 2.5, True):
        failed(await api.json("POST", f"/sandboxes/{identifier}/fork", {"count": count}), 400, "count must be a valid")
    failed(await api.json("POST", f"/sandboxes/{identifier}/fork", {"timeout": 0}), 400, "Timeout must be")
    assert len(api.sandboxes.running) == 17
    wide = api_fakes.make(Settings(orchestrator=OrchestratorSettings(max_fork_count=40)))
    identifier = await wide.create()
    assert len((await wide.json("POST", f"/sandboxes/{identifier}/fork", {"count": 40})).json()) == 40


# Snapshots.


async def test_a_snapshot_is_a_template(api):
    identifier = await api.create()
    answer = await api.json("POST", f"/sandboxes/{identifier}/snapshots", {"name": "team/Snap:v1"})
    taken = answer.json()
    assert answer.status == 201
    assert (taken["snapshotID"], taken["names"]) == ("team/snap:v1", ["team/snap:v1"])
    assert (taken["sandboxID"], taken["memoryMB"]) == (identifier, 512)
    assert close(taken["createdAt"], 0)
    made = await api.create(templateID=taken["snapshotID"])
    assert (await detail(api, made))["parentID"] == identifier
    assert (await api.call("DELETE", f"/templates/{quote(taken['snapshotID'], safe='')}")).status == 204
    assert (await api.call("GET", "/snapshots")).json() == []
    failed(await api.call("DELETE", "/templates/team%2Fsnap%3Av1"), 404, "team/snap:v1")


@pytest.mark.parametrize("body", [None, {}, {"name": None}, {"memory": False}])
async def test_an_unnamed_snapshot(api, body):
    identifier = await api.create()
    taken = (await api.json("POST", f"/sandboxes/{identifier}/snapshots", body)).json()
    assert (taken["snapshotID"], taken["names"]) == ("tsnap1:default", [])
    assert (await api.call("DELETE", "/templates/tsnap1:default")).status == 204


async def test_names_that_are_none(api):
    identifier = await api.create()
    for name in ("", "a b", "a:b:c", "/x", "ü"):
        failed(await api.json("POST", f"/sandboxes/{identifier}/snapshots", {"name": name}), 400, "is no name")
    failed(await api.json("POST", f"/sandboxes/{identifier}/snapshots", {"name": 5}), 400, "name must be")


async def test_listing_snapshots(api):
    one, two = await api.create(), await api.create()
    for source, name in ((one, "a:v1"), (two, "a:v2"), (one, None), (one, "b")):
        await api.json("POST", f"/sandboxes/{source}/snapshots", {"name": name})

    async def ids(query: str) -> list[str]:
        return [item["snapshotID"] for item in (await api.call("GET", f"/snapshots{query}")).json()]

    everything = ["b:default", "tsnap3:default", "a:v2", "a:v1"]
    assert await ids("") == await ids("?sandboxID=&name=&nextToken=") == everything
    assert await ids(f"?sandboxID={one}") == await ids(f"?sandboxID={one}-aenv") == [everything[0], *everything[1::2]]
    assert await ids("?name=a") == ["a:v2", "a:v1"]
    assert await ids("?name=a%3Av1") == ["a:v1"]
    assert await ids("?sandboxID=unknown") == await ids("?name=%FC".replace("%FC", "%C3%BC")) == []
    seen, token = [], ""
    while True:
        answer = await api.call("GET", f"/snapshots?limit=3&nextToken={token}")
        seen += [item["snapshotID"] for item in answer.json()]
        if (token := answer.headers.get("x-next-token")) is None:
            break
    assert seen == everything
    for query in ("limit=0", "limit=101", "nextToken=x"):
        failed(await api.call("GET", f"/snapshots?{query}"), 400)


async def test_a_template_is_no_snapshot_to_delete(api):
    failed(await api.call("DELETE", "/templates/base"), 403, "not a snapshot")


async def test_rollback(api):
    one, two = await api.create(), await api.create()
    snapshot = (await api.json("POST", f"/sandboxes/{one}/snapshots", {})).json()["snapshotID"]
    answer = await api.json("POST", f"/sandboxes/{one}/rollback", {"snapshotID": snapshot})
    assert (answer.status, answer.json()["sandboxID"]) == (200, one)
    failed(await api.json("POST", f"/sandboxes/{two}/rollback", {"snapshotID": snapshot}), 404, snapshot)
    failed(await api.json("POST", f"/sandboxes/{one}/rollback", {}), 400, "snapshotID is required")
    failed(await api.json("POST", f"/sandboxes/{one}/rollback"), 400, "not valid JSON")


# What goes wrong behind the API.


@pytest.mark.parametrize("call", ["pause", "resume", "connect", "fork", "snapshots", "rollback"])
@pytest.mark.parametrize("error", [Conflict("it is being forked"), VmmError("the VMM does not answer")])
async def test_errors_keep_their_status_and_text(api, call, error):
    identifier = await api.create()
    api.sandboxes.fail = error
    body = {"timeout": 5, "snapshotID": "x"}
    failed(await api.json("POST", f"/sandboxes/{identifier}/{call}", body), error.status, error.message)
