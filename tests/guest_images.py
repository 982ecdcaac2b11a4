"""Kernel images and modules of a few bytes, in the forms distributions ship them."""

import gzip
import lzma
import struct
import subprocess
from pathlib import Path


def elf_kernel(*, note: int | None = 18, filler: bytes = b"kernel text " * 500) -> bytes:
    """A 64-bit x86 ELF file with one PT_NOTE segment: a foreign note, then Xen's note of the given type."""
    notes = struct.pack("<III4s8s", 4, 8, 3, b"GNU\0", bytes(8))
    if note is not None:
        notes += struct.pack("<III4sQ", 4, 8, note, b"Xen\0", 0x1000000)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, 0x1000000, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(notes), len(notes), 4)
    return header + segment + notes + filler


def compressed(kind: str, data: bytes) -> bytes:
    """`data` as the kernel's build compresses it: `gzip`, `xz`, `lz4` (legacy frame) or `zstd`."""
    if kind == "gzip":
        return gzip.compress(data)
    if kind == "xz":
        return lzma.compress(data, check=lzma.CHECK_CRC32)
    tool = {"lz4": ["lz4", "-l", "-9", "-c"], "zstd": ["zstd", "-19", "-c"]}[kind]
    return subprocess.run(tool, input=data, capture_output=True, check=True).stdout


def bzimage(kind: str, kernel: bytes, *, protocol: int = 0x20F, setup_sectors: int = 3, offset: int = 0x2CC) -> bytes:
    """A bzImage: setup sectors with their header, protected-mode code of `offset` bytes, the payload, a trailer."""
    payload = compressed(kind, kernel)
    if kind != "gzip":
        payload += struct.pack("<I", len(kernel))
    setup = bytearray(((setup_sectors or 4) + 1) * 512)
    setup[0x1F1] = setup_sectors
    setup[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", setup, 0x206, protocol)
    struct.pack_into("<II", setup, 0x248, offset, len(payload))
    return bytes(setup) + b"\x90" * offset + payload + b"after the payload"


def module(depends: str = "", *, other: str = "license=GPL") -> bytes:
    """An ELF object with a .modinfo section."""
    info = f"{other}\0depends={depends}\0vermagic=6.12\0".encode()
    names = b"\0.modinfo\0.shstrtab\0"
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 1, 62, 1, 0, 0, 64 + len(info) + len(names), 0, 64, 0, 0, 64, 3, 2
    )
    sections = (
        bytes(64)
        + struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, 64, len(info), 0, 0, 1, 0)
        + struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, 64 + len(info), len(names), 0, 0, 1, 0)
    )
    return header + info + names + sections


def module_tree(root: Path, modules: dict[str, bytes], builtin: tuple[str, ...] = ()) -> Path:
    """A /lib/modules/<release> with these files (paths under `kernel/`) and built-in modules."""
    for path, content in modules.items():
        file = root / "kernel" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (root / "modules.builtin").write_text("".join(f"kernel/{path}\n" for path in builtin))
    return root
