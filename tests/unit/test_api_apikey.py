import re
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from aenv.api import apikey
from aenv.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    """`load(environ)` with everything under a temporary folder."""
    return lambda environ=None: apikey.load(tmp_path / "home/secrets", environ or {}, tmp_path / "mounted")


def test_the_variable_wins(load, tmp_path):
    (tmp_path / "mounted").write_text("of-the-mount")
    assert load({"AENV_API_KEY": " of-the-variable\n"}) == "of-the-variable"
    assert not (tmp_path / "home").exists()


def test_then_the_mounted_secret_which_may_be_readable_by_all(load, tmp_path):
    (tmp_path / "mounted").write_text("of-the-mount\n")
    (tmp_path / "mounted").chmod(0o444)
    assert load({"AENV_API_KEY": ""}) == "of-the-mount"
    assert not (tmp_path / "home").exists()


def test_then_one_is_made_and_kept(load, tmp_path):
    key = load()
    assert re.fullmatch("e2b_[0-9a-f]{40}", key)
    assert load() == key
    folder = tmp_path / "home/secrets"
    assert [file.name for file in folder.iterdir()] == ["api-key"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "api-key").stat().st_mode) == 0o600


def test_many_at_once_agree(load):
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(lambda _: load(), range(64)))) == 1


def test_a_loser_of_the_race_takes_the_winners(load, tmp_path, monkeypatch):
    # The file appears between the look and the creation.
    path = tmp_path / "home/secrets/api-key"

    def create(target, create=apikey._create):
        target.write_text("winner")
        target.chmod(0o600)
        create(target)

    monkeypatch.setattr(apikey, "_create", create)
    assert load() == "winner"
    assert [file.name for file in path.parent.iterdir()] == ["api-key"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_key_that_others_can_reach_is_refused(load, tmp_path, mode):
    load()
    path = tmp_path / "home/secrets/api-key"
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        load()


@pytest.mark.parametrize(("text", "part"), [("", "empty"), (" \n", "empty"), ("a b", "printable"), ("ké", "printable")])
def test_a_key_that_is_none(load, tmp_path, text, part):
    path = tmp_path / "home/secrets/api-key"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=part) as caught:
        load()
    assert str(path) in caught.value.message


def test_an_empty_mounted_secret_is_an_error_not_a_reason_to_make_another(load, tmp_path):
    (tmp_path / "mounted").write_text("")
    with pytest.raises(ConfigError, match="mounted is empty"):
        load()


def test_links_and_folders_are_refused(load, tmp_path):
    path = tmp_path / "home/secrets/api-key"
    path.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").write_text("key")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        load()
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError):
        load()
