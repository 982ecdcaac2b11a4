"""The types of an ASGI application, and the one thing ASGI lacks: breaking a client's connection."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ABORT = "aenv.abort"
"""Key in ``scope["extensions"]``, set by `aenv.proxy.server`: its "abort" drops the client's TCP connection."""


class ResponseBroken(ConnectionError):
    """Raised out of the application when the server has no `ABORT`: servers drop the connection of a response that
    fails half-way."""


def abort_of(scope: Scope) -> Callable[[], None] | None:
    """What drops the client's connection, where the server offers it."""
    extension = scope.get("extensions", {}).get(ABORT)
    return None if extension is None else cast(Callable[[], None], extension["abort"])


async def break_client(scope: Scope, receive: Receive) -> None:
    """Make the client see a broken connection, never an end: what it was reading was cut short.

    Raises ResponseBroken where the server offers no other way.
    """
    abort = abort_of(scope)
    if abort is None:
        raise ResponseBroken("the sandbox's response was cut short")
    abort()
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
