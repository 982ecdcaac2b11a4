"""A whole node on the fake VMM and the fake network: real store, real images, real proxy, real HTTP on loopback."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv.config import ApiSettings, OrchestratorSettings, Settings, StandbySettings, load
from aenv.guest.provision import GuestBundle
from aenv.images.protocol import Stack
from aenv.images.store import import_layer, make_store
from aenv.network.fake import FakeNetwork
from aenv.orchestrator.store import Store
from aenv.server import WebServer, node
from aenv.snapshots.making import of_layers
from aenv.templates.models import Template
from aenv.templates.store import CHECKPOINT, TemplateStore
from aenv.vmm.fake import FakeHost, FakeVmm

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(),
    reason="gives disks to the VMMs' users and mounts: needs root and /dev/fuse",
)

KEY = "e2b_" + "0" * 40
_nets = itertools.count(100)


def template(template_id: str = "tbase", *names: str) -> Template:
    return Template(
        id=template_id,
        build_id="11111111-1111-4111-8111-111111111111",
        names=names or ("base",),
        cpu_count=1,
        memory_mb=128,
        disk_mb=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        envd_version="0.6.13",
        env={"FROM_TEMPLATE": "1", "BOTH": "template"},
        user="user",
        workdir="/home/user",
    )


async def publish(settings: Settings, made: Template) -> None:
    """Publish a template whose disk, of one layer, is empty."""
    settings.home.mkdir(parents=True, exist_ok=True)
    raw = settings.home / "raw"
    raw.write_bytes(bytes(made.disk_mb << 20))
    layer = await import_layer(settings, raw)
    store = TemplateStore(settings.templates_dir)
    staging = store.stage()
    of_layers(staging / CHECKPOINT, disk=Stack(layers=(layer,), size=made.disk_mb << 20))
    store.publish(staging, made)


@dataclass
class Node:
    """`start` and `stop` may be repeated: the host (what runs on it) stays, as a machine does."""

    home: Path
    limits: OrchestratorSettings = field(default_factory=OrchestratorSettings)
    host: FakeHost = field(default_factory=FakeHost)
    standby: StandbySettings = StandbySettings(ready=0, prepared=0)  # noqa: RUF009 (frozen)
    net: int = field(default_factory=lambda: next(_nets))
    max_slots: int = 1000

    def __post_init__(self) -> None:
        self.settings = Settings(
            home=self.home,
            api=ApiSettings(port=0),
            orchestrator=self.limits,
            images=load().images,
            standby=self.standby,
        )
        self.network = FakeNetwork(self.max_slots, self.net)
        self._stack: contextlib.AsyncExitStack | None = None

    async def start(self) -> None:
        self.network = FakeNetwork(self.max_slots, self.net)
        bundle = GuestBundle(self.home / "vmlinux", self.home / "initramfs", "6.12", "0.6.13", "digest")
        async with contextlib.AsyncExitStack() as stack:
            app = await stack.enter_async_context(
                node(self.settings, api_key=KEY, bundle=bundle, vmm=FakeVmm(self.host), network=self.network)
            )
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server = WebServer(app, self.settings)
            serving = asyncio.create_task(server.serve(sockets=[listener]))

            async def end() -> None:
                server.should_exit = True
                await serving

            stack.push_async_callback(end)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=self.url, headers={"X-API-Key": KEY}, timeout=30)
            )
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        if self._stack is not None:
            stack, self._stack = self._stack, None
            await stack.aclose()

    async def create(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/v2/sandboxes", json={"templateID": "base", **body})
        assert answer.status_code == 201, answer.text
        created: dict[str, Any] = answer.json()
        return created

    async def ids(self) -> list[str]:
        return [row["sandboxID"] for row in (await self.http.get("/v2/sandboxes")).json()]

    async def health(self, sandbox_id: str) -> httpx.Response:
        return await self.http.get("/health", headers={"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"})

    def leftovers(self) -> dict[str, Any]:
        """What sandboxes hold of this node."""
        return {
            "vmms": len(self.host.machines),
            "slots": dict(self.network.policies),
            "folders": [p.name for p in self.settings.sandboxes_dir.iterdir()],
        }


NOTHING = {"vmms": 0, "slots": {}, "folders": []}


@contextlib.asynccontextmanager
async def rows(node: Node) -> AsyncIterator[Store]:
    """The store of a node, beside the node's own if it runs."""
    store = Store(node.settings.state_db)
    try:
        yield store
    finally:
        await store.aclose()


async def end_images(settings: Settings) -> None:
    """End the data plane of a node whose sandboxes run on, as a server does that finds none of them."""
    images = make_store(settings)
    await images.start([], [])
    await images.aclose()


@contextlib.asynccontextmanager
async def running_node(home: Path, **options: Any) -> AsyncIterator[Node]:
    made = Node(home, **options)
    await publish(made.settings, template())
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        await made.host.aclose()
        await end_images(made.settings)


async def until(condition: Any, deadline: float = 10.0) -> None:
    """Wait until `condition()` (may be a coroutine function) is true."""
    async with asyncio.timeout(deadline):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.01)
