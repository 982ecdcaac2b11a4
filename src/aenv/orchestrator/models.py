"""What the orchestrator shows of sandboxes to the API and the proxy: plain values, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal

from aenv.network.protocol import EgressPolicy


class State(StrEnum):
    """The stable state as the E2B API names it (a sandbox being created is not shown yet)."""

    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSpec:
    """A validated wish for a sandbox. `template` is an id, a name or `name:tag`; `timeout` in seconds, > 0.

    `network` is the E2B `network` object as given (returned by GET), `egress` what was made of it.
    """

    template: str
    timeout: int
    on_timeout: Literal["kill", "pause"] = "kill"
    keep_memory: bool = True
    """Whether the pause at its timeout keeps the memory (E2B's `autoPauseMemory`)."""
    auto_resume: bool = False
    secure: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    egress: EgressPolicy = field(default_factory=EgressPolicy)
    allow_internet_access: bool | None = None
    network: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """One sandbox at one instant. Times are aware UTC; sizes are MiB.

    `envd_token` is None for an unsecured sandbox; `traffic_token` is set when public traffic is not allowed.
    `operation` is what is in flight (`killing`, ...), None when stable.
    """

    id: str
    template_id: str
    alias: str | None
    state: State
    operation: str | None
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int
    disk_mb: int
    envd_version: str
    envd_token: str | None
    traffic_token: str | None
    metadata: Mapping[str, str]
    env_vars: Mapping[str, str]
    on_timeout: Literal["kill", "pause"]
    auto_resume: bool
    pause_mode: Literal["full", "filesystem"] | None
    """What a pause kept; None while it runs."""
    parent: str | None
    """The sandbox it was forked from, or whose snapshot it was made of."""
    allow_internet_access: bool | None
    network: Mapping[str, object] | None
    generation: str
    timings: Mapping[str, float]
    """Milliseconds of each step of its launch: slot, disk, vmm, guest, init."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A named or unnamed snapshot: `id` is what a create takes as its template; `names` are full names
    (``name:tag``), empty for an unnamed one. `sandbox_id` is the sandbox it was taken of. Sizes are MiB."""

    id: str
    names: tuple[str, ...]
    sandbox_id: str
    created_at: datetime
    cpu_count: int
    memory_mb: int
    disk_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotQuery:
    """Filter and page of a listing of snapshots, newest first. `name` is ``name`` (every tag) or ``name:tag``."""

    sandbox_id: str | None = None
    name: str | None = None
    limit: int = 100
    next_token: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """One page. `next_token` is None on the last."""

    items: tuple[Snapshot, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the proxy reaches a running sandbox. `generation` keys pooled connections: when it changes, they are closed.

    `public` is False when ports other than envd's need `traffic_token`; `mask_host` replaces the Host header
    (``${PORT}`` stands for the port).
    """

    sandbox_id: str
    generation: str
    address: str
    traffic_token: str
    public: bool
    mask_host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """Filter, order and page of a listing. `after` is the opaque cursor of the previous page."""

    states: frozenset[State]
    metadata: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    started_after: datetime | None = None
    descending: bool = True
    limit: int = 100
    next_token: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """One page. `next_token` is None on the last."""

    items: tuple[Sandbox, ...]
    next_token: str | None
    total_running: int
