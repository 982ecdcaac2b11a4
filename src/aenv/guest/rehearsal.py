"""What a template's guest does once before it is captured: what most of its copies will do first.

The programs are then in its memory, which all copies share, and no copy reads them from its disk. A guest that waits
for its owner does some of it again: then its emulated processor knows the way as well.
"""

import asyncio
import base64
from collections.abc import Sequence

import httpx

from aenv.errors import GuestError
from aenv.guest.connect import ConnectClient

Command = tuple[str, ...]

COMMANDS: tuple[Command, ...] = (
    ("/bin/bash", "-l", "-c", "true"),
    ("/usr/bin/env", "python3", "-c", "import json, subprocess"),
)
"""As SDKs run commands, and what agents run in them. An image may have neither."""
DEADLINE = 30.0
"""Seconds for each."""


async def rehearse(address: str, port: int, user: str, commands: Sequence[Command] = COMMANDS) -> None:
    """Run `commands` as `user` in a guest without a token. Raises GuestError if its daemon fails or knows them not."""
    authorization = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        client = ConnectClient(http, f"http://{address}:{port}", {"Authorization": authorization})
        for command, *arguments in commands:
            message = {"process": {"cmd": command, "args": arguments}}
            try:
                async with asyncio.timeout(DEADLINE):
                    async for _ in client.stream("/process.Process/Start", message):
                        pass
            except TimeoutError:
                raise GuestError(f"{command} did not end in the guest within {DEADLINE:g} s") from None
