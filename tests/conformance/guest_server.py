"""Runs inside a sandbox, with nothing but the standard library: HTTP, streams, server-sent events, WebSocket echo.

Port 8080. `/` tells what arrived; `/lines` streams three lines, each once the client has asked for it by `/next`;
`/events` is server-sent events; `/upload` counts the body; `/ws` echoes the messages of RFC 6455 frames.
"""

import base64
import hashlib
import json
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10

go_on = threading.Semaphore(0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path.partition("?")[0] == "/ws":
            return self.websocket()
        if self.path in ("/lines", "/events"):
            return self.stream(self.path == "/events")
        if self.path == "/next":
            go_on.release()
        return self.tell()

    def do_POST(self):
        size = 0
        while length := int(self.rfile.readline(), 16):
            size += len(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        self.tell(size=size)

    def tell(self, **more):
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.dumps({"method": self.command, "path": self.path, "headers": headers, **more}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, events):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if events else "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(3):
            line = f"data: {number}\n\n" if events else f"line {number}\n"
            self.wfile.write(f"{len(line):x}\r\n{line}\r\n".encode())
            self.wfile.flush()
            go_on.acquire()
        self.wfile.write(b"0\r\n\r\n")

    def websocket(self):
        accept = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + GUID).encode()).digest()).decode()
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            self.send_header(name, value)
        if protocol := self.headers.get("Sec-WebSocket-Protocol"):
            self.send_header("Sec-WebSocket-Protocol", protocol.split(",")[0].strip())
        self.end_headers()
        self.close_connection = True
        message, kind = b"", TEXT
        while True:
            first, second = self.rfile.read(2)
            length = second & 127
            if length == 126:
                (length,) = struct.unpack(">H", self.rfile.read(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            masked = self.rfile.read(length)
            key = int.from_bytes((mask * (length // 4 + 1))[:length], "big")
            payload = (int.from_bytes(masked, "big") ^ key).to_bytes(length, "big")
            opcode = first & 15
            if opcode == CLOSE:
                return self.frame(CLOSE, payload)
            if opcode == PING:
                self.frame(PONG, payload)
            elif opcode in (0, TEXT, BINARY):
                message, kind = message + payload, opcode or kind
                if first & 128:
                    self.frame(kind, message)
                    message = b""

    def frame(self, opcode, payload):
        length = len(payload)
        if length < 126:
            head = struct.pack(">BB", 128 | opcode, length)
        elif length < 65536:
            head = struct.pack(">BBH", 128 | opcode, 126, length)
        else:
            head = struct.pack(">BBQ", 128 | opcode, 127, length)
        self.wfile.write(head + payload)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
