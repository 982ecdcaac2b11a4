"""In-memory sandboxes and templates behind the real API app, and a bare ASGI client that can send anything."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import FastAPI

from aenv.api.app import create_app
from aenv.api.listing import page as pages
from aenv.config import ApiSettings, Settings
from aenv.errors import AenvError, BadRequest, Conflict, Forbidden, NotFound
from aenv.orchestrator import listing
from aenv.orchestrator.models import (
    CreateSpec,
    ListQuery,
    Page,
    Route,
    Sandbox,
    Snapshot,
    SnapshotPage,
    SnapshotQuery,
    State,
)
from aenv.orchestrator.protocol import TokenTest
from aenv.templates.models import Template
from aenv.templates.store import REFERENCE

KEY = "e2b_" + "a1" * 20
CREATED = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def template(identifier: str, *names: str) -> Template:
    return Template(
        id=identifier,
        build_id="11111111-1111-1111-1111-111111111111",
        names=names,
        cpu_count=2,
        memory_mb=512,
        disk_mb=8192,
        created_at=CREATED,
        envd_version="0.6.13",
        env={},
        user="user",
        workdir="/home/user",
    )


@dataclass
class MemoryTemplates:
    items: list[Template] = field(
        default_factory=lambda: [template("tplbase", "base"), template("tplother", "ns/name:tag", "other")]
    )

    def list(self) -> tuple[Template, ...]:
        return tuple(self.items)

    def resolve(self, identifier: str) -> Template:
        if not identifier:
            raise BadRequest("Invalid template reference: it is empty")
        for item in self.items:
            if identifier in (item.id, *item.names):
                return item
        raise NotFound(f"template '{identifier}' not found")


@dataclass
class MemorySandboxes:
    """Everything at once and without a guest. `fail` is what every call raises; `children_fail` what every other child
    of a fork does."""

    templates: MemoryTemplates = field(default_factory=MemoryTemplates)
    running: dict[str, Sandbox] = field(default_factory=dict)
    """By id, those that are paused too."""
    specs: list[CreateSpec] = field(default_factory=list)
    keys: dict[str, tuple[CreateSpec, str]] = field(default_factory=dict)
    taken: dict[str, Snapshot] = field(default_factory=dict)
    resumes: list[tuple[float, bool]] = field(default_factory=list)
    """Seconds and memory of each."""
    fail: Exception | None = None
    children_fail: AenvError | None = None
    address: str | None = None
    """Of every guest."""
    made: int = 0

    def clear(self) -> None:
        """As new; making an app anew for each test would take most of the tests' time."""
        self.running, self.specs, self.keys, self.taken, self.resumes = {}, [], {}, {}, []
        self.fail = self.children_fail = self.address = None
        self.made = 0

    async def create(self, spec: CreateSpec, *, idempotency_key: str | None = None) -> Sandbox:
        if self.fail is not None:
            raise self.fail
        snapshot = next((s for s in self.taken.values() if spec.template in (s.id, *s.names)), None)
        origin = template(snapshot.id) if snapshot else self.templates.resolve(spec.template)
        if idempotency_key in self.keys:
            earlier, identifier = self.keys[idempotency_key]
            if earlier != spec:
                raise Conflict("that Idempotency-Key was used with another request")
            return self.running[identifier]
        self.specs.append(spec)
        identifier = self._next_id()
        now = datetime.now(UTC)
        open_to_all = (spec.network or {}).get("allowPublicTraffic") is not False
        sandbox = Sandbox(
            id=identifier,
            template_id=origin.id,
            alias=origin.names[0] if origin.names else None,
            state=State.RUNNING,
            operation=None,
            started_at=now,
            end_at=now + timedelta(seconds=spec.timeout),
            cpu_count=origin.cpu_count,
            memory_mb=origin.memory_mb,
            disk_mb=origin.disk_mb,
            envd_version=origin.envd_version,
            envd_token=f"envd-{identifier}" if spec.secure else None,
            traffic_token=None if open_to_all else f"traffic-{identifier}",
            metadata=spec.metadata,
            env_vars=spec.env_vars,
            on_timeout=spec.on_timeout,
            auto_resume=spec.auto_resume,
            pause_mode=None,
            parent=snapshot.sandbox_id if snapshot else None,
            allow_internet_access=spec.allow_internet_access,
            network=spec.network,
            generation="g1",
            timings={"guest": 1234.56, "init": 7.0},
        )
        self.running[identifier] = sandbox
        if idempotency_key is not None:
            self.keys[idempotency_key] = (spec, identifier)
        return sandbox

    def get(self, sandbox_id: str) -> Sandbox:
        if self.fail is not None:
            raise self.fail
        try:
            return self.running[sandbox_id]
        except KeyError:
            raise NotFound(f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it") from None

    def list(self, query: ListQuery) -> Page:
        template_id = None
        if query.template is not None:
            try:
                template_id = self.templates.resolve(query.template).id
            except NotFound:
                template_id = None
        return listing.page(self.running.values(), query, template_id)

    async def delete(self, sandbox_id: str, *, detail: str = "") -> None:
        self.get(sandbox_id)
        del self.running[sandbox_id]

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> None:
        if self.get(sandbox_id).state is State.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is paused already")
        self._change(sandbox_id, state=State.PAUSED, pause_mode="full" if memory else "filesystem")

    async def resume(self, sandbox_id: str, seconds: float, *, memory: bool = True) -> tuple[Sandbox, bool]:
        if self.get(sandbox_id).state is State.RUNNING:
            return await self.extend(sandbox_id, seconds), False
        self.resumes.append((seconds, memory))
        end_at = datetime.now(UTC) + timedelta(seconds=seconds)
        return self._change(sandbox_id, state=State.RUNNING, pause_mode=None, end_at=end_at), True

    async def snapshot(self, sandbox_id: str, name: str | None, *, memory: bool = True) -> Snapshot:
        source = self.get(sandbox_id)
        full = None
        if name is not None:
            if (match := REFERENCE.fullmatch(name.lower())) is None:
                raise BadRequest(f"'{name}' is no name")
            full = f"{match['name']}:{match['tag'] or 'default'}"
        snapshot = Snapshot(
            id=full or f"tsnap{len(self.taken) + 1}:default",
            names=(full,) if full else (),
            sandbox_id=sandbox_id,
            created_at=datetime.now(UTC),
            cpu_count=source.cpu_count,
            memory_mb=source.memory_mb,
            disk_mb=source.disk_mb,
        )
        self.taken[snapshot.id] = snapshot
        return snapshot

    def snapshots(self, query: SnapshotQuery) -> SnapshotPage:
        if self.fail is not None:
            raise self.fail
        found = [
            (snapshot.id, snapshot)
            for snapshot in reversed(self.taken.values())
            if query.sandbox_id in (None, snapshot.sandbox_id)
            and (query.name is None or any(query.name in (n, n.partition(":")[0]) for n in snapshot.names))
        ]
        items, following = pages(found, query.limit, query.next_token)
        return SnapshotPage(tuple(items), following)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        if any(snapshot_id in (item.id, *item.names) for item in self.templates.items):
            raise Forbidden(f"'{snapshot_id}' is a template, not a snapshot")
        if self.taken.pop(snapshot_id, None) is None:
            raise NotFound(f"template '{snapshot_id}' not found")

    async def fork(self, sandbox_id: str, *, count: int, seconds: float) -> tuple[Sandbox | AenvError, ...]:
        source = self.get(sandbox_id)
        results: list[Sandbox | AenvError] = []
        for number in range(count):
            if self.children_fail is not None and number % 2:
                results.append(self.children_fail)
                continue
            child, now = self._next_id(), datetime.now(UTC)
            self.running[child] = replace(
                source, id=child, parent=sandbox_id, started_at=now, end_at=now + timedelta(seconds=seconds),
                state=State.RUNNING, pause_mode=None, envd_token=source.envd_token and f"envd-{child}",
            )  # fmt: skip
            results.append(self.running[child])
        return tuple(results)

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> Sandbox:
        source = self.get(sandbox_id)
        snapshot = self.taken.get(snapshot_id)
        if snapshot is None or snapshot.sandbox_id != sandbox_id:
            raise NotFound(f"sandbox {sandbox_id} has no snapshot '{snapshot_id}'")
        return self._change(sandbox_id, generation=source.generation + "'")

    async def set_timeout(self, sandbox_id: str, seconds: float) -> Sandbox:
        sandbox = self.get(sandbox_id)
        if seconds > 0:
            return self._change(sandbox_id, end_at=datetime.now(UTC) + timedelta(seconds=seconds))
        if sandbox.on_timeout == "pause":
            return self._change(sandbox_id, state=State.PAUSED, pause_mode="full")
        return self.running.pop(sandbox_id)

    async def extend(self, sandbox_id: str, seconds: float) -> Sandbox:
        end_at = max(self.get(sandbox_id).end_at, datetime.now(UTC) + timedelta(seconds=seconds))
        return self._change(sandbox_id, end_at=end_at)

    def route(self, sandbox_id: str) -> Route | None:
        sandbox = self.running.get(sandbox_id)
        if sandbox is None or sandbox.state is State.PAUSED or self.address is None:
            return None
        return Route(
            sandbox_id=sandbox_id, generation=sandbox.generation, address=self.address,
            traffic_token="", public=True, mask_host=None,
        )  # fmt: skip

    async def awaken(self, sandbox_id: str) -> Route | None:
        return self.route(sandbox_id)

    def find_by_envd_token(self, matches: TokenTest) -> str | None:
        return None

    def _next_id(self) -> str:
        self.made += 1
        return f"i{self.made:020d}"

    def _change(self, sandbox_id: str, **changes: Any) -> Sandbox:
        self.running[sandbox_id] = replace(self.running[sandbox_id], **changes)
        return self.running[sandbox_id]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Api:
    """The app under test and what is behind it. `call` sends exactly the bytes it is given."""

    sandboxes: MemorySandboxes
    app: FastAPI
    chunks_read: int = 0

    async def call(
        self,
        method: str,
        target: bytes | str,
        body: bytes | Iterable[bytes] | None = None,
        *,
        key: str | None = KEY,
        headers: Iterable[tuple[str, str]] = (),
    ) -> Answer:
        raw_path, _, query = (target.encode() if isinstance(target, str) else target).partition(b"?")
        chunks = iter([body or b""] if body is None or isinstance(body, bytes) else body)
        sent: list[Any] = []
        self.chunks_read = 0

        async def receive() -> dict[str, Any]:
            chunk = next(chunks, None)
            if chunk is None:
                return {"type": "http.request", "body": b"", "more_body": False}
            self.chunks_read += 1
            return {"type": "http.request", "body": chunk, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        given = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        if key is not None:
            given.append((b"x-api-key", key.encode("latin-1")))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": raw_path.decode("latin-1"),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": given,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        await self.app(scope, receive, send)
        start, *rest = sent
        return Answer(
            start["status"],
            {name.decode().lower(): value.decode() for name, value in start["headers"]},
            b"".join(message.get("body", b"") for message in rest),
        )

    async def json(self, method: str, target: str, body: object = None, **rest: Any) -> Answer:
        return await self.call(method, target, None if body is None else json.dumps(body).encode(), **rest)

    async def create(self, **fields: object) -> str:
        answer = await self.json("POST", "/v2/sandboxes", {"templateID": "base", **fields})
        assert answer.status == 201, answer
        return str(answer.json()["sandboxID"])


def make(settings: Settings | None = None, **api: Any) -> Api:
    sandboxes = MemorySandboxes()
    settings = settings or Settings(api=ApiSettings(**api))
    app = create_app(sandboxes=sandboxes, templates=sandboxes.templates, settings=settings, api_key=KEY)
    return Api(sandboxes, app)


def failed(answer: Answer, status: int, part: str = "") -> bool:
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert (answer.status, body["code"]) == (status, status), body
    assert part in body["message"]
    return True


def moment(text: str) -> datetime:
    assert text.endswith("Z")
    return datetime.fromisoformat(text)


def close(text: str, seconds: float) -> bool:
    """Whether that time is about so many seconds from now."""
    return abs(moment(text) - datetime.now(UTC) - timedelta(seconds=seconds)) < timedelta(seconds=5)
