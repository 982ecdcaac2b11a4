"""The command line of QEMU: a pure function of what is to run. Options are common to QEMU 8.2 and later.

All paths are those inside the jail (`JailPath`); all devices are virtio over MMIO, nothing else is emulated but the
serial console.
"""

import json
from dataclasses import dataclass
from typing import Literal

from aenv.images.protocol import Disk
from aenv.vmm.protocol import VmSpec

CONSOLE_ID = "console"
MEMORY_ID = "ram"
CONSOLE_BYTES = 64 * 1024
"""Kept of the guest's console, the newest; a power of two, as QEMU demands."""
MACHINE = 3
"""The virtual machine that is made here. Raise it with every change that a guest saved before would notice, of the
options below or of the addresses in `aenv.network.layout`: a guest saved on another machine is not started."""
TRANSLATION_CACHE_MB = 128
"""Of QEMU's software CPU. Its default grows to 1 GiB for each VMM."""


class JailPath:
    """Where the sandbox's files are in the VMM's root."""

    KERNEL = "/kernel"
    INITRAMFS = "/initramfs"
    DISK = "/disk"
    MEMORY = "/memory"
    STATE = "/state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What differs between hosts. `data_dirs` is where this QEMU finds its firmware."""

    arch: Literal["x86_64", "aarch64"]
    accel: Literal["kvm", "tcg"]
    binary: str
    data_dirs: tuple[str, ...]


def command(machine: Machine, spec: VmSpec, *, cmdline: str, name: str, listen_fd: int, tap_fd: int) -> list[str]:
    """The whole argument vector: to boot with `cmdline`, or with `spec.memory` to wait for a guest's state.

    `name` is for people; `listen_fd` is a listening Unix socket for QMP, `tap_fd` an open tap.
    """
    return [
        machine.binary,
        *("-name", f"guest={_escaped(name)},process=aenv-vmm,debug-threads=on"),
        *(argument for directory in machine.data_dirs for argument in ("-L", directory)),
        *_BASICS,
        *_cpu(machine, spec.vcpus),
        *(_booted(spec.memory_mb, cmdline) if spec.memory is None else _restored(spec.memory_mb)),
        *_disk(spec.disk),
        *(
            "-netdev",
            f"tap,id=net0,fd={tap_fd}",
            "-device",
            f"virtio-net-device,netdev=net0,mac={spec.mac},guest_announce=off",
        ),
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
        *_cpu(machine, vcpus=1),
        *_booted(256, f"console={serial} panic=-1 reboot=t"),
        *("-chardev", f"stdio,id={CONSOLE_ID},signal=off", "-serial", f"chardev:{CONSOLE_ID}", "-no-reboot"),
    ]


_BASICS = (
    *("-no-user-config", "-nodefaults", "-display", "none", "-msg", "timestamp=on"),
    *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
)


def _cpu(machine: Machine, vcpus: int) -> list[str]:
    # acpi=on: the distributions' kernels find virtio-mmio devices through ACPI. Without rtc they wait seconds for one.
    # pit and pic are not used by them: at times an interrupt of theirs at vector 0 panics the guest, and the clock that
    # the pit would calibrate is told on the command line (aenv.guest.cmdline).
    board = {"x86_64": "microvm,acpi=on,pit=off,pic=off", "aarch64": "virt,gic-version=max"}[machine.arch]
    accel = f"tcg,thread=multi,tb-size={TRANSLATION_CACHE_MB}" if machine.accel == "tcg" else "kvm"
    return [
        *("-machine", f"{board},memory-backend={MEMORY_ID},mem-merge=off,suppress-vmdesc=on"),
        *("-accel", accel),
        *("-cpu", cpu_model(machine)),
        *("-smp", f"cpus={vcpus},sockets=1,cores={vcpus},threads=1"),
        # The devices' present form (virtio 1); the default is the transitional one.
        *("-global", "virtio-mmio.force-legacy=false"),
    ]


def cpu_model(machine: Machine) -> str:
    """QEMU's name of the processor that guests see. An emulated one does not claim that its string instructions are
    fast: they are its slowest way to copy."""
    if machine.accel == "kvm":
        return "host"
    return "max,erms=off,fsrm=off" if machine.arch == "x86_64" else "max"


def _booted(memory_mb: int, cmdline: str) -> list[str]:
    return [
        *("-m", f"{memory_mb}M", "-object", f"memory-backend-ram,id={MEMORY_ID},size={memory_mb}M"),
        *("-kernel", JailPath.KERNEL, "-initrd", JailPath.INITRAMFS, "-append", cmdline),
    ]


def _restored(memory_mb: int) -> list[str]:
    """A private mapping of the memory file: what the guest writes is the VMM's own, the rest is the host's page cache.

    Firmware, kernel and command line are in its memory already. The device states that are saved have no
    configuration section; that one is loaded is told by an event.
    """
    file = f"memory-backend-file,id={MEMORY_ID},size={memory_mb}M,mem-path={JailPath.MEMORY}"
    return [
        *("-m", f"{memory_mb}M", "-object", f"{file},share=off,readonly=on,rom=off"),
        *("-incoming", "defer", "-S"),
        *("-global", "migration.send-configuration=off", "-global", "migration.x-events=on"),
    ]


def _disk(disk: Disk) -> list[str]:
    """The disk as vda.

    Writes go to the host's page cache and flushes stop there: they survive the VMM, and if the host dies so has the
    sandbox. A host that cannot write (disk full) is an I/O error in the guest rather than a guest that stands still.
    """
    nodes = [
        {
            # A block device has its own server behind it, which reads through the page cache already.
            "driver": "host_device" if disk.is_device else "file",
            "cache": {"direct": disk.is_device, "no-flush": True},
            "node-name": "disk-file",
            "filename": JailPath.DISK,
            "aio": "threads",
            "discard": "unmap",
        },
        {
            "driver": "raw",
            "node-name": "disk",
            "file": "disk-file",
            "discard": "unmap",
            "cache": {"direct": False, "no-flush": True},
        },
    ]
    arguments = [argument for node in nodes for argument in ("-blockdev", json.dumps(node))]
    return [*arguments, "-device", "virtio-blk-device,drive=disk,werror=report,rerror=report"]


def _escaped(value: str) -> str:
    return value.replace(",", ",,")
