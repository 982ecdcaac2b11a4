"""The `base` template: the distribution's own userland, made from its packages."""

import asyncio
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from aenv.config import Settings
from aenv.images import plain
from aenv.images.rootfs.build import build_base_rootfs
from aenv.images.store import prepare
from aenv.templates.models import Template
from aenv.templates.store import TemplateStore

NAME = "base"
USER = "user"
WORKDIR = "/home/user"
ENV = {"LANG": "C.UTF-8"}


async def ensure_base(
    settings: Settings, store: TemplateStore, envd_version: str, progress: Callable[[str], None]
) -> Template:
    """The `base` template of the present settings and package sources; built only if there is none yet.

    The root file system is made in the cache and linked into the template's folder. Raises ProvisionError,
    InsufficientStorage, ImageError.
    """
    resources = settings.templates
    rootfs = settings.home / "cache" / "rootfs" / f"{NAME}-{resources.disk_mb}.ext4"
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
    for known in store.list():
        if known.id == template.id:
            await prepare(settings, store.path(known.id), store.path(known.id))
            progress(f"Template {NAME} is up to date")
            return known
    staging = await asyncio.to_thread(store.stage)
    try:
        await asyncio.to_thread(os.link, rootfs, staging / plain.ROOTFS)
        progress(f"Making the image of template {NAME}")
        await prepare(settings, staging, store.path(template.id))
        await asyncio.to_thread(store.publish, staging, template)
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
    progress(f"Template {NAME} is {template.id}")
    return template
