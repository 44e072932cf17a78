"""An HTTP server that replies what it was told to, in order, and keeps what it was asked."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Said:
    status: int = 200
    body: bytes = b"{}"
    fields: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    method: str
    path: str
    fields: dict[str, str]
    body: bytes
    connection: tuple[str, int]


@dataclass
class Scripted:
    url: str
    replies: list[Said] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def say(self, document: Any, status: int = 200, **fields: str) -> None:
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        self.replies.append(Said(status, json.dumps(document).encode(), named))


@contextmanager
def scripted_server(tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    """Without a reply left, it answers 500."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fields = {name.lower(): value for name, value in self.headers.items()}
            with lock:
                asked = Asked(self.command, self.path, fields, body, self.client_address[:2])
                script.asked.append(asked)
                said = script.replies.pop(0) if script.replies else Said(500)
            self.send_response(said.status)
            for name, value in {"Content-Length": str(len(said.body)), **said.fields}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said.body)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    script = Scripted(f"http{'s' if tls else ''}://localhost:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
