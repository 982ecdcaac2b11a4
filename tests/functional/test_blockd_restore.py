"""Restoring memory with the real data plane daemon, over images that it serves itself."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from blockd_harness import Blockd, Refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts: needs root")

MIB = 1 << 20
SIZE = 16 * MIB
PAGE = 4096
IMAGE = random.Random(1).randbytes(SIZE)
AT = SIZE // 2
"""Where the memory to restore differs from the image, in a part of the image that nobody has read."""
CHANGE = random.Random(2).randbytes(3 * PAGE)


class Vmm:
    """A process that maps a memory image privately and does nothing."""

    _CODE = """
import ctypes, mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
memory = mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.read()
"""

    def __init__(self, image: Path) -> None:
        argv = [sys.executable, "-c", self._CODE, str(image)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.address = int(self.process.stdout.readline())

    def request(self, *layers: dict[str, str]) -> dict[str, Any]:
        mappings = [{"address": self.address, "length": SIZE, "offset": 0}]
        return {"pid": self.process.pid, "mappings": mappings, "layers": list(layers), "size": SIZE}

    def read(self) -> bytes:
        with Path(f"/proc/{self.process.pid}/mem").open("rb", buffering=0) as memory:
            return os.pread(memory.fileno(), SIZE, self.address)


@contextmanager
def vmm(image: Path) -> Iterator[Vmm]:
    made = Vmm(image)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@contextmanager
def origin(content: bytes, held_back: range) -> Iterator[tuple[str, threading.Event]]:
    """A server of a layer that gives the bytes held back only in the end, and an event that somebody asked for them."""
    asked, ended = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            last = min(last, len(content) - 1)
            if first < held_back.stop and last >= held_back.start:
                asked.set()
                ended.wait()
            with suppress(OSError):  # whoever asked may be gone
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("Content-Length", str(last + 1 - first))
                self.end_headers()
                self.wfile.write(content[first : last + 1])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/layer", asked
    finally:
        ended.set()
        server.shutdown()
        serving.join()
        server.server_close()


def changed(blockd: Blockd) -> dict[str, str]:
    """The layer with the change."""
    return blockd.layer("changed", bytes(AT) + CHANGE + bytes(SIZE - AT - len(CHANGE)))


WANTED = IMAGE[:AT] + CHANGE + IMAGE[AT + len(CHANGE) :]


def test_an_image_of_its_own_that_is_in_no_cache(blockd: Blockd) -> None:
    """A page of a mapping is read before it is written over: the daemon waits for itself, and gets an answer."""
    image = Path(blockd.call("attach", image="memory", layers=[blockd.layer("base", IMAGE)])["path"])
    layer = changed(blockd)
    with vmm(image) as one, vmm(image) as other:
        assert blockd.call("restore", **one.request(layer))["written_bytes"] == len(CHANGE)
        assert one.read() == WANTED
        assert image.read_bytes() == other.read() == IMAGE


def test_a_daemon_that_is_killed_while_it_waits_for_itself(blockd: Blockd) -> None:
    base = blockd.layer("base", IMAGE)
    layer, content = changed(blockd), Path(base["path"]).read_bytes()
    with origin(content, range(AT, AT + MIB)) as (url, asked):
        remote = {"url": url, "size": len(content)}
        image = Path(blockd.call("attach", image="memory", layers=[remote])["path"])
        with vmm(image) as one:
            waiting = blockd.connect()
            waiting.send("restore", **one.request(layer))
            assert asked.wait(10)
            # Nobody else is held up, not even who restores other memory.
            local = Path(blockd.call("attach", image="local", layers=[base])["path"])
            with vmm(local) as other:
                blockd.call("restore", **other.request(layer))
                assert other.read() == WANTED
            blockd.kill()
            waiting.close()
            assert one.process.poll() is None
    blockd.start()
    image = Path(blockd.call("attach", image="memory", layers=[base])["path"])
    with vmm(image) as one:
        blockd.call("restore", **one.request(layer))
        assert one.read() == WANTED


def test_a_process_that_is_killed_while_the_daemon_waits_for_its_page(blockd: Blockd) -> None:
    base = blockd.layer("base", IMAGE)
    layer, content = changed(blockd), Path(base["path"]).read_bytes()
    with origin(content, range(AT, AT + MIB)) as (url, asked):
        remote = {"url": url, "size": len(content)}
        image = Path(blockd.call("attach", image="memory", layers=[remote])["path"])
        with vmm(image) as one:
            waiting = blockd.connect()
            waiting.send("restore", **one.request(layer))
            assert asked.wait(10)
            one.process.kill()
            assert one.process.wait(10) == -9
            gone = one.request(layer)
        with pytest.raises(Refused, match="no process"):
            blockd.call("restore", **gone)
    # The page is there, but nobody to have it.
    assert "ended while its memory was restored" in waiting.receive()["error"]["message"]
    waiting.close()
