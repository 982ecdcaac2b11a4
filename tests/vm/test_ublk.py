"""ublk proved for real: a microVM whose kernel has it runs the same aenv-blockd and serves an image as /dev/ublkb0."""

import base64
import contextlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_boot import boot

from aenv.config import load
from aenv.errors import ProvisionError
from aenv.guest import kernel
from aenv.guest.connect import ConnectClient
from aenv.guest.initramfs import build_initramfs
from aenv.guest.modules import BOOT_MODULES, load_order
from aenv.guest.provision import GuestBundle
from aenv.images.store import find_blockd
from aenv.templates.base import rootfs_of

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="QEMU's microvm machine is x86_64"),
]

GUEST_SCRIPT = Path(__file__).with_name("ublk_guest.py")
BINARY = "/root/aenv-blockd"


@pytest.fixture
async def bundle(tmp_path: Path) -> GuestBundle:
    """The distribution's cloud kernel with ublk's and FUSE's modules beside those every guest has."""
    settings = load()
    cache = settings.home / "cache" / "packages"
    if not cache.is_dir():
        cache = tmp_path / "packages"
        cache.mkdir()
    try:
        tree = await kernel.unpack(await kernel.resolve(), cache, tmp_path / "kernel")
        modules = load_order(tree.modules, (*BOOT_MODULES, "fuse", "ublk_drv"))
    except ProvisionError as error:
        pytest.skip(f"no kernel package with ublk_drv: {error.message}")
    vmlinux, initramfs = tmp_path / "vmlinux", tmp_path / "initramfs"
    vmlinux.write_bytes(kernel.extract_vmlinux(tree.image.read_bytes()))
    envd = _envd(settings.home)
    initramfs.write_bytes(build_initramfs(envd, modules))
    return GuestBundle(vmlinux, initramfs, tree.release, "", "")


def _envd(home: Path) -> bytes:
    """The guest daemon, out of the initramfs that `aenv setup` made."""
    archive = (home / "guest/current/initramfs").read_bytes()
    with contextlib.suppress(FileNotFoundError):
        argv = ["cpio", "--quiet", "-i", "--to-stdout", "init"]
        return subprocess.run(argv, input=archive, capture_output=True, check=True).stdout
    pytest.skip("cpio is not installed")


async def test_an_image_is_a_block_device(bundle: GuestBundle, tmp_path: Path) -> None:
    settings = load()
    async with (
        boot(bundle, rootfs_of(settings), tmp_path) as guest,
        httpx.AsyncClient(base_url=guest.url, timeout=60) as http,
    ):
        for source, target in ((find_blockd(settings), BINARY), (GUEST_SCRIPT, "/root/ublk_guest.py")):
            query = {"path": target, "username": "root"}
            answer = await http.post("/files", params=query, files={"file": source.read_bytes()})
            assert answer.status_code == 200, answer.text
        facts = json.loads(
            await execute(http, guest.url, f"chmod 755 {BINARY} && python3 /root/ublk_guest.py {BINARY}")
        )
    assert facts["device"] == "/dev/ublkb0"
    assert facts["on_device"] == facts["exported"] == facts["on_fuse"]
    assert facts["fallback"]["target"] == "fuse"
    assert "--no-ublk" in facts["fallback"]["fallback"]
    assert facts["left"] == ["ublk-control"]


async def execute(http: httpx.AsyncClient, url: str, command: str) -> str:
    """Standard output of a command run by root in the guest; fails the test with all it said if it fails."""
    rpc = ConnectClient(http, url, {"Authorization": "Basic " + base64.b64encode(b"root:").decode()})
    process: dict[str, Any] = {"cmd": "/bin/bash", "args": ["-l", "-c", command]}
    said = {"stdout": b"", "stderr": b""}
    async for message in rpc.stream("/process.Process/Start", {"process": process, "stdin": False}):
        event = message.get("event", {})
        for kind, data in event.get("data", {}).items():
            said[kind] += base64.b64decode(data)
        if "end" in event:
            failed = event["end"].get("exitCode", 0) != 0 or event["end"].get("error")
            assert not failed, f"{event['end']}\n{said['stdout'].decode()}\n{said['stderr'].decode()}"
            return said["stdout"].decode()
    raise AssertionError("the command's end was not reported")
