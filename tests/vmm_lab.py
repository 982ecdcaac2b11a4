"""What tests of the QEMU driver need: guests of a few bytes, network namespaces with taps, specs."""

import contextlib
import itertools
import os
import platform
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aenv.config import default_home
from aenv.errors import ProvisionError
from aenv.guest.provision import GuestBundle, load_bundle
from aenv.images.protocol import Disk
from aenv.vmm.protocol import VmSpec

needs_qemu = pytest.mark.skipif(
    os.geteuid() != 0 or platform.machine() != "x86_64", reason="makes jails and boots x86 code: needs root on x86_64"
)

HALT = bytes.fromhex("fa f4 eb fc".replace(" ", ""))
"""cli; again: hlt; jmp again"""
RESET = bytes.fromhex("0f 01 1d 00 00 20 00 cc".replace(" ", ""))
"""lidt [0x200000] (zeros); int3: a triple fault"""
FLOOD = bytes.fromhex("ee eb fd".replace(" ", ""))
"""again: out dx, al; jmp again"""
HELD = bytes.fromhex("c70500008000 61656e76 c70504008000 6d627831 c70508008000 01000000")
"""At 8 MiB: aenvmbx1, held"""
WAIT = HELD + bytes.fromhex("833d0800800002 75f7 c70508008000 03000000") + HALT
"""... again: is it told? then done"""
BEAT = bytes.fromhex(
    "0f31 89c3 a300003000 c7050400300000000000"  # rdtsc: who it is, in ebx and at 3 MiB; beats, after it: 0
    "be00003000 ff4604 391e 75fe baf8030000"  # again: one more beat; hang if memory and register disagree
    "ad b908000000"  # word:
    "c1c004 89c7 240f 0461 ee 89f8 e2f2"  # digit: eight letters of it
    "b020 ee 81fe08003000 75e1 b00a ee"  # a blank; both words; a line feed
    "b900001000 e2fe ebc4"  # wait; jmp again
)
"""Prints line after line who it is, and its beats: two words of 8 letters, a to p for 0 to 15."""

_uids = itertools.count(2_900_000)


def tiny_kernel(path: Path, action: bytes, text: bytes = b"hello\n") -> Path:
    """A kernel for QEMU's PVH entry that prints `text` on the first serial port, then does `action` (32-bit code)."""
    base, header = 0x100000, 64 + 2 * 56
    note = struct.pack("<III4sQ", 4, 8, 18, b"Xen\0", 0)  # XEN_ELFNOTE_PHYS32_ENTRY, patched below
    entry = base + header + len(note)
    note = note[:-8] + struct.pack("<Q", entry)
    # mov edx, 0x3f8; mov esi, text; mov ecx, len(text); again: lodsb; out dx, al; loop again
    code_size = 5 + 5 + 5 + 4 + len(action)
    code = struct.pack("<BIBIBI", 0xBA, 0x3F8, 0xBE, entry + code_size, 0xB9, len(text)) + bytes.fromhex("aceee2fc")
    image = note + code + action + text
    elf = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, entry, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )  # ET_EXEC, EM_X86_64
    size = header + len(image)
    load = struct.pack("<IIQQQQQQ", 1, 7, 0, base, base, size, size, 4096)
    noted = struct.pack("<IIQQQQQQ", 4, 4, header, base + header, base + header, len(note), len(note), 4)
    path.write_bytes(elf + load + noted + image)
    path.chmod(0o644)
    return path


@dataclass
class Lab:
    """A network namespace and a folder in which specs are made."""

    root: Path
    netns: str
    taps: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def home(self) -> Path:
        return self.root / "home"

    def spec(self, sandbox_id: str, *, action: bytes = HALT, text: bytes = b"hello\n", address: str = "") -> VmSpec:
        """A sandbox with a tiny guest, a 1 MiB disk and a tap of its own."""
        directory = self.home / "sandboxes" / sandbox_id
        directory.mkdir(parents=True, mode=0o700)
        uid, disk = next(_uids), directory / "disk.raw"
        disk.write_bytes(bytes(1 << 20))
        disk.chmod(0o600)
        os.chown(disk, uid, uid)
        initramfs = self.root / "initramfs"
        initramfs.write_bytes(bytes(512))
        initramfs.chmod(0o644)
        tap = f"tap{next(self.taps)}"
        subprocess.run(["ip", "-n", self.netns, "tuntap", "add", tap, "mode", "tap"], check=True)
        return VmSpec(
            sandbox_id=sandbox_id,
            directory=directory,
            uid=uid,
            vcpus=1,
            memory_mb=32,
            kernel=tiny_kernel(self.root / f"kernel-{sandbox_id}", action, text),
            initramfs=initramfs,
            hostname=sandbox_id,
            disk=Disk(path=disk, size=1 << 20),
            netns=Path("/run/netns") / self.netns,
            tap=tap,
            mac="02:ae:00:00:00:15",
            address=address,
        )

    @property
    def bundle(self) -> GuestBundle:
        """What the driver is made with; only a trial of KVM would boot it."""
        none = Path("/nonexistent")
        return GuestBundle(kernel=none, initramfs=none, kernel_version="0", envd_version="0", digest="0")


def beats(console: bytes) -> list[tuple[str, int]]:
    """Who and how many beats, of each whole line that a `BEAT` guest printed."""
    lines = re.findall(rb"^([a-p]{8}) ([a-p]{8}) $", console, re.MULTILINE)
    return [(who.decode(), int(bytes(b"0123456789abcdef"[c - 97] for c in count), 16)) for who, count in lines]


@contextlib.contextmanager
def lab(root: Path) -> Iterator[Lab]:
    """A lab whose namespace is removed at the end."""
    name = f"aenv-test-vmm-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield Lab(root, name)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def real_bundle() -> GuestBundle:
    """The guest that `aenv setup` made on this machine; skips the test where there is none."""
    home = Path(os.environ.get("AENV_TEST_HOME") or default_home())
    try:
        return load_bundle(home)
    except ProvisionError as error:
        pytest.skip(f"no guest to boot: {error.message}")
