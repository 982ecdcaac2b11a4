from pathlib import Path

import pytest

from aenv.errors import ProvisionError
from aenv.guest.modules import dependencies, load_order
from guest_images import compressed, module, module_tree


def names(directory: Path, *wanted: str) -> list[str]:
    return [loaded.name for loaded in load_order(directory, wanted)]


def test_dependencies_come_first_and_once(tmp_path: Path) -> None:
    tree = module_tree(
        tmp_path,
        {
            "drivers/net/virtio_net.ko": module("net_failover,failover"),
            "drivers/net/net_failover.ko": module("failover"),
            "net/core/failover.ko": module(),
            "drivers/block/virtio_blk.ko": module(),
        },
    )
    assert names(tree, "virtio_blk", "virtio_net") == ["virtio_blk", "failover", "net_failover", "virtio_net"]


def test_builtin_modules_are_left_out_whatever_their_spelling(tmp_path: Path) -> None:
    tree = module_tree(
        tmp_path, {"b.ko": module("virtio-ring")}, builtin=("drivers/virtio/virtio_ring.ko", "fs/ext4.ko")
    )
    assert names(tree, "ext4", "b") == ["b"]


def test_hyphens_in_file_names_are_underscores_to_the_kernel(tmp_path: Path) -> None:
    assert names(module_tree(tmp_path, {"virtio-rng.ko": module()}), "virtio_rng") == ["virtio_rng"]


@pytest.mark.parametrize(("suffix", "kind"), [(".ko.xz", "xz"), (".ko.zst", "zstd"), (".ko.gz", "gzip")])
def test_compressed_modules_are_decompressed(tmp_path: Path, suffix: str, kind: str) -> None:
    tree = module_tree(tmp_path, {f"a{suffix}": compressed(kind, module())})
    assert load_order(tree, ("a",))[0].data == module()


def test_missing_module_names_who_needs_it(tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match="module gone, which a needs,"):
        load_order(module_tree(tmp_path, {"a.ko": module("gone")}), ("a",))


def test_circular_dependencies_end(tmp_path: Path) -> None:
    assert names(module_tree(tmp_path, {"a.ko": module("b"), "b.ko": module("a")}), "a") == ["b", "a"]


@pytest.mark.parametrize("content", [b"", b"text", module()[:100], module().replace(b".modinfo", b".madinfo")])
def test_what_is_no_module_is_refused(content: bytes) -> None:
    with pytest.raises(ProvisionError):
        dependencies(content)
