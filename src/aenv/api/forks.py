"""Fork a sandbox into children of its present state."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from aenv.api import answers, create, timing
from aenv.api.body import Bodies, documented
from aenv.api.errors import error_body
from aenv.api.openapi import errors, headers
from aenv.api.paths import SandboxId
from aenv.api.wire import SandboxForkRequest, SandboxForkResult
from aenv.config import Settings
from aenv.errors import AenvError, BadRequest
from aenv.orchestrator import models
from aenv.orchestrator.protocol import Sandboxes


def router(sandboxes: Sandboxes, settings: Settings) -> APIRouter:
    routes = APIRouter(tags=["snapshots"])
    bodies = Bodies(settings.api.max_body_bytes)
    limits = settings.orchestrator

    @routes.post(
        "/sandboxes/{sandbox_id}/fork",
        status_code=201,
        summary="Make children of its present state; each is told to have succeeded or failed by itself",
        openapi_extra=documented(SandboxForkRequest, required=False),
        responses=errors(400, 404, 409, 413, 429, 503, 504, 507) | headers(201, Server_Timing=timing.STOPPED),
    )
    async def fork(
        sandbox_id: SandboxId,
        response: Response,
        body: Annotated[SandboxForkRequest, Depends(bodies.optional(SandboxForkRequest))],
    ) -> list[SandboxForkResult]:
        count = 1 if body.count is None else body.count
        if not 1 <= count <= limits.max_fork_count:
            raise BadRequest(
                f"count must be 1 to {limits.max_fork_count} (orchestrator.max_fork_count), not {count:.10g}"
            )
        ttl = create.DEFAULT_TIMEOUT_V1 if body.timeout is None else body.timeout
        seconds = create.checked_timeout(ttl, limits.max_timeout)
        children = await sandboxes.fork(sandbox_id, count=count, seconds=seconds)
        timing.note_stop(response, sandboxes, sandbox_id)
        return [_result(child) for child in children]

    def _result(child: models.Sandbox | AenvError) -> SandboxForkResult:
        if isinstance(child, AenvError):
            return {"error": error_body(child.status, child.message, child.error_code)}
        return {"sandbox": answers.sandbox(child, settings.api.domain)}

    return routes
