"""Access tokens of sandboxes, derived from one persisted seed: nothing to store for each, nothing lost on restart."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from aenv.errors import ConfigError

SEED_BYTES = 32


class Tokens:
    """HMAC-SHA256 of purpose and sandbox id under the seed, as 64 hex digits."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        """Read the seed at `path`, or make it (0600 in a 0700 folder). Raises ConfigError if it is damaged."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
                descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(SEED_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(fresh, path)
                except FileExistsError:
                    pass  # another process made it first: its seed counts
                finally:
                    fresh.unlink()
            seed = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read or make the token seed {path}: {error}") from error
        if len(seed) != SEED_BYTES:
            raise ConfigError(
                f"the token seed {path} has {len(seed)} bytes, not {SEED_BYTES}: restore it from a backup, "
                "or delete it (the tokens of running sandboxes then change)"
            )
        return cls(seed)

    def envd(self, sandbox_id: str) -> str:
        """What clients show the sandbox's daemon (`X-Access-Token`)."""
        return self._derive("envd", sandbox_id)

    def traffic(self, sandbox_id: str) -> str:
        """What clients show the proxy when public traffic is not allowed."""
        return self._derive("traffic", sandbox_id)

    def _derive(self, purpose: str, sandbox_id: str) -> str:
        return hmac.new(self._seed, f"{purpose}:{sandbox_id}".encode(), hashlib.sha256).hexdigest()
