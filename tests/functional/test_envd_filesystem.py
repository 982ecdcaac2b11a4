"""envd's filesystem.Filesystem, raw and through the official SDK."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import e2b
import pytest
from envd_files_harness import NOBODY, Envd, running_envd, shared_directory, small_volume

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")


@pytest.fixture(scope="module")
def envd() -> Iterator[Envd]:
    with running_envd() as running:
        yield running


@pytest.fixture
def sandbox(envd: Envd) -> e2b.Sandbox:
    """The SDK in its debug mode: it skips the control plane and talks to envd alone."""
    return e2b.Sandbox.create(debug=True, sandbox_url=envd.url, api_key="e2b_" + "0" * 40)


def refused(answer: tuple[int, dict[str, object]], status: int, code: str, part: str) -> bool:
    assert (answer[0], answer[1]["code"]) == (status, code), answer
    assert part in str(answer[1]["message"]), answer
    return True


def entry(answer: tuple[int, dict[str, object]]) -> dict[str, object]:
    assert answer[0] == 200, answer
    found = answer[1]["entry"]
    assert isinstance(found, dict)
    return found


def listed(answer: tuple[int, dict[str, object]]) -> list[dict[str, object]]:
    assert answer[0] == 200, answer
    found = answer[1]["entries"]
    assert isinstance(found, list)
    return found


# Raw calls


def test_stat(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    path.chmod(0o640)
    os.utime(path, ns=(0, 1_500_000_000))
    found = entry(envd.rpc("Stat", path=str(path)))
    assert (found["name"], found["path"], found["type"]) == ("f", str(path), "FILE_TYPE_FILE")
    assert (found["size"], found["mode"], found["permissions"]) == ("3", 0o640, "-rw-r-----")
    assert found["modifiedTime"] == "1970-01-01T00:00:01.500000000Z"
    assert (found["owner"], found["group"]) == (path.owner(), path.group())
    assert "isSymlink" not in found
    assert entry(envd.rpc("Stat", path="/"))["name"] == "/"


def test_stat_of_links_and_special_files(envd: Envd, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "l").symlink_to("d")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    found = entry(envd.rpc("Stat", path=str(tmp_path / "l")))
    assert (found["type"], found["permissions"]) == ("FILE_TYPE_DIRECTORY", "Lrwxrwxrwx")
    assert (found["symlinkTarget"], found["isSymlink"]) == (str(tmp_path / "d"), True)
    found = entry(envd.rpc("Stat", path=str(tmp_path / "loop")))
    assert (found["type"], found["symlinkTarget"]) == ("FILE_TYPE_UNSPECIFIED", str(tmp_path / "loop"))
    found = entry(envd.rpc("Stat", path=str(tmp_path / "fifo")))
    assert (found["type"], str(found["permissions"])[0]) == ("FILE_TYPE_UNSPECIFIED", "p")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert entry(envd.rpc("Stat", path=str(tmp_path / "socket")))["type"] == "FILE_TYPE_UNSPECIFIED"


def test_paths_that_name_nothing(envd: Envd, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for method in ("Stat", "ListDir"):
        assert refused(envd.rpc(method, path=str(tmp_path / "gone")), 404, "not_found", "does not exist")
        assert refused(envd.rpc(method, path="a\0b"), 400, "invalid_argument", "NUL")
        assert refused(envd.rpc(method, path="/" + "x" * 300), 400, "invalid_argument", "too long")
        assert refused(envd.rpc(method, path="/x" * 4000), 400, "invalid_argument", "too long")
        assert refused(envd.rpc(method, path="~other"), 400, "invalid_argument", "~other")
        assert refused(envd.rpc(method, path=7), 400, "invalid_argument", "decode")
    assert refused(envd.rpc("Stat", path=str(tmp_path / "f/below")), 404, "not_found", "does not exist")
    assert refused(envd.rpc("Stat", user="ghost", path="/"), 401, "unauthenticated", "invalid username: 'ghost'")
    assert refused(envd.rpc("Nope"), 501, "unimplemented", "Nope")


def test_list_is_pre_order_with_the_requested_prefix(envd: Envd, tmp_path: Path) -> None:
    (tmp_path / "b/c").mkdir(parents=True)
    for name in ("a", "b/x", "b/c/y", "é"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("b")

    def names(depth: int, directory: Path = tmp_path) -> list[str]:
        found = listed(envd.rpc("ListDir", path=str(directory), depth=depth))
        return [str(item["path"]).removeprefix(f"{directory}/") for item in found]

    assert names(0) == names(1) == ["a", "b", "link", "é"]
    assert names(2) == ["a", "b", "b/c", "b/x", "link", "é"]
    assert names(4294967295) == ["a", "b", "b/c", "b/c/y", "b/x", "link", "é"]
    assert names(1, tmp_path / "link") == ["c", "x"]


def test_list_errors(envd: Envd, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("gone")
    assert refused(envd.rpc("ListDir", path=str(tmp_path / "f")), 400, "invalid_argument", "is not a directory")
    assert refused(envd.rpc("ListDir", path=str(tmp_path / "loop")), 400, "failed_precondition", "cyclic")
    assert refused(envd.rpc("ListDir", path=str(tmp_path / "broken")), 404, "not_found", "does not exist")


def test_list_of_names_that_are_not_text_and_of_an_empty_directory(envd: Envd, tmp_path: Path) -> None:
    assert listed(envd.rpc("ListDir", path=str(tmp_path))) == []
    os.close(os.open(os.fsencode(tmp_path) + b"/bad\xff", os.O_CREAT))
    assert [item["name"] for item in listed(envd.rpc("ListDir", path=str(tmp_path)))] == ["bad\ufffd"]


def test_list_of_a_hundred_thousand_entries(envd: Envd, tmp_path: Path) -> None:
    # Hard links: an entry each, without an inode each.
    sources = [tmp_path / f"f{number}" for number in range(2)]
    for source in sources:
        source.touch()
    for number in range(2, 100_000):
        os.link(sources[number % 2], tmp_path / f"f{number}")
    found = listed(envd.rpc("ListDir", path=str(tmp_path)))
    assert [item["name"] for item in found] == sorted(f"f{number}" for number in range(100_000))
    assert envd.rpc("Remove", path=str(tmp_path)) == (200, {})
    assert not tmp_path.exists()


def test_make_dir(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "a/b"
    assert entry(envd.rpc("MakeDir", path=str(path)))["permissions"] == "drwxr-xr-x"
    assert refused(envd.rpc("MakeDir", path=str(path)), 409, "already_exists", "already exists")
    (tmp_path / "f").touch()
    for taken in ("f", "f/below"):
        assert refused(envd.rpc("MakeDir", path=str(tmp_path / taken)), 400, "invalid_argument", "not a directory")


def test_move(envd: Envd, tmp_path: Path) -> None:
    def move(source: str, destination: str) -> tuple[int, dict[str, object]]:
        return envd.rpc("Move", source=str(tmp_path / source), destination=str(tmp_path / destination))

    (tmp_path / "s").write_bytes(b"new")
    (tmp_path / "d").write_bytes(b"old")
    assert entry(move("s", "d"))["name"] == "d"
    assert (tmp_path / "d").read_bytes() == b"new"
    assert entry(move("d", "x/y/z"))["path"] == str(tmp_path / "x/y/z")
    assert refused(move("gone", "n/n"), 404, "not_found", f"{tmp_path}/gone")
    assert not (tmp_path / "n").exists()
    assert refused(move("x", "x/y/x"), 400, "invalid_argument", "into itself")
    (tmp_path / "full/of").mkdir(parents=True)
    assert refused(move("x", "full"), 400, "failed_precondition", "not empty")
    answer = envd.rpc("Move", source=str(tmp_path / "x"), destination="/proc/x")
    assert answer[0] in (400, 404)


def test_remove(envd: Envd, tmp_path: Path) -> None:
    (tmp_path / "t/u").mkdir(parents=True)
    (tmp_path / "kept").touch()
    (tmp_path / "t/link").symlink_to(tmp_path / "kept")
    for _ in range(2):
        assert envd.rpc("Remove", path=str(tmp_path / "t")) == (200, {})
    assert (tmp_path / "kept").exists()
    assert refused(envd.rpc("Remove", path="/"), 400, "invalid_argument", "refusing")


def test_relative_paths_start_at_home(envd: Envd) -> None:
    home = Path("~root").expanduser()
    assert entry(envd.rpc("Stat", user="root", path=""))["path"] == str(home)
    assert entry(envd.rpc("Stat", user="root", path="~"))["path"] == str(home)
    assert refused(envd.rpc("Stat", user="root", path="~/gone"), 404, "not_found", f"{home}/gone")
    assert refused(envd.rpc("Stat", user="root", path="gone"), 404, "not_found", f"{home}/gone")


@as_root
def test_the_user_works_everywhere_and_owns_what_comes_into_being(envd: Envd) -> None:
    with shared_directory() as shared:
        closed = shared / "closed"
        closed.mkdir(mode=0o700)
        (closed / "f").write_bytes(b"x")
        assert entry(envd.rpc("Stat", NOBODY, path=f"{closed}/f"))["owner"] == "root"
        assert entry(envd.rpc("MakeDir", NOBODY, path=f"{closed}/own/dir"))["owner"] == NOBODY
        assert [item["name"] for item in listed(envd.rpc("ListDir", NOBODY, path=str(closed), depth=2))] == [
            "f",
            "own",
            "dir",
        ]
        # What is moved stays whose it was, the directories made for it are the user's.
        moved = envd.rpc("Move", NOBODY, source=f"{closed}/f", destination=f"{closed}/to/g")
        assert entry(moved)["owner"] == "root"
        assert ((closed / "own").owner(), (closed / "to").owner()) == (NOBODY, NOBODY)
        assert envd.rpc("Remove", NOBODY, path=f"{closed}/to") == (200, {})
        assert not (closed / "to").exists()


@as_root
def test_move_to_another_file_system(envd: Envd, tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "sub").mkdir(parents=True)
    (source / "sub/f").write_bytes(b"content")
    (source / "sub/f").chmod(0o4711)
    os.chown(source / "sub", 12345, 54321)
    os.utime(source / "sub/f", ns=(0, 1_500_000_000))
    (source / "link").symlink_to("sub")

    def move(source: Path, destination: Path) -> tuple[int, dict[str, object]]:
        return envd.rpc("Move", NOBODY, source=str(source), destination=str(destination))

    with small_volume(tmp_path / "volume") as volume:
        (volume / "d").mkdir()
        # Over an empty directory, as rename(2) allows.
        assert entry(move(source, volume / "d"))["type"] == "FILE_TYPE_DIRECTORY"
        assert not source.exists()
        moved = (volume / "d/sub/f").stat()
        assert (moved.st_mode & 0o7777, moved.st_mtime_ns) == (0o4711, 1_500_000_000)
        assert ((volume / "d/sub/f").read_bytes(), (volume / "d/link").readlink()) == (b"content", Path("sub"))
        assert ((volume / "d/sub").stat().st_uid, (volume / "d/sub").stat().st_gid) == (12345, 54321)
        # And back, with new parents.
        assert entry(move(volume / "d", tmp_path / "new/s"))["path"] == f"{tmp_path}/new/s"
        assert (tmp_path / "new").owner() == NOBODY
        assert list(volume.iterdir()) == []
        # A tree with a mount in it cannot go as a whole.
        (tmp_path / "outer").mkdir()
        (tmp_path / "outer/f").touch()
        with small_volume(tmp_path / "outer/inner"):
            assert refused(move(tmp_path / "outer", volume / "o"), 400, "failed_precondition", "mounted")
        assert ((tmp_path / "outer/f").exists(), list(volume.iterdir())) == (True, [])
        # What does not fit stays where it is, and leaves nothing behind.
        (volume / "old").write_bytes(b"old")
        (tmp_path / "new/s/big").write_bytes(os.urandom(2 << 20))
        for destination in ("fresh", "old"):
            assert refused(move(tmp_path / "new/s/big", volume / destination), 500, "internal", "not enough space")
        assert [(item.name, item.read_bytes()) for item in volume.iterdir()] == [("old", b"old")]
        assert (tmp_path / "new/s/big").stat().st_size == 2 << 20


# The official SDK


def test_sdk_writes_and_reads_every_form(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    path = str(tmp_path / "new/f.txt")
    written = sandbox.files.write(path, "tëxt")
    assert (written.path, written.name, written.type) == (path, "f.txt", e2b.FileType.FILE)
    assert sandbox.files.read(path) == "tëxt"
    sandbox.files.write(path, b"\0\xff")
    assert sandbox.files.read(path, format="bytes") == bytearray(b"\0\xff")
    assert b"".join(sandbox.files.read(path, format="stream")) == b"\0\xff"
    with (tmp_path / "source").open("wb+") as file:
        file.write(b"z" * 3_000_000)
        file.seek(0)
        sandbox.files.write(path, file)
    assert sandbox.files.read(path, format="bytes") == bytearray(b"z" * 3_000_000)
    sandbox.files.write(path, "")
    assert sandbox.files.read(path) == ""


def test_sdk_octet_stream_and_gzip(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    sandbox.files.write(path, "a" * 100_000, use_octet_stream=True)
    assert sandbox.files.read(path) == "a" * 100_000
    sandbox.files.write(path, "b" * 100_000, gzip=True)
    assert Path(path).read_bytes() == b"b" * 100_000
    assert sandbox.files.read(path, gzip=True) == "b" * 100_000


def test_sdk_writes_many_files_with_metadata(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "sub/b", "c d")]
    written = sandbox.files.write_files([{"path": path, "data": path} for path in paths], metadata={"Author": "me"})
    assert [info.path for info in written] == paths
    assert [Path(path).read_text() for path in paths] == paths
    assert sandbox.files.get_info(paths[0]).metadata == {"author": "me"}


def test_sdk_directory_operations(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    files, top = sandbox.files, str(tmp_path / "top")
    assert files.make_dir(f"{top}/sub")
    assert not files.make_dir(f"{top}/sub")
    files.write(f"{top}/sub/f", "x")
    assert [info.path for info in files.list(top)] == [f"{top}/sub"]
    assert [info.path for info in files.list(top, depth=2)] == [f"{top}/sub", f"{top}/sub/f"]
    assert files.rename(f"{top}/sub/f", f"{top}/g").path == f"{top}/g"
    assert not files.exists(f"{top}/sub/f")
    assert files.exists(f"{top}/g")
    files.remove(top)
    assert not files.exists(top)
    with pytest.raises(e2b.NotFoundException):
        files.list(top)
    with pytest.raises(e2b.NotFoundException):
        files.read(f"{top}/g")
    with pytest.raises(e2b.InvalidArgumentException):
        files.read(str(tmp_path))


def test_sdk_info_of_a_link(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("target")
    info = sandbox.files.get_info(str(tmp_path / "target"))
    assert (info.size, info.mode, info.permissions, info.symlink_target) == (5, 0o644, "-rw-r--r--", None)
    info = sandbox.files.get_info(str(tmp_path / "link"))
    assert (info.permissions, info.symlink_target) == ("Lrwxrwxrwx", str(tmp_path / "target"))


@as_root
def test_sdk_users(sandbox: e2b.Sandbox) -> None:
    with shared_directory() as shared:
        path = shared / "f"
        sandbox.files.write(str(path), "x", user=NOBODY)
        assert path.owner() == NOBODY
        assert sandbox.files.get_info(str(path), user=NOBODY).owner == NOBODY
        with pytest.raises(e2b.AuthenticationException):
            sandbox.files.read(str(path), user="ghost")
        with pytest.raises(e2b.AuthenticationException):
            sandbox.files.list(str(shared), user="ghost")
        path.chmod(0o600)
        os.chown(path, 0, 0)
        assert sandbox.files.read(str(path), user=NOBODY) == "x"
