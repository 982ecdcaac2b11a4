"""The protocol's models, with its names (Appendix A of the E2B contract).

Requests are pydantic models: strict (nothing is converted), unknown fields ignored, null meaning absent where a field
is optional. Answers are typed dicts: a key that has nothing to say is left out.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict  # pydantic needs this one rather than typing's before Python 3.12

CLIENT_ID = "aenv"
"""`clientID` is required and means nothing any more; legacy clients append it to the id after a dash."""


def _strings_only(values: dict[str, Any]) -> dict[str, Any]:
    """Stops at the first wrong value, where pydantic would collect a report on each of 100,000."""
    for key, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"the value of {key[:80]!r} must be a string")
    return values


StringMap = Annotated[
    dict[str, Any],
    AfterValidator(_strings_only),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


Strings = Annotated[list[str], Field(fail_fast=True)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class SandboxAutoResumeConfig(_Request):
    enabled: bool


class SandboxVolumeMount(_Request):
    name: str
    path: str


class SandboxNetworkConfig(_Request):
    allowPublicTraffic: bool | None = None
    allowOut: Strings | None = None
    denyOut: Strings | None = None
    dnsServers: Strings | None = None
    egressProxy: dict[str, Any] | None = None
    maskRequestHost: str | None = None
    httpsPorts: Annotated[list[int], Field(fail_fast=True)] | None = None
    rules: dict[str, Any] | None = None


class NewSandboxV2(_Request):
    templateID: str
    timeout: int | None = None
    autoPause: bool | None = None
    autoPauseMemory: bool | None = None
    autoResume: SandboxAutoResumeConfig | None = None
    allow_internet_access: bool | None = None
    network: SandboxNetworkConfig | None = None
    metadata: StringMap | None = None
    envVars: StringMap | None = None
    mcp: dict[str, Any] | None = None
    """Nothing for the server: the SDK itself starts the gateway that the template brings."""
    iam: dict[str, Any] | None = None
    volumeMounts: Annotated[list[SandboxVolumeMount], Field(fail_fast=True)] | None = None


class NewSandbox(NewSandboxV2):
    secure: bool | None = None


class ConnectSandbox(_Request):
    timeout: int
    memory: bool | None = None


class ConnectSandboxV2(_Request):
    timeout: int | None = None
    memory: bool | None = None


class ResumedSandbox(_Request):
    timeout: int | None = None
    autoPause: bool | None = None
    """Without effect: what happens at the timeout is decided at creation, and a resume must not lose it."""
    memory: bool | None = None


class SandboxPauseRequest(_Request):
    memory: bool | None = None
    requireHealthyGuest: bool | None = None


class SandboxSnapshotRequest(_Request):
    name: str | None = None
    memory: bool | None = None


class SandboxForkRequest(_Request):
    timeout: int | None = None
    count: int | None = None


class SandboxRollbackRequest(_Request):
    """Not of E2B."""

    snapshotID: str


class SandboxTimeoutRequest(_Request):
    timeout: int


class SandboxRefreshRequest(_Request):
    duration: int | None = None


REQUESTS: tuple[type[BaseModel], ...] = (
    NewSandboxV2,
    NewSandbox,
    ConnectSandbox,
    ConnectSandboxV2,
    ResumedSandbox,
    SandboxPauseRequest,
    SandboxSnapshotRequest,
    SandboxForkRequest,
    SandboxRollbackRequest,
    SandboxTimeoutRequest,
    SandboxRefreshRequest,
)


class Error(TypedDict):
    code: int
    message: str
    error_code: NotRequired[str]


class Sandbox(TypedDict):
    templateID: str
    sandboxID: str
    clientID: str
    envdVersion: str
    alias: NotRequired[str]
    envdAccessToken: NotRequired[str]
    trafficAccessToken: str | None
    domain: str | None


class SandboxForkResult(TypedDict):
    """One of the two."""

    sandbox: NotRequired[Sandbox]
    error: NotRequired[Error]


class SnapshotInfo(TypedDict):
    """`snapshotID` and `names` are E2B's; the rest is ours, which its clients ignore."""

    snapshotID: str
    names: list[str]
    sandboxID: str
    createdAt: datetime
    cpuCount: int
    memoryMB: int
    diskSizeMB: int


class ListedSandbox(TypedDict):
    templateID: str
    sandboxID: str
    clientID: str
    startedAt: datetime
    endAt: datetime
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    state: Literal["running", "paused"]
    envdVersion: str
    alias: NotRequired[str]
    metadata: dict[str, str]
    parentID: NotRequired[str]
    """Ours: the sandbox it was forked from, or whose snapshot it was made of."""


class SandboxLifecycle(TypedDict):
    autoResume: bool
    onTimeout: Literal["kill", "pause"]


class SandboxDetail(ListedSandbox):
    envdAccessToken: NotRequired[str]
    allowInternetAccess: bool | None
    domain: str | None
    network: NotRequired[dict[str, object]]
    lifecycle: SandboxLifecycle
    pauseMode: NotRequired[Literal["full", "filesystem"]]


class Template(TypedDict):
    templateID: str
    buildID: str
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    public: bool
    aliases: list[str]
    names: list[str]
    createdAt: datetime
    updatedAt: datetime
    createdBy: None
    lastSpawnedAt: datetime | None
    spawnCount: int
    buildCount: int
    envdVersion: str
    buildStatus: Literal["building", "error", "ready", "waiting"]
    isDefault: NotRequired[bool]


class TemplateBuild(TypedDict):
    buildID: str
    status: Literal["building", "error", "ready", "waiting"]
    createdAt: datetime
    updatedAt: datetime
    finishedAt: datetime
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    envdVersion: str


class TemplateWithBuilds(Template):
    builds: list[TemplateBuild]


class TemplateAliasResponse(TypedDict):
    templateID: str
    public: bool


class Health(TypedDict):
    status: Literal["ok"]
