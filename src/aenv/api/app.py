"""Puts the API together. No globals: everything it serves comes in as an argument."""

from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware import Middleware

from aenv.api import errors, forks, health, later, openapi, pausing, snapshots
from aenv.api import sandboxes as sandbox_routes
from aenv.api import templates as template_routes
from aenv.api.auth import RequireKey
from aenv.api.paths import RawPath
from aenv.config import Settings
from aenv.orchestrator.protocol import Sandboxes


def create_app(
    *, sandboxes: Sandboxes, templates: template_routes.Templates, settings: Settings, api_key: str
) -> FastAPI:
    """The control plane's ASGI app. It owns nothing: whoever made the arguments closes them."""
    app = FastAPI(
        title="AgentENV",
        version=version("aenv"),
        description="Self-hosted microVM environments for agents, speaking the E2B API.",
        # Their pages load scripts from elsewhere, into the origin where people type the API key.
        docs_url=None,
        redoc_url=None,
        # A redirect drops the body, and its target would come from a Host header.
        redirect_slashes=False,
        generate_unique_id_function=openapi.operation_id,
        responses=openapi.errors(401, 500),
        middleware=[
            Middleware(errors.Incidents),
            Middleware(RequireKey, api_key=api_key),
            Middleware(RawPath),
        ],
    )
    errors.install(app)
    openapi.install(app)
    app.include_router(health.router())
    app.include_router(template_routes.router(templates))
    # In front of the sandboxes: `/sandboxes/metrics` is not a sandbox of that name.
    app.include_router(later.router())
    app.include_router(sandbox_routes.router(sandboxes, settings))
    for resource in (pausing, forks, snapshots):
        app.include_router(resource.router(sandboxes, settings))
    return app
