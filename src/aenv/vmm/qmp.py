"""A client of QMP, QEMU's JSON control protocol, over a Unix socket.

One JSON object per line in both directions: a greeting, then for each command an answer with the same `id`, and
events at any time (QEMU: docs/interop/qmp-spec). The peer is only half trusted, since a guest may have broken out into
it: a line is bounded in bytes, lines are bounded per second, every command has a deadline, and nothing it sends
is kept.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aenv.errors import DeadlineExceeded, VmmError

MAX_LINE = 1 << 20
"""Bytes of one message. The largest that we ask for is a 64 KiB console in base64."""
MAX_LINES_PER_SECOND = 2000
"""QEMU itself limits the rate of events a guest can cause to far less."""
DEFAULT_DEADLINE = 10.0

EventHandler = Callable[[str, dict[str, Any]], None]


class QmpCommandError(VmmError):
    """QEMU refused a command. `kind` is its class word (``GenericError``, ``CommandNotFound``)."""

    def __init__(self, command: str, kind: str, description: str) -> None:
        super().__init__(f"QEMU refused {command!r}: {description} ({kind})")
        self.kind = kind


class QmpClient:
    """An open connection. Made by `connect`, ended by `aclose`; QEMU serves one client at a time.

    `closed` is done when the connection is no longer usable; its result says why.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, on_event: EventHandler | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._receiver: asyncio.Task[None] | None = None
        self.version = ""
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(
        cls, path: Path, *, deadline: float = DEFAULT_DEADLINE, on_event: EventHandler | None = None
    ) -> "QmpClient":
        """Connect to the socket at `path`, wait for the greeting (at most `deadline` seconds), leave negotiation mode.

        `on_event` is called with name and data of each event; it must not block. Raises VmmError, DeadlineExceeded.
        """
        client: QmpClient | None = None
        try:
            async with asyncio.timeout(deadline):
                client = cls(*await _open(path), on_event=on_event)
                await client._greet()
                await client.execute("qmp_capabilities")
        except BaseException as error:
            if client is not None:
                await client.aclose()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the VMM at {path} did not greet us within {deadline:g} s") from None
            if isinstance(error, OSError):
                raise VmmError(f"the VMM's control socket {path} cannot be reached: {error}") from error
            raise
        return client

    async def execute(
        self, command: str, arguments: dict[str, Any] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> Any:
        """Run one command and return what it returns. Calls may overlap; answers may come in any order.

        Raises QmpCommandError if QEMU refuses, VmmError if the connection is or gets lost, DeadlineExceeded.
        """
        if self.closed.done():
            raise VmmError(f"QMP {command!r} not sent: {self.closed.result()}")
        self._next_id += 1
        request_id = self._next_id
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = answer
        request: dict[str, Any] = {"execute": command, "id": request_id}
        if arguments:
            request["arguments"] = arguments
        try:
            async with asyncio.timeout(deadline):
                self._writer.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
                await self._writer.drain()
                message = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"the VMM did not answer QMP {command!r} within {deadline:g} s") from None
        except OSError as error:
            raise VmmError(f"QMP {command!r} not sent: {error}") from error
        finally:
            # A late answer of an abandoned command finds nothing here and is dropped.
            self._pending.pop(request_id, None)
        error_object = message.get("error")
        if error_object is None:
            return message.get("return")
        if not isinstance(error_object, dict):
            error_object = {}
        raise QmpCommandError(
            command, str(error_object.get("class", "unknown")), str(error_object.get("desc", "no reason"))
        )

    async def aclose(self) -> None:
        """Close the connection; commands in flight fail. Idempotent."""
        self._lost("the connection was closed by us")
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        self._writer.close()
        # `wait_closed` may wait for a peer that reads nothing: abort instead of flushing.
        self._writer.transport.abort()
        # Raises again what ended the connection, in the words of whichever layer saw it.
        with contextlib.suppress(OSError, VmmError):
            await self._writer.wait_closed()

    async def _greet(self) -> None:
        greeting = await self._read()
        try:
            version = greeting["QMP"]["version"]["qemu"]
            self.version = ".".join(str(int(version[part])) for part in ("major", "minor", "micro"))
        except (KeyError, TypeError, ValueError):
            raise VmmError(f"the VMM's control socket greeted with {str(greeting)[:200]!r}, not as QMP") from None
        self._receiver = asyncio.create_task(self._receive(), name="qmp-receive")

    async def _receive(self) -> None:
        """Hand out what arrives, until the connection ends."""
        loop = asyncio.get_running_loop()
        window, lines = loop.time(), 0
        try:
            while True:
                message = await self._read()
                now = loop.time()
                if now - window >= 1:
                    window, lines = now, 0
                lines += 1
                if lines > MAX_LINES_PER_SECOND:
                    raise VmmError(f"the VMM sent more than {MAX_LINES_PER_SECOND} control messages in a second")
                self._dispatch(message)
        except (OSError, VmmError) as error:
            self._lost(str(error))
            self._writer.transport.abort()

    def _dispatch(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if isinstance(event, str):
            data = message.get("data")
            if self._on_event is not None:
                self._on_event(event, data if isinstance(data, dict) else {})
            return
        request_id = message.get("id")
        answer = self._pending.pop(request_id, None) if isinstance(request_id, int) else None
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _read(self) -> dict[str, Any]:
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            raise VmmError("the VMM closed its control connection") from None
        except asyncio.LimitOverrunError:
            raise VmmError(f"the VMM sent a control message of more than {MAX_LINE} bytes") from None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise VmmError(f"the VMM sent a control message that is not JSON: {line[:200]!r}") from None
        if not isinstance(message, dict):
            raise VmmError(f"the VMM sent a control message that is not an object: {line[:200]!r}")
        return message

    def _lost(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(VmmError(f"the VMM did not answer: {reason}"))
        self._pending.clear()


async def _open(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    # A socket's address holds 107 bytes and a home may be deep: go through a descriptor of its directory.
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{path.name}", limit=MAX_LINE)
    finally:
        os.close(directory)
