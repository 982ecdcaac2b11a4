"""envd's GET and POST /files, over HTTP as any client speaks it."""

import base64
import gzip
import hashlib
import os
import pwd
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from envd_files_harness import NOBODY, Envd, failed, running_envd, shared_directory, small_volume

MIB = 1 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users and to mount")


@pytest.fixture(scope="module")
def envd() -> Iterator[Envd]:
    with running_envd() as running:
        yield running


def parts(*files: tuple[str, bytes], name: str = "file") -> list[tuple[str, tuple[str, bytes, str]]]:
    return [(name, (filename, data, "application/octet-stream")) for filename, data in files]


# Downloads


def test_download_of_a_file(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "naïve name.txt"
    path.write_bytes(b"content")
    os.utime(path, (784111777, 784111777))
    answer = envd.get(path)
    assert (answer.status_code, answer.content) == (200, b"content")
    assert answer.headers["content-length"] == "7"
    assert answer.headers["last-modified"] == "Sun, 06 Nov 1994 08:49:37 GMT"
    assert answer.headers["vary"] == "Accept-Encoding"
    disposition = "inline; filename=\"na_ve name.txt\"; filename*=UTF-8''na%C3%AFve%20name.txt"
    assert answer.headers["content-disposition"] == disposition
    assert "content-encoding" not in answer.headers


def test_empty_file_has_length_zero(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    for headers in ({}, {"accept-encoding": "gzip"}):
        answer = envd.get(path, headers)
        assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "0")


def test_head_says_what_get_would(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * (3 * MIB))
    answer = envd.http.head("/files", params={"path": str(path)})
    assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, str(3 * MIB), b"")
    assert envd.http.head("/files", params={"path": str(tmp_path / "gone")}).status_code == 404


@pytest.mark.parametrize("size", [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 3 * MIB + 7])
def test_round_trip_of_sizes_around_a_chunk(envd: Envd, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    assert envd.put(tmp_path / "f", data).status_code == 200
    answer = envd.get(tmp_path / "f")
    assert answer.content == data
    assert answer.headers["content-length"] == str(size)
    packed = envd.get(tmp_path / "f", {"accept-encoding": "gzip"})
    assert packed.content == data


@pytest.mark.parametrize(
    "path", ["/proc/self/status", "/proc/cpuinfo", "/proc/kallsyms", "/sys/kernel/mm/transparent_hugepage/enabled"]
)
def test_files_whose_size_is_a_lie_are_read_to_their_end(envd: Envd, path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"{path} is not there")
    answer = envd.get(path)
    expected = Path(path).read_bytes()
    assert answer.status_code == 200
    if path == "/proc/self/status":
        assert answer.content.startswith(b"Name:\tenvd")
    else:
        assert len(answer.content.splitlines()) == len(expected.splitlines())


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [("bytes=0-0", 0, 0), ("bytes=5-9", 5, 9), ("bytes=2097150-", 2097150, 2097151), ("bytes=-3", 2097149, 2097151)],
)
def test_ranges(envd: Envd, tmp_path: Path, header: str, first: int, last: int) -> None:
    data = os.urandom(2 * MIB)
    (tmp_path / "f").write_bytes(data)
    answer = envd.get(tmp_path / "f", {"range": header})
    assert (answer.status_code, answer.content) == (206, data[first : last + 1])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{2 * MIB}"
    # A range of the file, never of its compressed form.
    answer = envd.get(tmp_path / "f", {"range": header, "accept-encoding": "gzip"})
    assert (answer.status_code, answer.content) == (206, data[first : last + 1])


def test_ranges_that_do_not_apply(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    os.utime(path, (1000, 1000))
    answer = envd.get(path, {"range": "bytes=10-"})
    assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */10")
    for header in ("lines=1-2", "bytes=0-1,4-5", "bytes=5-2"):
        assert (envd.get(path, {"range": header}).status_code, envd.get(path).content) == (200, b"0123456789")
    current = envd.get(path).headers["last-modified"]
    assert envd.get(path, {"range": "bytes=1-2", "if-range": current}).content == b"12"
    stale = "Sun, 06 Nov 1994 08:49:37 GMT"
    assert envd.get(path, {"range": "bytes=1-2", "if-range": stale}).content == b"0123456789"


def test_content_coding_is_negotiated(envd: Envd, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a" * MIB)
    assert envd.get(tmp_path / "f", {"accept-encoding": "gzip"}).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in envd.get(tmp_path / "f", {"accept-encoding": "gzip, deflate, br"}).headers
    assert failed(envd.get(tmp_path / "f", {"accept-encoding": "br, identity;q=0"}), 406, "no acceptable")


def test_what_cannot_be_downloaded(envd: Envd, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("gone")
    assert failed(envd.get(tmp_path), 400, "is a directory")
    assert failed(envd.get(tmp_path / "gone"), 404, f"path '{tmp_path}/gone' does not exist")
    assert failed(envd.get(tmp_path / "broken"), 404, "does not exist")
    assert failed(envd.get(tmp_path / "fifo"), 400, "FIFO")
    assert failed(envd.get("/dev/zero"), 400, "device")
    assert failed(envd.get(tmp_path / "loop"), 400, "cyclic")
    assert failed(envd.get("a\0b"), 400, "NUL")
    assert failed(envd.get("/" + "x" * 300), 400, "too long")
    assert failed(envd.get("/x" * 3000), 400, "too long")
    assert failed(envd.get("/etc/passwd", username="ghost"), 401, "invalid username: 'ghost'")
    assert failed(envd.http.put("/files"), 405, "PUT")
    assert failed(envd.http.get("/files/other"), 404, "no such path")


def test_dots_are_folded(envd: Envd, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    assert envd.get(f"{tmp_path}/a/../b/../../{tmp_path.name}/./f").content == b"x"
    assert envd.get("/../../etc/passwd").content == Path("/etc/passwd").read_bytes()


# Uploads


def test_upload_of_raw_bytes_makes_parents(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "a/b/f"
    answer = envd.put(path, b"one")
    assert answer.json() == [{"path": str(path), "name": "f", "type": "file"}]
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o644)
    assert path.parent.stat().st_mode & 0o777 == 0o755
    path.chmod(0o750)
    assert envd.put(path, b"2").status_code == 200
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"2", 0o750)


def test_upload_of_a_form_keeps_file_names_whole(envd: Envd, tmp_path: Path) -> None:
    names = [f"{tmp_path}/{name}" for name in ("x/one.txt", "y z/ü", "back\\slash", 'say "a\r\nb"', "100%", "empty")]
    files = [(name, b"" if name.endswith("empty") else name.encode()) for name in names]
    answer = envd.http.post("/files", files=parts(*files))
    assert [entry["path"] for entry in answer.json()] == names
    assert [(name, Path(name).read_bytes()) for name in names] == files


def test_path_of_the_query_wins_over_the_file_name(envd: Envd, tmp_path: Path) -> None:
    path = str(tmp_path / "real")
    answer = envd.http.post("/files", params={"path": path}, files=parts(("/nowhere/else", b"x")))
    assert answer.json() == [{"path": path, "name": "real", "type": "file"}]


def test_malformed_uploads(envd: Envd, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    post = envd.http.post
    assert failed(post("/files", files=parts((path, b"1"), (path, b"2"))), 400, "destination of two parts")
    assert failed(post("/files", files=parts((path, b"1"), name="other")), 400, "no part named 'file'")
    assert failed(post("/files", data={"a": "b"}), 400, "content type")
    form = {"content-type": "multipart/form-data; boundary=X"}
    assert failed(post("/files", content=b"--X\r\n", headers=form), 400, "ends before")
    assert failed(post("/files", content=b"", headers={"content-type": "multipart/form-data"}), 400, "boundary")
    assert failed(envd.put("", b"x"), 400, "'path' is missing")
    assert failed(envd.put(path, b"x", {"content-encoding": "br"}), 400, "content encoding 'br'")
    assert failed(envd.put(tmp_path, b"x"), 400, "is a directory")
    assert failed(envd.put("/dev/null", b"x"), 400, "device")
    (tmp_path / "file").touch()
    assert failed(envd.put(tmp_path / "file/below", b"x"), 400, "is not a directory")


def test_gzip_upload_is_stored_decompressed(envd: Envd, tmp_path: Path) -> None:
    data = os.urandom(MIB) + b"\0" * MIB
    packed = gzip.compress(data, 1)
    assert envd.put(tmp_path / "f", packed, {"content-encoding": "gzip"}).status_code == 200
    assert (tmp_path / "f").read_bytes() == data
    for broken in (packed[:-5], b"not gzip"):
        answer = envd.put(tmp_path / "broken", broken, {"content-encoding": "gzip"})
        assert failed(answer, 400, "not valid gzip")
        assert not (tmp_path / "broken").exists()


def test_an_upload_that_breaks_off_leaves_nothing(envd: Envd, tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x" * MIB
        deadline = time.monotonic() + 10
        while not (tmp_path / "f").exists() or (tmp_path / "f").stat().st_size == 0:
            assert time.monotonic() < deadline
        raise ConnectionAbortedError

    headers = {"content-type": "application/octet-stream"}
    with pytest.raises(ConnectionAbortedError):
        httpx.post(f"{envd.url}/files", params={"path": str(tmp_path / "f")}, content=broken(), headers=headers)
    deadline = time.monotonic() + 10
    while (tmp_path / "f").exists():
        assert time.monotonic() < deadline


@as_root
def test_full_disk(envd: Envd, tmp_path: Path) -> None:
    def unannounced(size: int) -> Iterator[bytes]:
        for _ in range(size // 65536):
            yield b"x" * 65536

    with small_volume(tmp_path / "volume") as volume:
        old = volume / "old"
        old.write_bytes(b"old")
        # A length that cannot fit is refused before anything is touched.
        assert failed(envd.put(old, b"x" * (2 * MIB)), 507, "not enough space")
        assert old.read_bytes() == b"old"
        headers = {"content-type": "application/octet-stream"}
        for name in ("new", "old"):
            query = {"path": str(volume / name)}
            answer = envd.http.post("/files", params=query, content=unannounced(2 * MIB), headers=headers)
            assert failed(answer, 507, "not enough space")
        # What the upload made is gone, what was there is empty, and the space is free again.
        assert not (volume / "new").exists()
        assert old.read_bytes() == b""
        form = parts((f"{volume}/first", b"1"), (f"{volume}/second", b"x" * (2 * MIB)))
        assert failed(envd.http.post("/files", files=form), 507, "not enough space")
        assert sorted(entry.name for entry in volume.iterdir()) == ["first", "old"]


# Metadata


def test_metadata_are_stored_shown_and_replaced(envd: Envd, tmp_path: Path) -> None:
    path = tmp_path / "f"
    answer = envd.put(path, b"x", {"X-Metadata-Author": "Ann", "x-metadata-note": "a b"})
    assert answer.json()[0]["metadata"] == {"author": "Ann", "note": "a b"}
    assert os.getxattr(path, "user.e2b.author") == b"Ann"
    os.setxattr(path, "user.other", b"kept")

    def shown() -> object:
        entry = envd.rpc("Stat", path=str(path))[1]["entry"]
        assert isinstance(entry, dict)
        return entry.get("metadata")

    assert shown() == {"author": "Ann", "note": "a b"}
    envd.put(path, b"x", {"x-metadata-note": "c"})
    assert shown() == {"note": "c"}
    assert "metadata" not in envd.put(path, b"x").json()[0]
    assert shown() is None
    assert os.getxattr(path, "user.other") == b"kept"


def test_limits_of_metadata(envd: Envd, tmp_path: Path) -> None:
    put = envd.put
    assert put(tmp_path / "f", b"", {"x-metadata-" + "k" * 246: "v"}).status_code == 200
    assert failed(put(tmp_path / "g", b"", {"x-metadata-" + "k" * 247: "v"}), 400, "247 bytes")
    assert failed(put(tmp_path / "g", b"", {"x-metadata-k": "v" * 4096}), 400, "4096 bytes")
    assert failed(put(tmp_path / "g", b"", {"x-metadata-k": "a\tb"}), 400, "printable ASCII")
    assert failed(put(tmp_path / "g", b"", {"x-metadata-": "v"}), 400, "1 to 246")
    assert not (tmp_path / "g").exists()


# Whose they are


def test_a_refused_upload_is_explained_while_it_is_still_coming(envd: Envd, tmp_path: Path) -> None:
    head = (
        f"POST /files?path={tmp_path}/f HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {8 * MIB}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(envd.url.rsplit(":", 1)[1])), timeout=10) as connection:
        connection.sendall(head.encode() + b"x" * MIB)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        # A client that sends all of it can go on with the connection.
        connection.sendall(b"x" * (7 * MIB) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 204 ")


@pytest.mark.parametrize("size", [8 * MIB, 512 * MIB])
def test_a_client_that_sends_first_and_reads_then_sees_why_it_was_refused(tmp_path: Path, size: int) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(size // MIB):
            yield b"x" * MIB

    with running_envd() as secured:
        assert secured.http.post("/init", json={"accessToken": "tok"}).status_code == 204
        query, headers = {"path": f"{tmp_path}/f"}, {"content-type": "application/octet-stream"}
        answer = secured.http.post("/files", params=query, content=body(), headers=headers)
        assert failed(answer, 401, "missing signature")
    assert not (tmp_path / "f").exists()


@as_root
def test_the_user_writes_and_reads_everywhere_and_owns_the_result() -> None:
    with running_envd(NOBODY) as envd, shared_directory() as shared:
        top = shared / "closed"
        top.mkdir(mode=0o700)
        for path in (top / "f", top / "new/deep/f"):
            assert envd.put(path, b"x").status_code == 200
            assert envd.get(path).content == b"x"
        form = {"file": (f"{top}/form/f", b"x", "application/octet-stream")}
        assert envd.http.post("/files", files=form).status_code == 200
        for name in ("f", "new", "new/deep", "new/deep/f", "form", "form/f"):
            assert ((top / name).owner(), (top / name).stat().st_gid) == (NOBODY, pwd.getpwnam(NOBODY).pw_gid)
        assert top.owner() == "root"
        # What is overwritten becomes the user's too, and keeps its mode.
        (top / "root").write_bytes(b"secret")
        (top / "root").chmod(0o600)
        assert envd.get(top / "root").content == b"secret"
        assert envd.put(top / "root", b"y").status_code == 200
        assert ((top / "root").owner(), (top / "root").stat().st_mode & 0o777) == (NOBODY, 0o600)
        assert envd.put(top / "root", b"z", username="root").status_code == 200
        assert ((top / "root").owner(), (top / "root").read_bytes()) == ("root", b"z")


def signature(path: str, operation: str, username: str, token: str, expiration: int | None = None) -> str:
    text = f"{path}:{operation}:{username}:{token}" + (f":{expiration}" if expiration is not None else "")
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def test_tokens_and_signatures(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    with running_envd() as secured:
        assert secured.http.post("/init", json={"accessToken": "tok"}).status_code == 204
        assert failed(secured.get(path), 401, "missing signature query parameter")
        assert failed(secured.get(path, {"x-access-token": "no"}), 401, "unauthorized access")
        assert secured.put(path, b"x", {"x-access-token": "tok"}).status_code == 200
        assert secured.get(path, {"x-access-token": "tok"}).content == b"x"
        assert secured.get(path, signature=signature(path, "read", "", "tok")).content == b"x"
        named = signature(path, "write", "root", "tok")
        assert secured.put(path, b"y", username="root", signature=named).status_code == 200
        assert failed(secured.put(path, b"y", signature=named), 401, "invalid signature")
        assert failed(secured.get(path, username="root", signature=named), 401, "invalid signature")
        for offset, status in ((60, 200), (-60, 401)):
            at = int(time.time()) + offset
            signed = signature(path, "read", "", "tok", at)
            answer = secured.get(path, signature=signed, signature_expiration=str(at))
            assert answer.status_code == status
            late = str(at + 1000)
            assert failed(secured.get(path, signature=signed, signature_expiration=late), 401, "invalid signature")
        assert failed(secured.get(path, signature=signed, signature_expiration=str(at)), 401, "already expired")
