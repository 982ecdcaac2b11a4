"""After every test of a real server the file systems of its sandboxes are whole."""

from collections.abc import Iterator

import pytest

from real_server import RealServer


@pytest.fixture(autouse=True)
def whole_disks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for used in list(getattr(request.node, "funcargs", {}).values()):
        if isinstance(used, RealServer):
            used.fsck()
