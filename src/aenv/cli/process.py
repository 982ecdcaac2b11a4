"""Processes in a sandbox, as the CLI needs them: a command with pipes, or a shell on a terminal."""

import asyncio
import base64
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from aenv.cli.client import ApiClient
from aenv.cli.errors import CliError
from aenv.guest.connect import ConnectClient, ConnectError
from aenv.guest.envd import ENVD_PORT

CHUNK = 32 * 1024
"""Of standard input, per call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run. `user` None means the template's; `cwd` None its working directory."""

    argv: list[str]
    envs: dict[str, str]
    cwd: str | None = None
    user: str | None = None


class Processes:
    """The process service of one sandbox, reached through the server's proxy."""

    def __init__(self, api: ApiClient, sandbox: dict[str, Any], user: str | None) -> None:
        headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(ENVD_PORT)}
        if token := sandbox.get("envdAccessToken"):
            headers["X-Access-Token"] = token
        if user:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        self._rpc = ConnectClient(api.http, api.profile.sandbox_url, headers)

    def start(
        self, command: Command, *, stdin: bool, pty: tuple[int, int] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Start it and yield its events (`start`, `data`, `end`, `keepalive`)."""
        process: dict[str, Any] = {"cmd": command.argv[0], "args": command.argv[1:], "envs": command.envs}
        if command.cwd:
            process["cwd"] = command.cwd
        message: dict[str, Any] = {"process": process, "stdin": stdin}
        if pty:
            message["pty"] = {"size": {"cols": pty[0], "rows": pty[1]}}
        return self._rpc.stream("/process.Process/Start", message)

    async def send(self, pid: int, data: bytes, *, pty: bool) -> None:
        """Bytes to its standard input or terminal."""
        kind = "pty" if pty else "stdin"
        await self._process_call("SendInput", pid, input={kind: base64.b64encode(data).decode()})

    async def close_stdin(self, pid: int) -> None:
        """End of its standard input."""
        await self._process_call("CloseStdin", pid)

    async def resize(self, pid: int, cols: int, rows: int) -> None:
        """Tell it the terminal's new size."""
        await self._process_call("Update", pid, pty={"size": {"cols": cols, "rows": rows}})

    async def signal(self, pid: int, name: str) -> None:
        """SIGNAL_SIGTERM or SIGNAL_SIGKILL."""
        await self._process_call("SendSignal", pid, signal=name)

    async def _process_call(self, method: str, pid: int, **fields: Any) -> None:
        await self._rpc.unary(f"/process.Process/{method}", {"process": {"pid": pid}, **fields})


async def run(processes: Processes, command: Command, stdin: BinaryIO | None) -> int:
    """Run it with our own standard streams; return its exit code.

    Ctrl-C kills it, and its end is still awaited. If who reads our output leaves, that is a broken pipe to it as well.
    """
    pid: int | None = None
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    beside: list[asyncio.Task[None]] = []
    try:
        async for message in processes.start(command, stdin=stdin is not None):
            event = message.get("event", {})
            if "start" in event:
                pid = int(event["start"]["pid"])
                beside.append(asyncio.create_task(_kill_when(interrupted, processes, pid)))
                if stdin is not None:
                    beside.append(asyncio.create_task(_feed(processes, pid, stdin)))
            elif "data" in event:
                _write(event["data"])
            elif "end" in event:
                return exit_code(event["end"])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        if pid is not None:
            with suppress(ConnectError):
                await processes.signal(pid, "SIGNAL_SIGKILL")
        return 128 + signal.SIGPIPE
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    raise CliError("the command's end was not reported")


async def _kill_when(interrupted: asyncio.Event, processes: Processes, pid: int) -> None:
    await interrupted.wait()
    with suppress(ConnectError):  # it ended at the same moment
        await processes.signal(pid, "SIGNAL_SIGKILL")


def exit_code(end: dict[str, Any]) -> int:
    """A shell's reading of an end event: the exit code, or 128 + the signal's number."""
    code = int(end.get("exitCode", 0))
    status = str(end.get("status", ""))
    if code >= 0 and not status.startswith("signal:"):
        return code
    return 128 + (signal.SIGTERM if "terminated" in status else signal.SIGKILL)


async def _feed(processes: Processes, pid: int, stdin: BinaryIO) -> None:
    try:
        while data := await asyncio.to_thread(os.read, stdin.fileno(), CHUNK):
            await processes.send(pid, data, pty=False)
        await processes.close_stdin(pid)
    except ConnectError:
        pass  # it ended, or closed its input: what it says in its end event counts


def _write(data: dict[str, str]) -> None:
    for kind, stream in (("stdout", sys.stdout), ("pty", sys.stdout), ("stderr", sys.stderr)):
        if kind in data:
            stream.buffer.write(base64.b64decode(data[kind]))
            stream.buffer.flush()
