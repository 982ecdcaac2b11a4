"""A driver without machines, complete: guests are HTTP servers in this process, failures are ordered beforehand.

`FakeHost` stands for the machine: what runs on it survives the driver, so a test restarts the server by making another
`FakeVmm` on the same host.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from aenv.errors import VmmError
from aenv.images.protocol import GuestMemory
from aenv.vmm.fake_machine import FakeMachine
from aenv.vmm.protocol import VmExit, VmHandle, VmmInfo, VmSpec

_StartFault = Literal["boot_fails", "boot_hangs", "never_ready", "dies_at_boot"]
_LoadFault = Literal["load_fails", "dies_at_load"]
_FreezeFault = Literal["freeze_hangs"]
_SaveFault = Literal["save_fails"]
_ThawFault = Literal["thaw_fails"]
Fault = _StartFault | _LoadFault | _FreezeFault | _SaveFault | _ThawFault


class FakeHost:
    """Where fake VMMs run. Each of `faults` is taken by the next call that it fits; `cpu` is what guests see."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.cpu = "fake"
        self.machines: dict[VmHandle, FakeMachine] = {}
        self.booting = asyncio.Event()
        """Set whenever a boot hangs."""
        self.freezing = asyncio.Event()
        """Set whenever a freeze hangs."""

    def take(self, kinds: object) -> Fault | None:
        """The first fault of one of these kinds."""
        for fault in self.faults:
            if fault in get_args(kinds):
                self.faults.remove(fault)
                return fault
        return None

    async def run(self, spec: VmSpec, fault: Fault | None) -> FakeMachine:
        """Start a VMM: its guest too, unless it is to wait for a state."""
        machine = FakeMachine(spec, silent=fault == "never_ready")
        try:
            if spec.memory is None:
                await machine.start_guest()
                machine.thaw()
        except BaseException:
            await machine.end(VmExit(-9, "killed"))
            raise
        self.machines[machine.handle] = machine
        return machine

    async def end(self, machine: FakeMachine, result: VmExit) -> None:
        """The VMM ends, as by `kill -9`."""
        self.machines.pop(machine.handle, None)
        await machine.end(result)

    def of(self, sandbox_id: str) -> FakeMachine:
        """The machine of a sandbox that was started last. Raises KeyError."""
        for machine in reversed(self.machines.values()):
            if machine.spec.sandbox_id.partition(".")[0] == sandbox_id:
                return machine
        raise KeyError(sandbox_id)

    async def crash(self, sandbox_id: str) -> None:
        """The VMM of this sandbox dies by itself."""
        await self.end(self.of(sandbox_id), VmExit(-9, "the VMM was killed by signal 9"))

    async def aclose(self) -> None:
        """End everything, at the end of a test."""
        for machine in list(self.machines.values()):
            await self.end(machine, VmExit(None, "the host went down"))


class FakeVm:
    """`Vm` on a FakeHost."""

    def __init__(self, host: FakeHost, machine: FakeMachine) -> None:
        self._host = host
        self._machine = machine

    @property
    def handle(self) -> VmHandle:
        return self._machine.handle

    @property
    def frozen(self) -> bool:
        return self._machine.phase == "frozen"

    def claim(self) -> None:
        pass

    async def load(self, state: bytes) -> None:
        fault = self._host.take(_LoadFault)
        if fault == "dies_at_load":
            await self._host.end(self._machine, VmExit(1, "the VMM exited with status 1"))
            raise VmmError("the VMM did not load the state: it ended")
        if fault == "load_fails":
            raise VmmError("the VMM did not load the state: told to fail")
        await self._machine.load(state)

    async def hold(self, call: Callable[[], None]) -> None:
        pass

    async def freeze(self) -> None:
        if self._host.take(_FreezeFault):
            self._host.freezing.set()
            await asyncio.Event().wait()
        self._machine.freeze()

    async def thaw(self) -> None:
        if self._host.take(_ThawFault):
            raise VmmError(f"the VMM of {self._machine.spec.sandbox_id} cannot thaw: told to fail")
        self._machine.thaw()

    async def greet(self, message: bytes) -> bool:
        await self.thaw()
        return False  # a fake guest has no place for it

    async def save(self) -> bytes:
        if self._host.take(_SaveFault):
            raise VmmError(f"the VMM of {self._machine.spec.sandbox_id} cannot save: told to fail")
        return self._machine.save()

    async def memory(self) -> GuestMemory:
        return self._machine.memory()

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
        return VmmInfo("fake", "1", "none", self.host.cpu)

    async def boot(self, spec: VmSpec) -> FakeVm:
        return await self._start(replace(spec, memory=None))

    async def prepare(self, spec: VmSpec) -> FakeVm:
        if spec.memory is None:
            raise VmmError(f"the VMM of {spec.sandbox_id} did not start: there is no memory to go on from")
        return await self._start(spec)

    async def _start(self, spec: VmSpec) -> FakeVm:
        fault = self.host.take(_StartFault)
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
        if machine.phase == "waiting":
            await self.host.end(machine, VmExit(-9, "killed"))
            raise VmmError(f"the VMM process {handle.pid} never got a state to go on from")
        machine.thaw()
        return FakeVm(self.host, machine)

    async def sweep(self, keep: frozenset[VmHandle]) -> list[str]:
        doomed = [machine for handle, machine in self.host.machines.items() if handle not in keep]
        for machine in doomed:
            await self.host.end(machine, VmExit(-9, "swept"))
        return [machine.spec.sandbox_id for machine in doomed]

    async def aclose(self) -> None:
        """Fake machines live in this process: the host keeps them; whoever made the host ends them."""
