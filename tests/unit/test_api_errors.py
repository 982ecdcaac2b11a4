import json

import pytest
from pydantic import ValidationError

from aenv.api.errors import explain, shorten
from aenv.api.wire import NewSandboxV2


def explained(body: object) -> str:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ValidationError) as caught:
        NewSandboxV2.model_validate_json(data)
    return explain(caught.value.errors(include_url=False))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "templateID is required"),
        ([], "The body must be an object, not an array"),
        (5, "The body must be an object, not 5"),
        ({"templateID": 5}, "templateID must be a valid string, not 5"),
        ({"templateID": None}, "templateID must be a valid string, not null"),
        ({"templateID": "b", "timeout": "300"}, 'timeout must be a valid integer, not "300"'),
        ({"templateID": "b", "timeout": 1.5}, "timeout must be a valid integer, not 1.5"),
        ({"templateID": "b", "timeout": True}, "timeout must be a valid integer, not true"),
        ({"templateID": "b", "autoPause": "true"}, 'autoPause must be a valid boolean, not "true"'),
        ({"templateID": "b", "autoResume": {}}, "autoResume.enabled is required"),
        ({"templateID": "b", "metadata": {"a": 1}}, "metadata: the value of 'a' must be a string"),
        ({"templateID": "b", "metadata": {"a": None}}, "metadata: the value of 'a' must be a string"),
        ({"templateID": "b", "metadata": "a"}, 'metadata must be an object, not "a"'),
        ({"templateID": "b", "network": {"allowOut": ["a", 1, 2]}}, "network.allowOut.1 must be a valid string, not 1"),
        ({"templateID": "b", "volumeMounts": {"n": "p"}}, "volumeMounts must be a valid array, not an object"),
    ],
)
def test_a_wrong_body_is_explained_in_a_line(body, message):
    assert explained(body) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"templateID":"\xff"}',
        b'{"templateID":"\\ud800"}',
        b'{"templateID":"b","x":"\\udfff"}',
        b'{"templateID":"b","x":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_json(body):
    assert explained(body).startswith("The body is not valid JSON: ")


def test_null_stands_for_absent_where_a_field_is_optional():
    fields = dict.fromkeys(set(NewSandboxV2.model_fields) - {"templateID"})
    body = NewSandboxV2.model_validate_json(json.dumps({"templateID": "b", "unknown": [1], **fields}))
    assert body == NewSandboxV2(templateID="b")


def test_a_long_value_is_cut():
    assert len(explained({"templateID": "b", "timeout": "x" * 10_000})) < 200
    assert len(explained({"templateID": "b", "metadata": {"k" * 10_000: 1}})) < 200
    assert shorten("x" * 1000) == "x" * 80 + "…"
