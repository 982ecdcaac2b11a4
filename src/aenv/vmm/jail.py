"""Start VMMs, each shut in: a script for root that serves one client (`aenv.vmm.jailer`) over the socket `CHANNEL_FD`.

When a VMM's first instruction runs it is already an unprivileged user without capabilities, in an empty network
namespace, and its root holds nothing but what the VMM is made of and the sandbox's own files; all of it read-only
except the disk and the scratch file. So no file, however its content was twisted by a VMM that was broken into, is ever
opened by privileged QEMU code, and QEMU's own ways of dropping privileges (which differ between its versions) are not
needed.

A process of its own because the client has threads, and what is done here between fork and exec is too much for a
process with threads. It stays, since to start is most of its cost; it ends with the client. Its children are the
client's (CLONE_PARENT), who waits for them. A VMM that cannot be shut in prints one line and exits with status 126.
"""

# System calls, on paths of other processes' namespaces: pathlib would hide them.
# ruff: noqa: PTH101, PTH103, PTH116, PTH120, PTH123, PTH211

import ctypes
import errno
import fcntl
import marshal
import os
import resource
import signal
import socket
import stat
import struct
import sys
from typing import Any

CHANNEL_FD = 3
"""Of this process: a Unix socket of sequenced packets. A request is `parameters` with the descriptors for the output
and, if it has one, for QMP; the answer the pid of the child."""
MAX_REQUEST = 128 << 10
PID = struct.Struct("=i")
LISTEN_FD = 3
"""Of a VMM: the listening socket for QMP."""
TAP_FD = 4
"""The network device, opened here."""

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x40000000,
)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CLONE_PARENT, _CLONE_INTO_CGROUP = 0x00008000, 0x200000000
_SYS_CLONE3 = 435
"""Of all architectures."""
_ROOT_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, fstype, data)]
    try:
        _call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"mounting {source} at {target}: {error.strerror}") from None


def _bind(source: str, place: str, flags: int) -> None:
    _mount(source, place, None, _MS_BIND)
    _mount("none", place, None, _MS_REMOUNT | _MS_BIND | flags)


def parameters(
    *,
    argv: list[str],
    root_source: str,
    binds: list[tuple[str, str, bool]],
    links: list[tuple[str, str]],
    devices: list[tuple[str, str]],
    scratch: tuple[str, int] | None,
    uid: int,
    tap: tuple[str, str] | None,
    cgroup: str | None,
    max_file_size: int,
    oom_score_adj: int,
) -> bytes:
    """A request: what to execute, the root (see `build_root`), netns and name of the tap, limits (bytes)."""
    return marshal.dumps(locals())


def open_tap(netns: str, tap: str) -> None:
    """Open `tap` of `netns` as descriptor TAP_FD. Leaves this process in that namespace."""
    namespace = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", namespace, _CLONE_NEWNET)
    os.close(namespace)
    # Asked for a device that does not exist, the kernel would make one.
    if _libc.if_nametoindex(os.fsencode(tap)) == 0:
        raise OSError(errno.ENODEV, f"opening the tap {tap} of {netns}: there is no such device")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", tap.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    except OSError as error:
        raise OSError(error.errno, f"opening the tap {tap} of {netns}: {error.strerror}") from None
    if device != TAP_FD:
        os.dup2(device, TAP_FD)
        os.close(device)
    os.set_inheritable(TAP_FD, True)


def build_root(
    root_source: str,
    binds: list[tuple[str, str, bool]],
    links: list[tuple[str, str]],
    devices: list[tuple[str, str]],
    scratch: tuple[str, int] | None,
    uid: int,
) -> None:
    """Make the root: a small read-only tmpfs, with `root_source` for a source by which to find this process again,
    `binds` (source, target, writable), symlinks (name, target), device nodes (source, name) for `uid` alone, and the
    `scratch` file (name, bytes it can hold), in memory, writable."""
    new_root = "/tmp"  # any directory there is: in our own mount namespace the others do not see it covered
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # Sources are opened first: what is below the new root's mount point could not be reached by name afterwards.
    sources = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source, _, _ in binds]
    size = _ROOT_BYTES + (0 if scratch is None else scratch[1])
    _mount(root_source, new_root, "tmpfs", _MS_NOSUID, f"size={size},nr_inodes=128,mode=755")
    for descriptor, (_, target, writable) in zip(sources, binds, strict=True):
        place = new_root + target
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o444))
        _bind(f"/proc/self/fd/{descriptor}", place, _MS_NOSUID | _MS_NODEV | (0 if writable else _MS_RDONLY))
        os.close(descriptor)
    for target, points_to in links:
        os.symlink(points_to, new_root + target)
    os.makedirs(new_root + "/dev", exist_ok=True)
    for source, name in devices:
        found = os.stat(source)
        os.mknod(new_root + name, found.st_mode, found.st_rdev)
        os.chown(new_root + name, uid, uid)
        os.chmod(new_root + name, 0o600)
    if scratch is not None:
        place = new_root + scratch[0]
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
        os.chown(place, uid, uid)
        # A mount of its own, which stays writable when the root becomes read-only.
        _bind(place, place, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(new_root)
    # With both arguments the same the old root is stacked over the new one, and unmounting reveals it (pivot_root(2)).
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NOEXEC)


def drop_privileges(uid: int) -> None:
    """Become `uid` for good: no groups, no capabilities, and no way to gain any by executing something."""
    for capability in range(64):
        try:
            _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:  # beyond the last one this kernel knows
                raise
            break
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def become_vmm(jail: dict[str, Any]) -> None:
    """Shut this process in and execute, as `parameters` told."""
    os.umask(0o022)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(jail["oom_score_adj"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (jail["max_file_size"], jail["max_file_size"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    if jail["tap"] is not None:
        open_tap(*jail["tap"])
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP)
    build_root(jail["root_source"], jail["binds"], jail["links"], jail["devices"], jail["scratch"], jail["uid"])
    drop_privileges(jail["uid"])
    os.umask(0o077)
    os.execve(jail["argv"][0], jail["argv"], {"LC_ALL": "C", "PATH": "/nonexistent"})


def _fork(cgroup: str | None) -> int:
    """Fork a child of our parent into a cgroup; 0 in the child. Raises OSError."""
    flags, group = _CLONE_PARENT, 0
    if cgroup is not None:
        # To join it later would wait for all processors, 5 to 15 ms.
        flags, group = flags | _CLONE_INTO_CGROUP, os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Flags, then the descriptor of the cgroup as the last of eleven; none of what is between is asked for. The
        # signal at its end is ours, as always with CLONE_PARENT.
        arguments = struct.pack("=11Q", flags, *[0] * 9, group)
        child = int(_libc.syscall(_SYS_CLONE3, arguments, ctypes.c_size_t(len(arguments))))
        if child < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"clone3: {os.strerror(code)}")
        return child
    finally:
        if group:
            os.close(group)


def _be_born(channel: socket.socket, client: int, descriptors: list[int]) -> None:
    """In the child: answer, then keep nothing but standard input, output and QMP's socket."""
    # Until its root is marked nobody could find it again: die with the client. Changing the uid ends this.
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != client:
        raise OSError(errno.EPIPE, "the client has ended")
    # Not by the parent: if that were killed between fork and answer, nobody would know of the child.
    channel.send(PID.pack(os.getpid()))
    os.setsid()
    output, *listener = descriptors
    for target in (1, 2):
        os.dup2(output, target)
    for descriptor in listener:
        os.dup2(descriptor, LISTEN_FD)
    os.closerange(LISTEN_FD + len(listener), max(*descriptors, channel.fileno(), LISTEN_FD) + 1)


def serve() -> None:
    """Answer requests until the client closes the channel or ends."""
    client = os.getppid()
    channel = socket.socket(fileno=CHANNEL_FD)
    os.closerange(CHANNEL_FD + 1, 1 << 20)
    os.setsid()  # a Ctrl-C meant for the client
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST, 2)
        if not request:
            return
        jail = marshal.loads(request)
        try:
            if _fork(jail["cgroup"]) == 0:
                try:
                    _be_born(channel, client, descriptors)
                    become_vmm(jail)
                except Exception as error:
                    sys.stderr.write(f"jail: {error}\n")
                    sys.stderr.flush()
                finally:
                    os._exit(126)
        except OSError as error:
            channel.send(PID.pack(-(error.errno or errno.EIO)))
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    serve()
