"""The command line as a function of what is to run."""

import itertools
import json
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.images.protocol import Disk
from aenv.vmm.protocol import VmSpec
from aenv.vmm.qemu_command import CONSOLE_BYTES, JailPath, Machine, command, probe_command

X86_TCG = Machine(arch="x86_64", accel="tcg", binary="/usr/bin/q", data_dirs=("/usr/share/q",))
RAW = Disk(path=Path("/h/d"), format="raw", size=1 << 30)
OVERLAY = Disk(path=Path("/h/d"), format="qcow2", size=1 << 30, backing=Path("/h/base"))


def spec(disk: Disk = RAW, *, vcpus: int = 2) -> VmSpec:
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
    )


def line(machine: Machine = X86_TCG, disk: Disk = RAW, name: str = "sb /home") -> list[str]:
    return command(machine, spec(disk), cmdline="console=ttyS0 a=b", name=name, listen_fd=3, tap_fd=4)


def values(argv: list[str], option: str) -> list[str]:
    return [value for key, value in itertools.pairwise(argv) if key == option]


def test_no_path_of_the_host_is_named() -> None:
    assert not [word for word in line(disk=OVERLAY) if "/host/" in word or "/h/" in word]
    assert values(line(), "-kernel") == [JailPath.KERNEL]


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
        (X86_TCG, "microvm,acpi=on,", "tcg,thread=multi,", "max"),
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


def test_a_raw_disk() -> None:
    nodes = [json.loads(value) for value in values(line(disk=RAW), "-blockdev")]
    assert [(node["driver"], node["node-name"]) for node in nodes] == [("file", "disk-file"), ("raw", "disk")]
    assert nodes[0]["filename"] == JailPath.DISK


def test_an_overlay_names_its_backing_file_whatever_its_header_says() -> None:
    nodes = {node["node-name"]: node for node in map(json.loads, values(line(disk=OVERLAY), "-blockdev"))}
    assert nodes["disk"]["backing"] == "backing"
    assert nodes["backing-file"]["filename"] == JailPath.BACKING
    assert nodes["backing"]["read-only"] is nodes["backing-file"]["read-only"] is True


def test_a_qcow2_without_backing_gets_none() -> None:
    disk = Disk(path=Path("/h/d"), format="qcow2", size=1)
    nodes = [json.loads(value) for value in values(line(disk=disk), "-blockdev")]
    assert nodes[-1]["backing"] is None


def test_a_block_device_is_opened_as_one() -> None:
    disk = Disk(path=Path("/dev/ublkb0"), format="raw", size=1 << 30)
    nodes = [json.loads(value) for value in values(line(disk=disk), "-blockdev")]
    assert [(node["driver"], node["node-name"]) for node in nodes] == [("host_device", "disk-file"), ("raw", "disk")]
    assert nodes[0]["cache"]["direct"]
    assert not Disk(path=Path("/dev/shm/file"), format="raw", size=1).is_device


def test_a_raw_disk_cannot_have_a_backing_file() -> None:
    with pytest.raises(VmmError, match="only qcow2"):
        line(disk=Disk(path=Path("/h/d"), format="raw", size=1, backing=Path("/b")))


def test_a_comma_in_the_name_stays_in_the_name() -> None:
    assert values(line(name="sb /odd,path"), "-name")[0].startswith("guest=sb /odd,,path,process=")
