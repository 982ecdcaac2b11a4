"""Start a jailed VMM: its control socket, the place of its output, its process."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import InsufficientStorage, VmmError
from aenv.vmm import jail
from aenv.vmm.jailer import Jailer
from aenv.vmm.process import mark
from aenv.vmm.protocol import VmSpec
from aenv.vmm.qemu_command import JailPath, Machine, command, probe_command

QMP_SOCKET = "qmp.sock"
OUTPUT_BYTES = 64 * 1024
"""Kept of what the VMM itself prints, the oldest."""
STATE_BYTES = 64 << 20
"""Room for a guest's device state; under 1 MiB in practice."""


class Output:
    """What the VMM prints: memory of fixed size, so that endless output ends in write errors of the writer alone."""

    def __init__(self) -> None:
        self._last: bytes | None = None
        self.fd = os.memfd_create("vmm-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, OUTPUT_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)

    def tail(self, size: int = 2000) -> str:
        """The last `size` bytes printed, as text."""
        printed = os.pread(self.fd, OUTPUT_BYTES, 0) if self._last is None else self._last
        return printed.rstrip(b"\0")[-size:].decode(errors="replace").strip()

    def close(self) -> None:
        """Take nothing more; `tail` still answers. Idempotent."""
        if self._last is None:
            self._last = os.pread(self.fd, OUTPUT_BYTES, 0).rstrip(b"\0")
            os.close(self.fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A QEMU and the parts of the host it is made of: what a jail must hold."""

    machine: Machine
    version: str
    binds: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def find_program(qemu_binary: str | None, accel: str) -> Program:
    """The QEMU of this host with its libraries and data. Runs it; call it off the event loop. Raises VmmError."""
    arch = os.uname().machine
    if arch not in ("x86_64", "aarch64"):
        raise VmmError(f"no VMM for the architecture {arch}: x86_64 and aarch64 are supported")
    name = qemu_binary or f"qemu-system-{arch}"
    found = shutil.which(name)
    if found is None:
        raise VmmError(
            f"{name} is not installed: install the package qemu-system-{'x86' if arch == 'x86_64' else 'arm'}"
        )
    binary = os.path.realpath(found)
    data_dirs = tuple(line for line in _run([binary, "-L", "help"]).splitlines() if Path(line).is_dir())
    libraries = [Path(word) for word in _run(["ldd", binary]).split() if word.startswith("/")]
    # The loader and the libraries are found under the names that the binary has for them, which may be symlinks.
    directories = {str(library.parent.resolve()) for library in libraries}
    directories |= {str(library.resolve().parent) for library in libraries}
    tops = {Path(*library.parts[:2]) for library in libraries}
    links = {str(top): str(top.readlink()) for top in sorted(tops) if top.is_symlink()}
    binds = {binary, *directories, *data_dirs, "/etc/ld.so.cache"}
    machine = Machine(
        arch="x86_64" if arch == "x86_64" else "aarch64",
        accel="kvm" if accel == "kvm" else "tcg",
        binary=binary,
        data_dirs=data_dirs,
    )
    version = _run([binary, "--version"]).split("\n")[0].removeprefix("QEMU emulator version ")
    return Program(
        machine=machine,
        version=version,
        binds=tuple(sorted(b for b in binds if Path(b).exists())),
        links=tuple(links.items()),
    )


def _run(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise VmmError(f"{' '.join(argv)} failed: {error}") from error


def spawn(
    jailer: Jailer,
    program: Program,
    spec: VmSpec,
    *,
    home: Path,
    cmdline: str,
    cgroup: Path | None,
    output: Output,
) -> int:
    """Start the VMM of `spec`; return its pid. Its control socket, `QMP_SOCKET`, can be connected to at once.

    A few milliseconds of system calls: call it off the event loop. Raises VmmError, InsufficientStorage, OSError.
    """
    if spec.memory is None:
        files = [(spec.kernel, JailPath.KERNEL, False), (spec.initramfs, JailPath.INITRAMFS, False)]
    else:
        files = [(spec.memory, JailPath.MEMORY, False)]
    _check_readable(*(path for path, _, _ in files))
    if not spec.disk.is_device:
        files.append((spec.disk.path, JailPath.DISK, True))
    listener = _listen(spec.directory)
    try:
        argv = command(
            program.machine,
            spec,
            cmdline=cmdline,
            name=f"{spec.sandbox_id} {home}",
            listen_fd=jail.LISTEN_FD,
            tap_fd=jail.TAP_FD,
        )
        return _start(
            jailer,
            program,
            argv,
            files,
            root_source=mark(home, spec.sandbox_id),
            uid=spec.uid,
            output=output,
            listen_fd=listener.fileno(),
            tap=(str(spec.netns), spec.tap),
            cgroup=cgroup,
            devices=[(str(spec.disk.path), JailPath.DISK)] if spec.disk.is_device else [],
            scratch=(JailPath.STATE, STATE_BYTES),
            max_file_size=max(spec.disk.size, STATE_BYTES),
        )
    finally:
        # The VMM has its own copy. With ours closed, its end is the end of the connection.
        listener.close()


def run_probe(jailer: Jailer, program: Program, *, kernel: Path, initramfs: Path, uid: int, output: Output) -> int:
    """Start a guest without disk, network and control, its console on `output`; return the pid. Raises VmmError."""
    _check_readable(kernel, initramfs)
    files = [(kernel, JailPath.KERNEL, False), (initramfs, JailPath.INITRAMFS, False)]
    argv = probe_command(program.machine)
    return _start(jailer, program, argv, files, root_source="aenv-probe", uid=uid, output=output)


def _start(
    jailer: Jailer,
    program: Program,
    argv: list[str],
    files: list[tuple[Path, str, bool]],
    *,
    root_source: str,
    uid: int,
    output: Output,
    listen_fd: int | None = None,
    tap: tuple[str, str] | None = None,
    cgroup: Path | None = None,
    devices: Sequence[tuple[str, str]] = (),
    scratch: tuple[str, int] | None = None,
    max_file_size: int = OUTPUT_BYTES,
) -> int:
    """Execute `argv` in a jail."""
    kvm = ("/dev/kvm",) if program.machine.accel == "kvm" else ()
    request = jail.parameters(
        argv=argv,
        root_source=root_source,
        binds=[*((path, path, False) for path in program.binds), *((str(a), b, w) for a, b, w in files)],
        links=list(program.links),
        devices=[(name, name) for name in ("/dev/null", *kvm)] + list(devices),
        scratch=scratch,
        uid=uid,
        tap=tap,
        cgroup=None if cgroup is None else str(cgroup),
        max_file_size=max_file_size,
        # A guest goes before the server does, when the host runs out of memory.
        oom_score_adj=500,
    )
    return jailer.spawn(request, output=output.fd, listen=listen_fd)


def _check_readable(*paths: Path) -> None:
    """The VMM's user reads these by their mode alone; a plain message instead of QEMU's."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise VmmError(f"{path}, which the guest starts from, cannot be read: {error.strerror}") from error
        if not mode & 0o004:
            raise VmmError(f"{path} has mode {mode & 0o777:o}: the VMM's user must be able to read it (chmod o+r)")


def _listen(directory: Path) -> socket.socket:
    """A fresh listening socket in `directory`, for root alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Through a descriptor: a socket's address holds only 107 bytes.
        parent = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(QMP_SOCKET, dir_fd=parent)
            listener.bind(f"/proc/self/fd/{parent}/{QMP_SOCKET}")
            os.chmod(QMP_SOCKET, 0o600, dir_fd=parent)
            listener.listen(1)
        finally:
            os.close(parent)
    except OSError as error:
        listener.close()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientStorage(f"no space for the VMM's socket in {directory}: free some on the host") from error
        raise VmmError(f"the VMM's socket could not be made in {directory}: {error}") from error
    return listener
