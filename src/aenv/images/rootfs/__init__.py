"""The `base` template's root file system, made from the distribution's packages."""

from aenv.images.rootfs.build import RootfsManifest, RootfsSpec, build_base_rootfs, build_rootfs

__all__ = ["RootfsManifest", "RootfsSpec", "build_base_rootfs", "build_rootfs"]
