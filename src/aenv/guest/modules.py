"""Kernel modules the guest loads before it has a root disk, in an order in which each finds what it needs.

Packages ship no modules.dep (depmod writes it at installation), so dependencies are read from the modules themselves:
the NUL-separated `key=value` strings of their .modinfo section.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import ProvisionError
from aenv.guest.kernel import decompress

BOOT_MODULES = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng", "ext4")
"""What the guest's devices and root disk need; Debian and Ubuntu build differing parts of it into the kernel."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module's canonical name (underscores) and its decompressed object file."""

    name: str
    data: bytes


def load_order(directory: Path, wanted: tuple[str, ...] = BOOT_MODULES) -> list[Module]:
    """The modules to load for `wanted`, dependencies first, without what is built in.

    `directory` is a /lib/modules/<release>. Reads and decompresses files: not for the event loop. Raises
    ProvisionError if a module is missing.
    """
    files = {canonical(file.name.partition(".ko")[0]): file for file in (directory / "kernel").rglob("*.ko*")}
    builtin = _builtin(directory / "modules.builtin")
    ordered: dict[str, Module] = {}

    def visit(name: str, needed_by: tuple[str, ...]) -> None:
        if name in builtin or name in ordered or name in needed_by:
            return
        if name not in files:
            because = f", which {needed_by[-1]} needs," if needed_by else ""
            raise ProvisionError(f"kernel module {name}{because} is neither built in nor in {directory}")
        data = files[name].read_bytes()
        if files[name].suffix != ".ko":
            data = decompress(data)
        for dependency in dependencies(data):
            visit(dependency, (*needed_by, name))
        ordered[name] = Module(name, data)

    for name in wanted:
        visit(canonical(name), ())
    return list(ordered.values())


def canonical(name: str) -> str:
    """The kernel's own spelling of a module name."""
    return name.replace("-", "_")


def _builtin(file: Path) -> frozenset[str]:
    """Module names in a modules.builtin (one path per line)."""
    if not file.is_file():
        return frozenset()
    return frozenset(canonical(Path(line).name.partition(".ko")[0]) for line in file.read_text().split())


def dependencies(module: bytes) -> list[str]:
    """Canonical names of the modules that must be loaded before this one (its `depends` list).

    Raises ProvisionError if it is no 64-bit little-endian ELF object with a .modinfo.
    """
    found: list[str] = []
    for entry in _section(module, b".modinfo").split(b"\0"):
        key, _, value = entry.decode(errors="replace").partition("=")
        if key == "depends":
            found += [canonical(name) for name in value.split(",") if name]
    return found


def _section(module: bytes, wanted: bytes) -> bytes:
    if module[:6] != b"\x7fELF\x02\x01":
        raise ProvisionError("a kernel module is no 64-bit little-endian ELF object")
    try:
        (table,) = struct.unpack_from("<Q", module, 40)
        size, count, names_index = struct.unpack_from("<HHH", module, 58)
        headers = [struct.unpack_from("<IIQQQQ", module, table + index * size) for index in range(count)]
        names_offset = headers[names_index][4]
    except (struct.error, IndexError) as error:
        raise ProvisionError("a kernel module's ELF headers are damaged") from error
    for name, _, _, _, offset, length in headers:
        start = names_offset + name
        if module[start : start + len(wanted) + 1] == wanted + b"\0":
            return module[offset : offset + length]
    raise ProvisionError(f"a kernel module has no {wanted.decode()} section")
