"""Routing on the raw path: a segment is split off first and decoded after (``ns%2Fname%3Atag`` is one segment)."""

import re
from typing import Annotated
from urllib.parse import quote, unquote, unquote_to_bytes

from fastapi import Path
from pydantic import AfterValidator
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv.api.errors import error_response, not_found, shorten
from aenv.errors import BadRequest

_SANDBOX_ID = re.compile(r"[a-z0-9]{1,64}")


class RawPath:
    """ASGI middleware that hands the routes a path whose segments are still percent-encoded, in one spelling.

    Answers 400 for a path or a query that is not UTF-8 once decoded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope = {**scope, "path": canonical(scope["raw_path"])}
                unquote_to_bytes(scope["query_string"]).decode()
            except UnicodeDecodeError:
                error = BadRequest("The URL is not UTF-8 once its percent-encoding is removed")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def canonical(raw_path: bytes) -> str:
    """The same path with each segment encoded in the one way `quote` has. Raises UnicodeDecodeError."""
    return "/".join(quote(unquote_to_bytes(segment).decode(), safe="") for segment in raw_path.split(b"/"))


def sandbox_id(segment: str) -> str:
    """The id in a path segment; a legacy ``<id>-<clientID>`` loses its suffix. Raises NotFound for what is no id."""
    given = unquote(segment)
    identifier = given.partition("-")[0]
    if not _SANDBOX_ID.fullmatch(identifier):
        raise not_found(shorten(given))
    return identifier


SandboxId = Annotated[str, Path(), AfterValidator(sandbox_id)]

Segment = Annotated[str, Path(), AfterValidator(unquote)]
"""A path parameter, decoded."""
