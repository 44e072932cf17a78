"""Streams of a whole server whose clients do not read: others are served meanwhile, and they are let go.

What lies in memory meanwhile is counted in tests/frontend/grpc/test_unread_answers.py.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cv2
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as pb

from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.rpc_heads import Status
from carpool.frontend.grpc.stream_infer import TOO_SLOW
from frontend.grpc.front_end import SERVICE
from frontend.grpc.wire import data, framed, head, wire
from frontend.http.harness import Client, post
from live.server import PATIENCE_S, READY_S, Live, infer_path, serving
from waiting import until

LONG = """
class Model:
    def predict(self, n):
        for _ in range(int(n[0, 0])):
            yield {"y": [[7] * 16384]}
"""
SETTINGS = """
decoupled = true
[[input]]
name = "n"
datatype = "INT32"
shape = [1]
[[output]]
name = "y"
datatype = "INT32"
shape = [-1]
"""
ENDLESS = """
import os
class Model:
    def predict(self, n):
        number = 0
        while number < n[0, 0]:
            yield {"y": [[number]]}
            number += 1
        if n[0, 0] == 13:
            os._exit(3)
"""
UNREAD = 60
NO_WINDOW = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})


def asked(stream: int, count: int) -> bytes:
    request = pb.ModelInferRequest(model_name="long")
    request.inputs.add(name="n", datatype="INT32", shape=[1, 1]).contents.int_contents.append(count)
    return head(stream, path=SERVICE + "ModelStreamInfer") + data(
        stream, framed(request.SerializeToString()), 0
    )


def put(folder: Path, source: str, settings: str = SETTINGS) -> Path:
    (folder / "long" / "1").mkdir(parents=True)
    (folder / "long" / "model.toml").write_text(settings)
    (folder / "long" / "1" / "model.py").write_text(source)
    return folder


def asked_over_http(count: int) -> bytes:
    body = json.dumps({"n": count}).encode()
    head = b"POST /v2/models/long/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def numbers(server: Live, count: int) -> list[int]:
    """What a reader gets until its own stream has ended."""
    with server.connect() as reader:
        answer = reader.post("/v2/models/long/generate_stream", json.dumps({"n": count}).encode())
    assert answer.status == 200
    events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line]
    return [event.get("y", event) for event in events]


def numbers_over_grpc(server: Live, count: int) -> list[int]:
    with wire(cast(Any, SimpleNamespace(port=server.grpc_port))) as reader:
        reader.send(asked(1, count), data(1, b"", h2.END_STREAM))
        said = reader.answer(1)
    assert said.status == Status.OK
    found, left = [], said.data
    while left:
        size = int.from_bytes(left[1:5], "big")
        answer = pb.ModelStreamInferResponse.FromString(left[5 : 5 + size]).infer_response
        found.append(int.from_bytes(answer.raw_output_contents[0], "little"))
        left = left[5 + size :]
    return found


@pytest.mark.conformance
def test_many_streams_that_nobody_reads_leave_a_turn_to_who_reads(tmp_path: Path) -> None:
    """Their answers are so small that none of them is cut off meanwhile: one instance has them all."""
    with (
        serving(put(tmp_path / "models", ENDLESS), grpc=1, folder=tmp_path) as server,
        wire(cast(Any, SimpleNamespace(port=server.grpc_port)), NO_WINDOW) as unread,
        ExitStack() as clients,
    ):
        for number in range(UNREAD):
            clients.enter_context(server.connect()).send(asked_over_http(2_000_000_000))
            unread.send(asked(2 * number + 1, 2_000_000_000))
        assert numbers(server, 3) == [0, 1, 2]
        assert numbers_over_grpc(server, 3) == [0, 1, 2]
        assert numbers(server, 0) == []
        (worker,) = server.worker_pids
        assert numbers(server, 13)[:13] == list(range(13))  # and then the process dies, with all of them
        until(lambda: server.worker_pids not in ([worker], []), "another process is there")
        assert numbers(server, 2) == [0, 1]
        assert len(server.events("instance-lost")) == len(server.events("instance-replaced")) == 1


@pytest.mark.conformance
def test_streams_without_a_window_are_cut_off_and_others_are_served(tmp_path: Path) -> None:
    """The model has one instance: the request behind them is answered when they have let go of it."""
    with serving(put(tmp_path / "models", LONG), grpc=1, folder=tmp_path) as server:
        port = cast(Any, SimpleNamespace(port=server.grpc_port))
        with wire(port, NO_WINDOW) as client, server.connect() as other:
            for stream in (1, 3, 5):
                client.send(asked(stream, 2_000_000_000))
            answer = other.post("/v2/models/long/generate", json.dumps({"n": 1}).encode())
            assert answer.status == 200
            for said in client.answers(1, 3, 5).values():
                assert (said.status, said.fields["grpc-message"]) == (Status.UNAVAILABLE, TOO_SLOW)
            assert client.is_alive()


FLOATS = """
import numpy
class Model:
    def predict(self, n):
        for _ in range(int(n[0, 0])):
            yield {"y": numpy.random.rand(1, 16384).astype("float32")}
"""
SMALL = """
backend = "fake"
slo_ms = 1000
[fake]
curve = "1+0"
[[input]]
name = "x"
datatype = "UINT8"
shape = [4]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
TENSOR = {"name": "x", "datatype": "UINT8", "shape": [1, 4], "data": [1, 2, 3, 4]}


@contextmanager
def read_on(server: Live) -> Iterator[list[int]]:
    """A client that reads answers without end as fast as they come; how many bytes there were. Where the
    machine is too busy for it to keep up it is cut off, and asks again."""
    got, over = [0], threading.Event()

    def read() -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(asked_over_http(2_000_000_000))
                while not over.is_set() and (data := client.recv(1 << 20)):
                    got[0] += len(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield got
    finally:
        over.set()
        reader.join(PATIENCE_S)
        assert not reader.is_alive()


@pytest.mark.parametrize("unread", [0, pytest.param(UNREAD, marks=pytest.mark.conformance)])
def test_other_models_are_served_beside_streams_without_end(tmp_path: Path, unread: int) -> None:
    """One of them is read at full speed: its answers fill all that the engine may have unsent."""
    models = put(tmp_path / "models", FLOATS, SETTINGS.replace("INT32", "FP32"))
    (models / "small").mkdir()
    (models / "small" / "model.toml").write_text(SMALL)
    body = json.dumps({"inputs": [TENSOR]}).encode()
    with serving(models, frontends=1, folder=tmp_path) as server, ExitStack() as clients:
        for _ in range(unread):
            clients.enter_context(server.connect()).send(asked_over_http(2_000_000_000))
        got = clients.enter_context(read_on(server))
        polite = clients.enter_context(server.connect())
        until(lambda: got[0] > 1 << 20, "the stream flows")

        def ten_in_a_row() -> bool:
            return [polite.post(infer_path("small"), body).status for _ in range(10)] == [200] * 10

        until(ten_in_a_row, "ten are served one after the other")
        flowed = got[0]
        until(lambda: got[0] > flowed + (1 << 20), "the stream goes on", seconds=READY_S)


TELLER = """
from pathlib import Path
class Model:
    def setup(self, config):
        self.left = Path(config["path"]).parent.parent / "left"
    def predict(self, image):
        if image.any():
            yield {"text_output": [["light"]]}
            return
        try:
            while True:
                yield {"text_output": [["\\x01" * 4000]]}  # six times as long in JSON
        finally:
            with self.left.open("a") as file:
                file.write("left\\n")
"""
TELLER_SETTINGS = """
task = "read"
decoupled = true
[[input]]
name = "image"
datatype = "UINT8"
shape = [3, 32, 32]
[[output]]
name = "text_output"
datatype = "BYTES"
shape = [1]
"""


def png(grey: int) -> bytes:
    return bytes(cv2.imencode(".png", np.full((32, 32, 3), grey, np.uint8))[1])


def chat(picture: bytes) -> bytes:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "teller", "messages": messages, "stream": True}).encode()


@pytest.mark.conformance
def test_texts_that_nobody_reads_are_cut_off_and_others_are_read(tmp_path: Path) -> None:
    """The model never ends. Its generators are closed, and the clients' connections end without an end of
    their answer; one who comes meanwhile has his own."""
    folder = tmp_path / "models" / "teller"
    (folder / "1").mkdir(parents=True)
    (folder / "model.toml").write_text(TELLER_SETTINGS)
    (folder / "1" / "model.py").write_text(TELLER)
    ways: dict[str, Callable[[bytes], bytes]] = {
        "/read?model=teller&stream=1": lambda picture: picture,
        "/v1/chat/completions": chat,
    }
    with serving(tmp_path / "models", folder=tmp_path) as server, ExitStack() as clients:
        unread, left = [], tmp_path / "left"
        left.touch()
        before = left.read_text()  # it was tried while it was loaded
        for path, body in ways.items():
            for _ in range(2):
                client = Client("127.0.0.1", server.port, receive_buffer=4096)
                unread.append(clients.enter_context(client))
                client.send(post(path, body(png(0))))
        for path, body in ways.items():
            with server.connect() as reader:
                answer = reader.post(path, body(png(255)))
            assert answer.status == 200
            assert b"light" in answer.body
        until(lambda: left.read_text() == before + "left\n" * len(unread), "all are closed")
        for client in unread:
            with suppress(OSError):  # reset
                said = client.rest()
                assert not said.endswith(b"0\r\n\r\n")
