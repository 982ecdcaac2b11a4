"""Liveness of the control plane."""

from fastapi import APIRouter

from aenv.api.wire import Health


def router() -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", summary="The server answers")
    async def health() -> Health:
        return {"status": "ok"}

    return routes
