"""The node's client of a guest's daemon: readiness, initialisation, metrics.

Answers come from a hostile guest: sizes are bounded, and nothing in them decides more than that guest's own fate.
"""

import asyncio
import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from aenv.errors import DeadlineExceeded, GuestError

ENVD_PORT = 49983
"""Where the daemon listens in every guest (E2B's port)."""

PROBE_INTERVAL = 0.02
"""Seconds between two looks at a guest that boots. A probe that gets no answer is abandoned after PROBE_TIMEOUT, since
the kernel would repeat its SYN only after a second."""
PROBE_TIMEOUT = 0.25

INIT_TIMEOUT = 10.0
MAX_ANSWER = 64 * 1024


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
        """The JSON body, stamped with the time of the call and 64 bytes of fresh entropy."""
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
            "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "entropy": base64.b64encode(os.urandom(64)).decode(),
        }


class GuestClient:
    """Talks to the daemons of all guests of a node. No connection is kept: an address may change its guest."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(
            timeout=INIT_TIMEOUT,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            verify=False,  # plain HTTP inside the node; saves building a TLS context
        )

    async def wait_ready(self, address: str, deadline: float) -> None:
        """Return when ``GET /health`` answers 2xx. Raises DeadlineExceeded after `deadline` seconds."""
        try:
            async with asyncio.timeout(deadline):
                while not await healthy(address):  # noqa: ASYNC110 (another machine: there is no event)
                    await asyncio.sleep(PROBE_INTERVAL)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the guest's daemon at {address}:{ENVD_PORT} did not answer within {deadline:g} s"
            ) from None

    async def init(self, address: str, init: GuestInit, current_token: str | None = None) -> None:
        """Apply token, environment, clock, entropy and identity. Raises GuestError.

        A daemon that has a token already, so every one that was not just booted, wants it: `current_token` is that of
        the sandbox this guest was until now.
        """
        await self._call("POST", address, "/init", init.body(), token=current_token)

    async def metrics(self, address: str, token: str | None) -> dict[str, Any]:
        """The daemon's own figures (`GET /metrics`). Raises GuestError."""
        answer = await self._call("GET", address, "/metrics", None, token)
        try:
            figures = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise GuestError(f"the guest's /metrics is not JSON: {error}") from error
        if not isinstance(figures, dict):
            raise GuestError("the guest's /metrics is not an object")
        return figures

    async def _call(self, method: str, address: str, path: str, body: Any, token: str | None) -> bytes:
        headers = {"Accept-Encoding": "identity"} | ({"X-Access-Token": token} if token else {})
        url = f"http://{address}:{ENVD_PORT}{path}"
        answer = bytearray()
        try:
            async with asyncio.timeout(INIT_TIMEOUT), self._http.stream(method, url, json=body, headers=headers) as got:
                # Never decompressed: a few hostile kilobytes can stand for gigabytes.
                async for piece in got.aiter_raw():
                    answer += piece
                    if len(answer) > MAX_ANSWER:
                        raise GuestError(f"the guest's answer to {method} {path} is over {MAX_ANSWER} bytes")
        except TimeoutError:
            raise GuestError(f"the guest did not answer {method} {path} within {INIT_TIMEOUT:g} s") from None
        except httpx.HTTPError as error:
            raise GuestError(f"{method} {path} in the guest failed: {error!r}") from error
        if not got.is_success:
            raise GuestError(
                f"the guest answered {got.status_code} to {method} {path}: {answer[:200].decode(errors='replace')}"
            )
        return bytes(answer)

    async def aclose(self) -> None:
        """Close what is open."""
        await self._http.aclose()


async def healthy(address: str) -> bool:
    """Whether ``GET /health`` answers 2xx, within two seconds or so."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(address, ENVD_PORT)
    except (OSError, TimeoutError):
        return False
    try:
        async with asyncio.timeout(2.0):
            writer.write(f"GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            status = await reader.readline()
    except (OSError, ValueError, TimeoutError):
        return False
    finally:
        writer.transport.abort()
    return status.startswith(b"HTTP/1.1 2")
