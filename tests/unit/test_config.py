"""Settings: sources, types, ranges, and what is said about a wrong one."""

import dataclasses
import math
import typing
from pathlib import Path

import pytest

from aenv import config
from aenv.config import Settings
from aenv.errors import ConfigError


def test_defaults_then_the_file_then_variables(tmp_path: Path) -> None:
    assert config.load(tmp_path, {}) == Settings(home=tmp_path)
    (tmp_path / "config.toml").write_text('[api]\nport = 9000\nhost = "::1"\n')
    loaded = config.load(tmp_path, {"AENV_API_PORT": "9001", "AENV_NETWORK_DNS_UPSTREAM": "1.1.1.1, 8.8.8.8"})
    assert (loaded.api.port, loaded.api.host) == (9001, "::1")
    assert loaded.network.dns_upstream == ("1.1.1.1", "8.8.8.8")


OUT_OF_RANGE = [
    ("AENV_VMM_UID_BASE", "0"),  # the first VMM would run as root
    ("AENV_VMM_UID_BASE", "-5"),
    ("AENV_VMM_UID_BASE", "999"),
    ("AENV_VMM_UID_BASE", str(1 << 31)),
    ("AENV_ORCHESTRATOR_BOOT_CONCURRENCY", "0"),  # every create would wait for ever
    ("AENV_ORCHESTRATOR_BOOT_CONCURRENCY", "-1"),
    ("AENV_ORCHESTRATOR_KILL_DEADLINE", "nan"),
    ("AENV_ORCHESTRATOR_KILL_DEADLINE", "inf"),
    ("AENV_ORCHESTRATOR_BOOT_DEADLINE", "-1"),
    ("AENV_ORCHESTRATOR_CREATE_DEADLINE", "0"),
    ("AENV_ORCHESTRATOR_MAX_TIMEOUT", "0"),
    ("AENV_ORCHESTRATOR_ENDED_RETENTION", "9" * 18),  # dates would overflow
    ("AENV_NETWORK_POOL_SIZE", "-1"),
    ("AENV_NETWORK_MAX_SLOTS", "0"),
    ("AENV_NETWORK_CIDR", "10.213.0.0/31"),
    ("AENV_NETWORK_CIDR", "10.213.0.1/16"),
    ("AENV_NETWORK_CIDR", "fd00::/64"),
    ("AENV_NETWORK_CIDR", "many"),
    ("AENV_API_PORT", "-1"),
    ("AENV_API_PORT", "0"),
    ("AENV_API_PORT", "65536"),
    ("AENV_API_MAX_BODY_BYTES", "0"),
    ("AENV_TEMPLATES_MEMORY_MB", "0"),
    ("AENV_TEMPLATES_DISK_MB", "-8"),
    ("AENV_TEMPLATES_CPU_COUNT", "0"),
    ("AENV_IMAGES_CACHE_MB", "0"),
]


@pytest.mark.parametrize(("variable", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_its_source_and_the_range(
    tmp_path: Path, variable: str, value: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(tmp_path, {variable: value})
    assert f"{variable}={value!r}: must be " in refused.value.message
    assert "between" in refused.value.message or "/14 to /30" in refused.value.message


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0.5", "0", "86400.5", "1e400"])
def test_a_value_of_the_file_is_refused_naming_the_file(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.toml").write_text(f"[orchestrator]\nboot_deadline = {value}\n")
    with pytest.raises(ConfigError) as refused:
        config.load(tmp_path, {})
    assert f"{tmp_path / 'config.toml'}: orchestrator.boot_deadline = " in refused.value.message
    assert "between 0.001 and 86 400" in refused.value.message


def test_the_users_of_all_slots_exist(tmp_path: Path) -> None:
    last = (1 << 31) - 1000
    assert config.load(tmp_path, {"AENV_VMM_UID_BASE": str(last)}).vmm.uid_base == last
    with pytest.raises(ConfigError, match=r"vmm.uid_base = .* network.max_slots = 1000"):
        config.load(tmp_path, {"AENV_VMM_UID_BASE": str(last + 1)})


def test_every_number_has_a_range_and_every_default_is_within_it() -> None:
    for section, cls in typing.get_type_hints(Settings).items():
        if section == "home":
            continue
        made = cls()
        for key, hint in typing.get_type_hints(cls, include_extras=True).items():
            value = getattr(made, key)
            if isinstance(value, int | float):
                assert typing.get_origin(hint) is typing.Annotated, f"{section}.{key}"
            if typing.get_origin(hint) is typing.Annotated:
                (rule,) = hint.__metadata__
                assert rule.holds(value), f"{section}.{key}"
                if isinstance(value, int | float):
                    assert not rule.holds(math.nan), f"{section}.{key}"
    assert len(dataclasses.fields(Settings)) > 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[api]\nport = true\n", "api.port = True: must be int"),
        ("[api]\nport = 1.5\n", "must be int"),
        ("[api]\nprot = 1\n", "unknown setting api.prot"),
        ("[apy]\n", "unknown section [apy]"),
        ("api = 5\n", "must be a table"),
        ('[log]\nlevel = "loud"\n', "must be one of debug, info"),
        ("[network]\ndns_upstream = 5\n", "must be a list of strings"),
        ("[", "config.toml"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.toml").write_text(content)
    with pytest.raises(ConfigError) as refused:
        config.load(tmp_path, {})
    assert said in refused.value.message


def test_a_mistyped_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown variable AENV_API_PROT"):
        config.load(tmp_path, {"AENV_API_PROT": "1"})
    with pytest.raises(ConfigError, match="must be a number"):
        config.load(tmp_path, {"AENV_API_PORT": "9" * 5000})
