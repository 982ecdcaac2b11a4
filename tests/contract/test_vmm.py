"""What every `Vmm` does, the fake one and QEMU alike. QEMU runs real machines whose guests are a few instructions."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from aenv.config import VmmSettings
from aenv.errors import VmmError
from aenv.images.protocol import Disk
from aenv.vmm import process
from aenv.vmm.fake import FakeHost, FakeVmm
from aenv.vmm.protocol import Vm, VmHandle, Vmm, VmSpec
from aenv.vmm.qemu import QemuVmm
from vmm_lab import Lab, lab, needs_qemu

DEADLINE = 30.0


class Rig(Protocol):
    """One machine, on which servers come and go."""

    def server(self) -> Vmm:
        """A driver of a server that just started."""
        ...

    def spec(self, sandbox_id: str) -> VmSpec: ...

    async def crash(self, vm: Vm) -> None:
        """As `kill -9` of the VMM by somebody else."""
        ...

    async def boot_failing(self, server: Vmm, spec: VmSpec) -> None:
        """Boot what cannot boot."""
        ...

    async def boot_until_midway(self, server: Vmm, spec: VmSpec) -> "asyncio.Task[Vm]":
        """A boot that is under way."""
        ...

    def alive(self) -> set[VmHandle]: ...

    def leftovers(self) -> set[str]:
        """Whatever VMMs leave on a machine, named."""
        ...


class FakeRig:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = FakeHost()
        self.count = 0

    def server(self) -> FakeVmm:
        return FakeVmm(self.host)

    def spec(self, sandbox_id: str) -> VmSpec:
        self.count += 1
        none = Path("/nonexistent")
        return VmSpec(
            sandbox_id=sandbox_id,
            directory=self.root,
            uid=1,
            vcpus=1,
            memory_mb=32,
            kernel=none,
            initramfs=none,
            hostname=sandbox_id,
            disk=Disk(path=none, size=1),
            netns=none,
            tap="tap0",
            mac="",
            address=f"127.88.1.{self.count}",
        )

    async def crash(self, vm: Vm) -> None:
        await self.host.crash(next(m.spec.sandbox_id for m in self.host.machines.values() if m.handle == vm.handle))

    async def boot_failing(self, server: Vmm, spec: VmSpec) -> None:
        self.host.faults.append("boot_fails")
        await server.boot(spec)

    async def boot_until_midway(self, server: Vmm, spec: VmSpec) -> "asyncio.Task[Vm]":
        self.host.faults.append("boot_hangs")
        booting = asyncio.create_task(server.boot(spec))
        await self.host.booting.wait()
        return booting

    def alive(self) -> set[VmHandle]:
        return set(self.host.machines)

    def leftovers(self) -> set[str]:
        return {f"vmm of {machine.spec.sandbox_id}" for machine in self.host.machines.values()}


class QemuRig:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def server(self) -> QemuVmm:
        return QemuVmm(home=self.lab.home, settings=VmmSettings(accel="tcg"), bundle=self.lab.bundle)

    def spec(self, sandbox_id: str) -> VmSpec:
        return self.lab.spec(sandbox_id)

    async def crash(self, vm: Vm) -> None:
        os.kill(vm.handle.pid, signal.SIGKILL)

    async def boot_failing(self, server: Vmm, spec: VmSpec) -> None:
        spec.disk.path.unlink()
        await server.boot(spec)

    async def boot_until_midway(self, server: Vmm, spec: VmSpec) -> "asyncio.Task[Vm]":
        await server.info()
        booting = asyncio.create_task(server.boot(spec))
        await asyncio.sleep(0)  # it has begun, its thread may or may not have spawned yet
        return booting

    def alive(self) -> set[VmHandle]:
        return {found.handle for found in process.find(self.lab.home)}

    def leftovers(self) -> set[str]:
        processes = {f"vmm of {found.sandbox_id}" for found in process.find(self.lab.home)}
        sockets = {str(path) for path in self.lab.home.rglob("*.sock")}
        descriptors = {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
        ours = {text for text in descriptors if "pidfd" in text or "vmm-output" in text}
        groups = {
            str(path) for path in Path("/sys/fs/cgroup").rglob("aenv/*/*") if path.is_dir() and "-ctr" in path.name
        }
        return processes | sockets | ours | groups


@pytest.fixture(params=["fake", pytest.param("qemu", marks=[pytest.mark.vm, needs_qemu])])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    if request.param == "fake":
        fake = FakeRig(tmp_path)
        yield fake
        await fake.host.aclose()
        return
    with lab(tmp_path) as place:
        qemu = QemuRig(place)
        yield qemu
        last = qemu.server()
        await last.sweep(frozenset())
        await last.aclose()


@contextlib.asynccontextmanager
async def running(rig: Rig, *names: str) -> AsyncIterator[tuple[Vmm, list[tuple[VmSpec, Vm]]]]:
    """A server with these sandboxes running."""
    server = rig.server()
    async with asyncio.timeout(DEADLINE):
        specs = [rig.spec(name) for name in names]
        yield server, [(spec, await server.boot(spec)) for spec in specs]
    await server.aclose()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_vm_runs_until_it_is_killed(rig: Rig) -> None:
    async with running(rig, "a-ctr") as (_, [(_, vm)]):
        assert rig.alive() == {vm.handle}
        waiting = [asyncio.create_task(vm.wait()) for _ in range(3)]
        await vm.kill()
        assert {(await task).detail for task in waiting} == {"killed"}
        await vm.kill()
    assert rig.leftovers() == set()


async def test_a_vmm_killed_from_outside_is_seen_and_leaves_nothing(rig: Rig) -> None:
    async with running(rig, "a-ctr", "b-ctr") as (_, [(_, a), (_, b)]):
        await rig.crash(a)
        ended = await a.wait()
        assert ended.status == -9
        assert "signal 9" in ended.detail
        assert rig.alive() == {b.handle}  # the other never notices
        await a.kill()
        await b.kill()
    assert rig.leftovers() == set()


async def test_the_next_server_adopts(rig: Rig) -> None:
    async with running(rig, "a-ctr") as (first, [(spec, vm)]):
        await vm.detach()
        await first.aclose()
        assert rig.alive() == {vm.handle}
        second = rig.server()
        assert await second.sweep(frozenset({vm.handle})) == []
        adopted = await second.adopt(spec, vm.handle)
        assert adopted.handle == vm.handle
        await adopted.console()
        await rig.crash(adopted)
        await adopted.wait()
        await second.aclose()
    assert rig.leftovers() == set()


async def test_adoption_after_a_server_that_did_not_let_go(rig: Rig) -> None:
    """`kill -9` of a server closes its connections without a word; here two in one process take turns."""
    async with running(rig, "a-ctr") as (first, [(spec, vm)]):
        for _ in range(3):
            await vm.detach()
            vm = await rig.server().adopt(spec, vm.handle)
        await vm.kill()
        await first.aclose()
    assert rig.leftovers() == set()


async def test_what_is_gone_or_another_is_not_adopted(rig: Rig) -> None:
    async with running(rig, "a-ctr", "b-ctr") as (server, [(spec_a, a), (spec_b, b)]):
        await a.kill()
        with pytest.raises(VmmError, match="gone"):
            await server.adopt(spec_a, a.handle)
        with pytest.raises(VmmError, match="gone"):
            await server.adopt(spec_b, VmHandle(pid=b.handle.pid, start_time=b.handle.start_time + 1))
        with pytest.raises(VmmError, match="is not the VMM of"):
            await server.adopt(spec_a, b.handle)
        assert rig.alive() == {b.handle}
        await b.kill()
    assert rig.leftovers() == set()


async def test_a_sweep_ends_what_is_not_kept(rig: Rig) -> None:
    async with running(rig, "a-ctr", "b-ctr", "c-ctr") as (first, vms):
        for _, vm in vms:
            await vm.detach()
        await first.aclose()
        second = rig.server()
        kept = vms[1][1].handle
        assert sorted(await second.sweep(frozenset({kept}))) == ["a-ctr", "c-ctr"]
        assert rig.alive() == {kept}
        assert await second.sweep(frozenset()) == ["b-ctr"]
        assert await second.sweep(frozenset()) == []
        await second.aclose()
    assert rig.alive() == set()


async def test_a_boot_that_fails_leaves_nothing(rig: Rig) -> None:
    server = rig.server()
    spec = rig.spec("a-ctr")
    with pytest.raises(VmmError, match="a-ctr did not start"):
        await rig.boot_failing(server, spec)
    await server.aclose()
    assert rig.leftovers() == set()


async def test_a_boot_that_is_cancelled_leaves_nothing(rig: Rig) -> None:
    server = rig.server()
    booting = await rig.boot_until_midway(server, rig.spec("a-ctr"))
    booting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await booting
    await server.aclose()
    assert rig.leftovers() == set()


async def test_twenty_cycles_leave_nothing(rig: Rig) -> None:
    server = rig.server()
    spec = rig.spec("a-ctr")
    await (await server.boot(spec)).kill()  # what is opened once is open now
    before = open_files()
    for _ in range(20):
        await (await server.boot(spec)).kill()
    assert open_files() == before
    await server.aclose()
    assert rig.leftovers() == set()


async def test_info_names_the_driver(rig: Rig) -> None:
    info = await rig.server().info()
    assert info.driver in ("fake", "qemu")
    assert info.version
    assert info.accel
