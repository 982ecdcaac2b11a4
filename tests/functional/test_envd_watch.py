"""envd's directory watches, raw and through the official SDKs (which poll, or stream)."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import e2b
import httpx
import pytest
import pytest_asyncio
from envd_files_harness import Envd, running_envd
from envd_fixture import END_STREAM, STREAM_TYPE, frame, frames

DEADLINE = 10.0
"""Seconds until an event must have come."""

Event = tuple[str, str]


@pytest.fixture(scope="module")
def envd() -> Iterator[Envd]:
    with running_envd() as running:
        yield running


@pytest.fixture
def sandbox(envd: Envd) -> e2b.Sandbox:
    return e2b.Sandbox.create(debug=True, sandbox_url=envd.url, api_key="e2b_" + "0" * 40)


@pytest_asyncio.fixture
async def async_sandbox(envd: Envd) -> AsyncIterator[e2b.AsyncSandbox]:
    yield await e2b.AsyncSandbox.create(debug=True, sandbox_url=envd.url, api_key="e2b_" + "0" * 40)


def polled(envd: Envd, watcher: str, last: Event) -> list[Event]:
    """Events of a watcher up to this one."""
    events: list[Event] = []
    deadline = time.monotonic() + DEADLINE
    while last not in events:
        assert time.monotonic() < deadline, events
        status, answer = envd.rpc("GetWatcherEvents", watcherId=watcher)
        assert status == 200, answer
        found = answer["events"]
        assert isinstance(found, list)
        events += [(event["name"], event["type"].removeprefix("EVENT_TYPE_")) for event in found]
    return events


def created(envd: Envd, path: Path, **options: bool) -> str:
    status, answer = envd.rpc("CreateWatcher", None, path=str(path), **options)
    assert status == 200, answer
    return str(answer["watcherId"])


def test_an_upload_is_create_chmod_write(envd: Envd, tmp_path: Path) -> None:
    watcher = created(envd, tmp_path)
    assert envd.put(tmp_path / "raw", b"x" * 100_000).status_code == 200
    assert polled(envd, watcher, ("raw", "WRITE")) == [("raw", "CREATE"), ("raw", "CHMOD"), ("raw", "WRITE")]
    form = {"file": (f"{tmp_path}/form", b"x", "application/octet-stream")}
    assert envd.http.post("/files", files=form).status_code == 200
    assert polled(envd, watcher, ("form", "WRITE")) == [("form", "CREATE"), ("form", "CHMOD"), ("form", "WRITE")]
    assert envd.rpc("RemoveWatcher", watcherId=watcher) == (200, {})
    for method in ("GetWatcherEvents", "RemoveWatcher"):
        status, answer = envd.rpc(method, watcherId=watcher)
        assert (status, answer["code"]) == (404, "not_found")


def test_rpcs_cause_the_events_of_the_protocol(envd: Envd, tmp_path: Path) -> None:
    watcher = created(envd, tmp_path, recursive=True)
    envd.rpc("MakeDir", path=f"{tmp_path}/d")
    envd.put(tmp_path / "d/f", b"x")
    envd.rpc("Move", source=f"{tmp_path}/d/f", destination=f"{tmp_path}/d/g")
    envd.rpc("Remove", path=f"{tmp_path}/d/g")
    events = polled(envd, watcher, ("d/g", "REMOVE"))
    assert [event for event in events if event[1] in ("RENAME", "REMOVE") or event[0] != "d/f"] == [
        ("d", "CREATE"),
        ("d", "CHMOD"),
        ("d/f", "RENAME"),
        ("d/g", "CREATE"),
        ("d/g", "REMOVE"),
    ]
    assert events.count(("d/f", "CREATE")) == 1


def test_events_carry_the_entry_when_asked(envd: Envd, tmp_path: Path) -> None:
    watcher = created(envd, tmp_path, include_entry=True)
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "gone").touch()
    (tmp_path / "gone").unlink()
    found: dict[Event, dict[str, object]] = {}
    deadline = time.monotonic() + DEADLINE
    while ("gone", "EVENT_TYPE_REMOVE") not in found:
        assert time.monotonic() < deadline
        events = envd.rpc("GetWatcherEvents", watcher_id=watcher)[1]["events"]
        assert isinstance(events, list)
        found |= {(event["name"], event["type"]): event for event in events}
    entry = found[("kept", "EVENT_TYPE_WRITE")]["entry"]
    assert isinstance(entry, dict)
    assert (entry["path"], entry["size"]) == (f"{tmp_path}/kept", "5")
    assert "entry" not in found[("gone", "EVENT_TYPE_REMOVE")]


def test_what_cannot_be_watched(envd: Envd, tmp_path: Path) -> None:
    def refusal(path: Path) -> tuple[int, object]:
        status, answer = envd.rpc("CreateWatcher", path=str(path))
        return status, answer["code"]

    (tmp_path / "f").touch()
    assert refusal(tmp_path / "gone") == (404, "not_found")
    assert refusal(tmp_path / "f") == (400, "invalid_argument")


def test_too_many_events_are_said_to_be_lost(envd: Envd, tmp_path: Path) -> None:
    watcher = created(envd, tmp_path)
    deadline = time.monotonic() + 60
    failure: dict[str, object] = {}
    # Renaming there and back makes four events that do not merge.
    while not failure:
        assert time.monotonic() < deadline
        (tmp_path / "a").touch()
        for _ in range(10_000):
            (tmp_path / "a").rename(tmp_path / "b")
            (tmp_path / "b").rename(tmp_path / "a")
        status, answer = envd.rpc("GetWatcherEvents", watcherId=watcher)
        failure = answer if status != 200 else {}
    assert failure["code"] == "data_loss"
    assert "lost" in str(failure["message"])
    assert envd.rpc("RemoveWatcher", watcherId=watcher) == (200, {})


def test_watchers_are_limited(envd: Envd, tmp_path: Path) -> None:
    watchers: list[str] = []
    answer: dict[str, object] = {}
    for _ in range(150):
        status, answer = envd.rpc("CreateWatcher", path=str(tmp_path))
        if status != 200:
            break
        watchers.append(str(answer["watcherId"]))
    assert answer["code"] == "resource_exhausted"
    assert len(watchers) <= 100
    for watcher in watchers:
        assert envd.rpc("RemoveWatcher", watcherId=watcher) == (200, {})


async def test_a_stream_starts_and_reports_and_keeps_alive(envd: Envd, tmp_path: Path) -> None:
    headers = {"content-type": STREAM_TYPE, "keepalive-ping-interval": "1", "connect-timeout-ms": "2500"}
    content = frame({"path": str(tmp_path)})
    url = f"{envd.url}/filesystem.Filesystem/WatchDir"
    received = b""
    client = httpx.AsyncClient(timeout=30)
    async with client, client.stream("POST", url, content=content, headers=headers) as stream:
        async for chunk in stream.aiter_raw():
            if not received:
                (tmp_path / "f").touch()
            received += chunk
    messages = [message for _, message in frames(received)]
    assert messages[0] == {"start": {}}
    assert {"filesystem": {"name": "f", "type": "EVENT_TYPE_CREATE"}} in messages
    assert {"keepalive": {}} in messages
    assert frames(received)[-1][0] == END_STREAM
    assert messages[-1]["error"]["code"] == "deadline_exceeded"


async def test_a_stream_of_a_missing_directory_ends_with_the_error(envd: Envd, tmp_path: Path) -> None:
    content = frame({"path": str(tmp_path / "gone")})
    url = f"{envd.url}/filesystem.Filesystem/WatchDir"
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(url, content=content, headers={"content-type": STREAM_TYPE})
    assert answer.status_code == 200
    ((flags, message),) = frames(answer.content)
    assert (flags, message["error"]["code"]) == (END_STREAM, "not_found")


def test_sdk_polls(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    handle = sandbox.files.watch_dir(str(tmp_path), recursive=True)
    sandbox.files.write(f"{tmp_path}/sub/f", "x")
    events: list[str] = []
    deadline = time.monotonic() + DEADLINE
    while "sub/f" not in events:
        assert time.monotonic() < deadline, events
        events += [event.name for event in handle.get_new_events()]
    handle.stop()
    with pytest.raises(e2b.SandboxException):
        handle.get_new_events()
    with pytest.raises(e2b.NotFoundException):
        sandbox.files.watch_dir(f"{tmp_path}/gone")
    with pytest.raises(e2b.InvalidArgumentException, match="is not a directory"):
        sandbox.files.watch_dir(f"{tmp_path}/sub/f")


async def test_sdk_streams(async_sandbox: e2b.AsyncSandbox, tmp_path: Path) -> None:
    events: asyncio.Queue[e2b.FilesystemEvent] = asyncio.Queue()
    handle = await async_sandbox.files.watch_dir(str(tmp_path), on_event=events.put_nowait)
    await async_sandbox.files.write(f"{tmp_path}/f", "x")
    async with asyncio.timeout(DEADLINE):
        kinds = [(await events.get()).type for _ in range(3)]
    kind = e2b.FilesystemEventType
    assert kinds == [kind.CREATE, kind.CHMOD, kind.WRITE]
    await handle.stop()  # type: ignore[no-untyped-call]
