"""Snapshots: take, list, delete, and put a sandbox back to one."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from aenv.api import answers, listing, timing
from aenv.api.body import Bodies, documented
from aenv.api.openapi import errors, headers
from aenv.api.paths import SandboxId, Segment
from aenv.api.templates import Limit, NextToken
from aenv.api.wire import Sandbox, SandboxRollbackRequest, SandboxSnapshotRequest, SnapshotInfo
from aenv.config import Settings
from aenv.orchestrator import models
from aenv.orchestrator.models import SnapshotQuery
from aenv.orchestrator.protocol import Sandboxes

Source = Annotated[str | None, Query(alias="sandboxID", description="Only those taken of this sandbox.")]
Name = Annotated[str | None, Query(description="`name`, which stands for all its tags, or `name:tag`.")]


def router(sandboxes: Sandboxes, settings: Settings) -> APIRouter:
    routes = APIRouter(tags=["snapshots"])
    bodies = Bodies(settings.api.max_body_bytes)

    @routes.post(
        "/sandboxes/{sandbox_id}/snapshots",
        status_code=201,
        summary="Take a snapshot; the sandbox goes on",
        openapi_extra=documented(SandboxSnapshotRequest, required=False),
        responses=errors(400, 404, 409, 413, 503, 504, 507) | headers(201, Server_Timing=timing.STOPPED),
    )
    async def take(
        sandbox_id: SandboxId,
        response: Response,
        body: Annotated[SandboxSnapshotRequest, Depends(bodies.optional(SandboxSnapshotRequest))],
    ) -> SnapshotInfo:
        snapshot = await sandboxes.snapshot(sandbox_id, body.name, memory=body.memory is not False)
        timing.note_stop(response, sandboxes, sandbox_id)
        return _info(snapshot)

    @routes.get(
        "/snapshots",
        summary="Snapshots, newest first, in pages",
        responses=errors(400) | headers(200, X_Next_Token="Only when there is another page."),
    )
    async def list_page(
        response: Response,
        sandbox_id: Source = None,
        name: Name = None,
        limit: Limit = listing.MAX_LIMIT,
        next_token: NextToken = None,
    ) -> list[SnapshotInfo]:
        # Legacy clients append "-<clientID>" to an id; an id itself has no dash.
        source = sandbox_id.partition("-")[0] if sandbox_id else None
        query = SnapshotQuery(sandbox_id=source, name=name or None, limit=limit, next_token=next_token or None)
        page = sandboxes.snapshots(query)
        if page.next_token is not None:
            response.headers["X-Next-Token"] = page.next_token
        return [_info(snapshot) for snapshot in page.items]

    @routes.delete(
        "/templates/{template_id}",
        status_code=204,
        summary="Delete a snapshot; sandboxes made of it live on",
        responses=errors(400, 403, 404, 409),
    )
    async def delete(template_id: Segment) -> None:
        await sandboxes.delete_snapshot(template_id)

    @routes.post(
        "/sandboxes/{sandbox_id}/rollback",
        summary="Put it back to one of its own snapshots, in place (not of E2B)",
        openapi_extra=documented(SandboxRollbackRequest),
        responses=errors(400, 404, 409, 413, 503, 504, 507) | headers(200, Server_Timing=timing.LAUNCH),
    )
    async def rollback(
        sandbox_id: SandboxId,
        response: Response,
        body: Annotated[SandboxRollbackRequest, Depends(bodies.required(SandboxRollbackRequest))],
    ) -> Sandbox:
        sandbox = await sandboxes.rollback(sandbox_id, body.snapshotID)
        timing.note_launch(response, sandbox)
        return answers.sandbox(sandbox, settings.api.domain)

    return routes


def _info(snapshot: models.Snapshot) -> SnapshotInfo:
    return {
        "snapshotID": snapshot.id,
        "names": list(snapshot.names),
        "sandboxID": snapshot.sandbox_id,
        "createdAt": snapshot.created_at,
        "cpuCount": snapshot.cpu_count,
        "memoryMB": snapshot.memory_mb,
        "diskSizeMB": snapshot.disk_mb,
    }
