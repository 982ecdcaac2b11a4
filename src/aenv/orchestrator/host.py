"""What tells one boot of the host from another."""

from pathlib import Path


def host_boot_id() -> str:
    """Changes at every boot of the host: what ran under another one cannot run any more."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
