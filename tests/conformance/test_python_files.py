"""Files through the official Python SDK (protocol of filesystem.Filesystem and /files)."""

import io
import time
from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest
from e2b import (
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    Sandbox,
    SandboxException,
)

from real_server import needs_node, until

pytestmark = [pytest.mark.vm, needs_node]


@pytest.fixture
def folder(sandbox: Sandbox) -> Iterator[str]:
    """A folder of the test's own in the shared sandbox."""
    path = f"/home/user/{uuid4().hex[:8]}"
    sandbox.files.make_dir(path)
    yield path
    sandbox.files.remove(path)


class TestReadAndWrite:
    def test_formats(self, sandbox: Sandbox, folder: str) -> None:
        info = sandbox.files.write(f"{folder}/a/b/text.txt", "žluť\n")
        assert (info.path, info.name, info.type, info.metadata) == (
            f"{folder}/a/b/text.txt",
            "text.txt",
            FileType.FILE,
            None,
        )
        assert sandbox.files.read(info.path) == "žluť\n"
        assert sandbox.files.read(info.path, format="bytes") == "žluť\n".encode()
        assert b"".join(sandbox.files.read(info.path, format="stream")) == "žluť\n".encode()

    @pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_001])
    @pytest.mark.parametrize("octets", [False, True])
    def test_sizes(self, sandbox: Sandbox, folder: str, size: int, octets: bool) -> None:
        data = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
        sandbox.files.write(f"{folder}/data", data[:size], use_octet_stream=octets)
        assert sandbox.files.read(f"{folder}/data", format="bytes") == data[:size]

    def test_streams(self, sandbox: Sandbox, folder: str) -> None:
        sandbox.files.write(f"{folder}/io", io.BytesIO(b"from a file"))
        sandbox.files.write(f"{folder}/iter", (b"piece" for _ in range(1000)))
        assert sandbox.files.read(f"{folder}/io") == "from a file"
        assert sandbox.files.read(f"{folder}/iter") == "piece" * 1000

    def test_gzip_both_ways(self, sandbox: Sandbox, folder: str) -> None:
        text = "compressible " * 10_000
        sandbox.files.write(f"{folder}/z", text, gzip=True)
        assert sandbox.files.read(f"{folder}/z") == text
        assert sandbox.files.read(f"{folder}/z", gzip=True) == text

    def test_many_at_once(self, sandbox: Sandbox, folder: str) -> None:
        entries = [{"path": f"{folder}/dir{i}/f{i}", "data": f"content {i}"} for i in range(20)]
        infos = sandbox.files.write_files(entries)  # type: ignore[arg-type]
        assert [info.path for info in infos] == [entry["path"] for entry in entries]
        assert sandbox.files.read(f"{folder}/dir19/f19") == "content 19"

    def test_overwriting(self, sandbox: Sandbox, folder: str) -> None:
        sandbox.files.write(f"{folder}/f", "a long first content")
        sandbox.commands.run(f"chmod 600 {folder}/f")
        sandbox.files.write(f"{folder}/f", "short")
        assert sandbox.files.read(f"{folder}/f") == "short"
        assert sandbox.files.get_info(f"{folder}/f").mode == 0o600

    def test_users_and_relative_paths(self, sandbox: Sandbox, folder: str) -> None:
        name = folder.rsplit("/", 1)[1]
        sandbox.files.write(f"{name}/mine", "x")
        info = sandbox.files.get_info(f"~/{name}/mine")
        assert (info.path, info.owner, info.group, info.permissions) == (f"{folder}/mine", "user", "user", "-rw-r--r--")
        sandbox.files.write(f"{folder}/roots", "x", user="root")
        assert sandbox.files.get_info(f"{folder}/roots").owner == "root"
        assert sandbox.files.write("~/home-of-root", "x", user="root").path == "/root/home-of-root"

    def test_proc_files_are_read_to_their_end(self, sandbox: Sandbox) -> None:
        assert "Linux version" in sandbox.files.read("/proc/version")

    def test_errors(self, sandbox: Sandbox, folder: str) -> None:
        with pytest.raises(FileNotFoundException, match="does not exist"):
            sandbox.files.read(f"{folder}/missing")
        with pytest.raises(InvalidArgumentException):
            sandbox.files.read(folder)
        with pytest.raises(InvalidArgumentException):
            sandbox.files.write(folder, "x")
        with pytest.raises(SandboxException):
            sandbox.files.write("/proc/version", "x")

    def test_anywhere(self, sandbox: Sandbox) -> None:
        """As with E2B: the daemon writes wherever it is told, and what it makes belongs to the user."""
        sandbox.files.write("/opt/project/main.py", "print(1)")
        assert sandbox.files.get_info("/opt/project/main.py").owner == "user"
        assert sandbox.files.get_info("/opt/project").owner == "user"

    def test_metadata(self, sandbox: Sandbox, folder: str) -> None:
        path = f"{folder}/tagged"
        assert sandbox.files.write(path, "x", metadata={"Author": "me", "run": "7"}).metadata == {
            "author": "me",
            "run": "7",
        }
        assert sandbox.files.get_info(path).metadata == {"author": "me", "run": "7"}
        assert sandbox.files.list(folder)[0].metadata == {"author": "me", "run": "7"}
        assert sandbox.files.rename(path, f"{path}2").metadata == {"author": "me", "run": "7"}
        sandbox.files.write(f"{path}2", "y")
        assert not sandbox.files.get_info(f"{path}2").metadata


class TestTree:
    def test_list_by_depth(self, sandbox: Sandbox, folder: str) -> None:
        sandbox.files.write(f"{folder}/a/b/c", "x")
        sandbox.files.write(f"{folder}/z", "x")
        shown = {d: [e.path.removeprefix(folder) for e in sandbox.files.list(folder, depth=d)] for d in (1, 2, 3)}
        assert shown == {1: ["/a", "/z"], 2: ["/a", "/a/b", "/z"], 3: ["/a", "/a/b", "/a/b/c", "/z"]}
        types = [entry.type for entry in sandbox.files.list(folder)]
        assert types == [FileType.DIR, FileType.FILE]
        with pytest.raises(FileNotFoundException):
            sandbox.files.list(f"{folder}/missing")
        with pytest.raises(InvalidArgumentException):
            sandbox.files.list(f"{folder}/z")

    def test_info_of_links(self, sandbox: Sandbox, folder: str) -> None:
        sandbox.files.write(f"{folder}/target", "12345")
        sandbox.commands.run(f"ln -s {folder}/target {folder}/link; ln -s nowhere {folder}/broken")
        link = sandbox.files.get_info(f"{folder}/link")
        assert (link.type, link.symlink_target) == (FileType.SYMLINK, f"{folder}/target")
        assert link.permissions.startswith("L")
        assert sandbox.files.exists(f"{folder}/broken")
        target = sandbox.files.get_info(f"{folder}/target")
        assert (target.type, target.size, target.mode, target.symlink_target) == (FileType.FILE, 5, 0o644, None)
        assert abs(target.modified_time.timestamp() - time.time()) < 60

    def test_directories(self, sandbox: Sandbox, folder: str) -> None:
        assert sandbox.files.make_dir(f"{folder}/x/y/z")
        assert not sandbox.files.make_dir(f"{folder}/x/y/z")
        assert sandbox.files.get_info(f"{folder}/x/y").permissions == "drwxr-xr-x"
        sandbox.files.write(f"{folder}/file", "")
        with pytest.raises(InvalidArgumentException):
            sandbox.files.make_dir(f"{folder}/file")

    def test_rename(self, sandbox: Sandbox, folder: str) -> None:
        sandbox.files.write(f"{folder}/old", "new content")
        sandbox.files.write(f"{folder}/taken", "old content")
        assert sandbox.files.rename(f"{folder}/old", f"{folder}/taken").path == f"{folder}/taken"
        assert sandbox.files.read(f"{folder}/taken") == "new content"
        assert not sandbox.files.exists(f"{folder}/old")
        sandbox.files.rename(f"{folder}/taken", f"{folder}/made/on/the/way")
        assert sandbox.files.read(f"{folder}/made/on/the/way") == "new content"
        with pytest.raises(FileNotFoundException):
            sandbox.files.rename(f"{folder}/missing", f"{folder}/x")

    def test_remove(self, sandbox: Sandbox, folder: str) -> None:
        sandbox.files.write(f"{folder}/tree/a/b", "x")
        sandbox.files.remove(f"{folder}/tree")
        assert not sandbox.files.exists(f"{folder}/tree")
        sandbox.files.remove(f"{folder}/tree")  # what is gone is gone

    def test_watch(self, sandbox: Sandbox, folder: str) -> None:
        handle = sandbox.files.watch_dir(folder)
        sandbox.files.write(f"{folder}/new", "x")
        events = []
        until(lambda: len(events) >= 3 or events.extend(handle.get_new_events()))
        kinds = [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE]
        assert [(event.name, event.type) for event in events] == [("new", kind) for kind in kinds]
        sandbox.files.rename(f"{folder}/new", f"{folder}/other")
        events.clear()
        until(lambda: len(events) >= 2 or events.extend(handle.get_new_events()))
        assert {(event.name, event.type) for event in events} == {
            ("new", FilesystemEventType.RENAME),
            ("other", FilesystemEventType.CREATE),
        }
        handle.stop()
        with pytest.raises(SandboxException):
            handle.get_new_events()
        with pytest.raises(FileNotFoundException):
            sandbox.files.watch_dir(f"{folder}/missing")
        with pytest.raises(InvalidArgumentException):
            sandbox.files.watch_dir(f"{folder}/other")

    def test_watch_a_tree(self, sandbox: Sandbox, folder: str) -> None:
        handle = sandbox.files.watch_dir(folder, recursive=True, include_entry=True)
        sandbox.files.make_dir(f"{folder}/later")
        seen: dict[str, object] = {}

        def collect() -> bool:
            sandbox.files.write(f"{folder}/later/deep", "x")  # its folder is watched soon after it appears
            seen.update({event.name: event.entry for event in handle.get_new_events()})
            return seen.get("later/deep") is not None

        until(collect)
        assert seen["later/deep"].path == f"{folder}/later/deep"  # type: ignore[attr-defined]
        handle.stop()


class TestSignedUrls:
    """Used by whoever got the URL: without any header of the SDK."""

    def test_download(self, sandbox: Sandbox, folder: str) -> None:
        sandbox.files.write(f"{folder}/šárka.txt", "signed")
        url = sandbox.download_url(f"{folder}/šárka.txt")
        assert httpx.get(url).text == "signed"
        assert (
            httpx.get(sandbox.download_url(f"{folder}/šárka.txt", user="root", use_signature_expiration=60)).text
            == "signed"
        )
        expired = httpx.get(sandbox.download_url(f"{folder}/šárka.txt", use_signature_expiration=-10))
        assert (expired.status_code, expired.json()["message"]) == (401, "signature is already expired")
        forged = httpx.get(url.replace("%C5%A1", "x"))
        assert forged.status_code == 401
        assert "signature" in forged.json()["message"]

    def test_upload(self, sandbox: Sandbox, folder: str) -> None:
        url = sandbox.upload_url(f"{folder}/up", use_signature_expiration=60)
        answer = httpx.post(url, files={"file": ("any", b"posted")})
        assert answer.status_code == 200, answer.text
        assert sandbox.files.read(f"{folder}/up") == "posted"
        assert httpx.get(url).status_code == 401  # it is for writing

    def test_by_host(self, server, sandbox: Sandbox, folder: str) -> None:  # type: ignore[no-untyped-def]
        """With wildcard DNS the URL's host names the sandbox."""
        sandbox.files.write(f"{folder}/x", "by host")
        query = sandbox.download_url(f"{folder}/x").partition("?")[2]
        answer = httpx.get(f"{server.url}/files?{query}", headers={"Host": f"49983-{sandbox.sandbox_id}.sbx.test"})
        assert answer.text == "by host"
