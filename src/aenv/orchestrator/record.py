"""What the node remembers of a sandbox: one row of the store, and its view for clients."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from aenv.lifecycle.states import EndReason, Life, Operation, Position, Stable
from aenv.network.protocol import EgressPolicy
from aenv.orchestrator.models import CreateSpec, Route, Sandbox, State
from aenv.orchestrator.tokens import Tokens
from aenv.templates.models import Template
from aenv.vmm.protocol import VmHandle

PauseMode = Literal["full", "filesystem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One launch of a sandbox, from a start to the next pause, rollback or end: what a new server needs to adopt it.

    `name` is its folder's, `boot_id` the host's at its start. `disk` and `memory` name the layer files in that folder,
    the lowest first; the VMM maps the `mapped` lowest of `memory` as the memory image `image`, the others were captured
    since. A guest that was booted maps none. `kernel` is the digest of the bundle it was booted from, by whichever run.
    """

    name: str
    boot_id: str
    slot: int
    vm: VmHandle
    kernel: str
    disk: tuple[str, ...]
    disk_size: int
    memory: tuple[str, ...] = ()
    mapped: int = 0
    image: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a paused sandbox is kept as: the checkpoint `folder` in its own folder. `durable` once it is on stable
    storage: until then a crash of the host, so a change of its `boot_id`, may have lost it."""

    folder: str
    mode: PauseMode
    boot_id: str
    durable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything needed to run, show and, after a restart of the server, adopt one sandbox.

    `run` is set while it runs, `rest` while it is paused (both while it changes from one to the other). `parent` is the
    sandbox whose state it began with. `launches` counts its runs.
    """

    id: str
    spec: CreateSpec
    template: Template
    generation: str
    started_at: datetime
    end_at: datetime
    parent: str | None = None
    life: Life = Life()  # noqa: RUF009 (frozen)
    run: RunRecord | None = None
    rest: Rest | None = None
    launches: int = 0
    ended_at: datetime | None = None
    timings: Mapping[str, float] = field(default_factory=dict)

    def sandbox(self, tokens: Tokens) -> Sandbox:
        """The view for clients."""
        return Sandbox(
            id=self.id,
            template_id=self.template.id,
            alias=self.template.names[0] if self.template.names else None,
            state=State(self.life.position.stable) if self.life.visible else State.RUNNING,
            operation=self.life.position.operation,
            started_at=self.started_at,
            end_at=self.end_at,
            cpu_count=self.template.cpu_count,
            memory_mb=self.template.memory_mb,
            disk_mb=self.template.disk_mb,
            envd_version=self.template.envd_version,
            envd_token=tokens.envd(self.id) if self.spec.secure else None,
            traffic_token=None if self.public else tokens.traffic(self.id),
            metadata=self.spec.metadata,
            env_vars=self.spec.env_vars,
            on_timeout=self.spec.on_timeout,
            auto_resume=self.spec.auto_resume,
            pause_mode=self.rest.mode if self.rest and self.life.position.stable is Stable.PAUSED else None,
            parent=self.parent,
            allow_internet_access=self.spec.allow_internet_access,
            network=self.spec.network,
            generation=self.generation,
            timings=self.timings,
        )

    def route(self, address: str, tokens: Tokens) -> Route:
        """How the proxy reaches it at `address`."""
        mask = (self.spec.network or {}).get("maskRequestHost")
        return Route(
            sandbox_id=self.id,
            generation=self.generation,
            address=address,
            traffic_token=tokens.traffic(self.id),
            public=self.public,
            mask_host=mask if isinstance(mask, str) else None,
        )

    @property
    def was_launched(self) -> bool:
        """Whether it ever ran, so that a client may know it."""
        return self.run is not None or self.rest is not None

    @property
    def public(self) -> bool:
        """Whether ports other than the daemon's are open without the traffic token."""
        return (self.spec.network or {}).get("allowPublicTraffic") is not False


def to_json(record: Record) -> str:
    """The row's document."""
    document = asdict(record)
    for key in ("started_at", "end_at", "ended_at"):
        document[key] = document[key].isoformat() if document[key] else None
    document["template"]["created_at"] = record.template.created_at.isoformat()
    return json.dumps(document, separators=(",", ":"))


def from_json(text: str) -> Record:
    """The inverse of `to_json`. Raises ValueError, KeyError or TypeError on a document that is not ours."""
    document: dict[str, Any] = json.loads(text)
    spec: dict[str, Any] = document["spec"]
    egress: dict[str, Any] = spec["egress"]
    spec["egress"] = EgressPolicy(
        internet=egress["internet"], allow_out=tuple(egress["allow_out"]), deny_out=tuple(egress["deny_out"])
    )
    template: dict[str, Any] = document["template"]
    template["names"] = tuple(template["names"])
    template["created_at"] = datetime.fromisoformat(template["created_at"])
    life: Mapping[str, Any] = document["life"]
    position: Mapping[str, Any] = life["position"]
    for key in ("started_at", "end_at", "ended_at"):
        document[key] = datetime.fromisoformat(document[key]) if document[key] else None
    return replace(
        Record(
            **document | {"spec": CreateSpec(**spec), "template": Template(**template), "life": Life(), "run": None}
        ),
        life=Life(
            Position(Stable(position["stable"]), Operation(position["operation"]) if position["operation"] else None),
            EndReason(life["reason"]) if life["reason"] else None,
            life["detail"],
        ),
        run=_run(document["run"]) if document["run"] else None,
        rest=Rest(**document["rest"]) if document["rest"] else None,
    )


def _run(document: dict[str, Any]) -> RunRecord:
    layers = {key: tuple(document[key]) for key in ("disk", "memory")}
    return RunRecord(**document | layers | {"vm": VmHandle(**document["vm"])})
