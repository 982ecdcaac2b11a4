"""The API as a program with a connection that stays open uses it; every call is timed."""

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from aenv.cli.client import ApiClient
from aenv.cli.errors import CliError
from aenv.cli.process import Command, Processes
from aenv.cli.profile import Profile

TIMEOUT = 900
"""Seconds that a sandbox lives if nobody deletes it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`ms` is from the call to the whole answer, `steps` what the server says of it (Server-Timing), both in
    milliseconds."""

    ms: float
    body: Any
    steps: dict[str, float] = field(default_factory=dict)


class Client:
    """Calls of one program. Made by `connected`."""

    def __init__(self, profile: Profile, http: httpx.AsyncClient) -> None:
        self.profile = profile
        self.http = http

    async def call(self, method: str, path: str, body: Any = None) -> Answer:
        """Raises CliError for an answer that is none of success."""
        began = time.perf_counter()
        answer = await self.http.request(method, self.profile.api_url + path, json=body)
        took = (time.perf_counter() - began) * 1000
        if not answer.is_success:
            raise CliError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        timing = answer.headers.get("server-timing", "")
        steps = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.e-]+)", timing)}
        return Answer(took, answer.json() if answer.content else None, steps)

    async def create(self, template: str = "base") -> Answer:
        return await self.call("POST", "/v2/sandboxes", {"templateID": template, "timeout": TIMEOUT})

    async def delete(self, sandbox_id: str) -> Answer:
        return await self.call("DELETE", f"/sandboxes/{sandbox_id}")

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> Answer:
        return await self.call("POST", f"/sandboxes/{sandbox_id}/pause", {"memory": memory})

    async def resume(self, sandbox_id: str) -> Answer:
        return await self.call("POST", f"/v2/sandboxes/{sandbox_id}/connect", {"timeout": TIMEOUT})

    async def snapshot(self, sandbox_id: str) -> Answer:
        return await self.call("POST", f"/sandboxes/{sandbox_id}/snapshots", {})

    async def delete_snapshot(self, snapshot_id: str) -> Answer:
        return await self.call("DELETE", f"/templates/{snapshot_id}")

    async def fork(self, sandbox_id: str, count: int) -> Answer:
        """The body is the children's ids. Raises CliError if one of them could not be started."""
        answer = await self.call("POST", f"/sandboxes/{sandbox_id}/fork", {"count": count, "timeout": TIMEOUT})
        if failed := [result["error"] for result in answer.body if "error" in result]:
            raise CliError(f"{len(failed)} of {count} children failed: {failed[0]}")
        return Answer(answer.ms, [result["sandbox"]["sandboxID"] for result in answer.body], answer.steps)

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> Answer:
        return await self.call("POST", f"/sandboxes/{sandbox_id}/rollback", {"snapshotID": snapshot_id})

    @asynccontextmanager
    async def sandbox(self, template: str = "base") -> AsyncIterator[dict[str, Any]]:
        """One that is there for the block, as the create answered."""
        created: dict[str, Any] = (await self.create(template)).body
        try:
            yield created
        finally:
            await self.delete(created["sandboxID"])

    async def first_output(self, sandbox: dict[str, Any], argv: list[str]) -> None:
        """Start a command in it and return when its first output is here."""
        processes = Processes(ApiClient(self.profile, self.http), sandbox, None)
        async for message in processes.start(Command(argv=argv, envs={}), stdin=False):
            if "data" in message.get("event", {}):
                return
        raise CliError(f"{argv} printed nothing")


@asynccontextmanager
async def connected(profile: Profile) -> AsyncIterator[Client]:
    """A client of the server of `profile`."""
    headers = {"X-API-Key": profile.api_key}
    async with httpx.AsyncClient(headers=headers, timeout=180.0, trust_env=False) as http:
        yield Client(profile, http)
