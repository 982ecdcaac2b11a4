"""An ext4 disk image filled from a directory, sparse and as small as its content."""

import hashlib
import os
import uuid
from pathlib import Path

from aenv.distro.tools import run
from aenv.errors import ProvisionError

_DEADLINE = 300.0
_BLOCK = 1 << 20
_JOURNAL_MB = 16
"""Enough for the few processes of one sandbox; a guest's writes to it are copied with every snapshot."""


async def make(tree: Path, image: Path, disk_mb: int, *, seed: str) -> None:
    """Make `image` of `disk_mb` MiB from the files of `tree` with their owners and modes, and check it.

    `seed` decides the UUID and the directory hash seed. Raises ProvisionError if `tree` does not fit.
    """
    identity = str(uuid.uuid5(uuid.NAMESPACE_OID, seed))
    # The file is new and reads as zeros: inode tables and journal need not be written, not even later by the guest.
    extended = f"root_owner=0:0,hash_seed={identity},assume_storage_prezeroed=1,lazy_itable_init=0,nodiscard"
    await run(
        "mke2fs",
        *("-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "root"),
        *("-U", identity, "-J", f"size={_JOURNAL_MB}", "-E", extended),
        *("-d", tree, image, f"{disk_mb}M"),
        deadline=_DEADLINE,
    )
    try:
        await run("e2fsck", "-f", "-n", image, deadline=_DEADLINE)
    except ProvisionError as error:
        raise ProvisionError(f"the new file system is not clean: {error}") from error


def image_digest(image: Path) -> str:
    """SHA-256 of a sparse image: of each MiB that is not all zeros, its offset (8 bytes, big-endian) and content.

    Holes are skipped, not read; the digest does not depend on where they are. Not for the event loop.
    """
    digest = hashlib.sha256()
    with image.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        offset = 0
        while offset < size:
            try:
                data = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            offset = data - data % _BLOCK
            content = os.pread(file.fileno(), _BLOCK, offset)
            if content.strip(b"\0"):
                digest.update(offset.to_bytes(8, "big") + content)
            offset += _BLOCK
    return digest.hexdigest()
