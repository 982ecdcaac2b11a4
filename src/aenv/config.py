"""One typed tree of settings: defaults, then a TOML file, then ``AENV_*`` variables.

The file is ``$AENV_HOME/config.toml`` or what ``AENV_CONFIG`` names. A variable is ``AENV_<SECTION>_<KEY>``
(``AENV_API_PORT=9000``); lists are comma-separated. An unknown key, a value of the wrong type or one out of range is a
ConfigError.
"""

import dataclasses
import ipaddress
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from aenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting must be beyond its type: in words, after "must be", and as a test."""

    words: str
    holds: Callable[[Any], bool]


def between(least: float, most: float) -> Rule:
    """A number from `least` to `most`; NaN and the infinities are none."""
    return Rule(f"between {least:,} and {most:,}".replace(",", " "), lambda value: least <= value <= most)


def _is_ipv4_network(text: str) -> bool:
    try:
        return 14 <= ipaddress.IPv4Network(text).prefixlen <= 30
    except ValueError:
        return False


YEARS = 10 * 365 * 24 * 3600
"""Ten of them, in seconds: far from where dates and timers overflow."""
Seconds = Annotated[float, between(0.001, 24 * 3600)]
LongTime = Annotated[int, between(1, YEARS)]
"""Seconds."""
Amount = Annotated[int, between(1, 1_000_000_000)]
Count = Annotated[int, between(1, 100_000)]
UIDS = 1 << 31
"""User ids are below this everywhere; the kernel's own type is wider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The HTTP listener. `domain` is returned to clients when set (wildcard DNS `{port}-{id}.{domain}`)."""

    host: str = "127.0.0.1"
    port: Annotated[int, between(1, 65535)] = 8000
    domain: str | None = None
    max_body_bytes: Amount = 1 << 20
    """Largest JSON body of an API call; what goes through the proxy is not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorSettings:
    """Lifecycle limits. Times in seconds."""

    on_timeout: Literal["pause", "kill"] = "pause"
    """What an omitted `autoPause` means at expiry."""
    max_timeout: LongTime = 30 * 24 * 3600
    max_sandboxes: Count = 1000
    max_fork_count: Count = 16
    """Children that one fork may make."""
    boot_concurrency: Count = field(default_factory=lambda: max(2, os.cpu_count() or 1))
    """Guests that boot at the same time; further creates wait their turn."""
    boot_deadline: Seconds = 60.0
    """From the start of a VMM to a ready guest."""
    create_deadline: Seconds = 150.0
    """A whole create, the wait for its turn included."""
    operation_deadline: Seconds = 120.0
    """A whole pause, resume, capture or rollback. One that takes longer has failed."""
    kill_deadline: Seconds = 10.0
    """One try to end a VMM and release what it held."""
    max_metadata_bytes: Amount = 64 * 1024
    """Of metadata and of environment variables, each, keys and values together."""
    ended_retention: LongTime = 7 * 24 * 3600
    """How long the record of an ended sandbox, with its reason, is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbySettings:
    """What is made ahead of its use: as much as was wanted lately, up to these numbers of each kind."""

    ready: Annotated[int, between(0, 1000)] = 1
    """Guests of a template in use, restored and frozen: a create takes milliseconds. 0: none."""
    prepared: Annotated[int, between(0, 1000)] = 1
    """VMMs over the memory of a template in use, for its next create, resume or rollback. 0: none."""
    memory_mb: Amount = 2048
    """Most that all ready ones together may have as their guests' memory; what they use is a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmmSettings:
    """The virtual machine monitor."""

    accel: Literal["auto", "kvm", "tcg"] = "auto"
    qemu_binary: str | None = None
    """Path of qemu-system-<arch>; found on PATH when unset."""
    uid_base: Annotated[int, between(1000, UIDS - 1)] = 2_000_000
    """Each VMM runs as its own user: this number plus its network slot's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Network slots. `cidr` is cut into /30s, one per slot."""

    cidr: Annotated[str, Rule("an IPv4 network from /14 to /30, such as 10.213.0.0/16", _is_ipv4_network)] = (
        "10.213.0.0/16"
    )
    pool_size: Annotated[int, between(0, 100_000)] = 16
    """Slots kept ready beyond those in use: as many as a fork takes at once."""
    max_slots: Count = 1000
    dns_upstream: tuple[str, ...] = ()
    """Upstream resolvers; the host's own when empty."""
    allow_internal: tuple[str, ...] = ()
    """CIDRs inside the internal ranges that sandboxes may reach all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSettings:
    """What guests boot from."""

    envd: str | None = None
    """Path of the guest daemon's binary; the checkout's own build when unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Where sandboxes' disks come from."""

    blockd: str | None = None
    """Path of aenv-blockd; the checkout's own build, else the one on PATH, when unset."""
    cache_mb: Amount = 16 * 1024
    """Most that blocks of remote layers may take on disk."""
    ublk: Literal["auto", "off"] = "auto"
    """Whether disks may be block devices where the kernel has ublk; files of a FUSE mount otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSettings:
    """Resources of the `base` template."""

    cpu_count: Annotated[int, between(1, 1024)] = 2
    memory_mb: Amount = 512
    disk_mb: Amount = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """`console` for people, `json` for machines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


def default_home() -> Path:
    """``$AENV_HOME``, else /var/lib/aenv for root, else ~/.local/share/aenv."""
    if home := os.environ.get("AENV_HOME"):
        return Path(home)
    return Path("/var/lib/aenv") if os.geteuid() == 0 else Path.home() / ".local/share/aenv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a node can be told, and the places of its files under `home`."""

    home: Path = field(default_factory=default_home)
    api: ApiSettings = ApiSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    standby: StandbySettings = StandbySettings()
    vmm: VmmSettings = VmmSettings()
    network: NetworkSettings = NetworkSettings()
    guest: GuestSettings = GuestSettings()
    images: ImageSettings = ImageSettings()
    templates: TemplateSettings = TemplateSettings()
    log: LogSettings = LogSettings()

    @property
    def secrets_dir(self) -> Path:
        """API key and token seed; 0700."""
        return self.home / "secrets"

    @property
    def state_db(self) -> Path:
        """SQLite, WAL: sandboxes, events, idempotency keys."""
        return self.home / "state.db"

    @property
    def sandboxes_dir(self) -> Path:
        """One folder per sandbox: disk, serial log, VMM sockets."""
        return self.home / "sandboxes"

    @property
    def templates_dir(self) -> Path:
        """One folder per template."""
        return self.home / "templates"

    @property
    def layers_dir(self) -> Path:
        """Image layers by content."""
        return self.home / "layers"

    @property
    def pid_file(self) -> Path:
        """Lock and pid of the running server."""
        return self.home / "server.pid"


def load(home: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Raises ConfigError naming the setting, the value and its source."""
    environ = os.environ if environ is None else environ
    home = home or (Path(environ["AENV_HOME"]) if environ.get("AENV_HOME") else default_home())
    path = Path(environ.get("AENV_CONFIG") or home / "config.toml")
    tree = _read_toml(path, required="AENV_CONFIG" in environ)
    sections = {f.name: f for f in dataclasses.fields(Settings) if f.name != "home"}
    if unknown := set(tree) - set(sections):
        raise ConfigError(f"{path}: unknown section [{sorted(unknown)[0]}]; known: {', '.join(sorted(sections))}")
    values: dict[str, Any] = {}
    for name in sections:
        values[name] = _section(typing.get_type_hints(Settings)[name], name, tree.get(name, {}), path, environ)
    _refuse_unknown_variables(sections, environ)
    settings = Settings(home=home, **values)
    first, slots = settings.vmm.uid_base, settings.network.max_slots
    if first + slots > UIDS:
        raise ConfigError(
            f"vmm.uid_base = {first} and network.max_slots = {slots}: their sum must be at most {UIDS}, "
            "as each VMM runs as a user of its own"
        )
    return settings


CLIENT_VARIABLES = frozenset({"AENV_API_KEY", "AENV_API_URL"})
"""Of the client and the key's own order of sources; they look like settings of [api]."""


def _refuse_unknown_variables(sections: Iterable[str], environ: Mapping[str, str]) -> None:
    """A mistyped variable would otherwise be a setting silently not made."""
    for section in sections:
        known = [
            f"AENV_{section}_{key}".upper() for key in typing.get_type_hints(typing.get_type_hints(Settings)[section])
        ]
        for variable in environ:
            if variable.startswith(f"AENV_{section}_".upper()) and variable not in {*known, *CLIENT_VARIABLES}:
                raise ConfigError(f"unknown variable {variable}; known: {', '.join(sorted(known))}")


def _read_toml(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        if required:
            raise ConfigError(f"AENV_CONFIG names {path}, which does not exist") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _section(cls: Any, section: str, given: Any, path: Path, environ: Mapping[str, str]) -> Any:
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: [{section}] must be a table, not {given!r}")
    hints = typing.get_type_hints(cls, include_extras=True)
    if unknown := set(given) - set(hints):
        raise ConfigError(f"{path}: unknown setting {section}.{sorted(unknown)[0]}; known: {', '.join(sorted(hints))}")
    values: dict[str, Any] = {}
    for key, hint in hints.items():
        variable = f"AENV_{section}_{key}".upper()
        if variable in environ:
            values[key] = _convert(hint, environ[variable], f"{variable}={environ[variable]!r}", text=True)
        elif key in given:
            values[key] = _convert(hint, given[key], f"{path}: {section}.{key} = {given[key]!r}", text=False)
    return cls(**values)


def _convert(hint: Any, value: Any, where: str, *, text: bool) -> Any:
    """Check `value` against `hint`; with `text` it is a variable's string and is parsed first."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        plain, rule = typing.get_args(hint)
        converted = _convert(plain, value, where, text=text)
        if not rule.holds(converted):
            raise ConfigError(f"{where}: must be {rule.words}")
        return converted
    if origin is types.UnionType:
        if text and value == "":
            return None
        return _convert(next(a for a in typing.get_args(hint) if a is not type(None)), value, where, text=text)
    if origin is Literal:
        if value not in (allowed := typing.get_args(hint)):
            raise ConfigError(f"{where}: must be one of {', '.join(map(str, allowed))}")
        return value
    if origin is tuple:
        items = [item.strip() for item in value.split(",") if item.strip()] if text else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{where}: must be a list of strings")
        return tuple(items)
    if text and hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise ConfigError(f"{where}: must be a number") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: must be {hint.__name__}")
    return value
