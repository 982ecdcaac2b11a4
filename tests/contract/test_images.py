"""What every `ImageStore` does: qcow2 files and the data plane alike."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from aenv.config import ImageSettings, Settings, load
from aenv.errors import ImageError, NotFound, ProvisionError
from aenv.images import plain
from aenv.images.protocol import Disk, ImageStore
from aenv.images.store import find_blockd, make_store, prepare

MIB = 1 << 20
SIZE = 4 * MIB
CONTENT = os.urandom(64 * 1024)
UID = 2_900_000

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives disks to the VMMs' users and mounts: needs root")


@dataclass
class Lab:
    settings: Settings
    store: ImageStore

    def folder(self, name: str) -> Path:
        folder = self.settings.sandboxes_dir / name
        folder.mkdir(parents=True, mode=0o700)
        return folder

    async def restarted(self, *in_use: Path) -> ImageStore:
        """The store of the next server on the same home."""
        await self.store.aclose()
        self.store = make_store(self.settings)
        await self.store.start(in_use)
        return self.store


@pytest.fixture(params=["plain", "blockd"])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    kind: Literal["blockd", "plain"] = request.param
    settings = Settings(home=tmp_path, images=ImageSettings(store=kind, blockd=load(tmp_path).images.blockd))
    if kind == "blockd":
        try:
            find_blockd(settings)
        except ProvisionError as error:
            pytest.skip(error.message)
    await template(settings, "tbase")
    made = Lab(settings, make_store(settings))
    await made.store.start([])
    yield made
    await made.store.start([]) if kind == "plain" else await made.restarted()
    await made.store.aclose()


async def template(settings: Settings, name: str) -> None:
    directory = settings.templates_dir / name
    directory.mkdir(parents=True)
    with (directory / plain.ROOTFS).open("wb") as raw:
        raw.truncate(SIZE)
        raw.write(CONTENT)
    await prepare(settings, directory, directory)


async def io(disk: Disk, *commands: str) -> str:
    """Do to a disk what a VMM does, as another process: qemu-io, with the disk's own format."""
    argv = ["qemu-io", "-f", disk.format, *(word for command in commands for word in ("-c", command)), str(disk.path)]
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text
    assert "rror" not in text, text  # it ends with 0 also after commands that failed
    assert "failed" not in text, text
    return text


async def content(disk: Disk, tmp_path: Path) -> bytes:
    """All that a guest would read."""
    raw = tmp_path / "content.raw"
    argv = ["qemu-img", "convert", "-U", "-f", disk.format, "-O", "raw", str(disk.path), str(raw)]
    process = await asyncio.create_subprocess_exec(*argv)
    assert await process.wait() == 0
    return raw.read_bytes()


FRESH = CONTENT + bytes(SIZE - len(CONTENT))


async def test_a_fresh_disk_shows_the_image(lab: Lab, tmp_path: Path) -> None:
    disk = await lab.store.attach("tbase", lab.folder("ia"), UID)
    assert disk.size == SIZE
    assert await content(disk, tmp_path) == FRESH
    await lab.store.detach(lab.settings.sandboxes_dir / "ia")


async def test_only_its_user_may_open_it(lab: Lab) -> None:
    folder = lab.folder("ia")
    disk = await lab.store.attach("tbase", folder, UID)
    found = disk.path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (UID, UID, 0o600)
    await lab.store.detach(folder)


async def test_disks_of_one_image_are_independent(lab: Lab, tmp_path: Path) -> None:
    folders = [lab.folder(name) for name in ("ia", "ib")]
    one, other = await asyncio.gather(*(lab.store.attach("tbase", folder, UID) for folder in folders))
    await io(one, f"write -P 0x11 {MIB} 128k")
    assert (await content(one, tmp_path))[MIB : MIB + 131072] == b"\x11" * 131072
    assert await content(other, tmp_path) == FRESH
    for folder in folders:
        await lab.store.detach(folder)
    fresh = await lab.store.attach("tbase", lab.folder("ic"), UID)
    assert await content(fresh, tmp_path) == FRESH
    await lab.store.detach(lab.settings.sandboxes_dir / "ic")


async def test_writes_flushes_zeros_and_discards(lab: Lab, tmp_path: Path) -> None:
    folder = lab.folder("ia")
    disk = await lab.store.attach("tbase", folder, UID)
    await io(disk, "write -P 0x22 0 64k", "write -P 0x33 4096 512", "write -z 8192 4096", "discard 16384 8192", "flush")
    expected = bytearray(FRESH)
    expected[: 64 * 1024] = b"\x22" * 64 * 1024
    expected[4096 : 4096 + 512] = b"\x33" * 512
    expected[8192 : 8192 + 4096] = bytes(4096)
    found = bytearray(await content(disk, tmp_path))
    # What a discarded range reads as is not promised.
    found[16384 : 16384 + 8192] = expected[16384 : 16384 + 8192] = bytes(8192)
    assert found == expected
    await lab.store.detach(folder)


async def test_detach_deletes_and_is_idempotent(lab: Lab) -> None:
    folder = lab.folder("ia")
    disk = await lab.store.attach("tbase", folder, UID)
    await lab.store.detach(folder)
    assert not disk.path.exists()
    assert list(folder.iterdir()) == []
    await lab.store.detach(folder)
    await lab.store.detach(lab.settings.sandboxes_dir / "never")


async def test_a_folder_can_have_another_disk_after_the_first(lab: Lab, tmp_path: Path) -> None:
    folder = lab.folder("ia")
    await io(await lab.store.attach("tbase", folder, UID), "write -P 0x11 0 64k")
    await lab.store.detach(folder)
    assert await content(await lab.store.attach("tbase", folder, UID), tmp_path) == FRESH
    await lab.store.detach(folder)


async def test_unknown_images_and_damaged_ones(lab: Lab) -> None:
    folder = lab.folder("ia")
    with pytest.raises(NotFound, match="image 'tnone' does not exist"):
        await lab.store.attach("tnone", folder, UID)
    (lab.settings.templates_dir / "tempty").mkdir()
    with pytest.raises(ImageError, match="'tempty'"):
        await lab.store.attach("tempty", folder, UID)
    assert list(folder.iterdir()) == []


async def test_a_cancelled_attach_leaves_nothing_once_detached(lab: Lab) -> None:
    folder = lab.folder("ia")
    for delay in (0, 0.0005, 0.002, 0.005):
        attaching = asyncio.create_task(lab.store.attach("tbase", folder, UID))
        await asyncio.sleep(delay)
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
        await lab.store.detach(folder)
    disk = await lab.store.attach("tbase", folder, UID)
    await lab.store.detach(folder)
    assert not disk.path.exists()
    assert list(folder.iterdir()) == []


async def test_a_disk_in_use_survives_the_server(lab: Lab, tmp_path: Path) -> None:
    folder = lab.folder("ia")
    disk = await lab.store.attach("tbase", folder, UID)
    await io(disk, "write -P 0x44 0 64k")
    store = await lab.restarted(folder)
    again = await store.open("tbase", folder)
    assert again == disk
    assert await content(again, tmp_path) == b"\x44" * 65536 + bytes(SIZE - 65536)
    await store.detach(folder)
    assert not disk.path.exists()


async def test_what_is_gone_cannot_be_opened(lab: Lab) -> None:
    folder = lab.folder("ia")
    with pytest.raises(ImageError, match="gone"):
        await lab.store.open("tbase", folder)
    with pytest.raises(ImageError, match="no disk"):
        await lab.store.lost(folder)


async def test_a_disk_that_works_is_not_lost(lab: Lab) -> None:
    folder = lab.folder("ia")
    await lab.store.attach("tbase", folder, UID)
    waiting = asyncio.create_task(lab.store.lost(folder))
    done, _ = await asyncio.wait((waiting,), timeout=0.05)
    assert not done
    waiting.cancel()
    await lab.store.detach(folder)


async def test_many_at_once(lab: Lab, tmp_path: Path) -> None:
    folders = [lab.folder(f"i{number}") for number in range(24)]
    disks = await asyncio.gather(*(lab.store.attach("tbase", folder, UID) for folder in folders))
    assert len({disk.path for disk in disks}) == len(disks)
    await asyncio.gather(*(io(disk, f"write -P {n + 1} 0 4k") for n, disk in enumerate(disks[:4])))
    for number, disk in enumerate(disks[:4]):
        assert (await content(disk, tmp_path))[:4096] == bytes([number + 1]) * 4096
    await asyncio.gather(*(lab.store.detach(folder) for folder in folders))
    assert not any(disk.path.exists() for disk in disks)
