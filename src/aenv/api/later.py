"""The rest of the protocol: known, not there yet. Each answers 501 and says what is missing, never a fake success."""

from collections.abc import Awaitable, Callable
from typing import NoReturn

from fastapi import APIRouter

from aenv.api.openapi import errors
from aenv.errors import NotYetAvailable

LATER: dict[str, tuple[str, ...]] = {
    "changing the network of a running sandbox": ("PUT /sandboxes/{sandbox_id}/network",),
    "sandbox metrics": (
        "GET /sandboxes/metrics",
        "GET /sandboxes/{sandbox_id}/metrics",
    ),
    "sandbox logs": (
        "GET /sandboxes/{sandbox_id}/logs",
        "GET /v2/sandboxes/{sandbox_id}/logs",
    ),
    "template tags": (
        "POST /templates/tags",
        "DELETE /templates/tags",
        "GET /templates/{template_id}/tags",
        "GET /templates/{template_id}/tags/count",
        "GET /templates/{template_id}/tags/exists",
        "GET /templates/{template_id}/tags/groups",
        "GET /templates/{template_id}/tags/{tag}/assignments",
    ),
    "building templates": (
        "POST /v3/templates",
        "POST /v2/templates",
        "POST /templates",
        "POST /templates/{template_id}",
        "POST /templates/{template_id}/builds/{build_id}",
        "POST /v2/templates/{template_id}/builds/{build_id}",
        "GET /templates/{template_id}/builds/{build_id}/status",
        "GET /templates/{template_id}/builds/{build_id}/logs",
        "GET /templates/{template_id}/files/{hash}",
    ),
    "changing templates": (
        "PATCH /templates/{template_id}",
        "PATCH /v2/templates/{template_id}",
    ),
    "volumes": (
        "GET /volumes",
        "POST /volumes",
        "GET /volumes/{volume_id}",
        "DELETE /volumes/{volume_id}",
        "GET /volumecontent/{volume_id}/path",
        "PATCH /volumecontent/{volume_id}/path",
        "DELETE /volumecontent/{volume_id}/path",
        "GET /volumecontent/{volume_id}/dir",
        "POST /volumecontent/{volume_id}/dir",
        "GET /volumecontent/{volume_id}/file",
        "PUT /volumecontent/{volume_id}/file",
    ),
    "secrets": (
        "GET /secrets",
        "POST /secrets",
        "GET /secrets/{secret_id}",
        "POST /secrets/{secret_id}",
        "DELETE /secrets/{secret_id}",
    ),
    "teams": (
        "GET /teams",
        "GET /teams/{team_id}/metrics",
        "GET /teams/{team_id}/metrics/max",
    ),
}


def router() -> APIRouter:
    routes = APIRouter(tags=["later"])
    for what, endpoints in LATER.items():
        for endpoint in endpoints:
            method, path = endpoint.split(" ")
            routes.add_api_route(
                path,
                _refusal(what, endpoint),
                methods=[method],
                summary=f"Not available yet: {what}",
                status_code=501,
                response_model=None,
                responses=errors(501),
            )
    return routes


def _refusal(what: str, endpoint: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> NoReturn:
        raise NotYetAvailable(f"Not available yet in this version: {what} ({endpoint})")

    return refuse
