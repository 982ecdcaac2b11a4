"""envd's /files under load: large, compressed, many and slow. Memory stays bounded, nobody is kept waiting."""

import contextlib
import gzip
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from envd_files_harness import running_envd

MIB = 1 << 20


@pytest.mark.parametrize("form", [False, True])
def test_a_gibibyte_each_way_in_bounded_memory(tmp_path: Path, form: bool) -> None:
    size, block = 1 << 30, os.urandom(MIB)
    expected = hashlib.sha256(block * 64).hexdigest()

    def body() -> Iterator[bytes]:
        head = b'--X\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        yield head if form else b""
        for _ in range(size // MIB):
            yield block
        yield b"\r\n--X--" if form else b""

    kind = "multipart/form-data; boundary=X" if form else "application/octet-stream"
    query = {"path": str(tmp_path / "f")}
    with running_envd() as envd:
        envd.put(tmp_path / "warm", b"x" * MIB)
        before = envd.peak_memory()
        answer = envd.http.post("/files", params=query, content=body(), headers={"content-type": kind})
        assert answer.status_code == 200, answer.text
        received, digest = 0, hashlib.sha256()
        with envd.http.stream("GET", "/files", params=query, headers={"accept-encoding": "identity"}) as download:
            for chunk in download.iter_bytes(MIB):
                if received < 64 * MIB:
                    digest.update(chunk)
                received += len(chunk)
        assert (received, digest.hexdigest()) == (size, expected)
        assert envd.peak_memory() - before < 32 * MIB
    (tmp_path / "f").unlink()


def test_a_small_upload_may_unpack_to_a_large_file_in_bounded_memory(tmp_path: Path) -> None:
    packed = gzip.compress(b"\0" * (128 * MIB), 6)
    with running_envd() as envd:
        envd.put(tmp_path / "warm", b"x" * MIB)
        before = envd.peak_memory()
        assert envd.put(tmp_path / "f", packed, {"content-encoding": "gzip"}).status_code == 200
        assert (tmp_path / "f").stat().st_size == 128 * MIB
        assert envd.peak_memory() - before < 32 * MIB
    (tmp_path / "f").unlink()


def test_clients_that_stall_keep_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (64 * MIB))
    head = "HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: 99"
    upload = "POST /files?path={} " + head + "\r\n\r\nx"
    download = "GET /files?path={} HTTP/1.1\r\nHost: x\r\n\r\n"
    with running_envd() as envd, contextlib.ExitStack() as connections:
        address = ("127.0.0.1", int(envd.url.rsplit(":", 1)[1]))
        for number in range(100):
            stalled = connections.enter_context(socket.create_connection(address))
            path = tmp_path / f"f{number}"
            stalled.sendall((upload.format(path) if number % 2 else download.format(tmp_path / "big")).encode())
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("f*"))) < 50:
            assert time.monotonic() < deadline
        before = envd.peak_memory()
        assert envd.put(tmp_path / "other", b"x").status_code == 200
        assert envd.get(tmp_path / "other").content == b"x"
        assert envd.rpc("ListDir", path=str(tmp_path))[0] == 200
        # At most four chunks of 256 KiB for each connection.
        assert before < 100 * MIB
        # Their clients gone, the uploads are undone.
        connections.close()
        while list(tmp_path.glob("f*")):
            assert time.monotonic() < deadline
