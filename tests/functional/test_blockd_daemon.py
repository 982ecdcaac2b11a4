"""The node's aenv-blockd as the server keeps it: started, adopted, restarted, ended, never two on one home."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aenv.config import ImageSettings, Settings, load
from aenv.errors import ConfigError, ImageError, ProvisionError
from aenv.images import daemon as module
from aenv.images import process
from aenv.images.client import BlockdClient
from aenv.images.daemon import BlockDaemon, Places, Run
from aenv.images.store import find_blockd, make_store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts: needs root")

Make = Callable[[], BlockDaemon]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes owners of one home's daemon, as successive servers are."""
    try:
        binary = find_blockd(load())
    except ProvisionError as error:
        pytest.skip(error.message)
    made: list[BlockDaemon] = []

    def daemon() -> BlockDaemon:
        made.append(BlockDaemon(places=Places.of_home(tmp_path), binary=binary, cache_bytes=1 << 20))
        return made[-1]

    yield daemon
    for owner in made:
        await owner.aclose()
    places = Places.of_home(tmp_path)
    left = module._read_pid(places.pid_file)
    if left is not None and process.identify(left.pid) == left:
        os.kill(left.pid, signal.SIGKILL)
    if mounts(places.state):  # of one that was killed and not replaced
        unmounting = await asyncio.create_subprocess_exec("umount", "-l", places.mount)
        assert await unmounting.wait() == 0


async def attach(run: Run, places: Places, name: str) -> Path:
    return (await run.client.attach(name, [], upper=places.state / name, size=1 << 20)).path


def mounts(below: Path) -> int:
    return Path("/proc/self/mounts").read_text().count(f" {below}/")


async def test_it_ends_with_the_server_that_has_no_sandbox(make: Make) -> None:
    owner = make()
    run = await owner.start()
    assert run.info.pid == run.process.pid
    assert mounts(owner.places.state) == 1
    await owner.aclose()
    assert run.process.ended
    assert mounts(owner.places.state) == 0
    assert not owner.places.socket.exists()
    await owner.aclose()


async def test_it_stays_for_the_next_server_while_it_serves(make: Make) -> None:
    first = make()
    run = await first.start()
    path = await attach(run, first.places, "ia")
    with path.open("r+b") as file:
        file.write(b"x" * 4096)
    await first.aclose()
    assert path.exists()

    second = make()
    again = await second.start()
    assert again.info.pid == run.info.pid
    assert [image["image"] for image in await again.client.list()] == ["ia"]
    assert path.read_bytes()[:4096] == b"x" * 4096
    await again.client.detach("ia", discard_upper=True)
    await second.aclose()
    assert process.identify(run.info.pid) is None


async def test_one_that_dies_is_replaced_and_its_users_hear_of_it(make: Make) -> None:
    owner = make()
    run = await owner.start()
    path = await attach(run, owner.places, "ia")
    waiting = [asyncio.create_task(run.ended()) for _ in range(2)]
    os.kill(run.info.pid, signal.SIGKILL)
    told = await asyncio.gather(*waiting)
    assert told == [f"aenv-blockd (pid {run.info.pid}) was killed by signal 9"] * 2
    after = await owner.running()
    assert after.info.pid != run.info.pid
    assert await after.client.list() == []
    assert not path.exists()
    assert mounts(owner.places.state) == 1  # the dead mount is gone


async def test_one_that_died_with_its_server_is_replaced(make: Make) -> None:
    first = make()
    run = await first.start()
    await attach(run, first.places, "ia")
    await first.aclose()
    os.kill(run.info.pid, signal.SIGKILL)
    second = make()
    after = await second.start()
    assert after.info.pid != run.info.pid
    assert mounts(second.places.state) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', "[" * 10**5])
async def test_a_damaged_note_of_who_runs_is_no_obstacle(make: Make, text: str) -> None:
    owner = make()
    owner.places.state.mkdir(parents=True)
    owner.places.pid_file.write_text(text)
    run = await owner.start()
    assert await run.client.list() == []


async def test_a_silent_one_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    run = await first.start()
    await attach(run, first.places, "ia")
    await first.aclose()
    os.kill(run.info.pid, signal.SIGSTOP)
    second = make()
    with monkeypatch.context() as patched:
        patched.setattr(module, "ADOPT_DEADLINE", 0.2)
        after = await second.start()
    assert after.info.pid != run.info.pid
    assert process.identify(run.info.pid) is None


async def test_one_that_hangs_is_killed_and_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK", 0.05)
    monkeypatch.setattr(module, "_CHECK_DEADLINE", 0.2)
    owner = make()
    run = await owner.start()
    os.kill(run.info.pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        assert "signal 9" in await run.ended()
    monkeypatch.setattr(module, "_CHECK_DEADLINE", 15.0)
    assert (await owner.running()).info.pid != run.info.pid


async def test_block_devices_can_be_ruled_out(tmp_path: Path) -> None:
    images = ImageSettings(blockd=load().images.blockd, ublk="off")
    try:
        store = make_store(Settings(home=tmp_path, images=images))
    except ProvisionError as error:
        pytest.skip(error.message)
    await store.start([], [])
    client = BlockdClient(Places.of_home(tmp_path).socket)
    ublk = (await client.version()).targets["ublk"]
    await client.aclose()
    await store.aclose()
    assert not ublk.available
    assert "--no-ublk" in (ublk.reason or "")


async def test_a_second_one_on_the_home_does_not_start(make: Make) -> None:
    owner = make()
    run = await owner.start()
    rival = await asyncio.create_subprocess_exec(*owner._argv, stderr=asyncio.subprocess.PIPE)
    _, said = await rival.communicate()
    assert rival.returncode != 0
    assert b"another daemon" in said
    assert (await run.client.version()).pid == run.info.pid


async def test_why_it_does_not_start_is_said(tmp_path: Path) -> None:
    refusing = script(tmp_path, "import sys; sys.exit('the moon is wrong')")
    async with owned(tmp_path, refusing) as owner:
        with pytest.raises(ImageError, match=r"ended with status 1\): the moon is wrong"):
            await owner.start()
    async with owned(tmp_path, tmp_path / "none") as owner:
        with pytest.raises(ImageError, match="none could not be started: No such file"):
            await owner.start()


async def test_another_version_is_not_taken(tmp_path: Path) -> None:
    other = script(
        tmp_path,
        """
import json, os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen()
while True:
    connection, _ = listener.accept()
    for line in connection.makefile("rb"):
        ok = {"version": "9.0.0", "pid": os.getpid(), "mount": "/m", "targets": {}}
        connection.sendall(json.dumps({"id": json.loads(line)["id"], "ok": ok}).encode() + b"\\n")
""",
    )
    async with owned(tmp_path, other) as owner:
        with pytest.raises(ConfigError, match=r"is version 9\.0\.0; 0\.1\.\* is needed"):
            await owner.start()
        pid = module._read_pid(owner.places.pid_file)
        assert pid is not None
        assert process.identify(pid.pid) is None


async def test_a_call_waits_for_the_next_one_but_not_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = make()
    run = await owner.start()
    monkeypatch.setattr(module, "READY_DEADLINE", 0.3)
    monkeypatch.setattr(owner, "_argv", ["/nonexistent"])
    os.kill(run.info.pid, signal.SIGKILL)
    await run.ended()
    with pytest.raises(ImageError, match="there is no aenv-blockd: /nonexistent could not be started"):
        await owner.running()


async def test_one_for_work_on_files_ends_with_its_user(tmp_path: Path) -> None:
    user = """
import asyncio, sys
from aenv.config import load
from aenv.images.store import scratch_daemon
async def main():
    async with scratch_daemon(load()) as client:
        print((await client.version()).pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    try:
        find_blockd(load())
    except ProvisionError as error:
        pytest.skip(error.message)
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    using = await asyncio.create_subprocess_exec(
        sys.executable, "-c", user, env=environ, stdout=asyncio.subprocess.PIPE
    )
    assert using.stdout is not None
    lines = (await using.stdout.readuntil(b"\n")).split()
    while not lines[-1].isdigit():  # a line of its log came first
        lines = (await using.stdout.readuntil(b"\n")).split()
    watched = process.Process(int(lines[-1]))
    using.kill()
    await using.wait()
    async with asyncio.timeout(10):
        await watched.wait()
    watched.close()
    assert not mounts(tmp_path)


def test_the_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process.rotate(log)
    with log.open("ab") as writer:
        writer.write(b"a" * (process.LOG_BYTES + 1))
        writer.flush()
        process.rotate(log)
        writer.write(b"b")
    assert log.read_bytes() == b"b"
    assert (tmp_path / "log.1").stat().st_size == process.LOG_BYTES + 1


def script(folder: Path, body: str) -> Path:
    path = folder / "daemon"
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)
    return path


@asynccontextmanager
async def owned(home: Path, binary: Path) -> AsyncIterator[BlockDaemon]:
    owner = BlockDaemon(places=Places.of_home(home), binary=binary, cache_bytes=1 << 20)
    yield owner
    await owner.aclose()


async def test_nobody_answers_without_a_daemon(tmp_path: Path) -> None:
    client = BlockdClient(Places.of_home(tmp_path).socket)
    with pytest.raises(ImageError, match="cannot be reached"):
        await client.version()
