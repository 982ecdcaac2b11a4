"""`aenv setup`: everything a node needs before its server can start. Does only what is missing; safe to interrupt."""

import asyncio
import platform
from collections.abc import Callable
from pathlib import Path

from aenv.config import Settings
from aenv.errors import ProvisionError
from aenv.guest.provision import provision
from aenv.home import held
from aenv.templates.base import ensure_base
from aenv.templates.models import Template
from aenv.templates.store import TemplateStore


async def setup(settings: Settings, progress: Callable[[str], None]) -> Template:
    """Provision guest kernel, initramfs and the `base` template; return the template.

    Raises ProvisionError, ConfigError, InsufficientStorage, DeadlineExceeded.
    """
    with held(
        settings.home / "setup.lock", f"another `aenv setup` (pid {{pid}}) works on {settings.home}; wait for it"
    ):
        bundle = await provision(settings.home, _envd(settings), progress)
        store = TemplateStore(settings.templates_dir)
        await asyncio.to_thread(store.sweep)
        return await ensure_base(settings, store, bundle, progress)


def _envd(settings: Settings) -> Path:
    """The guest daemon's binary: the setting, or what `make build` leaves in the checkout."""
    if settings.guest.envd is not None:
        return Path(settings.guest.envd)
    target = f"{platform.machine()}-unknown-linux-gnu"
    built = Path(__file__).parents[2] / "rust" / "target" / target / "release" / "envd"
    if not built.exists():
        raise ProvisionError(f"the guest's daemon is not built ({built}); run `make build`, or set guest.envd")
    return built
