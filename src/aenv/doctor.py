"""What this host can do and what is missing, each with its fix. All a check may write is the KVM trial's cache."""

import asyncio
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aenv.config import Settings
from aenv.errors import AenvError, ProvisionError

MIN_FREE_GIB = 5
MIN_KERNEL = (5, 14)
"""cgroup.kill and the pidfd calls the drivers rely on."""


class Verdict(StrEnum):
    """`WARN` means that it works with a limit; `FAIL` that sandboxes cannot run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` is empty when there is nothing to do."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def examine(settings: Settings) -> list[Check]:
    """All checks, in the order in which their failures matter."""
    checks: list[Check] = []
    for probe in PROBES:
        try:
            checks.append(probe(settings))
        except (AenvError, OSError) as error:
            name = probe.__name__.strip("_").replace("_", " ")
            fix = "aenv setup" if isinstance(error, ProvisionError) else "see the message"
            checks.append(Check(name, Verdict.FAIL, str(error), fix))
    return checks


def _machine(settings: Settings) -> Check:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Check("machine", Verdict.FAIL, found, "a node needs Linux; elsewhere use the client alone")
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if version < MIN_KERNEL:
        return Check("machine", Verdict.FAIL, found, f"use a kernel of at least {MIN_KERNEL[0]}.{MIN_KERNEL[1]}")
    return Check("machine", Verdict.OK, found)


def _privileges(settings: Settings) -> Check:
    if os.geteuid() != 0:
        return Check("privileges", Verdict.FAIL, f"uid {os.geteuid()}", "run the server as root")
    return Check("privileges", Verdict.OK, "root")


def _tools(settings: Settings) -> Check:
    needed = {
        "nft": "nftables",
        "ip": "iproute2",
        "qemu-img": "qemu-utils",
        "mke2fs": "e2fsprogs",
        "mmdebstrap": "mmdebstrap",
        "zstd": "zstd",
        "lz4": "lz4",
    }
    missing = sorted(package for tool, package in needed.items() if shutil.which(tool) is None)
    if missing:
        return Check("tools", Verdict.FAIL, f"missing: {', '.join(missing)}", f"apt-get install {' '.join(missing)}")
    return Check("tools", Verdict.OK, ", ".join(sorted(needed)))


def _devices(settings: Settings) -> Check:
    if not Path("/dev/net/tun").is_char_device():
        return Check("devices", Verdict.FAIL, "no /dev/net/tun", "modprobe tun, or give the container the device")
    return Check("devices", Verdict.OK, "/dev/net/tun")


def _network(settings: Settings) -> Check:
    chains = subprocess.run(["nft", "list", "chains"], capture_output=True, text=True, timeout=10, check=False).stdout
    if re.search(r"hook forward priority [^;]*; policy drop", chains):
        fix = "accept forwarding from and to interfaces aenv*, e.g. in Docker's chain DOCKER-USER"
        return Check("network", Verdict.WARN, "a firewall of this host drops forwarded packets by default", fix)
    return Check("network", Verdict.OK, f"slots in {settings.network.cidr}; forwarding is not dropped by default")


def _vmm(settings: Settings) -> Check:
    from aenv.guest.provision import load_bundle
    from aenv.vmm.accel import AccelProver
    from aenv.vmm.launch import find_program

    prover = AccelProver(home=settings.home, settings=settings.vmm, bundle=load_bundle(settings.home))
    accel = asyncio.run(prover.decide())
    program = find_program(settings.vmm.qemu_binary, accel.name)
    return Check("vmm", Verdict.OK, f"QEMU {program.version}, {accel.name} ({accel.reason})")


def _cgroups(settings: Settings) -> Check:
    from aenv.vmm import cgroup

    support = cgroup.probe(settings.home)
    return Check("cgroups", Verdict.OK if support.root else Verdict.WARN, support.detail)


def _disk(settings: Settings) -> Check:
    place = settings.home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    found = f"{free:.0f} GiB free for {settings.home}"
    if free < MIN_FREE_GIB:
        return Check("disk", Verdict.WARN, found, f"free at least {MIN_FREE_GIB} GiB, or set AENV_HOME elsewhere")
    return Check("disk", Verdict.OK, found)


def _guest(settings: Settings) -> Check:
    from aenv.guest.provision import load_bundle

    try:
        bundle = load_bundle(settings.home)
    except AenvError as error:
        return Check("guest", Verdict.FAIL, error.message, "aenv setup")
    return Check("guest", Verdict.OK, f"Linux {bundle.kernel_version}, envd {bundle.envd_version}")


def _images(settings: Settings) -> Check:
    from aenv.images.store import find_blockd

    try:
        found = str(find_blockd(settings))
    except AenvError as error:
        return Check("images", Verdict.FAIL, error.message, "make build")
    if not os.access(found, os.X_OK):
        return Check("images", Verdict.FAIL, f"{found} cannot be executed", "make build, or set images.blockd")
    if not Path("/dev/fuse").is_char_device():
        return Check("images", Verdict.FAIL, "no /dev/fuse", "modprobe fuse, or give the container the device")
    ublk = "and ublk" if Path("/dev/ublk-control").exists() else "(no ublk: modprobe ublk_drv where the kernel has it)"
    ublk = ublk if settings.images.ublk == "auto" else "(images.ublk = off)"
    return Check("images", Verdict.OK, f"{found}, FUSE {ublk}")


def _templates(settings: Settings) -> Check:
    from aenv.templates.store import TemplateStore

    try:
        names = [name for template in TemplateStore(settings.templates_dir).list() for name in template.names]
    except AenvError as error:
        return Check("templates", Verdict.FAIL, error.message, "aenv setup")
    if "base" not in names:
        return Check("templates", Verdict.FAIL, "no template 'base'", "aenv setup")
    return Check("templates", Verdict.OK, ", ".join(names))


PROBES: tuple[Callable[[Settings], Check], ...] = (
    _machine,
    _privileges,
    _tools,
    _devices,
    _network,
    _guest,
    _vmm,
    _cgroups,
    _disk,
    _images,
    _templates,
)
