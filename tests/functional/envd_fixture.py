"""The built envd as an ordinary process on loopback, and a bare Connect client for it.

The binary is `AENV_ENVD_BIN`, or the release build under rust/target; tests are skipped when there is none. The client
is not the product's: it writes and reads the wire format itself, malformed on purpose where a test wants that.
"""

import asyncio
import base64
import fcntl
import getpass
import json
import os
import signal
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_BINARY = REPOSITORY / "rust/target/x86_64-unknown-linux-gnu/release/envd"

STREAM_TYPE = "application/connect+json"
MESSAGE, END_STREAM = 0x00, 0x02

SDK_PORT = 49983

START_DEADLINE = 10.0
"""Seconds until a started daemon must answer /health."""


def envd_binary() -> Path:
    """The binary to test; skips the calling test when it is not built."""
    binary = Path(os.environ.get("AENV_ENVD_BIN", DEFAULT_BINARY))
    if not binary.exists():
        pytest.skip(f"envd is not built: {binary} (cargo build --release -p envd --target x86_64-unknown-linux-gnu)")
    return binary


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def sdk_port() -> AsyncIterator[int]:
    """The port the SDKs use in debug mode, held by one test of this machine at a time."""
    with (Path(tempfile.gettempdir()) / "aenv-envd-49983.lock").open("w") as lock:
        # The thread ends with the lock's owner, which every test's timeout bounds.
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield SDK_PORT


@asynccontextmanager
async def running_envd(port: int | None = None, user: str | None = None) -> AsyncIterator["Envd"]:
    """Starts envd, yields a client, and ends it; fails if it crashed meanwhile."""
    port = port or free_port()
    command = [str(envd_binary()), "--port", str(port), "--host", "127.0.0.1", "--user", user or getpass.getuser()]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
            envd = Envd(http=http, port=port, pid=process.pid)
            async with asyncio.timeout(START_DEADLINE):
                await envd.wait_healthy()
            yield envd
        assert process.returncode is None, f"envd ended by itself with {process.returncode}"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                await process.wait()


def frame(message: Any, flags: int = MESSAGE) -> bytes:
    """One envelope."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(body)) + body


def frames(data: bytes) -> list[tuple[int, Any]]:
    """The (flags, message) pairs of a whole stream; raises on a torn one."""
    found = []
    while data:
        flags, length = struct.unpack_from(">BI", data)
        assert len(data) >= 5 + length, "torn envelope"
        found.append((flags, json.loads(data[5 : 5 + length])))
        data = data[5 + length :]
    return found


@dataclass
class Result:
    """What a Start or Connect stream delivered."""

    pid: int = 0
    output: dict[str, bytearray] = field(default_factory=lambda: {k: bytearray() for k in ("stdout", "stderr", "pty")})
    chunks: list[int] = field(default_factory=list)
    keepalives: int = 0
    end: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    ended: bool = False

    @property
    def stdout(self) -> bytes:
        return bytes(self.output["stdout"])

    @property
    def stderr(self) -> bytes:
        return bytes(self.output["stderr"])

    @property
    def exit_code(self) -> int | None:
        return None if self.end is None else self.end.get("exitCode", 0)

    def add(self, flags: int, message: dict[str, Any]) -> None:
        """Takes one envelope, checking the order: start, output, end, end of stream."""
        assert not self.ended, f"after the end of the stream: {message}"
        if flags == END_STREAM:
            self.ended, self.error = True, message.get("error")
            return
        event = message["event"]
        if "start" in event:
            assert not self.pid, "two start events"
            self.pid = event["start"]["pid"]
            return
        assert self.pid, f"before the start event: {message}"
        assert self.end is None, f"after the end event: {message}"
        if "keepalive" in event:
            self.keepalives += 1
        elif "end" in event:
            self.end = event["end"]
        else:
            ((stream, text),) = event["data"].items()
            data = base64.b64decode(text, validate=True)
            self.chunks.append(len(data))
            self.output[stream] += data


class Stream:
    """An open Start or Connect stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.result = Result()
        self._bytes = response.aiter_raw()
        self._buffer = bytearray()

    async def step(self) -> bool:
        """Reads one envelope; False at the end of the body."""
        while len(self._buffer) < 5 or len(self._buffer) < 5 + struct.unpack_from(">BI", self._buffer)[1]:
            try:
                self._buffer += await anext(self._bytes)
            except StopAsyncIteration:
                assert not self._buffer, "torn envelope"
                return False
        length = struct.unpack_from(">BI", self._buffer)[1]
        flags, message = self._buffer[0], json.loads(self._buffer[5 : 5 + length])
        del self._buffer[: 5 + length]
        self.result.add(flags, message)
        return True

    async def until(self, text: bytes, stream: str = "stdout") -> None:
        """Reads until the output contains `text`."""
        while text not in self.result.output[stream]:
            assert await self.step(), f"no {text!r} in {self.result}"

    async def finish(self) -> Result:
        """Reads to the end."""
        while await self.step():
            pass
        assert self.result.ended, f"no end of stream: {self.result}"
        return self.result


@dataclass
class Envd:
    """A client of one daemon."""

    http: httpx.AsyncClient
    port: int
    pid: int

    async def wait_healthy(self) -> None:
        """Returns when /health answers."""
        while True:
            try:
                if (await self.http.get("/health")).status_code == 204:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.02)

    async def unary(
        self, method: str, message: Any, service: str = "process.Process", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """A unary call; the response as it came."""
        return await self.http.post(f"/{service}/{method}", json=message, headers=headers)

    @asynccontextmanager
    async def stream(
        self, method: str, message: Any, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> AsyncIterator[Stream]:
        """An open server stream; leaving the block early disconnects."""
        content = frame(message) if body is None else body
        all_headers = {"content-type": STREAM_TYPE, "connect-protocol-version": "1"} | (headers or {})
        url = f"/process.Process/{method}"
        async with self.http.stream("POST", url, content=content, headers=all_headers, timeout=60) as response:
            assert response.status_code == 200, (response.status_code, await response.aread())
            assert response.headers["content-type"] == STREAM_TYPE
            yield Stream(response)

    async def run(self, command: str | Iterable[str], headers: dict[str, str] | None = None, **fields: Any) -> Result:
        """Runs a command to its end: a string in bash, a list directly. `fields` go into the request."""
        async with self.stream("Start", start_message(command, **fields), headers) as stream:
            return await stream.finish()

    async def connect(self, pid: int, headers: dict[str, str] | None = None) -> Result:
        """Attaches and reads to the end."""
        async with self.stream("Connect", {"process": {"pid": pid}}, headers) as stream:
            return await stream.finish()

    async def pids(self) -> set[int]:
        """The pids List reports."""
        response = await self.unary("List", {})
        return {process["pid"] for process in response.json().get("processes", [])}

    def children(self) -> set[int]:
        """The daemon's child processes, zombies included."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return {int(pid) for pid in children.split()}

    def resident_bytes(self) -> int:
        """The daemon's resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024


def start_message(
    command: str | Iterable[str],
    *,
    stdin: bool | None = False,
    pty: dict[str, Any] | None = None,
    tag: str | None = None,
    cwd: str | None = None,
    envs: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A StartRequest; None leaves a field out."""
    words = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
    process: dict[str, Any] = {"cmd": words[0], "args": words[1:]}
    process |= {name: value for name, value in (("cwd", cwd), ("envs", envs)) if value is not None}
    optional = {"stdin": stdin, "pty": pty, "tag": tag}
    return {"process": process} | {name: value for name, value in optional.items() if value is not None}


def b64(data: bytes) -> str:
    """The wire form of bytes."""
    return base64.b64encode(data).decode()
