"""The `base` template: the distribution's own userland, made from its packages."""

import asyncio
import hashlib
import shutil
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from aenv.config import Settings
from aenv.errors import ImageError, NotFound
from aenv.images.protocol import Stack
from aenv.images.rootfs.build import build_base_rootfs
from aenv.images.store import import_layer
from aenv.snapshots.checkpoint import read
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
    settings: Settings, store: TemplateStore, envd_version: str, progress: Callable[[str], None]
) -> Template:
    """The `base` template of the present settings and package sources; built only if there is none yet.

    The root file system is made in the cache and imported as a layer, which is the disk of the template's checkpoint;
    the server adds memory to it. Raises ProvisionError, InsufficientStorage, ImageError.
    """
    resources, rootfs = settings.templates, rootfs_of(settings)
    manifest = await build_base_rootfs(rootfs, resources.disk_mb, progress)
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
    if any(known.id == template.id for known in store.list()):
        if not await asyncio.to_thread(_is_whole, store, template.id):
            await _bake(settings, store, template, rootfs, progress)
        for name in _EARLIER:
            (store.path(template.id) / name).unlink(missing_ok=True)
        progress(f"Template {NAME} is up to date")
        return store.resolve(template.id)
    staging = await asyncio.to_thread(store.stage)
    try:
        await _import(settings, rootfs, staging / CHECKPOINT, progress)
        await asyncio.to_thread(store.publish, staging, template)
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
    progress(f"Template {NAME} is {template.id}")
    return template


def rootfs_of(settings: Settings) -> Path:
    """The raw ext4 image that the template's disk was made from."""
    return settings.home / "cache" / "rootfs" / f"{NAME}-{settings.templates.disk_mb}.ext4"


async def _import(settings: Settings, rootfs: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Make a checkpoint of the root file system in `folder`."""
    progress(f"Making the disk of template {NAME}")
    layer = await import_layer(settings, rootfs)
    disk = Stack(layers=(layer,), size=settings.templates.disk_mb << 20)
    await asyncio.to_thread(partial(of_layers, folder, disk=disk))


async def _bake(
    settings: Settings, store: TemplateStore, template: Template, rootfs: Path, progress: Callable[[str], None]
) -> None:
    """Give a template that is damaged, or was made by an earlier version, its checkpoint."""
    staging = await asyncio.to_thread(store.stage)
    try:
        await _import(settings, rootfs, staging / CHECKPOINT, progress)
        await asyncio.to_thread(store.bake, template.id, staging / CHECKPOINT)
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)


def _is_whole(store: TemplateStore, template_id: str) -> bool:
    try:
        read(store.checkpoint(template_id))
    except (NotFound, ImageError):
        return False
    return True
