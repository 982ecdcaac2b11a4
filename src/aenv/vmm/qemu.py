"""The QEMU driver: virtual machines of the kind `microvm`, each in a jail of its own."""

import asyncio
import errno
import os
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

from aenv.config import VmmSettings
from aenv.errors import InsufficientStorage, VmmError
from aenv.guest.cmdline import kernel_cmdline
from aenv.guest.provision import GuestBundle
from aenv.guest.tsc import host_tsc_khz
from aenv.vmm import cgroup
from aenv.vmm.accel import Accel, AccelProver
from aenv.vmm.cpu import cpu_identity
from aenv.vmm.jailer import Jailer
from aenv.vmm.launch import QMP_SOCKET, Output, Program, find_program, spawn
from aenv.vmm.process import Found, Process, find, mark, read_mark
from aenv.vmm.protocol import VmHandle, VmmInfo, VmSpec
from aenv.vmm.qemu_command import MACHINE, TRANSLATION_CACHE_MB
from aenv.vmm.qemu_vm import QemuVm

_CONTROL_DEADLINE = 20.0
"""Seconds until a new VMM answers; 30 ms on an idle machine."""
_OVERHEAD_MB = 256
"""Of QEMU beyond the guest's memory and the translation cache, for the cgroup's limit."""
_MAX_TASKS = 128
"""Threads of one VMM beyond its virtual CPUs: main loop, RCU, at most 64 for disk I/O."""


@dataclass(frozen=True, slots=True)
class _Host:
    """What was found out about this host, once."""

    program: Program
    accel: Accel
    cgroups: cgroup.CgroupSupport
    tsc_khz: int | None
    cpu: str


class QemuVmm:
    """`Vmm` with QEMU. Needs root, to make the jails. `bundle` is what a trial of KVM boots."""

    def __init__(
        self,
        *,
        home: Path,
        settings: VmmSettings,
        bundle: GuestBundle,
        kill_deadline: float = 10.0,
    ) -> None:
        self._home = Path(os.path.realpath(home))
        self._settings = settings
        self._accel = AccelProver(home=self._home, settings=settings, bundle=bundle)
        self._kill_deadline = kill_deadline
        self._jailer = Jailer()
        self._host: _Host | None = None
        self._host_lock = asyncio.Lock()

    async def info(self) -> VmmInfo:
        host = await self._find_out()
        return VmmInfo(f"qemu/{MACHINE}", host.program.version, host.accel.name, host.cpu)

    async def boot(self, spec: VmSpec) -> QemuVm:
        return await self._start(replace(spec, memory=None))

    async def prepare(self, spec: VmSpec) -> QemuVm:
        if spec.memory is None:
            raise VmmError(f"the VMM of {spec.sandbox_id} did not start: there is no memory to go on from")
        return await self._start(spec)

    async def _start(self, spec: VmSpec) -> QemuVm:
        host = await self._find_out()
        output: Output | None = None
        vm: QemuVm | None = None
        try:
            output = Output()
            vm = await self._launch(host, spec, output)
            phase = await vm.control(_CONTROL_DEADLINE)
            if phase != (expected := "running" if spec.memory is None else "waiting"):
                raise VmmError(f"it is {phase}, not {expected}")
            return vm
        except BaseException as error:
            if vm is not None:
                await _finish(vm.kill())
            if output is not None:
                output.close()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InsufficientStorage(f"no space to start a VMM in {spec.directory}: {error}") from error
            if isinstance(error, VmmError | OSError):
                # What the VMM printed says more than how we noticed.
                said = (output and output.tail()) or str(error)
                raise VmmError(f"the VMM of {spec.sandbox_id} did not start: {said}") from error
            raise

    async def adopt(self, spec: VmSpec, handle: VmHandle) -> QemuVm:
        await self._find_out()
        process = Process.opened(handle)
        if read_mark(handle.pid) != mark(self._home, spec.sandbox_id):
            process.close()
            raise VmmError(f"the process {handle.pid} is not the VMM of {spec.sandbox_id}")
        vm = self._vm(process, replace(spec, ahead=False), None)
        try:
            if await vm.control(_CONTROL_DEADLINE) == "waiting":
                raise VmmError(f"the VMM process {handle.pid} never got a state to go on from")
            await vm.thaw()
        except BaseException:
            # Nobody else will look after it: a VMM that cannot be controlled is ended.
            await _finish(vm.kill())
            raise
        return vm

    async def sweep(self, keep: frozenset[VmHandle]) -> list[str]:
        host = await self._find_out()
        killed = []
        for found in await asyncio.to_thread(find, self._home):
            if found.handle not in keep:
                await self._end(found)
                killed.append(found.sandbox_id)
        await asyncio.to_thread(cgroup.prune, host.cgroups)
        return killed

    async def aclose(self) -> None:
        await asyncio.to_thread(self._jailer.close)
        if self._host is not None:
            await asyncio.to_thread(cgroup.leave, self._host.cgroups)

    async def cgroups(self) -> cgroup.CgroupSupport:
        """Whether VMMs get a cgroup here, and why not; for `aenv doctor`."""
        return (await self._find_out()).cgroups

    async def _find_out(self) -> _Host:
        async with self._host_lock:
            if self._host is None:
                if os.geteuid() != 0:
                    raise VmmError(f"VMMs are started by root, this is uid {os.geteuid()}: run the server as root")
                accel = await self._accel.decide()
                program = await asyncio.to_thread(find_program, self._settings.qemu_binary, accel.name)
                cgroups = await asyncio.to_thread(cgroup.probe, self._home)
                khz = await asyncio.to_thread(host_tsc_khz) if accel.name == "tcg" else None
                cpu = await asyncio.to_thread(cpu_identity, program.machine, khz, self._home / "cache" / "tsc_khz")
                self._host = _Host(program, accel, cgroups, khz, cpu)
            return self._host

    async def _launch(self, host: _Host, spec: VmSpec, output: Output) -> QemuVm:
        """Spawn, and be in charge of the process even if cancelled while the thread is spawning it."""
        cmdline = kernel_cmdline(
            hostname=spec.hostname, accel=host.accel.name, tsc_khz=host.tsc_khz, zero_freed=spec.zero_freed
        )

        def start() -> int:
            group = cgroup.create(
                host.cgroups,
                spec.sandbox_id,
                memory_max=(spec.memory_mb + TRANSLATION_CACHE_MB + _OVERHEAD_MB) << 20,
                pids_max=spec.vcpus + _MAX_TASKS,
            )
            return spawn(
                self._jailer, host.program, spec, home=self._home, cmdline=cmdline, cgroup=group, output=output
            )

        starting = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            pid = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait((starting,))
            if starting.exception() is None:
                await _finish(self._vm(Process.spawned(starting.result()), spec, output).kill())
            else:
                self._gone(spec)
            raise
        except BaseException:
            self._gone(spec)
            raise
        return self._vm(Process.spawned(pid), spec, output)

    def _vm(self, process: Process, spec: VmSpec, output: Output | None) -> QemuVm:
        return QemuVm(
            process=process,
            spec=spec,
            output=output,
            kill_deadline=self._kill_deadline,
            on_gone=lambda: self._gone(spec),
        )

    def _gone(self, spec: VmSpec) -> None:
        """Remove what a VMM that has ended leaves on the host."""
        (spec.directory / QMP_SOCKET).unlink(missing_ok=True)
        if self._host is not None:
            cgroup.remove(self._host.cgroups, spec.sandbox_id)

    async def _end(self, found: Found) -> None:
        try:
            process = Process.opened(found.handle)
        except VmmError:
            return
        try:
            await process.kill(self._kill_deadline)
        finally:
            process.close()


async def _finish(cleanup: Awaitable[None]) -> None:
    """Carry a clean-up through, also if cancelled once more meanwhile."""
    task = asyncio.ensure_future(cleanup)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
