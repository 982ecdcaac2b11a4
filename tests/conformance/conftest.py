"""One real server for the official SDKs, and one sandbox that most tests share: a boot takes seconds."""

from collections.abc import Iterator

import pytest
from e2b import AsyncSandbox, Sandbox

from real_server import RealServer, real_server

ENVS = {"FROM_CREATE": "created", "BOTH": "create"}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="session")
def sandbox(server: RealServer) -> Sandbox:
    """Shared: what a test leaves in it must not matter to others."""
    return server.create(envs=ENVS, metadata={"purpose": "shared"})


@pytest.fixture
async def async_sandbox(server: RealServer, sandbox: Sandbox) -> AsyncSandbox:
    """The same sandbox, for this test's event loop."""
    return await AsyncSandbox.connect(sandbox.sandbox_id, timeout=1, **server.sdk)
