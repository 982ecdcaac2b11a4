import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv.distro.packages import Package
from aenv.errors import ProvisionError
from aenv.guest import kernel
from aenv.guest.kernel import KernelTree
from aenv.guest.provision import load_bundle, provision
from guest_images import bzimage, elf_kernel, module, module_tree

BOOT = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng", "ext4")
MakeEnvd = Callable[[str], Path]


class Distribution:
    """In place of apt: one kernel package and what is in it. What counts is how often it is fetched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version: str | None = "6.12"
        self.image = bzimage("gzip", elf_kernel())
        self.fetched = 0
        monkeypatch.setattr(kernel, "resolve", self.resolve)
        monkeypatch.setattr(kernel, "unpack", self.unpack)

    async def resolve(self) -> list[Package]:
        if self.version is None:
            raise ProvisionError("apt offers no package")
        return [Package("linux-image", self.version)]

    async def unpack(self, found: list[Package], cache: Path, directory: Path) -> KernelTree:
        self.fetched += 1
        image = directory / "boot/vmlinuz"
        image.parent.mkdir(parents=True)
        image.write_bytes(self.image)
        modules = module_tree(directory / "modules", {f"{name}.ko": module() for name in BOOT})
        return KernelTree(str(self.version), image, modules)


@pytest.fixture
def distribution(monkeypatch: pytest.MonkeyPatch) -> Distribution:
    return Distribution(monkeypatch)


@pytest.fixture
def make_envd(tmp_path: Path) -> MakeEnvd:
    def make(version: str) -> Path:
        path = tmp_path / "envd"
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
        return path

    return make


def quiet(_: str) -> None:
    pass


async def test_bundle_holds_kernel_and_initramfs(
    tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd
) -> None:
    bundle = await provision(tmp_path, make_envd("0.6.13"), quiet)
    assert bundle == load_bundle(tmp_path)
    assert (bundle.kernel_version, bundle.envd_version) == ("6.12", "0.6.13")
    assert bundle.kernel.read_bytes() == elf_kernel()
    assert b"echo 0.6.13" in bundle.initramfs.read_bytes()
    assert bundle.kernel.parent.name == bundle.digest
    assert sorted(path.name for path in (tmp_path / "guest").iterdir()) == sorted([bundle.digest, "current"])


async def test_same_inputs_fetch_nothing(tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd) -> None:
    first = await provision(tmp_path, make_envd("1"), quiet)
    assert await provision(tmp_path, make_envd("1"), quiet) == first
    assert distribution.fetched == 1


async def test_new_kernel_or_daemon_is_a_new_bundle_beside_the_old(
    tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd
) -> None:
    first = await provision(tmp_path, make_envd("1"), quiet)
    second = await provision(tmp_path, make_envd("2"), quiet)
    distribution.version = "6.13"
    third = await provision(tmp_path, make_envd("2"), quiet)
    assert load_bundle(tmp_path) == third
    assert (second.envd_version, third.kernel_version) == ("2", "6.13")
    assert first.initramfs.exists()
    assert distribution.fetched == 3


async def test_damaged_bundle_is_noticed_and_made_again(
    tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd
) -> None:
    bundle = await provision(tmp_path, make_envd("1"), quiet)
    bundle.kernel.write_bytes(b"short")
    with pytest.raises(ProvisionError, match="damaged"):
        load_bundle(tmp_path)
    assert await provision(tmp_path, make_envd("1"), quiet) == bundle
    assert bundle.kernel.read_bytes() == elf_kernel()


async def test_failed_build_keeps_the_bundle_and_leaves_nothing(
    tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd
) -> None:
    bundle = await provision(tmp_path, make_envd("1"), quiet)
    distribution.version, distribution.image = "6.13", bzimage("gzip", elf_kernel(note=None))
    with pytest.raises(ProvisionError, match="PVH"):
        await provision(tmp_path, make_envd("1"), quiet)
    assert load_bundle(tmp_path) == bundle
    assert sorted(path.name for path in (tmp_path / "guest").iterdir()) == sorted([bundle.digest, "current"])


async def test_what_a_killed_build_left_is_removed(
    tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd
) -> None:
    (tmp_path / "guest/.new-abc/packages").mkdir(parents=True)
    await provision(tmp_path, make_envd("1"), quiet)
    assert not (tmp_path / "guest/.new-abc").exists()


async def test_without_package_lists_the_present_kernel_is_kept(
    tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd
) -> None:
    said: list[str] = []
    bundle = await provision(tmp_path, make_envd("1"), quiet)
    distribution.version = None
    assert await provision(tmp_path, make_envd("1"), said.append) == bundle
    assert "apt offers no package" in said[0]
    with pytest.raises(ProvisionError, match="apt offers no package"):
        await provision(tmp_path, make_envd("2"), quiet)


async def test_missing_daemon_says_how_to_build_it(tmp_path: Path, distribution: Distribution) -> None:
    with pytest.raises(ProvisionError, match="make build"):
        await provision(tmp_path, tmp_path / "absent", quiet)


async def test_unusable_bundles_say_what_to_run(
    tmp_path: Path, distribution: Distribution, make_envd: MakeEnvd
) -> None:
    with pytest.raises(ProvisionError, match="aenv setup"):
        load_bundle(tmp_path)
    bundle = await provision(tmp_path, make_envd("1"), quiet)
    manifest = bundle.kernel.with_name("manifest.json")
    for broken in ("", "[]", json.dumps({"digest": bundle.digest}), "[" * 10**5):
        manifest.write_text(broken)
        with pytest.raises(ProvisionError, match="aenv setup"):
            load_bundle(tmp_path)
    shutil.rmtree(bundle.kernel.parent)
    with pytest.raises(ProvisionError, match="aenv setup"):
        load_bundle(tmp_path)
