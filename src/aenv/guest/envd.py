"""The node's client of a guest's daemon: readiness, initialisation, metrics.

Answers come from a hostile guest: sizes are bounded, and nothing in them decides more than that guest's own fate. No
connection is kept: an address may change its guest.
"""

import asyncio
import base64
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aenv.errors import DeadlineExceeded, GuestError
from aenv.guest.exchange import connect, exchange, request

ENVD_PORT = 49983
"""Where the daemon listens in every guest (E2B's port)."""

RETRY_INTERVAL = 0.02
"""Seconds until a call that brought nothing is tried again."""

CLOCK_EXCHANGE = 0.03
"""Seconds that the exchange that sets a guest's clock may take: the clock is late by no more, as it is set before the
answer. On a busy host a restored guest's first answer may take a second; the time is said again then."""
CLOCK_TRIES = 5

HEALTH_TIMEOUT = 2.0
CALL_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestInit:
    """What a launch tells the daemon (`POST /init`)."""

    sandbox_id: str
    template_id: str
    generation: str
    hostname: str
    access_token: str | None
    env_vars: Mapping[str, str]
    default_user: str
    default_workdir: str

    def body(self) -> dict[str, Any]:
        """The JSON body, with 64 bytes of fresh entropy."""
        return {
            "sandboxID": self.sandbox_id,
            "templateID": self.template_id,
            "generation": self.generation,
            "lifecycleID": self.generation,
            "hostname": self.hostname,
            "accessToken": self.access_token,
            "envVars": dict(self.env_vars),
            "defaultUser": self.default_user,
            "defaultWorkdir": self.default_workdir,
            "entropy": base64.b64encode(os.urandom(64)).decode(),
        }

    def message(self) -> bytes:
        """For a guest that is told the time otherwise."""
        return json.dumps(self.body()).encode()

    def stamped(self) -> dict[str, Any]:
        """The body with the time of the call."""
        return {**self.body(), "timestamp": _now()}


class GuestClient:
    """Talks to the daemons of all guests of a node."""

    async def greet(self, address: str, init: GuestInit, current_token: str | None, deadline: float) -> None:
        """Make a guest that is just coming up this sandbox: return when its daemon has applied `init`.

        Tried until it is answered, since it is idempotent: this is the readiness probe of a restored guest as well.
        A daemon that has a token already, so every one that was not just booted, wants it: `current_token` is that of
        the sandbox this guest was until now.

        Raises DeadlineExceeded after `deadline` seconds, GuestError when the daemon refuses.
        """

        try:
            async with asyncio.timeout(deadline):
                while (took := await _init(address, init.stamped, current_token)) is None:  # noqa: ASYNC110 (another machine)
                    await asyncio.sleep(RETRY_INTERVAL)
                # It has found its pages and its turn by now; what is said again is the time alone.
                if took > CLOCK_EXCHANGE:
                    token = current_token if init.access_token is None else init.access_token
                    await _tell_time(address, init.generation, token)
        except TimeoutError:
            raise _silent(address, deadline) from None

    async def tell_time(self, address: str, generation: str, token: str | None, deadline: float) -> None:
        """Set the clock of a guest that was stopped for a while and goes on as what it was, of that `generation`: the
        source of a fork. What goes on from a capture that the message was caught in heeds it no more.

        Raises DeadlineExceeded after `deadline` seconds, GuestError when the daemon refuses.
        """
        try:
            async with asyncio.timeout(deadline):
                await _tell_time(address, generation, token)
        except TimeoutError:
            raise _silent(address, deadline) from None

    async def wait_ready(self, address: str, deadline: float) -> None:
        """Return when ``GET /health`` answers 2xx. Raises DeadlineExceeded after `deadline` seconds."""
        try:
            async with asyncio.timeout(deadline):
                while not await healthy(address):  # noqa: ASYNC110 (another machine: there is no event)
                    await asyncio.sleep(RETRY_INTERVAL)
        except TimeoutError:
            raise _silent(address, deadline) from None

    def send_for(self, address: str, token: str | None) -> None:
        """Ask the daemon to its mailbox (`aenv.guest.mailbox`), where it waits for a quarter of a second: one datagram,
        which may get lost."""
        calls = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with calls, contextlib.suppress(OSError):
            calls.sendto(b"aenv-hold " + (token or "").encode(), (address, ENVD_PORT))

    async def sync(self, address: str, token: str | None, deadline: float) -> None:
        """Flush the guest's file systems to its disk: what is written by now survives the machine.

        Raises GuestError, also after `deadline` seconds: a guest that is overloaded or hostile has to be captured
        without its help.
        """
        await self._call("POST", address, "/sync", b'{"flush": true}', token, deadline)

    async def metrics(self, address: str, token: str | None) -> dict[str, Any]:
        """The daemon's own figures (`GET /metrics`). Raises GuestError."""
        answer = await self._call("GET", address, "/metrics", b"", token, CALL_TIMEOUT)
        try:
            figures = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise GuestError(f"the guest's /metrics is not JSON: {error}") from error
        if not isinstance(figures, dict):
            raise GuestError("the guest's /metrics is not an object")
        return figures

    async def _call(
        self, method: str, address: str, path: str, body: bytes, token: str | None, deadline: float
    ) -> bytes:
        """One call of a guest that is ready; the body of its answer. Raises GuestError."""
        what = f"{method} {path}"
        try:
            async with asyncio.timeout(deadline):
                with contextlib.closing(await connect(address, ENVD_PORT)) as connection:
                    status, answer = await exchange(connection, request(method, path, address, body, token))
        except TimeoutError:
            raise GuestError(f"the guest did not answer {what} within {deadline:g} s") from None
        except OSError as error:
            raise GuestError(f"{what} in the guest failed: {error!r}") from error
        _check(what, status, answer)
        return answer

    async def aclose(self) -> None:
        """Close what is open: nothing outlives a call."""


async def _init(address: str, body: Callable[[], dict[str, Any]], token: str | None) -> float | None:
    """One `POST /init`: the seconds from the making of the body to the answer, or None if the connection broke. Raises
    GuestError when the daemon refuses."""
    with contextlib.closing(await connect(address, ENVD_PORT)) as connection, contextlib.suppress(OSError):
        began = time.monotonic()
        sent = request("POST", "/init", address, json.dumps(body()).encode(), token)
        _check("POST /init", *await exchange(connection, sent))
        return time.monotonic() - began
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def _tell_time(address: str, generation: str, token: str | None) -> None:
    """Set a guest's clock by an exchange that was short, or by the shortest of some: one that took long sets it late,
    and envd lets no later one put it back."""
    for _ in range(CLOCK_TRIES):
        took = await _init(address, lambda: {"timestamp": _now(), "toGeneration": generation}, token)
        if took is not None and took <= CLOCK_EXCHANGE:
            return


async def healthy(address: str) -> bool:
    """Whether ``GET /health`` answers 2xx, within two seconds."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT):
            with contextlib.closing(await connect(address, ENVD_PORT)) as connection:
                status, _ = await exchange(connection, request("GET", "/health", address, b"", None))
    except (OSError, TimeoutError, GuestError):
        return False
    return 200 <= status < 300


def _silent(address: str, deadline: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the guest's daemon at {address}:{ENVD_PORT} did not answer within {deadline:g} s")


def _check(what: str, status: int, answer: bytes) -> None:
    if not 200 <= status < 300:
        raise GuestError(f"the guest answered {status} to {what}: {answer[:200].decode(errors='replace')}")
