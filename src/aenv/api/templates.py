"""Templates: listing, details and lookup of a name."""

from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Response

from aenv.api import listing
from aenv.api.openapi import errors, headers
from aenv.api.paths import Segment
from aenv.api.wire import Template, TemplateAliasResponse, TemplateBuild, TemplateWithBuilds
from aenv.templates import models

DEFAULT_NAME = "base"
"""The template that `aenv setup` makes; what an SDK uses when it names none."""


class Templates(Protocol):
    """What the API asks of the template store."""

    def list(self) -> tuple[models.Template, ...]: ...

    def resolve(self, identifier: str) -> models.Template:
        """By id, name or ``name:tag``. Raises NotFound and BadRequest with the protocol's texts."""
        ...


Limit = Annotated[int, Query(ge=1, le=listing.MAX_LIMIT)]
NextToken = Annotated[str | None, Query(alias="nextToken")]
TeamId = Annotated[str | None, Query(alias="teamID", description="Accepted and without effect: a node has one team.")]


def router(templates: Templates) -> APIRouter:
    routes = APIRouter(tags=["templates"])

    @routes.get("/templates", summary="All templates")
    async def list_all(team_id: TeamId = None) -> list[Template]:
        return [_template(template) for template in templates.list()]

    @routes.get(
        "/v2/templates",
        summary="Templates, in pages",
        responses=errors(400) | headers(200, X_Next_Token="Only when there is another page."),
    )
    async def list_page(
        response: Response, team_id: TeamId = None, limit: Limit = listing.MAX_LIMIT, next_token: NextToken = None
    ) -> list[Template]:
        items = [(template.id, _template(template)) for template in sorted(templates.list(), key=lambda t: t.id)]
        shown, following = listing.page(items, limit, next_token)
        if following is not None:
            response.headers["X-Next-Token"] = following
        return shown

    @routes.get("/default-templates", summary="Templates that every node has")
    async def list_default() -> list[Template]:
        return [_template(template) for template in templates.list() if DEFAULT_NAME in template.names]

    @routes.get("/templates/aliases/{alias}", summary="The template that a name stands for", responses=errors(400, 404))
    async def by_alias(alias: Segment) -> TemplateAliasResponse:
        return {"templateID": templates.resolve(alias).id, "public": True}

    @routes.get("/templates/{template_id}", summary="One template and its builds", responses=errors(400, 404))
    async def details(
        template_id: Segment, response: Response, limit: Limit = listing.MAX_LIMIT, next_token: NextToken = None
    ) -> TemplateWithBuilds:
        template = templates.resolve(template_id)
        builds, following = listing.page([(template.build_id, _build(template))], limit, next_token)
        if following is not None:
            response.headers["X-Next-Token"] = following
        return {**_template(template), "builds": builds}

    return routes


def _template(template: models.Template) -> Template:
    """There is one team and no template is hidden from it; a template here has exactly one finished build."""
    return {
        "templateID": template.id,
        "buildID": template.build_id,
        "cpuCount": template.cpu_count,
        "memoryMB": template.memory_mb,
        "diskSizeMB": template.disk_mb,
        "public": True,
        "aliases": list(template.names),
        "names": list(template.names),
        "createdAt": template.created_at,
        "updatedAt": template.created_at,
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": 1,
        "envdVersion": template.envd_version,
        "buildStatus": "ready",
        "isDefault": DEFAULT_NAME in template.names,
    }


def _build(template: models.Template) -> TemplateBuild:
    return {
        "buildID": template.build_id,
        "status": "ready",
        "createdAt": template.created_at,
        "updatedAt": template.created_at,
        "finishedAt": template.created_at,
        "cpuCount": template.cpu_count,
        "memoryMB": template.memory_mb,
        "diskSizeMB": template.disk_mb,
        "envdVersion": template.envd_version,
    }
