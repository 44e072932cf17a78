"""One client asks for far too much, in several ways: others are served meanwhile. Only counts matter."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import orjson
import pytest

from frontend.http.harness import Client
from live.server import PATIENCE_S, Live, infer_path, serving
from waiting import until

MODEL = """
backend = "fake"
slo_ms = 400
max_batch = 16
[fake]
curve = "{curve}"
[[input]]
name = "x"
datatype = "UINT8"
shape = [1000]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
IMAGE = np.zeros(1000, np.uint8).tobytes()
TENSOR = {"name": "x", "datatype": "UINT8", "shape": [1, 1000], "parameters": {"binary_data_size": 1000}}
HEAD = orjson.dumps({"inputs": [TENSOR]})
LENGTH = b"Inference-Header-Content-Length: %d\r\n" % len(HEAD)
PAGES = 2000  # far more than are written in the time that the others take


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("isolation")
    for name, curve in (("flooded", "60+4"), ("small", "1+0")):
        (folder / "models" / name).mkdir(parents=True)
        (folder / "models" / name / "model.toml").write_text(MODEL.format(curve=curve))
    with serving(folder / "models", frontends=1, folder=folder) as running:
        yield running


def ask(client: Client, model: str, source: str = "") -> int:
    named = b"X-Carpool-Source: %b\r\n" % source.encode() if source else b""
    return client.post(infer_path(model), HEAD + IMAGE, LENGTH + named).status


@contextmanager
def flood(server: Live, connections: int, source: str = "") -> Iterator[Counter[int]]:
    """So many clients that ask again as soon as they are answered."""
    seen: Counter[int] = Counter()
    lock, over = threading.Lock(), threading.Event()

    def live() -> None:
        with server.connect() as client:
            while not over.is_set():
                status = ask(client, "flooded", source)
                with lock:
                    seen[status] += 1

    threads = [threading.Thread(target=live) for _ in range(connections)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("model", "flooding", "behaved"),
    [("small", "", ""), ("flooded", "loud", "quiet")],
    ids=["model", "source"],
)
def test_beside_a_flood_the_other_is_served(server: Live, model: str, flooding: str, behaved: str) -> None:
    with flood(server, 60, flooding) as seen, server.connect() as client:
        until(lambda: seen[429] > 200, "the flood is refused")

        def ten_in_a_row() -> bool:
            """Where other programs keep the server from running, one of them may be late."""
            return [ask(client, model, behaved) for _ in range(10)] == [200] * 10

        until(ten_in_a_row, "ten are served one after the other")
        until(lambda: seen[200] > 0, "the flood is not locked out either")


@pytest.mark.parametrize("path", ["/metrics", "/v2/models/stats"])
def test_documents_come_after_inference(server: Live, path: str) -> None:
    with ExitStack() as stack:
        greedy = [stack.enter_context(server.connect()) for _ in range(2)]
        if path == "/metrics":
            greedy.append(stack.enter_context(Client("127.0.0.1", server.metrics_port)))
        for client in greedy:
            client.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode() * PAGES)
        polite = stack.enter_context(server.connect())
        until(lambda: [ask(polite, "small") for _ in range(10)] == [200] * 10, "ten are served")
        for client in greedy:
            assert client.response().status == 200
            client.reset()  # the rest is no longer wanted
