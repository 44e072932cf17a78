"""One blocking client with one connection: what a request takes when the client itself takes next to nothing.

python -m chip.lone_client 8000 resnet50 photo.jpg      # one line of JSON, in milliseconds
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from pathlib import Path

from chip.repository import SIDE

WARM, COUNTED = 100, 500
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_STEPS = re.compile(rb"(\w+);dur=([\d.]+)")


def tensor(model: str) -> bytes:
    size = 3 * SIDE * SIDE
    given = {"name": "image", "datatype": "UINT8", "shape": [1, 3, SIDE, SIDE]}
    wanted = [{"name": "logits", "parameters": {"binary_data": True}}]
    inputs = [{**given, "parameters": {"binary_data_size": size}}]
    head = json.dumps({"inputs": inputs, "outputs": wanted}).encode()
    return _post(
        f"/v2/models/{model}/infer", head + bytes(size), f"Inference-Header-Content-Length: {len(head)}"
    )


def picture(model: str, file: Path) -> bytes:
    return _post(f"/models/{model}/predict", file.read_bytes(), "Content-Type: image/jpeg")


def _post(path: str, body: bytes, header: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def measured(port: int, request: bytes) -> dict[str, float]:
    """The median, and those of the steps that the server says."""
    times: list[float] = []
    steps: dict[str, list[float]] = {}
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(WARM + COUNTED):
            began = time.perf_counter()
            connection.sendall(request)
            head = _answer(connection)
            if number >= WARM:
                times.append(1e3 * (time.perf_counter() - began))
                for name, took in _STEPS.findall(head):
                    steps.setdefault(name.decode(), []).append(float(took))
    return {"p50_ms": _middle(times), **{f"{name}_ms": _middle(each) for name, each in steps.items()}}


def _answer(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode(errors="replace"))
    found = _LENGTH.search(head)
    missing = int(found[1]) - len(body) if found else 0
    while missing > 0:
        missing -= len(_some(connection))
    return head


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise RuntimeError("the server closed the connection")
    return data


def _middle(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 3)


if __name__ == "__main__":
    port, model, photo = sys.argv[1:]
    requests = {"tensor": tensor(model), "jpeg": picture(model, Path(photo))}
    print(json.dumps({name: measured(int(port), request) for name, request in requests.items()}))
