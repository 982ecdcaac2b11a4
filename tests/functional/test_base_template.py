"""The `base` template as `aenv setup` leaves it: new, of an earlier version, damaged, with another guest.

The file system itself is a stand-in: building one takes minutes and is tested by itself.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aenv.config import Settings, TemplateSettings, load
from aenv.errors import ImageError, ProvisionError
from aenv.guest.provision import GuestBundle
from aenv.images.protocol import Stack
from aenv.images.rootfs.build import RootfsManifest
from aenv.images.store import find_blockd
from aenv.snapshots.checkpoint import Requirements, read
from aenv.snapshots.making import of_layers
from aenv.templates import base
from aenv.templates.base import ensure_base, rootfs_of
from aenv.templates.models import Template
from aenv.templates.store import CHECKPOINT, MANIFEST, TemplateStore

BUNDLE = GuestBundle(Path("/vmlinux"), Path("/initramfs"), "6.12", "0.6.13", "digest")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    try:
        find_blockd(load())
    except ProvisionError as error:
        pytest.skip(error.message)
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("mounts: needs root and /dev/fuse")

    async def built(dest: Path, disk_mb: int, progress: Callable[[str], None]) -> RootfsManifest:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with dest.open("wb") as raw:
            raw.write(b"content")
            raw.truncate(disk_mb << 20)
        return RootfsManifest(distribution="d", size=disk_mb << 20, used=4096, inputs="i", digest="d", packages=())

    monkeypatch.setattr(base, "build_base_rootfs", built)
    return Settings(home=tmp_path, images=load().images, templates=TemplateSettings(disk_mb=2))


@pytest.fixture
def store(settings: Settings) -> TemplateStore:
    return TemplateStore(settings.templates_dir)


async def ensure(settings: Settings, store: TemplateStore, bundle: GuestBundle = BUNDLE) -> Template:
    return await ensure_base(settings, store, bundle, lambda _: None)


async def test_it_is_made_once(settings: Settings, store: TemplateStore) -> None:
    made = await ensure(settings, store)
    assert made == store.resolve("base")
    found = read(store.checkpoint(made.id))
    assert found.memory is None
    assert found.disk.size == 2 << 20
    assert found.disk.layers[0].samefile(next(settings.layers_dir.glob("*.lsmt")))
    assert await ensure(settings, store) == made
    assert read(store.checkpoint(made.id)) == found
    assert sorted(path.name for path in store.path(made.id).iterdir()) == [
        CHECKPOINT,
        found.path.name,
        MANIFEST,
    ]


async def test_what_an_earlier_version_made_is_upgraded(settings: Settings, store: TemplateStore) -> None:
    made = await ensure(settings, store)
    folder = store.path(made.id)
    store.checkpoint(made.id).rename(settings.home / "away")
    (folder / CHECKPOINT).unlink()
    os.link(rootfs_of(settings), folder / "rootfs.ext4")
    for name in ("overlay.qcow2", "layers.json"):
        (folder / name).touch()
    with pytest.raises(ImageError, match="run `aenv setup`"):
        store.checkpoint(made.id)
    assert await ensure(settings, store) == made
    assert read(store.checkpoint(made.id)).disk.size == 2 << 20
    assert {path.name for path in folder.iterdir()} == {CHECKPOINT, store.checkpoint(made.id).name, MANIFEST}


async def test_a_damaged_one_is_made_again(settings: Settings, store: TemplateStore) -> None:
    made = await ensure(settings, store)
    read(store.checkpoint(made.id)).disk.layers[0].unlink()
    assert await ensure(settings, store) == made
    assert read(store.checkpoint(made.id))


async def test_memory_stays_with_its_guest_and_goes_with_it(settings: Settings, store: TemplateStore) -> None:
    made = await ensure(settings, store)
    cold = read(store.checkpoint(made.id))
    written = settings.home / "written"
    written.write_bytes(b"layer")
    requires = Requirements(driver="q", version="1", accel="tcg", cpu="max", kernel=BUNDLE.digest, vcpus=1)
    baked = of_layers(
        settings.home / "baked",
        disk=replace(cold.disk, layers=(*cold.disk.layers, written)),
        memory=Stack(layers=(written,), size=4096),
        state=b"state",
        requires=requires,
    )
    store.bake(made.id, baked.path)
    await ensure(settings, store)
    assert read(store.checkpoint(made.id)).manifest == baked.manifest
    await ensure(settings, store, replace(BUNDLE, digest="another"))
    again = read(store.checkpoint(made.id))
    assert again.memory is None
    assert len(again.disk.layers) == 1
    assert again.disk.layers[0].samefile(next(settings.layers_dir.glob("*.lsmt")))
