"""The ASGI application on the API's port: what is for a sandbox goes there, the rest to the control plane."""

import asyncio
import logging
from hmac import compare_digest

from aenv.errors import AenvError, GuestError, NotFound, Unauthorized
from aenv.orchestrator.models import Route
from aenv.orchestrator.protocol import Sandboxes
from aenv.proxy import http, responses, websocket
from aenv.proxy.asgi import App, Message, Receive, ResponseBroken, Scope, Send
from aenv.proxy.headers import Request, framing, request_head
from aenv.proxy.responses import Answer
from aenv.proxy.routing import ENVD_PORT, TRAFFIC_TOKEN_HEADER, Preflight, SandboxTarget, SignedFile, decide
from aenv.proxy.upstream import Ended, PortNotOpen, Upstream, closing

AWAKEN_DEADLINE = 60.0
"""Seconds a request waits for its sandbox: the clients' own limit for a request."""

_log = logging.getLogger("aenv.proxy")


class ProxyApp:
    """ASGI middleware. It owns the connections into sandboxes; end it with `aclose`.

    `api_key` is the platform's: requests into sandboxes are relieved of it.
    """

    def __init__(self, sandboxes: Sandboxes, control_plane: App, *, api_key: str | None = None) -> None:
        self._sandboxes = sandboxes
        self._control_plane = control_plane
        self._api_key = None if api_key is None else api_key.encode()
        self._upstream = Upstream()

    def sandbox_gone(self, sandbox_id: str) -> None:
        """Break every connection into this sandbox, at once: it ended, was paused, or begins a new generation.

        Call it once `Sandboxes.route` no longer gives the old route, so that clients are told the right reason.
        """
        self._upstream.sandbox_gone(sandbox_id)

    async def aclose(self) -> None:
        """Break every connection into sandboxes and answer 503 from now on."""
        self._upstream.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._control_plane(scope, receive, send)
        try:
            method = scope.get("method", "GET")
            target = decide(method, scope["raw_path"], scope["query_string"], scope["headers"])
        except AenvError as error:
            return await responses.send_answer(scope, send, responses.of_error(error))
        if target is None and scope["type"] == "websocket":
            answer = Answer(
                404, "There is no WebSocket here; name a sandbox and a port, e.g. /proxy/{sandboxID}/{port}/"
            )
            return await responses.send_answer(scope, send, answer)
        if target is None:
            return await self._control_plane(scope, receive, send)
        if isinstance(target, Preflight):
            return await responses.send_preflight(send, target.request_headers)
        return await self._into_sandbox(scope, receive, send, target)

    async def _into_sandbox(
        self, scope: Scope, receive: Receive, send: Send, target: SandboxTarget | SignedFile
    ) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if isinstance(target, SignedFile):
                target = self._owner(target)
            answer = await self._pass(scope, receive, watched, target)
        except websocket.Refused as refused:
            await responses.send_refusal(scope, send, refused.status_code, refused.headers, refused.body)
            return
        except AenvError as error:
            answer = self._explain(error, target)
        except Exception as error:
            if started or isinstance(error, ResponseBroken):
                raise
            _log.exception("a request into a sandbox failed")
            answer = Answer(500, "The proxy failed; its log has the reason")
        if answer is not None:
            await responses.send_answer(scope, send, answer)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, target: SandboxTarget) -> Answer | None:
        """Carry the request into the sandbox, or say why not."""
        if target.internal:
            return responses.internal_route(target.sandbox_id)
        if scope["type"] == "websocket" and (await receive())["type"] != "websocket.connect":
            return None
        try:
            return await self._attempt(scope, receive, send, target)
        except Ended:  # It was paused or restored just then: what runs next may have the answer.
            return await self._attempt(scope, receive, send, target)

    async def _attempt(self, scope: Scope, receive: Receive, send: Send, target: SandboxTarget) -> Answer | None:
        sandbox_id, port = target.sandbox_id, target.port
        route = self._route(sandbox_id)
        if route is None:
            woken = await self._awaken(scope, target)
            if isinstance(woken, Answer):
                return woken
            route = woken  # Nothing is awaited between here and its use: it may be over at any time.
        if not route.public and port != ENVD_PORT and not _has_token(scope, route.traffic_token):
            return responses.token_missing(sandbox_id, port)
        request = _request(scope, target, route, self._api_key)
        if scope["type"] == "websocket":
            await websocket.join(scope, receive, send, request, self._upstream.generation(route))
            return None
        body = framing(request.headers)
        exchange = http.Exchange(request.method, port, request_head(request, body), body)
        await http.forward(scope, receive, send, exchange, self._upstream.generation(route))
        return None

    def _route(self, sandbox_id: str) -> Route | None:
        """None: it does not run now. Whoever reaches the sandbox with the result does so before awaiting anything."""
        try:
            route = self._sandboxes.route(sandbox_id)
        except NotFound:
            route = None
        if route is None:
            self._upstream.sandbox_gone(sandbox_id)
        return route

    async def _awaken(self, scope: Scope, target: SandboxTarget) -> Route | Answer:
        """The route once a sandbox that is being paused or resumed, or that wakes by itself, runs; or why it does not.

        A caller who may not pass does not wake it.
        """
        sandbox_id, port = target.sandbox_id, target.port
        try:
            known = self._sandboxes.get(sandbox_id)
            token = known.traffic_token if known.auto_resume and port != ENVD_PORT else None
            if token is not None and not _has_token(scope, token):
                return responses.token_missing(sandbox_id, port)
            async with asyncio.timeout(AWAKEN_DEADLINE):
                route = await self._sandboxes.awaken(sandbox_id)
        except NotFound:
            route = None
        except TimeoutError:
            return responses.asleep(sandbox_id, AWAKEN_DEADLINE)
        except AenvError as error:
            return responses.of_error(error, sandbox_id)
        return route or responses.sandbox_not_found(sandbox_id)

    def _owner(self, file: SignedFile) -> SandboxTarget:
        sandbox_id = self._sandboxes.find_by_envd_token(file.matches)
        if sandbox_id is None:
            raise Unauthorized("invalid signature: it belongs to no sandbox that is running here")
        return SandboxTarget(sandbox_id, ENVD_PORT, file.path)

    def _explain(self, error: AenvError, target: SandboxTarget | SignedFile) -> Answer:
        """Most failures of a connection are a sandbox that is ending, which its route tells first."""
        if isinstance(target, SignedFile) or not isinstance(error, GuestError):
            return responses.of_error(error)
        if self._upstream.closed:
            return responses.of_error(closing(), target.sandbox_id)
        if self._route(target.sandbox_id) is None:
            return responses.sandbox_not_found(target.sandbox_id)
        if isinstance(error, PortNotOpen):
            return responses.port_not_open(target.sandbox_id, target.port)
        return responses.bad_gateway(target.sandbox_id, target.port, error.message)


def _has_token(scope: Scope, token: str) -> bool:
    given = (value.strip(b" \t") for name, value in scope["headers"] if name == TRAFFIC_TOKEN_HEADER)
    return any(compare_digest(value, token.encode()) for value in given)


def _request(scope: Scope, target: SandboxTarget, route: Route, api_key: bytes | None) -> Request:
    query = scope["query_string"]
    client = scope.get("client")
    return Request(
        method=scope.get("method", "GET"),
        target=b"%b?%b" % (target.path, query) if query else target.path,
        port=target.port,
        prefix=target.prefix,
        headers=scope["headers"],
        client=None if client is None else client[0],
        scheme="https" if scope["scheme"] in ("https", "wss") else "http",
        mask_host=route.mask_host,
        api_key=api_key,
    )
