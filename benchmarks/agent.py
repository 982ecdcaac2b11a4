"""A program in the guest that makes state, and its client.

It is reached over HTTP through the server's proxy, so it can be told again after every resume.
"""

import asyncio
import contextlib
import time
from typing import Any

import httpx

from aenv.cli.client import ApiClient
from aenv.cli.errors import CliError
from aenv.cli.process import Command, Processes
from benchmarks.client import Client

PORT = 8099
_START_DEADLINE = 60.0
_SOURCE = r"""
import http.server, mmap, os, time

BLOCK = os.urandom(1 << 20)
kept = {}

def pieces(mb):
    # Random bytes, turned by another page each time: no page is zero or equal to what it was.
    kept["turn"] = turn = kept.get("turn", 0) + 1
    for number in range(mb):
        cut = (turn + number) * 4096 % len(BLOCK)
        yield number << 20, BLOCK[cut:] + BLOCK[:cut]

def memory(mb):
    if mb not in kept:
        kept[mb] = mmap.mmap(-1, mb << 20)
    for offset, piece in pieces(mb):
        kept[mb][offset:offset + len(piece)] = piece

def disk(mb):
    with open("/home/user/bench", "wb") as file:
        for _, piece in pieces(mb):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        what, amount = self.path.strip("/").split("/")
        {"memory": memory, "disk": disk}[what](int(amount))
        self.send_response(204)
        self.end_headers()

    def do_GET(self):  # a beat each millisecond, for as many seconds
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        end = time.monotonic() + float(self.path.strip("/"))
        while time.monotonic() < end:
            self.wfile.write(b".")
            time.sleep(0.001)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("0.0.0.0", PORT), Handler).serve_forever()
""".replace("PORT", str(PORT))


class Agent:
    """The program in one sandbox. Made by `started`."""

    def __init__(self, client: Client, sandbox: dict[str, Any]) -> None:
        self._http = client.http
        self._url = client.profile.sandbox_url
        self._headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(PORT)}

    async def write_memory(self, mb: int) -> None:
        """Fill as many MiB of memory, which it keeps."""
        await self._post(f"/memory/{mb}")

    async def write_disk(self, mb: int) -> None:
        """Write a file of as many MiB and bring it to the disk."""
        await self._post(f"/disk/{mb}")

    async def _post(self, path: str) -> None:
        answer = await self._http.post(self._url + path, headers=self._headers, timeout=180.0)
        if not answer.is_success:
            raise CliError(f"the program in the guest answered {answer.status_code}: {answer.text[:200]}")

    @contextlib.asynccontextmanager
    async def beats(self, seconds: float = 30.0) -> "Any":
        """A list that grows during the block: the time (perf_counter) of every sign of life that arrives."""
        times: list[float] = []
        beating = asyncio.Event()

        async def listen() -> None:
            url, limit = f"{self._url}/{seconds:g}", httpx.Timeout(180.0)
            async with self._http.stream("GET", url, headers=self._headers, timeout=limit) as answer:
                async for _ in answer.aiter_raw():
                    times.append(time.perf_counter())
                    beating.set()

        listening = asyncio.create_task(listen())
        try:
            await asyncio.wait_for(beating.wait(), 60)
            yield times
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def started(client: Client, sandbox: dict[str, Any]) -> Agent:
    """Start it and return when it answers. Raises CliError."""
    processes = Processes(ApiClient(client.profile, client.http), sandbox, None)
    argv = ["/bin/sh", "-c", 'exec setsid -f python3 -c "$AGENT" </dev/null >/dev/null 2>&1']
    async for _ in processes.start(Command(argv=argv, envs={"AGENT": _SOURCE}), stdin=False):
        pass
    agent = Agent(client, sandbox)
    try:
        async with asyncio.timeout(_START_DEADLINE):
            while True:
                with contextlib.suppress(CliError, httpx.HTTPError):
                    await agent.write_memory(1)
                    return agent
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise CliError("python3 in the guest did not start to serve") from None
