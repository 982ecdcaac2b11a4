"""The command line of QEMU: a pure function of what is to run. Options are common to QEMU 8.2 and later.

All paths are those inside the jail (`JailPath`); all devices are virtio over MMIO, nothing else is emulated but the
serial console.
"""

import json
from dataclasses import dataclass
from typing import Literal

from aenv.errors import VmmError
from aenv.images.protocol import Disk
from aenv.vmm.protocol import VmSpec

CONSOLE_ID = "console"
CONSOLE_BYTES = 64 * 1024
"""Kept of the guest's console, the newest; a power of two, as QEMU demands."""
TRANSLATION_CACHE_MB = 128
"""Of QEMU's software CPU. Its default grows to 1 GiB for each VMM."""


class JailPath:
    """Where the sandbox's files are in the VMM's root."""

    KERNEL = "/kernel"
    INITRAMFS = "/initramfs"
    DISK = "/disk"
    BACKING = "/backing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What differs between hosts. `data_dirs` is where this QEMU finds its firmware."""

    arch: Literal["x86_64", "aarch64"]
    accel: Literal["kvm", "tcg"]
    binary: str
    data_dirs: tuple[str, ...]


def command(machine: Machine, spec: VmSpec, *, cmdline: str, name: str, listen_fd: int, tap_fd: int) -> list[str]:
    """The whole argument vector. `name` is for people; `listen_fd` is a listening Unix socket for QMP, `tap_fd` an
    open tap. Raises VmmError for a disk that cannot be."""
    return [
        machine.binary,
        *("-name", f"guest={_escaped(name)},process=aenv-vmm,debug-threads=on"),
        *(argument for directory in machine.data_dirs for argument in ("-L", directory)),
        *_BASICS,
        *_cpu_and_memory(machine, spec.vcpus, spec.memory_mb),
        *("-kernel", JailPath.KERNEL, "-initrd", JailPath.INITRAMFS, "-append", cmdline),
        *_disk(spec.disk),
        *("-netdev", f"tap,id=net0,fd={tap_fd}", "-device", f"virtio-net-device,netdev=net0,mac={spec.mac}"),
        *("-object", "rng-builtin,id=rng0", "-device", "virtio-rng-device,rng=rng0"),
        # A ring in the VMM's memory: endless output costs the guest's own CPU time, never the host's disk or the
        # server's time, and nobody has to be there to drain it.
        *("-chardev", f"ringbuf,id={CONSOLE_ID},size={CONSOLE_BYTES}", "-serial", f"chardev:{CONSOLE_ID}"),
        *("-chardev", f"socket,id=qmp,fd={listen_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
        # A guest that ends stops the VMM but does not end it: the console can still be read, then we end it.
        *("-no-reboot", "-action", "shutdown=pause"),
    ]


def probe_command(machine: Machine) -> list[str]:
    """A guest that only boots, its console on standard output; QEMU ends when the guest reboots."""
    serial = {"x86_64": "ttyS0", "aarch64": "ttyAMA0"}[machine.arch]
    return [
        machine.binary,
        *(argument for directory in machine.data_dirs for argument in ("-L", directory)),
        *_BASICS,
        *_cpu_and_memory(machine, vcpus=1, memory_mb=256),
        *("-kernel", JailPath.KERNEL, "-initrd", JailPath.INITRAMFS),
        *("-append", f"console={serial} panic=-1 reboot=t"),
        *("-chardev", f"stdio,id={CONSOLE_ID},signal=off", "-serial", f"chardev:{CONSOLE_ID}", "-no-reboot"),
    ]


_BASICS = (
    *("-no-user-config", "-nodefaults", "-display", "none", "-msg", "timestamp=on"),
    *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
)


def _cpu_and_memory(machine: Machine, vcpus: int, memory_mb: int) -> list[str]:
    # acpi=on: the distributions' kernels find virtio-mmio devices through ACPI. Without rtc they wait seconds for one.
    # pit and pic are not used by them: at times an interrupt of theirs at vector 0 panics the guest, and the clock that
    # the pit would calibrate is told on the command line (aenv.guest.cmdline).
    board = {"x86_64": "microvm,acpi=on,pit=off,pic=off", "aarch64": "virt,gic-version=max"}[machine.arch]
    accel = f"tcg,thread=multi,tb-size={TRANSLATION_CACHE_MB}" if machine.accel == "tcg" else "kvm"
    return [
        *("-machine", f"{board},memory-backend=ram,mem-merge=off,suppress-vmdesc=on"),
        *("-accel", accel),
        *("-cpu", "max" if machine.accel == "tcg" else "host"),
        *("-smp", f"cpus={vcpus},sockets=1,cores={vcpus},threads=1"),
        *("-m", f"{memory_mb}M", "-object", f"memory-backend-ram,id=ram,size={memory_mb}M"),
        # The devices' present form (virtio 1); the default is the transitional one.
        *("-global", "virtio-mmio.force-legacy=false"),
    ]


def _disk(disk: Disk) -> list[str]:
    """The disk as vda.

    Every node is named: what an image's header says of its backing file is not followed. Writes go to the host's page
    cache and flushes stop there: they survive the VMM, and if the host dies so has the sandbox. A host that
    cannot write (disk full) is an I/O error in the guest rather than a guest that stands still.
    """
    if disk.backing is not None and disk.format != "qcow2":
        raise VmmError(f"disk {disk.path} has a backing file and format {disk.format}: only qcow2 can have one")
    file = {"driver": "file", "aio": "threads", "cache": {"direct": False, "no-flush": True}}
    # A block device has its own server behind it, which reads through the page cache already.
    lowest = {**file, "driver": "host_device", "cache": {"direct": True, "no-flush": True}} if disk.is_device else file
    nodes: list[dict[str, object]] = [
        {**lowest, "node-name": "disk-file", "filename": JailPath.DISK, "discard": "unmap"},
        {"driver": disk.format, "node-name": "disk", "file": "disk-file", "discard": "unmap", "cache": file["cache"]},
    ]
    if disk.format == "qcow2":
        nodes[-1]["backing"] = None if disk.backing is None else "backing"
    if disk.backing is not None:
        nodes[:0] = [
            {**file, "node-name": "backing-file", "filename": JailPath.BACKING, "read-only": True},
            {"driver": "raw", "node-name": "backing", "file": "backing-file", "read-only": True},
        ]
    arguments = [argument for node in nodes for argument in ("-blockdev", json.dumps(node))]
    return [*arguments, "-device", "virtio-blk-device,drive=disk,werror=report,rerror=report"]


def _escaped(value: str) -> str:
    return value.replace(",", ",,")
