"""Making and finding what a guest boots from: kernel and initramfs, stored together by their content.

    $AENV_HOME/guest/<digest>/{vmlinux,initramfs,manifest.json}   never changed once there
    $AENV_HOME/guest/current                                      symbolic link to the bundle new sandboxes use

Bundles of earlier kernels and daemons stay: sandboxes and snapshots made with them need them.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv.distro.tools import run
from aenv.errors import InsufficientStorage, ProvisionError
from aenv.guest import kernel
from aenv.guest.initramfs import build_initramfs
from aenv.guest.modules import load_order

_BUILDER = 2
"""Raised whenever the same inputs would give another bundle."""

_SCRATCH = ".new-"


@dataclass(frozen=True, slots=True)
class GuestBundle:
    """What a guest boots from. `kernel_version` is the guest's `uname -r`; `digest` names the bundle."""

    kernel: Path
    initramfs: Path
    kernel_version: str
    envd_version: str
    digest: str


def load_bundle(home: Path) -> GuestBundle:
    """The current bundle of the node at `home`. Raises ProvisionError if there is none; `aenv setup` makes one."""
    current = home / "guest" / "current"
    try:
        # Resolved once, so that a bundle published meanwhile cannot mix with this one.
        directory = current.resolve(strict=True)
        manifest = _read_manifest(directory)
        bundle = GuestBundle(
            kernel=directory / "vmlinux",
            initramfs=directory / "initramfs",
            kernel_version=manifest["kernel_version"],
            envd_version=manifest["envd_version"],
            digest=manifest["digest"],
        )
        sizes = {"vmlinux": bundle.kernel.stat().st_size, "initramfs": bundle.initramfs.stat().st_size}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProvisionError(f"no guest kernel at {current}; run: aenv setup") from error
    if sizes != manifest["sizes"]:
        raise ProvisionError(f"the guest kernel at {directory} is damaged; remove it and run: aenv setup")
    return bundle


async def provision(home: Path, envd: Path, progress: Callable[[str], None]) -> GuestBundle:
    """Make the bundle of the newest kernel the machine's apt sources offer and the daemon `envd`; make it current.

    Idempotent: nothing is fetched or built when a bundle of the same inputs is there. A process that is interrupted
    leaves the old bundle current; what it had begun is removed by the next (only one may run at a time).

    Raises ProvisionError, InsufficientStorage, DeadlineExceeded.
    """
    guest = home / "guest"
    version, envd_digest = await _examine_envd(envd)
    try:
        found = await kernel.resolve()
    except ProvisionError as error:
        # Without apt's lists (an image that ships none, no network) what is there is good enough.
        if bundle := await asyncio.to_thread(_unchanged, home, None, envd_digest):
            progress(f"Keeping guest kernel {bundle.kernel_version}: {error}")
            return bundle
        raise
    inputs = sorted(map(str, found))
    if bundle := await asyncio.to_thread(_unchanged, home, inputs, envd_digest):
        progress(f"Guest kernel {bundle.kernel_version} is up to date")
        return bundle
    cache = home / "cache" / "packages"
    with _storage_errors(guest):
        cache.mkdir(parents=True, exist_ok=True)
        guest.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(_sweep, guest)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=guest) as scratch:
            progress(f"Fetching {', '.join(inputs)}")
            tree = await kernel.unpack(found, cache, Path(scratch, "packages"))
            progress(f"Building the initramfs for {tree.release}")
            provenance = {"packages": inputs, "envd_digest": envd_digest, "envd_version": version, "builder": _BUILDER}
            await asyncio.to_thread(_publish, guest, Path(scratch), tree, envd, provenance)
    return await asyncio.to_thread(load_bundle, home)


async def _examine_envd(envd: Path) -> tuple[str, str]:
    """Version and SHA-256 of the daemon's binary."""
    try:
        digest = hashlib.sha256(await asyncio.to_thread(envd.read_bytes)).hexdigest()
    except OSError as error:
        raise ProvisionError(f"cannot read the guest daemon ({error}); build it first: make build") from error
    version = (await run(envd, "--version", deadline=10)).split()
    if not version:
        raise ProvisionError(f"{envd} --version prints nothing; it is not the guest daemon")
    return version[-1], digest


def _unchanged(home: Path, inputs: list[str] | None, envd_digest: str) -> GuestBundle | None:
    """The current bundle, if it was made from these inputs (`inputs` None: from any kernel)."""
    try:
        bundle = load_bundle(home)
        manifest = _read_manifest(bundle.kernel.parent)
    except (ProvisionError, OSError, ValueError):
        return None
    same = manifest.get("envd_digest") == envd_digest and manifest.get("builder") == _BUILDER
    return bundle if same and inputs in (None, manifest.get("packages")) else None


def _sweep(guest: Path) -> None:
    for left in guest.glob(_SCRATCH + "*"):
        shutil.rmtree(left, ignore_errors=True)


def _publish(guest: Path, scratch: Path, tree: kernel.KernelTree, envd: Path, provenance: dict[str, Any]) -> None:
    """Build the bundle in `scratch`, move it to its name, and point `current` at it."""
    vmlinux = kernel.extract_vmlinux(tree.image.read_bytes())
    initramfs = build_initramfs(envd.read_bytes(), load_order(tree.modules))
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (vmlinux, initramfs))).hexdigest()
    manifest = {
        "digest": digest,
        "kernel_version": tree.release,
        "sizes": {"vmlinux": len(vmlinux), "initramfs": len(initramfs)},
        **provenance,
    }
    bundle = scratch / "bundle"
    bundle.mkdir(mode=0o755)
    for name, content in (
        ("vmlinux", vmlinux),
        ("initramfs", initramfs),
        ("manifest.json", json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n"),
    ):
        _write_durably(bundle / name, content)
    target = guest / digest
    if target.exists():
        # The same content, made from other inputs or damaged since: each file replaces its like, so that what
        # `current` may point at is whole at every instant.
        for file in bundle.iterdir():
            file.replace(target / file.name)
    else:
        bundle.rename(target)
    link = scratch / "current"
    link.symlink_to(digest)
    link.replace(guest / "current")
    _sync_directory(guest)


def _write_durably(path: Path, content: bytes) -> None:
    """Write a world-readable file (VMMs run as users of their own) and check that the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o644)
    if path.read_bytes() != content:
        raise ProvisionError(f"{path} does not read back as written; check the disk")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
    except RecursionError as error:
        raise ValueError(f"{directory}/manifest.json is nested too deeply") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{directory}/manifest.json is no object")
    return manifest


@contextlib.contextmanager
def _storage_errors(place: Path) -> Iterator[None]:
    """Map the operating system's errors of writing under `place`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientStorage(f"the disk of {place} is full: {error}") from error
        raise ProvisionError(f"cannot write under {place}: {error}") from error
