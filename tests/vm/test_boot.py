"""The boot contract, with nothing of the platform but its guest: QEMU started by hand, user-mode networking, no root.

What boots is what this machine was provisioned with (`aenv setup`, which `make test` runs first).
"""

import asyncio
import contextlib
import platform
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from aenv.config import load
from aenv.guest import mailbox
from aenv.guest.cmdline import kernel_cmdline
from aenv.guest.provision import GuestBundle, load_bundle
from aenv.guest.tsc import host_tsc_khz
from aenv.templates.base import rootfs_of

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="QEMU's microvm machine is x86_64"),
]

DEADLINE = 60
"""Seconds for a boot; a busy machine takes several times the 2 s of an idle one."""


IDLE, HELD = 0, 1


@dataclass
class Guest:
    url: str
    console: str
    memory: Path

    @property
    def mailbox(self) -> int:
        """The state of its mailbox."""
        with self.memory.open("rb") as file:
            file.seek(mailbox.ADDRESS)
            head = file.read(12)
        assert head[:8] == b"aenvmbx1"
        return int.from_bytes(head[8:], "little")

    async def until(self, state: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while self.mailbox != state:  # noqa: ASYNC110 (another machine's memory)
                await asyncio.sleep(0.001)

    async def call(self, datagram: bytes) -> None:
        port = httpx.URL(self.url).port
        assert port is not None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as calls:
            calls.sendto(datagram, ("127.0.0.1", port))


@pytest.fixture(scope="module")
def bundle() -> GuestBundle:
    return load_bundle(load().home)


@pytest.fixture(scope="module")
def rootfs() -> Path:
    return rootfs_of(load())


@contextlib.asynccontextmanager
async def boot(bundle: GuestBundle, rootfs: Path, tmp_path: Path) -> AsyncIterator[Guest]:
    """A guest whose daemon has said that it serves."""
    port = free_port()
    overlay, memory = tmp_path / "overlay.qcow2", tmp_path / "memory"
    await asyncio.to_thread(make_overlay, rootfs, overlay)
    cmdline = kernel_cmdline(hostname="boot-test", accel="tcg", tsc_khz=await asyncio.to_thread(host_tsc_khz))
    # A /30 as the guest has it leaves user-mode networking no room for its own services.
    network = "net=169.254.0.0/24,host=169.254.0.22,dns=169.254.0.3,dhcpstart=169.254.0.100,restrict=on"
    process = await asyncio.create_subprocess_exec(
        "qemu-system-x86_64",
        *("-M", "microvm,acpi=on,pit=off,pic=off,memory-backend=ram", "-accel", "tcg", "-cpu", "max", "-smp", "1"),
        *("-m", "512", "-object", f"memory-backend-file,id=ram,size=512M,mem-path={memory},share=on"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", bundle.kernel, "-initrd", bundle.initramfs, "-append", cmdline),
        *("-global", "virtio-mmio.force-legacy=false", "-device", "virtio-rng-device"),
        *("-drive", f"if=none,id=disk,file={overlay},format=qcow2", "-device", "virtio-blk-device,drive=disk"),
        *("-netdev", f"user,id=net,{network},{forward('tcp', port)},{forward('udp', port)}"),
        *("-device", "virtio-net-device,netdev=net"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    console: list[str] = []
    try:
        async with asyncio.timeout(DEADLINE):
            async for line in process.stdout:
                console.append(line.decode(errors="replace").strip())
                if " serves " in console[-1]:
                    break
            else:
                pytest.fail("the guest ended:\n" + "\n".join(console))
        yield Guest(f"http://127.0.0.1:{port}", "\n".join(console), memory)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def forward(protocol: str, port: int) -> str:
    return f"hostfwd={protocol}:127.0.0.1:{port}-169.254.0.21:49983"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def make_overlay(rootfs: Path, overlay: Path) -> None:
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", rootfs, overlay]
    subprocess.run(command, check=True)


async def test_boots_to_health(bundle: GuestBundle, rootfs: Path, tmp_path: Path) -> None:
    async with boot(bundle, rootfs, tmp_path) as guest, httpx.AsyncClient(base_url=guest.url, timeout=30) as client:
        assert (await client.get("/health")).status_code == 204
        assert "root /dev/vda on boot-test, 169.254.0.21/30" in guest.console
        assert not re.search(r"tsc: .*(fail|unstable)|clocksource: .*unstable|Call Trace", guest.console)


async def test_a_guest_that_is_held_but_not_frozen_goes_on_soon(
    bundle: GuestBundle, rootfs: Path, tmp_path: Path
) -> None:
    async with boot(bundle, rootfs, tmp_path) as guest, httpx.AsyncClient(base_url=guest.url, timeout=30) as client:
        await guest.call(b"aenv-hold ")
        await guest.until(HELD)
        assert (await client.get("/health")).status_code == 204
        await guest.until(IDLE)
        # With a token, only who knows it may hold the guest up.
        assert (await client.post("/init", json={"accessToken": "secret"})).status_code == 204
        await guest.call(b"aenv-hold wrong")
        for _ in range(3):
            assert (await client.get("/health")).status_code == 204
            assert guest.mailbox == IDLE
        await guest.call(b"aenv-hold secret")
        await guest.until(HELD)


async def test_the_time_that_was_told_to_an_earlier_generation_is_old_news(
    bundle: GuestBundle, rootfs: Path, tmp_path: Path
) -> None:
    async with boot(bundle, rootfs, tmp_path) as guest, httpx.AsyncClient(base_url=guest.url, timeout=30) as client:

        async def tell(**body: str) -> int:
            """The guest's clock, in seconds, after that."""
            assert (await client.post("/init", json=body)).status_code == 204
            return int((await client.get("/metrics")).json()["ts"])

        now, old = "2040-01-01T00:00:00Z", "2030-01-01T00:00:00Z"
        assert (before := await tell(generation="new", timestamp=now)) >= 2_208_988_800
        assert await tell(timestamp=old, toGeneration="earlier") >= before
        assert await tell(timestamp=old, toGeneration="new") < before


@dataclass
class DebugFs:
    """Looks into the image without mounting it."""

    image: Path

    def cat(self, path: str) -> str:
        return self._run(f"cat {path}")

    def owner_and_mode(self, path: str) -> tuple[int, int]:
        text = self._run(f"stat {path}")
        mode, user = re.search(r"Mode:\s+(\d+)", text), re.search(r"User:\s+(\d+)", text)
        assert mode, f"{path}: {text}"
        assert user
        return int(user[1]), int(mode[1], 8)

    def _run(self, command: str) -> str:
        return subprocess.run(["debugfs", "-R", command, self.image], check=True, capture_output=True, text=True).stdout


def test_base_image_is_what_template_builds_expect(rootfs: Path) -> None:
    image = DebugFs(rootfs)
    users = dict(line.split(":", 1) for line in image.cat("/etc/passwd").splitlines())
    assert users["user"].endswith(":1000:1000::/home/user:/bin/bash")
    passwords = {line.split(":")[0]: line.split(":")[1] for line in image.cat("/etc/shadow").splitlines()}
    assert passwords["root"].startswith(("!", "*"))
    assert passwords["user"].startswith("!")
    assert image.cat("/etc/sudoers.d/user") == "user ALL=(ALL:ALL) NOPASSWD: ALL\n"
    assert image.owner_and_mode("/etc/sudoers.d/user") == (0, 0o440)
    assert image.owner_and_mode("/home/user")[0] == 1000
    assert image.owner_and_mode("/home/user/.bashrc")[0] == 1000
    assert image.owner_and_mode("/code")[1] == 0o777
    assert image.owner_and_mode("/usr/local/bin")[1] == 0o777
    assert image.owner_and_mode("/usr/bin/sudo") == (0, 0o4755)
    assert image.cat("/etc/machine-id") == ""
    for command in ("python3", "git", "curl", "node", "ps", "bash"):
        assert image.owner_and_mode(f"/usr/bin/{command}")[0] == 0
