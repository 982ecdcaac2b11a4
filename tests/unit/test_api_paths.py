import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.api import paths
from aenv.errors import NotFound


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"/templates/aliases/a%2Fb%3Ac", "/templates/aliases/a%2Fb%3Ac"),
        (b"/templates/a:b", "/templates/a%3Ab"),
        (b"/sand%62oxes", "/sandboxes"),
        (b"/a%2fb", "/a%2Fb"),
        (b"/%2e%2e/x", "/../x"),
        (b"/", "/"),
    ],
)
def test_one_spelling_of_a_path(raw, expected):
    assert paths.canonical(raw) == expected
    assert paths.canonical(expected.encode()) == expected


@pytest.mark.parametrize("raw", [b"/%ff", b"/a%C3/b"])
def test_a_path_that_is_not_text(raw):
    with pytest.raises(UnicodeDecodeError):
        paths.canonical(raw)


@settings(deadline=None)
@given(st.binary())
def test_the_number_of_segments_never_changes(raw):
    try:
        path = paths.canonical(raw)
    except UnicodeDecodeError:
        return
    assert path.count("/") == raw.count(b"/")
    assert path.isascii()


@pytest.mark.parametrize(
    ("segment", "expected"), [("iabc123", "iabc123"), ("iabc123-client", "iabc123"), ("ia-b-c", "ia")]
)
def test_ids_lose_the_legacy_suffix(segment, expected):
    assert paths.sandbox_id(segment) == expected


@pytest.mark.parametrize("segment", ["..", "-x", "IABC", "a%2Fb", "a%00", "a" * 65, "%D9%A1", "a%0A"])
def test_what_is_no_id_is_not_found(segment):
    with pytest.raises(NotFound, match="doesn't exist or you don't have access to it"):
        paths.sandbox_id(segment)
