"""What every `Vmm` does, the fake one and QEMU alike. QEMU runs real machines whose guests are a few instructions."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from aenv.config import VmmSettings
from aenv.errors import VmmError
from aenv.images.protocol import Disk, GuestMemory
from aenv.vmm import process
from aenv.vmm.fake import FakeHost, FakeVmm
from aenv.vmm.fake_guest import ENVD_PORT
from aenv.vmm.protocol import Vm, VmHandle, Vmm, VmSpec
from aenv.vmm.qemu import QemuVmm
from vmm_lab import BEAT, Lab, beats, lab, needs_qemu

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

    async def look(self, spec: VmSpec, vm: Vm) -> tuple[str, int]:
        """Who the running guest is, and how far it has come since its boot: at every look further."""
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

    async def look(self, spec: VmSpec, vm: Vm) -> tuple[str, int]:
        async with httpx.AsyncClient(base_url=f"http://{spec.address}:{ENVD_PORT}") as http:
            who = (await http.get("/boot-id")).json()["boot_id"]
            return who, (await http.post("/processes")).json()["pid"]

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
        return self.lab.spec(sandbox_id, action=BEAT)

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

    async def look(self, spec: VmSpec, vm: Vm) -> tuple[str, int]:
        await vm.console()
        console = b""
        while len(seen := beats(console)) < 2:
            await asyncio.sleep(0.01)  # another machine: there is no event
            console += await vm.console()
        return seen[-1]

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


async def dump(vm: Vm, path: Path) -> Path:
    """A copy of the guest's memory, with holes where there are zeros."""
    memory = await vm.memory()
    assert process.read_start_time(memory.pid) == memory.start_time
    assert sum(part.length for part in memory.ranges) == memory.size
    copy(memory, path)
    return path


def copy(memory: GuestMemory, path: Path) -> None:
    with Path(f"/proc/{memory.pid}/mem").open("rb", buffering=0) as source, path.open("wb", buffering=0) as target:
        target.truncate(memory.size)
        for part in memory.ranges:
            for at in range(0, part.length, 4096):
                source.seek(part.address + at)
                if any(page := source.read(4096)):
                    target.seek(part.offset + at)
                    target.write(page)
    path.chmod(0o644)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A guest at rest: who it was and how far it had come, its state, its memory and the disk that go with them."""

    looked: tuple[str, int]
    state: bytes
    memory: Path

    def spec(self, rig: Rig, sandbox_id: str) -> VmSpec:
        """To go on as this sandbox. The guests of these tests do not use their disks."""
        return dataclasses.replace(rig.spec(sandbox_id), memory=self.memory)


async def saved(rig: Rig, server: Vmm, path: Path) -> Saved:
    """A guest that was booted and is gone."""
    spec = rig.spec("saved-ctr")
    vm = await server.boot(spec)
    looked = await rig.look(spec, vm)
    await vm.freeze()
    memory, state = await dump(vm, path / "memory"), await vm.save()
    await vm.kill()
    return Saved(looked=looked, state=state, memory=memory)


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
    assert info.driver.partition("/")[0] in ("fake", "qemu")
    assert info.version
    assert info.accel
    assert info.cpu
    assert info == await rig.server().info()


class TestState:
    """Guests that stop and go on."""

    async def test_a_saved_guest_goes_on(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig) as (server, _):
            kept = await saved(rig, server, tmp_path)
            before = kept.memory.read_bytes()
            spec = kept.spec(rig, "a-ctr")
            vm = await server.prepare(spec)
            await vm.load(kept.state)
            await vm.thaw()
            who, progress = await rig.look(spec, vm)
            assert who == kept.looked[0]
            assert progress > kept.looked[1]
            await vm.freeze()
            second = await dump(vm, tmp_path / "second"), await vm.save()
            assert second[0].read_bytes() != before
            await vm.kill()
            # What a restored guest became is saved just as well.
            spec = dataclasses.replace(kept.spec(rig, "b-ctr"), memory=second[0])
            later = await server.prepare(spec)
            await later.load(second[1])
            await later.thaw()
            assert await rig.look(spec, later) > (who, progress)
            await later.kill()
            assert kept.memory.read_bytes() == before
        assert rig.leftovers() == set()

    async def test_guests_of_one_memory_do_not_meet(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig) as (server, _):
            kept = await saved(rig, server, tmp_path)
            before = kept.memory.read_bytes()
            specs = [kept.spec(rig, name) for name in ("a-ctr", "b-ctr")]
            a, b = [await server.prepare(spec) for spec in specs]
            for vm in (a, b):
                await vm.load(kept.state)
            untouched = (await dump(b, tmp_path / "b")).read_bytes()
            await a.thaw()
            progress = [await rig.look(specs[0], a) for _ in range(3)]
            assert {who for who, _ in progress} == {kept.looked[0]}
            await a.freeze()
            assert (await dump(a, tmp_path / "a")).read_bytes() != untouched
            assert (await dump(b, tmp_path / "b")).read_bytes() == untouched
            assert kept.memory.read_bytes() == before
            for vm in (a, b):
                await vm.kill()
        assert rig.leftovers() == set()

    async def test_frozen_is_frozen(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig, "a-ctr") as (_, [(spec, vm)]):
            first = await rig.look(spec, vm)
            for _ in range(2):
                await vm.freeze()
            state, memory = await vm.save(), (await dump(vm, tmp_path / "first")).read_bytes()
            assert (await dump(vm, tmp_path / "second")).read_bytes() == memory
            assert len(await vm.save()) == len(state)
            for _ in range(2):
                await vm.thaw()
            who, progress = await rig.look(spec, vm)
            assert who == first[0]
            assert progress > first[1]
            await vm.kill()
        assert rig.leftovers() == set()

    @pytest.mark.parametrize("ticks", [0, 1, 2, 4])
    async def test_a_freeze_or_thaw_that_nobody_waited_for(self, rig: Rig, tmp_path: Path, ticks: int) -> None:
        """Whether it was carried out is not known then; the next call must not believe either."""

        async def abandon(call: Coroutine[None, None, None]) -> None:
            calling = asyncio.create_task(call)
            for _ in range(ticks):
                await asyncio.sleep(0)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

        async with running(rig, "a-ctr") as (_, [(spec, vm)]):
            who, progress = await rig.look(spec, vm)
            await abandon(vm.freeze())
            await vm.thaw()
            same, further = await rig.look(spec, vm)
            assert (same, further > progress) == (who, True)
            await vm.freeze()
            await abandon(vm.thaw())
            await vm.freeze()
            first, second = [(await dump(vm, tmp_path / name)).read_bytes() for name in ("first", "second")]
            assert first == second
            await vm.kill()
        assert rig.leftovers() == set()

    async def test_what_must_be_frozen_must_be_frozen(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig, "a-ctr") as (server, [(_, vm)]):
            kept = await saved(rig, server, tmp_path)
            with pytest.raises(VmmError, match="is running, not frozen"):
                await vm.save()
            with pytest.raises(VmmError, match="is running, not waiting"):
                await vm.load(kept.state)
            waiting = await server.prepare(kept.spec(rig, "b-ctr"))
            for refused in (waiting.thaw, waiting.freeze, waiting.save):
                with pytest.raises(VmmError, match="is waiting, not"):
                    await refused()
            await waiting.load(kept.state)
            with pytest.raises(VmmError, match="is frozen, not waiting"):
                await waiting.load(kept.state)
            await vm.kill()
            await waiting.kill()
            for call in (vm.freeze, waiting.thaw, waiting.save):
                with pytest.raises(VmmError):
                    await call()
        assert rig.leftovers() == set()

    async def test_a_kill_whatever_it_does(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig, "a-ctr") as (server, [(_, frozen)]):
            kept = await saved(rig, server, tmp_path)
            waiting, loaded = [await server.prepare(kept.spec(rig, name)) for name in ("b-ctr", "c-ctr")]
            await frozen.freeze()
            await loaded.load(kept.state)
            assert rig.alive() == {frozen.handle, waiting.handle, loaded.handle}
            for vm in (frozen, waiting, loaded):
                await vm.kill()
                assert (await vm.wait()).detail == "killed"
        assert rig.leftovers() == set()

    async def test_the_end_of_a_waiting_or_frozen_vmm_is_seen(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig, "a-ctr") as (server, [(_, frozen)]):
            kept = await saved(rig, server, tmp_path)
            waiting = await server.prepare(kept.spec(rig, "b-ctr"))
            await frozen.freeze()
            for vm in (frozen, waiting):
                await rig.crash(vm)
                assert "signal 9" in (await vm.wait()).detail
        assert rig.leftovers() == set()

    async def test_a_frozen_guest_is_adopted_and_goes_on(self, rig: Rig) -> None:
        async with running(rig, "a-ctr") as (first, [(spec, vm)]):
            before = await rig.look(spec, vm)
            await vm.freeze()
            await vm.detach()
            await first.aclose()
            second = rig.server()
            adopted = await second.adopt(spec, vm.handle)
            who, progress = await rig.look(spec, adopted)
            assert who == before[0]
            assert progress > before[1]
            await adopted.kill()
            await second.aclose()
        assert rig.leftovers() == set()

    async def test_one_that_never_got_its_state_is_not_adopted(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig) as (server, _):
            kept = await saved(rig, server, tmp_path)
            spec = kept.spec(rig, "a-ctr")
            vm = await server.prepare(spec)
            await vm.detach()
            with pytest.raises(VmmError, match="never got a state"):
                await rig.server().adopt(spec, vm.handle)
        assert rig.leftovers() == set()

    @pytest.mark.parametrize(
        "state", [b"", b"garbage" * 1000, bytes(64 << 20), bytes((64 << 20) + 1)], ids=["empty", "bad", "most", "more"]
    )
    async def test_a_state_that_is_none(self, rig: Rig, tmp_path: Path, state: bytes) -> None:
        async with running(rig) as (server, _):
            kept = await saved(rig, server, tmp_path)
            vm = await server.prepare(kept.spec(rig, "a-ctr"))
            with pytest.raises(VmmError):
                await vm.load(state)
            with pytest.raises(VmmError):
                await vm.thaw()
            await vm.kill()
        assert rig.leftovers() == set()

    async def test_a_state_cut_short(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig) as (server, _):
            kept = await saved(rig, server, tmp_path)
            vm = await server.prepare(kept.spec(rig, "a-ctr"))
            with pytest.raises(VmmError):
                await vm.load(kept.state[: len(kept.state) // 2])
            await vm.kill()
        assert rig.leftovers() == set()

    async def test_without_memory_nothing_is_prepared(self, rig: Rig, tmp_path: Path) -> None:
        server = rig.server()
        with pytest.raises(VmmError, match="no memory"):
            await server.prepare(rig.spec("a-ctr"))
        absent, short = tmp_path / "absent", tmp_path / "short"
        short.write_bytes(bytes(4096))
        short.chmod(0o644)
        for number, memory in enumerate((absent, short)):
            spec = dataclasses.replace(rig.spec(f"b{number}-ctr"), memory=memory)
            with pytest.raises(VmmError, match="did not start"):
                await server.prepare(spec)
        await server.aclose()
        assert rig.leftovers() == set()

    async def test_a_preparation_that_is_cancelled_leaves_nothing(self, rig: Rig, tmp_path: Path) -> None:
        async with running(rig) as (server, _):
            kept = await saved(rig, server, tmp_path)
            preparing = asyncio.create_task(server.prepare(kept.spec(rig, "a-ctr")))
            await asyncio.sleep(0)  # it has begun
            preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # the fake has nothing to wait for
                await (await preparing).kill()
        assert rig.leftovers() == set()
