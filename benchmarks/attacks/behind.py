"""What stands behind the server and means harm: a Redis server for shared answers, a collector of spans.

The attacker listens there, and asks a model with a cache for what was never asked before.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from attacks.attacker import HOST, Attack, Pace, Ports, ask, connected, post

Talk = Callable[[socket.socket], None]
_listening: list[threading.Thread] = []


def settings(ports: Ports) -> Mapping[str, str]:
    """Of a server that knows both."""
    return {
        "CARPOOL_CACHE_URL": f"redis://{HOST}:{ports.redis}",
        "CARPOOL_CACHE_SECRET": secrets.token_hex(16),
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{ports.collector}",
        "OTEL_TRACES_SAMPLER": "always_on",
    }


def _listen(port: int, talk: Talk) -> None:
    """For as long as this process lives."""
    listener = socket.create_server((HOST, port))

    def one(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            talk(client)

    def accept() -> None:
        while True:
            threading.Thread(target=one, args=listener.accept()[:1], daemon=True).start()

    _listening.append(threading.Thread(target=accept, daemon=True))
    _listening[-1].start()


def _ask(ports: Ports, pace: Pace) -> None:
    with connected(ports.http) as client:
        for _ in range(20):
            tensor = {
                "name": "x",
                "datatype": "UINT8",
                "shape": [1, 16],
                "data": list(secrets.token_bytes(16)),
            }
            body = json.dumps({"inputs": [tensor]}).encode()
            ask(client, post("/v2/models/kept/infer", len(body)), body, pace)


def _say(reply: bytes, each_s: float, client: socket.socket) -> None:
    """Welcome everybody, and say the same to every command, at once or byte by byte."""
    client.recv(4096)
    client.sendall(b"+PONG\r\n")
    step = 1 if each_s else len(reply)
    while client.recv(4096):
        for start in range(0, len(reply), step):
            client.sendall(reply[start : start + step])
            time.sleep(each_s)


def redis(reply: bytes, each_s: float, ports: Ports, pace: Pace) -> None:
    if not _listening:
        _listen(ports.redis, partial(_say, reply, each_s))
    _ask(ports, pace)


def _hang(_client: socket.socket) -> None:
    """Take everything and say nothing."""
    time.sleep(60.0)


def collector(ports: Ports, pace: Pace) -> None:
    if not _listening:
        _listen(ports.collector, _hang)
    _ask(ports, pace)


ATTACKS = {
    "Redis: slow garbage": Attack(partial(redis, b"$1000\r\n" + b"\0" * 200, 0.02)),
    "Redis: a list without an end": Attack(partial(redis, b"*400000000\r\n", 0.0)),
    "a collector that hangs": Attack(collector),
}
