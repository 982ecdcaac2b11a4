"""Which image store a node has, and how a template's image gets into it."""

import asyncio
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aenv.config import Settings
from aenv.errors import ImageError, ProvisionError
from aenv.images import plain
from aenv.images.blockd import BlockImages
from aenv.images.client import BlockdClient
from aenv.images.daemon import BlockDaemon, Places
from aenv.images.layers import LayerStore, Stack, read_stack, write_stack
from aenv.images.plain import PlainImages
from aenv.images.protocol import ImageStore


def make_store(settings: Settings) -> ImageStore:
    """The store that the settings name, not started yet. Raises ProvisionError."""
    if settings.images.store == "plain":
        return PlainImages(settings.templates_dir)
    daemon = BlockDaemon(
        places=Places.of_home(settings.home),
        binary=find_blockd(settings),
        cache_bytes=settings.images.cache_mb << 20,
        ublk=settings.images.ublk == "auto",
    )
    return BlockImages(templates_dir=settings.templates_dir, layers=LayerStore(settings.layers_dir), daemon=daemon)


async def prepare(settings: Settings, directory: Path, final: Path) -> None:
    """Make what the store needs of the root file system in `directory`, a template's folder that is or will be `final`.

    What is there already is left as it is: a template of an earlier version, or one whose layer was deleted,
    is completed in place. Raises ImageError, ProvisionError, InsufficientStorage, DeadlineExceeded.
    """
    if not (directory / plain.OVERLAY).exists():
        await plain.prepare(directory, final)
    if settings.images.store != "blockd":
        return
    layers = LayerStore(settings.layers_dir)
    await asyncio.to_thread(layers.sweep)
    if await asyncio.to_thread(_complete, directory, layers):
        return
    raw = directory / plain.ROOTFS
    async with scratch_daemon(settings) as client:
        digest = await layers.import_raw(client, raw)
    await asyncio.to_thread(write_stack, directory, Stack(layers=(digest,), size=raw.stat().st_size))


def _complete(directory: Path, layers: LayerStore) -> bool:
    try:
        return all(layers.path(digest).exists() for digest in read_stack(directory).layers)
    except ImageError:
        return False


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
