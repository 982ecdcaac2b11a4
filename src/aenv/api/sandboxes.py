"""Sandboxes: create, list, get, delete, time to live, connect."""

from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Response

from aenv.api import create, listing
from aenv.api.body import Bodies, documented
from aenv.api.openapi import errors, headers
from aenv.api.paths import SandboxId
from aenv.api.templates import Limit, NextToken
from aenv.api.wire import (
    CLIENT_ID,
    ConnectSandbox,
    ConnectSandboxV2,
    ListedSandbox,
    NewSandbox,
    NewSandboxV2,
    Sandbox,
    SandboxDetail,
    SandboxRefreshRequest,
    SandboxTimeoutRequest,
)
from aenv.config import Settings
from aenv.errors import BadRequest, NotYetAvailable
from aenv.orchestrator import models
from aenv.orchestrator.models import ListQuery, State
from aenv.orchestrator.protocol import Sandboxes

MAX_REFRESH = 3600
DEFAULT_REFRESH = 15
"""Seconds."""

Metadata = Annotated[
    str | None, Query(description="`key=value&…`, each part percent-encoded once more; all must match.")
]


def router(sandboxes: Sandboxes, settings: Settings) -> APIRouter:
    routes = APIRouter(tags=["sandboxes"])
    bodies = Bodies(settings.api.max_body_bytes)
    limits = settings.orchestrator
    domain = settings.api.domain
    timing = headers(201, Server_Timing="Milliseconds of each step of the launch.")

    @routes.post(
        "/v2/sandboxes",
        status_code=201,
        summary="Create a sandbox",
        openapi_extra=documented(NewSandboxV2),
        responses=errors(400, 404, 409, 413, 429, 501, 503, 504, 507) | timing,
    )
    async def create_v2(
        response: Response,
        body: Annotated[NewSandboxV2, Depends(bodies.required(NewSandboxV2))],
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> Sandbox:
        key = create.checked_idempotency_key(idempotency_key)
        spec = create.spec(body, default_timeout=create.DEFAULT_TIMEOUT_V2, limits=limits)
        sandbox = await sandboxes.create(spec, idempotency_key=key)
        response.headers["Server-Timing"] = _server_timing(sandbox)
        return _sandbox(sandbox, domain)

    @routes.post(
        "/sandboxes",
        status_code=201,
        summary="Create a sandbox (version 1: may be unsecured)",
        openapi_extra=documented(NewSandbox),
        responses=errors(400, 404, 413, 429, 501, 503, 504, 507) | timing,
    )
    async def create_v1(
        response: Response, body: Annotated[NewSandbox, Depends(bodies.required(NewSandbox))]
    ) -> Sandbox:
        spec = create.spec(body, default_timeout=create.DEFAULT_TIMEOUT_V1, limits=limits)
        sandbox = await sandboxes.create(spec)
        response.headers["Server-Timing"] = _server_timing(sandbox)
        return _sandbox(sandbox, domain)

    @routes.get(
        "/v2/sandboxes",
        summary="Sandboxes, in pages",
        responses=errors(400)
        | headers(200, X_Next_Token="Only when there is another page.", X_Total_Running="Of all pages."),
    )
    async def list_v2(
        response: Response,
        metadata: Metadata = None,
        state: Annotated[list[str] | None, Query(description="`running`, `paused`, or both with a comma.")] = None,
        order: Annotated[Literal["asc", "desc"], Query(description="By start time.")] = "desc",
        started_after: Annotated[str | None, Query(alias="startedAfter", description="RFC 3339, inclusive.")] = None,
        template: Annotated[str | None, Query(description="Id or name.")] = None,
        next_token: NextToken = None,
        limit: Limit = listing.MAX_LIMIT,
    ) -> list[ListedSandbox]:
        page = sandboxes.list(
            ListQuery(
                states=listing.states(state),
                metadata=listing.metadata(metadata),
                template=template or None,
                started_after=listing.started_after(started_after),
                descending=order == "desc",
                limit=limit,
                next_token=next_token or None,
            )
        )
        response.headers["X-Total-Running"] = str(page.total_running)
        if page.next_token is not None:
            response.headers["X-Next-Token"] = page.next_token
        return [_listed(sandbox) for sandbox in page.items]

    @routes.get("/sandboxes", summary="All running sandboxes (legacy)", responses=errors(400))
    async def list_v1(metadata: Metadata = None) -> list[ListedSandbox]:
        return [_listed(sandbox) for sandbox in _all_running(sandboxes, listing.metadata(metadata))]

    @routes.get("/sandboxes/{sandbox_id}", summary="One sandbox", responses=errors(404))
    async def details(sandbox_id: SandboxId) -> SandboxDetail:
        return _detail(sandboxes.get(sandbox_id), domain)

    @routes.delete("/sandboxes/{sandbox_id}", status_code=204, summary="End a sandbox", responses=errors(404))
    async def delete(sandbox_id: SandboxId) -> None:
        await sandboxes.delete(sandbox_id)

    @routes.post(
        "/sandboxes/{sandbox_id}/timeout",
        status_code=204,
        summary="Set the time to live, from now; 0 or less expires at once",
        openapi_extra=documented(SandboxTimeoutRequest),
        responses=errors(400, 404, 409, 413),
    )
    async def set_timeout(
        sandbox_id: SandboxId, body: Annotated[SandboxTimeoutRequest, Depends(bodies.required(SandboxTimeoutRequest))]
    ) -> None:
        await sandboxes.set_timeout(sandbox_id, max(0, create.within_maximum(body.timeout, limits.max_timeout)))

    @routes.post(
        "/sandboxes/{sandbox_id}/refreshes",
        status_code=204,
        summary="Lengthen the time to live",
        openapi_extra=documented(SandboxRefreshRequest, required=False),
        responses=errors(400, 404, 409, 413),
    )
    async def refresh(
        sandbox_id: SandboxId, body: Annotated[SandboxRefreshRequest, Depends(bodies.optional(SandboxRefreshRequest))]
    ) -> None:
        duration = DEFAULT_REFRESH if body.duration is None else body.duration
        if not 0 <= duration <= MAX_REFRESH:
            raise BadRequest(f"duration must be 0 to {MAX_REFRESH} seconds, not {duration}")
        await sandboxes.extend(sandbox_id, min(duration, limits.max_timeout))

    async def connect(sandbox_id: str, ttl: int) -> Sandbox:
        seconds = create.checked_timeout(ttl, limits.max_timeout)
        if sandboxes.get(sandbox_id).state is not State.RUNNING:
            raise NotYetAvailable("resuming a paused sandbox is not available yet")
        return _sandbox(await sandboxes.extend(sandbox_id, seconds), domain)

    # `memory: false` asks to ignore saved memory on a resume; a running sandbox has nothing to resume.
    @routes.post(
        "/v2/sandboxes/{sandbox_id}/connect",
        summary="Connect, with at least this time to live",
        openapi_extra=documented(ConnectSandboxV2, required=False),
        responses=errors(400, 404, 409, 413, 501),
    )
    async def connect_v2(
        sandbox_id: SandboxId, body: Annotated[ConnectSandboxV2, Depends(bodies.optional(ConnectSandboxV2))]
    ) -> Sandbox:
        return await connect(sandbox_id, create.DEFAULT_TIMEOUT_V2 if body.timeout is None else body.timeout)

    @routes.post(
        "/sandboxes/{sandbox_id}/connect",
        summary="Connect, with at least this time to live (version 1)",
        openapi_extra=documented(ConnectSandbox),
        responses=errors(400, 404, 409, 413, 501),
    )
    async def connect_v1(
        sandbox_id: SandboxId, body: Annotated[ConnectSandbox, Depends(bodies.required(ConnectSandbox))]
    ) -> Sandbox:
        return await connect(sandbox_id, body.timeout)

    return routes


def _all_running(sandboxes: Sandboxes, metadata: dict[str, str]) -> Iterator[models.Sandbox]:
    token: str | None = None
    while True:
        page = sandboxes.list(ListQuery(states=frozenset({State.RUNNING}), metadata=metadata, next_token=token))
        yield from page.items
        if (token := page.next_token) is None:
            return


def _server_timing(sandbox: models.Sandbox) -> str:
    """Where the time of a launch went, as the W3C's Server-Timing header has it (milliseconds)."""
    return ", ".join(f"{step};dur={milliseconds:g}" for step, milliseconds in sandbox.timings.items())


def _sandbox(sandbox: models.Sandbox, domain: str | None) -> Sandbox:
    answer: Sandbox = {
        "templateID": sandbox.template_id,
        "sandboxID": sandbox.id,
        "clientID": CLIENT_ID,
        "envdVersion": sandbox.envd_version,
        "trafficAccessToken": sandbox.traffic_token,
        "domain": domain,
    }
    if sandbox.alias is not None:
        answer["alias"] = sandbox.alias
    if sandbox.envd_token is not None:
        answer["envdAccessToken"] = sandbox.envd_token
    return answer


def _listed(sandbox: models.Sandbox) -> ListedSandbox:
    answer: ListedSandbox = {
        "templateID": sandbox.template_id,
        "sandboxID": sandbox.id,
        "clientID": CLIENT_ID,
        "startedAt": sandbox.started_at,
        "endAt": sandbox.end_at,
        "cpuCount": sandbox.cpu_count,
        "memoryMB": sandbox.memory_mb,
        "diskSizeMB": sandbox.disk_mb,
        "state": sandbox.state.value,
        "envdVersion": sandbox.envd_version,
        "metadata": dict(sandbox.metadata),
    }
    if sandbox.alias is not None:
        answer["alias"] = sandbox.alias
    return answer


def _detail(sandbox: models.Sandbox, domain: str | None) -> SandboxDetail:
    answer: SandboxDetail = {
        "templateID": sandbox.template_id,
        "sandboxID": sandbox.id,
        "clientID": CLIENT_ID,
        "startedAt": sandbox.started_at,
        "endAt": sandbox.end_at,
        "cpuCount": sandbox.cpu_count,
        "memoryMB": sandbox.memory_mb,
        "diskSizeMB": sandbox.disk_mb,
        "state": sandbox.state.value,
        "envdVersion": sandbox.envd_version,
        "metadata": dict(sandbox.metadata),
        "allowInternetAccess": sandbox.allow_internet_access,
        "domain": domain,
        "lifecycle": {"autoResume": False, "onTimeout": sandbox.on_timeout},
    }
    if sandbox.alias is not None:
        answer["alias"] = sandbox.alias
    if sandbox.envd_token is not None:
        answer["envdAccessToken"] = sandbox.envd_token
    if sandbox.network is not None:
        answer["network"] = dict(sandbox.network)
    return answer
