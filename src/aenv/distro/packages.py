"""Fetching packages of the distribution without installing them: resolve, download, unpack."""

import asyncio
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aenv.distro.tools import run
from aenv.errors import ProvisionError

_LOCAL = 60.0
_NETWORK = 600.0
"""Deadlines in seconds: of what only reads apt's lists, and of what downloads."""


@dataclass(frozen=True, slots=True)
class Package:
    """One version of a binary package. `depends` is the raw Depends field."""

    name: str
    version: str
    depends: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.version}"

    def dependencies(self, pattern: str) -> list[tuple[str, str | None]]:
        """Names of dependencies matching `pattern` entirely, each with the version it is pinned to with ``=``."""
        found = []
        for item in re.split(r"[,|]", self.depends):
            match = re.fullmatch(r"\s*([^\s(:]+)(?::\w+)?\s*(?:\(=\s*([^)\s]+)\s*\))?.*", item, re.DOTALL)
            if match and re.fullmatch(pattern, match[1]):
                found.append((match[1], match[2]))
        return found


async def architecture() -> str:
    """dpkg's name of this machine's architecture (``amd64``)."""
    return (await run("dpkg", "--print-architecture", deadline=_LOCAL)).strip()


async def newest(name: str, version: str | None = None) -> Package:
    """The newest version of `name` that any source of this machine offers, or just `version`.

    Refreshes absent lists, as root. Raises ProvisionError if there is none.
    """
    found = await _versions(name)
    if not found and os.geteuid() == 0:
        await update()
        found = await _versions(name)
    if version is not None:
        found = [package for package in found if package.version == version]
    if not found:
        raise ProvisionError(f"apt offers no package {name}{f' {version}' if version else ''}; run: apt-get update")
    return await asyncio.to_thread(max, found, key=functools.cmp_to_key(_compare))


async def update() -> None:
    """Refresh apt's lists (needs root)."""
    await run("apt-get", "update", "--quiet", deadline=_NETWORK)


async def download(package: Package, directory: Path) -> Path:
    """The package's .deb in `directory`, downloaded unless it is there. apt checks it against its signed index."""
    if present := await asyncio.to_thread(_present, package, directory):
        return present
    await run("apt-get", "download", "-o", "APT::Sandbox::User=root", str(package), cwd=directory, deadline=_NETWORK)
    if present := await asyncio.to_thread(_present, package, directory):
        return present
    raise ProvisionError(f"apt-get download {package} left no file in {directory}")


def _present(package: Package, directory: Path) -> Path | None:
    """The downloaded file; apt gives a file its name only when it is whole."""
    escaped = package.version.replace(":", "%3a")
    return next(iter(sorted(directory.glob(f"{package.name}_{escaped}_*.deb"))), None)


async def unpack(deb: Path, directory: Path) -> None:
    """Extract the files of a package into `directory`."""
    await run("dpkg-deb", "--extract", deb, directory, deadline=_NETWORK)


async def _versions(name: str) -> list[Package]:
    try:
        text = await run("apt-cache", "show", "--all-versions", name, deadline=_LOCAL)
    except ProvisionError:  # apt-cache's way to say that it has no such package
        return []
    return list(parse_records(text))


def parse_records(text: str) -> Iterator[Package]:
    """The packages in the output of ``apt-cache show``."""
    for record in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^([A-Za-z-]+): *(.*(?:\n .*)*)", record, re.MULTILINE))
        if "Package" in fields and "Version" in fields:
            yield Package(fields["Package"], fields["Version"], fields.get("Depends", ""))


def _compare(one: Package, other: Package) -> int:
    """By dpkg's order of versions, which is its own to define."""
    argv = ["dpkg", "--compare-versions", one.version]
    if subprocess.run([*argv, "eq", other.version], check=False).returncode == 0:
        return 0
    return 1 if subprocess.run([*argv, "gt", other.version], check=False).returncode == 0 else -1
