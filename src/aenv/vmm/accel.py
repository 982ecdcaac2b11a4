"""KVM or software emulation: decided by proof, remembered.

`/dev/kvm` can exist and still be unable to run an ordinary kernel (PVM hosts, broken nesting). So the guest kernel is
booted once under KVM, with a deadline, up to user space. The answer is kept in ``$AENV_HOME/cache/accel.json``
for the same host kernel, QEMU and guest; delete the file to have it tried again.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from aenv.config import VmmSettings
from aenv.errors import VmmError
from aenv.guest.provision import GuestBundle
from aenv.vmm.jailer import Jailer
from aenv.vmm.launch import Output, Program, find_program, run_probe
from aenv.vmm.process import Process

PROBE_DEADLINE = 10.0
"""Seconds for the trial boot. Under a KVM that works it takes less than one."""
_KVM = Path("/dev/kvm")


@dataclass(frozen=True, slots=True)
class Accel:
    """The acceleration to use and, in a sentence for people, why."""

    name: Literal["kvm", "tcg"]
    reason: str


class AccelProver:
    """Decides once per server."""

    def __init__(self, *, home: Path, settings: VmmSettings, bundle: GuestBundle, kvm: Path = _KVM) -> None:
        self._cache = home / "cache" / "accel.json"
        self._settings = settings
        self._bundle = bundle
        self._kvm = kvm
        self._lock = asyncio.Lock()
        self._decided: Accel | None = None

    async def decide(self) -> Accel:
        """The acceleration that works here. Raises VmmError if `accel = kvm` is set and KVM does not work."""
        async with self._lock:
            if self._decided is None:
                self._decided = await self._decide()
            return self._decided

    async def _decide(self) -> Accel:
        if self._settings.accel == "tcg":
            return Accel("tcg", "chosen by the setting vmm.accel")
        accel = await asyncio.to_thread(self._without_trial)
        if accel is None:
            accel = await self._remembered_trial()
        if self._settings.accel == "kvm" and accel.name != "kvm":
            raise VmmError(f"vmm.accel is 'kvm', but {accel.reason}; set it to 'auto' or 'tcg' for software emulation")
        return accel

    def _without_trial(self) -> Accel | None:
        try:
            os.close(os.open(self._kvm, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            return Accel("tcg", f"this host has no {self._kvm}")
        except OSError as error:
            return Accel("tcg", f"{self._kvm} cannot be opened: {error.strerror}")
        return None

    async def _remembered_trial(self) -> Accel:
        program = await asyncio.to_thread(find_program, self._settings.qemu_binary, "kvm")
        key = {"host": " ".join(os.uname()[2:4]), "qemu": program.version, "guest": self._bundle.digest}
        if (known := await asyncio.to_thread(self._read, key)) is not None:
            return known
        # Another process (`aenv doctor` beside a server) may be trying: wait for its answer instead.
        with await asyncio.to_thread(_locked, self._cache.with_suffix(".lock")):
            if (known := await asyncio.to_thread(self._read, key)) is None:
                known = await try_kvm(program, self._bundle, uid=self._settings.uid_base - 1)
                await asyncio.to_thread(self._write, key, known)
        return known

    def _read(self, key: dict[str, str]) -> Accel | None:
        try:
            content = json.loads(self._cache.read_text())
            if content["key"] == key and content["accel"]["name"] in ("kvm", "tcg"):
                return Accel(content["accel"]["name"], str(content["accel"]["reason"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # absent or damaged: it is only a memory of a trial
        return None

    def _write(self, key: dict[str, str], accel: Accel) -> None:
        temporary = self._cache.with_suffix(".tmp")
        temporary.write_text(json.dumps({"key": key, "accel": asdict(accel)}, indent=2) + "\n")
        temporary.replace(self._cache)


async def try_kvm(program: Program, bundle: GuestBundle, *, uid: int, deadline: float = PROBE_DEADLINE) -> Accel:
    """Boot the guest under KVM without a disk: its init finds no root, ends, and the kernel reboots, which ends QEMU.

    That takes the kernel through all of its start, and user space into and out of system calls.
    """
    output, jailer = Output(), Jailer()
    process: Process | None = None
    try:
        starting = asyncio.ensure_future(
            asyncio.to_thread(
                run_probe, jailer, program, kernel=bundle.kernel, initramfs=bundle.initramfs, uid=uid, output=output
            )
        )
        try:
            await asyncio.shield(starting)
        finally:
            await asyncio.wait((starting,))
            if starting.exception() is None:
                process = Process.spawned(starting.result())
        assert process is not None, "else the await above has raised"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await process.wait()
        return judge(output.tail(size=1 << 16), ended=process.ended, deadline=deadline)
    finally:
        if process is not None:
            await asyncio.shield(process.kill(deadline))
            process.close()
        output.close()
        await asyncio.to_thread(jailer.close)


def judge(console: str, *, ended: bool, deadline: float) -> Accel:
    """What the console of the trial, and whether it `ended` within `deadline` seconds, prove."""
    lines = console.splitlines()
    last = f"; the last line was {lines[-1].strip()[:200]!r}" if lines else ""
    pvm = " (this host has kvm_pvm, whose guests need a kernel of their own)" if _has_pvm() else ""
    _, reached, user_space = console.partition("Run /init as init process")
    if not reached:
        how = "ended before user space" if ended else f"did not reach user space within {deadline:g} s"
        return Accel("tcg", f"the guest kernel {how} under KVM{pvm}{last}")
    # The low bits of an exit code are the signal that killed init: 0 if it ended by itself.
    code = re.search(r"Attempted to kill init! exitcode=0x([0-9a-f]{8})", user_space)
    if not ended or (code is not None and int(code[1], 16) & 0x7F):
        return Accel("tcg", f"user space did not run as it must under KVM{pvm}{last}")
    return Accel("kvm", "the guest kernel booted to user space under KVM")


def _has_pvm() -> bool:
    return Path("/sys/module/kvm_pvm").exists()


@contextlib.contextmanager
def _unlocking(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(path: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the lock file `path`. Its holder is bounded by PROBE_DEADLINE, hence so is this."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return _unlocking(descriptor)
