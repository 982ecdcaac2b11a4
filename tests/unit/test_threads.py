"""A cancellation waits for the thread."""

import asyncio
import threading

import pytest

from aenv.threads import to_its_end


async def test_a_cancellation_gets_through_when_the_thread_has_ended() -> None:
    entered, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        go_on.wait(10)
        done.set()

    task = asyncio.create_task(to_its_end(work))
    await asyncio.to_thread(entered.wait, 10)
    for _ in range(3):  # however often
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_result_and_error_are_the_works_own() -> None:
    assert await to_its_end(int, "11", base=2) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        await to_its_end(int, "x")


async def test_an_error_after_the_cancellation_is_not_raised() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        go_on.wait(10)
        raise OSError

    task = asyncio.create_task(to_its_end(work))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
