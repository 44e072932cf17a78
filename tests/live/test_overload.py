"""A promise under far more traffic than it can carry, through real sockets: some are served, the rest hear no
early, with a reason and a time to come back. Only statuses, fields and counts are looked at, and no times."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import pytest

from frontend.http.harness import Client, Response, post
from live.server import LAYOUTS, PATIENCE_S, Live, error_of, infer_path, serving
from waiting import until

MODEL = """
backend = "fake"
slo_ms = 200
max_batch = 64
[fake]
curve = "16+4"
[[input]]
name = "x"
datatype = "UINT8"
shape = [1000]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
PATH = infer_path("slow")
IMAGE = np.zeros(1000, np.uint8).tobytes()
HEAD = orjson.dumps(
    {
        "inputs": [
            {"name": "x", "datatype": "UINT8", "shape": [1, 1000], "parameters": {"binary_data_size": 1000}}
        ]
    }
)
LENGTH = b"Inference-Header-Content-Length: %d\r\n" % len(HEAD)
REASONS = {"cannot-finish", "overload", "given-up", "over-share", "queue-full"}
TIMING = re.compile(
    r"decode;dur=\d+\.\d+, queue;dur=(\d+\.\d+), infer;dur=(\d+\.\d+), post;dur=\d+\.\d+, "
    r"batch;desc=\"(\d+)\""
)


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("overload")
    model = folder / "models" / "slow"
    model.mkdir(parents=True)
    (model / "model.toml").write_text(MODEL)
    with serving(folder / "models", frontends=request.param, folder=folder) as running:
        yield running


def ask(client: Client, extra: bytes = b"") -> Response:
    return client.post(PATH, HEAD + IMAGE, LENGTH + extra)


def check(response: Response) -> None:
    """Whatever is said, it is said completely."""
    if response.status == 200:
        matched = TIMING.fullmatch(response.fields["server-timing"])
        assert matched, response
        assert 1 <= int(matched[3]) <= 64
        assert float(matched[2]) > 0
        return
    assert response.status in (429, 504), response
    document = error_of(response, response.status)
    if response.status == 429:
        assert document["reason"] in REASONS, document
        assert "slow" in document["error"]
        # Whoever would be late on an idle server as well is not told to come back.
        assert ("retry-after" in response.fields) is ("retry_after_s" in document)


def check_overload(response: Response) -> None:
    check(response)
    if response.status == 429:
        assert int(response.fields["retry-after"]) >= 1
        assert orjson.loads(response.body)["retry_after_s"] > 0


def burst(server: Live, connections: int, requests: int) -> Counter[int]:
    """Every connection sends request after request and stays open through every answer."""
    seen: Counter[int] = Counter()
    lock = threading.Lock()
    together = threading.Barrier(connections)

    def client(_number: int) -> None:
        with server.connect() as one:
            together.wait(PATIENCE_S)
            for _ in range(requests):
                response = ask(one)
                check_overload(response)
                assert response.fields.get("connection") != "close"
                with lock:
                    seen[response.status] += 1

    with ThreadPoolExecutor(connections) as pool:
        for done in [pool.submit(client, number) for number in range(connections)]:
            done.result(3 * PATIENCE_S)
    return seen


def test_a_burst_far_beyond_capacity(server: Live) -> None:
    shed = server.metric("carpool_shed_total", model="slow")
    seen = burst(server, connections=100, requests=4)
    assert seen.total() == 400
    for _ in range(9):  # one is enough, unless the clients are held up and so ask for less
        if seen[200] > 0 and seen[429] > 100:
            break
        seen += burst(server, connections=100, requests=4)
    assert seen[200] > 0
    assert seen[429] > 100
    refused = seen[429] + seen[504]
    until(lambda: server.metric("carpool_shed_total", model="slow") == shed + refused, "all counted")
    server.until_metric(0, "nv_inference_pending_request_count", model="slow")
    # Afterwards it serves as if nothing had been.
    with server.connect() as client:
        until(lambda: ask(client).status == 200, "it serves again")


def test_a_hopeless_deadline_is_refused(server: Live) -> None:
    """One image alone takes 20 ms."""
    with server.connect() as client:
        for _ in range(3):
            response = ask(client, b"X-Carpool-Deadline-Ms: 5\r\n")
            check(response)
            assert response.status in (429, 504)
            if response.status == 429:
                assert error_of(response, 429, "cannot-finish")["predicted_ms"] > 5
        until(lambda: ask(client, b"X-Carpool-Deadline-Ms: 150\r\n").status == 200, "one in time")


def test_a_hopeless_timeout_is_refused(server: Live) -> None:
    """The protocol's own parameter, in microseconds."""
    head = orjson.dumps({**orjson.loads(HEAD), "parameters": {"timeout": 5000}})
    with server.connect() as client:
        field = b"Inference-Header-Content-Length: %d\r\n" % len(head)
        response = client.post(PATH, head + IMAGE, field)
        check(response)
        assert response.status in (429, 504)
        until(lambda: ask(client).status == 200, "one in time")


def test_answers_say_where_the_time_went(server: Live) -> None:
    """Three at once: what they waited is in the answers, and how many rode together."""
    clients = [server.connect() for _ in range(3)]

    def all_in_time() -> bool:
        for client in clients:
            client.send(post(PATH, HEAD + IMAGE, LENGTH))
        responses = [client.response() for client in clients]
        if [response.status for response in responses] != [200, 200, 200]:
            return False
        timings = [TIMING.fullmatch(response.fields["server-timing"]) for response in responses]
        assert all(timings)
        assert max(float(timing[1]) for timing in timings if timing) > 0
        return True

    until(all_in_time, "three in time")
    for client in clients:
        client.socket.close()


def test_the_body_of_a_refused_request_need_not_be_sent(server: Live) -> None:
    """With `Expect: 100-continue` the refusal comes in place of the 100."""
    crowd = [server.connect() for _ in range(100)]
    try:
        for _ in range(50):  # the gate closes for moments only: ask until it is found closed
            for client in crowd:
                client.send(post(PATH, HEAD + IMAGE, LENGTH))
            with server.connect() as polite:
                head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
                head += b"%bExpect: 100-continue\r\n\r\n"
                polite.send(head % (PATH.encode(), len(HEAD + IMAGE), LENGTH))
                first = polite.response(head_only=True)
            for client in crowd:
                check(client.response())
            if first.status == 429:
                return
            assert first.status == 100
        raise AssertionError("the gate was never found closed")
    finally:
        for client in crowd:
            client.socket.close()


def test_a_newer_frame_of_a_camera_replaces_the_one_that_waits(server: Live) -> None:
    """From ten connections at once, until one was replaced: who waits is told, and somebody is answered."""
    who = b"X-Carpool-Source: gate\r\nX-Carpool-Latest: 1\r\n"
    seen: Counter[int] = Counter()

    def send(_: int) -> Response:
        with server.connect() as client:
            return ask(client, who)

    def burst() -> bool:
        with ThreadPoolExecutor(10) as pool:
            for response in pool.map(send, range(20)):
                seen[response.status] += 1
                if response.status == 409:
                    document = error_of(response, 409)
                    assert document["reason"] == "replaced"
                    assert "a newer frame of source 'gate'" in document["error"]
        return seen[409] > 0

    until(burst, "a frame that was replaced")
    assert seen[200] > 0
    assert set(seen) <= {200, 409, 429, 504}
    with server.connect() as client:
        document = error_of(ask(client, b"X-Carpool-Latest: 1\r\n"), 400)
    assert document["field"] == "X-Carpool-Latest"
