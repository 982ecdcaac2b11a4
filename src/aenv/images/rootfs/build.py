"""From package names to a disk image: mmdebstrap makes the tree, mke2fs puts it into ext4.

Neither mounts an image or needs a loop device. The release and the mirrors are the machine's own.
"""

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from aenv.distro.packages import update
from aenv.distro.sources import (
    Release,
    Stanza,
    base_stanzas,
    distribution_archives,
    host_release,
    host_stanzas,
)
from aenv.distro.tools import run
from aenv.errors import ProvisionError
from aenv.images.rootfs import ext4

_BUILDER = 1
"""Raised whenever the same inputs would give another file system."""

_BUILD_DEADLINE = 900.0
_TOOL_DEADLINE = 300.0

BASE_PACKAGES = (
    "bash",
    "ca-certificates",
    "curl",
    "git",
    "iproute2",
    "less",
    "nodejs",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
    "xz-utils",
)

# Documentation is a third of what minbase and these would install. Copyright files stay: licences ask for it.
_DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "force-unsafe-io",  # a half-made tree is thrown away; in a guest the disk is a copy anyway
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootfsSpec:
    """What to build: packages beyond the essential ones, and the size of the disk in MiB."""

    packages: tuple[str, ...]
    disk_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RootfsManifest:
    """A built file system. `size` and `used` in bytes: the disk's, and what its (sparse) file takes on the host.

    `inputs` is the digest of all that was asked for, `digest` that of the image (`ext4.image_digest`); `packages`
    are ``name=version``.
    """

    distribution: str
    size: int
    used: int
    inputs: str
    digest: str
    packages: tuple[str, ...]


async def build_base_rootfs(dest: Path, disk_mb: int, progress: Callable[[str], None]) -> RootfsManifest:
    """Build the `base` template's disk of `disk_mb` MiB at `dest`; see `build_rootfs`."""
    return await build_rootfs(RootfsSpec(packages=BASE_PACKAGES, disk_mb=disk_mb), dest, progress)


async def build_rootfs(spec: RootfsSpec, dest: Path, progress: Callable[[str], None]) -> RootfsManifest:
    """Build an ext4 image at `dest`, with its manifest beside it as ``<dest>.json``. Needs root.

    Nothing is built when `dest` was made from the same inputs: the same spec, release and package sources. A running
    VM that has the replaced file open keeps it. Raises ProvisionError, InsufficientStorage, DeadlineExceeded; what
    was at `dest` before an error is still there.
    """
    release, stanzas = await _sources()
    inputs = _inputs_digest(spec, release, stanzas)
    if (manifest := await asyncio.to_thread(_load_manifest, dest)) is not None and manifest.inputs == inputs:
        progress(f"Root file system {dest.name} is up to date")
        return manifest
    if os.geteuid() != 0:
        raise ProvisionError("building a root file system sets file owners and needs root; run it with sudo")
    await asyncio.to_thread(dest.parent.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as scratch:
        tree, image = Path(scratch, "tree"), Path(scratch, "image")
        progress(f"Installing {release.id} {release.codename} with {len(spec.packages)} packages and what they need")
        await _install(spec, release, stanzas, Path(scratch), tree, progress)
        packages = await _installed(tree)
        progress(f"Making the {spec.disk_mb} MiB ext4 disk")
        await ext4.make(tree, image, spec.disk_mb, seed=inputs)
        manifest = RootfsManifest(
            distribution=f"{release.id} {release.codename}",
            size=spec.disk_mb << 20,
            used=await asyncio.to_thread(_allocated, image),
            inputs=inputs,
            digest=await asyncio.to_thread(ext4.image_digest, image),
            packages=packages,
        )
        await asyncio.to_thread(_publish, image, dest, manifest)
    return manifest


async def _sources() -> tuple[Release, list[Stanza]]:
    """The machine's release and the package sources of it, after refreshing absent lists."""
    try:
        release = await asyncio.to_thread(host_release)
        try:
            archives = await asyncio.to_thread(distribution_archives, release)
        except ValueError:
            await update()
            archives = await asyncio.to_thread(distribution_archives, release)
        stanzas = base_stanzas(await asyncio.to_thread(host_stanzas), release, archives)
    except (OSError, ValueError) as error:
        raise ProvisionError(f"package sources: {error}") from error
    return release, stanzas


def _inputs_digest(spec: RootfsSpec, release: Release, stanzas: list[Stanza]) -> str:
    inputs = {
        "builder": _BUILDER,
        "spec": asdict(spec),
        "release": asdict(release),
        "sources": [stanza.render() for stanza in stanzas],
        "hook": _hook(),
        "dpkg": _DPKG_OPTIONS,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _hook() -> str:
    return resources.files(__package__).joinpath("customize.sh").read_text()


async def _install(
    spec: RootfsSpec,
    release: Release,
    stanzas: list[Stanza],
    scratch: Path,
    tree: Path,
    progress: Callable[[str], None],
) -> None:
    """Make the tree with mmdebstrap."""
    sources, hook, acquire = scratch / "base.sources", scratch / "customize.sh", scratch / "00build"
    await asyncio.to_thread(sources.write_text, "\n".join(stanza.render() for stanza in stanzas))
    await asyncio.to_thread(hook.write_text, _hook())
    await asyncio.to_thread(acquire.write_text, await _acquire_settings())
    await asyncio.to_thread(hook.chmod, 0o755)
    await run(
        "mmdebstrap",
        "--variant=minbase",
        "--mode=root",
        "--format=directory",
        f"--include={','.join(spec.packages)}",
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
        *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        f'--setup-hook=install -D -m 644 {acquire} "$1/etc/apt/apt.conf.d/00build"',
        *(f"--customize-hook={command}" for command in [*_keyring_hooks(stanzas), f'{hook} "$1"']),
        release.codename,
        tree,
        sources,
        deadline=_BUILD_DEADLINE,
        on_line=lambda line: _report(line, progress),
    )


def _report(line: str, progress: Callable[[str], None]) -> None:
    """Pass on mmdebstrap's stages; not its hooks, and not the chatter of the packages' scripts."""
    stage = line.removeprefix("I: ")
    if stage != line and stage.endswith("...") and "hook" not in stage:
        progress(stage)


async def _acquire_settings() -> str:
    """How this machine's apt reaches its mirrors (proxies, certificates, tolerated clocks), for the build alone."""
    dump = await run("apt-config", "dump", deadline=_TOOL_DEADLINE)
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Check")
    return "".join(f"{line}\n" for line in dump.splitlines() if line.startswith(wanted))


def _keyring_hooks(stanzas: list[Stanza]) -> list[str]:
    """Commands that copy keys named by a source and not installed by a package, so that apt works in the guest."""
    paths = {value for stanza in stanzas for name, value in stanza.options if name == "Signed-By"}
    files = sorted(path for value in paths for path in value.split() if path.startswith("/"))
    return [f'test -e "$1{file}" || install -D -m 644 "{file}" "$1{file}"' for file in files]


async def _installed(tree: Path) -> tuple[str, ...]:
    form = "${Package}=${Version}\n"
    listing = await run("dpkg-query", f"--admindir={tree}/var/lib/dpkg", "-W", "-f", form, deadline=_TOOL_DEADLINE)
    return tuple(sorted(listing.split()))


def _allocated(image: Path) -> int:
    return image.stat().st_blocks * 512


def _manifest_path(dest: Path) -> Path:
    return dest.with_name(dest.name + ".json")


def _publish(image: Path, dest: Path, manifest: RootfsManifest) -> None:
    """Move a finished image to its place. The manifest goes away first and comes last, so it never lies."""
    path = _manifest_path(dest)
    path.unlink(missing_ok=True)
    image.chmod(0o644)
    image.replace(dest)
    scratch = image.with_name("manifest.json")
    scratch.write_text(json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n")
    scratch.replace(path)


def _load_manifest(dest: Path) -> RootfsManifest | None:
    """The manifest of the image at `dest`; None if there is none or it is not of that file."""
    try:
        values: dict[str, Any] = json.loads(_manifest_path(dest).read_text())
        manifest = RootfsManifest(**{**values, "packages": tuple(values["packages"])})
        return manifest if dest.stat().st_size == manifest.size else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
