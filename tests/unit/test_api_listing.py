from datetime import UTC, datetime
from urllib.parse import quote, unquote, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.api import listing
from aenv.errors import BadRequest
from aenv.orchestrator.models import State

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {State.RUNNING, State.PAUSED}),
        ([""], {State.RUNNING, State.PAUSED}),
        (["running"], {State.RUNNING}),
        (["running,paused"], {State.RUNNING, State.PAUSED}),
        (["running", "paused"], {State.RUNNING, State.PAUSED}),
    ],
)
def test_states(given, expected):
    assert listing.states(given) == expected


def test_an_unknown_state_is_named():
    with pytest.raises(BadRequest, match="'killed'"):
        listing.states(["running,killed"])


@pytest.mark.parametrize(
    ("on_the_wire", "expected"),
    [
        ("k%252520a%3Dv%252F1%26b%3Dc", {"k a": "v/1", "b": "c"}),  # the Python SDK
        ("k%252520a%3Dv%25252F1%26b%3Dc", {"k a": "v/1", "b": "c"}),  # the JavaScript SDK
        ("a%3D", {"a": ""}),
        ("", {}),
    ],
)
def test_metadata_as_the_sdks_send_it(on_the_wire, expected):
    assert listing.metadata(unquote(on_the_wire)) == expected


@settings(deadline=None)
@given(st.dictionaries(TEXT, TEXT))
def test_metadata_filters_of_any_text_come_back(wanted):
    encoded = urlencode({quote(key): quote(value) for key, value in wanted.items()})
    assert listing.metadata(encoded) == wanted


@pytest.mark.parametrize("given", ["novalue", "a=1&b", "a=1&a=2", "a=%25FF", "%FF=1"])
def test_a_metadata_filter_that_cannot_be_meant(given):
    with pytest.raises(BadRequest, match="metadata"):
        listing.metadata(given)


@pytest.mark.parametrize(
    "given",
    [
        "2026-11-29T11:28:24.713000+00:00",
        "2026-11-29T11:28:24.713Z",
        "2026-11-29T13:28:24.713+02:00",
        "2026-11-29T11:28:24.713 00:00",  # an unencoded plus
    ],
)
def test_started_after_in_both_sdks_formats(given):
    assert listing.started_after(given) == datetime(2026, 11, 29, 11, 28, 24, 713000, UTC)


@pytest.mark.parametrize("given", ["yesterday", "2026-11-29T11:28:24", "0001-01-01T00:00:00+14:00", "1795951704"])
def test_started_after_that_is_no_instant(given):
    with pytest.raises(BadRequest, match="startedAfter"):
        listing.started_after(given)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 12))
def test_pages_show_everything_once_and_then_end(count, limit):
    items = [(f"id{number:02}", number) for number in range(count)]
    seen: list[int] = []
    token = None
    while True:
        shown, token = listing.page(items, limit, token)
        seen += shown
        assert len(shown) <= limit
        if token is None:
            break
        assert len(shown) == limit
    assert seen == list(range(count))


@pytest.mark.parametrize("token", ["!", "nonsense", "aWQ5OQ==", "ÿ"])
def test_a_token_nobody_gave(token):
    with pytest.raises(BadRequest, match="Invalid next token"):
        listing.page([("id1", 1), ("id2", 2)], 1, token)
