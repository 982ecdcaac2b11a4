"""The OpenAPI document is valid, complete, and true."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import api_fakes
import pytest
from fastapi.openapi.models import OpenAPI

from aenv.api import later


@pytest.fixture(scope="module")
def api() -> api_fakes.Api:
    return api_fakes.make()


@pytest.fixture(scope="module")
def document(api: api_fakes.Api) -> dict[str, Any]:
    return api.app.openapi()


def operations(document: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


async def test_the_served_document_is_the_document(api, document):
    answer = await api.call("GET", "/openapi.json", key=None)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == document
    OpenAPI.model_validate(document)


def test_every_reference_resolves_and_every_schema_is_used(document):
    referred = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert referred == set(document["components"]["schemas"]) - {"ApiKeyAuth"}


def test_operation_ids_are_unique_and_follow_from_the_endpoint(document):
    identifiers = [operation["operationId"] for operation in operations(document).values()]
    assert len(set(identifiers)) == len(identifiers)
    assert operations(document)["POST /v2/sandboxes/{sandbox_id}/connect"]["operationId"] == (
        "post_v2_sandboxes_sandbox_id_connect"
    )


def test_every_failure_is_the_error_model_and_422_is_never_promised(document):
    for endpoint, operation in operations(document).items():
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Error"}, (endpoint, status)
        assert "422" not in operation["responses"]
        assert ("401" in operation["responses"]) == (endpoint != "GET /health")
    assert set(document["components"]["schemas"]["Error"]["required"]) == {"code", "message"}


def test_path_parameters_are_declared(document):
    for endpoint, operation in operations(document).items():
        declared = [p["name"] for p in operation.get("parameters", []) if p["in"] == "path" and p["required"]]
        assert sorted(declared) == sorted(re.findall(r"{(\w+)}", endpoint)), endpoint


def test_the_key_is_needed_but_for_health(document):
    [(name, scheme)] = document["components"]["securitySchemes"].items()
    assert scheme == {"type": "apiKey", "in": "header", "name": "X-API-Key"}
    assert document["security"] == [{name: []}]
    assert [e for e, o in operations(document).items() if o.get("security") == []] == ["GET /health"]


def test_successes_are_documented_with_body_and_headers(document):
    found = operations(document)
    for endpoint in ("DELETE /sandboxes/{sandbox_id}", "POST /sandboxes/{sandbox_id}/timeout"):
        assert "content" not in found[endpoint]["responses"]["204"]
    listing = found["GET /v2/sandboxes"]["responses"]["200"]
    assert set(listing["headers"]) == {"X-Next-Token", "X-Total-Running"}
    assert listing["content"]["application/json"]["schema"]["items"] == {"$ref": "#/components/schemas/ListedSandbox"}


def sdk_endpoints() -> dict[str, set[str]]:
    """Every endpoint of the installed SDK's generated client, and the success statuses it decodes."""
    spec = find_spec("e2b.api.client.api")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = {}
    for source in Path(spec.submodule_search_locations[0]).glob("*/*.py"):
        text = source.read_text()
        if method := re.search(r'"method": "(\w+)"', text):
            url = re.search(r'"url": f?"([^"]+)"', text)
            assert url is not None, source
            statuses = set(re.findall(r"status_code == (2\d\d)", text))
            found[f"{method[1].upper()} {re.sub(r'{[^}]*}', '{}', url[1])}"] = statuses
    return found


def test_every_endpoint_of_the_sdk_is_there_with_its_success_status(document):
    ours = {
        re.sub(r"{\w+}", "{}", endpoint): (endpoint, set(operation["responses"]))
        for endpoint, operation in operations(document).items()
    }
    not_yet = {endpoint for endpoints in later.LATER.values() for endpoint in endpoints}
    wanted = sdk_endpoints()
    assert len(wanted) > 30
    for endpoint, statuses in wanted.items():
        ours_endpoint, ours_statuses = ours[endpoint]
        if ours_endpoint not in not_yet:
            assert ours_statuses & statuses, endpoint
