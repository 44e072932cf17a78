"""The real HTTP server and the real app on a uvloop thread, with a fake door and some models behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from carpool.config.server import ServerSettings
from carpool.errors import ModelError
from carpool.frontend.access.guard import Guard
from carpool.frontend.calls.front_part import StartedWith
from carpool.frontend.http.app import HttpApp
from carpool.frontend.http.http_service import SharedPage
from carpool.observe.counters import Table, table_bytes
from carpool.observe.prometheus import Exposition
from carpool.types import Array, Datatype, TensorSpec
from frontend.fake_door import FakeCall, FakeDoor, FakeModel, echo
from frontend.http.harness import Client, Response, Serving, serving
from waiting import until

LABELS = ("cat", "dog", "owl", "elk")
IMAGE = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
BINARY_IMAGE = {
    "name": "image",
    "datatype": "UINT8",
    "shape": [1, 2, 3],
    "parameters": {"binary_data_size": 6},
}


def scores(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Per image: its sum and 1, 2, 3."""
    images = inputs["image"]
    sums = images.reshape(len(images), -1).sum(1, dtype=np.float32)
    return {"scores": np.stack([sums, *(np.full(len(images), n) for n in (1, 2, 3))], 1)}


def image_model(name: str, **settings: Any) -> FakeModel:
    return FakeModel(
        name,
        [TensorSpec("image", Datatype.UINT8, (2, 3))],
        [TensorSpec("scores", Datatype.FP32, (4,))],
        scores,
        labels={"scores": LABELS},
        **settings,
    )


def sum_and_difference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}


def broken(_inputs: Mapping[str, Array]) -> dict[str, Array]:
    raise ModelError("the model raised ValueError: no")


def models() -> list[FakeModel]:
    pair = [TensorSpec(name, Datatype.INT32, (-1,)) for name in ("a", "b")]
    results = [TensorSpec(name, Datatype.INT32, (-1,)) for name in ("sum", "difference")]
    number = TensorSpec("y", Datatype.FP32, (1,))
    return [
        image_model("image"),
        image_model("image-knobs", mode="knobs"),
        image_model("image-eager", mode="eager"),
        FakeModel("pair", pair, results, sum_and_difference),
        FakeModel("nan", [], [number], lambda _inputs: {"y": [[np.nan]]}),
        FakeModel("broken", [], [number], broken),
        echo("versions", Datatype.FP32, version="2"),
        echo("versions", Datatype.FP32, version="10"),
        echo("unbatched", Datatype.INT64, (2,), max_batch=0),
        *(echo(f"echo-{datatype.value}", datatype) for datatype in Datatype),
    ]


@dataclass
class FrontEnd:
    server: Serving
    door: FakeDoor
    app: HttpApp

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def connect(self) -> Client:
        return self.server.connect()

    def run(self, function: Callable[[], Any]) -> Any:
        """In the loop's thread."""
        return self.server.call(function)

    def wait_for_call(self) -> FakeCall:
        until(lambda: bool(self.door.calls) and self.door.calls[-1].is_ready)
        return self.door.calls[-1]

    def until_slots_are_back(self) -> None:
        until(lambda: not self.door.slots_in_use)

    def count(self, model: str, metric: str, version: str = "1") -> float:
        """One number of the metrics page."""
        for line in self.metrics().splitlines():
            if line.startswith(f'{metric}{{model="{model}",version="{version}"'):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"{metric} of {model} is not on the page")

    def metrics(self) -> str:
        with self.connect() as client:
            return client.get("/metrics").body.decode()


@contextlib.contextmanager
def front_end(
    *given: FakeModel,
    slots: int = 64,
    max_body_bytes: int = 1 << 20,
    guard: Guard | None = None,
    picture_hosts: Collection[str] = (),
    settings: ServerSettings | None = None,
    **limits: Any,
) -> Iterator[FrontEnd]:
    table = Table(bytearray(table_bytes(1)))
    door = FakeDoor(*(given or models()), slots=slots, table=table)
    page = SharedPage(Exposition(table, "test").pieces)
    app = HttpApp(
        door,
        table.block(0),
        page,
        table=table,
        max_body_bytes=max_body_bytes,
        guard=guard,
        picture_hosts=picture_hosts,
        started=StartedWith(settings or ServerSettings()),
    )
    with serving(app, **limits) as server:
        try:
            yield FrontEnd(server, door, app)
            if any(
                model.cache is not None for model in given
            ):  # which audits its answers in threads, and nobody waits for that
                server.call(lambda: None)  # what is begun right behind the last answer has begun
                until(lambda: not door.slots_in_use)
        finally:
            server.call(app.close)
        if not server.stopped:
            server.stop(0.0)
        until(lambda: not door.slots_in_use, "slots leaked")  # of clients that left just now


def infer_body(inputs: list[dict[str, Any]], tail: bytes = b"", **rest: Any) -> tuple[bytes, bytes]:
    """A body, and the header field that goes with it."""
    head = orjson.dumps({**rest, "inputs": inputs})
    field = b"Inference-Header-Content-Length: %d\r\n" % len(head)
    return head + tail, field if tail else b""


def image_body(tail: bytes = IMAGE.tobytes(), **rest: Any) -> tuple[bytes, bytes]:
    return infer_body([BINARY_IMAGE], tail, **rest)


def infer(client: Client, model: str, sent: tuple[bytes, bytes], extra: bytes = b"") -> Response:
    body, field = sent
    return client.post(f"/v2/models/{model}/infer", body, field + extra)


def error_of(response: Response) -> dict[str, Any]:
    """The error body, which has the same shape everywhere."""
    assert response.fields["content-type"] == "application/json"
    document: dict[str, Any] = orjson.loads(response.body)
    if type(document["error"]) is dict:  # in OpenAI's words, below /v1
        said = document["error"]
        document = {"error": said["message"], "reason": said["code"], "field": said["param"]}
    assert type(document["error"]) is str
    assert document["error"]
    assert type(document["reason"]) is str
    return document


def outputs_of(response: Response) -> dict[str, Any]:
    """An answer in JSON, its outputs by name."""
    assert response.status == 200, response.body
    assert response.fields["content-type"] == "application/json"
    document = orjson.loads(response.body)
    return {output["name"]: output["data"] for output in document["outputs"]}
