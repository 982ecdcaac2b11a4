"""From a Typer command to its coroutine and back: one event loop, one API client, errors in one line."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aenv.cli.client import ApiClient, client
from aenv.cli.profile import resolve

T = TypeVar("T")


def with_client(work: Callable[[ApiClient], Awaitable[T]]) -> T:
    """Run `work` with a client of the profile in force."""

    async def main() -> T:
        async with client(resolve()) as api:
            return await work(api)

    return asyncio.run(main())
