"""Pause, resume, and connect, which resumes what is paused."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from aenv.api import answers, create, timing
from aenv.api.body import Bodies, documented
from aenv.api.errors import error_response
from aenv.api.openapi import errors, headers
from aenv.api.paths import SandboxId
from aenv.api.wire import ConnectSandbox, ConnectSandboxV2, ResumedSandbox, Sandbox, SandboxPauseRequest
from aenv.config import Settings
from aenv.errors import Conflict, Unavailable
from aenv.guest import envd
from aenv.orchestrator import models
from aenv.orchestrator.models import State
from aenv.orchestrator.protocol import Sandboxes

LAUNCH_ERRORS = (400, 404, 409, 413, 429, 503, 504, 507)


def router(sandboxes: Sandboxes, settings: Settings) -> APIRouter:
    routes = APIRouter(tags=["pausing"])
    bodies = Bodies(settings.api.max_body_bytes)
    limits = settings.orchestrator
    domain = settings.api.domain
    woken = headers(201, Server_Timing=timing.LAUNCH)
    woken[201] |= {"model": Sandbox, "description": "It was paused and runs again"}

    @routes.post(
        "/sandboxes/{sandbox_id}/pause",
        status_code=204,
        summary="Pause a sandbox; without memory only its disk is kept. 409 if it is paused already",
        openapi_extra=documented(SandboxPauseRequest, required=False),
        responses=errors(400, 404, 409, 413, 503, 504, 507) | headers(204, Server_Timing=timing.STOPPED),
        response_model=None,
    )
    async def pause(
        sandbox_id: SandboxId,
        response: Response,
        body: Annotated[SandboxPauseRequest, Depends(bodies.optional(SandboxPauseRequest))],
    ) -> Response | None:
        if body.requireHealthyGuest and not await _guest_answers(sandboxes, sandbox_id):
            refusal = Unavailable(f"The daemon in sandbox {sandbox_id} does not answer; the sandbox was not paused")
            return error_response(refusal, {"Should-Retry": "false"})  # SDKs would repeat it three times.
        await sandboxes.pause(sandbox_id, memory=body.memory is not False)
        timing.note_stop(response, sandboxes, sandbox_id)
        return None

    async def resumed(
        sandbox_id: str, ttl: int | None, default: int, memory: bool | None
    ) -> tuple[models.Sandbox, bool]:
        seconds = create.checked_timeout(default if ttl is None else ttl, limits.max_timeout)
        return await sandboxes.resume(sandbox_id, seconds, memory=memory is not False)

    @routes.post(
        "/sandboxes/{sandbox_id}/resume",
        status_code=201,
        summary="Resume a paused sandbox (legacy: 409 if it runs; see connect)",
        openapi_extra=documented(ResumedSandbox, required=False),
        responses=errors(*LAUNCH_ERRORS) | woken,
    )
    async def resume(
        sandbox_id: SandboxId,
        response: Response,
        body: Annotated[ResumedSandbox, Depends(bodies.optional(ResumedSandbox))],
    ) -> Sandbox:
        known = sandboxes.get(sandbox_id)
        running = known.state is State.RUNNING and known.operation is None
        if not running:
            sandbox, was_paused = await resumed(sandbox_id, body.timeout, create.DEFAULT_TIMEOUT_V1, body.memory)
            running = not was_paused
        if running:
            raise Conflict(f"Sandbox {sandbox_id} is running already; to lengthen its life use connect or timeout")
        timing.note_launch(response, sandbox)
        return answers.sandbox(sandbox, domain)

    async def connect(response: Response, sandbox_id: str, ttl: int | None, memory: bool | None) -> Sandbox:
        sandbox, was_paused = await resumed(sandbox_id, ttl, create.DEFAULT_TIMEOUT_V2, memory)
        if was_paused:
            response.status_code = 201
            timing.note_launch(response, sandbox)
        return answers.sandbox(sandbox, domain)

    @routes.post(
        "/v2/sandboxes/{sandbox_id}/connect",
        summary="Make sure it runs for at least this long, resuming it if it is paused",
        openapi_extra=documented(ConnectSandboxV2, required=False),
        responses=errors(*LAUNCH_ERRORS) | woken,
    )
    async def connect_v2(
        sandbox_id: SandboxId,
        response: Response,
        body: Annotated[ConnectSandboxV2, Depends(bodies.optional(ConnectSandboxV2))],
    ) -> Sandbox:
        return await connect(response, sandbox_id, body.timeout, body.memory)

    @routes.post(
        "/sandboxes/{sandbox_id}/connect",
        summary="Make sure it runs for at least this long, resuming it if it is paused (version 1)",
        openapi_extra=documented(ConnectSandbox),
        responses=errors(*LAUNCH_ERRORS) | woken,
    )
    async def connect_v1(
        sandbox_id: SandboxId,
        response: Response,
        body: Annotated[ConnectSandbox, Depends(bodies.required(ConnectSandbox))],
    ) -> Sandbox:
        return await connect(response, sandbox_id, body.timeout, body.memory)

    return routes


async def _guest_answers(sandboxes: Sandboxes, sandbox_id: str) -> bool:
    """Whether the guest's daemon answers. One that does not run is for the pause itself to refuse. Raises NotFound."""
    sandboxes.get(sandbox_id)
    route = sandboxes.route(sandbox_id)
    return route is None or await envd.healthy(route.address)
