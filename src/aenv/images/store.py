"""The image store of a node, and how a root file system gets into it."""

import asyncio
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aenv.config import Settings
from aenv.errors import ProvisionError
from aenv.images.blockd import BlockImages
from aenv.images.client import BlockdClient
from aenv.images.daemon import BlockDaemon, Places
from aenv.images.layers import LayerStore
from aenv.images.protocol import ImageStore


def make_store(settings: Settings) -> ImageStore:
    """The store of the node that the settings describe, not started yet. Raises ProvisionError."""
    daemon = BlockDaemon(
        places=Places.of_home(settings.home),
        binary=find_blockd(settings),
        cache_bytes=settings.images.cache_mb << 20,
        ublk=settings.images.ublk == "auto",
    )
    return BlockImages(daemon)


async def import_layer(settings: Settings, raw: Path) -> Path:
    """The layer with the content of a raw image, made if there is none yet, on stable storage.

    Raises ImageError, ProvisionError, InsufficientStorage, DeadlineExceeded.
    """
    layers = LayerStore(settings.layers_dir)
    await asyncio.to_thread(layers.sweep)
    async with scratch_daemon(settings) as client:
        return layers.path(await layers.import_raw(client, raw))


def find_blockd(settings: Settings) -> Path:
    """The daemon's binary. Raises ProvisionError if there is none."""
    if settings.images.blockd is not None:
        return Path(settings.images.blockd)
    target = f"{platform.machine()}-unknown-linux-gnu"
    built = Path(__file__).parents[3] / "rust" / "target" / target / "release" / "aenv-blockd"
    if built.exists():
        return built
    if (installed := shutil.which("aenv-blockd")) is not None:
        return Path(installed)
    raise ProvisionError(f"aenv-blockd is not built ({built}); run `make build`, or set images.blockd")


@asynccontextmanager
async def scratch_daemon(settings: Settings) -> AsyncIterator[BlockdClient]:
    """A daemon of one's own for work on files, ended with the block. The node's own, which a server may be starting
    or ending at any moment, is left alone."""
    with tempfile.TemporaryDirectory(prefix="aenv-blockd-", ignore_cleanup_errors=True) as scratch:
        places = Places(state=Path(scratch), cache=Path(scratch, "cache"))
        daemon = BlockDaemon(places=places, binary=find_blockd(settings), cache_bytes=1 << 20, ublk=False, tied=True)
        try:
            yield (await daemon.start()).client
        finally:
            await daemon.aclose()
