"""A template as the API and the orchestrator see it."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Sizes in MiB. `names` are what a client may say instead of the id, the first being the alias shown.

    `env`, `user` and `workdir` are what the image brings; a sandbox's own environment wins over `env`.
    """

    id: str
    build_id: str
    names: tuple[str, ...]
    cpu_count: int
    memory_mb: int
    disk_mb: int
    created_at: datetime
    envd_version: str
    env: dict[str, str]
    user: str
    workdir: str
