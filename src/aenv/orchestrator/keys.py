"""Idempotency keys: a create that is repeated makes one sandbox."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from aenv.errors import Conflict
from aenv.orchestrator.models import CreateSpec
from aenv.orchestrator.record import Record
from aenv.orchestrator.runner import Runner
from aenv.orchestrator.store import IdempotencyKey, Store


class Keys:
    """The keys of a node. `alive` and `ended` are its sandboxes, by id."""

    def __init__(self, *, store: Store, alive: Mapping[str, Runner], ended: Mapping[str, Record]) -> None:
        self._store = store
        self._alive = alive
        self._ended = ended

    async def claim(self, key: str, spec: CreateSpec, sandbox_id: str) -> Runner | None:
        """None if the key is now this creation's; else the sandbox it already made.

        Raises Conflict if it was used for another spec, or the sandbox has ended.
        """
        claim = IdempotencyKey(key, _digest(spec), sandbox_id)
        bound = await self._store.claim(claim)
        if bound.sandbox_id == claim.sandbox_id:
            return None
        if bound.digest != claim.digest:
            raise Conflict(f"Idempotency-Key '{key}' was used for another request; use a new key")
        if runner := self._alive.get(bound.sandbox_id):
            return runner
        ended = self._ended.get(bound.sandbox_id)
        if ended is not None and ended.was_launched:
            raise Conflict(f"sandbox {ended.id}, made under Idempotency-Key '{key}', has ended; use a new key")
        # The server ended before that creation did: nobody has seen the sandbox, so the key is free again.
        await self._store.unclaim(key, bound.sandbox_id)
        return await self.claim(key, spec, sandbox_id)


def _digest(spec: CreateSpec) -> str:
    """Equal specs have equal digests, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()
