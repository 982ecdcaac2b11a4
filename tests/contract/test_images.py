"""What an `ImageStore` does, on the real data plane."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from aenv.config import ImageSettings, Settings, load
from aenv.errors import ImageError, ProvisionError
from aenv.images import memory
from aenv.images.capturing import StagedCapture
from aenv.images.client import BlockdClient, layers_of
from aenv.images.daemon import Places
from aenv.images.process import Process, identify
from aenv.images.protocol import Captured, Disk, GuestMemory, ImageStore, MemoryRange, Stack
from aenv.images.store import find_blockd, import_layer, make_store

MIB = 1 << 20
SIZE = 4 * MIB
CONTENT = os.urandom(64 * 1024)
FRESH = CONTENT + bytes(SIZE - len(CONTENT))
UID = 2_900_000
PAGE = 4096

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(),
    reason="gives disks to the VMMs' users and mounts: needs root and /dev/fuse",
)


@dataclass
class Lab:
    settings: Settings
    store: ImageStore
    base: Stack

    def folder(self, name: str) -> Path:
        folder = self.settings.sandboxes_dir / name
        folder.mkdir(parents=True, mode=0o700)
        return folder

    async def restarted(self, *in_use: Path, memory: Iterable[str] = ()) -> ImageStore:
        """The store of the next server on the same home."""
        await self.store.aclose()
        self.store = make_store(self.settings)
        await self.store.start(in_use, memory)
        return self.store

    async def layer(self, content: bytes) -> Stack:
        """An image of one layer with this content."""
        raw = self.settings.home / "raw"
        raw.write_bytes(content)
        return Stack(layers=(await import_layer(self.settings, raw),), size=len(content))


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    settings = Settings(home=tmp_path, images=ImageSettings(blockd=load(tmp_path).images.blockd))
    try:
        find_blockd(settings)
    except ProvisionError as error:
        pytest.skip(error.message)
    made = Lab(settings, make_store(settings), Stack(layers=(), size=SIZE))
    made.base = await made.layer(FRESH)
    await made.store.start([], [])
    yield made
    await made.restarted()
    await made.store.aclose()
    assert not Places.of_home(tmp_path).pid_file.exists()


async def io(disk: Disk, *commands: str) -> str:
    """Do to a disk what a VMM does, as another process."""
    argv = ["qemu-io", "-f", "raw", *(word for command in commands for word in ("-c", command)), str(disk.path)]
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
    argv = ["qemu-img", "convert", "-U", "-f", "raw", "-O", "raw", str(disk.path), str(raw)]
    process = await asyncio.create_subprocess_exec(*argv)
    assert await process.wait() == 0
    return raw.read_bytes()


async def test_a_fresh_disk_shows_the_image(lab: Lab, tmp_path: Path) -> None:
    disk = await lab.store.attach(lab.base, lab.folder("ia"), UID)
    assert disk.size == SIZE
    assert await content(disk, tmp_path) == FRESH
    await lab.store.detach(lab.settings.sandboxes_dir / "ia")


async def test_only_its_user_may_open_it(lab: Lab) -> None:
    folder = lab.folder("ia")
    disk = await lab.store.attach(lab.base, folder, UID)
    found = disk.path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (UID, UID, 0o600)
    await lab.store.detach(folder)


async def test_disks_of_one_image_are_independent(lab: Lab, tmp_path: Path) -> None:
    folders = [lab.folder(name) for name in ("ia", "ib")]
    one, other = await asyncio.gather(*(lab.store.attach(lab.base, folder, UID) for folder in folders))
    await io(one, f"write -P 0x11 {MIB} 128k")
    assert (await content(one, tmp_path))[MIB : MIB + 131072] == b"\x11" * 131072
    assert await content(other, tmp_path) == FRESH
    for folder in folders:
        await lab.store.detach(folder)
    fresh = await lab.store.attach(lab.base, lab.folder("ic"), UID)
    assert await content(fresh, tmp_path) == FRESH
    await lab.store.detach(lab.settings.sandboxes_dir / "ic")


async def test_writes_flushes_zeros_and_discards(lab: Lab, tmp_path: Path) -> None:
    folder = lab.folder("ia")
    disk = await lab.store.attach(lab.base, folder, UID)
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
    disk = await lab.store.attach(lab.base, folder, UID)
    await lab.store.detach(folder)
    assert not disk.path.exists()
    assert list(folder.iterdir()) == []
    await lab.store.detach(folder)
    await lab.store.detach(lab.settings.sandboxes_dir / "never")


async def test_a_folder_can_have_another_disk_after_the_first(lab: Lab, tmp_path: Path) -> None:
    folder = lab.folder("ia")
    await io(await lab.store.attach(lab.base, folder, UID), "write -P 0x11 0 64k")
    await lab.store.detach(folder)
    assert await content(await lab.store.attach(lab.base, folder, UID), tmp_path) == FRESH
    await lab.store.detach(folder)


async def test_missing_layers_and_damaged_ones(lab: Lab, tmp_path: Path) -> None:
    folder, damaged = lab.folder("ia"), tmp_path / "damaged.lsmt"
    with pytest.raises(ImageError, match=r"a layer of the disk in .* is missing: .*none\.lsmt"):
        await lab.store.attach(Stack(layers=(tmp_path / "none.lsmt",), size=SIZE), folder, UID)
    damaged.write_bytes(lab.base.layers[0].read_bytes()[:-100])
    with pytest.raises(ImageError, match=r"damaged\.lsmt"):
        await lab.store.attach(Stack(layers=(damaged,), size=SIZE), folder, UID)
    with pytest.raises(ImageError, match="a layer of memory image x is missing"):
        await lab.store.open_memory("x", Stack(layers=(tmp_path / "none.lsmt",), size=SIZE), "ia")
    assert list(folder.iterdir()) == []


async def test_a_cancelled_attach_leaves_nothing_once_detached(lab: Lab) -> None:
    folder = lab.folder("ia")
    for delay in (0, 0.0005, 0.002, 0.005):
        attaching = asyncio.create_task(lab.store.attach(lab.base, folder, UID))
        await asyncio.sleep(delay)
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
        await lab.store.detach(folder)
    disk = await lab.store.attach(lab.base, folder, UID)
    await lab.store.detach(folder)
    assert not disk.path.exists()
    assert list(folder.iterdir()) == []


async def test_a_disk_in_use_survives_the_server(lab: Lab, tmp_path: Path) -> None:
    folder = lab.folder("ia")
    disk = await lab.store.attach(lab.base, folder, UID)
    await io(disk, "write -P 0x44 0 64k")
    store = await lab.restarted(folder)
    again = await store.open(folder)
    assert again == disk
    assert await content(again, tmp_path) == b"\x44" * 65536 + bytes(SIZE - 65536)
    await store.detach(folder)
    assert not disk.path.exists()


async def test_what_is_gone_cannot_be_opened(lab: Lab) -> None:
    folder = lab.folder("ia")
    with pytest.raises(ImageError, match="gone"):
        await lab.store.open(folder)
    with pytest.raises(ImageError, match="no disk"):
        await lab.store.lost(folder)


async def test_a_disk_that_works_is_not_lost(lab: Lab) -> None:
    folder = lab.folder("ia")
    await lab.store.attach(lab.base, folder, UID)
    waiting = asyncio.create_task(lab.store.lost(folder))
    done, _ = await asyncio.wait((waiting,), timeout=0.05)
    assert not done
    waiting.cancel()
    await lab.store.detach(folder)


async def test_many_at_once(lab: Lab, tmp_path: Path) -> None:
    folders = [lab.folder(f"i{number}") for number in range(24)]
    disks = await asyncio.gather(*(lab.store.attach(lab.base, folder, UID) for folder in folders))
    assert len({disk.path for disk in disks}) == len(disks)
    await asyncio.gather(*(io(disk, f"write -P {n + 1} 0 4k") for n, disk in enumerate(disks[:4])))
    for number, disk in enumerate(disks[:4]):
        assert (await content(disk, tmp_path))[:4096] == bytes([number + 1]) * 4096
    await asyncio.gather(*(lab.store.detach(folder) for folder in folders))
    assert not any(disk.path.exists() for disk in disks)


async def test_a_sealed_disk_goes_on_and_its_layers_are_known_also_after_the_server(lab: Lab, tmp_path: Path) -> None:
    folder, layer = lab.folder("ia"), lab.settings.home / "sealed.lsmt"
    disk = await lab.store.attach(lab.base, folder, UID)
    assert await lab.store.layers(folder) == lab.base.layers
    await io(disk, "write -P 0x11 0 64k")
    await lab.store.seal(folder, layer)
    assert await lab.store.layers(folder) == (*lab.base.layers, layer)
    await io(disk, "write -P 0x22 0 4k")
    store = await lab.restarted(folder)
    await store.open(folder)
    assert await store.layers(folder) == (*lab.base.layers, layer)
    await store.detach(folder)

    sealed = Stack(layers=(*lab.base.layers, layer), size=SIZE)
    await store.make_durable([layer])
    other = await store.attach(sealed, lab.folder("ib"), UID)
    assert (await content(other, tmp_path))[: 1 << 16] == b"\x11" * (1 << 16)
    await store.detach(lab.settings.sandboxes_dir / "ib")
    with pytest.raises(ImageError, match="no disk is attached"):
        await store.seal(folder, tmp_path / "again")


async def test_runs_of_layers_are_folded(lab: Lab, tmp_path: Path) -> None:
    folder, layers = lab.folder("ia"), [lab.settings.home / f"{n}.lsmt" for n in range(3)]
    disk = await lab.store.attach(lab.base, folder, UID)
    for number, layer in enumerate(layers):
        await io(disk, f"write -P {number + 1} {number * 4096} 8k")
        await lab.store.seal(folder, layer)
    before = await content(disk, tmp_path)
    folded = lab.settings.home / "folded.lsmt"
    await lab.store.compact_disk(folder, 1, 4, folded)
    assert await lab.store.layers(folder) == (*lab.base.layers, folded)
    assert await content(disk, tmp_path) == before
    await lab.store.detach(folder)
    whole = lab.settings.home / "whole.lsmt"
    await lab.store.compact([*lab.base.layers, *layers], whole, base=True)
    again = await lab.store.attach(Stack(layers=(whole,), size=SIZE), folder, UID)
    assert await content(again, tmp_path) == before
    await lab.store.detach(folder)


async def test_durable_files_must_be_there(lab: Lab, tmp_path: Path) -> None:
    await lab.store.make_durable([*lab.base.layers])
    with pytest.raises(ImageError, match=r"none\.lsmt cannot be brought to stable storage"):
        await lab.store.make_durable([tmp_path / "none.lsmt"])


async def test_a_memory_image_is_one_file_for_all_its_users(lab: Lab) -> None:
    one, other = await asyncio.gather(*(lab.store.open_memory("x", lab.base, user) for user in ("ia", "ib")))
    assert one == other
    assert one.stat().st_mode & 0o777 == 0o444
    assert one.read_bytes() == FRESH
    for user in ("ia", "ia", "ib", "never"):
        await lab.store.close_memory("x", user)
    await lab.store.close_memory("never", "ia")
    node = one.stat().st_ino
    again = await lab.store.open_memory("x", lab.base, "ic")
    assert again.stat().st_ino == node
    with again.open("rb"):
        assert resident(again) == SIZE  # what the others have read is still in the kernel's cache
    await lab.store.close_memory("x", "ic")


def resident(path: Path) -> int:
    """Bytes of a file in the page cache."""
    done = subprocess.run(["fincore", "--bytes", "--json", path], capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["fincore"][0]["res"])


async def test_memory_in_use_survives_the_server(lab: Lab) -> None:
    used, given_up = [await lab.store.open_memory(name, lab.base, "ia") for name in ("x", "y")]
    node = used.stat().st_ino
    store = await lab.restarted(memory=["x", "gone"])
    assert not given_up.exists()
    assert await store.open_memory("x", lab.base, "ia") == used
    assert used.stat().st_ino == node
    await store.close_memory("x", "ia")
    await lab.restarted()
    assert not used.exists()


async def test_unused_memory_is_kept_up_to_a_number_and_while_its_layers_are_there(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "KEPT", 2)
    paths = {name: await lab.store.open_memory(name, lab.base, "ia") for name in "abcd"}
    for name in "bcad":
        await lab.store.close_memory(name, "ia")
    await until(lambda: [name for name, path in paths.items() if path.exists()] == ["a", "d"])

    stack = await lab.layer(b"other" * 4096)
    other = await lab.store.open_memory("other", stack, "ia")
    link = lab.settings.home / "link"
    os.link(stack.layers[0], link)
    stack.layers[0].unlink()
    await lab.store.close_memory("other", "ia")
    await lab.store.open_memory("other", Stack(layers=(link,), size=stack.size), "ia")
    assert other.exists()  # another checkpoint has the layer
    link.unlink()
    await lab.store.close_memory("other", "ia")
    await until(lambda: not other.exists())


async def test_a_cancelled_opening_of_memory_leaves_it_usable(lab: Lab) -> None:
    for delay in (0, 0.0005, 0.002):
        opening = asyncio.create_task(lab.store.open_memory("x", lab.base, "ia"))
        await asyncio.sleep(delay)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    assert (await lab.store.open_memory("x", lab.base, "ib")).read_bytes() == FRESH
    await lab.store.close_memory("x", "ib")


async def test_a_server_starts_over_a_dead_daemon(lab: Lab) -> None:
    """Its mount is dead too; what it served is gone, and can be made again."""
    folder = lab.folder("ia")
    await lab.store.attach(lab.base, folder, UID)
    path = await lab.store.open_memory("x", lab.base, "ia")
    await lab.store.aclose()
    pid = int(json.loads(Places.of_home(lab.settings.home).pid_file.read_text())["pid"])
    watched = Process(pid)
    os.kill(pid, signal.SIGKILL)
    await watched.wait()
    watched.close()
    with pytest.raises(OSError, match="not connected"):
        path.stat()
    lab.store = make_store(lab.settings)
    await lab.store.start([folder], ["x"])
    with pytest.raises(ImageError, match="gone"):
        await lab.store.open(folder)
    await lab.store.detach(folder)
    assert (await lab.store.open_memory("x", lab.base, "ia")).read_bytes() == FRESH
    await lab.store.close_memory("x", "ia")


async def test_what_a_dead_daemon_served_is_lost_and_can_be_made_again(lab: Lab) -> None:
    folder = lab.folder("ia")
    await lab.store.attach(lab.base, folder, UID)
    await lab.store.open_memory("x", lab.base, "ia")
    losing = asyncio.create_task(lab.store.lost(folder))
    pid = int(json.loads(Places.of_home(lab.settings.home).pid_file.read_text())["pid"])
    os.kill(pid, signal.SIGKILL)
    assert f"aenv-blockd (pid {pid}) was killed by signal 9" in await losing
    again = await lab.store.open_memory("x", lab.base, "ib")
    assert again.read_bytes() == FRESH
    await lab.store.close_memory("x", "ia")  # who used the lost one
    assert again.exists()
    await lab.store.close_memory("x", "ib")
    await lab.store.detach(folder)
    assert list(folder.iterdir()) == []


async def test_a_captured_guest_is_an_image_again_and_its_pages_are_shared(lab: Lab) -> None:
    image = await lab.store.open_memory("x", lab.base, "ia")
    with guest(image) as first, guest(image) as second:
        for one in (first, second):
            one.touch()
        # The same page of physical memory behind both mappings, but where one wrote: nothing is copied for a reader.
        written, shared = MIB // PAGE, 0
        assert first.frame(shared) == second.frame(shared) != 0
        first.write(MIB, b"dirty")
        assert first.frame(written) != second.frame(written)
        output = lab.settings.home / "captured.lsmt"
        found = await take(lab.store, first.memory, lab.base, 1, output)
        assert (found.dirty_pages, found.data_pages) == (1, 1)
    captured = Stack(layers=(*lab.base.layers, output), size=SIZE)
    wanted = bytearray(FRESH)
    wanted[MIB : MIB + 5] = b"dirty"
    assert (await lab.store.open_memory("y", captured, "ib")).read_bytes() == wanted
    for name, user in (("x", "ia"), ("y", "ib")):
        await lab.store.close_memory(name, user)


async def test_memory_is_restored_over_its_image_and_no_one_elses(lab: Lab) -> None:
    home = lab.settings.home
    image = await lab.store.open_memory("x", lab.base, "ia")
    wanted = bytearray(FRESH)
    wanted[: 2 * PAGE] = b"\0" * PAGE + b"s" * PAGE
    wanted[MIB : MIB + 6] = b"second"
    with guest(image) as first:
        first.write(0, b"f" * 2 * PAGE)
        first.write(MIB, b"first")
        await take(lab.store, first.memory, lab.base, 1, home / "1.lsmt")
        base = Stack(layers=(*lab.base.layers, home / "1.lsmt"), size=SIZE)
        first.write(0, wanted[: 2 * PAGE])  # zeros over what the image and the first layer hold
        first.write(MIB, b"second")
        await take(lab.store, first.memory, base, 1, home / "2.lsmt")
    layers = [home / "1.lsmt", home / "2.lsmt"]
    with guest(image) as second, guest(image) as other:
        await lab.store.restore(second.memory, layers)
        assert second.read() == wanted
        assert image.read_bytes() == other.read() == FRESH
        # It is the guest's own from then on: a capture finds it.
        found = await take(lab.store, second.memory, lab.base, 1, home / "again.lsmt")
        assert (found.dirty_pages, found.data_pages, found.zero_pages) == (3, 2, 1)
    await lab.store.close_memory("x", "ia")


async def test_what_cannot_be_restored_is_told(lab: Lab) -> None:
    home = lab.settings.home
    image = await lab.store.open_memory("x", lab.base, "ia")
    with guest(image) as vmm:
        vmm.write(MIB, b"text")
        layer = home / "layer.lsmt"
        await take(lab.store, vmm.memory, lab.base, 1, layer)
        damaged = home / "damaged.lsmt"
        damaged.write_bytes(layer.read_bytes()[:-PAGE])
        for memory, layers, why in (
            (vmm.memory, [damaged], "damaged.lsmt"),
            (vmm.memory, [home / "none.lsmt"], "none.lsmt"),
            (vmm.memory, [*(await lab.layer(bytes(MIB) + b"x" * MIB)).layers], "an image of 2097152 bytes"),
            (dataclasses.replace(vmm.memory, start_time=1), [layer], "another process"),
            (dataclasses.replace(vmm.memory, ranges=(MemoryRange(vmm.address, MIB, 0),)), [layer], "has no mapping"),
            (dataclasses.replace(vmm.memory, ranges=(MemoryRange(PAGE, SIZE, 0),)), [layer], "is not there"),
        ):
            with pytest.raises(ImageError, match=why):
                await lab.store.restore(memory, layers)
    with pytest.raises(ImageError, match="no process"):
        await lab.store.restore(vmm.memory, [layer])
    await lab.store.close_memory("x", "ia")


async def test_a_blank_disk_is_bound_and_then_like_any_other(lab: Lab, tmp_path: Path) -> None:
    folder, layer = lab.folder("ia"), lab.settings.home / "sealed.lsmt"
    blank = await lab.store.attach_blank(SIZE, folder, UID)
    found = blank.path.stat()
    assert (blank.size, found.st_uid, found.st_mode & 0o777) == (SIZE, UID, 0o600)
    assert await content(blank, tmp_path) == bytes(SIZE)
    with pytest.raises(AssertionError, match="write failed: Input/output error"):
        await io(blank, "write -P 0x11 0 4k")
    with blank.path.open("rb", buffering=0) as opened:
        await lab.store.bind(lab.base, folder)
        assert opened.read() == FRESH
    await io(blank, "write -P 0x11 0 64k")
    await lab.store.seal(folder, layer)
    store = await lab.restarted(folder)
    assert await store.open(folder) == blank
    assert await store.layers(folder) == (*lab.base.layers, layer)
    with pytest.raises(ImageError, match="has its layers already"):
        await store.bind(lab.base, folder)
    await store.detach(folder)
    assert list(folder.iterdir()) == []


async def test_what_stays_blank_is_given_up(lab: Lab) -> None:
    folders = [lab.folder(name) for name in ("ia", "ib")]
    disks = [await lab.store.attach_blank(SIZE, folder, UID) for folder in folders]
    await lab.store.detach(folders[0])
    assert list(folders[0].iterdir()) == []
    with pytest.raises(ImageError, match="no disk is attached"):
        await lab.store.bind(lab.base, folders[0])
    # By the next server also where a row names it.
    store = await lab.restarted(*folders)
    assert not disks[1].path.exists()
    with pytest.raises(ImageError, match="gone"):
        await store.open(folders[1])
    await store.detach(folders[1])


async def test_layers_that_do_not_do_leave_a_disk_blank(lab: Lab, tmp_path: Path) -> None:
    folder, damaged = lab.folder("ia"), tmp_path / "damaged.lsmt"
    damaged.write_bytes(lab.base.layers[0].read_bytes()[:-100])
    disk = await lab.store.attach_blank(SIZE, folder, UID)
    wrong = [
        (Stack(layers=(tmp_path / "none.lsmt",), size=SIZE), r"none\.lsmt"),
        (Stack(layers=(damaged,), size=SIZE), r"damaged\.lsmt"),
        (Stack(layers=lab.base.layers, size=2 * SIZE), f"attached with {SIZE} bytes, not {2 * SIZE}"),
    ]
    for stack, why in wrong:
        with pytest.raises(ImageError, match=why):
            await lab.store.bind(stack, folder)
    await lab.store.bind(lab.base, folder)
    assert await content(disk, tmp_path) == FRESH
    await lab.store.detach(folder)


async def test_cancelled_calls_for_blank_disks_leave_nothing(lab: Lab) -> None:
    folder = lab.folder("ia")
    for delay in (0, 0.0005, 0.001, 0.002):
        attaching = asyncio.create_task(lab.store.attach_blank(SIZE, folder, UID))
        await asyncio.sleep(delay)
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
        await lab.store.detach(folder)
    await lab.store.attach_blank(SIZE, folder, UID)
    binding = asyncio.create_task(lab.store.bind(lab.base, folder))
    await asyncio.sleep(0)
    binding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await binding
    await lab.store.detach(folder)
    assert list(folder.iterdir()) == []


async def test_a_dead_daemon_takes_blank_disks_with_it(lab: Lab) -> None:
    folder = lab.folder("ia")
    await lab.store.attach_blank(SIZE, folder, UID)
    losing = asyncio.create_task(lab.store.lost(folder))
    os.kill(int(json.loads(Places.of_home(lab.settings.home).pid_file.read_text())["pid"]), signal.SIGKILL)
    assert "was killed by signal 9" in await losing
    with pytest.raises(ImageError):
        await lab.store.bind(lab.base, folder)
    await lab.store.detach(folder)
    assert list(folder.iterdir()) == []


async def test_a_guest_that_goes_on_does_not_change_what_is_captured_of_it(lab: Lab) -> None:
    image = await lab.store.open_memory("x", lab.base, "ia")
    with guest(image) as one:
        one.write(MIB, b"before")
        given_up = lab.settings.home / "given-up.lsmt"
        capture = await lab.store.begin_capture(one.memory, lab.base, 1, given_up, write_later=True)
        await capture.abandon()
        await capture.abandon()
        with pytest.raises(ImageError, match="given up"):
            await capture.finish()
        output = lab.settings.home / "captured.lsmt"
        capture = await lab.store.begin_capture(one.memory, lab.base, 1, output, write_later=True)
        one.write(MIB, b"frozen")  # until it is copied
        await capture.copy()
        one.write(MIB, b"behind")
        one.write(2 * MIB, b"behind")
        found = await capture.finish()
        assert (found.dirty_pages, found.data_pages) == (1, 1)
        await capture.abandon()  # changes nothing any more
    assert output.exists()
    assert not given_up.exists()
    captured = Stack(layers=(*lab.base.layers, output), size=SIZE)
    wanted = bytearray(FRESH)
    wanted[MIB : MIB + 6] = b"frozen"
    assert (await lab.store.open_memory("y", captured, "ib")).read_bytes() == wanted
    for name, user in (("x", "ia"), ("y", "ib")):
        await lab.store.close_memory(name, user)


async def test_a_client_or_daemon_that_ends_in_the_middle_of_a_capture_leaves_nothing(lab: Lab) -> None:
    image = await lab.store.open_memory("x", lab.base, "ia")
    places = Places.of_home(lab.settings.home)
    pid = int(json.loads(places.pid_file.read_text())["pid"])
    output = lab.settings.home / "captured.lsmt"

    def unfinished() -> bool:
        """Whether the daemon still has the file without a name."""
        with suppress(FileNotFoundError):
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
            return any(link.startswith(str(lab.settings.home / "#")) for link in links)
        return True  # one was closed meanwhile; look again

    with guest(image) as one:
        one.write(MIB, b"dirty")
        client = BlockdClient(places.socket)
        left = await StagedCapture.begin(client, one.memory, output, base=layers_of(lab.base), mapped=1, later=True)
        assert unfinished()
        await client.aclose()
        await left.abandon()
        await until(lambda: not unfinished())
        assert not output.exists()

        capture = await lab.store.begin_capture(one.memory, lab.base, 1, output, write_later=True)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ImageError):
            await capture.copy()
        with pytest.raises(ImageError):
            await capture.finish()
        await capture.abandon()
        assert one.process.poll() is None
    assert not output.exists()

    async def served() -> bool:
        """By the next daemon, once the end of this one has been noticed."""
        with suppress(OSError):
            return (await lab.store.open_memory("x", lab.base, "ib")).read_bytes() == FRESH
        return False

    async with asyncio.timeout(20):
        while not await served():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)
    await lab.store.close_memory("x", "ib")


class Guest:
    """A process that maps a memory image privately, as a VMM does, and does as it is told."""

    _CODE = """
import ctypes, mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
memory = mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), flush=True)
for line in sys.stdin:
    at, text = line.split()
    if text == "touch":
        sum(memory[at] for at in range(0, len(memory), 4096))
    else:
        memory[int(at) : int(at) + len(text) // 2] = bytes.fromhex(text)
    print(flush=True)
"""

    def __init__(self, image: Path) -> None:
        argv = [sys.executable, "-c", self._CODE, image]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.address, size = map(int, self._answer().split())
        known = identify(self.process.pid)
        assert known is not None
        self.memory = GuestMemory(
            pid=known.pid, start_time=known.start_time, ranges=(MemoryRange(self.address, size, 0),), size=size
        )

    def _answer(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def _tell(self, at: int, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{at} {text}\n".encode())
        self.process.stdin.flush()
        assert self._answer() == b"\n"

    def touch(self) -> None:
        """Read all of it."""
        self._tell(0, "touch")

    def write(self, at: int, text: bytes | bytearray) -> None:
        self._tell(at, text.hex())

    def read(self) -> bytes:
        """All that it holds now, whoever wrote it."""
        with Path(f"/proc/{self.memory.pid}/mem").open("rb", buffering=0) as opened:
            return os.pread(opened.fileno(), self.memory.size, self.address)

    def frame(self, page: int) -> int:
        """The number of the physical page behind a page of the mapping (proc_pid_pagemap(5))."""
        with Path(f"/proc/{self.process.pid}/pagemap").open("rb", buffering=0) as pagemap:
            entry = os.pread(pagemap.fileno(), 8, (self.address // PAGE + page) * 8)
        return int.from_bytes(entry, sys.byteorder) & ((1 << 55) - 1)


async def take(store: ImageStore, memory: GuestMemory, base: Stack, mapped: int, output: Path) -> Captured:
    """All of a capture, of a guest that stands still."""
    capture = await store.begin_capture(memory, base, mapped, output, write_later=False)
    await capture.copy()
    return await capture.finish()


@contextmanager
def guest(image: Path) -> Iterator[Guest]:
    made = Guest(image)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what gives no event of its own."""
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
