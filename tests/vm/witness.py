"""A process in a guest that knows things only that guest can know, and tells them through the proxy.

It holds memory, an open file that was deleted, a TCP connection to itself and a timer, and counts in memory and on disk
at once. It answers at any moment, before and after its machine was paused, copied or put back: what it says is what a
program that had been running all the time sees.
"""

import time
from typing import Any

from e2b import Sandbox

from real_server import RealServer, until

PORT = 8000

PROGRAM = r"""
import hashlib, http.server, json, os, secrets, socket, sys, threading, time

def read(path):
    with open(path) as file:
        return file.read().strip()

SIZE = int(sys.argv[1])
MEMORY = bytearray(os.urandom(SIZE))
GONE = open("gone", "w+b")
GONE.write(os.urandom(1 << 20))
GONE.flush()
os.unlink("gone")
LISTENER = socket.create_server(("127.0.0.1", 0))
NEAR = socket.create_connection(LISTENER.getsockname())
FAR = LISTENER.accept()[0]
TIMER = {"armed": None, "fired": None, "generation": None}
COUNT = [0]
LOCK = threading.Lock()

def digest(data):
    return hashlib.sha256(data).hexdigest()

def lasting():
    # What a copy shares with its original.
    with LOCK:
        GONE.seek(0)
        gone = digest(GONE.read())
        said = secrets.token_bytes(16)
        NEAR.sendall(said)
        heard = FAR.recv(16)
    return {
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "pid": os.getpid(),
        "started": read("/proc/self/stat").rpartition(")")[2].split()[19],
        "memory": digest(MEMORY),
        "gone": gone,
        "connection": [*NEAR.getsockname(), *FAR.getpeername()] if heard == said else None,
    }

def fresh():
    # What no copy may share. The ports: of connections that nobody answers.
    ports = []
    for _ in range(4):
        with socket.socket() as one:
            one.setblocking(False)
            one.connect_ex(("192.0.2.1", 443))
            ports.append(one.getsockname()[1])
    return {
        "uuid": read("/proc/sys/kernel/random/uuid"),
        "urandom": open("/dev/urandom", "rb").read(32).hex(),
        "os.urandom": os.urandom(32).hex(),
        "secrets": secrets.token_hex(32),
        "ports": ports,
        "hostname": socket.gethostname(),
        "/etc/hostname": read("/etc/hostname"),
        "generation": read("/run/aenv/generation"),
    }

def change():
    # New memory and a new file; what was there before is overwritten.
    MEMORY[:] = os.urandom(SIZE)
    GONE.seek(0)
    GONE.write(os.urandom(1 << 20))
    GONE.flush()
    return lasting()

def arm():
    def fire():
        TIMER.update(fired=time.monotonic(), generation=read("/run/aenv/generation"))
    TIMER.update(armed=time.monotonic(), fired=None, generation=None)
    threading.Timer(float(sys.argv[2]), fire).start()
    return TIMER

def count():
    # In lockstep: no instant has a disk that is ahead, or more than one behind.
    file = os.open("count", os.O_RDWR | os.O_CREAT)
    while True:
        with LOCK:
            COUNT[0] += 1
            os.pwrite(file, b"%020d" % COUNT[0], 0)
            os.fdatasync(file)

def counted():
    with LOCK:
        return {"memory": COUNT[0], "disk": int(read("count") or 0)}

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        made = {
            "/lasting": lasting,
            "/fresh": fresh,
            "/change": change,
            "/time": time.time,
            "/arm": arm,
            "/timer": lambda: TIMER,
            "/count": lambda: threading.Thread(target=count, daemon=True).start(),
            "/counted": counted,
        }[self.path]()
        body = json.dumps(made).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


class Witness:
    """The process in one sandbox, and in every copy of it."""

    def __init__(self, server: RealServer, sandbox_id: str) -> None:
        self.server = server
        self.id = sandbox_id
        self._headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(PORT)}

    @classmethod
    def start(cls, server: RealServer, sandbox: Sandbox, *, memory: int = 8 << 20, timer: float = 5.0) -> "Witness":
        """Start the process and return when it answers. `memory` in bytes; `timer` in seconds from `arm`."""
        sandbox.files.write("witness.py", PROGRAM)
        command = f"exec python3 witness.py {memory} {timer}"
        sandbox.commands.run(command, background=True, timeout=0, user="root", cwd="/home/user")
        made = cls(server, sandbox.sandbox_id)
        until(lambda: server.http.get("/time", headers=made._headers).status_code == 200, 60, "the witness")
        return made

    def of(self, sandbox_id: str) -> "Witness":
        """The same process in a copy."""
        return Witness(self.server, sandbox_id)

    def ask(self, what: str) -> Any:
        answer = self.server.http.get(f"/{what}", headers=self._headers)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def lasting(self) -> dict[str, Any]:
        told: dict[str, Any] = self.ask("lasting")
        assert told["connection"] is not None
        return told

    def fresh(self) -> dict[str, Any]:
        told: dict[str, Any] = self.ask("fresh")
        return told

    def offset(self) -> tuple[float, float]:
        """Bounds of how far this guest's clock is ahead of the host's, in seconds: what one exchange can tell, however
        long it took."""
        before = time.time()
        inside = float(self.ask("time"))
        return inside - time.time(), inside - before

    def api(self, verb: str, body: Any = None, status: int = 200) -> Any:
        """A call of the API on this sandbox."""
        answer = self.server.http.post(f"/sandboxes/{self.id}/{verb}", json=body)
        assert answer.status_code == status, (verb, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def detail(self) -> Any:
        answer = self.server.http.get(f"/sandboxes/{self.id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pause(self, **body: Any) -> None:
        self.api("pause", body, 204)

    def connect(self, timeout: int = 600, status: int = 201, **body: Any) -> None:
        self.api("connect", {"timeout": timeout} | body, status)

    def fork(self, count: int, timeout: int = 600) -> list["Witness"]:
        """Its children; all of them are there."""
        answers = self.api("fork", {"count": count, "timeout": timeout}, 201)
        return [self.of(one["sandbox"]["sandboxID"]) for one in answers]

    def delete(self) -> None:
        answer = self.server.http.delete(f"/sandboxes/{self.id}")
        assert answer.status_code == 204, answer.text
