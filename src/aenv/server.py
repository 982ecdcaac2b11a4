"""The one place where the parts of a node are put together, started, and closed in the reverse order."""

import asyncio
import gc
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import structlog
import uvicorn
import uvloop

from aenv.api import apikey
from aenv.api.app import create_app
from aenv.config import Settings
from aenv.errors import ConfigError
from aenv.guest.envd import GuestClient
from aenv.guest.provision import GuestBundle, load_bundle
from aenv.home import held
from aenv.images.store import make_store
from aenv.network.pool import SlotPool
from aenv.network.protocol import Network
from aenv.observability import logs
from aenv.orchestrator.capture import Capturer
from aenv.orchestrator.greeter import Greeter
from aenv.orchestrator.launcher import Launcher
from aenv.orchestrator.service import Orchestrator
from aenv.orchestrator.store import Store
from aenv.orchestrator.tokens import Tokens
from aenv.proxy.app import ProxyApp
from aenv.proxy.server import uvicorn_options
from aenv.templates.store import TemplateStore
from aenv.vmm.protocol import Vmm
from aenv.vmm.qemu import QemuVmm

log = structlog.get_logger(__name__)

DRAIN = 3
"""Seconds for API calls under way when the server is told to stop."""
BACKLOG = 2048


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, ProvisionError and what else makes a start impossible."""
    logs.configure(settings.log)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a sandbox takes about ten, each open connection two
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    with only_server(settings), listening(settings) as listener:
        api_key = await asyncio.to_thread(apikey.load, settings.secrets_dir)
        bundle = await asyncio.to_thread(load_bundle, settings.home)
        vmm = QemuVmm(
            home=settings.home,
            settings=settings.vmm,
            bundle=bundle,
            kill_deadline=settings.orchestrator.kill_deadline,
        )
        network = SlotPool(settings)
        async with node(settings, api_key=api_key, bundle=bundle, vmm=vmm, network=network) as running:
            # What is there now stays: no collection looks at it again, which would stop the world for 20 ms each time.
            gc.collect()
            gc.freeze()
            log.info("server.ready", url=f"http://{settings.api.host}:{settings.api.port}", home=str(settings.home))
            await WebServer(running, settings).serve(sockets=[listener])
            log.info("server.stopping")


@dataclass(frozen=True, slots=True)
class Node:
    """A node that runs: its ASGI application, and who must be told first when it is to stop."""

    app: ProxyApp
    orchestrator: Orchestrator


@asynccontextmanager
async def node(
    settings: Settings, *, api_key: str, bundle: GuestBundle, vmm: Vmm, network: Network
) -> AsyncIterator[Node]:
    """A node over the given VMM and network, reconciled with what runs; closes all it was given."""
    templates = TemplateStore(settings.templates_dir)
    await asyncio.to_thread(templates.sweep)
    tokens = await asyncio.to_thread(Tokens.load, settings.secrets_dir / "token-seed")
    guest = GuestClient()
    images = make_store(settings)
    launcher = Launcher(
        settings=settings,
        vmm=vmm,
        network=network,
        images=images,
        greeter=Greeter(guest=guest, images=images, tokens=tokens, deadline=settings.orchestrator.boot_deadline),
        bundle=bundle,
    )
    orchestrator = Orchestrator(
        capturer=Capturer(vmm=vmm, images=images, guest=guest),
        settings=settings,
        store=await asyncio.to_thread(Store, settings.state_db),
        launcher=launcher,
        network=network,
        vmm=vmm,
        images=images,
        templates=templates,
        tokens=tokens,
        on_gone=lambda sandbox_id: proxy.sandbox_gone(sandbox_id),
    )
    control_plane = create_app(sandboxes=orchestrator, templates=templates, settings=settings, api_key=api_key)
    proxy = ProxyApp(orchestrator, control_plane, api_key=api_key)
    try:
        async with orchestrator:
            yield Node(proxy, orchestrator)
    finally:
        await proxy.aclose()
        await guest.aclose()


class WebServer(uvicorn.Server):
    """uvicorn as this application needs it; a stop ends creations and streams before it waits for requests."""

    def __init__(self, node: Node, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                node.app,
                host=settings.api.host,
                port=settings.api.port,
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=DRAIN,
                backlog=BACKLOG,
                **uvicorn_options(),
            )
        )
        self._node = node

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT. uvicorn's own raises them once more when it has stopped, which would end the
        process before the node is closed."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._node.orchestrator.stop_creating()
        await self._node.app.aclose()
        await super().shutdown(sockets)


@contextmanager
def only_server(settings: Settings) -> Iterator[None]:
    """Hold the home: two servers on one would destroy each other's sandboxes. Raises ConfigError."""
    busy = f"a server (pid {{pid}}) already runs on {settings.home}; stop it, or set AENV_HOME to another folder"
    with held(settings.pid_file, busy):
        yield


@contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """The listening socket, bound before anything else is started. Raises ConfigError."""
    host, port = settings.api.host, settings.api.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} (api.host, api.port): {error}") from error
    with listener:
        yield listener
