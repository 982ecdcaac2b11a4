"""From the body of a create to a CreateSpec: every rule of the protocol that needs no state. Pure."""

import re
from collections.abc import Mapping
from typing import Literal

from aenv.api import egress
from aenv.api.errors import shorten
from aenv.api.wire import NewSandbox, NewSandboxV2
from aenv.config import OrchestratorSettings
from aenv.errors import BadRequest, NotYetAvailable
from aenv.orchestrator.models import CreateSpec

DEFAULT_TIMEOUT_V1 = 15
DEFAULT_TIMEOUT_V2 = 300
"""Seconds; what an omitted `timeout` means is part of the protocol, and SDKs omit it. Calls that have no second version
have the first one's."""

_IDEMPOTENCY_KEY = re.compile(r"[a-z0-9-]{1,255}")


def spec(body: NewSandboxV2, *, default_timeout: int, limits: OrchestratorSettings) -> CreateSpec:
    """Raises BadRequest for what is wrong, then NotYetAvailable for what this version lacks."""
    secure = not (isinstance(body, NewSandbox) and body.secure is False)
    metadata, env_vars = body.metadata or {}, body.envVars or {}
    _check_size("metadata", metadata, limits.max_metadata_bytes)
    _check_size("envVars", env_vars, limits.max_metadata_bytes)
    _check_env_vars(env_vars)
    _check_lifecycle(body)
    network = body.network
    if network is not None and network.allowPublicTraffic is False and not secure:
        raise BadRequest("network.allowPublicTraffic can only be false for a secure sandbox; leave out secure: false")
    timeout = checked_timeout(default_timeout if body.timeout is None else body.timeout, limits.max_timeout)
    policy = egress.policy(network, body.allow_internet_access)
    _check_available(body)
    given = network.model_dump(exclude_none=True) if network is not None else {}
    return CreateSpec(
        template=body.templateID,
        timeout=timeout,
        on_timeout=_on_timeout(body.autoPause, limits),
        keep_memory=body.autoPauseMemory is not False,
        auto_resume=_auto_resume(body),
        secure=secure,
        metadata=metadata,
        env_vars=env_vars,
        egress=policy,
        allow_internet_access=body.allow_internet_access,
        network=given or None,
    )


def checked_timeout(seconds: int, maximum: int) -> int:
    """`seconds` if it is a TTL that can be given. Raises BadRequest with the protocol's texts."""
    if seconds <= 0:
        raise BadRequest("Timeout must be greater than 0")
    return within_maximum(seconds, maximum)


def within_maximum(seconds: int, maximum: int) -> int:
    """`seconds`, unless it is over `maximum`. Raises BadRequest."""
    if seconds > maximum:
        raise BadRequest(f"Timeout cannot be greater than {maximum / 3600:g} hours")
    return seconds


def checked_idempotency_key(key: str | None) -> str | None:
    """`key` if it is absent or well formed. Raises BadRequest."""
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise BadRequest(f"Idempotency-Key must be 1 to 255 characters of a-z, 0-9 and -, not {shorten(key)!r}")
    return key


def _check_size(field: str, values: Mapping[str, str], limit: int) -> None:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in values.items())
    if size > limit:
        raise BadRequest(f"{field} has {size} bytes of keys and values; the limit is {limit}")


def _check_env_vars(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        if not name or "=" in name or "\0" in name:
            raise BadRequest(
                f"envVars: {shorten(name)!r} is not a variable name: it must not be empty or have '=' or NUL"
            )
        if "\0" in value:
            raise BadRequest(f"envVars: the value of {shorten(name)!r} has a NUL, which no environment can hold")


def _check_lifecycle(body: NewSandboxV2) -> None:
    """Without `autoPause: true` in the request itself the rest is refused whatever this node's default, so that a
    request means the same on every node. `autoResume` needs none: it is for pauses of every kind."""
    if body.autoPauseMemory is False:
        if not body.autoPause:
            raise BadRequest("autoPauseMemory: false needs autoPause: true, which is not given")
        if _auto_resume(body):
            raise BadRequest(
                "autoPauseMemory: false excludes autoResume: a file-system-only pause cannot resume by itself"
            )


def _on_timeout(auto_pause: bool | None, limits: OrchestratorSettings) -> Literal["kill", "pause"]:
    if auto_pause is None:
        return limits.on_timeout
    return "pause" if auto_pause else "kill"


def _auto_resume(body: NewSandboxV2) -> bool:
    return body.autoResume is not None and body.autoResume.enabled


def _check_available(body: NewSandboxV2) -> None:
    for field, what in (
        ("volumeMounts", "volumes are"),
        ("iam", "identity tokens (iam) are"),
    ):
        if getattr(body, field):
            raise NotYetAvailable(f"{what} not available yet; create the sandbox without {field}")
