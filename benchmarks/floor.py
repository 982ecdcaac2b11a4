"""The floor: the same guest state, restored by hand.

No jail, no cgroup, no API: a bare QEMU with the very arguments of the driver, over the template's memory as one raw
file, a tap, and a disk that is there already. Spawn, load the device state, tell the guest its name, continue. A
process of its own (this file as a script), whose network namespace, with the tap, goes with it.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from aenv.cli.errors import CliError
from aenv.config import Settings
from aenv.guest.envd import GuestInit
from aenv.guest.mailbox import Mailbox
from aenv.guest.provision import load_bundle
from aenv.images.client import layers_of
from aenv.images.protocol import Disk
from aenv.images.store import scratch_daemon
from aenv.network import namespace
from aenv.network.layout import GATEWAY_MAC, GUEST_MAC, TAP
from aenv.network.protocol import GATEWAY_ADDRESS, GUEST_ADDRESS
from aenv.snapshots.checkpoint import Checkpoint, read
from aenv.templates.store import TemplateStore
from aenv.vmm import jail
from aenv.vmm.launch import find_program
from aenv.vmm.protocol import VmSpec
from aenv.vmm.qemu_command import JailPath, command

_CLONE_NEWNET = 0x40000000
_DEADLINE = 60.0
_CONTROL = "floor.sock"
_SCRIPT = str(Path(__file__).resolve())


class Floor:
    """The other process. Made by `opened`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def restore(self) -> dict[str, float]:
        """Once more: milliseconds from the spawn to ``running`` virtual CPUs, and until the guest has ``greet``ed back:
        taken the name that it is told by its mailbox, as our create does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), _DEADLINE)
        if not line:
            raise CliError("the floor's process ended; its last words are above")
        found: dict[str, float] = json.loads(line)
        return found


@contextlib.asynccontextmanager
async def opened(settings: Settings, folder: Path) -> AsyncIterator[Floor]:
    """A floor for the `base` template of a home, made in `folder`. Its template must have been started once."""
    store = TemplateStore(settings.templates_dir)
    template = store.resolve("base")
    checkpoint = await asyncio.to_thread(read, store.checkpoint(template.id))
    if checkpoint.memory is None:
        raise CliError("the template has not been started yet: there is no state to load")
    memory, state = folder / "floor.memory", checkpoint.path / "state"
    async with scratch_daemon(settings) as daemon:
        await daemon.export(memory, layers=layers_of(checkpoint.memory))
        disk = await daemon.attach("floor", layers_of(checkpoint.disk), upper=folder / "floor.disk", target="fuse")
        argv = _command(settings, checkpoint, template.memory_mb, memory, disk.path)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", _SCRIPT, json.dumps(argv), str(state)),
            cwd=folder,  # where its control socket goes: a socket's address is short
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            yield Floor(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
            await daemon.detach("floor", discard_upper=True)


def _command(settings: Settings, checkpoint: Checkpoint, memory_mb: int, memory: Path, disk: Path) -> list[str]:
    """The driver's own argument vector, with the files where they are outside a jail."""
    assert checkpoint.manifest.memory is not None
    requires = checkpoint.manifest.memory.requires
    bundle = load_bundle(settings.home)
    spec = VmSpec(
        sandbox_id="floor",
        directory=memory.parent,
        uid=0,
        vcpus=requires.vcpus,
        memory_mb=memory_mb,
        kernel=bundle.kernel,
        initramfs=bundle.initramfs,
        hostname="floor",
        disk=Disk(path=disk, size=checkpoint.manifest.disk_size),
        netns=Path("/proc/self/ns/net"),
        tap=TAP,
        mac=GUEST_MAC,
        address=GUEST_ADDRESS,
        memory=memory,
    )
    machine = find_program(settings.vmm.qemu_binary, requires.accel).machine
    argv = command(machine, spec, cmdline="", name="floor", listen_fd=jail.LISTEN_FD, tap_fd=jail.TAP_FD)
    return [
        argument.replace(f"mem-path={JailPath.MEMORY}", f"mem-path={memory}").replace(
            json.dumps(JailPath.DISK), json.dumps(str(disk))
        )
        for argument in argv
    ]


# The other process.


def _serve(argv: list[str], state: str) -> None:
    """Restore once for each line of standard input, until that ends."""
    _enter_network()
    for _ in sys.stdin:
        print(json.dumps(_restore(argv, state)), flush=True)  # noqa: T201


def _enter_network() -> None:
    """A namespace with nothing but a tap like a sandbox's."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    namespace.add_tap(TAP, 0)
    with IPRoute() as links:
        (tap,) = links.link_lookup(ifname=TAP)
        links.link("set", index=tap, address=GATEWAY_MAC)
        links.addr("add", index=tap, address=GATEWAY_ADDRESS, prefixlen=30)
        links.link("set", index=tap, state="up")
        links.neigh("add", dst=GUEST_ADDRESS, lladdr=GUEST_MAC, ifindex=tap, state="permanent")


def _restore(argv: list[str], state: str) -> dict[str, float]:
    began = time.perf_counter()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_CONTROL)  # noqa: PTH108
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_CONTROL)
        listener.listen(1)
        tap = _open_tap()
        pid = os.posix_spawn(
            argv[0],
            argv,
            {"LC_ALL": "C"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, listener.fileno(), jail.LISTEN_FD),
                (os.POSIX_SPAWN_DUP2, tap, jail.TAP_FD),
            ],
        )
        os.close(tap)
    try:
        with socket.socket(socket.AF_UNIX) as qmp:
            qmp.settimeout(_DEADLINE)
            qmp.connect(_CONTROL)
            messages = qmp.makefile("r")
            _until(messages, "QMP")

            def execute(what: str, arguments: dict[str, str], sign: str = "return") -> None:
                qmp.sendall(json.dumps({"execute": what, "arguments": arguments}).encode())
                _until(messages, sign)

            execute("qmp_capabilities", {})
            execute("migrate-incoming", {"uri": f"file:{state}"}, "completed")
            mailbox = _tell(pid, argv)
            execute("cont", {})
            running = time.perf_counter()
            if not asyncio.run(mailbox.answered()):
                raise RuntimeError("the guest refused its name")
            answered = time.perf_counter()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"running": (running - began) * 1000, "greet": (answered - began) * 1000}


def _open_tap() -> int:
    """The tap, under a number that is none of those a VMM gets."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    flags = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, as the jail opens it
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", TAP.encode(), flags))  # TUNSETIFF
    high = fcntl.fcntl(device, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(device)
    return high


def _until(messages: Any, sign: str) -> None:
    """Read up to the message that has this key, or whose event has this status."""
    for line in messages:
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise RuntimeError(f"QEMU refused: {message['error']}")
        if sign in message or (message.get("event") == "MIGRATION" and message["data"]["status"] in (sign, "failed")):
            return
    raise RuntimeError("QEMU ended")


def _tell(pid: int, argv: list[str]) -> Mailbox:
    """Leave the guest its name, as a create does."""
    (backend,) = [argument for argument in argv if argument.startswith("memory-backend-file")]
    memory = backend.partition("mem-path=")[2].partition(",")[0]
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    (address,) = [int(line.partition("-")[0], 16) for line in lines if line.endswith(memory)]
    init = GuestInit(
        sandbox_id="floor",
        template_id="base",
        generation=os.urandom(16).hex(),
        hostname="floor",
        access_token="floor",
        env_vars={},
        default_user="user",
        default_workdir="/home/user",
    )
    mailbox = Mailbox(pid, address)
    if not mailbox.put(init.message()):
        raise RuntimeError("the guest does not wait for its name")
    return mailbox


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), sys.argv[2])
