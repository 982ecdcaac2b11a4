"""Sandboxes whose disks the data plane serves: real microVMs, the real daemon, and file systems that stay whole."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from e2b import Sandbox

from aenv.config import Settings, VmmSettings
from aenv.images.client import BlockdClient, layers_of
from aenv.images.daemon import Places
from aenv.images.memory import PREFIX
from aenv.images.process import identify
from aenv.images.protocol import Disk, Stack
from aenv.snapshots.checkpoint import read
from aenv.snapshots.making import of_layers
from aenv.templates.models import Template
from aenv.templates.store import CHECKPOINT, TemplateStore
from aenv.vmm.qemu import QemuVmm
from disks import ask, check, fsck_layers
from real_server import RealServer, needs_node, until
from vmm_lab import Lab, lab

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(300)]

T = TypeVar("T")
BLOB = "python3 -c 'import hashlib,sys; sys.stdout.buffer.write(hashlib.shake_256(b\"x\").digest(20_000_000))'"


class Node(RealServer):
    """A server whose templates the test can add to, and whose data plane it asks."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.places = Places.of_home(home)
        self.templates = TemplateStore(Settings(home=home).templates_dir)
        self.base = self.templates.resolve("base")

    @property
    def disk(self) -> Stack:
        """What the template's disk is made of."""
        return read(self.templates.checkpoint(self.base.id)).disk

    def blockd(self, work: Callable[[BlockdClient], Awaitable[T]]) -> T:
        """Ask the daemon something."""
        return ask(self.home, work)

    def daemon(self) -> int:
        """The daemon's pid."""
        return self.blockd(lambda client: client.version()).pid

    def images(self) -> dict[str, dict[str, Any]]:
        """What the daemon serves, by name."""
        return {image["image"]: image for image in self.blockd(lambda client: client.list())}

    def image(self, sandbox: Sandbox) -> str:
        """The name of a sandbox's disk in the daemon: its id, and which of its launches it is."""
        return next(name for name in self.images() if name.split(".")[0] == sandbox.sandbox_id)

    def disks(self) -> list[str]:
        return [name for name in self.images() if not name.startswith(PREFIX)]

    def publish(self, name: str, disk: Stack) -> Template:
        """A template with this disk."""
        made = replace(self.base, id=f"t{name}", names=(name,), created_at=datetime.now(UTC))
        staging = self.templates.stage()
        of_layers(staging / CHECKPOINT, disk=disk)
        self.templates.publish(staging, made)
        return made


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("home"))
    made.start()
    yield made
    made.close()
    # A server that stops and leaves no sandbox takes the daemon with it.
    assert not made.places.pid_file.exists()
    assert str(made.places.mount) not in Path("/proc/self/mounts").read_text()


def digest(sandbox: Sandbox, path: str) -> str:
    return sandbox.commands.run(f"sha256sum < {path}", timeout=60).stdout.split()[0]


def test_a_disk_of_two_layers(node: Node) -> None:
    first, sealed = node.create(), node.home / "sealed.lsmt"
    first.commands.run(f"{BLOB} > blob && sync", timeout=60)
    wanted = digest(first, "blob")
    image = node.image(first)
    node.blockd(lambda client: client.seal(image, sealed))
    first.commands.run("rm blob && echo later > later && sync")  # the source goes on, with a disk of its own
    assert first.commands.run("cat later; ls").stdout.split() == ["later", "later"]
    node.fsck()
    disk = Stack(layers=(*node.disk.layers, sealed), size=node.disk.size)
    node.publish("two", disk)

    second = Sandbox.create("two", timeout=600, **node.sdk)
    name = node.image(second)
    about = node.blockd(lambda client: client.stat(name))
    assert len(about["layers"]) >= len(disk.layers)
    second.commands.run("echo 3 | sudo tee /proc/sys/vm/drop_caches")
    assert digest(second, "blob") == wanted
    assert second.commands.run("ls").stdout.split() == ["blob"]
    second.commands.run(f"{BLOB} > more && sync", timeout=60)
    assert digest(second, "more") == wanted
    node.fsck()
    fsck_layers(node.home, layers_of(disk))
    first.kill()
    second.kill()
    until(lambda: node.disks() == [], what="the disks' end")


def test_a_killed_server_finds_the_disks_again(node: Node) -> None:
    sandbox = node.create()
    sandbox.commands.run(f"{BLOB} > blob", timeout=60)
    wanted, daemon = digest(sandbox, "blob"), node.daemon()
    node.kill()
    assert identify(daemon) is not None
    stray = node.blockd(lambda client: _attach_stray(client, node))
    assert stray.exists()
    node.start()
    assert node.daemon() == daemon
    assert not stray.exists()  # no row explains it
    again = node.connect(sandbox.sandbox_id)
    assert digest(again, "blob") == wanted
    again.commands.run("sync")
    node.fsck()
    again.kill()
    until(lambda: node.disks() == [], what="the disk's end")


async def _attach_stray(client: BlockdClient, node: Node) -> Path:
    upper = node.home / "stray"
    return (await client.attach("stray", layers_of(node.disk), upper=upper)).path


def test_sandboxes_end_with_their_disks_daemon(node: Node) -> None:
    lost = [node.create() for _ in range(2)]
    killed = node.daemon()
    os.kill(killed, signal.SIGKILL)
    for sandbox in lost:
        assert "reason disk_lost" in node.why_ended(sandbox.sandbox_id)
        assert f"aenv-blockd (pid {killed})" in node.why_ended(sandbox.sandbox_id)
    until(lambda: node.leftovers()["folders"] == [], what="the removal of what they held")
    after = node.create()  # by a new daemon
    assert node.daemon() != killed
    assert after.commands.run("echo 1 > x && sync && cat x").stdout == "1\n"
    node.fsck()
    after.kill()
    assert str(node.places.mount) in Path("/proc/self/mounts").read_text()


def test_layers_and_memory_are_in_ram_once(node: Node) -> None:
    one = node.create()
    layer = node.disk.layers[0]
    before = resident(layer)
    assert before > 0
    other = node.create()
    assert resident(layer) - before < max(1 << 20, before // 10)
    # Their own views of it are not cached once more.
    disks = [node.places.mount / node.image(sandbox) for sandbox in (one, other)]
    assert [resident(disk) for disk in disks] == [0, 0]

    # Both VMMs map one memory image, and what neither has written is one page for both.
    memory = [Path(image["path"]) for name, image in node.images().items() if name.startswith(PREFIX)]
    shared = [mapped(node.vmm_pid(sandbox.sandbox_id), memory) for sandbox in (one, other)]
    for found in shared:
        assert found["Shared_Clean"] > 8 << 10  # KiB; of the 20 MiB a restored guest touches at the least
        assert found["Pss"] < found["Rss"]
    for sandbox in (one, other):
        sandbox.kill()


def mapped(pid: int, images: list[Path]) -> dict[str, int]:
    """What /proc/<pid>/smaps says of the mappings of these images, summed, in KiB."""
    inodes, total, ours = {str(image.stat().st_ino) for image in images}, Counter[str](), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            ours = words[4] in inodes and words[3] != "00:00"
        elif ours and words[-1] == "kB":
            total[words[0].rstrip(":")] += int(words[1])
    return total


def test_what_the_cli_shows_and_makes(node: Node, tmp_path: Path) -> None:
    def aenv(*arguments: str) -> Any:
        argv = [Path(sys.executable).with_name("aenv"), "image", *arguments, "-o", "json"]
        done = subprocess.run(argv, env=node.environ, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    sandbox = node.create()
    sandbox.commands.run("echo here > file && sync")
    image = node.image(sandbox)
    row = next(row for row in aenv("ls") if row["image"] == image)
    assert row["size"] == node.disk.size
    assert row["counters"]["writes"] > 0
    assert row["upper"]["extents"] > 0
    assert aenv("inspect", image)["handles"] == 1
    raw = tmp_path / "raw"
    aenv("export", image, str(raw))
    shown = subprocess.run(["debugfs", "-R", "cat /home/user/file", raw], capture_output=True, text=True, check=True)
    assert shown.stdout == "here\n"
    check(raw)
    sandbox.kill()

    assert aenv("check", "base")["ok"]
    made = aenv("compact", "base", str(tmp_path / "small"), "--zfile", "lz4")
    assert made["bytes"] < node.disk.layers[0].stat().st_size
    assert aenv("check", str(tmp_path / "small"))["read"] == aenv("check", "base")["read"]
    checkpoint = node.templates.checkpoint(node.base.id)
    assert aenv("inspect", str(checkpoint))["size"] == node.disk.size
    for source in ("base", str(checkpoint)):
        memory = aenv("inspect", source, "--memory")
        assert memory["size"] == node.base.memory_mb << 20
        assert aenv("check", source, "--memory")["size"] == memory["size"]
    aenv("compact", "base", str(tmp_path / "memory"), "--memory")
    assert aenv("inspect", str(tmp_path / "memory"))["size"] == node.base.memory_mb << 20
    layer = tmp_path / "small"
    with layer.open("r+b") as file:
        file.seek(layer.stat().st_size // 2)
        file.write(b"damage")
    damaged = subprocess.run(
        [Path(sys.executable).with_name("aenv"), "image", "check", layer],
        env=node.environ,
        capture_output=True,
        text=True,
    )
    assert damaged.returncode == 1
    assert "damaged" in damaged.stderr


def test_a_block_device_is_a_disk_too(tmp_path: Path) -> None:
    """As ublk serves them; any block device will do to see that the jailed VMM can open it."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(1 << 20)
    made = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no loop device: {made.stderr}")
    device = Path(made.stdout.strip())
    try:
        with lab(tmp_path) as place:
            assert asyncio.run(devices_open_in_a_vmm(place, device)) == {device.stat().st_rdev}
            assert device.stat().st_uid == 0  # the host's own node stays root's
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


async def devices_open_in_a_vmm(place: Lab, device: Path) -> set[int]:
    """Numbers of the block devices that a VMM with this disk has open."""
    vmm = QemuVmm(home=place.home, settings=VmmSettings(accel="tcg"), bundle=place.bundle)
    vm = await vmm.boot(replace(place.spec("ia"), disk=Disk(path=device, size=1 << 20)))
    try:
        return await asyncio.to_thread(_block_devices, vm.handle.pid)
    finally:
        await vm.kill()
        await vmm.aclose()


def _block_devices(pid: int) -> set[int]:
    found = [descriptor.stat() for descriptor in Path(f"/proc/{pid}/fd").iterdir() if descriptor.exists()]
    return {file.st_rdev for file in found if stat.S_ISBLK(file.st_mode)}


def resident(path: Path) -> int:
    """Bytes of a file in the page cache."""
    done = subprocess.run(["fincore", "--bytes", "--json", path], capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["fincore"][0]["res"])
