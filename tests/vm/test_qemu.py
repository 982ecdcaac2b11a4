"""QEMU for real: its jail, its console, how its guests end, what it costs a host when it is hostile."""

import asyncio
import dataclasses
import json
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.config import VmmSettings
from aenv.errors import VmmError
from aenv.guest import mailbox
from aenv.guest.provision import GuestBundle
from aenv.vmm import cgroup, jail, qemu_vm
from aenv.vmm.accel import PROBE_DEADLINE, AccelProver, try_kvm
from aenv.vmm.launch import QMP_SOCKET, find_program
from aenv.vmm.process import SECOND, Process, mark, read_mark, read_start_time
from aenv.vmm.protocol import VmHandle
from aenv.vmm.qemu import QemuVmm
from aenv.vmm.qemu_command import CONSOLE_BYTES
from aenv.vmm.qemu_vm import QemuVm
from aenv.vmm.qmp import QmpClient
from vmm_lab import FLOOD, HALT, HELD, RESET, WAIT, Lab, lab, needs_qemu, real_bundle

pytestmark = [pytest.mark.vm, needs_qemu]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


@pytest.fixture
async def vmm(place: Lab) -> AsyncIterator[QemuVmm]:
    made = QemuVmm(home=place.home, settings=VmmSettings(accel="tcg"), bundle=place.bundle)
    yield made
    await made.sweep(frozenset())
    await made.aclose()


def proc(vm: QemuVm, name: str) -> Path:
    return Path("/proc") / str(vm.handle.pid) / name


def status(vm: QemuVm) -> dict[str, str]:
    lines = proc(vm, "status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def jail_server() -> VmHandle:
    """The one that this process has started."""
    for entry in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in map(int, entry.read_text().split()):
            if jail.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                start_time = read_start_time(pid)
                assert start_time is not None
                return VmHandle(pid=pid, start_time=start_time)
    raise AssertionError("there is no jail server")


async def console_until(vm: QemuVm, text: bytes) -> bytes:
    """The console, read until it contains `text`."""
    got = b""
    async with asyncio.timeout(60):
        while text not in got:
            got += await vm.console()
            await asyncio.sleep(0.02)  # another machine: there is no event
    return got


class TestJail:
    async def test_user_groups_capabilities(self, place: Lab, vmm: QemuVmm) -> None:
        spec = place.spec("sb")
        vm = await vmm.boot(spec)
        told = status(vm)
        assert told["Uid"].split() == told["Gid"].split() == [str(spec.uid)] * 4
        assert told["Groups"] == ""
        assert {int(told[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert (told["NoNewPrivs"], told["Seccomp"]) == ("1", "2")

    async def test_it_sees_only_itself_and_its_sandbox(self, place: Lab, vmm: QemuVmm) -> None:
        vm = await vmm.boot(place.spec("sb"))
        other = await vmm.boot(place.spec("other"))
        root = proc(vm, "root")
        top = {entry.name for entry in root.iterdir()}
        assert {"disk", "kernel", "initramfs", "dev", "usr"} <= top
        assert top.isdisjoint({"home", "root", "var", "proc", "sys", "run", "tmp"})
        assert [entry.name for entry in (root / "dev").iterdir()] == ["null"]
        assert [entry.name for entry in (root / "etc").iterdir()] == ["ld.so.cache"]
        writable = [
            line.split()[4]
            for line in proc(vm, "mountinfo").read_text().splitlines()
            if "rw" in line.split()[5].split(",")
        ]
        assert sorted(writable) == ["/disk", "/state"]
        namespaces = ("mnt", "net", "ipc", "uts", "cgroup")
        for name in namespaces:
            assert len({proc(vm, f"ns/{name}").readlink(), proc(other, f"ns/{name}").readlink()}) == 2
            assert str(proc(vm, f"ns/{name}").readlink()) != os.readlink(f"/proc/self/ns/{name}")  # noqa: PTH115

    async def test_its_network_namespace_is_empty(self, place: Lab, vmm: QemuVmm) -> None:
        """It holds its tap by descriptor: the VMM itself can reach no network, not even the guest's."""
        vm = await vmm.boot(place.spec("sb"))
        devices = proc(vm, "net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]
        assert proc(vm, "net/route").read_text().splitlines()[1:] == []

    async def test_descriptors_and_limits(self, place: Lab, vmm: QemuVmm) -> None:
        secret = os.open(place.root, os.O_RDONLY)
        os.set_inheritable(secret, True)  # as a careless library of the server's might
        try:
            vm = await vmm.boot(place.spec("sb"))
        finally:
            os.close(secret)
        targets = [str(fd.readlink()).split(":")[0] for fd in proc(vm, "fd").iterdir()]
        assert targets.count("socket") == 2  # QMP's, listening and connected
        assert set(targets) <= {
            "/dev/null",
            "/memfd",
            "socket",
            "/dev/net/tun",
            "anon_inode",
            "/disk",
        }
        limits = {line[:26].strip(): line[26:].split()[0] for line in proc(vm, "limits").read_text().splitlines()}
        assert limits["Max core file size"] == "0"
        assert int(limits["Max file size"]) < 128 << 20
        assert proc(vm, "oom_score_adj").read_text().strip() == "500"
        assert os.getsid(vm.handle.pid) == vm.handle.pid

    async def test_it_comes_second_once_it_has_had_its_start(
        self, place: Lab, vmm: QemuVmm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(qemu_vm, "_HEAD_START", 0.5)
        vm = await vmm.boot(place.spec("sb"))
        pid = vm.handle.pid
        threads = [int(task) for task in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {os.getpriority(os.PRIO_PROCESS, 0)}
        async with asyncio.timeout(30):
            while os.getpriority(os.PRIO_PROCESS, pid) != SECOND:  # noqa: ASYNC110 (the kernel tells nobody)
                await asyncio.sleep(0.05)
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {SECOND}
        if proc(vm, "autogroup").exists():
            assert proc(vm, "autogroup").read_text().split()[-2:] == ["nice", str(SECOND)]

    async def test_the_mark_names_home_and_sandbox(self, place: Lab, vmm: QemuVmm) -> None:
        vm = await vmm.boot(place.spec("sb"))
        assert read_mark(vm.handle.pid) == mark(place.home, "sb")
        assert (
            await QemuVmm(home=place.root, settings=VmmSettings(accel="tcg"), bundle=place.bundle).sweep(frozenset())
            == []
        ), "another home's server leaves it alone"

    async def test_its_cgroup(self, place: Lab, vmm: QemuVmm) -> None:
        support = await vmm.cgroups()
        if support.root is None:
            pytest.skip(support.detail)
        vm = await vmm.boot(place.spec("sb"))
        group = support.root / "sb"
        assert (group / "cgroup.procs").read_text().split() == [str(vm.handle.pid)]
        await vm.kill()
        assert not group.exists()


class TestJailServer:
    """The process that starts them: it may die and VMMs do not notice, it holds nothing of theirs, nor they of its."""

    async def test_it_is_replaced_when_it_died(self, place: Lab, vmm: QemuVmm) -> None:
        first = await vmm.boot(place.spec("sb"))
        server = jail_server()
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        second = await vmm.boot(place.spec("other"))
        assert jail_server() != server
        for vm in (first, second):
            assert await console_until(vm, b"hello")

    async def test_one_that_hangs_is_given_up(self, place: Lab, vmm: QemuVmm) -> None:
        await vmm.boot(place.spec("sb"))
        server, channel = jail_server(), vmm._jailer._channel
        assert channel is not None
        channel.settimeout(0.2)
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(VmmError, match="no answer of the jail server"):
            await vmm.boot(place.spec("other"))
        assert read_start_time(server.pid) is None
        await vmm.boot(place.spec("third"))

    async def test_it_ends_with_its_driver(self, place: Lab, vmm: QemuVmm) -> None:
        vm = await vmm.boot(place.spec("sb"))
        server = jail_server()
        await vmm.aclose()
        assert read_start_time(server.pid) is None
        assert await console_until(vm, b"hello")
        await vmm.boot(place.spec("other"))  # made anew

    async def test_many_at_once(self, place: Lab, vmm: QemuVmm) -> None:
        async with asyncio.TaskGroup() as group:
            booting = [group.create_task(vmm.boot(place.spec(f"sb{n}"))) for n in range(6)]
        for vm in (task.result() for task in booting):
            assert await console_until(vm, b"hello") == b"hello\n"
        assert set(os.listdir(f"/proc/{jail_server().pid}/fd")) == {"0", "1", "2", str(jail.CHANNEL_FD)}  # noqa: PTH208

    async def test_a_cgroup_that_is_gone(self, place: Lab, vmm: QemuVmm, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cgroup, "create", lambda *_, **__: place.root / "absent")
        with pytest.raises(VmmError, match=r"sb did not start: .*No such file"):
            await vmm.boot(place.spec("sb"))


class TestMailbox:
    async def test_a_guest_that_waits_is_told_who_it_is(self, place: Lab, vmm: QemuVmm) -> None:
        vm = await vmm.boot(place.spec("sb", action=WAIT))
        memory = await vm.memory()
        where = memory.ranges[0].address + mailbox.ADDRESS
        with proc(vm, "mem").open("rb", buffering=0) as file:

            def state() -> int:
                return struct.unpack_from("<I", os.pread(file.fileno(), 12, where), 8)[0]

            async with asyncio.timeout(30):
                while state() != 1:  # noqa: ASYNC110 (another machine)
                    await asyncio.sleep(0.01)
            await vm.freeze()
            async with asyncio.timeout(30):
                assert await vm.greet(b'{"hostname":"h"}')
            assert state() == 3
            assert os.pread(file.fileno(), 16, where + 64) == b'{"hostname":"h"}'
            await vm.freeze()
            assert not await vm.greet(b"{}"), "it does not wait any more"

    async def test_the_source_of_a_capture_is_told_to_go_on(self, place: Lab, vmm: QemuVmm) -> None:
        vm = await vmm.boot(place.spec("sb", action=WAIT))
        where = (await vm.memory()).ranges[0].address + mailbox.ADDRESS
        with proc(vm, "mem").open("rb", buffering=0) as file:

            def head() -> tuple[int, int]:
                state, length = struct.unpack_from("<II", os.pread(file.fileno(), 16, where), 8)
                return state, length

            async with asyncio.timeout(30):
                while head() != (1, 0):  # noqa: ASYNC110 (another machine)
                    await asyncio.sleep(0.01)
                await vm.freeze()
                await vm.thaw()
                while head() != (3, 2):  # noqa: ASYNC110 (another machine)
                    await asyncio.sleep(0.01)

    async def test_a_guest_that_dies_while_it_is_told(self, place: Lab, vmm: QemuVmm) -> None:
        vm = await vmm.boot(place.spec("sb", action=HELD + HALT))
        where = (await vm.memory()).ranges[0].address + mailbox.ADDRESS
        with proc(vm, "mem").open("rb", buffering=0) as file:
            async with asyncio.timeout(30):
                while os.pread(file.fileno(), 9, where)[8:] != b"\1":  # noqa: ASYNC110 (another machine)
                    await asyncio.sleep(0.01)
        await vm.freeze()
        greeting = asyncio.create_task(vm.greet(b"{}"))
        await asyncio.sleep(0)
        os.kill(vm.handle.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            with pytest.raises(VmmError):
                await greeting
            await vm.wait()


class TestConsole:
    async def test_it_is_read_and_logged(self, place: Lab, vmm: QemuVmm) -> None:
        spec = place.spec("sb", text=b"hello from the guest\n")
        vm = await vmm.boot(spec)
        assert await console_until(vm, b"guest\n") == b"hello from the guest\n"
        assert (spec.directory / "serial.log").read_bytes() == b"hello from the guest\n"

    async def test_endless_output_costs_the_host_nothing(self, place: Lab, vmm: QemuVmm) -> None:
        spec = place.spec("sb", action=FLOOD)
        vm = await vmm.boot(spec)
        for _ in range(4):
            got = b""
            async with asyncio.timeout(60):
                while not got:
                    got = await vm.console()
            assert len(got) <= CONSOLE_BYTES
        assert (spec.directory / "serial.log").stat().st_size <= 2 * CONSOLE_BYTES
        assert sum(path.stat().st_size for path in spec.directory.iterdir()) < (1 << 20) + 3 * CONSOLE_BYTES

    async def test_a_planted_link_is_not_written_through(self, place: Lab, vmm: QemuVmm) -> None:
        victim = place.root / "victim"
        victim.write_text("precious")
        spec = place.spec("sb")
        (spec.directory / "serial.log").symlink_to(victim)
        vm = await vmm.boot(spec)
        with pytest.raises(VmmError, match=r"serial\.log"):
            await console_until(vm, b"hello")
        assert victim.read_text() == "precious"


class TestEnd:
    async def test_a_guest_that_ends_is_told_with_its_last_words(self, place: Lab, vmm: QemuVmm) -> None:
        spec = place.spec("sb", action=RESET, text=b"last words\n")
        vm = await vmm.boot(spec)
        async with asyncio.timeout(60):
            ended = await vm.wait()
        assert ended.detail == "the guest ended: guest-reset; its console ends with 'last words'"
        assert (spec.directory / "serial.log").read_bytes() == b"last words\n"
        assert read_start_time(vm.handle.pid) is None

    async def test_a_guest_that_ended_while_no_server_ran_is_not_adopted(self, place: Lab, vmm: QemuVmm) -> None:
        spec = place.spec("sb")
        vm = await vmm.boot(spec)
        await vm.detach()
        ended = asyncio.Event()
        qmp = await QmpClient.connect(spec.directory / QMP_SOCKET, on_event=lambda event, _: ended.set())
        await qmp.execute("system_reset")
        async with asyncio.timeout(10):
            await ended.wait()
        await qmp.aclose()
        with pytest.raises(VmmError, match="the guest shut down"):
            await vmm.adopt(spec, vm.handle)
        assert read_start_time(vm.handle.pid) is None

    async def test_it_survives_kill_9_of_its_server(self, place: Lab, vmm: QemuVmm, tmp_path: Path) -> None:
        spec = place.spec("sb")
        script = """
import asyncio, sys
from vmm_lab import *
from test_qemu import *
async def main():
    lab_ = Lab(Path(sys.argv[1]), sys.argv[2])
    spec = eval(sys.argv[3])
    vmm = QemuVmm(home=lab_.home, settings=VmmSettings(accel="tcg"), bundle=lab_.bundle)
    vm = await vmm.boot(spec)
    print(json.dumps([dataclasses.asdict(handle) for handle in (vm.handle, jail_server())]), flush=True)
    await vm.wait()
asyncio.run(main())
"""
        text = repr(spec).replace("PosixPath", "Path")
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script, str(place.root), place.netns, text),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=asyncio.subprocess.PIPE,
        )
        assert server.stdout is not None
        async with asyncio.timeout(60):
            handle, helper = [VmHandle(**fields) for fields in json.loads(await server.stdout.readline())]
            jail_server_of_it = Process.opened(helper)
            server.send_signal(signal.SIGKILL)
            await server.wait()
            await jail_server_of_it.wait()
            jail_server_of_it.close()
        assert await vmm.sweep(frozenset({handle})) == []
        adopted = await vmm.adopt(spec, handle)
        await adopted.kill()
        assert read_start_time(adopted.handle.pid) is None
        assert list(spec.directory.glob("*.sock")) == []


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda spec: {"tap": "absent0"}, "opening the tap absent0"),
            (lambda spec: {"netns": Path("/run/netns/aenv-test-none")}, "aenv-test-none"),
            (lambda spec: {"kernel": Path("/nonexistent")}, "/nonexistent, which the guest starts from"),
            (lambda spec: {"kernel": spec.initramfs}, "kernel"),
            (lambda spec: {"mac": "no mac"}, "mac"),
            (lambda spec: {"vcpus": 0}, "CPU"),
        ],
        ids=["tap", "netns", "kernel absent", "kernel garbage", "mac", "vcpus"],
    )
    async def test_what_cannot_boot_says_why(self, place: Lab, vmm: QemuVmm, change: object, complaint: str) -> None:
        spec = place.spec("sb")
        assert callable(change)
        with pytest.raises(VmmError, match=f"(?i){complaint}"):
            await vmm.boot(dataclasses.replace(spec, **change(spec)))
        assert await vmm.sweep(frozenset()) == []

    async def test_an_unreadable_kernel(self, place: Lab, vmm: QemuVmm) -> None:
        spec = place.spec("sb")
        spec.kernel.chmod(0o600)
        with pytest.raises(VmmError, match="chmod o\\+r"):
            await vmm.boot(spec)

    async def test_no_qemu(self, place: Lab) -> None:
        settings = VmmSettings(accel="tcg", qemu_binary="qemu-system-none")
        with pytest.raises(VmmError, match="qemu-system-none is not installed"):
            await QemuVmm(home=place.home, settings=settings, bundle=place.bundle).info()


class TestTrial:
    """The trial of an acceleration, with emulation in KVM's place: what matters is how it ends."""

    def bundle(self, place: Lab, action: bytes, text: bytes = b"hello\n") -> GuestBundle:
        spec = place.spec("trial", action=action, text=text)
        return dataclasses.replace(place.bundle, kernel=spec.kernel, initramfs=spec.initramfs)

    async def test_a_guest_that_hangs_is_given_up(self, place: Lab) -> None:
        program = find_program(None, "tcg")
        decided = await try_kvm(program, self.bundle(place, HALT), uid=2_899_999, deadline=2)
        assert decided.name == "tcg"
        assert "did not reach user space within 2 s" in decided.reason

    async def test_a_guest_that_ends_early_is_refused(self, place: Lab) -> None:
        program = find_program(None, "tcg")
        decided = await try_kvm(program, self.bundle(place, RESET), uid=2_899_999, deadline=30)
        assert decided.name == "tcg"
        assert "ended before user space" in decided.reason
        assert "'hello'" in decided.reason

    async def test_a_guest_that_gets_there_is_the_proof(self, place: Lab) -> None:
        program = find_program(None, "tcg")
        bundle = self.bundle(place, RESET, b"Run /init as init process\n")
        assert (await try_kvm(program, bundle, uid=2_899_999, deadline=30)).name == "kvm"


class TestRealGuest:
    async def test_accel_auto_decides_in_time_and_remembers(self, place: Lab) -> None:
        prover = AccelProver(home=place.home, settings=VmmSettings(), bundle=real_bundle())
        async with asyncio.timeout(PROBE_DEADLINE + 10):
            first = await prover.decide()
        assert first.name in ("kvm", "tcg")
        assert first.reason
        again = AccelProver(home=place.home, settings=VmmSettings(), bundle=real_bundle())
        assert await again.decide() == first

    async def test_the_kernel_reaches_user_space(self, place: Lab, vmm: QemuVmm) -> None:
        """Its disk is empty, so its init gives up, which ends the guest with a reason on its console."""
        bundle = real_bundle()
        spec = dataclasses.replace(place.spec("sb"), kernel=bundle.kernel, initramfs=bundle.initramfs, memory_mb=256)
        vm = await vmm.boot(spec)
        async with asyncio.timeout(90):
            ended = await vm.wait()
        assert "the guest ended" in ended.detail
        assert b"/dev/vda" in (spec.directory / "serial.log").read_bytes()


def test_cgroup_support_is_described() -> None:
    assert cgroup.probe(Path("/nonexistent-home"), mountinfo=Path("/dev/null")).detail.startswith("no cgroup2 mount")
