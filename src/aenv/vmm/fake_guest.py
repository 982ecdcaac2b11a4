"""A stand-in for a guest's daemon, inside this process: the part of envd that the control plane relies on.

It listens where the host would reach the guest. `/health`, `/init`, `/metrics` and `/envs` behave as envd's. What shows
whether it is still the same guest: `GET /boot-id`; `POST /processes` starts one and answers with its `pid`,
`GET /processes` lists them, `POST /processes/<pid>/stop` ends one; `POST /values/<key>` keeps the body, `GET` answers
with it. Any other path answers with an echo of the request, to test what passes through the proxy.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

ENVD_PORT = 49983

_TEXTS = (
    "accessToken",
    "defaultUser",
    "defaultWorkdir",
    "hostname",
    "generation",
    "lifecycleID",
    "timestamp",
    "toGeneration",
)


class FakeGuest:
    """`inits` holds the bodies of all accepted `/init` calls that say more than the time, oldest first; `times` what
    the others said. Everything else that is public is what it remembers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.boot_id = str(uuid.uuid4())
        self.inits: list[dict[str, Any]] = []
        self.times: list[str] = []
        self.processes: list[int] = []
        self.values: dict[str, str] = {}
        self._next_pid = 100
        self._running = asyncio.Event()
        self._runner: web.AppRunner | None = None

    def dump(self) -> dict[str, Any]:
        """All that it remembers, as JSON."""
        texts = {"boot_id": self.boot_id, "next_pid": self._next_pid}
        return texts | {"inits": self.inits, "processes": self.processes, "values": self.values}

    def restore(self, dumped: dict[str, Any]) -> None:
        """Become what `dump` described. Raises KeyError."""
        self.boot_id, self._next_pid = dumped["boot_id"], dumped["next_pid"]
        self.inits, self.processes, self.values = dumped["inits"], dumped["processes"], dumped["values"]

    @property
    def access_token(self) -> str | None:
        """The one in force; a body without one keeps the former."""
        tokens = [body["accessToken"] for body in self.inits if "accessToken" in body]
        return tokens[-1] or None if tokens else None

    @property
    def connections(self) -> int:
        """How many are open."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    def freeze(self) -> None:
        """Answer nothing from now on; what arrives waits."""
        self._running.clear()

    def thaw(self) -> None:
        """Answer, beginning with what waits."""
        self._running.set()

    async def start(self) -> None:
        """Listen; requests wait for `thaw`. Raises OSError."""
        app = web.Application(client_max_size=1 << 20, middlewares=[self._gate])
        app.router.add_get("/health", self._health)
        app.router.add_post("/init", self._init)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/envs", self._envs)
        app.router.add_get("/boot-id", self._boot_id)
        app.router.add_get("/processes", self._list)
        app.router.add_post("/processes", self._spawn)
        app.router.add_post("/processes/{pid:[0-9]+}/stop", self._stop)
        app.router.add_post("/values/{key}", self._set)
        app.router.add_get("/values/{key}", self._get)
        app.router.add_route("*", "/{path:.*}", self._echo)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        try:
            await runner.setup()
            await web.TCPSite(runner, self.address, ENVD_PORT, reuse_address=True).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Cut all connections. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        server = runner.server
        if server is not None:
            # As when a machine vanishes: what is open breaks off, nothing is completed.
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()

    @web.middleware
    async def _gate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # With its body read a handler does not wait for anything: a freeze finds it before or after, never within.
        await request.read()
        await self._running.wait()
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _init(self, request: web.Request) -> web.Response:
        if refusal := self._refused(request):
            return refusal
        try:
            body = await request.json()
        except ValueError as error:
            return _error(400, f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body is not an object")
        for key in _TEXTS:
            if not isinstance(body.get(key), str | None):
                return _error(400, f"{key} must be a string")
        variables = body.get("envVars") or {}
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            return _error(400, "envVars must be an object of strings")
        if set(body) == {"timestamp", "toGeneration"}:
            self.times.append(body["timestamp"])
        else:
            self.inits.append(body)
        return web.Response(status=204)

    async def _metrics(self, request: web.Request) -> web.Response:
        mib = 1 << 20
        figures = {"cpu_count": 2, "cpu_used_pct": 1.5, "mem_total": 512 * mib, "mem_used": 64 * mib}
        sizes = {"mem_total_mib": 512, "mem_used_mib": 64, "mem_cache": mib, "disk_used": mib, "disk_total": 1024 * mib}
        return self._refused(request) or web.json_response({"ts": 1, **figures, **sizes})

    async def _envs(self, request: web.Request) -> web.Response:
        variables = self.inits[-1].get("envVars") if self.inits else None
        return self._refused(request) or web.json_response(variables or {})

    async def _boot_id(self, _: web.Request) -> web.Response:
        return web.json_response({"boot_id": self.boot_id})

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response(self.processes)

    async def _spawn(self, _: web.Request) -> web.Response:
        pid, self._next_pid = self._next_pid, self._next_pid + 1
        self.processes.append(pid)
        return web.json_response({"pid": pid})

    async def _stop(self, request: web.Request) -> web.Response:
        pid = int(request.match_info["pid"])
        if pid not in self.processes:
            return _error(404, f"there is no process {pid}")
        self.processes.remove(pid)
        return web.Response(status=204)

    async def _set(self, request: web.Request) -> web.Response:
        self.values[request.match_info["key"]] = await request.text()
        return web.Response(status=204)

    async def _get(self, request: web.Request) -> web.Response:
        value = self.values.get(request.match_info["key"])
        return _error(404, "no such value") if value is None else web.Response(text=value)

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.text()
        headers = {name.lower(): value for name, value in request.headers.items()}
        return web.json_response({"method": request.method, "path": request.raw_path, "headers": headers, "body": body})

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.access_token is None or request.headers.get("X-Access-Token") == self.access_token:
            return None
        return _error(401, "unauthorized access, please provide a valid access token or method signing if supported")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status)
