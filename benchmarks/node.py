"""A node of the benchmark's own: `aenv server` in a scratch home, so that nothing else is measured or disturbed.

Guest kernel and templates are those of the node this machine was set up as (hard links: they never change). Everything
else, sandboxes included, is deleted at the end.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from aenv.cli.client import ApiClient
from aenv.cli.errors import CliError
from aenv.cli.profile import Profile
from aenv.config import Settings, load
from aenv.images.client import BlockdClient
from aenv.images.daemon import Places
from aenv.snapshots.checkpoint import read
from aenv.snapshots.making import disk_only
from aenv.templates.store import CHECKPOINT, TemplateStore
from aenv.vmm.process import find

_START_DEADLINE = 60.0
_STOP_DEADLINE = 40.0
_FACTS = ("accel.json", "tsc_khz")
"""In `cache/`: what was found out about this machine, and what saved guests depend on."""


class Node:
    """A scratch home; `started` runs a server on it, one after another."""

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self.home = home
        self.settings = load(home, environ)
        self.pid = 0
        """Of the server."""
        key, port = "e2b_" + uuid.uuid4().hex, _free_port()
        url = f"http://127.0.0.1:{port}"
        self.profile = Profile(
            api_url=url, api_url_from="benchmark", api_key=key, api_key_from="benchmark", sandbox_url=url
        )
        own = {"AENV_HOME": str(home), "AENV_API_KEY": key, "AENV_API_HOST": "127.0.0.1", "AENV_API_PORT": str(port)}
        self._environ = {**environ, **own}
        self._log = home / "server.log"

    @asynccontextmanager
    async def started(self, **settings: object) -> AsyncIterator["Node"]:
        """Serve during the block, with these settings (``standby_ready=0``); all sandboxes end with it."""
        given = {f"AENV_{name.upper()}": str(value) for name, value in settings.items()}
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).with_name("aenv")),
                "server",
                env={**self._environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = process.pid
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                await self._answers(process, http)
                yield self
            finally:
                if process.returncode is None:
                    await self._delete_all(http)
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), _STOP_DEADLINE)
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                self._kill_vmms()

    async def _answers(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(_START_DEADLINE):
                while process.returncode is None:
                    with contextlib.suppress(httpx.TransportError):
                        if (await http.get(f"{self.profile.api_url}/health")).is_success:
                            return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pass
        raise CliError(f"the benchmark's server did not start: {self._log.read_text()[-2000:]}")

    async def _delete_all(self, http: httpx.AsyncClient) -> None:
        with contextlib.suppress(httpx.HTTPError, CliError):
            api = ApiClient(self.profile, http)
            for row in await api.sandboxes(states=["running", "paused"], metadata={}, template=None, limit=None):
                await api.delete(row["sandboxID"])

    def _kill_vmms(self) -> None:
        """What a server that died could not end."""
        for found in find(self.home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.handle.pid, signal.SIGKILL)

    def vmm_pids(self) -> dict[str, int]:
        """Processes of the sandboxes that run, by sandbox id."""
        return {found.sandbox_id.partition(".")[0]: found.handle.pid for found in find(self.home)}

    async def blockd_pid(self) -> int:
        client = BlockdClient(Places.of_home(self.home).socket)
        try:
            return (await client.version()).pid
        finally:
            await client.aclose()

    def add_template(self, memory_mb: int) -> str:
        """A template as `base`, but with this much memory; its name. Its first sandbox boots it."""
        store = TemplateStore(self.settings.templates_dir)
        base, name = store.resolve("base"), f"base-{memory_mb}"
        staging = store.stage()
        disk_only(read(store.checkpoint(base.id)), staging / CHECKPOINT)
        build = uuid.uuid4()
        store.publish(
            staging,
            replace(base, id="t" + build.hex[:19], build_id=str(build), names=(name,), memory_mb=memory_mb),
        )
        return name


@asynccontextmanager
async def scratch_node() -> AsyncIterator[Node]:
    """A home that is gone after the block. Raises CliError where `aenv setup` has not been run."""
    settings = load()
    if os.geteuid() != 0 or not (settings.home / "guest" / "current").exists():
        raise CliError(f"needs root and a node that is set up in {settings.home}: run `aenv setup`")
    environ = {key: value for key, value in os.environ.items() if key not in ("AENV_HOME", "AENV_API_KEY")}
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=settings.home, ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        await asyncio.to_thread(_furnish, home, settings)
        yield Node(home, environ)


def _furnish(home: Path, settings: Settings) -> None:
    (home / "guest").symlink_to((settings.home / "guest").resolve())
    shutil.copytree(settings.templates_dir, home / "templates", symlinks=True, copy_function=os.link)
    (home / "cache").mkdir()
    for name in _FACTS:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(settings.home / "cache" / name, home / "cache")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
