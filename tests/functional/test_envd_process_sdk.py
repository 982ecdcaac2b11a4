"""Processes of the real daemon through the official Python SDK, in its debug mode (no control plane)."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2b import (
    AsyncCommandHandle,
    AsyncSandbox,
    CommandExitException,
    InvalidArgumentException,
    PtySize,
    Sandbox,
    TimeoutException,
)
from envd_fixture import running_envd, sdk_port

pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture
async def sandbox(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncSandbox]:
    monkeypatch.setenv("E2B_DEBUG", "true")
    async with sdk_port() as port, running_envd(port):
        yield await AsyncSandbox.create()


async def test_foreground(sandbox: AsyncSandbox) -> None:
    result = await sandbox.commands.run("echo hi; echo no >&2", envs={"A": "b"})
    assert (result.stdout, result.stderr, result.exit_code) == ("hi\n", "no\n", 0)
    with pytest.raises(CommandExitException) as failure:
        await sandbox.commands.run("echo before; exit 7")
    assert (failure.value.exit_code, failure.value.stdout, failure.value.error) == (7, "before\n", "exit status 7")
    result = await sandbox.commands.run("printf 'one\ntwo\n' | tee >(wc -l >&2)\nexit 0")
    assert result.stdout == "one\ntwo\n"


async def test_the_synchronous_sdk(sandbox: AsyncSandbox) -> None:
    def use() -> tuple[str, bool, bool]:
        other = Sandbox.create()
        handle = other.commands.run("cat", background=True, stdin=True)
        other.commands.send_stdin(handle.pid, "typed\n")
        listed = handle.pid in [process.pid for process in other.commands.list()]
        for stdout, _, _ in handle:
            if stdout:
                break
        return stdout or "", listed, handle.kill()

    assert await asyncio.to_thread(use) == ("typed\n", True, True)


async def test_large_and_wide_output(sandbox: AsyncSandbox) -> None:
    result = await sandbox.commands.run("for i in $(seq 20000); do printf 'ä€🙂%s' $i; done")
    assert result.stdout == "".join(f"ä€🙂{i}" for i in range(1, 20001))


async def test_background_stdin_and_kill(sandbox: AsyncSandbox) -> None:
    output: list[str] = []
    arrived = asyncio.Event()

    def on_stdout(text: str) -> None:
        output.append(text)
        arrived.set()

    handle: AsyncCommandHandle = await sandbox.commands.run("cat", background=True, stdin=True, on_stdout=on_stdout)
    await sandbox.commands.send_stdin(handle.pid, "hello\n")
    await asyncio.wait_for(arrived.wait(), 10)
    assert output == ["hello\n"]
    await sandbox.commands.close_stdin(handle.pid)
    assert (await handle.wait()).exit_code == 0
    handle = await sandbox.commands.run("sleep 300", background=True)
    assert await handle.kill() is True
    with pytest.raises(CommandExitException) as killed:
        await handle.wait()
    assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
    assert await sandbox.commands.kill(handle.pid) is False


async def test_disconnect_and_connect_again(sandbox: AsyncSandbox) -> None:
    handle = await sandbox.commands.run("read x; echo got $x; exit 3", background=True, stdin=True)
    await handle.disconnect()
    again = await sandbox.commands.connect(handle.pid)
    await sandbox.commands.send_stdin(handle.pid, "line\n")
    with pytest.raises(CommandExitException) as first:
        await again.wait()
    late = await sandbox.commands.connect(handle.pid)
    with pytest.raises(CommandExitException) as second:
        await late.wait()
    for failure in (first.value, second.value):
        assert (failure.stdout, failure.exit_code) == ("got line\n", 3)


async def test_timeout(sandbox: AsyncSandbox) -> None:
    with pytest.raises(TimeoutException):
        await sandbox.commands.run("sleep 300", timeout=1)
    # The daemon's own deadline is the client's; List shows when it has passed.
    async with asyncio.timeout(10):
        while await sandbox.commands.list():  # noqa: ASYNC110 (the daemon's table: there is no event)
            await asyncio.sleep(0.05)


async def test_wrong_arguments(sandbox: AsyncSandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="cwd '/no/such' does not exist"):
        await sandbox.commands.run("true", cwd="/no/such")
    with pytest.raises(Exception, match="invalid username: 'ghost'"):
        await sandbox.commands.run("true", user="ghost")


async def test_terminal(sandbox: AsyncSandbox) -> None:
    output = bytearray()
    changed = asyncio.Event()

    def on_data(data: bytes) -> None:
        output.extend(data)
        changed.set()

    async def shows(text: bytes) -> None:
        async with asyncio.timeout(20):
            while text not in output:
                changed.clear()
                await changed.wait()

    handle = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=on_data, envs={"MARK": "here"})
    await sandbox.pty.send_stdin(handle.pid, b"echo [$MARK] $(tput cols)\n")
    await shows(b"[here] 80")
    await sandbox.pty.resize(handle.pid, PtySize(rows=30, cols=100))
    await sandbox.pty.send_stdin(handle.pid, b"echo now $(tput cols)\n")
    await shows(b"now 100")
    await handle.disconnect()
    again = await sandbox.pty.connect(handle.pid, on_data=on_data)
    await sandbox.pty.send_stdin(handle.pid, b"echo back $((6*7))\n")
    await shows(b"back 42")
    await sandbox.pty.send_stdin(handle.pid, b"exit\n")
    assert (await again.wait()).exit_code == 0
