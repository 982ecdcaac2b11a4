"""Looking at the disks of running sandboxes from outside, as after a power cut."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from aenv.errors import ImageError, NotFound
from aenv.images.client import BlockdClient, Layer
from aenv.images.daemon import Places
from aenv.images.memory import PREFIX

T = TypeVar("T")


def ask(home: Path, work: Callable[[BlockdClient], Awaitable[T]]) -> T:
    """Ask the daemon of a home something."""

    async def connected() -> T:
        client = BlockdClient(Places.of_home(home).socket)
        try:
            return await work(client)
        finally:
            await client.aclose()

    return asyncio.run(connected())


def attached_disks(home: Path) -> list[str]:
    """The disks that the daemon of a home serves; none without a daemon. Memory images may be kept without a user."""
    try:
        images = ask(home, lambda client: client.list())
    except (ImageError, OSError):
        return []
    return [image["image"] for image in images if not image["image"].startswith(PREFIX)]


def fsck_layers(home: Path, layers: list[Layer]) -> None:
    """Check the file system that layers hold; see `check`."""
    raw = home / "fsck.raw"
    ask(home, lambda client: client.export(raw, layers=layers))
    check(raw)


def fsck_running(home: Path, vmms: dict[str, int]) -> None:
    """Check the file systems of running sandboxes; `vmms` has their VMMs' pids. Without a data plane there are none."""
    if Places.of_home(home).socket.exists():
        for image in ask(home, lambda client: client.list()):
            if image["image"] in vmms and not image["blank"]:  # a blank one has no file system yet
                _fsck(home, image["image"], vmms[image["image"]])


def _fsck(home: Path, image: str, vmm: int) -> None:
    raw = home / "fsck.raw"
    try:
        with stopped(vmm):
            ask(home, lambda client: client.export(raw, image=image))
    except (NotFound, ProcessLookupError):
        return  # deleted at this moment
    check(raw)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A VMM that writes nothing meanwhile: an export of a disk in use is of no one instant."""
    try:
        os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def check(raw: Path) -> None:
    """Replay the journal, as the next mount would; then there must be nothing to repair. Removes the file."""
    try:
        subprocess.run(["e2fsck", "-y", "-E", "journal_only", raw], capture_output=True, check=False)
        done = subprocess.run(["e2fsck", "-f", "-n", raw], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        raw.unlink()
