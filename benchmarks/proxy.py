"""What the proxy costs: latency beside a direct connection, requests per second on one core, memory under bulk.

Three processes on this machine's loopback: this one (the load), an upstream in the place of a sandbox's server, and
uvicorn over `ProxyApp`. With two cores or more the proxy has the first one to itself; the upstream is on the second.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from aenv.orchestrator.models import Route
from aenv.orchestrator.protocol import Sandboxes
from aenv.proxy import ProxyApp
from aenv.proxy.server import uvicorn_options
from benchmarks.common import Result, rss_bytes

GOAL_ADDED_MS = 1.5
GOAL_RATE = 1500
GOAL_GROWTH_MIB = 64
WARM_UP = 500
SEQUENTIAL = 1000
CONCURRENT = 4000
CONNECTIONS = 32
BULK = 1 << 30
PIECE = bytes(256 * 1024)
MIB = 1 << 20

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
_HEAD = (
    b"%b HTTP/1.1\r\nhost: bench.test\r\nuser-agent: bench\r\naccept: */*\r\n"
    b"e2b-sandbox-id: ibench\r\ne2b-sandbox-port: %d\r\n%b\r\n"
)


async def run(n: int) -> list[Result]:
    """`n` rounds, each measuring direct and proxied requests in turn; then 1 GiB up and down once."""
    async with _process("upstream", core=1) as (upstream, _), _process("serve", core=0) as (port, pid):
        await _sequential(port, upstream, WARM_UP)
        direct, proxied, added, rates = [], [], [], []
        for _ in range(n):
            straight = await _sequential(upstream, upstream, SEQUENTIAL)
            through = await _sequential(port, upstream, SEQUENTIAL)
            direct += straight
            proxied += through
            added.append(Result.of("", through, "ms").p50 - Result.of("", straight, "ms").p50)
            rates.append(await _rate(port, upstream))
        growth, seconds = {}, {}
        for way, transfer in (("upload", _upload), ("download", _download)):
            before = _reset_peak(pid)
            began = time.perf_counter()
            await transfer(port, upstream)
            seconds[way] = time.perf_counter() - began
            growth[way] = (rss_bytes(pid, peak=True) - before) / MIB
    extra, rate = Result.of("", added, "ms").p50, Result.of("", rates, "1/s").p50
    return [
        Result.of("small GET, direct", direct, "ms"),
        Result.of("small GET, through the proxy", proxied, "ms"),
        Result.of("added to the p50, per round", added, "ms", goal="p50 <= 1.5 ms", met=extra <= GOAL_ADDED_MS),
        Result.of(
            f"rate on one core, {CONNECTIONS} connections", rates, "requests/s", goal=">= 1500", met=rate >= GOAL_RATE
        ),
        *(
            Result.of(
                f"1 GiB {way}: memory growth", [growth[way]], "MiB", goal="< 64 MiB", met=growth[way] < GOAL_GROWTH_MIB
            )
            for way in growth
        ),
        *(Result.of(f"1 GiB {way}: throughput", [BULK / MIB / seconds[way]], "MiB/s") for way in seconds),
    ]


# The load.


async def _sequential(port: int, upstream: int, count: int) -> list[float]:
    """Milliseconds of `count` requests, one after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _HEAD % (b"GET /small", upstream, b"")
    samples = []
    try:
        for _ in range(count):
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            samples.append((time.perf_counter() - began) * 1000)
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the request failed: {head!r}")
    finally:
        writer.close()
    return samples


async def _rate(port: int, upstream: int) -> float:
    began = time.perf_counter()
    each = CONCURRENT // CONNECTIONS
    await asyncio.gather(*(_sequential(port, upstream, each) for _ in range(CONNECTIONS)))
    return each * CONNECTIONS / (time.perf_counter() - began)


async def _upload(port: int, upstream: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_HEAD % (b"POST /sink", upstream, b"content-length: %d\r\n" % BULK))
    for _ in range(BULK // len(PIECE)):
        writer.write(PIECE)
        await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the upload failed: {head!r}")


async def _download(port: int, upstream: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_HEAD % (b"GET /bulk", upstream, b""))
    await reader.readuntil(b"\r\n\r\n")
    left = BULK
    while left and (data := await reader.read(len(PIECE))):
        left -= len(data)
    writer.close()
    if left:
        raise RuntimeError(f"the download ended {left} bytes early")


def _reset_peak(pid: int) -> int:
    """Start the process's peak anew; return what it has now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return rss_bytes(pid)


# The other two processes.


@contextlib.asynccontextmanager
async def _process(role: str, *, core: int) -> AsyncIterator[tuple[int, int]]:
    """Port and pid of one of this module's roles, run on `core`; killed at the end."""
    core = core % (os.cpu_count() or 1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.proxy", role, str(core), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            port = int(await process.stdout.readline())
        yield port, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _OneRoute:
    """The part of `Sandboxes` that the proxy asks for."""

    def route(self, sandbox_id: str) -> Route:
        return Route(
            sandbox_id=sandbox_id, generation="1", address="127.0.0.1", traffic_token="", public=True, mask_host=None
        )


async def _control_plane(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("no request of this scenario is for the control plane")


async def _serve() -> None:
    app = ProxyApp(cast(Sandboxes, _OneRoute()), _control_plane)
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="warning", **uvicorn_options())
    listener = socket.create_server(("127.0.0.1", 0))
    _announce(listener.getsockname()[1])
    await uvicorn.Server(config).serve(sockets=[listener])


async def _upstream() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    _announce(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST /sink"):
                left = BULK
                while left and (data := await reader.read(len(PIECE))):
                    left -= len(data)
            if not head.startswith(b"GET /bulk"):
                writer.write(_ANSWER)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % BULK)
            for _ in range(BULK // len(PIECE)):
                writer.write(PIECE)
                await writer.drain()
    writer.close()


def _announce(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def main(role: str, core: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    uvloop.run(_upstream() if role == "upstream" else _serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
