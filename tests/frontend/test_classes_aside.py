"""The classes of a large output are found in a thread, over both protocols: in a loop all would wait."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.errors import Cancelled
from carpool.frontend.clients.accounts import Accounts
from carpool.types import Array, Datatype
from carpool.wire import classes
from carpool.wire.strings import Between
from extensions.cache.test_cached import EXACT
from frontend.fake_door import echo
from frontend.grpc.front_end import channel
from frontend.grpc.front_end import front_end as over_grpc
from frontend.grpc.front_end import infer as ask
from frontend.http.front_end import front_end, infer, infer_body
from frontend.http.harness import post
from waiting import until

LARGE, SMALL = 30_000, 1000
Looked = list[tuple[bool, int]]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    """Whether the best were looked for in a thread beside the loop's, and of how many values."""
    noted: Looked = []
    best = classes._best

    def look(rows: Array, k: int, between: Between) -> Array:
        noted.append((asyncio._get_running_loop() is None, rows.size))
        return best(rows, k, between)

    monkeypatch.setattr(classes, "_best", look)
    return noted


def values_of(size: int) -> Array:
    return (np.arange(size) % 7 == 5).astype(np.float32)[None] * 7


def test_over_http(looked: Looked) -> None:
    outputs = [{"name": "y", "parameters": {"classification": 2}}]
    models = echo("plain", Datatype.FP32), echo("cached", Datatype.FP32, cache=EXACT)
    with front_end(*models) as front, front.connect() as client:
        for model in ("plain", "cached"):
            for size in (LARGE, SMALL):
                tail = values_of(size).tobytes()
                listed = {"name": "x", "datatype": "FP32", "shape": [1, size]}
                listed["parameters"] = {"binary_data_size": len(tail)}
                answer = infer(client, model, infer_body([listed], tail, outputs=outputs))
                assert answer.status == 200, answer.body
                found = orjson.loads(answer.body)["outputs"][0]
                assert (found["shape"], found["data"]) == ([1, 2], ["7.000000:5", "7.000000:12"])
        assert looked == 2 * [(True, LARGE), (False, SMALL)]
        front.until_slots_are_back()


def test_the_search_ends_when_its_client_leaves_and_is_charged_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def look(_rows: Array, _k: int, between: Between) -> Array:
        begun.set()
        try:
            for _ in range(100_000):
                between()
                threading.Event().wait(0.001)
        except Cancelled:
            ended.set()
            raise
        raise AssertionError("nobody has ended it")

    monkeypatch.setattr(classes, "_best", look)
    outputs = [{"name": "y", "parameters": {"classification": 2}}]
    with front_end(echo("plain", Datatype.FP32)) as front:
        accounts = Accounts(9)
        front.run(lambda: front.app.charge_to(accounts))
        tail = values_of(LARGE).tobytes()
        listed = {"name": "x", "datatype": "FP32", "shape": [1, LARGE]}
        listed["parameters"] = {"binary_data_size": len(tail)}
        with front.connect() as client:
            body, length = infer_body([listed], tail, outputs=outputs)
            client.send(post("/v2/models/plain/infer", body, length))
            assert begun.wait(60.0)
        assert ended.wait(60.0)
        front.until_slots_are_back()
        until(lambda: len(accounts) == 1)
        assert "127.0.0.1" in accounts._accounts


def test_over_grpc(looked: Looked) -> None:
    with over_grpc(echo("plain", Datatype.FP32)) as front, channel(front) as connected:
        for size in (LARGE, SMALL):
            request = pb.ModelInferRequest(model_name="plain")
            request.inputs.add(name="x", datatype="FP32", shape=[1, size])
            request.raw_input_contents.append(values_of(size).tobytes())
            request.outputs.add(name="y").parameters["classification"].int64_param = 2
            answer = ask(connected, request)
            framed = b"".join(len(one).to_bytes(4, "little") + one for one in (b"7.000000:5", b"7.000000:12"))
            assert answer.raw_output_contents[0] == framed
        assert looked == [(True, LARGE), (False, SMALL)]
        front.until_slots_are_back()
