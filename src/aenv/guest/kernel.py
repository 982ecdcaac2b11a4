"""The guest kernel: the distribution's cloud kernel package, and from it the image QEMU boots directly.

On x86 that is `vmlinux`, which a bzImage carries compressed at the place its setup header names (Linux
Documentation/arch/x86/boot.rst, protocol 2.08 and later); on arm64 it is `Image`, plain, gzipped, or inside an EFI
zboot image (drivers/firmware/efi/libstub/zboot-header.S).
"""

import asyncio
import lzma
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

from aenv.distro import packages
from aenv.distro.packages import Package
from aenv.distro.sources import host_release
from aenv.errors import ProvisionError

_GZIP = b"\x1f\x8b\x08"
_XZ = b"\xfd7zXZ\x00"
_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_ZSTD = b"\x28\xb5\x2f\xfd"

_PT_NOTE = 4
_XEN_ELFNOTE_PHYS32_ENTRY = 18
"""The note with the entry point of a direct (PVH) boot: Xen's public/elfnote.h."""

_DECOMPRESS_DEADLINE = 120


@dataclass(frozen=True, slots=True)
class KernelTree:
    """An unpacked kernel: `release` as `uname -r` in the guest, the boot image, and its /lib/modules/<release>."""

    release: str
    image: Path
    modules: Path


async def resolve() -> list[Package]:
    """The packages with the newest cloud kernel this machine's apt sources offer, and its modules.

    Raises ProvisionError where there are none.
    """
    try:
        release = await asyncio.to_thread(host_release)
    except (OSError, ValueError) as error:
        raise ProvisionError(str(error)) from error
    arch = await packages.architecture()
    name = f"linux-image-cloud-{arch}" if release.id == "debian" else "linux-image-virtual"
    found: list[Package] = []
    pending: list[tuple[str, str | None]] = [(name, None)]
    while pending:
        package = await packages.newest(*pending.pop(0))
        if package.name != name:
            found.append(package)
        known = {package.name for package in found}
        wanted = package.dependencies(r"linux-(image|modules|binary)-\d.*")
        pending += [dependency for dependency in wanted if dependency[0] not in known]
    if not found:
        raise ProvisionError(f"{name} depends on no kernel image; its apt source is not the distribution's own")
    return found


async def unpack(found: list[Package], cache: Path, directory: Path) -> KernelTree:
    """Download the packages into `cache` and unpack them in `directory`."""
    for package in found:
        await packages.unpack(await packages.download(package, cache), directory)
    return await asyncio.to_thread(_find, directory)


def _find(directory: Path) -> KernelTree:
    images = sorted((directory / "boot").glob("vmlinu[xz]-*"))
    if not images:
        raise ProvisionError(f"the kernel packages contain no /boot/vmlinuz: {directory}")
    release = images[0].name.partition("-")[2]
    for modules in (directory / "lib/modules" / release, directory / "usr/lib/modules" / release):
        if modules.is_dir():
            return KernelTree(release, images[0], modules)
    raise ProvisionError(f"the kernel packages contain no modules of {release}")


def extract_vmlinux(image: bytes) -> bytes:
    """The bootable kernel in a distribution's `vmlinuz`: ELF with a PVH entry for x86, Image for arm64.

    Runs decompressors: not for the event loop. Raises ProvisionError if the image is of no known form or damaged.
    """
    if image[0x202:0x206] == b"HdrS":
        kernel = _from_bzimage(image)
        require_pvh(kernel)
        return kernel
    if image[4:8] == b"zimg":
        offset, size = struct.unpack_from("<II", image, 8)
        image = decompress(image[offset : offset + size])
    elif image.startswith(_GZIP):
        image = decompress(image)
    if image[56:60] != b"ARM\x64":
        raise ProvisionError("the kernel is neither an x86 bzImage nor an arm64 Image")
    return image


def _from_bzimage(image: bytes) -> bytes:
    (version,) = struct.unpack_from("<H", image, 0x206)
    if version < 0x208:
        raise ProvisionError(f"bzImage of boot protocol {version >> 8}.{version & 0xFF:02}; 2.08 or later is needed")
    setup_sectors = image[0x1F1] or 4
    payload_offset, payload_length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + payload_offset
    payload = image[start : start + payload_length]
    if len(payload) != payload_length or payload_length < 8:
        raise ProvisionError(f"bzImage ends inside its payload ({len(payload)} of {payload_length} bytes)")
    if payload.startswith(_GZIP):
        return decompress(payload)
    # The build appends the size after decompression, which gzip has in its own trailer.
    (size,) = struct.unpack("<I", payload[-4:])
    kernel = decompress(payload[:-4])
    if len(kernel) != size:
        raise ProvisionError(f"the kernel decompressed to {len(kernel)} bytes, its image says {size}")
    return kernel


def decompress(data: bytes) -> bytes:
    """Decompress by magic: gzip and xz here, lz4 (legacy frame) and zstd with the distribution's tools."""
    if data.startswith((_GZIP, _XZ)):
        # Not the one-shot functions: a bzImage's payload may be followed by padding.
        stream = zlib.decompressobj(wbits=31) if data.startswith(_GZIP) else lzma.LZMADecompressor()
        try:
            plain = stream.decompress(data)
        except (zlib.error, lzma.LZMAError) as error:
            raise ProvisionError(f"the compressed data is damaged: {error}") from error
        if not stream.eof:
            raise ProvisionError("the compressed data is cut short")
        return plain
    if data.startswith(_LZ4_LEGACY):
        return _pipe("lz4", data)
    if data.startswith(_ZSTD):
        return _pipe("zstd", data)
    raise ProvisionError(f"compression with magic {data[:6].hex()} is not known (gzip, xz, lz4 and zstd are)")


def _pipe(tool: str, data: bytes) -> bytes:
    if shutil.which(tool) is None:
        raise ProvisionError(f"{tool} is not installed; run: apt-get install {tool}")
    done = subprocess.run(
        [tool, "-d", "-c"], input=data, capture_output=True, check=False, timeout=_DECOMPRESS_DEADLINE
    )
    if done.returncode:
        raise ProvisionError(f"{tool} cannot decompress it: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def require_pvh(kernel: bytes) -> None:
    """Raise ProvisionError unless `kernel` is a 64-bit x86 ELF file with the note QEMU's direct boot needs."""
    if kernel[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", kernel, 18) != (62,):
        raise ProvisionError("the image's payload is not a 64-bit x86 ELF kernel")
    try:
        (table,) = struct.unpack_from("<Q", kernel, 32)
        size, count = struct.unpack_from("<HH", kernel, 54)
        for index in range(count):
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", kernel, table + index * size)
            if kind == _PT_NOTE and _has_entry(kernel[offset : offset + length]):
                return
    except struct.error as error:
        raise ProvisionError("the kernel's ELF headers are damaged") from error
    raise ProvisionError("the kernel has no PVH entry (built without CONFIG_PVH): QEMU microvm cannot boot it")


def _has_entry(notes: bytes) -> bool:
    position = 0
    while position + 12 <= len(notes):
        name_size, value_size, kind = struct.unpack_from("<III", notes, position)
        name = notes[position + 12 : position + 12 + name_size]
        if name == b"Xen\0" and kind == _XEN_ELFNOTE_PHYS32_ENTRY:
            return True
        position += 12 + (name_size + 3 & ~3) + (value_size + 3 & ~3)
    return False
