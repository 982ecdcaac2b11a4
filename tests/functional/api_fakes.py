"""In-memory sandboxes and templates behind the real API app, and a bare ASGI client that can send anything."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import FastAPI

from aenv.api.app import create_app
from aenv.config import ApiSettings, Settings
from aenv.errors import BadRequest, Conflict, NotFound
from aenv.orchestrator import listing
from aenv.orchestrator.models import CreateSpec, ListQuery, Page, Route, Sandbox, State
from aenv.orchestrator.protocol import TokenTest
from aenv.templates.models import Template

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
    templates: MemoryTemplates = field(default_factory=MemoryTemplates)
    running: dict[str, Sandbox] = field(default_factory=dict)
    specs: list[CreateSpec] = field(default_factory=list)
    keys: dict[str, tuple[CreateSpec, str]] = field(default_factory=dict)
    fail: Exception | None = None

    def clear(self) -> None:
        """As new; making an app anew for each test would take most of the tests' time."""
        self.running, self.specs, self.keys, self.fail = {}, [], {}, None

    async def create(self, spec: CreateSpec, *, idempotency_key: str | None = None) -> Sandbox:
        if self.fail is not None:
            raise self.fail
        origin = self.templates.resolve(spec.template)
        if idempotency_key in self.keys:
            earlier, identifier = self.keys[idempotency_key]
            if earlier != spec:
                raise Conflict("that Idempotency-Key was used with another request")
            return self.running[identifier]
        self.specs.append(spec)
        now = datetime.now(UTC)
        identifier = f"i{len(self.specs):020d}"
        open_to_all = (spec.network or {}).get("allowPublicTraffic") is not False
        sandbox = Sandbox(
            id=identifier,
            template_id=origin.id,
            alias=origin.names[0],
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
            on_timeout="kill",
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

    async def set_timeout(self, sandbox_id: str, seconds: float) -> Sandbox:
        sandbox = self.get(sandbox_id)
        if seconds <= 0:
            del self.running[sandbox_id]
            return sandbox
        self.running[sandbox_id] = replace(sandbox, end_at=datetime.now(UTC) + timedelta(seconds=seconds))
        return self.running[sandbox_id]

    async def extend(self, sandbox_id: str, seconds: float) -> Sandbox:
        sandbox = self.get(sandbox_id)
        end_at = max(sandbox.end_at, datetime.now(UTC) + timedelta(seconds=seconds))
        self.running[sandbox_id] = replace(sandbox, end_at=end_at)
        return self.running[sandbox_id]

    def route(self, sandbox_id: str) -> Route | None:
        return None

    def find_by_envd_token(self, matches: TokenTest) -> str | None:
        return None


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
