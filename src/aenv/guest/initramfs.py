"""The guest's initramfs: a newc cpio archive (Linux Documentation/driver-api/early-userspace/buffer-format.rst).

Uncompressed on purpose: it is read from the host's page cache, and decompressing costs an emulated CPU more than it
saves (3 MB: 2.00 s of CPU time to the daemon, 2.10 s with gzip, 2.08 s with zstd). Deterministic: the same content
gives the same bytes.
"""

from collections.abc import Iterable, Mapping

from aenv.guest.modules import Module

_DIRECTORY = 0o040755
_EXECUTABLE = 0o100755
_FILE = 0o100644

_DIRECTORIES = ("dev", "proc", "sys", "newroot", "modules")
"""Mount points of the init, and where it finds modules."""

_PAGE = 4096
"""The archive fills whole pages. Measured with QEMU 10.0's microvm: where its last page is used beyond some 3000 bytes
the kernel hangs at "ACPI: Core revision", whatever the content, so every fourth build of the daemon would not boot."""


def build_initramfs(init: bytes, modules: Iterable[Module]) -> bytes:
    """The archive with `init` as /init and the modules as /modules/NNN-name.ko, to be loaded in the names' order."""
    entries: dict[str, tuple[int, bytes]] = dict.fromkeys(_DIRECTORIES, (_DIRECTORY, b""))
    entries["init"] = (_EXECUTABLE, init)
    for number, module in enumerate(modules):
        entries[f"modules/{number:03}-{module.name}.ko"] = (_FILE, module.data)
    archive = write_cpio(entries)
    return archive + bytes(-len(archive) % _PAGE)  # the kernel skips zeros between and after archives


def write_cpio(entries: Mapping[str, tuple[int, bytes]]) -> bytes:
    """A newc archive of `entries` (path to mode and content), sorted by path, owned by root, without times."""
    archive = bytearray()
    for inode, (path, (mode, content)) in enumerate(sorted(entries.items()), start=1):
        _append(archive, path, inode, mode, content)
    _append(archive, "TRAILER!!!", 0, 0, b"")
    return bytes(archive)


def _append(archive: bytearray, path: str, inode: int, mode: int, content: bytes) -> None:
    name = path.encode() + b"\0"
    links = 2 if mode == _DIRECTORY else 1
    # ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
    fields = (inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name), 0)
    archive += b"070701" + b"".join(b"%08X" % field for field in fields) + name
    archive += bytes(-len(archive) % 4)
    archive += content
    archive += bytes(-len(archive) % 4)
