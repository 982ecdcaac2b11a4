"""Sandboxes as the protocol shows them: in the answer to who made or resumed one, in listings, and in detail. Pure."""

from typing import cast

from aenv.api.wire import CLIENT_ID, ListedSandbox, Sandbox, SandboxDetail
from aenv.orchestrator import models


def sandbox(found: models.Sandbox, domain: str | None) -> Sandbox:
    """What a client needs to use it."""
    answer: Sandbox = {
        "templateID": found.template_id,
        "sandboxID": found.id,
        "clientID": CLIENT_ID,
        "envdVersion": found.envd_version,
        "trafficAccessToken": found.traffic_token,
        "domain": domain,
    }
    if found.alias is not None:
        answer["alias"] = found.alias
    if found.envd_token is not None:
        answer["envdAccessToken"] = found.envd_token
    return answer


def listed(found: models.Sandbox) -> ListedSandbox:
    """What a listing says of it."""
    answer: ListedSandbox = {
        "templateID": found.template_id,
        "sandboxID": found.id,
        "clientID": CLIENT_ID,
        "startedAt": found.started_at,
        "endAt": found.end_at,
        "cpuCount": found.cpu_count,
        "memoryMB": found.memory_mb,
        "diskSizeMB": found.disk_mb,
        "state": found.state.value,
        "envdVersion": found.envd_version,
        "metadata": dict(found.metadata),
    }
    if found.alias is not None:
        answer["alias"] = found.alias
    if found.parent is not None:
        answer["parentID"] = found.parent
    return answer


def detail(found: models.Sandbox, domain: str | None) -> SandboxDetail:
    """All that can be told of it."""
    answer = cast(SandboxDetail, listed(found))
    answer["allowInternetAccess"] = found.allow_internet_access
    answer["domain"] = domain
    answer["lifecycle"] = {"autoResume": found.auto_resume, "onTimeout": found.on_timeout}
    if found.envd_token is not None:
        answer["envdAccessToken"] = found.envd_token
    if found.network is not None:
        answer["network"] = dict(found.network)
    if found.pause_mode is not None:
        answer["pauseMode"] = found.pause_mode
    return answer
