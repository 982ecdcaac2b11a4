"""Named network namespaces and what is done from inside them. Blocking: for a worker thread.

A namespace is entered by the calling thread alone (`setns` is per thread); `inside` always brings it back.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 4096, 16384, 1 << 20
_MNT_DETACH = 2

# linux/if_tun.h
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)


def prepare(directory: Path) -> None:
    """Make `directory` a shared mount as iproute2 does, so that namespaces named in it are seen by other mount
    namespaces (each VMM may have its own)."""
    directory.mkdir(parents=True, exist_ok=True)
    path = os.fsencode(directory)
    try:
        _call("mount", b"", path, b"none", _MS_SHARED | _MS_REC, None)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: not a mount point yet
            raise
        _call("mount", path, path, b"none", _MS_BIND | _MS_REC, None)
        _call("mount", b"", path, b"none", _MS_SHARED | _MS_REC, None)


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """Make a namespace named `path` and be inside it; yields a descriptor of the namespace come from.

    On an exception the name is removed again. Raises OSError.
    """
    with _return_here() as home:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_CLOEXEC, 0o400))
        try:
            _call("unshare", _CLONE_NEWNET)
            _call("mount", b"/proc/thread-self/ns/net", os.fsencode(path), b"none", _MS_BIND, None)
            yield home
        except BaseException:
            remove(path)
            raise


@contextlib.contextmanager
def inside(path: Path) -> Iterator[None]:
    """Be inside the namespace `path`. Raises OSError (EINVAL: the file is no namespace)."""
    with _return_here():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", descriptor, _CLONE_NEWNET)
        finally:
            os.close(descriptor)
        yield


def remove(path: Path) -> None:
    """Take the name away; the namespace ends with its last process. Nothing happens if there is none."""
    with contextlib.suppress(FileNotFoundError):
        try:
            _call("umount2", os.fsencode(path), _MNT_DETACH)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a plain file, left when the name was made but not mounted
                raise
        path.unlink()


def sysctl(name: str, value: str) -> None:
    """Set ``net.<name>`` (written with slashes) of the calling thread's namespace. Raises OSError."""
    Path("/proc/sys/net", name).write_text(value)


def add_tap(name: str, uid: int) -> None:
    """A persistent single-queue tap with vnet headers that the user `uid` may open without privilege."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        fcntl.ioctl(descriptor, _TUNSETOWNER, uid)
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    finally:
        os.close(descriptor)


def listening_sockets(address: str, port: int) -> tuple[socket.socket, socket.socket]:
    """A UDP and a listening TCP socket of the calling thread's namespace, non-blocking. Raises OSError."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        udp.bind((address, port))
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((address, port))
        tcp.listen(16)
    except BaseException:
        udp.close()
        tcp.close()
        raise
    return udp, tcp


@contextlib.contextmanager
def _return_here() -> Iterator[int]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield home
    finally:
        try:
            _call("setns", home, _CLONE_NEWNET)
        finally:
            os.close(home)


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
