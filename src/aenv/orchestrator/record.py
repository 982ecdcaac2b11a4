"""What the node remembers of a sandbox: one row of the store, and its view for clients."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from aenv.lifecycle.states import EndReason, Life, Operation, Position, Stable
from aenv.network.protocol import EgressPolicy
from aenv.orchestrator.models import CreateSpec, Route, Sandbox, State
from aenv.orchestrator.tokens import Tokens
from aenv.templates.models import Template
from aenv.vmm.protocol import VmHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything needed to run, show and, after a restart of the server, adopt one sandbox.

    `slot` and `vm` are set while it has them; `boot_id` is the host's at the time it was started.
    """

    id: str
    spec: CreateSpec
    template: Template
    generation: str
    started_at: datetime
    end_at: datetime
    boot_id: str
    life: Life = Life()  # noqa: RUF009 (frozen)
    slot: int | None = None
    vm: VmHandle | None = None
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
            on_timeout="pause" if self.spec.auto_pause else "kill",
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
        Record(**document | {"spec": CreateSpec(**spec), "template": Template(**template), "life": Life(), "vm": None}),
        life=Life(
            Position(Stable(position["stable"]), Operation(position["operation"]) if position["operation"] else None),
            EndReason(life["reason"]) if life["reason"] else None,
            life["detail"],
        ),
        vm=VmHandle(**document["vm"]) if document["vm"] else None,
    )
