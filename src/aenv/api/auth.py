"""The API key in front of everything: paths that do not exist and bodies that do not parse included."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from aenv.api.errors import error_response
from aenv.errors import Unauthorized

OPEN_PATHS = frozenset({b"/health", b"/openapi.json"})
"""Answered without a key: they hold nothing secret, and a load balancer has no key."""


class RequireKey:
    """ASGI middleware that answers 401 unless ``X-API-Key`` is the key."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"] not in OPEN_PATHS and (error := self._refuse(scope)):
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuse(self, scope: Scope) -> Unauthorized | None:
        # White space around a value is no part of it (RFC 9110 5.5); the parser leaves some of it.
        given = [value.strip(b" \t") for name, value in scope["headers"] if name == b"x-api-key"]
        if not given:
            return Unauthorized("No API key: send it in the X-API-Key header (E2B_API_KEY for the SDKs)")
        # Several headers are several claims; one wrong claim is enough to refuse.
        if not all(hmac.compare_digest(value, self._key) for value in given):
            return Unauthorized(
                "Wrong API key in the X-API-Key header; `aenv auth` on the server's host shows the right one"
            )
        return None
