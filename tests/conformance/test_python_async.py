"""The official Python SDK's other half: AsyncSandbox, from create to kill, and what only it does (WatchDir)."""

import asyncio

import pytest
from e2b import AsyncSandbox, CommandExitException, FilesystemEvent, FilesystemEventType, PtySize, TimeoutException

from real_server import RealServer, needs_node

pytestmark = [pytest.mark.vm, needs_node]


async def test_a_life(server: RealServer) -> None:
    sandbox = await AsyncSandbox.create("base", timeout=60, envs={"A": "b"}, **server.sdk)
    assert (await sandbox.commands.run("echo $A")).stdout == "b\n"
    await sandbox.files.write("f", "x")
    assert await sandbox.files.read("f") == "x"
    await sandbox.set_timeout(30)
    listed = await AsyncSandbox.list(**server.sdk).next_items()
    assert sandbox.sandbox_id in [info.sandbox_id for info in listed]
    running = await sandbox.commands.run("sleep 100", background=True)
    assert await sandbox.kill()
    with pytest.raises(Exception, match="killed or reached its end of life"):
        await running.wait()
    assert not await sandbox.is_running()


async def test_commands_at_the_same_time(async_sandbox: AsyncSandbox) -> None:
    results = await asyncio.gather(*(async_sandbox.commands.run(f"sleep 0.1; echo {i}") for i in range(20)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]
    with pytest.raises(CommandExitException) as failed:
        await async_sandbox.commands.run("exit 9")
    assert failed.value.exit_code == 9
    with pytest.raises(TimeoutException):
        await async_sandbox.commands.run("sleep 100", timeout=1)


async def test_background_and_stdin(async_sandbox: AsyncSandbox) -> None:
    out: list[str] = []
    handle = await async_sandbox.commands.run("cat; echo end", background=True, stdin=True, on_stdout=out.append)
    await handle.send_stdin("line\n")
    await handle.close_stdin()
    assert (await handle.wait()).stdout == "line\nend\n" == "".join(out)


async def test_disconnect_and_connect(async_sandbox: AsyncSandbox) -> None:
    handle = await async_sandbox.commands.run("read x; echo $x", background=True, stdin=True)
    await handle.disconnect()
    again = await async_sandbox.commands.connect(handle.pid)
    await async_sandbox.commands.send_stdin(handle.pid, "later\n")
    assert (await again.wait()).stdout == "later\n"


async def test_terminal(async_sandbox: AsyncSandbox) -> None:
    shown, prompt = bytearray(), asyncio.Event()

    def show(data: bytes) -> None:
        shown.extend(data)
        if b"42" in shown:
            prompt.set()

    terminal = await async_sandbox.pty.create(PtySize(rows=10, cols=40), on_data=show)
    await async_sandbox.pty.resize(terminal.pid, PtySize(rows=11, cols=42))
    await async_sandbox.pty.send_stdin(terminal.pid, b"tput cols\n")
    await asyncio.wait_for(prompt.wait(), 30)
    await async_sandbox.pty.send_stdin(terminal.pid, b"exit\n")
    assert (await terminal.wait()).exit_code == 0


async def test_watch(async_sandbox: AsyncSandbox) -> None:
    await async_sandbox.files.make_dir("async-watched")
    events: asyncio.Queue[FilesystemEvent] = asyncio.Queue()
    handle = await async_sandbox.files.watch_dir("async-watched", on_event=events.put_nowait, recursive=True)
    await async_sandbox.files.write("async-watched/f", "x")
    async with asyncio.timeout(30):
        seen = [await events.get() for _ in range(3)]
    kinds = [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE]
    assert [(event.name, event.type) for event in seen] == [("f", kind) for kind in kinds]
    await handle.stop()
    await async_sandbox.files.remove("async-watched")


async def test_streams(async_sandbox: AsyncSandbox) -> None:
    await async_sandbox.files.write("async-stream", b"0123456789" * 500_000, gzip=True)
    size = 0
    async for piece in await async_sandbox.files.read("async-stream", format="stream"):
        size += len(piece)
    assert size == 5_000_000
    await async_sandbox.files.remove("async-stream")
