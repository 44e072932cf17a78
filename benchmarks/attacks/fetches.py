"""Pictures that a server is asked to fetch, from hosts that send too little, too slowly, or nothing at all.

All hosts are allowed by the operator, and are threads of this process in a network of its own. The honest
clients beside the attacker are those of `elements_rows`, and one whose pictures lie on a good host.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from attacks import elements, own_network
from attacks.attacker import Ports, post
from attacks.honest import FETCHED, GOOD_HOST, small_picture

GOOD, CHUNKS, SLOW, DEAD, NAME_SERVER = "11.0.0.10", "11.0.0.11", "11.0.0.12", "11.0.0.13", "11.0.0.53"
HOSTS = {GOOD_HOST: GOOD, "chunks.example": CHUNKS, "slow.example": SLOW, "dead.example": DEAD}
SILENT = "silent.example"
"""No file has its address: the name server is asked, and never answers."""
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\n"
_BACKLOG = 512
_MOST_CHUNKS = 64 * 1024


def options() -> list[str]:
    return [word for host in (*HOSTS, SILENT) for word in ("--allow-picture-host", host)]


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Moves this process into a network of its own, with all hosts in it; `own_network.NoNetwork` where
    that cannot be had."""
    with tempfile.TemporaryDirectory(prefix="carpool-hosts-") as folder:
        own_network.enter(HOSTS, NAME_SERVER, Path(folder))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as names, contextlib.ExitStack() as held:
            names.bind((NAME_SERVER, 53))
            serving = {GOOD: _good, CHUNKS: _in_chunks, SLOW: _slowly, DEAD: _never}
            for address, answer in serving.items():
                listener = held.enter_context(socket.create_server((address, 80), backlog=_BACKLOG))
                threading.Thread(target=_serve, args=(listener, answer), daemon=True).start()
            yield


def _serve(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_answer, args=(client, answer), daemon=True).start()


def _answer(client: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError), client:
        client.recv(1 << 16)
        answer(client)


def _good(client: socket.socket) -> None:
    body = small_picture()
    client.sendall(_HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)


def _in_chunks(client: socket.socket) -> None:
    client.sendall(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        client.sendall(b"1\r\na\r\n" * _MOST_CHUNKS)


def _slowly(client: socket.socket) -> None:
    client.sendall(_HEAD + b"Content-Length: 1000\r\n\r\n")
    while True:
        client.sendall(b"a")
        time.sleep(1.0)


def _never(client: socket.socket) -> None:
    while client.recv(1):
        pass


def fetch(host: str, ports: Ports) -> bool:
    body = json.dumps({"url": f"http://{host}/a.jpg"}).encode()
    with contextlib.closing(elements.connect(ports.http, elements.ADDRESS)) as client:
        client.settimeout(60.0)
        client.sendall(post("/models/pictures/predict", len(body), elements.JSON_FIELDS) + body)
        answer = client.recv(1 << 16)
    rejected = b" 429 " in answer[:16] or b" 503 " in answer[:16]
    if rejected:
        time.sleep(0.1)
    return not rejected


def _kind(host: str) -> elements.Kind:
    return elements.Kind(partial(fetch, host), times=0, clients=8, honest=("http", "grpc", FETCHED))


KINDS: dict[str, elements.Kind] = {
    "fetched: 8 × chunks of one byte": _kind("chunks.example"),
    "fetched: 8 × a name that is not answered": _kind(SILENT),
    "fetched: 8 × one byte a second": _kind("slow.example"),
    "fetched: 8 × a host that is silent": _kind("dead.example"),
}
