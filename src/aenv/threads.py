"""Work in threads that nobody can interrupt."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_its_end(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, for work that leaves something behind.

    Cancelling the latter lets go of a thread that goes on: what it makes afterwards, nobody knows of. Here a
    cancellation gets through when the thread has ended, so that the caller can release what it made.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            try:
                await asyncio.wait((thread,))
            except asyncio.CancelledError:
                continue  # once is enough
        if not thread.cancelled():
            thread.exception()  # of no interest any more
        raise
