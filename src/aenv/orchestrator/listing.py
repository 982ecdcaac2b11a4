"""Filter, order and page of a listing: pure functions over sandboxes and a query.

A cursor is bound to its query: base64url of JSON ``[digest of filter and order, startedAt, id]``, pointing after
that item.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from aenv.errors import BadRequest
from aenv.orchestrator.models import ListQuery, Page, Sandbox, State


def page(sandboxes: Iterable[Sandbox], query: ListQuery, template_id: str | None) -> Page:
    """The page of `query`; `template_id` is what its template resolved to. Raises BadRequest for a foreign cursor."""
    everything = list(sandboxes)
    total_running = sum(1 for s in everything if s.state is State.RUNNING)
    matching = sorted(
        (s for s in everything if _matches(s, query, template_id)), key=_position, reverse=query.descending
    )
    if query.next_token is not None:
        after = _parse(query)
        matching = [s for s in matching if (_position(s) < after if query.descending else _position(s) > after)]
    items = tuple(matching[: query.limit])
    more = len(matching) > len(items)
    return Page(items, _token(query, items[-1]) if more else None, total_running)


def _matches(sandbox: Sandbox, query: ListQuery, template_id: str | None) -> bool:
    return (
        sandbox.state in query.states
        and all(sandbox.metadata.get(key) == value for key, value in query.metadata.items())
        and (query.template is None or sandbox.template_id == template_id)
        and (query.started_after is None or sandbox.started_at >= query.started_after)
    )


def _position(sandbox: Sandbox) -> tuple[datetime, str]:
    return sandbox.started_at, sandbox.id


def _digest(query: ListQuery) -> str:
    unpaged = replace(query, next_token=None, limit=0)
    key = repr((sorted(unpaged.states), sorted(unpaged.metadata.items()), unpaged.template, unpaged.started_after))
    return hashlib.sha256(f"{key}{unpaged.descending}".encode()).hexdigest()[:16]


def _token(query: ListQuery, last: Sandbox) -> str:
    text = json.dumps([_digest(query), last.started_at.isoformat(), last.id])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _parse(query: ListQuery) -> tuple[datetime, str]:
    token = query.next_token or ""
    try:
        digest, started_at, sandbox_id = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        position = datetime.fromisoformat(started_at), str(sandbox_id)
        if position[0].tzinfo is None:
            raise ValueError("no time zone")
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"Invalid next token: '{token[:100]}' is not one this server gave") from error
    if digest != _digest(query):
        raise BadRequest("Invalid next token: it belongs to a listing with another filter or order")
    return position
