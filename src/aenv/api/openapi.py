"""The OpenAPI document: what FastAPI derives, plus what it cannot see (our bodies, the key), minus its own 422."""

import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from aenv.api.wire import REQUESTS, Error

SECURITY_SCHEME = "ApiKeyAuth"
_OPEN = ("/health",)
_PARAMETER = re.compile(r"{(\w+)}")


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: each status with the one error model."""
    return {status: {"model": Error, "description": HTTPStatus(status).phrase} for status in statuses}


def headers(status: int, **descriptions: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose success carries headers; an underscore in a name stands for a dash."""
    described = {
        name.replace("_", "-"): {"description": text, "schema": {"type": "string"}}
        for name, text in descriptions.items()
    }
    return {status: {"headers": described}}


def operation_id(route: APIRoute) -> str:
    """Method and path: ``post_v2_sandboxes_sandbox_id_connect``. Stable as long as the endpoint is."""
    method = min(route.methods or ()).lower()
    parts = [part.strip("{}") for part in route.path_format.split("/") if part]
    return "_".join([method, *parts]).replace("-", "_")


def install(app: FastAPI) -> None:
    """Make `app` serve the completed document; built once, at the first request for it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, bodies = models_json_schema(
        [(model, "validation") for model in REQUESTS], ref_template="#/components/schemas/{model}"
    )
    schemas.update(bodies["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {SECURITY_SCHEME: {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
    document["security"] = [{SECURITY_SCHEME: []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _declare_path_parameters(path, operation)
            responses = operation["responses"]
            responses.pop("422", None)  # A wrong value is 400 here.
            if path in _OPEN:
                operation["security"] = []
                responses.pop("401", None)
    return document


def _declare_path_parameters(path: str, operation: dict[str, Any]) -> None:
    """Routes that refuse whatever is asked take no arguments; their paths have parameters all the same."""
    parameters = operation.setdefault("parameters", [])
    declared = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
    for name in _PARAMETER.findall(path):
        if name not in declared:
            parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
