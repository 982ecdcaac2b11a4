"""A driver without machines, complete: guests are HTTP servers in this process, failures are ordered beforehand.

`FakeHost` stands for the machine: what runs on it survives the driver, so a test restarts the server by making another
`FakeVmm` on the same host.
"""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from aenv.errors import VmmError
from aenv.vmm.fake_guest import FakeGuest
from aenv.vmm.protocol import VmExit, VmHandle, VmmInfo, VmSpec

_PIDS = itertools.count(10_000_000)
"""Above any real pid (at most 4 Mi)."""

Fault = Literal["boot_fails", "boot_hangs", "never_ready", "dies_at_boot"]


@dataclass(slots=True, eq=False)
class FakeMachine:
    """One running fake VMM."""

    spec: VmSpec
    handle: VmHandle
    guest: FakeGuest
    exit: asyncio.Future[VmExit]
    console: list[bytes] = field(default_factory=list)


class FakeHost:
    """Where fake VMMs run. `faults` are taken by the next boots, one each."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.machines: dict[VmHandle, FakeMachine] = {}
        self.booting = asyncio.Event()
        """Set whenever a boot hangs."""
        self._endings: set[asyncio.Task[None]] = set()

    async def run(self, spec: VmSpec, fault: Fault | None) -> FakeMachine:
        """Start a VMM and its guest."""
        handle = VmHandle(pid=next(_PIDS), start_time=1)
        guest = FakeGuest(spec.address)
        machine = FakeMachine(spec, handle, guest, asyncio.get_running_loop().create_future(), [b"fake guest\n"])
        if fault != "never_ready":
            try:
                await guest.start()
            except OSError as error:
                raise VmmError(f"the fake guest cannot listen at {spec.address}: {error}") from error
        self.machines[handle] = machine
        return machine

    async def end(self, machine: FakeMachine, result: VmExit) -> None:
        """The VMM ends, as by `kill -9`."""
        if self.machines.pop(machine.handle, None) is not None:
            machine.exit.set_result(result)
        await machine.guest.stop()

    def of(self, sandbox_id: str) -> FakeMachine:
        """The running machine of a sandbox. Raises KeyError."""
        for machine in self.machines.values():
            if machine.spec.sandbox_id == sandbox_id:
                return machine
        raise KeyError(sandbox_id)

    async def crash(self, sandbox_id: str) -> None:
        """The VMM of this sandbox dies by itself."""
        await self.end(self.of(sandbox_id), VmExit(-9, "the VMM was killed by signal 9"))

    async def aclose(self) -> None:
        """End everything, at the end of a test."""
        for machine in list(self.machines.values()):
            await self.end(machine, VmExit(None, "the host went down"))
        await asyncio.gather(*self._endings)

    def _end_soon(self, machine: FakeMachine, result: VmExit) -> None:
        task = asyncio.create_task(self.end(machine, result))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)


class FakeVm:
    """`Vm` on a FakeHost."""

    def __init__(self, host: FakeHost, machine: FakeMachine) -> None:
        self._host = host
        self._machine = machine

    @property
    def handle(self) -> VmHandle:
        return self._machine.handle

    async def wait(self) -> VmExit:
        return await asyncio.shield(self._machine.exit)

    async def console(self) -> bytes:
        text = b"".join(self._machine.console)
        self._machine.console.clear()
        return text

    async def kill(self) -> None:
        await self._host.end(self._machine, VmExit(-9, "killed"))

    async def detach(self) -> None:
        pass


class FakeVmm:
    """`Vmm` on a FakeHost, of its own if none is given."""

    def __init__(self, host: FakeHost | None = None) -> None:
        self.host = host or FakeHost()

    async def info(self) -> VmmInfo:
        return VmmInfo("fake", "1", "none")

    async def boot(self, spec: VmSpec) -> FakeVm:
        fault = self.host.faults.popleft() if self.host.faults else None
        if fault == "boot_fails":
            raise VmmError(f"the VMM of {spec.sandbox_id} did not start: told to fail")
        if fault == "boot_hangs":
            self.host.booting.set()
            await asyncio.Event().wait()
        machine = await self.host.run(spec, fault)
        if fault == "dies_at_boot":
            await self.host.end(machine, VmExit(1, "the VMM exited with status 1"))
        return FakeVm(self.host, machine)

    async def adopt(self, spec: VmSpec, handle: VmHandle) -> FakeVm:
        machine = self.host.machines.get(handle)
        if machine is None:
            raise VmmError(f"the VMM process {handle.pid} is gone")
        if machine.spec.sandbox_id != spec.sandbox_id:
            raise VmmError(f"the process {handle.pid} is not the VMM of {spec.sandbox_id}")
        return FakeVm(self.host, machine)

    async def sweep(self, keep: frozenset[VmHandle]) -> list[str]:
        doomed = [machine for handle, machine in self.host.machines.items() if handle not in keep]
        for machine in doomed:
            await self.host.end(machine, VmExit(-9, "swept"))
        return [machine.spec.sandbox_id for machine in doomed]

    async def aclose(self) -> None:
        """Fake machines live in this process: the host keeps them; whoever made the host ends them."""
