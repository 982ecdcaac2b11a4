"""Query parameters of the listings. Pure."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from aenv.api.errors import shorten
from aenv.errors import BadRequest
from aenv.orchestrator.models import State

MAX_LIMIT = 100

Item = TypeVar("Item")


def states(given: Iterable[str] | None) -> frozenset[State]:
    """``running,paused``, in one parameter or several; nothing means both. Raises BadRequest."""
    names = [name for part in given or () for name in part.split(",") if name]
    if unknown := sorted(set(names) - set(State)):
        raise BadRequest(f"state must be running, paused or both, separated by a comma, not {shorten(unknown[0])!r}")
    return frozenset(map(State, names)) or frozenset(State)


def metadata(given: str | None) -> dict[str, str]:
    """The filter: itself a query string, whose keys and values are percent-encoded once more. Raises BadRequest."""
    if not given:
        return {}
    if any("=" not in part for part in given.split("&") if part):
        raise BadRequest(f"metadata must be a query string such as key=value&other=value, not {shorten(given)!r}")
    try:
        pairs = [
            (unquote(key, errors="strict"), unquote(value, errors="strict"))
            for key, value in parse_qsl(given, keep_blank_values=True, errors="strict")
        ]
    except ValueError:
        raise BadRequest(f"metadata: {shorten(given)!r} cannot be decoded") from None
    wanted: dict[str, str] = {}
    for key, value in pairs:
        if wanted.setdefault(key, value) != value:
            raise BadRequest(f"metadata asks for two values of {shorten(key)!r}; no sandbox has both")
    return wanted


def started_after(given: str | None) -> datetime | None:
    """RFC 3339 with ``Z`` or an offset, any precision; UTC. Raises BadRequest."""
    if not given:
        return None
    try:
        # A `+` that a client forgot to encode arrives as a space.
        moment = datetime.fromisoformat(given.strip().replace(" ", "+"))
        if moment.tzinfo is None:
            raise ValueError("no offset")
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadRequest(f"startedAfter must be a time such as 2026-01-31T12:00:00Z, not {shorten(given)!r}") from None


def page(items: Sequence[tuple[str, Item]], limit: int, token: str | None) -> tuple[list[Item], str | None]:
    """One page of (key, item) in their order, and the token of the next page or None. Raises BadRequest.

    The token is the key of the last item shown; an item that was removed meanwhile makes it invalid.
    """
    start = 0
    if token:
        try:
            last = base64.urlsafe_b64decode(token.encode("ascii")).decode()
            start = [key for key, _ in items].index(last) + 1
        except (ValueError, binascii.Error):
            raise BadRequest("Invalid next token") from None
    shown = items[start : start + limit]
    more = start + limit < len(items)
    following = base64.urlsafe_b64encode(shown[-1][0].encode()).decode() if shown and more else None
    return [item for _, item in shown], following
