"""A Python model with many answers behind a whole server: the way of an answer from end to end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extensions.streams.test_generate import read_events
from frontend.http.harness import post
from frontend.whole_server import PATIENCE_S, WholeServer, whole_server
from live.server import NEEDS_CURL, resident_bytes
from waiting import until

COUNT = """
import os

class Model:
    def predict(self, n, pid=None):
        for number in range(int(n[0, 0])):
            yield {"y": [[number]], "pid": [[os.getpid()]]}
"""
SETTINGS = """
decoupled = true
max_batch = 4
[[input]]
name = "n"
datatype = "INT32"
shape = [1]
[[output]]
name = "y"
datatype = "INT32"
shape = [1]
[[output]]
name = "pid"
datatype = "INT32"
shape = [1]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    folder = tmp_path_factory.mktemp("models") / "count"
    (folder / "1").mkdir(parents=True)
    (folder / "model.toml").write_text(SETTINGS)
    (folder / "1" / "model.py").write_text(COUNT.replace(", pid=None", ""))
    with whole_server(folder.parent) as running:
        yield running


def opened(server: WholeServer, count: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", "/v2/models/count/generate_stream", json.dumps({"n": count}))
    return connection


def ask(server: WholeServer, count: int) -> list[dict[str, Any]]:
    connection = opened(server, count)
    response = connection.getresponse()
    said = response.read()
    connection.close()
    assert response.status == 200, said
    return read_events(said)


@pytest.mark.parametrize("count", [0, 1, pytest.param(10_000, marks=pytest.mark.conformance)])
def test_every_answer_arrives_once_and_in_order(server: WholeServer, count: int) -> None:
    assert [one["y"] for one in ask(server, count)] == list(range(count))


def test_a_client_that_leaves_frees_its_place(server: WholeServer) -> None:
    connection = opened(server, 2_000_000_000)
    assert connection.getresponse().read(64)
    connection.close()
    assert len(ask(server, 3)) == 3  # there is one instance, which has it now


@pytest.mark.conformance
def test_a_client_that_does_not_read_is_cut_off_and_fills_no_memory(server: WholeServer) -> None:
    """There is one instance, which the next has when that is done: what was sent is in sockets by then."""
    before = resident_bytes(os.getpid())
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post("/v2/models/count/generate_stream", b'{"n": 2000000000}'))
        assert len(ask(server, 3)) == 3
    assert resident_bytes(os.getpid()) - before < 64 << 20


def test_a_process_that_is_killed_between_answers_is_one_error(server: WholeServer) -> None:
    connection = opened(server, 2_000_000_000)
    response = connection.getresponse()
    line = response.readline()
    os.kill(json.loads(line.removeprefix(b"data: "))["pid"], signal.SIGKILL)
    *_, last = read_events(b"data: " + response.read().split(b"data: ", 1)[1])
    connection.close()
    assert "died" in last["error"]

    def again() -> bool:
        try:
            return len(ask(server, 2)) == 2
        except AssertionError:
            return False  # it is being replaced

    until(again)


def test_settings_say_that_it_is_decoupled(server: WholeServer) -> None:
    with server.connect() as client:
        config = json.loads(client.get("/v2/models/count/config").body)
        assert config["model_transaction_policy"] == {"decoupled": True}


@NEEDS_CURL
def test_curl(server: WholeServer, tmp_path: Path) -> None:
    command = ["curl", "-sN", "-d", '{"n": 3}', f"http://{server.url}/v2/models/count/generate_stream"]
    said = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S).stdout
    assert [one["y"] for one in read_events(said)] == [0, 1, 2]
