import struct

import pytest

from aenv.errors import ProvisionError
from aenv.guest.kernel import decompress, extract_vmlinux, require_pvh
from guest_images import bzimage, compressed, elf_kernel

KINDS = ["gzip", "xz", "lz4", "zstd"]
ARM64 = bytes(56) + b"ARM\x64" + b"text" * 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup_sectors", [0, 3, 39])
def test_vmlinux_comes_out_of_a_bzimage(kind: str, setup_sectors: int) -> None:
    kernel = elf_kernel()
    assert extract_vmlinux(bzimage(kind, kernel, setup_sectors=setup_sectors)) == kernel


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_payload_is_refused(kind: str) -> None:
    image = bytearray(bzimage(kind, elf_kernel(filler=bytes(range(256)) * 40), offset=0))
    start, length = 4 * 512, struct.unpack_from("<I", image, 0x24C)[0]
    image[start + length // 2 : start + length - 8] = bytes(length - 8 - length // 2)
    with pytest.raises(ProvisionError):
        extract_vmlinux(bytes(image))


@pytest.mark.parametrize("kind", KINDS)
def test_image_that_ends_early_is_refused(kind: str) -> None:
    image = bzimage(kind, elf_kernel())
    with pytest.raises(ProvisionError, match="ends inside its payload"):
        extract_vmlinux(image[:-60])


def test_wrong_size_after_decompression_is_refused() -> None:
    image = bytearray(bzimage("xz", elf_kernel()))
    end = 4 * 512 + 0x2CC + struct.unpack_from("<I", image, 0x24C)[0]
    image[end - 4 : end] = struct.pack("<I", 17)
    with pytest.raises(ProvisionError, match="its image says 17"):
        extract_vmlinux(bytes(image))


def test_old_boot_protocol_is_refused() -> None:
    with pytest.raises(ProvisionError, match=r"2\.07"):
        extract_vmlinux(bzimage("gzip", elf_kernel(), protocol=0x207))


@pytest.mark.parametrize("note", [None, 17])
def test_kernel_without_pvh_entry_is_refused(note: int | None) -> None:
    with pytest.raises(ProvisionError, match="CONFIG_PVH"):
        extract_vmlinux(bzimage("gzip", elf_kernel(note=note)))


def test_other_executables_are_no_kernel() -> None:
    for image in (b"", b"\x7fELF\x01\x01" + bytes(100), b"#!/bin/sh\n" * 10):
        with pytest.raises(ProvisionError, match="64-bit x86 ELF"):
            require_pvh(image.ljust(64, b"\0"))


def test_elf_with_headers_beyond_its_end_is_refused() -> None:
    kernel = bytearray(elf_kernel())
    struct.pack_into("<Q", kernel, 32, 1 << 40)
    with pytest.raises(ProvisionError, match="damaged"):
        require_pvh(bytes(kernel))


def test_arm64_image_plain_gzipped_and_in_zboot() -> None:
    assert extract_vmlinux(ARM64) == ARM64
    assert extract_vmlinux(compressed("gzip", ARM64)) == ARM64
    payload = compressed("zstd", ARM64)
    zboot = b"MZ\0\0zimg" + struct.pack("<II", 64, len(payload)) + bytes(8) + b"zstd" + bytes(36) + payload + bytes(99)
    assert extract_vmlinux(zboot) == ARM64


def test_unknown_images_and_compressions_are_named() -> None:
    with pytest.raises(ProvisionError, match="neither an x86 bzImage nor an arm64 Image"):
        extract_vmlinux(b"whatever" * 200)
    with pytest.raises(ProvisionError, match="425a68"):
        decompress(b"BZh91AY")
