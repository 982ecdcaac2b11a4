"""A template as the API and the orchestrator see it."""

from dataclasses import dataclass
from datetime import datetime

DEFAULT_TAG = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Sizes in MiB. `names` are what a client may say instead of the id (``name`` or ``name:tag``; a name alone stands
    for ``name:default``), the first being the alias shown.

    `env`, `user` and `workdir` are what the image brings; a sandbox's own environment wins over `env`. `source` is the
    sandbox that a snapshot was taken of, None for a template that was built.
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
    source: str | None = None


def snapshot_id(template: Template) -> str:
    """What clients know a snapshot by: ``name:tag`` if it has a name, else its id."""
    if not template.names:
        return template.id
    name, _, tag = template.names[0].partition(":")
    return f"{name}:{tag or DEFAULT_TAG}"
