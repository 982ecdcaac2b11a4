"""The lock of a node's folder."""

import os
import resource
from pathlib import Path

import pytest

from aenv import setup
from aenv.config import Settings
from aenv.errors import ConfigError
from aenv.home import held
from aenv.server import only_server


def test_one_holds_it_and_the_other_is_told_who(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "{pid} {0} new" / "home")
    with only_server(settings):
        assert settings.pid_file.read_text() == f"{os.getpid()}\n"
        with (
            pytest.raises(ConfigError, match=rf"a server \(pid {os.getpid()}\) already runs on "),
            only_server(settings),
        ):
            raise AssertionError("let in")
    assert settings.pid_file.read_text() == ""
    with only_server(settings):
        pass


def unusable_homes(tmp_path: Path, lock: str) -> list[Path]:
    """Inside a file; where nobody can make folders; with a folder in the lock's place."""
    (tmp_path / "file").touch()
    (tmp_path / "taken" / lock).mkdir(parents=True)
    return [tmp_path / "file" / "home", Path("/proc/aenv-home"), tmp_path / "taken"]


def test_a_server_whose_home_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    for home in unusable_homes(tmp_path, "server.pid"):
        with pytest.raises(ConfigError) as refused, only_server(Settings(home=home)):
            raise AssertionError("let in")
        assert refused.value.message.startswith(f"cannot write {home / 'server.pid'}: ")


async def test_a_setup_whose_home_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    for home in unusable_homes(tmp_path, "setup.lock"):
        with pytest.raises(ConfigError) as refused:
            await setup.setup(Settings(home=home), print)
        assert refused.value.message.startswith(f"cannot write {home / 'setup.lock'}: ")


async def test_two_setups_do_not_work_on_one_home(tmp_path: Path) -> None:
    with held(tmp_path / "setup.lock", ""), pytest.raises(ConfigError, match=rf"aenv setup` \(pid {os.getpid()}\)"):
        await setup.setup(Settings(home=tmp_path), print)


def test_a_lock_that_has_no_room_for_the_pid_is_refused(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*: File too large"), held(tmp_path / "lock", "busy"):
            raise AssertionError("let in")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
