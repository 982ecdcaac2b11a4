"""Disks without the data plane: a qcow2 overlay per sandbox over the template's raw ext4 image.

The overlay of a fresh disk is the same few hundred kilobytes for every sandbox of a template, so `prepare` makes it
once with qemu-img and `attach` copies it. All sandboxes share the raw image through the page cache.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from aenv.errors import ImageError, InsufficientStorage, NotFound
from aenv.images.protocol import Disk
from aenv.threads import to_its_end

ROOTFS = "rootfs.ext4"
OVERLAY = "overlay.qcow2"
DISK = "disk.qcow2"


async def prepare(directory: Path, final: Path) -> None:
    """Make the pristine overlay beside the root file system in `directory`, which will be published as `final`.

    Raises ImageError with what qemu-img said.
    """
    size = (directory / ROOTFS).stat().st_size
    command = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", str(final / ROOTFS)]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, str(directory / OVERLAY), str(size), stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError as error:
        raise ImageError("qemu-img is not installed; install the package qemu-utils") from error
    _, stderr = await process.communicate()
    if process.returncode != 0:
        raise ImageError(f"qemu-img create failed: {stderr.decode(errors='replace').strip()}")


class PlainImages:
    """`ImageStore` over the folders of a template directory."""

    def __init__(self, templates_dir: Path) -> None:
        self._templates = templates_dir

    async def start(self, in_use: Iterable[Path]) -> None:
        pass  # folders without a sandbox are removed with all they hold

    async def attach(self, image: str, directory: Path, uid: int) -> Disk:
        return await to_its_end(self._attach, image, directory, uid)

    def _attach(self, image: str, directory: Path, uid: int) -> Disk:
        source = self._templates / image
        target = directory / DISK
        try:
            shutil.copyfile(source / OVERLAY, target)
            target.chmod(0o600)
            os.chown(target, uid, uid)
            return self._disk(image, directory)
        except OSError as error:
            target.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InsufficientStorage(f"no space for a new disk in {directory}: free some on the host") from error
            if isinstance(error, FileNotFoundError) and not source.exists():
                raise NotFound(f"image '{image}' does not exist on this node") from error
            raise ImageError(f"cannot make a disk of image '{image}' in {directory}: {error}") from error

    async def open(self, image: str, directory: Path) -> Disk:
        try:
            return await asyncio.to_thread(self._disk, image, directory)
        except OSError as error:
            raise ImageError(f"the disk in {directory} is gone: {error}") from error

    def _disk(self, image: str, directory: Path) -> Disk:
        backing = self._templates / image / ROOTFS
        path = directory / DISK
        path.stat()
        return Disk(path=path, format="qcow2", size=backing.stat().st_size, backing=backing)

    async def lost(self, directory: Path) -> str:
        if not await asyncio.to_thread((directory / DISK).exists):
            raise ImageError(f"no disk is attached in {directory}")
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def detach(self, directory: Path) -> None:
        await asyncio.to_thread((directory / DISK).unlink, missing_ok=True)

    async def aclose(self) -> None:
        pass
