"""Sandboxes: create, list, get, delete, time to live."""

from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Response

from aenv.api import answers, create, listing, timing
from aenv.api.body import Bodies, documented
from aenv.api.openapi import errors, headers
from aenv.api.paths import SandboxId
from aenv.api.templates import Limit, NextToken
from aenv.api.wire import (
    ListedSandbox,
    NewSandbox,
    NewSandboxV2,
    Sandbox,
    SandboxDetail,
    SandboxRefreshRequest,
    SandboxTimeoutRequest,
)
from aenv.config import Settings
from aenv.errors import BadRequest
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
    launched = headers(201, Server_Timing=timing.LAUNCH)

    @routes.post(
        "/v2/sandboxes",
        status_code=201,
        summary="Create a sandbox",
        openapi_extra=documented(NewSandboxV2),
        responses=errors(400, 404, 409, 413, 429, 501, 503, 504, 507) | launched,
    )
    async def create_v2(
        response: Response,
        body: Annotated[NewSandboxV2, Depends(bodies.required(NewSandboxV2))],
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> Sandbox:
        key = create.checked_idempotency_key(idempotency_key)
        spec = create.spec(body, default_timeout=create.DEFAULT_TIMEOUT_V2, limits=limits)
        sandbox = await sandboxes.create(spec, idempotency_key=key)
        timing.note_launch(response, sandbox)
        return answers.sandbox(sandbox, domain)

    @routes.post(
        "/sandboxes",
        status_code=201,
        summary="Create a sandbox (version 1: may be unsecured)",
        openapi_extra=documented(NewSandbox),
        responses=errors(400, 404, 413, 429, 501, 503, 504, 507) | launched,
    )
    async def create_v1(
        response: Response, body: Annotated[NewSandbox, Depends(bodies.required(NewSandbox))]
    ) -> Sandbox:
        spec = create.spec(body, default_timeout=create.DEFAULT_TIMEOUT_V1, limits=limits)
        sandbox = await sandboxes.create(spec)
        timing.note_launch(response, sandbox)
        return answers.sandbox(sandbox, domain)

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
        return [answers.listed(sandbox) for sandbox in page.items]

    @routes.get("/sandboxes", summary="All running sandboxes (legacy)", responses=errors(400))
    async def list_v1(metadata: Metadata = None) -> list[ListedSandbox]:
        return [answers.listed(sandbox) for sandbox in _all_running(sandboxes, listing.metadata(metadata))]

    @routes.get("/sandboxes/{sandbox_id}", summary="One sandbox", responses=errors(404))
    async def details(sandbox_id: SandboxId) -> SandboxDetail:
        return answers.detail(sandboxes.get(sandbox_id), domain)

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

    return routes


def _all_running(sandboxes: Sandboxes, metadata: dict[str, str]) -> Iterator[models.Sandbox]:
    token: str | None = None
    while True:
        page = sandboxes.list(ListQuery(states=frozenset({State.RUNNING}), metadata=metadata, next_token=token))
        yield from page.items
        if (token := page.next_token) is None:
            return
