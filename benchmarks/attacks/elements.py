"""Requests whose cost is in the number of their elements, and requests of many megabytes within every limit.

Each comes from an address of its own. A client without a key is known by its address, so the honest client
beside it is another client.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from attacks.attacker import Pace, Ports, end_with_parent, post, varint
from attacks.isolation import ADDRESS, connect, large_pictures
from attacks.isolation_rows import MANY, MANY_CODE, STEADY
from attacks.one_call import OneCall

WIDE_OUTPUT = 5_500_000  # numbers of four bytes: 22 MB
GENERATED_OUTPUT = 8_250_000
MEGABYTE = 1_000_000
_PATIENCE_S = 60.0
_SENT_AT_ONCE = 1 << 18
_LONGEST_WAIT_S = 5.0
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_RAW = b"Inference-Header-Content-Length: 0\r\n"
_GZIP = b"Content-Encoding: gzip\r\n"
JSON_FIELDS = b"Content-Type: application/json\r\n"

_BATCHED = """backend = "fake"
max_batch = 4
[fake]
curve = "1+1"
"""


def _model(inputs: str, outputs: str, head: str = _BATCHED) -> str:
    return f"{head}[[input]]\n{inputs}\n[[output]]\n{outputs}\n"


def _tensor(name: str, datatype: str, length: int) -> str:
    return f'name = "{name}"\ndatatype = "{datatype}"\nshape = [{length}]'


MODELS = {
    "steady": STEADY,
    "wide": _model(_tensor("x", "UINT8", 64), _tensor("y", "FP32", WIDE_OUTPUT)),
    "wider": _model(_tensor("x", "UINT8", 1), _tensor("y", "FP32", GENERATED_OUTPUT)),
    "words": _model(_tensor("x", "BYTES", -1), _tensor("y", "FP32", 4)),
    "echo30": _model(_tensor("x", "UINT8", 30 * MEGABYTE), _tensor("y", "UINT8", 30 * MEGABYTE)),
    "echo10": _model(_tensor("x", "UINT8", 10 * MEGABYTE), _tensor("y", "UINT8", 10 * MEGABYTE)),
    "pictures": 'task = "classify"\nslo_ms = 1000\n'
    + _model('name = "image"\ndatatype = "FP32"\nshape = [3, 224, 224]', _tensor("scores", "FP32", 10)),
}


def write_models(models: Path) -> None:
    models.mkdir(parents=True)
    for name, text in MODELS.items():
        (models / name).mkdir()
        (models / name / "model.toml").write_text(text)
    (models / "many" / "1").mkdir(parents=True)
    (models / "many" / "model.toml").write_text(MANY)
    (models / "many" / "1" / "model.py").write_text(MANY_CODE)
    (models / "dotted").mkdir()
    (models / "dotted" / "model.toml").write_text("a" + ".a" * 19_999 + " = 1\n" + MODELS["steady"])
    (models / "labelled").mkdir()
    (models / "labelled" / "model.toml").write_text(
        'labels = "labels.txt"\n' + MODELS["pictures"].replace("[10]", "[3]")
    )
    with (models / "labelled" / "labels.txt").open("w") as file:
        for _ in range(100):
            file.write("a\n" * 100_000)


# ── one request each ──


def _field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


@cache
def _zipped_words(elements: int) -> tuple[bytes, bytes]:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, elements]}
    tensor["parameters"] = {"binary_data_size": 4 * elements}
    head = _json({"inputs": [tensor]})
    fields = _GZIP + b"Inference-Header-Content-Length: %d\r\n" % len(head)
    return fields, gzip.compress(head + bytes(4 * elements), 9)


def empty_words(elements: int, ports: Ports) -> None:
    fields, body = _zipped_words(elements)
    _send("/v2/models/words/infer", fields, body, ports.http)


def classification(count: int, ports: Ports) -> None:
    output = {"name": "y", "parameters": {"classification": count}}
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, 64], "data": [0] * 64}
    _send("/v2/models/wide/infer", JSON_FIELDS, _json({"inputs": [tensor], "outputs": [output]}), ports.http)


def classification_of_a_detector(ports: Ports) -> None:
    """The demo's detector: 8 × 3,549 × 80 scores, of which each is asked for."""
    tensor = {"name": "images", "datatype": "FP32", "shape": [8, 3, 416, 416]}
    body = bytes(8 * 3 * 416 * 416 * 4)
    tensor["parameters"] = {"binary_data_size": len(body)}
    output = {"name": "scores", "parameters": {"classification": 1_000_000}}
    head = _json({"inputs": [tensor], "outputs": [output]})
    fields = b"Inference-Header-Content-Length: %d\r\n" % len(head)
    _send("/v2/models/nanodet/infer", fields, head + body, ports.http)


def json_answer(ports: Ports) -> None:
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, 64], "data": [0] * 64}
    _send("/v2/models/wide/infer", JSON_FIELDS, _json({"inputs": [tensor]}), ports.http)


def generated_document(ports: Ports) -> None:
    _send("/v2/models/wider/generate", JSON_FIELDS, _json({"x": 1}), ports.http)


@cache
def _typed(field: int, element: bytes, count: int) -> bytes:
    """A ModelInferRequest, compressed: `count` elements in one field of `contents`, packed unless BYTES."""
    datatype = {1: b"BOOL", 4: b"UINT32", 8: b"BYTES"}[field]
    contents = (varint(field << 3 | 2) + element) * count if field == 8 else _field(field, element * count)
    shape = _field(3, varint(1) + varint(count))
    tensor = _field(1, b"x") + _field(2, datatype) + shape + _field(5, contents)
    return gzip.compress(_field(1, b"words") + _field(5, tensor), 9)


def typed_contents(field: int, ports: Ports) -> None:
    _call(_typed(field, b"\0", 30_000_000), ports)


@cache
def _zipped_raw_words(elements: int) -> bytes:
    tensor = _field(1, b"x") + _field(2, b"BYTES") + _field(3, varint(1) + varint(elements))
    return gzip.compress(_field(1, b"words") + _field(5, tensor) + _field(7, bytes(4 * elements)), 9)


def empty_raw_words(elements: int, ports: Ports) -> None:
    _call(_zipped_raw_words(elements), ports)


def _load(model: str, ports: Ports) -> None:
    _send(f"/v2/repository/models/{model}/load", JSON_FIELDS, b"{}", ports.http)


def labels_and_loads(ports: Ports) -> None:
    """A model of ten million labels is loaded, and another one again and again beside it."""
    _load("labelled", ports)
    for _ in range(8):
        _load("pictures", ports)


def _large_body(model: str, size: int, ports: Ports) -> bool:
    """In and out as raw bytes: the default way of Triton's clients."""
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, size], "parameters": {"binary_data_size": size}}
    head = _json({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    fields = b"Inference-Header-Content-Length: %d\r\n" % len(head)
    return _send(f"/v2/models/{model}/infer", fields, head + bytes(size), ports.http)


@cache
def _large_message(size: int) -> bytes:
    tensor = _field(1, b"x") + _field(2, b"UINT8") + _field(3, varint(1) + varint(size))
    return _field(1, b"echo30") + _field(5, tensor) + _field(7, bytes(size))


def _send(path: str, fields: bytes, body: bytes, port: int) -> bool:
    """Send one request, and read its answer to the end; return whether it succeeded."""
    with contextlib.closing(connect(port, ADDRESS)) as client:
        client.settimeout(_PATIENCE_S)
        client.sendall(post(path, len(body), fields + b"Connection: close\r\n"))
        send_unless_answered(client, body)
        buffer = bytearray(1 << 20)
        head = client.recv(1 << 16)
        while client.recv_into(buffer):
            pass
    good = head.startswith(b"HTTP/1.1 200")
    if not good:
        time.sleep(_after(head))
    return good


def send_unless_answered(client: socket.socket, body: bytes) -> None:
    """Send a body, or as much of it as the server wants before it answers."""
    view = memoryview(body)
    with contextlib.suppress(ConnectionError):  # the answer may be here all the same
        for start in range(0, len(view), _SENT_AT_ONCE):
            if select.select([client], (), (), 0)[0]:
                return
            client.sendall(view[start : start + _SENT_AT_ONCE])


def _after(head: bytes) -> float:
    """A client that was rejected waits as long as the answer says, or a tenth of a second."""
    found = head.lower().partition(b"\r\nretry-after:")[2].partition(b"\r\n")[0].strip()
    return min(_LONGEST_WAIT_S, float(found)) if found.isdigit() else 0.1


def _call(message: bytes, ports: Ports, *, compressed: bool = True) -> bool:
    with contextlib.closing(connect(ports.grpc, ADDRESS)) as client:
        client.settimeout(_PATIENCE_S)
        call = OneCall(client)
        good = call.run(_INFER, message, compressed=compressed)
    if not good:
        time.sleep(min(_LONGEST_WAIT_S, call.retry_after_s))
    return good


def large_call(ports: Ports) -> bool:
    """Raw bytes in and out as one gRPC message each, on a connection of its own."""
    return _call(_large_message(30 * MEGABYTE), ports, compressed=False)


def unread_events(connections: int, ports: Ports) -> None:
    """Streams of events that are never read."""
    body = _json({"count": 100_000})
    with contextlib.ExitStack() as held:
        for _ in range(connections):
            client = held.enter_context(connect(ports.http))
            client.sendall(post("/v2/models/many/generate_stream", len(body)) + body)
        time.sleep(4.0)


def unnamed_flood(ports: Ports) -> None:
    """Small requests as fast as they are answered, on 16 connections of one address."""
    body = bytes(64)
    request = post("/v2/models/steady/infer", len(body), _RAW) + body
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(connect(ports.http)) for _ in range(16)]
        for client in clients:
            client.sendall(request * 4)
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            for client in clients:
                if client.recv(1 << 16):
                    client.sendall(request)


# ── how they are sent ──


@dataclass(frozen=True)
class Kind:
    """`act` is one request or one round of them, sent `times` times by each of so many `clients`, in turns;
    0 times: until the end."""

    act: Callable[[Ports], object]  # False: it was rejected
    times: int = 1
    clients: int = 1
    honest: tuple[str, ...] = ("http", "grpc")
    prepare: Callable[[], object] = int
    most_late: int = 3
    most_mb: float = 400.0
    few: int = 0  # clients whose throughput these many must keep; 0: not measured


def nothing(ports: Ports) -> None:
    del ports
    time.sleep(0.1)


def _pictures(ports: Ports) -> None:
    large_pictures(8, "", ports, Pace())


KINDS: dict[str, Kind] = {
    "no attack": Kind(nothing, times=0),
    "12,000,000 empty BYTES elements": Kind(
        partial(empty_words, 12_000_000), prepare=partial(_zipped_words, 12_000_000)
    ),
    "2,000,000 empty BYTES elements": Kind(
        partial(empty_words, 2_000_000), prepare=partial(_zipped_words, 2_000_000)
    ),
    "gRPC: 12,000,000 empty BYTES elements": Kind(
        partial(empty_raw_words, 12_000_000), prepare=partial(_zipped_raw_words, 12_000_000)
    ),
    "classification=1,000,000,000 of 22 MB": Kind(partial(classification, 1_000_000_000)),
    "classification=1 of 22 MB, again and again": Kind(partial(classification, 1), times=0),
    "classification of the demo's detector": Kind(classification_of_a_detector),
    "gRPC: 30,000,000 bytes_contents": Kind(
        partial(typed_contents, 8), prepare=partial(_typed, 8, b"\0", 30_000_000)
    ),
    "gRPC: 30,000,000 uint_contents": Kind(
        partial(typed_contents, 4), prepare=partial(_typed, 4, b"\0", 30_000_000)
    ),
    "gRPC: 30,000,000 bool_contents": Kind(
        partial(typed_contents, 1), prepare=partial(_typed, 1, b"\0", 30_000_000)
    ),
    "JSON of 22 MB, again and again": Kind(json_answer, times=0),
    "generated document of 33 MB, again and again": Kind(generated_document, times=0),
    "8 × images of 49 megapixels": Kind(_pictures, times=0, honest=("pictures",), most_late=3, most_mb=600.0),
    "a flood from another address": Kind(unnamed_flood, times=0),
    "model.toml with 20,000 dotted parts": Kind(partial(_load, "dotted")),
    "10,000,000 labels, then other loads": Kind(labels_and_loads),
    "300 streams of events, unread": Kind(partial(unread_events, 300), times=0),
    "6 clients × 30 MB": Kind(
        partial(_large_body, "echo30", 30 * MEGABYTE), times=0, clients=6, most_late=5, most_mb=600.0, few=2
    ),
    "24 clients × 10 MB": Kind(
        partial(_large_body, "echo10", 10 * MEGABYTE), times=0, clients=24, most_late=5, most_mb=600.0, few=2
    ),
    "gRPC: 6 clients × 30 MB": Kind(
        large_call,
        times=0,
        clients=6,
        prepare=partial(_large_message, 30 * MEGABYTE),
        most_late=5,
        most_mb=600.0,
        few=2,
    ),
}


def run(kind: Kind, clients: int, ports: Ports, armed: Event, go: Event, answered: Synchronized[int]) -> None:
    """The whole life of an attacker's process: `clients` threads that send. It ends with the process that
    started it, at the latest."""
    end_with_parent()
    kind.prepare()
    armed.set()
    go.wait()
    threads = [
        threading.Thread(target=_send_all, args=(kind, ports, answered), daemon=True) for _ in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send_all(kind: Kind, ports: Ports, answered: Synchronized[int]) -> None:
    sent = 0
    while kind.times == 0 or sent < kind.times:
        sent += 1
        good: object = False
        with contextlib.suppress(OSError):  # a connection that the server ends is an answer, too
            good = kind.act(ports)
        with answered.get_lock():
            answered.value += good is not False
        time.sleep(0.001)
