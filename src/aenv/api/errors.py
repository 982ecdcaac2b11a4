"""Every failure as ``{"code", "message"}`` JSON: ours, of validation, of routing, and the unexpected."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv.api.wire import Error
from aenv.errors import AenvError, BadRequest, NotFound

log = structlog.get_logger(__name__)

_SHOWN = 80
"""Characters of a caller's value that a message repeats."""
_LONGEST = 1000
"""Characters of a message; layers below may repeat a caller's value whole."""


def error_response(error: AenvError, headers: dict[str, str] | None = None) -> JSONResponse:
    """`error` as the protocol has it (§2.0): `code` is the HTTP status."""
    return JSONResponse(error_body(error.status, error.message, error.error_code), error.status, headers)


def error_body(status: int, message: str, error_code: str | None = None) -> Error:
    """The protocol's one error object."""
    body: Error = {"code": status, "message": shorten(message, _LONGEST)}
    if error_code is not None:
        body["error_code"] = error_code
    return body


def not_found(sandbox_id: str) -> NotFound:
    """The protocol's text for a sandbox that is not there."""
    return NotFound(f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")


def shorten(value: object, length: int = _SHOWN) -> str:
    """`value` short enough to repeat in a message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= length else f"{text[:length]}…"


def explain(problems: Sequence[Any]) -> str:
    """One line for pydantic's list of problems: the first field, what it must be, and what it was."""
    first = problems[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    where = shorten(".".join(path)) or "The body"
    if first["type"] == "json_invalid":
        return f"The body is not valid JSON: {shorten(str(first['ctx']['error']))}"
    if first["type"] == "missing":
        return f"{where} is required"
    rule = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "must be", 1)
    shown = first["input"]
    return f"{where} {rule}, not {_quoted(shown)}" if rule.startswith("must be") else f"{where}: {rule}"


def _quoted(value: object) -> str:
    # Containers are named, not shown: they can be large, and their repr says little.
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return shorten(
        json.dumps(value[: _SHOWN + 1] if isinstance(value, str) else value, ensure_ascii=False, default=str)
    )


class Incidents:
    """ASGI middleware for what nobody foresaw: 500 with an incident id; the details go to the log alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            return
        except Exception:
            if scope["type"] != "http":
                raise
            incident = secrets.token_hex(6)
            log.exception("unexpected error", incident=incident, method=scope["method"], path=scope["path"])
            if started:  # Too late to say so; the server cuts the connection, which the client sees as an error.
                raise
            message = f"Internal error; the server's log has it as incident {incident}"
            await _json(500, message)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Register the handlers on `app`."""
    app.add_exception_handler(AenvError, _on_aenv_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_aenv_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AenvError)
    if error.status >= 500 and error.status != 501:
        log.warning("request failed", method=request.method, path=request.url.path, error=error.message)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(BadRequest(explain(error.errors())))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Only routing raises these: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    path = shorten(request.scope["path"])
    if error.status_code == 404:
        return _json(404, f"No such endpoint: {path}; /openapi.json lists what there is")
    if error.status_code == 405:
        allowed = ", ".join(_methods_of(request.app.openapi()["paths"], request.scope["path"]))
        return _json(405, f"{request.method} is not possible on {path}; use {allowed}", headers={"Allow": allowed})
    return _json(error.status_code, str(error.detail))


def _methods_of(paths: dict[str, dict[str, Any]], path: str) -> list[str]:
    segments = path.split("/")

    def matches(template: str) -> bool:
        parts = template.split("/")
        return len(parts) == len(segments) and all(
            part == segment or (part.startswith("{") and segment) for part, segment in zip(parts, segments, strict=True)
        )

    return sorted({method.upper() for template, methods in paths.items() if matches(template) for method in methods})


def _json(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers)
