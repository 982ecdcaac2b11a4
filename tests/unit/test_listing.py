"""Page tokens that this server did not give."""

import base64
import json

import pytest

from aenv.errors import BadRequest
from aenv.orchestrator import listing
from aenv.orchestrator.models import ListQuery, State


def token(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


FOREIGN = [
    token(b"[" * 20_000),
    token(b"abc"),
    token(b"5"),
    token(b"null"),
    token(b'"abc"'),
    token(b'["d", 5, "i"]'),
    token(b'["d", "2026-01-01T00:00:00", "i"]'),
    token(b'["d", "2026-01-01T00:00:00+00:00", "i"]'),
    token(json.dumps({"a": 1, "b": 2, "c": 3}).encode()),
    token(b"\xff\xfe"),
    "%%%",
    "a",
    "",
    "é",
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_page_token_is_a_bad_request(foreign: str) -> None:
    with pytest.raises(BadRequest, match="Invalid next token"):
        listing.page([], ListQuery(states=frozenset(State), next_token=foreign), None)
