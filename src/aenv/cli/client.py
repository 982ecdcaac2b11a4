"""The control plane's client: one method per call, errors as CliError with the server's own message."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from aenv import __version__
from aenv.cli.errors import CliError
from aenv.cli.profile import Profile

CREATE_TIMEOUT = 180.0
TIMEOUT = 30.0

Json = dict[str, Any]


class ApiClient:
    """Speaks to the server of `profile`."""

    def __init__(self, profile: Profile, http: httpx.AsyncClient) -> None:
        self.profile = profile
        self.http = http

    async def create(self, body: Json) -> Json:
        """`POST /v2/sandboxes`."""
        created: Json = (await self._call("POST", "/v2/sandboxes", json=body, wait=CREATE_TIMEOUT)).json()
        return created

    async def connect(self, sandbox_id: str, seconds: int, *, memory: bool = True) -> Json:
        """`POST /v2/sandboxes/{id}/connect`: resumes a paused one; never shortens the TTL of one that runs."""
        connected: Json = await self._post(sandbox_id, "connect", {"timeout": seconds, "memory": memory}, "/v2")
        return connected

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> None:
        """`POST /sandboxes/{id}/pause`."""
        await self._post(sandbox_id, "pause", {"memory": memory})

    async def fork(self, sandbox_id: str, count: int, seconds: int) -> list[Json]:
        """`POST /sandboxes/{id}/fork`: for each child its sandbox or its error."""
        results: list[Json] = await self._post(sandbox_id, "fork", {"count": count, "timeout": seconds})
        return results

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> None:
        """`POST /sandboxes/{id}/rollback`."""
        await self._post(sandbox_id, "rollback", {"snapshotID": snapshot_id})

    async def snapshot(self, sandbox_id: str, name: str | None, *, memory: bool = True) -> Json:
        """`POST /sandboxes/{id}/snapshots`."""
        taken: Json = await self._post(sandbox_id, "snapshots", {"name": name, "memory": memory})
        return taken

    async def snapshots(self, *, sandbox_id: str | None, name: str | None) -> list[Json]:
        """`GET /snapshots`, all pages."""
        given = {"sandboxID": sandbox_id, "name": name}
        return await self._pages("/snapshots", {key: value for key, value in given.items() if value}, None)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """`DELETE /templates/{id}`."""
        await self._call("DELETE", f"/templates/{quote(snapshot_id, safe='')}", wait=60.0)

    async def get(self, sandbox_id: str) -> Json:
        """`GET /sandboxes/{id}`."""
        found: Json = (await self._call("GET", f"/sandboxes/{quote(sandbox_id, safe='')}")).json()
        return found

    async def delete(self, sandbox_id: str) -> None:
        """`DELETE /sandboxes/{id}`."""
        await self._call("DELETE", f"/sandboxes/{quote(sandbox_id, safe='')}", wait=60.0)

    async def set_timeout(self, sandbox_id: str, seconds: int) -> None:
        """`POST /sandboxes/{id}/timeout`."""
        await self._post(sandbox_id, "timeout", {"timeout": seconds})

    async def sandboxes(
        self, *, states: list[str], metadata: Mapping[str, str], template: str | None, limit: int | None
    ) -> list[Json]:
        """`GET /v2/sandboxes`, all pages, at most `limit` items."""
        query = {"state": ",".join(states), "limit": str(min(limit or 100, 100))}
        if metadata:  # the parameter is itself a query string whose parts are encoded once more
            query["metadata"] = urlencode({quote(k, safe=""): quote(v, safe="") for k, v in metadata.items()})
        if template:
            query["template"] = template
        return await self._pages("/v2/sandboxes", query, limit)

    async def templates(self) -> list[Json]:
        """`GET /templates`."""
        found: list[Json] = (await self._call("GET", "/templates")).json()
        return found

    async def _post(self, sandbox_id: str, action: str, body: Json, version: str = "") -> Any:
        path = f"{version}/sandboxes/{quote(sandbox_id, safe='')}/{action}"
        answer = await self._call("POST", path, json=body, wait=CREATE_TIMEOUT)
        return answer.json() if answer.content else None

    async def _pages(self, path: str, query: dict[str, str], limit: int | None) -> list[Json]:
        items: list[Json] = []
        while True:
            answer = await self._call("GET", path, params=query)
            items += answer.json()
            token = answer.headers.get("x-next-token")
            if not token or (limit is not None and len(items) >= limit):
                return items[:limit]
            query["nextToken"] = token

    async def _call(self, method: str, path: str, *, wait: float = TIMEOUT, **request: Any) -> httpx.Response:
        try:
            answer = await self.http.request(
                method,
                self.profile.api_url + path,
                headers={"X-API-Key": self.profile.api_key},
                timeout=wait,
                **request,
            )
        except httpx.ConnectError as error:
            raise CliError(
                f"no server at {self.profile.api_url} ({error}){_by_proxy()}; start it there with `aenv server`, "
                "or name another with `aenv auth login` or AENV_API_URL"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CliError(f"{method} {self.profile.api_url}{path}: {error!r}{_by_proxy()}") from error
        if answer.is_success:
            return answer
        raise CliError(message_of(answer))


def message_of(answer: httpx.Response) -> str:
    """The server's message of a failed call, whatever its body looks like."""
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status_code}: {answer.text[:200]}"


def _by_proxy() -> str:
    named = [name for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy") if os.environ.get(name)]
    return f" through the proxy that {named[0]} names (NO_PROXY excepts hosts)" if named else ""


@asynccontextmanager
async def client(profile: Profile) -> AsyncIterator[ApiClient]:
    """An ApiClient for the length of a command."""
    async with httpx.AsyncClient(headers={"User-Agent": f"aenv/{__version__}"}) as http:
        yield ApiClient(profile, http)
