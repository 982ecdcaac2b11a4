"""The `base` template: the distribution's own userland, made from its packages."""

import asyncio
import hashlib
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from aenv.config import Settings
from aenv.errors import ImageError, NotFound
from aenv.guest.provision import GuestBundle
from aenv.images.protocol import Stack
from aenv.images.rootfs.build import build_base_rootfs
from aenv.images.store import import_layer
from aenv.snapshots.checkpoint import Checkpoint, read
from aenv.snapshots.making import of_layers
from aenv.templates.models import Template
from aenv.templates.store import CHECKPOINT, TemplateStore

NAME = "base"
USER = "user"
WORKDIR = "/home/user"
ENV = {"LANG": "C.UTF-8"}
_EARLIER = ("rootfs.ext4", "overlay.qcow2", "layers.json")
"""What earlier versions kept in a template's folder instead of a checkpoint."""


async def ensure_base(
    settings: Settings, store: TemplateStore, bundle: GuestBundle, progress: Callable[[str], None]
) -> Template:
    """The `base` template of the present settings and package sources; built only if there is none yet.

    The root file system is made in the cache and imported as a layer, which is the disk of the template's checkpoint.
    The server adds memory to it; what it added with another guest `bundle` than the present one is taken off again.
    Raises ProvisionError, InsufficientStorage, ImageError.
    """
    resources, rootfs = settings.templates, rootfs_of(settings)
    manifest = await build_base_rootfs(rootfs, resources.disk_mb, progress)
    envd_version = bundle.envd_version
    identity = f"{manifest.digest} {resources.cpu_count} {resources.memory_mb} {resources.disk_mb} {envd_version}"
    digest = hashlib.sha256(identity.encode()).digest()
    template = Template(
        id="t" + digest.hex()[:19],
        build_id=str(uuid.UUID(bytes=digest[:16], version=4)),
        names=(NAME,),
        cpu_count=resources.cpu_count,
        memory_mb=resources.memory_mb,
        disk_mb=resources.disk_mb,
        created_at=datetime.now(UTC),
        envd_version=envd_version,
        env=ENV,
        user=USER,
        workdir=WORKDIR,
    )
    known = next((known for known in store.list() if known.id == template.id), None)
    found = await asyncio.to_thread(_read, store, template.id) if known else None
    if known is None or found is None or _is_outdated(found, bundle):
        staging = await asyncio.to_thread(store.stage)
        try:
            disk = await _disk(settings, rootfs, found, progress)
            await asyncio.to_thread(partial(of_layers, staging / CHECKPOINT, disk=disk))
            if known is None:
                await asyncio.to_thread(store.publish, staging, template)
            else:
                await asyncio.to_thread(store.bake, template.id, staging / CHECKPOINT)
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
    for name in _EARLIER:
        (store.path(template.id) / name).unlink(missing_ok=True)
    progress(f"Template {NAME} is {template.id}")
    return known or template


def rootfs_of(settings: Settings) -> Path:
    """The raw ext4 image that the template's disk was made from."""
    return settings.home / "cache" / "rootfs" / f"{NAME}-{settings.templates.disk_mb}.ext4"


def _read(store: TemplateStore, template_id: str) -> Checkpoint | None:
    """What the template has; None if that is damaged, or if an earlier version made it."""
    try:
        return read(store.checkpoint(template_id))
    except (NotFound, ImageError):
        return None


def _is_outdated(found: Checkpoint, bundle: GuestBundle) -> bool:
    memory = found.manifest.memory
    return memory is not None and memory.requires.kernel != bundle.digest


async def _disk(settings: Settings, rootfs: Path, found: Checkpoint | None, progress: Callable[[str], None]) -> Stack:
    """The disk as it was before a guest booted from it."""
    if found is not None:
        return replace(found.disk, layers=found.disk.layers[:1])
    progress(f"Making the disk of template {NAME}")
    layer = await import_layer(settings, rootfs)
    return Stack(layers=(layer,), size=settings.templates.disk_mb << 20)
