"""The one exception tree. The API maps each class to its HTTP status and ``{"code", "message"}``.

A message says what was wrong, with which value, and what to do. Errors of libraries are mapped to these
at the module that calls the library; nothing above it sees a foreign exception.
"""

from typing import ClassVar


class AenvError(Exception):
    """Base of every error this project raises on purpose.

    `status` is the HTTP status the API answers with; `error_code` an optional machine-readable word beside it.
    """

    status: ClassVar[int] = 500
    error_code: ClassVar[str | None] = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


# What the caller did.


class BadRequest(AenvError):
    """A value in the request is wrong."""

    status = 400


class Unauthorized(AenvError):
    """The API key is missing or wrong."""

    status = 401


class Forbidden(AenvError):
    """The key is right, the action is not allowed."""

    status = 403


class NotFound(AenvError):
    """The named thing does not exist (any more)."""

    status = 404


class Conflict(AenvError):
    """The thing is in a state, or busy with an operation, that excludes this call."""

    status = 409


class PayloadTooLarge(AenvError):
    """The request body is over its limit."""

    status = 413


class TooManyRequests(AenvError):
    """A configured limit (sandboxes, slots) is reached."""

    status = 429


class NotYetAvailable(AenvError):
    """The call is part of the protocol and this version does not have it."""

    status = 501


# What the platform could not do. These are infrastructure failures: never the agent's fault.


class InfrastructureError(AenvError):
    """Something of the platform failed; the message names the part."""


class Unavailable(InfrastructureError):
    """The node cannot serve this now (shutting down, not provisioned); trying again may work."""

    status = 503


class DeadlineExceeded(InfrastructureError):
    """A step did not finish within its deadline."""

    status = 504


class InsufficientStorage(InfrastructureError):
    """The host's disk is full."""

    status = 507


class ConfigError(AenvError):
    """A setting is wrong: the message names the setting, its value and where it came from."""


class ProvisionError(InfrastructureError):
    """Kernel, initramfs or root file system could not be made or are missing."""


class VmmError(InfrastructureError):
    """The virtual machine monitor could not be started or did not obey."""


class NetworkError(InfrastructureError):
    """A network slot could not be made, changed or removed."""


class ImageError(InfrastructureError):
    """A disk image could not be attached or detached."""


class GuestError(InfrastructureError):
    """The guest's daemon did not answer as it must."""
