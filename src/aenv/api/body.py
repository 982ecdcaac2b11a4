"""JSON bodies: read up to a limit, parsed once, strictly, whatever the Content-Type says."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from aenv.api.errors import explain
from aenv.errors import BadRequest, PayloadTooLarge

Model = TypeVar("Model", bound=BaseModel)

READ_DEADLINE = 30.0
"""Seconds a client may take to send an API body; they are small."""


class Bodies:
    """Makes the dependencies that turn a request's body into a model. `limit` in bytes, `deadline` in seconds."""

    def __init__(self, limit: int, *, deadline: float = READ_DEADLINE) -> None:
        self._limit = limit
        self._deadline = deadline

    def required(self, model: type[Model]) -> Callable[[Request], Awaitable[Model]]:
        """The dependency raises BadRequest and PayloadTooLarge."""

        async def read(request: Request) -> Model:
            return _parse(model, await self._read(request))

        return read

    def optional(self, model: type[Model]) -> Callable[[Request], Awaitable[Model]]:
        """As `required`; no body at all stands for ``{}``."""

        async def read(request: Request) -> Model:
            return _parse(model, await self._read(request) or b"{}")

        return read

    async def _read(self, request: Request) -> bytes:
        too_large = PayloadTooLarge(f"The body is larger than the limit of {self._limit} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._limit:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(self._deadline):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > self._limit:
                        raise too_large
        except TimeoutError:
            raise BadRequest(f"The body did not arrive within {self._deadline:g} s") from None
        return bytes(data)


def documented(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is `model`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _parse(model: type[Model], data: bytes) -> Model:
    try:
        # Pydantic's own parser bounds nesting and refuses invalid UTF-8 and lone surrogates.
        return model.model_validate_json(data)
    except ValidationError as error:
        raise BadRequest(explain(error.errors(include_url=False))) from None
