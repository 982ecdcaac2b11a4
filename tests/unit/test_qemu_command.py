"""The command line as a function of what is to run."""

import itertools
import json
from pathlib import Path

import pytest

from aenv.images.protocol import Disk
from aenv.vmm.protocol import VmSpec
from aenv.vmm.qemu_command import CONSOLE_BYTES, JailPath, Machine, command, probe_command

X86_TCG = Machine(arch="x86_64", accel="tcg", binary="/usr/bin/q", data_dirs=("/usr/share/q",))
FILE = Disk(path=Path("/h/d"), size=1 << 30)


def spec(disk: Disk = FILE, *, vcpus: int = 2, memory: Path | None = None) -> VmSpec:
    return VmSpec(
        sandbox_id="sb",
        directory=Path("/h"),
        uid=1,
        vcpus=vcpus,
        memory_mb=512,
        kernel=Path("/host/vmlinux"),
        initramfs=Path("/host/initramfs"),
        hostname="sb",
        disk=disk,
        netns=Path("/run/netns/n"),
        tap="tap0",
        mac="02:00:00:00:00:01",
        address="10.0.0.1",
        memory=memory,
    )


def line(
    machine: Machine = X86_TCG, disk: Disk = FILE, name: str = "sb /home", memory: Path | None = None
) -> list[str]:
    return command(machine, spec(disk, memory=memory), cmdline="console=ttyS0 a=b", name=name, listen_fd=3, tap_fd=4)


def values(argv: list[str], option: str) -> list[str]:
    return [value for key, value in itertools.pairwise(argv) if key == option]


@pytest.mark.parametrize("memory", [None, Path("/h/memory")])
def test_no_path_of_the_host_is_named(memory: Path | None) -> None:
    assert not [word for word in line(memory=memory) if "/host/" in word or "/h/" in word]


def test_a_booted_guest_has_a_kernel_and_memory_of_its_own() -> None:
    argv = line()
    assert values(argv, "-kernel") == [JailPath.KERNEL]
    assert values(argv, "-append") == ["console=ttyS0 a=b"]
    assert "memory-backend-ram,id=ram,size=512M" in values(argv, "-object")
    assert "-incoming" not in argv


def test_a_restored_guest_maps_its_memory_privately_and_waits() -> None:
    argv = line(memory=Path("/h/memory"))
    (backend,) = [value for value in values(argv, "-object") if value.startswith("memory-backend")]
    assert backend.startswith("memory-backend-file,id=ram,size=512M,mem-path=/memory,")
    assert {"share=off", "readonly=on", "rom=off"} <= set(backend.split(","))
    assert values(argv, "-incoming") == ["defer"]
    assert "-S" in argv
    assert not {"-kernel", "-initrd", "-append"} & set(argv)


def test_nothing_but_what_is_asked_for() -> None:
    argv = line()
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(argv)
    assert [value.split(",")[0] for value in values(argv, "-device")] == [
        "virtio-blk-device",
        "virtio-net-device",
        "virtio-rng-device",
    ]
    assert values(argv, "-sandbox") == ["on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]


def test_the_console_is_a_ring_of_a_power_of_two() -> None:
    assert values(line(), "-chardev")[0] == f"ringbuf,id=console,size={CONSOLE_BYTES}"
    assert CONSOLE_BYTES & (CONSOLE_BYTES - 1) == 0


@pytest.mark.parametrize(
    ("machine", "board", "accel", "cpu"),
    [
        (X86_TCG, "microvm,acpi=on,", "tcg,thread=multi,", "max,erms=off,fsrm=off"),
        (Machine(arch="x86_64", accel="kvm", binary="q", data_dirs=()), "microvm,acpi=on,", "kvm", "host"),
        (Machine(arch="aarch64", accel="tcg", binary="q", data_dirs=()), "virt,", "tcg,thread=multi,", "max"),
        (Machine(arch="aarch64", accel="kvm", binary="q", data_dirs=()), "virt,", "kvm", "host"),
    ],
)
def test_machines(machine: Machine, board: str, accel: str, cpu: str) -> None:
    for argv in (line(machine), probe_command(machine)):
        assert values(argv, "-machine")[0].startswith(board)
        assert values(argv, "-accel")[0].startswith(accel)
        assert values(argv, "-cpu") == [cpu]


def test_a_file_is_a_raw_disk_whatever_it_holds() -> None:
    nodes = [json.loads(value) for value in values(line(), "-blockdev")]
    assert [(node["driver"], node["node-name"]) for node in nodes] == [("file", "disk-file"), ("raw", "disk")]
    assert nodes[0]["filename"] == JailPath.DISK
    assert not nodes[0]["cache"]["direct"]


def test_a_block_device_is_opened_as_one() -> None:
    disk = Disk(path=Path("/dev/ublkb0"), size=1 << 30)
    nodes = [json.loads(value) for value in values(line(disk=disk), "-blockdev")]
    assert [(node["driver"], node["node-name"]) for node in nodes] == [("host_device", "disk-file"), ("raw", "disk")]
    assert nodes[0]["cache"]["direct"]
    assert not Disk(path=Path("/dev/shm/file"), size=1).is_device


def test_a_comma_in_the_name_stays_in_the_name() -> None:
    assert values(line(name="sb /odd,path"), "-name")[0].startswith("guest=sb /odd,,path,process=")
