"""Sandboxes whose disks the data plane serves: real microVMs, the real daemon, and file systems that stay whole."""

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from e2b import Sandbox

from aenv.config import ImageSettings, Settings, VmmSettings, load
from aenv.errors import ProvisionError
from aenv.images.client import BlockdClient
from aenv.images.daemon import Places
from aenv.images.layers import LayerStore, Stack, read_stack, write_stack
from aenv.images.process import identify
from aenv.images.protocol import Disk
from aenv.images.store import find_blockd, prepare
from aenv.templates.models import Template
from aenv.templates.store import TemplateStore
from aenv.vmm.qemu import QemuVmm
from disks import ask, check, fsck_layers
from real_server import RealServer, needs_node, until
from vmm_lab import Lab, lab

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(300)]

T = TypeVar("T")
BLOB = "python3 -c 'import hashlib,sys; sys.stdout.buffer.write(hashlib.shake_256(b\"x\").digest(20_000_000))'"


class Node(RealServer):
    """A server whose sandboxes' disks are served by aenv-blockd, over a template of its own home."""

    def __init__(self, home: Path) -> None:
        blockd = find_blockd(load())
        super().__init__(home, images_store="blockd", images_blockd=str(blockd))
        self.settings = Settings(home=home, images=ImageSettings(store="blockd", blockd=str(blockd)))
        self.places = Places.of_home(home)
        self.layers = LayerStore(self.settings.layers_dir)
        self.templates = TemplateStore(self.settings.templates_dir)
        # A folder of templates of its own, in which those of the machine are found again and others can be added.
        shared = (home / "templates").resolve()
        (home / "templates").unlink()
        shutil.copytree(
            shared, home / "templates", copy_function=_symlink, ignore=shutil.ignore_patterns("layers.json")
        )
        (home / "layers").unlink(missing_ok=True)
        self.base = next(template for template in self.templates.list() if "base" in template.names)
        folder = self.templates.path(self.base.id)
        asyncio.run(prepare(self.settings, folder, folder))

    def blockd(self, work: Callable[[BlockdClient], Awaitable[T]]) -> T:
        """Ask the daemon something."""
        return ask(self.home, work)

    def daemon(self) -> int:
        """The daemon's pid."""
        return self.blockd(lambda client: client.version()).pid

    def seal(self, sandbox: Sandbox) -> str:
        """The digest of the layer that the sandbox's live disk has become."""
        with self.layers.staged() as staged:
            made = self.blockd(lambda client: client.seal(sandbox.sandbox_id, staged, digest=True))
            return self.layers.publish(staged, made.digest or "")

    def stack(self, *above: str) -> Stack:
        base = read_stack(self.templates.path(self.base.id))
        return Stack(layers=(*base.layers, *above), size=base.size)

    def publish(self, name: str, stack: Stack) -> Template:
        """A template made of these layers."""
        now = datetime.now(UTC)
        made = replace(self.base, id=f"t{name}", names=(name,), created_at=now)
        staging = self.templates.stage()
        write_stack(staging, stack)
        self.templates.publish(staging, made)
        return made


def _symlink(source: str, target: str) -> str:
    Path(target).symlink_to(source)
    return target


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    try:
        made = Node(tmp_path_factory.mktemp("home"))
    except ProvisionError as error:
        pytest.skip(error.message)
    made.start()
    yield made
    made.close()
    # A server that stops and leaves no sandbox takes the daemon with it.
    assert not made.places.pid_file.exists()
    assert str(made.places.mount) not in Path("/proc/self/mounts").read_text()


def digest(sandbox: Sandbox, path: str) -> str:
    return sandbox.commands.run(f"sha256sum < {path}", timeout=60).stdout.split()[0]


def test_a_disk_of_two_layers(node: Node) -> None:
    first = node.create()
    first.commands.run(f"{BLOB} > blob && sync", timeout=60)
    wanted = digest(first, "blob")
    sealed = node.seal(first)
    first.commands.run("rm blob && echo later > later && sync")  # the source goes on, with a disk of its own
    assert first.commands.run("cat later; ls").stdout.split() == ["later", "later"]
    node.fsck()
    node.publish("two", node.stack(sealed))

    second = Sandbox.create("two", timeout=600, **node.sdk)
    about = node.blockd(lambda client: client.stat(second.sandbox_id))
    assert len(about["layers"]) == 2
    second.commands.run("echo 3 | sudo tee /proc/sys/vm/drop_caches")
    assert digest(second, "blob") == wanted
    assert second.commands.run("ls").stdout.split() == ["blob"]
    second.commands.run(f"{BLOB} > more && sync", timeout=60)
    assert digest(second, "more") == wanted
    node.fsck()
    fsck_layers(node.home, node.layers.files(node.stack(sealed)))
    first.kill()
    second.kill()
    assert node.blockd(lambda client: client.list()) == []


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
    until(lambda: node.blockd(lambda client: client.list()) == [], what="the disk's end")


async def _attach_stray(client: BlockdClient, node: Node) -> Path:
    upper = node.home / "stray"
    return (await client.attach("stray", node.layers.files(node.stack()), upper=upper)).path


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


def test_lower_layers_are_in_memory_once(node: Node) -> None:
    layer = node.layers.path(node.stack().layers[0])
    one = node.create()
    before = resident(layer)
    other = node.create()
    grown = resident(layer) - before
    assert before > 20 << 20  # what a boot reads
    assert grown < before // 10
    # Their own views of it are not cached once more.
    assert [resident(node.places.mount / sandbox.sandbox_id) for sandbox in (one, other)] == [0, 0]
    node.fsck()
    for sandbox in (one, other):
        sandbox.kill()


def test_what_the_cli_shows_and_makes(node: Node, tmp_path: Path) -> None:
    def aenv(*arguments: str) -> Any:
        argv = [Path(sys.executable).with_name("aenv"), "image", *arguments, "-o", "json"]
        done = subprocess.run(argv, env=node.environ, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    sandbox = node.create()
    sandbox.commands.run("echo here > file && sync")
    row = next(row for row in aenv("ls") if row["image"] == sandbox.sandbox_id)
    assert row["size"] == node.stack().size
    assert row["counters"]["writes"] > 0
    assert row["upper"]["extents"] > 0
    assert aenv("inspect", sandbox.sandbox_id)["handles"] == 1
    raw = tmp_path / "raw"
    aenv("export", sandbox.sandbox_id, str(raw))
    shown = subprocess.run(["debugfs", "-R", "cat /home/user/file", raw], capture_output=True, text=True, check=True)
    assert shown.stdout == "here\n"
    check(raw)
    sandbox.kill()

    assert aenv("check", "base")["ok"]
    made = aenv("compact", "base", str(tmp_path / "small"), "--zfile", "lz4")
    assert made["bytes"] < node.layers.path(node.stack().layers[0]).stat().st_size
    assert aenv("check", str(tmp_path / "small"))["read"] == aenv("check", "base")["read"]
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
    vm = await vmm.boot(replace(place.spec("ia"), disk=Disk(path=device, format="raw", size=1 << 20)))
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
