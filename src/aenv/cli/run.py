"""From a Typer command to its coroutine and back: one event loop, one API client, errors in one line."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from aenv.cli.client import ApiClient, client
from aenv.cli.errors import CliError
from aenv.cli.output import print_id
from aenv.cli.profile import resolve

T = TypeVar("T")


def with_client(work: Callable[[ApiClient], Awaitable[T]]) -> T:
    """Run `work` with a client of the profile in force."""

    async def main() -> T:
        async with client(resolve()) as api:
            return await work(api)

    return asyncio.run(main())


def for_each(ids: Iterable[str], act: Callable[[ApiClient, str], Awaitable[object]]) -> None:
    """`act` on one after the other, printing those that it succeeded with; CliError with all failures at the end."""

    async def work(api: ApiClient) -> list[str]:
        failures = []
        for identifier in ids:
            try:
                await act(api, identifier)
                print_id(identifier)
            except CliError as error:
                failures.append(error.message)
        return failures

    if failures := with_client(work):
        raise CliError("; ".join(failures))
